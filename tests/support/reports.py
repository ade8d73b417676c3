"""Reports with chosen results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.resources import files
from typing import Any

from kcdsl.verdict.health import Health
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.report import (
    CrossCheck,
    ImpliedClause,
    Precheck,
    Report,
    SliceSummary,
)
from kcdsl.verdict.result import ClauseResult, Estimator, ExceedanceCount


def report_schema() -> dict[str, Any]:
    """Return the JSON schema of reports."""
    text = files("kcdsl.verdict").joinpath("report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


VERDICTS: tuple[Verdict, ...] = (
    Held(),
    Violated({"request": "rows.jsonl:17", "token": 3, "worst": 0.4, "value": 0.4}),
    Inconclusive("the threshold lies between the limits"),
    InvalidEvidence("there are no values"),
)
ROW = ClauseResult(
    clause="N-KL",
    family="numerical",
    level="L2",
    slice="all",
    requirement="p99(kl) <= 0.02",
    metric="p99(kl)",
    unit="nat",
    op="<=",
    value=0.01,
    low=0.005,
    high=None,
    n=48,
    counted="requests",
    threshold=0.02,
    verdict=Held(),
    evidence="census",
    confidence=0.95,
    exceedance=ExceedanceCount(0, 48, "requests", 0.0, 0.06),
    estimators=(Estimator("A", "sum p (e^d - 1 - d)", "exact", "token", "lower"),),
)
KERNEL = {
    "run": "torch.eager",
    "digest": "sha256:" + "a" * 64,
    "fingerprint": {"numerics": {"compute": "bfloat16", "weights": {"format": "fp8_e4m3"}}},
}


def report(*rows: ClauseResult, **changes: Any) -> Report:
    """Return a report with these results."""
    base = Report(
        contract={"name": "demo", "version": "1.0.0", "digest": "sha256:" + "b" * 64},
        model={
            "checkpoint": "model.safetensors",
            "sha256": "c" * 64,
            "architecture": "llama",
            "encoder": False,
        },
        kernels={"train": KERNEL, "infer": KERNEL},
        data=({"name": "rows.jsonl", "sha256": "d" * 64, "rows": 48},),
        environment={
            "kcdsl": "0.1.0",
            "python": "3.11",
            "torch": "2.8",
            "device": "cpu",
            "hardware": "x86_64",
            "seed": 0,
            "confidence": 0.95,
            "unit": "request",
        },
        clauses=rows,
        slices=(
            SliceSummary(
                "all",
                48,
                900,
                {"kl": {"mean": 1e-9, "p50": 1e-8, "p95": 1e-7, "p99": 1e-6, "worst": math.nan}},
            ),
        ),
        prechecks=(
            Precheck("finite", "passed", "48 requests", 0.0),
            Precheck("temperature_fit", "failed", "T = 0.700 leaves 0 of 0.1 nats", 0.7),
        ),
        crosschecks=(CrossCheck("attn_0", 48, 1e-7, 2e-3, 2e4, "rows.jsonl:3"),),
        implied=(ImpliedClause("N-TV", "all", "N-DRIFT", ("span <= 0.1", "tv <= 0.025")),),
        deferred={"N-DRIFT": "quantifies over all admissible runs"},
        health=Health(math.inf, "fallback", 1.0, 3.0),
        action="fallback",
        notes=("something to know",),
    )
    return replace(base, **changes)
