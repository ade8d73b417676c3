"""Candidate against incumbent: two evaluations on the same requests, compared unit by unit.

Requests differ more from each other than kernels do, so each request is compared with itself. Of a
statement about units, only those count that keep the threshold in one run alone (McNemar 1947,
exact by the binomial law); of a mean, the differences of the requests (the t law, by linearisation
where requests have several tokens). Holm's method decides over all rows which of them changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import stats

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NOT_IN_TRACE
from kcdsl.ir.obligations import HOLDS, Obligation, obligations_of
from kcdsl.ir.printer import term_text
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Abs, Metric, Program, Statistic, Term
from kcdsl.verdict.model import InvalidEvidence, verdict_name
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import ClauseResult
from kcdsl.verdict.result import reason as verdict_reason
from kcdsl.verdict.studies.pairing import Floor, MeasureDelta, PairedRow, PassRate, RunComparison
from kcdsl_backends.empirical.decide.report import conclude, slice_data
from kcdsl_backends.empirical.decide.values import Side, token_sums, units_of, worst_of_units
from kcdsl_backends.empirical.questions.baselines import Document, bands, floors, usable, within
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable, check_values, holm
from kcdsl_backends.empirical.table.evidence import Array, EvidenceTable, SliceData
from kcdsl_backends.empirical.table.requirements import (
    allowed_rate,
    better_of,
    is_mean,
    split,
    threshold,
)

ERROR = 0.05
FEWEST = 2
_KINDS: Mapping[str, Any] = {"statistical": "quality", "runtime": "cost"}


@dataclass(frozen=True, slots=True)
class _Change:
    """What was found of a row; `harm` and `use` are the one-sided chances without any change."""

    n: int
    delta: float
    low: float
    high: float
    harm: float
    use: float
    worse: int | None = None
    better: int | None = None
    compared_at: float | None = None


def compare_runs(
    incumbent: EvidenceTable,
    candidate: EvidenceTable,
    *,
    history: Mapping[str, Document] | None = None,
    references: Mapping[str, Document] | None = None,
    untrusted: Mapping[str, str] | None = None,
) -> RunComparison:
    """Compare what was measured of an incumbent and of a candidate.

    `history` are reports of earlier runs, `references` those of reference builds, by file;
    `untrusted` names files of them that are left out, with the reason. Raises Refusal (KC632) where
    the runs are not about the same requests, or not of one model at one temperature.
    """
    _refuse_others(incumbent, candidate)
    reports = [conclude(each) for each in (incumbent, candidate)]
    sides = [
        (slice_data(each), _results(report))
        for each, report in zip((incumbent, candidate), reports, strict=True)
    ]
    own = reports[1].to_json()
    baselines = usable(own, history or {}, references or {}, untrusted or {})
    decided = reports[1].clauses
    banded = bands(decided, own, baselines.history, ERROR)
    floored = floors(decided, baselines.references)
    earlier = {o.id: o for o in _obligations(incumbent)}
    found: list[tuple[PairedRow, _Change | None]] = []
    for obligation in _obligations(candidate):
        rows = [results.get(obligation.id) for _, results in sides]
        if rows[1] is None:
            continue
        row = _row(obligation, rows[0], rows[1])
        row = replace(
            row, floor=floored.get(obligation.id), band=banded[obligation.id] if history else None
        )
        invalid = [side for side in rows if side and isinstance(side.verdict, InvalidEvidence)]
        if invalid:
            reason = f"invalid evidence: {verdict_reason(invalid[-1].verdict)}"
            found.append((replace(row, reason=reason), None))
            continue
        before = earlier.get(obligation.id)
        if rows[0] is None or before is None or not _same_question(before, obligation):
            reason = "the incumbent's contract asks something else here"
            found.append((replace(row, reason=reason), None))
            continue
        data = [slices[obligation.slice or ""] for slices, _ in sides]
        try:
            found.append((row, _changed(obligation, data[0], data[1], row.floor)))
        except NotMeasurable as error:
            found.append((replace(row, reason=str(error)), None))
    return RunComparison(
        candidate.contract,
        tuple(_differences(incumbent, candidate)),
        ERROR,
        _judged(found),
        tuple(_measures(sides[0][0], sides[1][0])),
        len(baselines.history),
        len(baselines.references),
        baselines.unused or {},
    )


def _refuse_others(incumbent: EvidenceTable, candidate: EvidenceTable) -> None:
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


def _results(report: Report) -> dict[str, ClauseResult]:
    return {row.obligation: row for row in report.clauses}


def _obligations(evidence: EvidenceTable) -> Iterator[Obligation]:
    """Yield what is decided of a run, in the order of its contract."""
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
    """Return the share of units that keep the threshold, from those that exceed it."""
    counted = row.exceedance
    if counted is None or not counted.n:
        return None
    low = None if counted.high is None else 1 - counted.high
    high = None if counted.low is None else 1 - counted.low
    return PassRate(counted.n - counted.k, counted.n, counted.of, low, high)


# --- one row --------------------------------------------------------------------------------------


def _changed(
    obligation: Obligation, one: SliceData, two: SliceData, floor: Floor | None
) -> _Change:
    """Compare the units of both runs; raises NotMeasurable where that cannot be done.

    Units are compared with the threshold, or with the noise floor where the threshold is stricter.
    """
    part = obligation.part
    found = threshold(part.require)
    if found is None:
        raise NotMeasurable("it is no comparison with a number")
    term, op, tau = found
    if term_text(term) == "failure_rate":
        kept = [[unit.failure is None for unit in data.requests] for data in (one, two)]
        return _of_shares(np.array(kept[0]), np.array(kept[1]))
    if is_mean(part):
        return _of_means(term, one, two, upward=better_of(part) == "higher")
    if allowed_rate(part) is None or not isinstance(term, Statistic) or op == "==":
        raise NotMeasurable("it is no statement about single requests and no mean of them")
    if part.budget is not None and part.budget.unit == "windows":
        raise NotMeasurable("its units are windows of requests")
    side: Side = "upper" if op in ("<=", "<") else "lower"
    if floor is not None and floor.above:
        tau, op = Fraction(floor.value), {"<": "<=", ">": ">="}.get(op, op)
    shares = []
    for data, order in zip((one, two), _orders(term.of, one, two), strict=True):
        worst = check_values(worst_of_units(term.of, data, side), term_text(term.of))[order]
        shares.append(np.array([HOLDS[op](Fraction(value), tau) for value in worst.tolist()]))
    return replace(_of_shares(*shares), compared_at=float(tau))


def _orders(term: Term, one: SliceData, two: SliceData) -> tuple[list[int], list[int]]:
    """Return the orders in which the units of two runs are those of the same requests, the first
    timed run of a request beside its first. Raises NotMeasurable where there is none."""
    orders, keys = [], []
    for data in (one, two):
        own = [unit.key for unit in units_of(term, data)]
        orders.append(sorted(range(len(own)), key=own.__getitem__))
        keys.append(sorted(own))
    if not keys[0] or keys[0] != keys[1]:
        raise NotMeasurable("other requests were measured or timed, or not as often")
    return orders[0], orders[1]


def _of_shares(before: Any, after: Any) -> _Change:
    """Compare which units keep the threshold (McNemar's exact test)."""
    n, worse = int(before.size), int(np.sum(before & ~after))
    better = int(np.sum(~before & after))
    if not n:
        raise NotMeasurable("there are no units")
    changed = worse + better
    if not changed:
        return _Change(n, 0.0, 0.0, 0.0, 1.0, 1.0, 0, 0)
    share = stats.binomtest(better, changed)
    limits = share.proportion_ci(1 - ERROR, method="exact")
    low, high = (float((2 * limit - 1) * changed / n) for limit in (limits.low, limits.high))
    harm = float(stats.binom.cdf(better, changed, 0.5))
    use = float(stats.binom.cdf(worse, changed, 0.5))
    return _Change(n, (better - worse) / n, low, high, harm, use, worse, better)


def _of_means(term: Term, one: SliceData, two: SliceData, *, upward: bool) -> _Change:
    """Compare ratios of sums over requests, by the residuals of each request in both runs."""
    values, residuals = _means(term, one, two)
    away, n = residuals[1] - residuals[0], residuals[0].size
    delta = values[1] - values[0]
    if n < FEWEST:
        raise NotMeasurable("a single request has no spread")
    spread = float(np.std(away, ddof=1)) * math.sqrt(n)
    if spread == 0.0:  # every request moved alike: as sure as n signs
        sure = 2.0**-n if delta else 1.0
        harm, use = (sure, 1.0) if (delta < 0) == upward else (1.0, sure)
        return _Change(n, delta, delta, delta, harm, use)
    half = float(stats.t.ppf(1 - ERROR / 2, n - 1)) * spread
    falls = float(stats.t.cdf(delta / spread, n - 1))
    harm, use = (falls, 1 - falls) if upward else (1 - falls, falls)
    return _Change(n, delta, delta - half, delta + half, harm, use)


def _means(term: Term, one: SliceData, two: SliceData) -> tuple[list[float], list[Array]]:
    """Return the means of both runs, and how much each request moves them; the timed runs of a
    request count as one."""
    inner = term.of if isinstance(term, Abs) else term
    if not isinstance(inner, Statistic):
        raise NotMeasurable("it is no mean")
    values, residuals = [], []
    for data, order in zip((one, two), _orders(inner.of, one, two), strict=True):
        sums, sizes = token_sums(inner.of, data)
        keys = np.array([unit.key for unit in units_of(inner.of, data)])[order]
        first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        sums, sizes = (np.add.reduceat(found[order], first) for found in (sums, sizes))
        value, residual = _linear(sums, sizes)
        sign = -1.0 if isinstance(term, Abs) and value < 0 else 1.0
        values.append(sign * value)
        residuals.append(sign * residual)
    return values, residuals


def _linear(sums: Array, sizes: Array) -> tuple[float, Array]:
    """Return a ratio of sums, and how much each request moves it."""
    total = math.fsum(sizes)
    if total == 0.0:
        raise NotMeasurable("there are no values")
    value = math.fsum(sums) / total
    return value, (sums - value * sizes) / total


# --- all rows -------------------------------------------------------------------------------------


def _judged(found: Sequence[tuple[PairedRow, _Change | None]]) -> tuple[PairedRow, ...]:
    """Say of every row whether it changed, with one chance of error over all of them."""
    compared = [change for _, change in found if change is not None]
    worse = _beyond([change.harm for change in compared])
    better = _beyond([change.use for change in compared])
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


def _measures(
    incumbent: Mapping[str, SliceData], candidate: Mapping[str, SliceData]
) -> Iterator[MeasureDelta]:
    """Yield the means of quality, reward and runtime cost that both runs measured everywhere."""
    for name, two in candidate.items():
        one = incumbent.get(name)
        if one is None or one.reduced is not None or two.reduced is not None:
            continue
        for metric, definition in two.measures.items():
            kind = _KINDS.get(str(definition.family))
            if kind is None or definition.kind != "pointwise" or metric == "failure_rate":
                continue
            term = Statistic("mean", Metric(metric))
            upward = definition.better == "higher"
            try:
                found, (values, _) = (
                    _of_means(term, one, two, upward=upward),
                    _means(term, one, two),
                )
            except NotMeasurable:
                continue
            yield MeasureDelta(
                kind,
                metric,
                name,
                str(definition.dimension),
                definition.better,
                found.n,
                values[0],
                values[1],
                found.delta,
                found.low,
                found.high,
            )


def _beyond(chances: Sequence[float]) -> frozenset[int]:
    """Return which hypotheses of no change are rejected, by Holm's method."""
    error = Fraction(ERROR)
    candidates = [i for i, chance in enumerate(chances) if chance <= ERROR]
    rejected = holm(len(chances), error, candidates, lambda i, level: chances[i] <= level)
    return rejected[0]


def _differences(incumbent: EvidenceTable, candidate: EvidenceTable) -> Iterator[str]:
    """Yield what differs between the runs beside their values."""
    if incumbent.contract.get("digest") != candidate.contract.get("digest"):
        yield from _contracts(incumbent.program, candidate.program)
    yield from _fields("model", incumbent.model, candidate.model)
    for role in ("train", "infer"):
        yield from _fields(f"{role} kernel", incumbent.kernels[role], candidate.kernels[role])
    yield from _fields("environment", incumbent.environment, candidate.environment)


def _contracts(one: Program, two: Program) -> Iterator[str]:
    """Yield whether the clauses differ: model and kernels are named by themselves."""
    if (one.clauses, one.slices, one.constants) != (two.clauses, two.slices, two.constants):
        yield "clauses, slices or constants of the contract"


def _fields(name: str, one: Any, two: Any) -> Iterator[str]:
    """Yield the innermost fields that differ."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in sorted({*one, *two}):
            yield from _fields(f"{name}: {key}", one.get(key), two.get(key))
    elif one != two:
        yield name
