"""From decided clauses and measured values to the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from kcdsl.diagnostics import codes
from kcdsl.ir.buckets import is_bucket
from kcdsl.verdict.health import assess, recommend
from kcdsl.verdict.report import Report, SliceSummary, Statistics, Warned
from kcdsl.verdict.result import ClauseResult
from kcdsl_backends.empirical.charts import charts_of
from kcdsl_backends.empirical.charts.buckets import mean
from kcdsl_backends.empirical.evidence import SUMMARY_METRICS, Evidence
from kcdsl_backends.empirical.measured import SliceData
from kcdsl_backends.empirical.metrics.measures import MEASURES
from kcdsl_backends.empirical.sampling_units import sampling_unit
from kcdsl_backends.empirical.statistics import CONFIDENCE, quantile_rank


def build_report(
    evidence: Evidence,
    data: Mapping[str, SliceData],
    results: tuple[ClauseResult, ...],
    deferred: Mapping[str, str],
    statistics: Statistics,
) -> Report:
    """Return the report, with health score and recommended action."""
    health = assess(results, evidence.program.escalation)
    return Report(
        contract=evidence.contract,
        model=evidence.model,
        kernels=evidence.kernels,
        data=evidence.data,
        environment={
            **evidence.environment,
            "seed": evidence.seed,
            "confidence": CONFIDENCE,
            "unit": sampling_unit(evidence.program),
        },
        clauses=results,
        slices=tuple(
            summarise_slice(d, evidence.encoder) for d in data.values() if not is_bucket(d.name)
        ),
        prechecks=evidence.prechecks,
        crosschecks=evidence.crosschecks,
        implied=evidence.implied,
        deferred=deferred,
        health=health,
        action=recommend(results, health),
        notes=(*evidence.notes, *evidence.accepted),
        statistics=statistics,
        warnings=below_noise(results),
        bounding=evidence.bounding,
        charts=charts_of(evidence, data, results),
    )


def below_noise(results: Sequence[ClauseResult]) -> tuple[Warned, ...]:
    """Name the clauses whose threshold lies below the noise floor of the training kernel."""
    found = []
    for row in results:
        floor = None if row.beside is None else row.beside.floor
        if floor is None or not floor.above or floor.value is None or row.threshold is None:
            continue
        far = "above" if row.op in (">=", ">") else "below"
        found.append(
            Warned(
                codes.BELOW_NOISE.id,
                row.clause,
                row.slice,
                f"the threshold {row.threshold:.3g} lies {far} the noise floor {floor.value:.3g}: "
                f"so far the training kernel is from itself when {floor.requests} requests are "
                "batched otherwise",
            )
        )
    return tuple(found)


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
        rows[name] = {"mean": mean(joined)}
        for percent in (50, 95, 99):
            rank = quantile_rank(worst.size, Fraction(percent, 100))
            rows[name][f"p{percent}"] = float(worst[rank - 1])
        rows[name]["worst"] = float(worst[-1])
    tokens = sum(unit.tokens for unit in data.requests)
    return SliceSummary(data.name, len(data.requests), tokens, rows)
