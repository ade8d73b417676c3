"""All charts of one evaluation.

Charts of slices show their units. The others count every token once: those of all requests or, if
units are prompts that slices may split, those of the slice with most tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from kcdsl.ir.obligations import obligations_of
from kcdsl.ir.tables import expand_tables, is_bucket
from kcdsl.ir.terms import Abs, Metric, Program, Statistic
from kcdsl.metrics import METRICS as DEFINITIONS
from kcdsl.metrics import MetricDefinition
from kcdsl.verdict.result import ClauseResult
from kcdsl_backends.empirical.bounds.requests import LOWER_BOUNDS, MAGNITUDES, compared_name
from kcdsl_backends.empirical.charts.series import (
    by_doubling,
    by_rank,
    disagreement,
    drift_by,
    edges_of,
    flips_by_margin,
    histogram,
    percentiles,
)
from kcdsl_backends.empirical.metrics.measures import unit_of
from kcdsl_backends.empirical.metrics.sampled import what_if
from kcdsl_backends.empirical.metrics.user import measures_of
from kcdsl_backends.empirical.table.evidence import (
    SUMMARY_METRICS,
    Array,
    EvidenceTable,
    SamplingUnit,
    SliceData,
)
from kcdsl_backends.empirical.table.requirements import metrics_of, prompts_are_units

SLICES, METRICS, PAIRS = 12, 12, 200
"""Largest numbers of slices, metrics, and pairs of measured and certified drift that are drawn."""
_DRIFTS = {False: ("kl", "logit_linf"), True: ("hidden_linf", "embedding_l2")}
_SAMPLED_DRIFTS = ("k3", "log_ratio")
"""Drifts shown if no whole distribution was read: the first of these that has values."""
_CURVES = {1: "top1_overlap", 5: "top5_overlap"}
_CERTIFIED = ("kl", "tv", "logit_linf", "logit_span", "hidden_linf")
_RATIO = "log_ratio"


def charts_of(
    evidence: EvidenceTable, data: Mapping[str, SliceData], results: Sequence[ClauseResult]
) -> dict[str, Any]:
    """Return the data of the charts; empty where no request has values."""
    every = [evidence.runs[request.key].unit for request in evidence.requests]
    shown, pooled = every, _pooled(evidence, data)
    if pooled is not None:
        shown = list(data[pooled].requests)
    usable = [unit for unit in shown if _measured(unit)]
    if not usable:
        return {}
    several = {r.key for r in evidence.requests if r.fields.get("rollouts", 1) != 1}
    return {
        "requests": len(shown),
        "failed": len(shown) - len(usable),
        "tokens": sum(unit.tokens for unit in usable),
        "pooled": pooled,
        "histograms": _histograms([u for u in every if _measured(u)], evidence, data, results),
        "disagreement": _disagreement(data, several),
        "drift_by": _drift_by(usable, evidence, several),
        "flips_by_margin": _flips(usable),
        "certified": _pairs(usable, evidence),
        "what_if": _what_if(usable, several),
    }


def _measured(unit: SamplingUnit) -> bool:
    return unit.failure is None and bool(unit.values)


def _pooled(evidence: EvidenceTable, data: Mapping[str, SliceData]) -> str | None:
    """Return the slice with most tokens where units of slices may share rollouts, else None."""
    if not prompts_are_units(evidence.program) or not data:
        return None
    return max(data, key=lambda name: sum(unit.tokens for unit in data[name].requests))


def _slices(data: Mapping[str, SliceData]) -> list[SliceData]:
    return [d for d in data.values() if not is_bucket(d.name) and d.requests][:SLICES]


# --- histograms ----------------------------------------------------------------------------------


def _histograms(
    usable: Sequence[SamplingUnit],
    evidence: EvidenceTable,
    data: Mapping[str, SliceData],
    results: Sequence[ClauseResult],
) -> list[dict[str, Any]]:
    measures = next(iter(data.values())).measures if data else {}
    found, compared = [], _compared(evidence.program, data)
    for name in _metrics(usable, evidence, measures):
        measure = measures.get(name)
        higher = measure is not None and measure.better == "higher"
        formula = "" if measure is None else measure.formula
        parts = {
            part.name: _worst([u for u in part.requests if u.failure is None], name, higher)
            for part in _slices(data)
        }
        # a slice may have some rollouts of a prompt, whose worst value is another
        scale, edges = edges_of(np.concatenate([_worst(usable, name, higher), *parts.values()]))
        rows = []
        for part, worst in parts.items():
            if worst.size:
                spread = percentiles(worst, higher_is_better=higher)
                rows.append(
                    {
                        "slice": part,
                        **histogram(worst, scale, edges),
                        "percentiles": spread,
                    }
                )
        found.append(
            {
                "metric": name,
                "unit": unit_of(measure),
                "formula": f"|{formula}|" if _signed(name) else formula,
                "magnitude": _signed(name),
                "better": "higher" if higher else "lower",
                "scale": scale,
                "edges": edges,
                "slices": rows,
                "limits": _limits(name, compared, results),
            }
        )
    return found


def _metrics(
    usable: Sequence[SamplingUnit],
    evidence: EvidenceTable,
    measures: Mapping[str, MetricDefinition],
) -> list[str]:
    """Return the metrics of clauses and the usual drifts, if a request has values of them."""
    usual = SUMMARY_METRICS[evidence.encoder]
    clauses = {name for clause in evidence.program.clauses for name in metrics_of(clause.require)}
    asked = sorted(evidence.measured & clauses - set(usual))
    there = [n for n in (*usual, *asked) if any(n in unit.values for unit in usable)]
    timed = {n for n in there if n in measures and measures[n].tier in ("E", "F")}
    return [n for n in there if n not in timed][:METRICS]


def _worst(units: Sequence[SamplingUnit], name: str, higher: bool) -> Array:
    values = [_sized(name, unit.values[name]) for unit in units if name in unit.values]
    worst = [float(v.min() if higher else v.max()) for v in values if v.size]
    return np.array(worst, dtype=np.float64)


def _signed(name: str) -> bool:
    """Return whether both signs of a metric are bad, so that its magnitude is drawn."""
    return name in DEFINITIONS and DEFINITIONS[name].signed


def _sized(name: str, values: Array) -> Array:
    return np.abs(values) if _signed(name) else values


def _limits(
    name: str, compared: Mapping[str, object], results: Sequence[ClauseResult]
) -> list[dict[str, Any]]:
    """Return the thresholds of clauses on percentiles and extremes of a metric, once each."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    drawn = Abs(Metric(name)) if _signed(name) else Metric(name)
    for row in results:
        match compared.get(row.obligation):
            case Statistic("max" | "min" | "quantile", of):
                wanted = of == drawn
            case term:
                wanted = term == drawn
        if wanted and row.threshold is not None and math.isfinite(row.threshold):
            found[row.clause, row.threshold] = {
                "clause": row.clause,
                "requirement": row.metric,
                "op": row.op,
                "threshold": row.threshold,
            }
    return list(found.values())


