"""From a decided clause to the row of the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kcdsl.ir.terms import (
    Clause,
    Compare,
    EvidenceKind,
    HasFields,
    Level,
    Metric,
    Number,
    Program,
    Statistic,
    Term,
)
from kcdsl.ir.walk import subterms
from kcdsl.verdict.health import deviation
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.report import ClauseResult, Estimator, ExceedanceCount
from kcdsl_backends.empirical import statistics
from kcdsl_backends.empirical.clauses import label, metrics_of, statistic_count
from kcdsl_backends.empirical.decide import (
    Counted,
    Judge,
    count,
    evidence_kind,
    has_fields,
    judge_for,
    main_comparison,
    within_budget,
)
from kcdsl_backends.empirical.estimate import unit_values
from kcdsl_backends.empirical.interval import Outcome
from kcdsl_backends.empirical.measured import SliceData, Unit
from kcdsl_backends.empirical.metrics.measures import Measure
from kcdsl_backends.empirical.statistics import Exceedance, NotMeasurable

_UNITS = {
    "kl": "nat",
    "kl_infer_train": "nat",
    "jeffreys": "nat",
    "js": "nat",
    "log_ratio": "nat",
    "w_log_w": "nat",
    "w_log_w_minus": "nat",
    "k1": "nat",
    "k2": "nat",
    "k3": "nat",
    "log_ratio_linf": "nat",
    "latency": "s",
    "throughput": "tok/s",
    "peak_memory": "B",
}


@dataclass(frozen=True, slots=True)
class _Figures:
    """What is printed of a clause beside its verdict."""

    metric: str
    unit: str
    op: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    threshold: float | None


def decide_clause(
    clause: Clause,
    program: Program,
    data: SliceData,
    *,
    seed: int,
    confidence: float = statistics.CONFIDENCE,
    blocked: str | None = None,
) -> ClauseResult:
    """Decide one clause on one slice.

    `blocked` says why no value of the model may be trusted (a failed precheck); the clause is then
    `InvalidEvidence` whatever was measured.
    """
    judge = judge_for(clause, data, seed, confidence)
    try:
        found = _count_if_possible(clause, judge)
        figures = _figures(clause, judge)
        outcome = _outcome(clause, judge, found, confidence)
    except NotMeasurable as error:
        return _row(
            clause, program, data, _nothing(clause, data), InvalidEvidence(str(error)), None
        )
    exceedance = found.exceedance(confidence) if found is not None and found.beyond else None
    verdict = _verdict(clause, judge, outcome, figures, found, exceedance)
    obstacle = blocked or _demand(clause, data)
    if blocked is not None:
        verdict = InvalidEvidence(blocked)
    elif obstacle is not None and not isinstance(verdict, Violated):
        verdict = Inconclusive(obstacle)
    counts = None
    if found is not None and exceedance is not None:
        counts = ExceedanceCount(
            exceedance.k, exceedance.n, found.of, exceedance.low, exceedance.high
        )
    return _row(clause, program, data, figures, verdict, counts, confidence)


def invalid(clause: Clause, program: Program, data: SliceData, reason: str) -> ClauseResult:
    """Return the row of a clause that has no usable evidence."""
    return _row(clause, program, data, _nothing(clause, data), InvalidEvidence(reason), None)


def _demand(clause: Clause, data: SliceData) -> str | None:
    """Return why measuring cannot satisfy the kind of evidence that a clause demands."""
    match clause.evidence:
        case EvidenceKind.PROOF | EvidenceKind.PROOF_REAL | EvidenceKind.PROBABILISTIC as kind:
            return f"the clause demands {kind}, and running the kernels only measures"
        case EvidenceKind.CENSUS if evidence_kind(clause, data.measures) is EvidenceKind.SAMPLE:
            return "the clause demands a census, but its values vary from run to run"
        case _:
            return None


def _count_if_possible(clause: Clause, judge: Judge) -> Counted | None:
    if clause.budget is not None:
        found = count(clause, judge)
        if found is None:
            raise NotMeasurable(f"a single one of the {clause.budget.unit} has no value here")
        return found
    try:
        return count(clause, judge)
    except NotMeasurable:  # a slice may have a value where a single unit has none (0 in 1 / x)
        return None


def _outcome(clause: Clause, judge: Judge, found: Counted | None, confidence: float) -> Outcome:
    if clause.budget is None:
        return judge.outcome(clause.require)
    assert found is not None
    return within_budget(found.exceedance(confidence), clause.budget, judge.sample)


def _verdict(
    clause: Clause,
    judge: Judge,
    outcome: Outcome,
    figures: _Figures,
    found: Counted | None,
    exceedance: Exceedance | None,
) -> Verdict:
    match outcome:
        case "held":
            return Held()
        case "violated":
            return Violated(_counterexample(clause, judge, figures, found))
        case "unknown":
            return Inconclusive(_why_open(clause, figures, exceedance, found))


def _why_open(
    clause: Clause, figures: _Figures, exceedance: Exceedance | None, found: Counted | None
) -> str:
    if clause.budget is not None and exceedance is not None and found is not None:
        needed = statistics.units_for_budget(clause.budget.rate)
        return (
            f"{exceedance.k} of {exceedance.n} {found.of} exceed, which allows a rate of up to "
            f"{exceedance.high:.3g}; without any, {needed} would show {float(clause.budget.rate):g}"
        )
    if figures.value is None or figures.threshold is None:
        return "the limits of the sample do not decide it"
    return (
        f"the threshold {figures.threshold:g} lies between the limits "
        f"[{_end(figures.low)}, {_end(figures.high)}] of {figures.n} units"
    )


def _end(limit: float | None) -> str:
    return "none" if limit is None else f"{limit:.4g}"


# --- figures -------------------------------------------------------------------------------------


def _figures(clause: Clause, judge: Judge) -> _Figures:
    """Return the numbers of a comparison; a compound clause has none, only its text."""
    comparison = main_comparison(clause.require)
    if comparison is None:
        return _of_fields(clause, judge)
    left, right, n = judge.sides(comparison)
    threshold, op = right, comparison.op
    term = comparison.left
    if isinstance(comparison.left, Number):
        left, threshold, term, op = right, left, comparison.right, _FLIPPED[op]
    return _Figures(
        label(term),
        _unit(term, judge.data),
        op,
        _double(left.value),
        _float(left.low),
        _float(left.high),
        n,
        _double(threshold.value),
    )


def _of_fields(clause: Clause, judge: Judge) -> _Figures:
    n = len(judge.data.requests)
    if not isinstance(clause.require, HasFields):
        return _Figures(clause.text or clause.id, "1", "", None, None, None, n, None)
    records = judge.data.records
    present = sum(has_fields(clause.require, record) for record in records)
    share = present / len(records) if records else None
    name = f"coverage({', '.join(clause.require.fields)})"
    return _Figures(name, "ratio", "==", share, None, None, len(records), 1.0)


def _nothing(clause: Clause, data: SliceData) -> _Figures:
    comparison = main_comparison(clause.require)
    if comparison is None:
        return _Figures(clause.text or clause.id, "1", "", None, None, None, 0, None)
    swapped = isinstance(comparison.left, Number)
    term = comparison.right if swapped else comparison.left
    other = comparison.left if swapped else comparison.right
    threshold = _double(other.value) if isinstance(other, Number) else None
    op = _FLIPPED[comparison.op] if swapped else comparison.op
    return _Figures(label(term), _unit(term, data), op, None, None, None, 0, threshold)


_FLIPPED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<", "==": "=="}


def _unit(term: Term, data: SliceData) -> str:
    names = [t.name for t in subterms(term) if isinstance(t, Metric)]
    if len(names) != 1:
        return "1"
    measure = data.measures.get(names[0])
    if measure is not None and measure.unit:
        return measure.unit
    if names[0] in _UNITS:
        return _UNITS[names[0]]
    return "ratio" if measure is not None and measure.high == 1.0 else "1"


def _float(limit: Fraction | None) -> float | None:
    return None if limit is None else _double(limit)


def _double(value: Fraction) -> float:
    """Return the nearest float64; infinite beyond the greatest."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# --- counterexamples -----------------------------------------------------------------------------


