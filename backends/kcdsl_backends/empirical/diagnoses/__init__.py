"""Diagnoses: is a difference a drift of numerics, or a mistake in the set-up?

Each has a name and an outcome. Blocking ones make every clause about the model `InvalidEvidence`.
"""

from kcdsl_backends.empirical.diagnoses.model import PROBES, blocking
from kcdsl_backends.empirical.diagnoses.order import Subject, run_prechecks
from kcdsl_backends.empirical.diagnoses.reference import Reference, reference_of
from kcdsl_backends.empirical.diagnoses.weights import watch_weights, weights_digests

__all__ = [
    "PROBES",
    "Reference",
    "Subject",
    "blocking",
    "reference_of",
    "run_prechecks",
    "watch_weights",
    "weights_digests",
]
