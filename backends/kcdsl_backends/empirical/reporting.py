"""From decided clauses and measured values to the report."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from kcdsl.ir.buckets import is_bucket
from kcdsl.verdict.health import assess, recommend
from kcdsl.verdict.report import (
    ClauseResult,
    CrossCheck,
    Precheck,
    Report,
    SliceSummary,
    Statistics,
)
from kcdsl_backends.empirical.measured import SliceData
from kcdsl_backends.empirical.metrics.measures import MEASURES
from kcdsl_backends.empirical.results import called
from kcdsl_backends.empirical.setting import SUMMARY_METRICS, Setting
from kcdsl_backends.empirical.statistics import CONFIDENCE, quantile_rank


def build_report(
    setting: Setting,
    results: tuple[ClauseResult, ...],
    deferred: Mapping[str, str],
    data: Mapping[str, SliceData],
    prechecks: tuple[Precheck, ...],
    crosschecks: tuple[CrossCheck, ...],
    notes: tuple[str, ...],
    statistics: Statistics,
) -> Report:
    """Return the report, with health score and recommended action."""
    deviations: dict[str, list[float]] = {}
    for result in results:
        deviations.setdefault(result.clause, []).append(result.deviation)
    health = assess(deviations)
    kernels = {
        side: {
            "run": ref.run,
            "digest": f"sha256:{setting.digests[side]}",
            "fingerprint": kernel.fingerprint(),
        }
        for side, ref, kernel in (
            ("train", setting.program.train, setting.train),
            ("infer", setting.program.infer, setting.infer),
        )
    }
    files = tuple(
        {"name": f.name, "sha256": f.sha256, "rows": len(f.requests)}
        for f in setting.files.values()
    )
    return Report(
        contract=setting.contract,
        model=setting.model,
        kernels=kernels,
        data=files,
        environment={
            **setting.environment,
            "seed": setting.seed,
            "confidence": CONFIDENCE,
            "unit": "request",
        },
        clauses=results,
        slices=tuple(
            summarise_slice(d, setting.encoder) for d in data.values() if not is_bucket(d.name)
        ),
        prechecks=prechecks,
        crosschecks=crosschecks,
        implied=(),
        deferred=deferred,
        health=health,
        action=recommend(called(results), health),
        notes=notes,
        statistics=statistics,
    )


def summarise_slice(data: SliceData, encoder: bool) -> SliceSummary:
    """Return mean, percentiles and worst of the usual drifts; each request by its worst token."""
    rows: dict[str, dict[str, float]] = {}
    for name in SUMMARY_METRICS[encoder]:
        values = [u.values[name] for u in data.requests if name in u.values and u.failure is None]
        if not values or len(values) != len(data.requests):
            continue
        higher = MEASURES[name].better == "higher"
        worst = np.sort([float(v.min() if higher else v.max()) for v in values])
        if higher:
            worst = worst[::-1]
        joined = np.concatenate(values)
        rows[name] = {"mean": float(joined.mean())}
        for percent in (50, 95, 99):
            rank = quantile_rank(worst.size, Fraction(percent, 100))
            rows[name][f"p{percent}"] = float(worst[rank - 1])
        rows[name]["worst"] = float(worst[-1])
    tokens = sum(unit.tokens for unit in data.requests)
    return SliceSummary(data.name, len(data.requests), tokens, rows)
