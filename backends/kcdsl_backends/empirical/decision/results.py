"""From clauses to rows of the report, with correction for multiplicity.

Passes are not corrected: a contract holds only if all its clauses do, and a false one is accepted
with at most its own error. A violation is reported if any clause is violated, so the probability of
a false one grows with their number; Holm's method keeps it below the error. A clause that is
violated at its own level only is inconclusive, never a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl.inequalities import round_down, round_up
from kcdsl.ir.escalation import severity
from kcdsl.ir.formulas import subterms
from kcdsl.ir.obligations import Obligation
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import (
    Budget,
    Clause,
    Compare,
    EvidenceKind,
    HasFields,
    Metric,
    Number,
    Program,
    Term,
)
from kcdsl.metrics import MetricDefinition
from kcdsl.verdict.health import deviation, over_budget
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.quantities import nearest_double
from kcdsl.verdict.report import Statistics
from kcdsl.verdict.result import ClauseResult, Estimator, ExceedanceCount, RateLimit
from kcdsl_backends.empirical.decision.judgement import (
    Counted,
    Judge,
    count,
    counterexample,
    evidence_kind,
    has_fields,
    judge_for,
    within_budget,
)
from kcdsl_backends.empirical.decision.power import Display, rate_limit, units_needed, why_open
from kcdsl_backends.empirical.metrics.measures import unit_of
from kcdsl_backends.empirical.statistics import estimates
from kcdsl_backends.empirical.statistics.estimates import (
    ONE_LOOK,
    Confidence,
    EstimateInterval,
    NotMeasurable,
    Outcome,
)
from kcdsl_backends.empirical.table.evidence import SliceData
from kcdsl_backends.empirical.table.requirements import (
    main_comparison,
    measured_anew,
    metrics_of,
    statistic_count,
)


def decide_clause(
    clause: Clause,
    program: Program,
    data: SliceData,
    *,
    seed: int,
    confidence: Confidence = estimates.ONE_LOOK,
    violation_error: Fraction | None = None,
    blocked: str | None = None,
) -> ClauseResult:
    """Decide one clause on one slice.

    `violation_error` is the error level of violations, corrected for multiplicity; a clause that is
    violated only at the larger one of `confidence` is inconclusive. `blocked` is the reason why
    values of the model cannot be trusted (a failed precheck); the clause is then `InvalidEvidence`
    whatever was measured.
    """
    anew = _without_limits(clause, program, data, confidence)
    judge = judge_for(clause, data, seed, None if anew else confidence)
    try:
        found = _count_if_possible(clause, judge)
        display = display_of(clause, judge)
        outcome = _outcome(clause, judge, found, None if anew else confidence)
        chance = anew
        if judge.sample and outcome == "violated" and not anew:
            chance = _by_chance(clause, data, seed, confidence, violation_error, found)
    except NotMeasurable as error:
        return _row(
            clause, program, data, display_without_values(clause, data), InvalidEvidence(str(error))
        )
    exceedance = found.exceedance(confidence) if found is not None and found.beyond else None
    counts = shows = enough = None
    if found is not None and exceedance is not None:
        k, n, low, high = exceedance.k, exceedance.n, exceedance.low, exceedance.high
        limits = (None, None) if anew else (low, high)
        counts = ExceedanceCount(k, n, found.of, *limits)
        if judge.sample and not anew:
            shows = rate_limit(clause, found.of, exceedance, confidence)
    verdict: Verdict
    match outcome:
        case "held":
            verdict = Held()
        case "violated" if chance is None or anew:
            verdict = Violated(
                {"value": display.value, "threshold": display.threshold}
                | counterexample(clause, judge, found)
            )
        case _:
            enough = None if anew else units_needed(clause, display, exceedance, confidence)
            why = why_open(clause, display, shows, enough, confidence)
            if data.batch and clause.evidence is None and display.low is display.high is None:
                why += "; `evidence: census` in the clause asks about this batch alone"
            verdict = Inconclusive(chance or why)
    obstacle = blocked or _demand(clause, data)
    if blocked is not None:
        verdict, shows, enough = InvalidEvidence(blocked), None, None
    elif obstacle is not None and not isinstance(verdict, Violated):
        verdict, enough = Inconclusive(obstacle), None
    return _row(
        clause, program, data, display, verdict, counts, confidence, shows=shows, enough=enough
    )


def invalid(clause: Clause, program: Program, data: SliceData, reason: str) -> ClauseResult:
    """Return the row of a clause that has no usable evidence."""
    return _row(
        clause, program, data, display_without_values(clause, data), InvalidEvidence(reason)
    )


def _demand(clause: Clause, data: SliceData) -> str | None:
    """Return why measurements are not the kind of evidence that a clause demands."""
    match clause.evidence:
        case EvidenceKind.PROOF | EvidenceKind.PROOF_REAL | EvidenceKind.PROBABILISTIC as kind:
            return f"the clause demands {kind}, and running the kernels only measures"
        case EvidenceKind.CENSUS if evidence_kind(clause, data) is EvidenceKind.SAMPLE:
            return "the clause demands a census, but its values vary from run to run"
        case _:
            return None


def _without_limits(
    clause: Clause, program: Program, data: SliceData, confidence: Confidence
) -> str | None:
    """Return why a sample has no limit that holds at every look; None if it may have some.

    Limits at every look need one growing sequence of values. If each look measures its requests
    again, every look is a sample of its own, and some of many pass by chance.
    """
    sampled = evidence_kind(clause, data) is EvidenceKind.SAMPLE
    if not (confidence.anytime and sampled and data.reduced is None):
        return None
    if not measured_anew(clause.require, program):
        return None
    return "its values are measured anew at every look: plan the looks (--looks K)"


def _count_if_possible(clause: Clause, judge: Judge) -> Counted | None:
    if clause.budget is not None:
        found = count(clause, judge)
        if found is None:
            raise NotMeasurable(f"a single one of the {clause.budget.unit} has no value here")
        return found
    try:
        return count(clause, judge)
    except NotMeasurable:  # a slice may have a value if a single unit has none (0 in 1 / x)
        return None


def _outcome(
    clause: Clause, judge: Judge, found: Counted | None, confidence: Confidence | None
) -> Outcome:
    if clause.budget is None:
        return judge.outcome(clause.require)
    if confidence is None:
        return "unknown"
    assert found is not None
    return within_budget(found.exceedance(confidence), clause.budget, judge.sample, confidence)


def _by_chance(
    clause: Clause,
    data: SliceData,
    seed: int,
    confidence: Confidence,
    violation_error: Fraction | None,
    found: Counted | None,
) -> str | None:
    """Return why a sampled violation is not one at the level of the whole report; None if it is."""
    if violation_error is None or violation_error >= confidence.error:
        return None
    strict = replace(confidence, error=violation_error)
    again = _outcome(clause, judge_for(clause, data, seed, strict), found, strict)
    if again == "violated":
        return None
    return (
        f"violated at {100 * confidence.share:.4g} % by itself, but not at the "
        f"{100 * strict.share:.6g} % that one of so many sampled results needs (Holm)"
    )


# --- numbers and counterexamples ------------------------------------------------------------------


def display_of(clause: Clause, judge: Judge) -> Display:
    """Return the printed numbers of a comparison; a compound clause has only its text."""
    comparison = main_comparison(clause.require)
    if comparison is None:
        return _of_fields(clause, judge)
    left, right, n = judge.sides(comparison)
    return Display(
        term_text(comparison.left),
        _unit(comparison.left, judge.data),
        comparison.op,
        nearest_double(left.value),
        None if left.low is None else round_down(left.low),
        None if left.high is None else round_up(left.high),
        n,
        nearest_double(right.value),
        _compared(comparison, left, right, sample=judge.sample),
    )


def _compared(
    comparison: Compare, left: EstimateInterval, right: EstimateInterval, *, sample: bool
) -> Fraction | None:
    """Return the value of the obligation's quantity; None for two sampled terms, whose limits do
    not hold jointly at the level of each."""
    if isinstance(comparison.right, Number):
        return left.value
    return None if sample else left.value - right.value


def _of_fields(clause: Clause, judge: Judge) -> Display:
    if not isinstance(clause.require, HasFields):
        return Display(clause.text or clause.id, n=judge.data.size)
    records = judge.data.records
    present = sum(has_fields(clause.require, record) for record in records)
    share = Fraction(present, len(records)) if records else None
    name = f"coverage({', '.join(clause.require.fields)})"
    value = None if share is None else float(share)
    return Display(name, "ratio", "==", value, n=len(records), threshold=1.0, exact=share)


def display_without_values(clause: Clause, data: SliceData) -> Display:
    """Return the printed numbers of a clause without measured values."""
    comparison = main_comparison(clause.require)
    if comparison is None:
        return Display(clause.text or clause.id)
    term, limit = comparison.left, comparison.right
    threshold = nearest_double(limit.value) if isinstance(limit, Number) else None
    unit = _unit(term, data)
    return Display(term_text(term), unit, comparison.op, threshold=threshold)


def _unit(term: Term, data: SliceData) -> str:
    names = [t.name for t in subterms(term) if isinstance(t, Metric)]
    if len(names) != 1:
        return "1"
    return unit_of(data.measures.get(names[0]))


# --- the row -------------------------------------------------------------------------------------


def _row(
    clause: Clause,
    program: Program,
    data: SliceData,
    display: Display,
    verdict: Verdict,
    exceedance: ExceedanceCount | None = None,
    confidence: Confidence = estimates.ONE_LOOK,
    *,
    shows: RateLimit | None = None,
    enough: int | None = None,
) -> ClauseResult:
    budget = clause.budget
    shared = confidence.divided(statistic_count(clause.require))
    return ClauseResult(
        clause=clause.id,
        family=clause.family.value,
        level=clause.level.value,
        slice=data.name,
        requirement=clause.text or display.metric,
        metric=display.metric,
        unit=display.unit,
        op=display.op,
        value=display.value,
        low=display.low,
        high=display.high,
        n=display.n,
        counted=exceedance.of if exceedance is not None else f"{data.unit}s",
        threshold=display.threshold,
        verdict=verdict,
        evidence=evidence_kind(clause, data).value,
        confidence=shared.share,
        exceedance=exceedance,
        budget=None if budget is None else _budget(budget, data.unit),
        action=_requested_action(clause, program, verdict),
        deviation=_deviation(clause, display, verdict, exceedance),
        estimators=tuple(
            _estimator(data.measures[name])
            for name in sorted(metrics_of(clause.require))
            if name in data.measures
        ),
        holdout=clause.holdout,
        shown=shows,
        needed=enough,
        exact_value=display.exact,
    )


def _budget(budget: Budget, unit: str) -> str:
    units = f"{unit}s" if budget.unit == "requests" else budget.unit
    return f"{float(budget.rate) * 100:g}% of {units}"


def _requested_action(clause: Clause, program: Program, verdict: Verdict) -> str | None:
    """Return the action that a result requests.

    An undecided hard clause requests its own action, but at most freezing the promotion, since
    nothing shows that the kernel in use is bad.
    """
    own = action_of(clause, program)
    match verdict:
        case Violated() | InvalidEvidence():
            return own
        case Inconclusive() if clause.budget is None:
            return min(own, "freeze", key=severity)
        case _:
            return None


def action_of(clause: Clause, program: Program) -> str:
    """Return the action of a violated clause: its own, else that of the policy."""
    return clause.action or program.escalation.action(clause.family, clause.level)


def _deviation(
    clause: Clause, display: Display, verdict: Verdict, exceedance: ExceedanceCount | None
) -> float:
    """Return v_c: of the exceedance rate for a soft clause, of the value for a hard one.

    0 for a clause that is neither violated nor without evidence.

    For a trace clause it is the share of records without the fields; for a compound clause, which
    has no number, 1 if it is violated.
    """
    if isinstance(verdict, InvalidEvidence):
        return float("inf")
    if isinstance(clause.require, HasFields):
        return 0.0 if display.value is None else 1.0 - display.value
    if clause.budget is not None and exceedance is not None:
        return over_budget(exceedance.rate, float(clause.budget.rate))
    if display.value is None or display.threshold is None:
        return 1.0 if isinstance(verdict, Violated) else 0.0
    if display.op == "==":
        return 0.0 if display.value == display.threshold else float("inf")
    better = "higher" if display.op in (">=", ">") else "lower"
    return deviation(display.value, display.threshold, better)


def _estimator(measure: MetricDefinition) -> Estimator:
    return Estimator(
        measure.tier,
        measure.formula,
        measure.bias,
        measure.per,
        measure.better,
        measure.estimates,
    )


# --- all cases -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecisionCase:
    """An obligation with the data of its slice; `blocked` is the reason why the evidence cannot be
    trusted."""

    obligation: Obligation
    data: SliceData
    blocked: str | None = None


def decide_all(
    cases: Sequence[DecisionCase], program: Program, seed: int, looks: int | None = 1
) -> tuple[tuple[ClauseResult, ...], Statistics]:
    """Decide every case; return the rows and how the error was shared."""
    confidence = estimates.confidence_over(looks)

    def decide(case: DecisionCase, violation_error: Fraction | None = None) -> ClauseResult:
        row = decide_clause(
            case.obligation.part,
            program,
            case.data,
            seed=seed,
            confidence=confidence,
            violation_error=violation_error,
            blocked=case.blocked,
        )
        comparison = case.obligation.comparison
        limit = None if comparison is None else comparison.threshold
        return replace(row, obligation=case.obligation.id, exact_threshold=limit)

    rows = [decide(case) for case in cases]
    sampled = [i for i, row in enumerate(rows) if row.evidence == "sample"]
    violated = [i for i in sampled if isinstance(rows[i].verdict, Violated)]
    found, level = estimates.holm(
        len(sampled),
        confidence.error,
        violated,
        lambda i, error: isinstance(decide(cases[i], error).verdict, Violated),
    )
    for i in violated:
        if i not in found:
            rows[i] = decide(cases[i], level)
    return tuple(rows), Statistics(
        error=float(ONE_LOOK.error),
        looks=looks,
        limit_error=float(confidence.error),
        sampled=len(sampled),
        violation_error=float(level),
    )
