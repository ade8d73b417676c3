"""Numbers, counterexamples and statistical power of a clause, for its row of the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kcdsl.inequalities import round_down, round_up
from kcdsl.ir.formulas import subterms
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import Clause, Compare, HasFields, Metric, Number, Statistic, Term
from kcdsl.verdict.result import Shown
from kcdsl_backends.empirical.decide.judgement import Counted, Judge, has_fields, worst_request
from kcdsl_backends.empirical.decide.values import unit_values
from kcdsl_backends.empirical.metrics.measures import unit_of
from kcdsl_backends.empirical.requirements import allowed_rate, is_mean, main_comparison
from kcdsl_backends.empirical.statistics import bootstrap, planning
from kcdsl_backends.empirical.statistics.estimates import (
    Confidence,
    Exceedance,
    Interval,
    NotMeasurable,
)
from kcdsl_backends.empirical.table.evidence import SliceData, Unit


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
    """The value that the obligation compares with its threshold, before it is rounded to a double:
    of two terms their difference. None where a sample gives no limit of it."""


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
        _compared(comparison, left, right, sample=judge.sample),
    )


def _compared(
    comparison: Compare, left: Interval, right: Interval, *, sample: bool
) -> Fraction | None:
    """Return the value of the obligation's quantity. The limits of two sampled terms do not hold
    together at the level of each, so a sample has no limits of their difference."""
    if isinstance(comparison.right, Number):
        return left.value
    return None if sample else left.value - right.value


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


# --- shown ---------------------------------------------------------------------------------------


_MOST_UNITS = 10**9


def shown(
    clause: Clause, of: str, exceedance: Exceedance | None, confidence: Confidence
) -> Shown | None:
    """Return the rate that a sample shows not to be exceeded; None where no unit is counted.

    With none of n beyond it is 1 - α^(1/n), about 3/n at 95 %.
    """
    if exceedance is None or allowed_rate(clause) is None:
        return None
    return Shown(exceedance.k, exceedance.n, of, exceedance.high, confidence.share)


def needed(
    clause: Clause, figures: Figures, exceedance: Exceedance | None, confidence: Confidence
) -> int | None:
    """Return how many units would decide an open clause in its favour, went they on as they did.

    None where no number of units would, or where that cannot be told.
    """
    allowed = allowed_rate(clause)
    if allowed is not None and 0 < allowed < 1 and exceedance is not None:
        return planning.units_at_rate(allowed, exceedance.rate, confidence)
    if allowed is None and is_mean(clause):
        return _for_mean(figures)
    return None


def _for_mean(figures: Figures) -> int | None:
    """Return n (distance of the limit / distance of the threshold)^2, both from the value."""
    limit = figures.low if figures.op in (">=", ">") else figures.high
    if figures.value is None or figures.threshold is None or limit is None:
        return None
    room = figures.threshold - figures.value
    room = -room if figures.op in (">=", ">") else room
    if room <= 0:
        return None
    wanted = figures.n * (abs(limit - figures.value) / room) ** 2
    return max(figures.n + 1, round(wanted)) if wanted < _MOST_UNITS else None


def why_open(
    clause: Clause,
    figures: Figures,
    found: Shown | None,
    enough: int | None,
    confidence: Confidence,
) -> str:
    """Return why a sample decides nothing, and what would."""
    allowed = allowed_rate(clause)
    if found is not None and allowed is not None:
        return f"{found.text}; {_what_decides(found, allowed, enough, confidence)}"
    if confidence.anytime and found is None and allowed is None:
        return "it has no limit that holds at every look; plan the looks, or give it a budget"
    if figures.value is None or figures.threshold is None:
        return "the limits of the sample do not decide it"
    if figures.low is None and figures.high is None:
        return _no_limits(clause, figures.n)
    more = "" if enough is None else f"; about {enough} would decide it if they are alike"
    return (
        f"the threshold {figures.threshold:g} lies between the limits "
        f"[{_end(figures.low)}, {_end(figures.high)}] of {figures.n} units{more}"
    )


def _no_limits(clause: Clause, n: int) -> str:
    fewest = bootstrap.FEWEST_CLUSTERS
    if is_mean(clause) and n < fewest:
        return f"{n} units are too few for a limit of their mean: it takes {fewest}"
    return f"its {n} units give no limit"


def _what_decides(
    found: Shown, allowed: Fraction, enough: int | None, confidence: Confidence
) -> str:
    if allowed == 0:
        return "no sample shows that none ever is: a proof or a census does"
    wanted = f"at most {100 * float(allowed):.6g} %"
    if found.k == 0:
        return f"{enough} without any would show {wanted}"
    if enough is None:
        return f"no number of units like these shows {wanted}"
    fewest = planning.units_for_budget(allowed, confidence)
    return f"about {enough} like these, or {fewest} without any, would show {wanted}"


def _end(limit: float | None) -> str:
    return "none" if limit is None else f"{limit:.4g}"
