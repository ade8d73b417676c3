"""Boxes of values and drifts (docs/relational-interval.md), and what kernels store of numbers."""
