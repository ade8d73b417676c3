"""Formats of numbers, and the roundings of a kernel."""
