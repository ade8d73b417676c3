"""Evidence: everything that deciding and reporting read, and nothing else.

The collection loop makes it; `table.trace` writes it to a trace and reads it back. It is plain
frozen data: whoever has it can conclude from it what was concluded when it was collected, without
the kernels, the model or the contract's file. A trace record is what is logged of one request, and
what clauses about traces are decided on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kcdsl.ir.kernels import LOGITS
from kcdsl.ir.terms import Program
from kcdsl.verdict.report import CrossCheck, ImpliedClause, Precheck
from kcdsl_backends.empirical.statistics.estimates import rounded_sum
from kcdsl_backends.empirical.table.units import Array, Run, Timing, Unit
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


# --- trace ---------------------------------------------------------------------------------------


TRACE_SCHEMA = "kcdsl.trace/1"


def trace_record(
    request: Request,
    run: Run,
    *,
    slices: Sequence[str],
    kernels: Mapping[str, str],
    sampling: Mapping[str, float] | None,
    runs: Sequence[Unit] = (),
) -> dict[str, Any]:
    """Return the record of one request.

    `kernels` holds the digests of both fingerprints, `runs` the timed runs of the request, and
    `sampling` how tokens are drawn (None: nothing states it). A request that failed has no replay
    signature: there is nothing to replay against.
    """
    failed = run.unit.failure is not None
    return {
        "schema": TRACE_SCHEMA,
        "request": request.key,
        "slices": list(slices),
        "build_fingerprint": kernels["infer"],
        "reference_fingerprint": kernels["train"],
        "request_shape": [1, request.length],
        "rng_seed": run.seed,
        "sampling_params": None if sampling is None else dict(sampling),
        "replay_signature": None if failed else run.replay_signature,
        "digests": dict(sorted(run.digests.items())),
        "failure": run.unit.failure,
        "nonfinite": run.nonfinite,
        "values": {name: summary(v) for name, v in sorted(run.unit.values.items())},
        "latency_s": [float(unit.values["latency"][0]) for unit in runs if not _lost(unit)],
    }


def summary(values: Array) -> dict[str, float | int | None]:
    """Return what percentiles, maxima and means of a request need: n, sum, smallest, largest; None
    for what is not finite."""
    finite = bool(np.isfinite(values).all()) and values.size > 0
    total = rounded_sum(values) if finite else math.inf
    return {
        "n": int(values.size),
        "sum": total if math.isfinite(total) else None,
        "min": float(values.min()) if finite else None,
        "max": float(values.max()) if finite else None,
    }


def _lost(unit: Unit) -> bool:
    value = float(unit.values["latency"][0])
    return value != value
