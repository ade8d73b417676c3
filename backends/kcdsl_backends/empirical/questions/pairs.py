"""Runs on the same requests, compared unit by unit: candidate against incumbent, and 2×2 designs.

Requests differ more than kernels do, so values of the same request are compared.
Holm's method decides over all rows which of them changed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NOT_IN_TRACE
from kcdsl.ir.obligations import Obligation, obligations_of
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Compare, Metric, Number, Program, Statistic
from kcdsl.verdict.model import InvalidEvidence, verdict_name
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import ClauseResult
from kcdsl.verdict.result import reason as verdict_reason
from kcdsl.verdict.studies.causes import EFFECTS, FAILED, Effect, Place
from kcdsl.verdict.studies.comparison import (
    OF_TIMED_RUNS,
    Band,
    Floor,
    MeasureDelta,
    PairedRow,
    PassRate,
    RunComparison,
)
from kcdsl_backends.empirical.decision.aligned import (
    change_of,
    equally_timed,
    magnitude,
    orders_of,
    within_of_requests,
)
from kcdsl_backends.empirical.decision.estimates import Settings
from kcdsl_backends.empirical.decision.judgement import Judge, count
from kcdsl_backends.empirical.decision.report import conclude, sampled_data, slice_data
from kcdsl_backends.empirical.metrics.measures import MAGNITUDES
from kcdsl_backends.empirical.questions.baselines import Document, bands, floors, usable, within
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from kcdsl_backends.empirical.statistics.paired import (
    ERROR,
    PairedChange,
    change_of_shares,
    rejected,
)
from kcdsl_backends.empirical.table.evidence import EvidenceTable, SliceData
from kcdsl_backends.empirical.table.requirements import (
    FAILURE_RATE,
    allowed_rate,
    better_of,
    is_mean,
    metrics_of,
    reads_times,
    split,
    threshold,
)

_KINDS: Mapping[str, Any] = {"statistical": "quality", "runtime": "cost"}
_Found = list[tuple[PairedRow, PairedChange | None]]


@dataclass(frozen=True, slots=True)
class _Run:
    """The evidence and the results of one run, by slice and by obligation."""

    evidence: EvidenceTable
    report: Report
    slices: Mapping[str, SliceData]
    results: Mapping[str, ClauseResult]
    obligations: Mapping[str, Obligation]

    @classmethod
    def of(cls, evidence: EvidenceTable) -> _Run:
        report = conclude(evidence)
        return cls(
            evidence,
            report,
            sampled_data(evidence, slice_data(evidence)),
            {row.obligation: row for row in report.clauses},
            {obligation.id: obligation for obligation in _obligations(evidence)},
        )


def compare_runs(
    incumbent: EvidenceTable,
    candidate: EvidenceTable,
    *,
    history: Mapping[str, Document] | None = None,
    references: Mapping[str, Document] | None = None,
    untrusted: Mapping[str, str] | None = None,
) -> RunComparison:
    """Compare the evidence of an incumbent and of a candidate.

    `history` are reports of earlier runs, `references` those of reference builds, by file;
    `untrusted` names files of them that are left out, with the reason. Raises Refusal (KC632) if
    the runs differ in requests, model or temperature.
    """
    refuse_other_requests(incumbent, candidate)
    runs = [_Run.of(incumbent), _Run.of(candidate)]
    report = runs[1].report
    own = report.to_json()
    baselines = usable(own, history or {}, references or {}, untrusted or {})
    banded = bands(report.clauses, own, baselines.history, ERROR) if history else {}
    floored = floors(report.clauses, own, baselines.references)
    return RunComparison(
        candidate.contract,
        tuple(_differences(incumbent, candidate)),
        ERROR,
        _with_verdicts(_paired(runs, runs[1].obligations, floored, banded)),
        tuple(_measures(*runs)),
        len(baselines.history),
        len(baselines.references),
        baselines.unused or {},
    )


def effects_of(cells: Mapping[Place, EvidenceTable]) -> tuple[Effect, ...]:
    """Return the effects on each obligation of a new checkpoint, of new kernels, and of both.

    `cells` are runs on the same requests, by (checkpoint, kernels), each "previous" or "present".
    The one with both present is required, and its contract defines the obligations. The rows of all
    effects share one error level.
    """
    runs = {place: _Run.of(evidence) for place, evidence in cells.items()}
    obligations = runs[FAILED].obligations
    found: list[tuple[str, str, _Found]] = [
        (factor, at, _paired([runs[place] for place in places], obligations))
        for (factor, at), places in EFFECTS.items()
        if all(place in runs for place in places)
    ]
    judged = iter(_with_verdicts([row for _, _, rows in found for row in rows]))
    return tuple(
        Effect(factor, at, tuple(next(judged) for _ in rows)) for factor, at, rows in found
    )


def refuse_other_requests(incumbent: EvidenceTable, candidate: EvidenceTable) -> None:
    """Refuse (KC632) runs that are not about the same requests at one temperature."""
    known = [{r.key: r.tokens for r in each.requests} for each in (incumbent, candidate)]
    lacking = [key for key, tokens in known[1].items() if known[0].get(key) != tokens]
    lacking += [key for key in known[0] if key not in known[1]]
    if lacking:
        raise refuse(
            NOT_IN_TRACE,
            f"the runs are about other requests: {len(lacking)} differ, {lacking[0]} first",
            help="evaluate both on the same data",
        )
    one, two = (each.program.constants.temperature for each in (incumbent, candidate))
    if one != two:
        raise refuse(
            NOT_IN_TRACE,
            "the runs have other temperatures",
            help="evaluate both at one temperature",
        )


def _paired(
    runs: Sequence[_Run],
    obligations: Mapping[str, Obligation],
    floored: Mapping[str, Floor] | None = None,
    banded: Mapping[str, Band] | None = None,
) -> _Found:
    """Compare the runs on each obligation; the last run is the candidate."""
    found = _Found()
    for name, obligation in obligations.items():
        rows = [run.results.get(name) for run in runs]
        if rows[-1] is None:
            continue
        row = replace(
            _row(obligation, rows[0], rows[-1]),
            floor=(floored or {}).get(name),
            band=(banded or {}).get(name),
        )
        try:
            _refuse_unequal(name, obligation, runs)
            data = equally_timed([run.slices[obligation.slice or ""] for run in runs])
            change = _changed(obligation, data, row.floor)
            timed = reads_times(obligation.part.require)
            found.append((replace(row, counted=OF_TIMED_RUNS) if timed else row, change))
        except NotMeasurable as error:
            found.append((replace(row, reason=str(error)), None))
    return found


def _refuse_unequal(name: str, obligation: Obligation, runs: Sequence[_Run]) -> None:
    """Raise NotMeasurable if a run has no valid evidence for an obligation, or another
    obligation."""
    rows = [run.results.get(name) for run in runs]
    invalid = [row for row in rows if row and isinstance(row.verdict, InvalidEvidence)]
    if invalid:
        raise NotMeasurable(f"invalid evidence: {verdict_reason(invalid[-1].verdict)}")
    for run in runs:
        own = run.obligations.get(name)
        if name not in run.results or own is None or not _same_question(own, obligation):
            raise NotMeasurable("the incumbent's contract asks something else here")
    names = metrics_of(obligation.part.require)
    if any(_computed_by(run, names) != _computed_by(runs[-1], names) for run in runs):
        raise NotMeasurable("the runs computed it by other functions or constants")


def _computed_by(run: _Run, names: Container[str]) -> tuple[object, ...]:
    """Return what defines the values of metrics beside the requirement: declarations and files of
    the user's own, and the constants of `grad_bias`."""
    program, recorded = run.evidence.program, run.evidence.environment.get("metrics", ())
    files = {each["name"]: each["sha256"] for each in recorded}
    own = {m.name: (m, files.get(m.name)) for m in program.metrics if m.name in names}
    stated = program.constants.advantage_max, program.constants.score_norm_max
    return own, stated if "grad_bias" in names else None


