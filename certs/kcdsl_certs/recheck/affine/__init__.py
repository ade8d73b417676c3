"""Affine forms around a reference run, a second time (docs/affine-forms.md).

Each kernel is treated by itself: a forward walk writes one entry per operation on a tape (its
linear maps and the bound of what they leave out), and reverse passes over the tape bound
functionals of the error. `pair` puts the two kernels together.
"""

from kcdsl_certs.recheck.affine.handing import handed
from kcdsl_certs.recheck.affine.order import stays
from kcdsl_certs.recheck.affine.pair import Drift, Pair, drift, pair
from kcdsl_certs.recheck.affine.rows import of_rows

__all__ = ["Drift", "Pair", "drift", "handed", "of_rows", "pair", "stays"]
