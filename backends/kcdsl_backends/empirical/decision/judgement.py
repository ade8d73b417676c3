"""From measured values to verdicts, clause by clause and slice by slice.

A clause on a pinned file that was run completely is decided as a *census*: the exact value is
compared with the threshold, a statement about these requests only. A clause with `evidence:
sample`, and any clause about a noisy metric (times, sampled tokens), is decided on the worse limit
of the interval: held or violated only if the limit agrees, else inconclusive. Empty, missing and
non-finite values are `InvalidEvidence`, whatever the other values are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kcdsl.ir.formulas import walk
from kcdsl.ir.terms import (
    Budget,
    Clause,
    Compare,
    Connective,
    EvidenceKind,
    Formula,
    HasFields,
    NoFlip,
    Not,
    Quantified,
    Statistic,
    Term,
)
from kcdsl.verdict.result import TRACE_RECORDS
from kcdsl_backends.empirical.decision.estimates import Settings, evaluate
from kcdsl_backends.empirical.decision.repeats import by_request, with_drawn_runs
from kcdsl_backends.empirical.decision.values import (
    Side,
    beyond_of,
    counted_units,
    unit_values,
    value_range,
    worst_request,
)
from kcdsl_backends.empirical.statistics import rates
from kcdsl_backends.empirical.statistics.estimates import (
    Confidence,
    EstimateInterval,
    Exceedance,
    NotMeasurable,
    Outcome,
    compare,
)
from kcdsl_backends.empirical.table.evidence import Reduced, SamplingUnit, SliceData
from kcdsl_backends.empirical.table.requirements import (
    NO_WINDOW_HAS,
    allowed_rate,
    main_comparison,
    metrics_of,
    statistic_count,
    windows,
)

_OF_MANY = frozenset({"ece_gap"})
"""Metrics that a window of requests has, but a single request does not."""

_Records = Sequence[Mapping[str, Any]]
_Reading = tuple[EstimateInterval, EstimateInterval, int]
"""Both sides of a comparison, and the number of units behind them."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Decides formulas on one slice; `sample` decides on limits instead of values."""

    data: SliceData
    settings: Settings
    sample: bool

    def outcome(self, formula: Formula, negated: bool = False) -> Outcome:
        """Return the three-valued truth of a formula; raises `NotMeasurable`.

        `negated`: the formula is under an odd number of negations, which swaps the harmful tail.
        """
        match formula:
            case Compare():
                return self._compare(formula, negated)
            case HasFields():
                complete = all(has_fields(formula, r) for r in _records(self.data))
                # complete records of a sample show nothing about all requests
                return "unknown" if complete and self.sample else _from_bool(complete)
            case Not(of):
                return _not(self.outcome(of, not negated))
            case Connective("and", parts):
                return _and([self.outcome(p, negated) for p in parts])
            case Connective("or", parts):
                return _or([self.outcome(p, negated) for p in parts])
            case Connective("implies", (first, second)):
                given = self.outcome(first, not negated)
                return _or([_not(given), self.outcome(second, negated)])
            case Quantified(quantifier, _, _, body):
                return self._quantified(quantifier, body, negated)
            case NoFlip():
                raise NotMeasurable("no_flip quantifies over all admissible runs")
        raise NotMeasurable(f"the formula {formula} has no meaning for measured values")

    def sides(self, formula: Compare) -> _Reading:
        """Return both sides of a comparison, and the number of units behind them. Of the tails of
        an equality, that with the larger difference counts."""
        readings = self._readings(formula, False)
        return max(readings, key=lambda read: abs(read[0].value - read[1].value))

    def _readings(self, formula: Compare, negated: bool) -> list[_Reading]:
        """Return the sides of a comparison for the harmful tail; for an equality, for both
        tails."""
        harmful: Side = "lower" if (formula.op in (">=", ">")) != negated else "upper"
        tails: tuple[Side, ...] = ("upper", "lower") if formula.op == "==" else (harmful,)
        return [self._read(formula, tail) for tail in tails]

    def _read(self, formula: Compare, harmful: Side) -> _Reading:
        opposite: Side = "upper" if harmful == "lower" else "lower"
        left, n = evaluate(formula.left, self.data, harmful, self.settings)
        right, m = evaluate(formula.right, self.data, opposite, self.settings)
        return left, right, max(n, m)

    def _compare(self, formula: Compare, negated: bool) -> Outcome:
        found: list[Outcome] = []
        for left, right, _ in self._readings(formula, negated):
            one, two = (left, right) if self.sample else (left.as_point(), right.as_point())
            found.append(compare(one, formula.op, two))
        return _or(found) if negated else _and(found)

    def _quantified(self, quantifier: str, body: Formula, negated: bool) -> Outcome:
        if self.data.reduced is not None:
            beyond = self.beyond(body, self.data.reduced, negated=negated)
            rows = [_from_bool(not one) for one in set(beyond)]
        else:
            rows = [self.on(unit).outcome(body, negated) for unit in self.data.requests]
        if not rows:
            raise NotMeasurable(f"there are no {self.data.unit}s")
        found = _and(rows) if quantifier == "forall" else _or(rows)
        settled: Outcome = "violated" if quantifier == "forall" else "held"
        return found if not self.sample or found == settled else "unknown"

    def on(self, *units: SamplingUnit, runs: bool = False, records: _Records = ()) -> Judge:
        """Return the judge of the given units, with their trace records: exact values, no
        limits."""
        requests, timed = ((), units) if runs else (units, ())
        data = replace(self.data, requests=requests, runs=timed, drawn=None, records=tuple(records))
        return Judge(data, Settings(self.settings.seed, None), sample=False)

    def beyond(
        self, body: Formula, reduced: Reduced, *, per_window: bool = False, negated: bool = False
    ) -> tuple[bool, ...]:
        """Return the mask of requests of a token table, or windows of them, that do not meet a
        formula."""
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


