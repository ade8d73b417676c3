"""Boxes of values and drifts (docs/proofs/relational-interval.md), and what kernels store of
numbers."""
