"""What is printed of a clause beside its verdict: its numbers, and what violates it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kcdsl.inequalities import round_down, round_up
from kcdsl.ir.terms import Clause, Compare, HasFields, Metric, Number, Statistic, Term
from kcdsl.ir.walk import subterms
from kcdsl.ir.words import term_text
from kcdsl.metrics import MetricDefinition
from kcdsl_backends.empirical.clauses import main_comparison
from kcdsl_backends.empirical.decide import Counted, Judge, has_fields
from kcdsl_backends.empirical.measured import SliceData, Unit
from kcdsl_backends.empirical.reduced_counts import worst_request
from kcdsl_backends.empirical.statistics import NotMeasurable
from kcdsl_backends.empirical.term_values import unit_values


@dataclass(frozen=True, slots=True)
class Figures:
    """What is printed of a clause beside its verdict."""

    metric: str
    unit: str
    op: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    threshold: float | None
    exact: Fraction | None = None
    """The value before it is rounded to a double."""


def figures_of(clause: Clause, judge: Judge) -> Figures:
    """Return the numbers of a comparison; a compound clause has none, only its text."""
    comparison = main_comparison(clause.require)
    if comparison is None:
        return _of_fields(clause, judge)
    left, right, n = judge.sides(comparison)
    return Figures(
        term_text(comparison.left),
        _unit(comparison.left, judge.data),
        comparison.op,
        _double(left.value),
        None if left.low is None else round_down(left.low),
        None if left.high is None else round_up(left.high),
        n,
        _double(right.value),
        left.value,
    )


def _of_fields(clause: Clause, judge: Judge) -> Figures:
    n = judge.data.size
    if not isinstance(clause.require, HasFields):
        return Figures(clause.text or clause.id, "1", "", None, None, None, n, None)
    records = judge.data.records
    present = sum(has_fields(clause.require, record) for record in records)
    share = Fraction(present, len(records)) if records else None
    name = f"coverage({', '.join(clause.require.fields)})"
    return Figures(
        name,
        "ratio",
        "==",
        None if share is None else float(share),
        None,
        None,
        len(records),
        1.0,
        share,
    )


def no_figures(clause: Clause, data: SliceData) -> Figures:
    """Return the figures of a clause of which nothing was measured."""
    comparison = main_comparison(clause.require)
    if comparison is None:
        return Figures(clause.text or clause.id, "1", "", None, None, None, 0, None)
    term, limit = comparison.left, comparison.right
    threshold = _double(limit.value) if isinstance(limit, Number) else None
    unit = _unit(term, data)
    return Figures(term_text(term), unit, comparison.op, None, None, None, 0, threshold)


def _unit(term: Term, data: SliceData) -> str:
    names = [t.name for t in subterms(term) if isinstance(t, Metric)]
    if len(names) != 1:
        return "1"
    return unit_of(data.measures.get(names[0]))


def unit_of(measure: MetricDefinition | None) -> str:
    """Return the unit of a metric's values."""
    return "1" if measure is None else str(measure.dimension)


def _double(value: Fraction) -> float:
    """Return the nearest float64; infinite beyond the greatest."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# --- counterexamples -----------------------------------------------------------------------------


def counterexample(
    clause: Clause, judge: Judge, figures: Figures, found: Counted | None
) -> dict[str, Any]:
    """Return what violates the clause: its value, and the worst request with token and value."""
    example: dict[str, Any] = {"value": figures.value, "threshold": figures.threshold}
    comparison = main_comparison(clause.require)
    if isinstance(clause.require, HasFields):
        lacking = [
            str(record.get("request"))
            for record in judge.data.records
            if not has_fields(clause.require, record)
        ]
        return {**example, "records": lacking[:5]}
    if found is None or comparison is None or not any(found.beyond):
        return example
    if judge.data.reduced is not None:
        windows, term = found.of == "windows", _inner(comparison)
        worst = worst_request(judge.data.reduced, found.beyond, windows, term, figures.op)
        return example if worst is None else {**example, **worst}
    units = [
        u for group, beyond in zip(found.groups, found.beyond, strict=True) if beyond for u in group
    ]
    worst = _worst_unit(_inner(comparison), figures.op, units)
    return example if worst is None else {**example, **worst}


def _inner(comparison: Compare) -> Term:
    side = comparison.left
    return side.of if isinstance(side, Statistic) else side


def _worst_unit(term: Term, op: str, units: list[Unit]) -> dict[str, Any] | None:
    try:
        values = unit_values(term, units, {})
    except NotMeasurable:
        return None
    sign = -1.0 if op in (">=", ">") else 1.0
    positions = [int((sign * v).argmax()) for v in values]
    worst = max(range(len(units)), key=lambda i: sign * values[i][positions[i]])
    found: dict[str, Any] = {
        "request": units[worst].key,
        "worst": float(values[worst][positions[worst]]),
    }
    if values[worst].size > 1:
        found["token"] = positions[worst]
    return found
