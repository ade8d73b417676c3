"""What an evaluation reads, loaded and resolved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kcdsl.ir.terms import Program
from kcdsl_backends.empirical.crosscheck import Certify
from kcdsl_backends.empirical.diagnoses.reference import Reference
from kcdsl_backends.empirical.run import BlockInput, Kernel
from kcdsl_backends.empirical.user_metrics import UserFunction
from kcdsl_backends.requests import Request, RequestFile

SUMMARY_METRICS = {
    False: ("kl", "tv", "logit_linf", "logit_span", "top1_overlap"),
    True: ("hidden_l2", "hidden_linf", "embedding_l2", "embedding_cosine"),
}
"""The usual drifts of models with a head (False) and of encoders (True)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything an evaluation reads: loaded, resolved, and replaceable by fakes."""

    program: Program
    """The program with its tables written out (`kcdsl.ir.buckets.expand_tables`)."""
    train: Kernel
    infer: Kernel
    block_input: BlockInput
    files: Mapping[str, RequestFile]
    slices: Mapping[str, tuple[Request, ...]]
    encoder: bool
    blocks: frozenset[str]
    weights: Mapping[str, str]
    digests: Mapping[str, str]
    """Digests of the fingerprints of `train` and `infer`."""
    contract: Mapping[str, str]
    model: Mapping[str, Any]
    environment: Mapping[str, Any]
    device: Any
    certify: Certify | None
    seed: int = 0
    looks: int | None = 1
    """How many evaluations of growing data share the error; None: any number (e-processes)."""
    seconds: float = 20.0
    """How long runs may be timed."""
    spoiled: Mapping[str, str] = field(default_factory=dict)
    """Why the evidence on a slice is invalid, whatever was measured: buckets of a table that does
    not have a value for every request."""
    user: tuple[UserFunction, ...] = ()
    """The functions of the user's metrics that the program speaks of."""
    changed_weights: Callable[[], Mapping[str, str]] = dict
    """Names the kernels whose weights are no longer those that were loaded."""
    reference: Reference | None = None
    """Runs the model without roundings and as claimed; None where it cannot be copied."""
