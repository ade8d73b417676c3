"""Diagnoses tell a drift of numerics from a mistake in the set-up.

Each has a name and an outcome (`DIAGNOSES`). Blocking ones make every clause about the model
`InvalidEvidence`.
"""

from kcdsl_backends.empirical.diagnoses.determinism import regrouped
from kcdsl_backends.empirical.diagnoses.kernels import Subject, run_prechecks
from kcdsl_backends.empirical.diagnoses.model import (
    DIAGNOSES,
    POSITIONS,
    PROBES,
    blocking,
    not_applicable,
    outcome,
    size,
)
from kcdsl_backends.empirical.diagnoses.probes import chosen
from kcdsl_backends.empirical.diagnoses.recorded import Recorded, recorded_prechecks
from kcdsl_backends.empirical.diagnoses.reference import (
    Reference,
    input_quantiser,
    own_blocks,
    reference_of,
)
from kcdsl_backends.empirical.diagnoses.weights import (
    watch_weights,
    weights_checksum,
    weights_digests,
)

__all__ = [
    "DIAGNOSES",
    "POSITIONS",
    "PROBES",
    "Recorded",
    "Reference",
    "Subject",
    "blocking",
    "chosen",
    "input_quantiser",
    "not_applicable",
    "outcome",
    "own_blocks",
    "recorded_prechecks",
    "reference_of",
    "regrouped",
    "run_prechecks",
    "size",
    "watch_weights",
    "weights_checksum",
    "weights_digests",
]