def _compared(program: Program, slices: Iterable[str]) -> dict[str, object]:
    """Return the quantity that each obligation bounds, by its identifier."""
    return {
        each.id: each.comparison.quantity
        for clause in expand_tables(program).clauses
        for name in slices
        for each in obligations_of(clause, name)
        if each.comparison is not None
    }


# --- curves and ranges ---------------------------------------------------------------------------


def _disagreement(data: Mapping[str, SliceData], several: AbstractSet[str]) -> list[dict[str, Any]]:
    """Return the curves of the slices; units of `several` texts have no known positions."""
    found = []
    for k, name in _CURVES.items():
        for part in _slices(data):
            units = [u for u in part.requests if u.failure is None and name in u.values]
            texts = [u.values[name] for u in units if bool(np.isfinite(u.values[name]).all())]
            points = [] if several & {u.key for u in units} else disagreement(texts)
            if points:
                row = {"k": k, "slice": part.name, "texts": len(texts), "points": points}
                found.append({**row, "outside": len(units) - len(texts)})
    return found


def _drift_by(
    usable: Sequence[SamplingUnit], evidence: EvidenceTable, several: AbstractSet[str]
) -> list[dict[str, Any]]:
    there = {name for unit in usable for name in unit.values}
    names = [name for name in _DRIFTS[evidence.encoder] if name in there]
    if not names:
        names = [name for name in _SAMPLED_DRIFTS if name in there][:1]
    measures = measures_of(evidence.program)
    found = []
    for name in names:
        with_it = [u for u in usable if name in u.values and u.values[name].size]
        if not with_it:
            continue
        measure = measures.get(name)
        arrays = [_sized(name, u.values[name]) for u in with_it]
        values = np.concatenate(arrays)
        place = np.concatenate([np.arange(v.size, dtype=float) for v in arrays])
        whole = not several & {u.key for u in with_it}
        if whole and all(u.values[name].size == u.tokens for u in with_it):
            found.append(_ranged("position", "token", name, measure, by_doubling(place), values))
        if whole:
            worst = np.array([float(v.max()) for v in arrays])
            lengths = np.array([float(u.tokens) for u in with_it])
            found.append(_ranged("length", "request", name, measure, by_rank(lengths), worst))
        for key in ("entropy", "margin"):
            if all(key in u.values and u.values[key].size == u.values[name].size for u in with_it):
                keys = np.concatenate([u.values[key] for u in with_it])
                found.append(_ranged(key, "token", name, measure, by_rank(keys), values))
    return [chart for chart in found if chart["points"]]


