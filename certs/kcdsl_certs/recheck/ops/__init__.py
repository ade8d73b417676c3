"""The operations of the checker: their rules in each domain."""
