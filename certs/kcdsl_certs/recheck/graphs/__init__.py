"""Block graphs of a proof, read strictly from JSON."""