def _obligations(evidence: EvidenceTable) -> Iterator[Obligation]:
    """Yield the obligations of a run, in the order of its contract."""
    clauses, _ = split(expand_tables(evidence.program), frozenset(evidence.slices))
    for clause in clauses:
        for name in clause.slices or tuple(evidence.slices):
            if name in evidence.slices:
                yield from obligations_of(clause, name)


def _same_question(one: Obligation, two: Obligation) -> bool:
    return one.part.require == two.part.require and one.part.budget == two.part.budget


def _row(obligation: Obligation, one: ClauseResult | None, two: ClauseResult) -> PairedRow:
    return PairedRow(
        obligation=obligation.id,
        clause=two.clause,
        slice=two.slice,
        requirement=two.requirement,
        level=two.level,
        change="not_compared",
        unit=two.unit,
        counted=two.counted,
        verdicts=("" if one is None else verdict_name(one.verdict), verdict_name(two.verdict)),
        family=two.family,
        op=two.op,
        threshold=two.threshold,
        rates=(None if one is None else _rate(one), _rate(two)),
        incumbent=None if one is None else one.value,
        candidate=two.value,
    )


def _rate(row: ClauseResult) -> PassRate | None:
    """Return the rate of units within the threshold, from the number beyond it."""
    counted = row.exceedance
    if counted is None or not counted.n:
        return None
    low = None if counted.high is None else 1 - counted.high
    high = None if counted.low is None else 1 - counted.low
    return PassRate(counted.n - counted.k, counted.n, counted.of, low, high)


# --- one row --------------------------------------------------------------------------------------


