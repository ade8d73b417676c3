"""Proof documents, parsed strictly into values."""
