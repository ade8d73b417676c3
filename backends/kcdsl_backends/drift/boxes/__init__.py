"""Boxes and what they are rounded by: formats, sums, quantizers, weight balls."""
