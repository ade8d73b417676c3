"""Machinery of affine forms: the tape of errors, reverse passes, bounds of functionals."""
