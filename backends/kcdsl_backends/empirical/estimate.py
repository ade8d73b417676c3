"""From terms of the language to estimates over the units of a slice.

Percentiles and exceedance count requests: the tokens of a request are represented by their worst
value, the largest for an upper bound and the smallest for a lower one. Means weigh every token the
same; their limits resample whole requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from kcdsl.ir.terms import Abs, Arith, Metric, Norm, Number, Statistic, TableValue, Term
from kcdsl.ir.walk import subterms
from kcdsl_backends.empirical import statistics
from kcdsl_backends.empirical.clauses import label, norm_name
from kcdsl_backends.empirical.interval import Interval
from kcdsl_backends.empirical.measured import Array, SliceData, Unit
from kcdsl_backends.empirical.metrics import calibration
from kcdsl_backends.empirical.metrics.aggregates import AGGREGATES
from kcdsl_backends.empirical.metrics.evidence import Unmeasured
from kcdsl_backends.empirical.metrics.measures import (
    PROBABILITY_FUNCTIONS,
    SAMPLED_FUNCTIONS,
    UNMEASURED,
)
from kcdsl_backends.empirical.metrics.recorded import CACHE, MAGNITUDES, RECORDED_AGGREGATES
from kcdsl_backends.empirical.statistics import Confidence, Estimate, NotMeasurable

Side = Literal["upper", "lower"]
"""Which tail harms: "upper" where a value must stay below something."""

_TAILS: dict[str, Side] = {"max": "upper", "min": "lower"}

_ECE_RESAMPLES = 299
_AGGREGATE_RESAMPLES = 299


@dataclass(frozen=True, slots=True)
class Settings:
    """How estimates are formed: the seed of resampling and the confidence of each limit (None:
    values alone, without limits)."""

    seed: int
    confidence: Confidence | None


def evaluate(term: Term, data: SliceData, side: Side, settings: Settings) -> tuple[Interval, int]:
    """Return a term as an interval around its value, and the number of units behind it.

    Raises `NotMeasurable` where the values support no statement.
    """
    match term:
        case Number(value):
            return Interval.point(value), 0
        case TableValue(name):
            raise NotMeasurable(f"table({name}) has a value in each of its buckets only")
        case Arith(op, left, right):
            other = _opposite(side) if op in "-/" else side
            a, n = evaluate(left, data, side, settings)
            b, m = evaluate(right, data, other, settings)
            return a.combine(op, b), max(n, m)
        case Abs(of) if any(isinstance(t, Statistic) for t in subterms(of)):
            inner, n = evaluate(of, data, side, settings)
            return inner.magnitude(), n
        case Statistic(kind, of, q):
            found = _exactly(of, _statistic(kind, of, q, data, side, settings), data)
        case Metric() | Norm() | Abs():
            found = _exactly(term, _statistic("aggregate", term, None, data, side, settings), data)
    return Interval.of(found), found.n


def unit_values(term: Term, units: Sequence[Unit]) -> list[Array]:
    """Return the values of a pointwise term, one array per unit.

    Raises `NotMeasurable` where a unit lacks a metric or failed.
    """
    return [np.atleast_1d(_pointwise(term, unit)) for unit in units]


def units_of(term: Term, data: SliceData) -> tuple[Unit, ...]:
    """Return the units a term ranges over: timed runs for runtime metrics, else requests."""
    runtime = {
        data.measures[t.name].tier == "E"
        for t in subterms(term)
        if isinstance(t, Metric) and t.name in data.measures
    }
    if runtime == {True, False}:
        raise NotMeasurable(f"{label(term)} mixes times with values of the model")
    return data.runs if runtime == {True} else data.requests


def worst_of_units(term: Term, data: SliceData, side: Side) -> Array:
    """Return the worst value of every unit, for percentiles and counts."""
    if data.reduced is not None:
        return data.reduced.of(term).worst(side)
    reduce = np.max if side == "upper" else np.min
    values = unit_values(term, units_of(term, data))
    return np.array([float(reduce(v)) for v in values], dtype=np.float64)


def _statistic(
    kind: str,
    of: Term,
    q: Fraction | None,
    data: SliceData,
    side: Side,
    settings: Settings,
) -> Estimate:
    special = _aggregate(of, data, settings) if isinstance(of, Metric) else None
    if special is not None:
        return special
    name = label(of)
    if kind == "mean":
        return _mean(of, data, settings)
    if kind == "rate":
        return _rate(of, data, settings)
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
    of 60 % must not notice.
    """
    measure = data.measures.get(of.name) if isinstance(of, Metric) else None
    steps = None if measure is None else measure.steps
    if steps is None:
        return found
    total = found.rational * found.weight * steps
    return replace(found, exact=Fraction(round(total), steps) / found.weight)


def _mean(of: Term, data: SliceData, settings: Settings) -> Estimate:
    sums, sizes = _sums(of, data)
    return statistics.clustered_ratio(
        sums,
        sizes,
        seed=settings.seed,
        confidence=settings.confidence,
        bounds=value_range(of, data),
        what=label(of),
    )


