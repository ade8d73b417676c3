"""Norms over the last dimension (section 6)."""