def _counterexample(
    clause: Clause, judge: Judge, figures: _Figures, found: Counted | None
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
    units = [
        u for group, beyond in zip(found.groups, found.beyond, strict=True) if beyond for u in group
    ]
    worst = _worst_unit(_inner(comparison), figures.op, units)
    return example if worst is None else {**example, **worst}


def _inner(comparison: Compare) -> Term:
    side = comparison.right if isinstance(comparison.left, Number) else comparison.left
    return side.of if isinstance(side, Statistic) else side


def _worst_unit(term: Term, op: str, units: list[Unit]) -> dict[str, Any] | None:
    try:
        values = unit_values(term, units)
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


# --- the row -------------------------------------------------------------------------------------


def _row(
    clause: Clause,
    program: Program,
    data: SliceData,
    figures: _Figures,
    verdict: Verdict,
    exceedance: ExceedanceCount | None,
    confidence: float = statistics.CONFIDENCE,
) -> ClauseResult:
    broken = isinstance(verdict, Violated | InvalidEvidence)
    budget = clause.budget
    shared = 1 - (1 - confidence) / statistic_count(clause.require)
    return ClauseResult(
        clause=clause.id,
        family=clause.family.value,
        level=clause.level.value,
        slice=data.name,
        requirement=clause.text or figures.metric,
        metric=figures.metric,
        unit=figures.unit,
        op=figures.op,
        value=figures.value,
        low=figures.low,
        high=figures.high,
        n=figures.n,
        counted=exceedance.of if exceedance is not None else "requests",
        threshold=figures.threshold,
        verdict=verdict,
        evidence=evidence_kind(clause, data.measures).value,
        confidence=shared,
        exceedance=exceedance,
        budget=None if budget is None else f"{float(budget.rate) * 100:g}% of {budget.unit}",
        action=action_of(clause, program) if broken else None,
        deviation=_deviation(clause, figures, verdict, exceedance),
        estimators=tuple(
            _estimator(data.measures[name])
            for name in sorted(metrics_of(clause.require))
            if name in data.measures
        ),
        holdout=clause.holdout,
    )


def action_of(clause: Clause, program: Program) -> str:
    """Return the action that a violated clause calls for: its own, else that of the policy."""
    return clause.action or program.escalation.action(clause.family, clause.level)


def called(results: tuple[ClauseResult, ...]) -> list[tuple[Level, str]]:
    """Return level and action of every result that calls for one."""
    return [(Level(r.level), r.action) for r in results if r.action is not None]


def _deviation(
    clause: Clause, figures: _Figures, verdict: Verdict, exceedance: ExceedanceCount | None
) -> float:
    """Return v_c: of the exceedance rate for a soft clause, of the value for a hard one.

    A trace clause deviates by the share of records without the fields; a compound clause, which
    has no number, by one unit where it is violated.
    """
    if isinstance(verdict, InvalidEvidence):
        return float("inf")
    if isinstance(clause.require, HasFields):
        return 0.0 if figures.value is None else 1.0 - figures.value
    if clause.budget is not None and exceedance is not None:
        return deviation(exceedance.rate, float(clause.budget.rate), "lower")
    if figures.value is None or figures.threshold is None:
        return 1.0 if isinstance(verdict, Violated) else 0.0
    if figures.op == "==":
        return 0.0 if figures.value == figures.threshold else float("inf")
    better = "higher" if figures.op in (">=", ">") else "lower"
    return deviation(figures.value, figures.threshold, better)


def _estimator(measure: Measure) -> Estimator:
    return Estimator(
        measure.tier,
        measure.estimator,
        measure.bias,
        measure.counted,
        measure.better,
        measure.direction,
    )