def _sums(of: Term, data: SliceData) -> tuple[Array, Array]:
    """Return the sum of the token values of each request, correctly rounded, and their number."""
    if data.reduced is not None:
        column = data.reduced.of(of)
        statistics.check_finite(
            int(column.nan.sum() + column.infinite.sum()), int(column.values.sum()), label(of)
        )
        return column.totals, column.values.astype(np.float64)
    values = unit_values(of, units_of(of, data))
    statistics.check_values(np.concatenate(values) if values else [], label(of))
    sums = [statistics.rounded_sum(v) for v in values]
    return np.array(sums), np.array([float(v.size) for v in values])


def _rate(of: Term, data: SliceData, settings: Settings) -> Estimate:
    if data.reduced is not None:
        return _rate_of_sums(of, data, settings)
    values = unit_values(of, units_of(of, data))
    every = statistics.check_values(np.concatenate(values) if values else [], label(of))
    if not bool(np.isin(every, (0.0, 1.0)).all()):
        raise NotMeasurable(f"rate({label(of)}): the values are not all 0 or 1")
    if every.size == len(values):
        return statistics.proportion(int(every.sum()), len(values), settings.confidence)
    return _mean(of, data, settings)


def _rate_of_sums(of: Term, data: SliceData, settings: Settings) -> Estimate:
    sums, sizes = _sums(of, data)
    assert data.reduced is not None
    if data.reduced.of(of).fractions.any():
        raise NotMeasurable(f"rate({label(of)}): the values are not all 0 or 1")
    if bool((sizes == 1).all()):
        return statistics.proportion(int(sums.sum()), sums.size, settings.confidence)
    return _mean(of, data, settings)


def _aggregate(metric: Metric, data: SliceData, settings: Settings) -> Estimate | None:
    """Return the estimate of a metric that is one number per slice, None for a pointwise one."""
    match metric.name:
        case name if name in UNMEASURED and name not in data.measures:
            raise NotMeasurable(f"{name}: {UNMEASURED[name]}")
        case name if name in MAGNITUDES:
            return _magnitude(name, data, settings)
        case "kv_memory":
            largest = [float(_recorded(CACHE, unit).max()) for unit in data.requests]
            return statistics.largest(statistics.check_values(largest, "kv_memory"))
        case "ece_gap":
            return _ece_gap(data, settings)
        case "grad_bias":
            return _mean(Metric("grad_bias"), data, settings)
        case name if name in AGGREGATES or name in RECORDED_AGGREGATES:
            return _joined(name, data, settings)
        case "throughput":
            return _throughput(data, settings)
        case "peak_memory":
            if data.peak_memory is None:
                raise NotMeasurable("peak_memory: not measured")
            value = statistics.check_values([data.peak_memory], "peak_memory")
            return Estimate(float(value[0]), None, None, max(1, len(data.runs)), "maximum")
        case "failure_rate":
            failed = sum(unit.failure is not None for unit in data.requests)
            return statistics.proportion(failed, len(data.requests), settings.confidence)
        case "determinism":
            if data.repeats is None:
                raise NotMeasurable("determinism: no run was repeated")
            return statistics.proportion(*data.repeats, settings.confidence)
        case name if name not in data.measures:
            raise NotMeasurable(f"{name}: this backend does not measure it")
        case _:
            return None


def _joined(name: str, data: SliceData, settings: Settings) -> Estimate:
    """Return one number of the arrays of all requests, with limits by resampling requests."""
    aggregate = AGGREGATES.get(name) or RECORDED_AGGREGATES[name]
    parts = [[_recorded(of, unit) for of in aggregate.inputs] for unit in data.requests]

    def value(drawn: Sequence[int]) -> float | None:
        try:
            return aggregate.of([parts[i] for i in drawn])
        except Unmeasured:
            return None

    try:
        statistics.check_values([aggregate.of(parts)], name)
    except Unmeasured as error:
        raise NotMeasurable(f"{name}: {error}") from error
    return statistics.clustered_statistic(
        value,
        len(parts),
        seed=settings.seed,
        confidence=settings.confidence,
        count=_AGGREGATE_RESAMPLES,
    )


def _magnitude(name: str, data: SliceData, settings: Settings) -> Estimate:
    """Return the absolute value of a mean, with limits from those of the mean itself."""
    array, bounds = MAGNITUDES[name]
    values = [_recorded(array, unit) for unit in data.requests]
    statistics.check_values(np.concatenate(values) if values else [], name)
    mean = statistics.clustered_ratio(
        [math.fsum(v) for v in values],
        [float(v.size) for v in values],
        seed=settings.seed,
        confidence=settings.confidence,
        bounds=bounds,
        what=name,
    )
    limits = Interval.of(mean).magnitude()
    return replace(
        mean,
        value=abs(mean.value),
        exact=abs(mean.rational),
        low=None if limits.low is None else float(limits.low),
        high=None if limits.high is None else float(limits.high),
    )


