"""Decisions: from the evidence table to estimates, verdicts and the report."""
