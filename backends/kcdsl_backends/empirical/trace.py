"""Trace records: what is logged of every request, so that a verdict can be re-derived later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kcdsl_backends.empirical.measured import Unit
from kcdsl_backends.empirical.run import Run, summary
from kcdsl_backends.requests import Request

TRACE_SCHEMA = "kcdsl.trace/1"


def trace_record(
    request: Request,
    run: Run,
    *,
    slices: Sequence[str],
    kernels: Mapping[str, str],
    temperature: float,
    runs: Sequence[Unit] = (),
) -> dict[str, Any]:
    """Return the record of one request.

    `kernels` holds the digests of both fingerprints, `runs` the timed runs of the request. A
    request that failed has no replay signature: there is nothing to replay against.
    """
    failed = run.unit.failure is not None
    return {
        "schema": TRACE_SCHEMA,
        "request": request.key,
        "slices": list(slices),
        "build_fingerprint": f"sha256:{kernels['infer']}",
        "reference_fingerprint": f"sha256:{kernels['train']}",
        "request_shape": [1, request.length],
        "rng_seed": run.seed,
        "sampling_params": {"temperature": temperature, "top_p": 1.0, "top_k": 0},
        "replay_signature": None if failed else run.replay_signature,
        "digests": dict(sorted(run.digests.items())),
        "failure": run.unit.failure,
        "nonfinite": run.nonfinite,
        "values": {name: summary(v) for name, v in sorted(run.unit.values.items())},
        "latency_s": [float(unit.values["latency"][0]) for unit in runs if not _lost(unit)],
    }


def _lost(unit: Unit) -> bool:
    value = float(unit.values["latency"][0])
    return value != value