def _ranged(
    by: str, of: str, metric: str, measure: MetricDefinition | None, ranges: Any, values: Array
) -> dict[str, Any]:
    """Return a chart; `outside` counts the values that are in no range, as they are not finite."""
    return {
        "by": by,
        "of": of,
        "metric": f"|{metric}|" if _signed(metric) else metric,
        "unit": unit_of(measure),
        "points": drift_by(ranges, values),
        "outside": int(np.count_nonzero(~np.isfinite(values))),
    }


def _flips(usable: Sequence[SamplingUnit]) -> list[dict[str, float | int]]:
    both = [u for u in usable if {"margin", "top1_overlap"} <= u.values.keys()]
    if not both:
        return []
    margins, overlaps = (
        np.concatenate([u.values[name] for u in both]) for name in ("margin", "top1_overlap")
    )
    return flips_by_margin(margins, overlaps)


# --- measured and certified, remedies------------------------------------------------------------


def _pairs(usable: Sequence[SamplingUnit], evidence: EvidenceTable) -> list[dict[str, Any]]:
    """Return the worst measured and certified value of requests, by metric and by block."""
    found, measures = [], measures_of(evidence.program)
    for name in _CERTIFIED:
        pairs = []
        for unit in usable:
            bound = evidence.certified.get(unit.key)
            there = unit.values.get(name)
            if bound is not None and name in bound.values and there is not None and there.size:
                lower = name in LOWER_BOUNDS
                worst = np.min if lower else np.max
                values = np.abs(there) if name in MAGNITUDES else there
                pairs.append((unit.key, float(worst(values)), float(worst(bound.values[name]))))
        found.append(_chart(name, unit_of(measures.get(name)), pairs, len(usable)))
    for check in evidence.crosschecks:
        name = compared_name(check.block)
        pairs = []
        for unit in usable:
            bound = evidence.certified.get(unit.key)
            if bound is not None and name in bound.values:
                measured, certified = (float(x) for x in bound.values[name])
                pairs.append((unit.key, measured, certified))
        found.append(_chart(f"drift of {check.block}", "1", pairs, len(usable)))
    return [chart for chart in found if chart["points"]]


def _chart(name: str, unit: str, pairs: list[tuple[str, float, float]], of: int) -> dict[str, Any]:
    """Return pairs by their measured value, thinned evenly; those without a bound are left out."""
    finite = sorted((p for p in pairs if math.isfinite(p[1]) and math.isfinite(p[2])), key=_order)
    step = max(1, math.ceil(len(finite) / PAIRS))
    kept = finite[::-1][::step]
    return {
        "metric": name,
        "unit": unit,
        "n": len(finite),
        "of": of,
        "points": [
            {"request": key, "measured": measured, "certified": certified}
            for key, measured, certified in kept
        ],
    }


def _order(pair: tuple[str, float, float]) -> tuple[float, str]:
    return pair[1], pair[0]


def _what_if(usable: Sequence[SamplingUnit], several: AbstractSet[str]) -> list[dict[str, Any]]:
    """Return the effect of truncating, masking and vetoing on the sampled tokens.

    Vetoes reject whole texts, so they are left out where a unit has `several`.
    """
    values = [u.values[_RATIO] for u in usable if _RATIO in u.values and u.values[_RATIO].size]
    if not values or not all(bool(np.isfinite(v).all()) for v in values):
        return []
    rows = what_if(np.concatenate(values), [v.size for v in values])
    if several & {u.key for u in usable}:
        rows = tuple(row for row in rows if row.rule.does != "veto")
    return [
        {
            "rule": row.rule.name,
            "does": row.rule.does,
            "low": row.rule.low,
            "high": row.rule.high if math.isfinite(row.rule.high) else None,
            "below": row.below,
            "above": row.above,
            "n": row.n,
            "kept": row.kept,
            "mean_weight": row.mean_weight if math.isfinite(row.mean_weight) else None,
            "mean_raw": row.mean_raw if math.isfinite(row.mean_raw) else None,
        }
        for row in rows
    ]
