"""Arithmetic and functions of single elements."""
