"""The bound chain: from the drift of the logits to policies, rewards, gradients and ranks.

Pure functions on floats, standard library alone. Formulas, conditions and proofs:
docs/bound-chain.md.
"""

from kcdsl.chain.bounds import NAMES, bound, span, span_from_intervals, span_from_norm
from kcdsl.chain.box import BoxBound, bound_box, bound_box_from_rest
from kcdsl.chain.exact import ExactRow, exact_row
from kcdsl.chain.rounding import ChainDomainError
from kcdsl.chain.row import CertifiedRow, certified_row, sharpest
from kcdsl.chain.specific import SpecificRow, specific_row

__all__ = [
    "NAMES",
    "BoxBound",
    "CertifiedRow",
    "ChainDomainError",
    "ExactRow",
    "SpecificRow",
    "bound",
    "bound_box",
    "bound_box_from_rest",
    "certified_row",
    "exact_row",
    "sharpest",
    "span",
    "span_from_intervals",
    "span_from_norm",
    "specific_row",
]
