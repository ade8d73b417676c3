"""What an evaluation reads, loaded and resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcdsl.ir.buckets import Gap
from kcdsl.ir.terms import KernelRef, Program
from kcdsl.model.files import Artefacts
from kcdsl_backends.empirical.certified import ModelBound
from kcdsl_backends.empirical.crosscheck import Certify
from kcdsl_backends.empirical.diagnoses.reference import Reference
from kcdsl_backends.empirical.run import BlockInput, Kernel
from kcdsl_backends.empirical.user_metrics import UserFunction
from kcdsl_backends.requests import Request, RequestFile


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything an evaluation reads: loaded, resolved, and replaceable by fakes."""

    program: Program
    """The contract as it was compiled, its tables as they are stated."""
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
    bound_model: ModelBound | None = None
    """Bounds the drift of the whole model; None where that is not sought."""
    bound_seconds: float = 0.0
    """How long `bound_model` may take over all requests."""
    reference: Reference | None = None
    """Runs the model without roundings and as claimed; None where it cannot be copied."""
    artefacts: Artefacts | None = None
    """The files of the command, with which own code that requests import is recorded."""


def recorded_side(kernel: KernelRef) -> bool:
    """Say whether a kernel is read from a recording."""
    return kernel.recording is not None


def spoiled_slices(found: Iterable[tuple[Gap, Sequence[Request]]]) -> dict[str, str]:
    """Return why a slice has no usable evidence, for tables that miss requests of it."""
    return {
        name: f"{len(rows)} requests, {rows[0].id!r} first, are in no row of the table {gap.table}"
        for gap, rows in found
        if rows
        for name in gap.spoils
    }
