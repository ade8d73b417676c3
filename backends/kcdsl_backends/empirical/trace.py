"""Trace records: what is logged of every request, and what clauses about traces are decided on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kcdsl_backends.empirical.measured import Array, Run, Unit
from kcdsl_backends.empirical.statistics.vocabulary import rounded_sum
from kcdsl_backends.requests import Request

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
