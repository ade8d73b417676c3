"""Documents as tables for terminals."""
