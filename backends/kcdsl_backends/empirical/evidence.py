"""Evidence: everything that deciding and reporting read, and nothing else.

`gathering.gather` makes it by running both kernels; `traces` writes it to a file and reads it back.
It is plain frozen data, so that whoever has it can conclude from it what was concluded when it was
gathered, without the kernels, the model or the contract's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kcdsl.ir.recordings import LOGITS
from kcdsl.ir.terms import Program
from kcdsl.verdict.report import CrossCheck, ImpliedClause, Precheck
from kcdsl_backends.empirical.measured import Run, Timing, Unit
from kcdsl_backends.empirical.trace import trace_record
from kcdsl_backends.requests import Request

SUMMARY_METRICS = {
    False: ("kl", "tv", "logit_linf", "logit_span", "top1_overlap"),
    True: ("hidden_l2", "hidden_linf", "embedding_l2", "embedding_cosine"),
}
"""The usual drifts of models with a head (False) and of encoders (True)."""

CHART_METRICS = ("top5_overlap", "margin", "entropy")
"""What charts read of models with a head beside the usual drifts, where the vocabulary allows."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was measured of a contract's requests, and of what."""

    program: Program
    """The contract as it was compiled, its tables as they are stated."""
    requests: tuple[Request, ...]
    """Every request of the slices, once."""
    runs: Mapping[str, Run]
    """What each request gave, by its key."""
    slices: Mapping[str, tuple[str, ...]]
    """The keys of the requests of each slice, buckets of tables included, in the order of the
    file."""
    measured: frozenset[str]
    """The metrics that were measured, and the norms of drifts (`clauses.norm_name`), whether or
    not a request has values of them."""
    encoder: bool
    contract: Mapping[str, str]
    """Name, version and digest."""
    model: Mapping[str, Any]
    kernels: Mapping[str, Mapping[str, Any]]
    """`train` and `infer`, each with `run`, `digest` and `fingerprint`."""
    data: tuple[Mapping[str, Any], ...]
    """The request files: name, sha256, rows."""
    environment: Mapping[str, Any]
    timing: Timing = field(default_factory=Timing)
    prechecks: tuple[Precheck, ...] = ()
    crosschecks: tuple[CrossCheck, ...] = ()
    certified: Mapping[str, Unit] = field(default_factory=dict)
    """By request: certified bounds of metrics, one for each position; `failure` says why there is
    none. Empty where none were sought."""
    bounding: Mapping[str, Any] = field(default_factory=dict)
    """Of which numerics `certified` speaks, and how long was spent on it (plain JSON data)."""
    floor: Mapping[str, Unit] = field(default_factory=dict)
    """By request: the drift of the training kernel from itself when it is batched otherwise."""
    spoiled: Mapping[str, str] = field(default_factory=dict)
    """Why the evidence on a slice is invalid, whatever was measured."""
    implied: tuple[ImpliedClause, ...] = ()
    notes: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    """Findings of the contract that its author accepts, with the reasons."""
    seed: int = 0
    looks: int | None = 1
    """How many evaluations of growing data share the error; None: any number."""


def sampling_of(program: Program) -> dict[str, float] | None:
    """Return how tokens are drawn: as the contract says of a server or a recording, else from the
    whole law; None for a recording of which nothing states it."""
    service, recording = program.infer.service, program.infer.recording
    if service is None and (recording is None or recording.format == LOGITS):
        return {"temperature": float(program.constants.temperature), "top_p": 1.0, "top_k": 0}
    logs = service.logprobs if service is not None else None
    if recording is not None:
        logs = recording.logprobs
    if logs is None:
        return None
    return {
        "temperature": float(logs.temperature),
        "top_p": float(logs.top_p),
        "top_k": logs.top_k,
        "min_p": float(logs.min_p),
    }


def records(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """Return the trace record of every request, by its key."""
    timed: dict[str, list[Any]] = {}
    for unit in evidence.timing.runs:
        timed.setdefault(unit.key, []).append(unit)
    inside: dict[str, list[str]] = {}
    for name, keys in evidence.slices.items():
        for key in keys:
            inside.setdefault(key, []).append(name)
    return {
        request.key: trace_record(
            request,
            evidence.runs[request.key],
            slices=inside.get(request.key, ()),
            kernels={side: str(evidence.kernels[side]["digest"]) for side in ("train", "infer")},
            sampling=sampling_of(evidence.program),
            runs=timed.get(request.key, ()),
        )
        for request in evidence.requests
    }
