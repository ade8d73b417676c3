"""Derive the bound of a case from its block graph, in each domain."""