def judge_for(clause: Clause, data: SliceData, seed: int, confidence: Confidence | None) -> Judge:
    """Return the judge of a clause; the error level is shared among the estimates that it compares.
    Without a confidence a sample has no limits."""
    share = None if confidence is None else confidence.divided(statistic_count(clause.require))
    sample = evidence_kind(clause, data) is EvidenceKind.SAMPLE
    population = clause.evidence is EvidenceKind.SAMPLE
    if sample:
        data = with_drawn_runs(data)
    return Judge(data, Settings(seed, share, population), sample)


def evidence_kind(clause: Clause, data: SliceData) -> EvidenceKind:
    """Return the kind of evidence that the measurements on a slice are for a clause.

    Values that vary from run to run are a sample; those of a recorded batch are a sample too,
    unless the clause asks about this batch and no other (`evidence: census`).
    """
    if clause.evidence is EvidenceKind.CENSUS and data.batch:
        return EvidenceKind.CENSUS
    known = data.measures
    noisy = any(known[m].noisy for m in metrics_of(clause.require) if m in known)
    if noisy or clause.evidence is EvidenceKind.SAMPLE:
        return EvidenceKind.SAMPLE
    return EvidenceKind.CENSUS


# --- units, budgets ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counted:
    """The units that a clause counts, and which of them are beyond its threshold."""

    of: str
    groups: tuple[tuple[SamplingUnit, ...], ...]
    beyond: tuple[bool, ...]

    def exceedance(self, confidence: Confidence) -> Exceedance:
        """Return k of n with limits."""
        return rates.exceedance(self.beyond, confidence)


def count(clause: Clause, judge: Judge) -> Counted | None:
    """Find the units beyond the threshold of a clause; None if single units have no value.

    A unit is beyond if it does not meet the requirement by itself, not if "value > threshold",
    which is false for NaN.
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
        return Counted(TRACE_RECORDS, (), beyond)
    if judge.data.reduced is not None:
        return Counted(
            "windows" if per_window else f"{judge.data.unit}s",
            (),
            judge.beyond(body, judge.data.reduced, per_window=per_window),
        )
    runs = timed == {True}
    units = counted_units(judge.data, timed=runs)
    every_run = runs and judge.data.drawn is None
    of = "windows" if per_window else "timed runs" if every_run else f"{judge.data.unit}s"
    if not units:
        raise NotMeasurable(f"there are no {of}")
    groups = windows(units) if per_window else tuple((u,) for u in units)
    if runs and not every_run and allowed_rate(clause) == 0:  # which no run may be beyond
        groups = by_request(judge.data.runs)
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

    For a sample the binomial tail decides, exactly in k, n and the rate, not the printed limit.
    """
    if not sample:
        return _from_bool(found.rate <= budget.rate)
    if rates.shows_below(found.k, found.n, budget.rate, confidence):
        return "held"
    above = rates.shows_above(found.k, found.n, budget.rate, confidence)
    return "violated" if above else "unknown"


# --- traces --------------------------------------------------------------------------------------


def has_fields(formula: HasFields, record: object) -> bool:
    """Return whether a trace record has every field of a clause, not null and not empty."""
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


def _or(outcomes: Sequence[Outcome]) -> Outcome:
    return _not(_and([_not(outcome) for outcome in outcomes]))


# --- counterexamples -----------------------------------------------------------------------------


def counterexample(clause: Clause, judge: Judge, found: Counted | None) -> dict[str, Any]:
    """Return the violation of a clause: the worst request with token and value, or the first
    records that lack fields; empty if no single unit violates it."""
    comparison = main_comparison(clause.require)
    if isinstance(clause.require, HasFields):
        lacking = [
            str(record.get("request"))
            for record in judge.data.records
            if not has_fields(clause.require, record)
        ]
        return {"records": lacking[:5]}
    if found is None or comparison is None or not any(found.beyond):
        return {}
    if judge.data.reduced is not None:
        windows = found.of == "windows"
        return worst_request(
            judge.data.reduced, found.beyond, windows, _inner(comparison), comparison.op
        )
    units = [
        u for group, beyond in zip(found.groups, found.beyond, strict=True) if beyond for u in group
    ]
    return _worst_unit(_inner(comparison), comparison.op, units)


def _inner(comparison: Compare) -> Term:
    side = comparison.left
    return side.of if isinstance(side, Statistic) else side


def _worst_unit(term: Term, op: str, units: list[SamplingUnit]) -> dict[str, Any]:
    try:
        values = unit_values(term, units, {})
    except NotMeasurable:
        return {}
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
