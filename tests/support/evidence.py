"""Evidence with chosen values, and the reports decided from it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.ir.escalation import build_escalation
from kcdsl.ir.terms import (
    Abs,
    Budget,
    Clause,
    Compare,
    Constants,
    EvidenceKind,
    Family,
    KernelRef,
    Level,
    Metric,
    ModelRef,
    Number,
    Program,
    Slice,
    Statistic,
    Term,
)
from kcdsl.verdict.report import CrossCheck, Precheck
from kcdsl_backends.empirical.bounds.requests import compared_name
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun, SamplingUnit
from kcdsl_backends.requests import Request

Array = NDArray[np.float64]


def clause(
    id: str,
    kind: str,
    metric: str,
    limit: str,
    *,
    op: str = "<=",
    q: str | None = None,
    magnitude: bool = False,
    slices: tuple[str, ...] = ("all",),
    budget: str | None = None,
    sample: bool = False,
    level: Level = Level.L2,
) -> Clause:
    """Return the clause `kind(metric) op limit`."""
    inner: Term = Abs(Metric(metric)) if magnitude else Metric(metric)
    left = Statistic(kind, inner, None if q is None else Fraction(q))
    return Clause(
        id,
        Family.NUMERICAL,
        Compare(op, left, Number(Fraction(limit))),
        level,
        slices,
        None if budget is None else Budget(Fraction(budget), "requests"),
        EvidenceKind.SAMPLE if sample else None,
        text=f"{kind}({metric}) {op} {limit}",
    )


CLAUSES = (
    clause("N-KL", "quantile", "kl", "1/1000", q="99/100", slices=("all", "short", "long")),
    clause("N-MAX", "max", "logit_linf", "1", slices=("all", "long")),
    clause("N-TV", "max", "tv", "1/50", budget="1/20", slices=("all", "short")),
    clause("N-RATIO", "mean", "log_ratio", "1/1000000000", magnitude=True, sample=True),
    clause("S-TOP1", "mean", "top1_overlap", "19/20", op=">=", level=Level.L3),
)


def evidence(
    clauses: tuple[Clause, ...] = CLAUSES,
    *,
    count: int = 60,
    seed: int = 0,
    drift: float = 1e-2,
    encoder: bool = False,
    name: str = "demo",
    ids: Mapping[int, str] | None = None,
    **changes: Any,
) -> EvidenceTable:
    """Return evidence of `count` requests of 4 to 40 tokens whose drift grows with entropy."""
    rng = np.random.default_rng(seed)
    requests, runs, certified, floor = [], {}, {}, {}
    for i in range(count):
        length = int(rng.integers(4, 41))
        key = f"rows.jsonl:{(ids or {}).get(i, str(i))}"
        requests.append(Request(key, key.partition(":")[2], tuple(range(i, i + length)), {}, i + 1))
        values = _states(rng, length, drift) if encoder else _values(rng, length, drift)
        runs[key] = RequestRun(
            SamplingUnit(key, length, values), i, {"train.logits": f"{i:064x}"}, 0
        )
        bounds: dict[str, Array] = {compared_name("attn_0"): np.array([drift, 40 * drift])}
        if i % 4 and not encoder:
            bounds |= {n: 50 * values[n] for n in ("kl", "tv", "logit_linf", "logit_span")}
        why = None if i % 4 else "it would take about 44 s, and 0 s of 10 s are left"
        certified[key] = SamplingUnit(key, length, bounds, failure=why)
        if i < 8:
            same = {
                n: np.ones_like(v) if n.startswith("top") else v / 100 for n, v in values.items()
            }
            floor[key] = SamplingUnit(key, length, same)
    keys = tuple(request.key for request in requests)
    short = tuple(r.key for r in requests if r.length <= 20)
    long = tuple(r.key for r in requests if r.length > 20)
    base: dict[str, Any] = {
        "program": program(clauses, name),
        "requests": tuple(requests),
        "runs": runs,
        "slices": {"all": keys, "short": short, "long": long},
        "measured": frozenset({name for run in runs.values() for name in run.unit.values}),
        "encoder": encoder,
        "contract": {"name": name, "version": "1.0.0", "digest": "sha256:" + "b" * 64},
        "model": {
            "checkpoint": "model.safetensors",
            "sha256": "c" * 64,
            "architecture": "bert" if encoder else "llama",
            "encoder": encoder,
        },
        "kernels": {
            side: {
                "run": run,
                "digest": "sha256:" + digit * 64,
                "fingerprint": {"run": run, "numerics": {"compute": "float32"}},
            }
            for side, run, digit in (("train", "torch.eager", "1"), ("infer", "torch.sdpa", "2"))
        },
        "data": ({"name": "rows.jsonl", "sha256": "d" * 64, "rows": count},),
        "environment": {
            "kcdsl": "0.1.0",
            "python": "3.11",
            "torch": "2.8",
            "device": "cpu",
            "hardware": "x86_64",
        },
        "prechecks": (
            Precheck("finite", "passed", f"{count} requests"),
            Precheck("swapped_sides", "not_applicable", "both claim about the same noise"),
            Precheck("self_determinism", "failed", "infer 1 of 4 differ", 0.25),
        ),
        "crosschecks": tuple(
            CrossCheck("attn_0", count, drift, 40 * drift, 40.0, key) for key in keys[:1]
        ),
        "certified": certified,
        "bounding": {
            "numerics": {"train": "torch.eager float32", "infer": "torch.sdpa float32"},
            "seconds": 10.0,
        },
        "floor": floor,
    }
    return EvidenceTable(**{**base, **changes})


def program(clauses: tuple[Clause, ...], name: str = "demo") -> Program:
    """Return a program of clauses on the slices all, short and long."""
    kernel = KernelRef("torch.eager", ())
    return Program(
        name,
        "1.0.0",
        ModelRef("model.safetensors", architecture="llama"),
        kernel,
        kernel,
        "rows.jsonl",
        (Slice("all"), Slice("short"), Slice("long")),
        clauses,
        build_escalation({}, {}),
        Constants(),
    )


def _values(rng: np.random.Generator, length: int, drift: float) -> dict[str, Array]:
    entropy = rng.gamma(1.5, 0.6, length)
    linf = drift * rng.lognormal(0, 0.7, length)
    tv = np.minimum(linf * entropy / 4, 1.0)
    margin = 6 / (0.3 + entropy) * rng.random(length)
    same = (margin > linf).astype(np.float64)
    return {
        "kl": 2 * tv**2,
        "tv": tv,
        "logit_linf": linf,
        "logit_span": 1.8 * linf,
        "top1_overlap": same,
        "top5_overlap": np.where(rng.random(length) < 0.02, 0.8, 1.0),
        "margin": margin,
        "entropy": entropy,
        "log_ratio": rng.normal(0, linf),
    }


def _states(rng: np.random.Generator, length: int, drift: float) -> dict[str, Array]:
    linf = drift * rng.lognormal(0, 0.5, length)
    return {
        "hidden_linf": linf,
        "hidden_l2": 3 * linf,
        "embedding_l2": np.array([float(linf.mean())]),
        "embedding_cosine": np.array([1 - float(linf.mean()) ** 2]),
    }
