"""Affine forms around a reference run (docs/proofs/affine-forms.md).

Each kernel is treated by itself: a forward walk writes one entry per operation on a tape (its
linear maps and the bound of what they leave out), and reverse passes over the tape bound
functionals of the error.
"""
