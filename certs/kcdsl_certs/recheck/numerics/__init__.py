"""Formats of numbers, and what a kernel may round."""
