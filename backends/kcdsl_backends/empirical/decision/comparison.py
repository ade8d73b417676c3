"""For each clause: percentiles of the measured values, the certified bound, the noise floor.

Bounds and noise are units like requests, so that the code that decides the clause also computes its
statistic from them. A bound of a percentile, a maximum or a mean is the same statistic of the
bounds of its values, since all of them are monotone in every value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from kcdsl.ir.formulas import subterms
from kcdsl.ir.terms import Abs, Arith, Clause, Metric, Norm, Number, Statistic, Term
from kcdsl.verdict.result import (
    Certified,
    ClauseResult,
    MeasuredPercentiles,
    NoiseFloor,
    ResultContext,
)
from kcdsl_backends.empirical.bounds.requests import LOWER_BOUNDS, MAGNITUDES
from kcdsl_backends.empirical.decision.estimates import Settings, evaluate
from kcdsl_backends.empirical.decision.values import Side, worst_of_units
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from kcdsl_backends.empirical.statistics.rates import quantile_rank
from kcdsl_backends.empirical.table.evidence import Array, EvidenceTable, SamplingUnit, SliceData
from kcdsl_backends.empirical.table.requirements import allowed_rate, main_comparison, norm_name

FEWEST = 20
"""Number of units below which a result is narrow: limits of a mean need as many."""
NEAR = 0.1
"""Distance from the threshold, relative to it, below which a result is near it."""
OF_BLOCKS = "intervals"
"""The domain that bounds single blocks."""
_POINT = Settings(0, None)
_UNBOUNDED = {False: np.inf, True: -np.inf}
"""The value of a missing bound from above (False) and from below (True)."""


def result_context(
    clause: Clause, row: ClauseResult, data: SliceData, evidence: EvidenceTable
) -> ResultContext:
    """Return the context of the result of a clause on a slice."""
    comparison = main_comparison(clause.require)
    narrow = narrow_reasons(clause, row)
    if comparison is None:
        return ResultContext(narrow=narrow)
    term, op = comparison.left, comparison.op
    names = _names_of(_inner(term))
    if not names or any(_is_timed(name, data) for name in names):
        return ResultContext(narrow=narrow)
    side: Side = "lower" if op in (">=", ">") else "upper"
    return ResultContext(
        measured(_inner(term), data, side),
        certified(term, names, data, side, evidence),
        floor(term, names, side, row.threshold, evidence),
        narrow,
    )


def measured(term: Term, data: SliceData, side: Side) -> MeasuredPercentiles | None:
    """Return percentiles of the requests; None if one of them has no finite value."""
    try:
        worst = np.sort(worst_of_units(term, data, side))
    except NotMeasurable:
        return None
    if worst.size == 0 or not bool(np.isfinite(worst).all()):
        return None
    if side == "lower":
        worst = worst[::-1]
    p50, p99 = (
        float(worst[quantile_rank(worst.size, Fraction(percent, 100)) - 1]) for percent in (50, 99)
    )
    return MeasuredPercentiles(p50, p99, float(worst[-1]))


# --- certified -----------------------------------------------------------------------------------


def certified(
    term: Term, names: Sequence[str], data: SliceData, side: Side, evidence: EvidenceTable
) -> Certified | None:
    """Return the statistic of the certified bounds; None for a slice without requests."""
    bounded = [evidence.certified.get(unit.key) for unit in data.requests]
    every = len(bounded)
    if every == 0:
        return None
    if _combines(_inner(term)):
        return Certified(None, 0, every, reason="values made of others have no bound of their own")
    (name,) = names
    lower = name in LOWER_BOUNDS
    wrong = lower != (side == "lower") or (name in MAGNITUDES and not _of_size(term))
    if wrong:
        return Certified(None, 0, every, reason="no bound on this side is known")
    known = [unit for unit in bounded if unit is not None and _is_bounded(unit, name)]
    if not known:
        return Certified(None, 0, every, reason=_why(name, bounded, evidence))
    values = [
        unit.values[name]
        if unit is not None and _is_bounded(unit, name)
        else np.array([_UNBOUNDED[lower]])
        for unit in bounded
    ]
    partial = _statistic(term, [{name: unit.values[name]} for unit in known], side, data)
    whole = [{name: one} for one in values]
    value = partial if len(known) == every else _statistic(term, whole, side, data)
    finite = value is not None and bool(np.isfinite(value))
    reason = None if finite else _why(name, bounded, evidence)
    domains = _domains(term, {unit.key for unit in known}, evidence)
    return Certified(value if finite else None, len(known), every, partial, reason, domains)


def _is_bounded(unit: SamplingUnit, name: str) -> bool:
    """Return whether a request has finite bounds of a metric."""
    values = unit.values.get(name)
    return values is not None and bool(np.isfinite(values).all())


def _domains(term: Term, keys: set[str], evidence: EvidenceTable) -> tuple[str, ...]:
    """Return the domains that bounded the requests `keys`."""
    if any(isinstance(part, Norm) for part in subterms(term)):
        return (OF_BLOCKS,)
    by_domain = evidence.bounding.get("domains", {})
    return tuple(words for words, own in by_domain.items() if not keys.isdisjoint(own))


def _why(name: str, bounded: Sequence[SamplingUnit | None], evidence: EvidenceTable) -> str:
    stated = evidence.bounding.get("reason")
    units = [unit for unit in bounded if unit is not None]
    without = [unit for unit in units if unit.failure is not None]
    if without:  # the shortest was tried first
        return str(min(without, key=lambda unit: (unit.tokens, unit.key)).failure)
    if any(name in unit.values and not _is_bounded(unit, name) for unit in units):
        return f"some requests have no finite bound of {name}"
    if stated is not None and not any(unit is not None and unit.values for unit in bounded):
        return str(stated)
    if any(unit is not None and _of_whole_model(unit) for unit in bounded):
        return f"the drift of the logits gives no bound of {name}"
    return str(stated or f"no bound of {name} is known")


def _of_whole_model(unit: SamplingUnit) -> bool:
    return "logit_linf" in unit.values or "hidden_linf" in unit.values


# --- the noise floor -----------------------------------------------------------------------------


def floor(
    term: Term, names: Sequence[str], side: Side, threshold: float | None, evidence: EvidenceTable
) -> NoiseFloor:
    """Return the statistic of the drift of the training kernel from itself."""
    units = [evidence.floor[r.key] for r in evidence.requests if r.key in evidence.floor]
    if not units:
        why = "the training kernel was not batched, or takes no batches"
        return NoiseFloor(None, 0, reason=why)
    missing = next((name for name in names for u in units if name not in u.values), None)
    if missing is not None:
        return NoiseFloor(None, 0, reason=f"{missing} was not measured between batchings")
    values = [{name: unit.values[name] for name in names} for unit in units]
    found = _statistic(term, values, side, None)
    if found is None:
        return NoiseFloor(None, len(units), reason="the noise is not a number")
    beyond = threshold is not None and (found > threshold if side == "upper" else found < threshold)
    return NoiseFloor(found, len(units), beyond)


# --- narrow results ------------------------------------------------------------------------------


def narrow_reasons(clause: Clause, row: ClauseResult) -> tuple[str, ...]:
    """Return the reasons why a result is narrow: few units, or a value near the threshold."""
    found = []
    n = row.n if row.exceedance is None else row.exceedance.n
    allowed = allowed_rate(clause)
    few = n < FEWEST
    if allowed and row.exceedance is not None:
        few = few or abs(row.exceedance.k - n * allowed) < 1
    if few:
        found.append("few units")
    value, threshold = row.value, row.threshold
    if value is None or not threshold or row.op == "==":
        return tuple(found)
    near = abs(value - threshold) <= NEAR * abs(threshold)
    return (*found, "near the threshold") if near else tuple(found)


# --- terms ---------------------------------------------------------------------------------------


def _inner(term: Term) -> Term:
    """Return the values of a statistic; their magnitudes for the magnitude of a mean."""
    match term:
        case Statistic(_, of):
            return of
        case Abs(Statistic("mean", of)):
            return of if isinstance(of, Abs) else Abs(of)
        case _:
            return term


def _names_of(term: Term) -> tuple[str, ...]:
    """Return the names of the values that a term combines; none for a term of another kind."""
    found: dict[str, None] = {}
    for part in subterms(term):
        match part:
            case Metric(name):
                found[name] = None
            case Norm() if part.of.measured:
                found[norm_name(part.of.block, part.kind)] = None
            case Abs() | Arith() | Number():
                pass
            case _:
                return ()
    return tuple(found)


def _combines(term: Term) -> bool:
    return any(isinstance(part, Arith) for part in subterms(term))


def _of_size(term: Term) -> bool:
    inner = _inner(term)
    return isinstance(inner, Abs) and not isinstance(inner.of, Statistic)


def _is_timed(name: str, data: SliceData) -> bool:
    measure = data.measures.get(name)
    return measure is not None and measure.tier in ("E", "F")


def _statistic(
    term: Term, values: Sequence[Mapping[str, Array]], side: Side, data: SliceData | None
) -> float | None:
    """Compute the statistic of a term from given values of its metrics; infinite if one is."""
    kind = term.kind if isinstance(term, Statistic) else "aggregate"
    if any(bool(np.isinf(v).any()) for unit in values for v in unit.values()):
        if kind != "quantile":
            return float("inf") if side == "upper" else float("-inf")
        values = [{name: _finite(v) for name, v in unit.items()} for unit in values]
    units = tuple(
        SamplingUnit(str(i), max(v.size for v in u.values()), u) for i, u in enumerate(values)
    )
    made = SliceData("", units) if data is None else replace(data, requests=units, reduced=None)
    try:
        found, _ = evaluate(term, made, side, _POINT)
        value = float(found.value)
    except (NotMeasurable, OverflowError):
        return None
    if abs(value) >= np.finfo(np.float64).max:
        return float("inf") if value > 0 else float("-inf")
    return value


def _finite(values: Array) -> Array:
    limit = np.finfo(np.float64).max
    found: Array = np.nan_to_num(values, nan=np.nan, posinf=limit, neginf=-limit)
    return found
