"""Boxes of values and drifts (docs/proofs/relational-interval.md), and stored parameters."""
