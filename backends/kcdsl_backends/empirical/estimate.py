"""From terms of the language to estimates over the units of a slice.

Percentiles and exceedance count requests: the tokens of a request are represented by their worst
value, the largest for an upper bound and the smallest for a lower one; where a sign decides which
of them harms, both are tried. Means weigh every token the same; their limits resample whole
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from kcdsl.ir.terms import Abs, Arith, Metric, Norm, Number, Statistic, TableValue, Term
from kcdsl.ir.walk import subterms
from kcdsl.ir.words import term_text
from kcdsl_backends.empirical import statistics
from kcdsl_backends.empirical.interval import Interval
from kcdsl_backends.empirical.means import Settings, mean_of, rate_of
from kcdsl_backends.empirical.measured import SliceData
from kcdsl_backends.empirical.slice_metrics import slice_metric
from kcdsl_backends.empirical.statistics import Estimate, NotMeasurable
from kcdsl_backends.empirical.term_values import Side, worst_of_units

_TAILS: dict[str, Side] = {"max": "upper", "min": "lower"}
_STORED = Fraction(1, 10**6)
"""How far a stored share may lie from the share itself, in steps: float32 rounds within it."""


def evaluate(term: Term, data: SliceData, side: Side, settings: Settings) -> tuple[Interval, int]:
    """Return a term as an interval around its value, and the number of units behind it.

    Raises `NotMeasurable` where the values support no statement.
    """
    match term:
        case Number(value):
            return Interval.point(value), 0
        case TableValue(name):
            raise NotMeasurable(f"table({name}) has a value in each of its buckets only")
        case Arith("+" | "-" as op, left, right):
            other = _opposite(side) if op == "-" else side
            a, n = evaluate(left, data, side, settings)
            b, m = evaluate(right, data, other, settings)
            return a.combine(op, b), max(n, m)
        case Arith(op, left, right):
            lefts, n = _tails(left, data, settings)
            rights, m = _tails(right, data, settings)
            return _worst([a.combine(op, b) for a in lefts for b in rights], side), max(n, m)
        case Abs(of) if any(isinstance(t, Statistic) for t in subterms(of)):
            return _magnitude(of, data, side, settings)
        case Statistic(kind, of, q):
            found = _exactly(of, _statistic(kind, of, q, data, side, settings), data)
        case Metric() | Norm() | Abs():
            found = _exactly(term, _statistic("aggregate", term, None, data, side, settings), data)
    return Interval.of(found), found.n


def _tails(term: Term, data: SliceData, settings: Settings) -> tuple[tuple[Interval, ...], int]:
    """Return a term with either tail as the harmful one: the sign of a factor turns them around."""
    first, n = evaluate(term, data, "upper", settings)
    if not _takes_sides(term):
        return (first,), n
    return (first, evaluate(term, data, "lower", settings)[0]), n


def _takes_sides(term: Term) -> bool:
    """Say whether requests stand for another value where the other tail harms."""
    match term:
        case Statistic(kind):
            return kind in ("quantile", "aggregate")
        case Arith(_, left, right):
            return _takes_sides(left) or _takes_sides(right)
        case Abs(of) if any(isinstance(t, Statistic) for t in subterms(of)):
            return _takes_sides(of)
        case _:
            return isinstance(term, Metric | Norm | Abs)


def _magnitude(of: Term, data: SliceData, side: Side, settings: Settings) -> tuple[Interval, int]:
    """Return |term| of a term of statistics; the limit at 0 of two one-sided tests each at half the
    error, since chance may lead away from 0 on either side."""
    tails, n = _tails(of, data, settings)
    surer, _ = _tails(of, data, settings.halved())
    found = [a.magnitude(b) for a, b in zip(tails, surer, strict=True)]
    if side == "lower" and len({a.value > 0 for a in tails}) > 1:  # 0 lies between both
        found.append(Interval.point(Fraction(0)))
    return _worst(found, side), n


def _worst(found: Sequence[Interval], side: Side) -> Interval:
    """Return the largest of several readings of a number where "upper" is the harmful side, else
    the smallest."""
    if side == "lower":
        return _worst([one.negate() for one in found], "upper").negate()
    lows = [one.low for one in found if one.low is not None]
    highs = [one.high for one in found if one.high is not None]
    return Interval(
        max(one.value for one in found),
        max(lows, default=None),
        max(highs) if len(highs) == len(found) else None,
    )


def _statistic(
    kind: str,
    of: Term,
    q: Fraction | None,
    data: SliceData,
    side: Side,
    settings: Settings,
) -> Estimate:
    special = slice_metric(of, data, settings) if isinstance(of, Metric) else None
    if special is not None:
        return special
    name = term_text(of)
    if kind == "mean":
        return mean_of(of, data, settings)
    if kind == "rate":
        return rate_of(of, data, settings)
    tail = _TAILS.get(kind, side)
    worst = statistics.check_values(worst_of_units(of, data, tail), name)
    match kind:
        case "max":
            return statistics.largest(worst)
        case "min":
            return statistics.smallest(worst)
        case "aggregate":
            return statistics.largest(worst) if side == "upper" else statistics.smallest(worst)
        case "quantile":
            if q is None:
                raise NotMeasurable(f"the quantile of {name} names no rank")
            return statistics.quantile(worst, q, settings.confidence)
    raise NotMeasurable(f"{kind}({name}) is no statistic of measured values")


def _exactly(of: Term, found: Estimate, data: SliceData) -> Estimate:
    """Return the estimate with its exact value, for metrics whose values are shares of k tokens.

    Such a share is stored as the nearest double: 3/5 as a little less than it, which a threshold
    of 60 % must not notice. What is no such share stays what it is.
    """
    measure = data.measures.get(of.name) if isinstance(of, Metric) else None
    steps = None if measure is None else measure.steps
    if steps is None:
        return found
    total = found.rational * found.weight * steps
    if abs(total - round(total)) > _STORED * found.weight * steps:
        return found
    return replace(found, exact=Fraction(round(total), steps) / found.weight)


def _opposite(side: Side) -> Side:
    return "lower" if side == "upper" else "upper"
