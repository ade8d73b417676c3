"""From measured values to verdicts, clause by clause and slice by slice.

A clause on a pinned file that was run whole is decided as a *census*: the exact value is compared
with the threshold, a statement about these requests and no others. A clause with `evidence:
sample`, and any clause about a noisy metric (times, sampled tokens), is decided on the limit of the
interval that is worse for it: held or violated only where the limit agrees, else inconclusive.
Empty, missing and non-finite values are `InvalidEvidence`, whatever the rest says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.ir.formulas import walk
from kcdsl.ir.terms import (
    Abs,
    Budget,
    Clause,
    Compare,
    Connective,
    EvidenceKind,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    Not,
    Number,
    Quantified,
    Statistic,
    Term,
)
from kcdsl.metrics import MetricDefinition
from kcdsl_backends.empirical.decide.estimates import Settings, evaluate
from kcdsl_backends.empirical.decide.values import Side, value_range
from kcdsl_backends.empirical.requirements import (
    NO_WINDOW_HAS,
    WINDOW,
    metrics_of,
    statistic_count,
    window_count,
    windows,
)
from kcdsl_backends.empirical.statistics import rates
from kcdsl_backends.empirical.statistics.estimates import (
    Confidence,
    Exceedance,
    Interval,
    NotMeasurable,
    Outcome,
    compare,
)
from kcdsl_backends.empirical.table.evidence import Column, Floats, Reduced, SliceData, Unit

_OF_MANY = frozenset({"ece_gap"})
"""Metrics that one request by itself does not have, and a window of them does."""

_Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Judge:
    """Decides formulas on one slice; `sample` decides on limits instead of values."""

    data: SliceData
    settings: Settings
    sample: bool

    def outcome(self, formula: Formula, negated: bool = False) -> Outcome:
        """Return the three-valued truth of a formula; raises `NotMeasurable`.

        `negated` says that the formula stands under an odd number of negations, which turns the
        harmful tail around.
        """
        match formula:
            case Compare():
                return self._compare(formula, negated)
            case HasFields():
                complete = all(has_fields(formula, r) for r in _records(self.data))
                # of a sample, that none lacks a field says nothing of every request
                return "unknown" if complete and self.sample else _from_bool(complete)
            case Not(of):
                return _not(self.outcome(of, not negated))
            case Connective("and", parts):
                return _and([self.outcome(p, negated) for p in parts])
            case Connective("or", parts):
                return _not(_and([_not(self.outcome(p, negated)) for p in parts]))
            case Connective("implies", (first, second)):
                given = self.outcome(first, not negated)
                return _not(_and([given, _not(self.outcome(second, negated))]))
            case Quantified(quantifier, _, _, body):
                return self._quantified(quantifier, body, negated)
            case NoFlip():
                raise NotMeasurable("no_flip speaks of every admissible run")
        raise NotMeasurable(f"the formula {formula} has no meaning for measured values")

    def sides(self, formula: Compare, negated: bool = False) -> tuple[Interval, Interval, int]:
        """Return both sides of a comparison, and the number of units behind them."""
        harmful: Side = "lower" if (formula.op in (">=", ">")) != negated else "upper"
        opposite: Side = "upper" if harmful == "lower" else "lower"
        left, n = evaluate(formula.left, self.data, harmful, self.settings)
        right, m = evaluate(formula.right, self.data, opposite, self.settings)
        return left, right, max(n, m)

    def _compare(self, formula: Compare, negated: bool) -> Outcome:
        left, right, _ = self.sides(formula, negated)
        if not self.sample:
            left, right = left.as_point(), right.as_point()
        return compare(left, formula.op, right)

    def _quantified(self, quantifier: str, body: Formula, negated: bool) -> Outcome:
        if self.data.reduced is not None:
            beyond = self.beyond(body, self.data.reduced, negated=negated)
            rows = [_from_bool(not one) for one in set(beyond)]
        else:
            rows = [self.on(unit).outcome(body, negated) for unit in self.data.requests]
        if not rows:
            raise NotMeasurable(f"there are no {self.data.unit}s")
        found = _and(rows) if quantifier == "forall" else _not(_and([_not(r) for r in rows]))
        settled: Outcome = "violated" if quantifier == "forall" else "held"
        return found if not self.sample or found == settled else "unknown"

    def on(self, *units: Unit, runs: bool = False, records: _Records = ()) -> Judge:
        """Return the judge of some units alone, with their trace records: exact values, no
        limits."""
        requests, timed = ((), units) if runs else (units, ())
        data = replace(self.data, requests=requests, runs=timed, records=tuple(records))
        return Judge(data, Settings(self.settings.seed, None), sample=False)

    def beyond(
        self, body: Formula, reduced: Reduced, *, per_window: bool = False, negated: bool = False
    ) -> tuple[bool, ...]:
        """Return which requests of a token table, or windows of them, do not meet a formula."""
        settings = Settings(self.settings.seed, None)

        def decide(part: Reduced) -> Outcome:
            alone = Judge(replace(self.data, reduced=part), settings, sample=False)
            return alone.outcome(body, negated)

        return beyond_of(
            body,
            reduced,
            decide,
            lambda term: value_range(term, self.data),
            per_window=per_window,
            negated=negated,
        )


def judge_for(clause: Clause, data: SliceData, seed: int, confidence: Confidence) -> Judge:
    """Return the judge of a clause: the error level is shared among the estimates it compares."""
    share = confidence.divided(statistic_count(clause.require))
    sample = evidence_kind(clause, data.measures) is EvidenceKind.SAMPLE
    return Judge(data, Settings(seed, share), sample)


def evidence_kind(clause: Clause, measures: Mapping[str, MetricDefinition]) -> EvidenceKind:
    """Return the kind of evidence that running the kernels gives for a clause."""
    noisy = any(measures[m].noisy for m in metrics_of(clause.require) if m in measures)
    if noisy or clause.evidence is EvidenceKind.SAMPLE:
        return EvidenceKind.SAMPLE
    return EvidenceKind.CENSUS


# --- units, budgets ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counted:
    """The units that a clause counts, and which of them are beyond its threshold."""

    of: str
    groups: tuple[tuple[Unit, ...], ...]
    beyond: tuple[bool, ...]

    def exceedance(self, confidence: Confidence) -> Exceedance:
        """Return k of n with limits."""
        return rates.exceedance(self.beyond, confidence)


def count(clause: Clause, judge: Judge) -> Counted | None:
    """Find the units beyond the threshold of a clause; None where single units have no value.

    A unit is beyond where the requirement is not met by it alone: never "value > threshold", which
    a NaN would pass.
    """
    metrics = metrics_of(clause.require)
    known = judge.data.measures
    timed = {known[m].tier == "E" and m != "failure_rate" for m in metrics if m in known}
    per_window = clause.budget is not None and clause.budget.unit == "windows"
    if timed == {True, False} or metrics & NO_WINDOW_HAS or (metrics & _OF_MANY and not per_window):
        return None
    body = clause.require.body if isinstance(clause.require, Quantified) else clause.require
    if isinstance(body, HasFields):
        records = _records(judge.data)
        beyond = tuple(not has_fields(body, record) for record in records)
        return Counted("records", (), beyond)
    if judge.data.reduced is not None:
        return Counted(
            "windows" if per_window else f"{judge.data.unit}s",
            (),
            judge.beyond(body, judge.data.reduced, per_window=per_window),
        )
    runs = timed == {True}
    units = judge.data.runs if runs else judge.data.requests
    of = "windows" if per_window else "timed runs" if runs else f"{judge.data.unit}s"
    if not units:
        raise NotMeasurable(f"there are no {of}")
    groups = windows(units) if per_window else tuple((u,) for u in units)
    written = {}
    if any(isinstance(part, HasFields) for part in walk(body)):
        keys = (unit.key for unit in judge.data.requests)
        written = dict(zip(keys, _records(judge.data), strict=True))
    beyond = tuple(
        judge.on(*g, runs=runs, records=[written[u.key] for u in g if u.key in written]).outcome(
            body
        )
        != "held"
        for g in groups
    )
    return Counted(of, groups, beyond)


def within_budget(
    found: Exceedance, budget: Budget, sample: bool, confidence: Confidence
) -> Outcome:
    """Decide whether at most `budget.rate` of the units exceed.

    Of a sample the binomial tail decides, not the printed limit: exactly, in k, n and the rate.
    """
    if not sample:
        return _from_bool(found.rate <= budget.rate)
    if rates.shows_below(found.k, found.n, budget.rate, confidence):
        return "held"
    above = rates.shows_above(found.k, found.n, budget.rate, confidence)
    return "violated" if above else "unknown"


# --- traces --------------------------------------------------------------------------------------


def has_fields(formula: HasFields, record: object) -> bool:
    """Say whether a trace record carries every field of a clause, not null and not empty."""
    if not isinstance(record, dict):
        return False
    return all(record.get(name) not in (None, "", [], {}) for name in formula.fields)


def _records(data: SliceData) -> _Records:
    if len(data.records) != len(data.requests) or not data.records:
        raise NotMeasurable(f"{len(data.records)} trace records for {len(data.requests)} requests")
    return data.records


# --- three-valued logic --------------------------------------------------------------------------


def _from_bool(holds: bool) -> Outcome:
    return "held" if holds else "violated"


def _not(outcome: Outcome) -> Outcome:
    match outcome:
        case "held":
            return "violated"
        case "violated":
            return "held"
        case "unknown":
            return "unknown"


def _and(outcomes: Sequence[Outcome]) -> Outcome:
    if "violated" in outcomes:
        return "violated"
    return "unknown" if "unknown" in outcomes else "held"


# --- reduced counts ------------------------------------------------------------------------------


_NEAR = 1e-9
"""Relative distance from the threshold within which doubles do not decide: rounding of a quotient
and of stored shares is far below."""
_ORDERS = ("<=", "<", ">=", ">")


def beyond_of(
    body: Formula,
    reduced: Reduced,
    decide: Callable[[Reduced], str],
    range_of: Callable[[Term], tuple[float | None, float | None]],
    *,
    per_window: bool = False,
    negated: bool = False,
) -> tuple[bool, ...]:
    """Return which requests, or windows of them, do not meet a formula by themselves.

    `decide` decides some requests together, and raises `NotMeasurable`; `range_of` gives the range
    of a term, which a mean must not leave; `negated` says that the
    formula stands under an odd number of negations, which turns the harmful tail around.
    """
    n = len(reduced)
    if n == 0:
        raise NotMeasurable(f"there are no {'windows' if per_window else 'requests'}")
    if per_window:
        ends = _window_ends(n)
        parts = (reduced.part(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))
        return tuple(decide(part) != "held" for part in parts)
    clear, held = _at_once(body, reduced, range_of, negated)
    beyond: NDArray[np.bool_] = ~held
    known: dict[tuple[Any, ...], bool] = {}
    for row in np.flatnonzero(~clear).tolist():
        key = tuple(column.fingerprint(row) for column in reduced.columns.values())
        if key not in known:
            known[key] = decide(reduced.part(row, row + 1)) != "held"
        beyond[row] = known[key]
    return tuple(beyond.tolist())


def _window_ends(n: int) -> list[int]:
    """Return where the windows of n requests end; a short rest joins the last."""
    return [*(WINDOW * i for i in range(1, window_count(n))), n]


def _at_once(
    body: Formula,
    reduced: Reduced,
    range_of: Callable[[Term], tuple[float | None, float | None]],
    negated: bool,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which requests doubles decide, and which of those meet the formula."""
    nothing = np.zeros(len(reduced), dtype=bool)
    if not isinstance(body, Compare) or body.op not in _ORDERS:
        return nothing, nothing
    term, op, limit = body.left, body.op, body.right
    if not isinstance(limit, Number):
        return nothing, nothing
    side: Side = "lower" if (op in (">=", ">")) != negated else "upper"
    numbers = _numbers(term, side, reduced)
    if numbers is None:
        return nothing, nothing
    tau = float(limit.value)
    certain = np.isfinite(numbers) & (np.abs(numbers - tau) > _NEAR * max(abs(tau), 1e-300))
    if isinstance(term, Statistic) and term.kind == "mean":
        low, high = range_of(term.of)
        certain &= (numbers >= low) if low is not None else True
        certain &= (numbers <= high) if high is not None else True
    for column in reduced.columns.values():
        certain &= column.complete & (column.nan == 0) & (column.infinite == 0)
    return certain, certain & ((numbers < tau) if op in ("<=", "<") else (numbers > tau))


