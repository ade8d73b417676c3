"""Affine forms around a reference run (docs/proofs/affine-forms.md).

Each kernel is treated separately: a forward walk writes one entry per operation on a tape (its
linear maps and a bound of the remainder), and reverse passes over the tape bound functionals of
the error.
"""
