"""Drift in real arithmetic: common code of the backends `lirpa` and `z3`."""