def _throughput(data: SliceData, settings: Settings) -> Estimate:
    """Return tokens per second; its limits are those of the seconds per token, inverted.

    A single stalled run stretches the seconds per token upwards without end, and so the limits of
    their inverse towards zero, but never to zero or below.
    """
    seconds = [float(v[0]) for v in unit_values(Metric("latency"), data.runs)]
    tokens = [float(run.tokens) for run in data.runs]
    slow = statistics.clustered_ratio(
        seconds,
        tokens,
        seed=settings.seed,
        confidence=settings.confidence,
        bounds=(0.0, None),
        what="throughput",
    )
    if slow.rational == 0:
        raise NotMeasurable("throughput: the runs took no time")
    exact = 1 / slow.rational
    return Estimate(
        float(exact),
        1 / slow.high if slow.high else None,
        1 / slow.low if slow.low else None,
        slow.n,
        slow.method,
        exact,
        Fraction(math.fsum(seconds)),
    )


def _ece_gap(data: SliceData, settings: Settings) -> Estimate:
    parts = []
    for unit in data.requests:
        _require(unit)
        if unit.confidences is None:
            raise NotMeasurable(f"ece_gap: the request {unit.key} has no labels")
        parts.append(unit.confidences)
    if not parts:
        raise NotMeasurable("ece_gap: there are no values")
    joined = calibration.join(parts)
    for side in (joined.train, joined.infer):
        if side.size:
            statistics.check_values(side, "ece_gap")
    if joined.train.size < calibration.BINS:
        raise NotMeasurable(
            f"ece_gap: {joined.train.size} positions cannot fill {calibration.BINS} bins"
        )

    def gap(drawn: Sequence[int]) -> float | None:
        resampled = calibration.join([parts[i] for i in drawn])
        return None if resampled.train.size < calibration.BINS else calibration.ece_gap(resampled)

    return statistics.clustered_statistic(
        gap,
        len(parts),
        seed=settings.seed,
        confidence=settings.confidence,
        count=_ECE_RESAMPLES,
    )


def _pointwise(term: Term, unit: Unit) -> Array:
    match term:
        case Number(value):
            return np.array([float(value)])
        case Metric(name):
            return _recorded(name, unit)
        case Norm(kind, of):
            if not of.measured:
                raise NotMeasurable(f"{label(term)} speaks of every admissible run")
            return _recorded(norm_name(of.block, kind), unit)
        case Abs(of):
            return np.abs(_pointwise(of, unit))
        case Arith(op, left, right):
            a, b = _pointwise(left, unit), _pointwise(right, unit)
            with np.errstate(all="ignore"):
                match op:
                    case "+":
                        return a + b
                    case "-":
                        return a - b
                    case "*":
                        return a * b
                    case "/":
                        return a / b
            raise NotMeasurable(f"unknown operation {op!r}")
        case Statistic():
            raise NotMeasurable(f"{label(term)}: a statistic inside a statistic")
        case TableValue():
            raise NotMeasurable(f"{label(term)}: a table inside a statistic")


def _recorded(name: str, unit: Unit) -> Array:
    _require(unit)
    values = unit.values.get(name)
    if name in unit.problems:
        raise NotMeasurable(f"{name}: the request {unit.key}: {unit.problems[name]}")
    if values is None and name in UNMEASURED:
        raise NotMeasurable(f"{name}: {UNMEASURED[name]}")
    if values is None or values.size == 0:
        raise NotMeasurable(f"{name}: the request {unit.key} has no values")
    return values


def _require(unit: Unit) -> None:
    if unit.failure is not None:
        raise NotMeasurable(f"the request {unit.key} failed: {unit.failure}")


def value_range(term: Term, data: SliceData) -> tuple[float | None, float | None]:
    """Return the range of one value of a pointwise term, as far as it is known.

    Where both policies are equal at every position, the value of a sampled token is the same
    whichever token is drawn, so its range is one point.
    """
    of_tokens = {*SAMPLED_FUNCTIONS, *PROBABILITY_FUNCTIONS}
    sampled = {t.name for t in subterms(term) if isinstance(t, Metric)} & of_tokens
    if sampled and _equal_policies(data):
        if data.reduced is not None:
            constant = float(data.reduced.of(term).least[0])
        else:
            constant = float(_pointwise(term, data.requests[0])[0])
        return constant, constant
    match term:
        case Metric(name) if name in data.measures:
            return data.measures[name].low, data.measures[name].high
        case Abs():
            return 0.0, None
        case _:
            return None, None


def _equal_policies(data: SliceData) -> bool:
    if data.reduced is not None:
        column = data.reduced.columns.get(Metric("log_ratio_linf"))
        return column is not None and not (column.least.any() or column.most.any())
    spread = [unit.values.get("log_ratio_linf") for unit in data.requests]
    return bool(spread) and all(s is not None and not s.any() for s in spread)


def _opposite(side: Side) -> Side:
    return "lower" if side == "upper" else "upper"
