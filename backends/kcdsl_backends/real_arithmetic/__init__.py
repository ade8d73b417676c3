"""Drift in real arithmetic: what the backends `lirpa` and `z3` share."""
