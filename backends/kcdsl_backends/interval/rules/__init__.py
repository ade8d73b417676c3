"""The transfer rules of the domain, one module per group of operations."""
