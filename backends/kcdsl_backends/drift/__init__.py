"""Certified bounds of the drift between two kernels of one block.

Three domains share a table of operations (`ops`): boxes (`interval`,
docs/proofs/relational-interval.md), affine forms (`affine_forms`, docs/proofs/affine-forms.md) and
linear bounds (`linear_bounds`, docs/proofs/difference-planes.md). No solver: every operation of a
block graph has one transfer function for each domain. All arithmetic is torch float64 on the
device of the inputs.
"""