def _numbers(term: Term, side: Side, reduced: Reduced) -> Floats | None:
    """Return the value of a statistic of each request alone, within rounding; None for others."""
    match term:
        case Statistic("quantile" | "aggregate", of):
            return _column(of, reduced, side)
        case Statistic("max", of):
            return _column(of, reduced, "upper")
        case Statistic("min", of):
            return _column(of, reduced, "lower")
        case Statistic("mean", of):
            column = reduced.columns.get(of)
            return None if column is None else column.totals / np.maximum(column.values, 1)
        case Metric() | Abs():
            return _column(term, reduced, side)
        case _:
            return None


def _column(of: Term, reduced: Reduced, side: Side) -> Floats | None:
    column: Column | None = reduced.columns.get(of)
    return None if column is None else column.worst(side)


def worst_request(
    reduced: Reduced, beyond: Sequence[bool], windows: bool, term: Term, op: str
) -> dict[str, Any] | None:
    """Return the worst of the requests, or of those in windows, beyond a threshold: its name, and
    its worst value with its position."""
    column = reduced.columns.get(term)
    if column is None:
        return None
    side: Side = "lower" if op in (">=", ">") else "upper"
    sign = -1.0 if side == "lower" else 1.0
    outside = np.array(beyond)
    if windows:
        ends = _window_ends(len(reduced))
        outside = np.repeat(outside, np.diff([0, *ends]))
    rows = np.flatnonzero(outside)
    row = int(rows[int((sign * column.worst(side)[rows]).argmax())])
    values = reduced.rows_of(reduced.keys[row], term)
    position = int((sign * values).argmax())
    found: dict[str, Any] = {"request": reduced.keys[row], "worst": float(values[position])}
    if values.size > 1:
        found["token"] = position
    return found