def _changed(
    obligation: Obligation, runs: Sequence[SliceData], floor: Floor | None
) -> PairedChange:
    """Compare the units of the runs; raises NotMeasurable if they cannot be compared.

    Units are compared with the threshold, or with the noise floor if the threshold is stricter.
    """
    part = obligation.part
    compared = threshold(part.require)
    if compared is None:
        raise NotMeasurable("it is no comparison with a number")
    term, op, tau = compared
    if term == FAILURE_RATE:
        ordered = [sorted(data.requests, key=lambda unit: unit.key) for data in runs]
        if len({tuple(unit.key for unit in units) for units in ordered}) > 1:
            raise NotMeasurable("other requests were measured")
        kept = [np.array([unit.failure is None for unit in units]) for units in ordered]
        return change_of_shares(kept)
    if is_mean(part) or (part.budget is None and magnitude(term) is not None):
        return change_of(term, runs, upward=better_of(obligation) == "higher")[1]
    if allowed_rate(part) is None or not isinstance(term, Statistic) or op == "==":
        raise NotMeasurable("it is no statement about single requests and no mean of them")
    if part.budget is not None and part.budget.unit == "windows":
        raise NotMeasurable("its units are windows of requests")
    counted = part
    if floor is not None and floor.above:
        tau, op = Fraction(floor.value), {"<": "<=", ">": ">="}.get(op, op)
        counted = replace(part, require=Compare(op, term, Number(tau)))
    shares = []
    for data, order in zip(runs, orders_of(term.of, runs), strict=True):
        every = replace(data, drawn=None)
        found = count(counted, Judge(every, Settings(0, None), sample=False))
        if found is None:
            raise NotMeasurable("a single unit has no value")
        shares.append(within_of_requests(~np.array(found.beyond)[order], term.of, data, order))
    return replace(change_of_shares(shares), compared_at=float(tau))


# --- all rows -------------------------------------------------------------------------------------


def _with_verdicts(found: Sequence[tuple[PairedRow, PairedChange | None]]) -> tuple[PairedRow, ...]:
    """Decide for every row whether it changed, with one error level for all of them."""
    compared = [change for _, change in found if change is not None]
    worse = rejected([change.harm for change in compared])
    better = rejected([change.use for change in compared])
    rows, place = [], 0
    for row, change in found:
        if change is None:
            rows.append(row)
            continue
        same = change.delta == 0.0 and change.low == change.high == 0.0
        verdict: Any = "unchanged" if same else "undecided"
        verdict = "regressed" if place in worse else "improved" if place in better else verdict
        if verdict == "regressed" and within(row.candidate, row.floor, row.op):
            verdict = "within_noise"
        place += 1
        rows.append(
            replace(
                row,
                change=verdict,
                n=change.n,
                worse=change.worse,
                better=change.better,
                delta=change.delta,
                low=change.low,
                high=change.high,
                error=min(change.harm, change.use),
                compared_at=change.compared_at,
            )
        )
    return tuple(rows)


def _measures(incumbent: _Run, candidate: _Run) -> Iterator[MeasureDelta]:
    """Yield the means of quality, reward and runtime cost that both runs measured everywhere."""
    for name, two in candidate.slices.items():
        one = incumbent.slices.get(name)
        if one is None or one.reduced is not None or two.reduced is not None:
            continue
        both = equally_timed((one, two))
        for metric, definition in two.measures.items():
            kind, gap = _KINDS.get(str(definition.family)), metric in MAGNITUDES
            if kind is None or not (gap or definition.kind == "pointwise"):
                continue
            if metric == "failure_rate" or _computed_by(incumbent, {metric}) != _computed_by(
                candidate, {metric}
            ):
                continue
            # What one kernel writes better than the other: a mean of their signed differences.
            better = "higher" if gap else definition.better
            term = Metric(metric) if gap else Statistic("mean", Metric(metric))
            try:
                values, found = change_of(term, both, upward=better == "higher", signed=True)
            except NotMeasurable:
                continue
            yield MeasureDelta(
                kind,
                metric,
                name,
                str(definition.dimension),
                better,
                found.n,
                values[0],
                values[1],
                found.delta,
                found.low,
                found.high,
            )


def _differences(incumbent: EvidenceTable, candidate: EvidenceTable) -> Iterator[str]:
    """Yield the differences between the runs other than their values."""
    if incumbent.contract.get("digest") != candidate.contract.get("digest"):
        yield from _contracts(incumbent.program, candidate.program)
    yield from _fields("model", incumbent.model, candidate.model)
    for role in ("train", "infer"):
        yield from _fields(f"{role} kernel", incumbent.kernels[role], candidate.kernels[role])
    yield from _fields("environment", incumbent.environment, candidate.environment)


def _contracts(one: Program, two: Program) -> Iterator[str]:
    """Yield a difference of clauses, slices or constants; model and kernels are compared
    elsewhere."""
    if (one.clauses, one.slices, one.constants) != (two.clauses, two.slices, two.constants):
        yield "clauses, slices or constants of the contract"


def _fields(name: str, one: Any, two: Any) -> Iterator[str]:
    """Yield the innermost fields that differ."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in sorted({*one, *two}):
            yield from _fields(f"{name}: {key}", one.get(key), two.get(key))
    elif one != two:
        yield name
