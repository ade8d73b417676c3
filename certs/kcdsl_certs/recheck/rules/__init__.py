"""The rules of the relational interval domain, one module per group of operations."""
