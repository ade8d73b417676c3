"""From terms of the language to estimates over the units of a slice.

Percentiles and exceedance count requests: the tokens of a request are represented by their worst
value, the largest for an upper bound and the smallest for a lower one; if a sign decides which of
them is worse, both are tried. The timed runs of a request are represented by one of them. Means
weigh every token, or run, the same; their limits resample whole requests. Metrics with one number
per slice are computed from all its requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from kcdsl.ir.formulas import subterms
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import Abs, Arith, Metric, Norm, Number, Statistic, TableValue, Term
from kcdsl.metrics import UNMEASURED
from kcdsl.metrics.definition import CACHE
from kcdsl_backends.empirical.decision.values import (
    Side,
    column_of,
    extreme_of_requests,
    recorded,
    request_values,
    token_sums,
    unit_values,
    value_range,
    worst_of_units,
)
from kcdsl_backends.empirical.metrics.measures import (
    AGGREGATES,
    MAGNITUDES,
    RECORDED_AGGREGATES,
    SCORE_GAPS,
)
from kcdsl_backends.empirical.metrics.sums import EXCESS, REDRAWN, SHARES, SUMS, SumFunction
from kcdsl_backends.empirical.statistics import bootstrap, estimates, rates
from kcdsl_backends.empirical.statistics.estimates import (
    Confidence,
    Estimate,
    EstimateInterval,
    NotMeasurable,
)
from kcdsl_backends.empirical.table.evidence import Array, SliceData

_TAILS: dict[str, Side] = {"max": "upper", "min": "lower"}
_OF_UNITS = frozenset({"order-statistic", "maximum", "minimum"})
"""Methods whose limits are values of single units."""
_STORED = Fraction(1, 10**6)
"""Tolerance of a stored share, in steps: above the rounding of float32."""


def evaluate(
    term: Term, data: SliceData, side: Side, settings: Settings
) -> tuple[EstimateInterval, int]:
    """Return a term as an interval around its value, and the number of units behind it.

    Raises `NotMeasurable` if the values support no statement.
    """
    match term:
        case Number(value):
            return EstimateInterval.point(value), 0
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
            found = _cached_statistic(kind, of, q, data, side, settings)
        case Metric() | Norm() | Abs():
            found = _cached_statistic("aggregate", term, None, data, side, settings)
    return found


def _cached_statistic(
    kind: str, of: Term, q: Fraction | None, data: SliceData, side: Side, settings: Settings
) -> tuple[EstimateInterval, int]:
    """Return the interval of a statistic and its number of units, cached for a slice."""
    key = (kind, of, q, side, settings)
    if key not in data.known:
        estimate = _statistic(kind, of, q, data, side, settings)
        data.known[key] = (_exactly(of, estimate, data), estimate.n)
    found: tuple[EstimateInterval, int] = data.known[key]
    return found


def _tails(
    term: Term, data: SliceData, settings: Settings
) -> tuple[tuple[EstimateInterval, ...], int]:
    """Return the intervals of a term for either harmful tail, since the sign of a factor swaps
    them."""
    first, n = evaluate(term, data, "upper", settings)
    if not _depends_on_tail(term):
        return (first,), n
    return (first, evaluate(term, data, "lower", settings)[0]), n


def _depends_on_tail(term: Term) -> bool:
    """Return whether the value of a term depends on the harmful tail."""
    match term:
        case Statistic(kind):
            return kind in ("quantile", "aggregate")
        case Arith(_, left, right):
            return _depends_on_tail(left) or _depends_on_tail(right)
        case Abs(of) if any(isinstance(t, Statistic) for t in subterms(of)):
            return _depends_on_tail(of)
        case _:
            return isinstance(term, Metric | Norm | Abs)


def _magnitude(
    of: Term, data: SliceData, side: Side, settings: Settings
) -> tuple[EstimateInterval, int]:
    """Return |term| of a term of statistics. Its lower limit is that of two one-sided tests at half
    the error each, since the number may deviate from 0 on either side."""
    tails, n = _tails(of, data, settings)
    stricter, _ = _tails(of, data, settings.halved())
    found = [a.magnitude(b) for a, b in zip(tails, stricter, strict=True)]
    if side == "lower" and len({a.value > 0 for a in tails}) > 1:  # 0 lies between them
        found.append(EstimateInterval.point(Fraction(0)))
    return _worst(found, side), n


def _worst(found: Sequence[EstimateInterval], side: Side) -> EstimateInterval:
    """Return the largest of several intervals of a number if "upper" is the harmful side, else the
    smallest."""
    if side == "lower":
        return _worst([one.negate() for one in found], "upper").negate()
    lows = [one.low for one in found if one.low is not None]
    highs = [one.high for one in found if one.high is not None]
    return EstimateInterval(
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
    values = extreme_of_requests if kind in _TAILS else worst_of_units
    worst = estimates.check_values(values(of, data, tail), name)
    match kind:
        case "max":
            return rates.largest(worst)
        case "min":
            return rates.smallest(worst)
        case "aggregate":
            return rates.largest(worst) if side == "upper" else rates.smallest(worst)
        case "quantile":
            if q is None:
                raise NotMeasurable(f"the quantile of {name} names no rank")
            return rates.quantile(worst, q, settings.confidence)
    raise NotMeasurable(f"{kind}({name}) is no statistic of measured values")


def _exactly(of: Term, found: Estimate, data: SliceData) -> EstimateInterval:
    """Return the interval of an estimate, exact for metrics whose values are shares of k tokens.

    Such a share is stored as the nearest double, 3/5 as slightly less, which must not decide a
    comparison with 60 %. Other values stay unchanged. Limits that are values of units are shares
    too.
    """
    interval = EstimateInterval.of(found)
    measure = data.measures.get(of.name) if isinstance(of, Metric) else None
    steps = None if measure is None else measure.steps
    if steps is None:
        return interval

    def share(stored: Fraction, weight: Fraction) -> Fraction:
        total = stored * weight * steps
        if abs(total - round(total)) > _STORED * weight * steps:
            return stored
        return Fraction(round(total), steps) / weight

    value = share(interval.value, found.weight)
    if found.method not in _OF_UNITS:
        return replace(interval, value=value)
    ends = (
        None if end is None else share(end, Fraction(1)) for end in (interval.low, interval.high)
    )
    return EstimateInterval(value, *ends)


def _opposite(side: Side) -> Side:
    return "lower" if side == "upper" else "upper"


# --- means ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of estimates: the seed of resampling and the confidence of each limit (None: values
    without limits). `population`: the requests are a sample of a population, not fixed requests
    with other draws of tokens."""

    seed: int
    confidence: Confidence | None
    population: bool = False

    def halved(self) -> Settings:
        """Return the same settings with half the error, for two limits of which either may fail."""
        return (
            self
            if self.confidence is None
            else replace(self, confidence=self.confidence.divided(2))
        )


def mean_of(of: Term, data: SliceData, settings: Settings) -> Estimate:
    """Return the mean of a pointwise term over all tokens of a slice."""
    sums, sizes = token_sums(of, data)
    return bootstrap.clustered_ratio(
        sums,
        sizes,
        seed=settings.seed,
        confidence=settings.confidence,
        bounds=value_range(of, data, population=settings.population),
        what=term_text(of),
    )


def rate_of(of: Term, data: SliceData, settings: Settings) -> Estimate:
    """Return the mean of a pointwise term that is 0 or 1; a share of requests if each has one
    value. Raises `NotMeasurable` for other values."""
    if data.reduced is not None:
        sums, sizes = token_sums(of, data)
        binary = not column_of(of, data.reduced).fractions.any()
    else:
        values = request_values(of, data)
        every = estimates.check_values(np.concatenate(values) if values else [], term_text(of))
        sums, sizes = np.array([v.sum() for v in values]), np.array([v.size for v in values])
        binary = bool(np.isin(every, (0.0, 1.0)).all())
    if not binary:
        raise NotMeasurable(f"rate({term_text(of)}): the values are not all 0 or 1")
    if bool((sizes == 1).all()):
        return rates.proportion(int(sums.sum()), sums.size, settings.confidence)
    return mean_of(of, data, settings)


# --- slice metrics -------------------------------------------------------------------------------


_RESAMPLES = 299
_MEANS = {**MAGNITUDES, **SCORE_GAPS}


def slice_metric(metric: Metric, data: SliceData, settings: Settings) -> Estimate | None:
    """Return the estimate of a metric with one number per slice; None for a pointwise one.

    Raises `NotMeasurable` if the slice has no such number.
    """
    match metric.name:
        case name if name in UNMEASURED and name not in data.measures:
            raise NotMeasurable(f"{name}: {UNMEASURED[name]}")
        case name if name in _MEANS:
            return _magnitude_of_mean(name, data, settings)
        case "kv_memory":
            largest = [float(recorded(CACHE, u).max()) for u in data.requests]
            return rates.largest(estimates.check_values(largest, "kv_memory"))
        case "grad_bias":
            return mean_of(metric, data, settings)
        case name if name in AGGREGATES or name in RECORDED_AGGREGATES:
            return _joined(name, data, settings)
        case "throughput":
            return _throughput(data, settings)
        case "peak_memory":
            if data.peak_memory is None:
                raise NotMeasurable("peak_memory: not measured")
            value = estimates.check_values([data.peak_memory], "peak_memory")
            timed = len({run.key for run in data.runs})
            return Estimate(float(value[0]), None, None, max(1, timed), "maximum")
        case "failure_rate":
            failed = sum(unit.failure is not None for unit in data.requests)
            return rates.proportion(failed, len(data.requests), settings.confidence)
        case "determinism":
            if data.repeats is None:
                raise NotMeasurable("determinism: no run was repeated")
            return rates.proportion(*data.repeats, settings.confidence)
        case name if name not in data.measures:
            raise NotMeasurable(f"{name}: this backend does not measure it")
        case _:
            return None


def _joined(name: str, data: SliceData, settings: Settings) -> Estimate:
    """Return the number computed from the arrays of all requests, with limits by resampling
    requests: from their sums if the number is a function of sums."""
    aggregate = AGGREGATES.get(name) or RECORDED_AGGREGATES[name]
    units = sorted(data.requests, key=lambda unit: unit.key)
    parts = [[recorded(of, unit) for of in aggregate.inputs] for unit in units]
    try:
        value = float(estimates.check_values([aggregate.of(parts)], name)[0])
        if name in SHARES:
            return _share(name, [SHARES[name](arrays[0]) for arrays in parts], settings)
    except NotMeasurable as error:
        raise NotMeasurable(f"{name}: {error}") from error
    seed, confidence = settings.seed, settings.confidence
    bare = Estimate(value, None, None, len(parts), "cluster-bootstrap")
    if confidence is None:
        return bare
    measure = data.measures[name]
    bounds = measure.low, measure.high
    try:
        if name in SUMS:
            return bootstrap.clustered_function(
                value,
                _smooth(SUMS[name], parts),
                seed=seed,
                confidence=confidence,
                bounds=bounds,
            )
        if name in REDRAWN:
            of = REDRAWN[name](parts)
            return bootstrap.clustered_redrawn(
                value, of, len(parts), seed=seed, confidence=confidence, bounds=bounds
            )
    except NotMeasurable:
        return bare

    def redrawn(drawn: Sequence[int]) -> float | None:
        try:
            return aggregate.of([parts[i] for i in drawn])
        except NotMeasurable:
            return None

    found = bootstrap.clustered_statistic(
        redrawn, len(parts), seed=seed, confidence=confidence, count=_RESAMPLES, bounds=bounds
    )
    if name not in EXCESS or found.low is None or found.high is None:
        return found
    excess = EXCESS[name](parts)
    return replace(found, low=max(0.0, found.low - excess), high=found.high + excess)


def _share(name: str, values: Sequence[Array], settings: Settings) -> Estimate:
    return bootstrap.clustered_ratio(
        [float(v.sum()) for v in values],
        [float(v.size) for v in values],
        seed=settings.seed,
        confidence=settings.confidence,
        bounds=(0.0, 1.0),
        what=name,
    )


def _smooth(sums: SumFunction, parts: Sequence[Sequence[Array]]) -> bootstrap.SmoothFunction:
    def beyond(worst: Array) -> Array | None:
        try:
            return worst if sums.beyond is None else sums.beyond(parts, worst)
        except NotMeasurable:
            return None

    return bootstrap.SmoothFunction(sums.of(parts), sums.value, sums.back, beyond)


def _magnitude_of_mean(name: str, data: SliceData, settings: Settings) -> Estimate:
    """Return the absolute value of a mean, with limits from those of the mean itself."""
    array, bounds = _MEANS[name]
    values = [recorded(array, unit) for unit in data.requests]
    estimates.check_values(np.concatenate(values) if values else [], name)
    sums, sizes = [estimates.rounded_sum(v) for v in values], [float(v.size) for v in values]

    def mean_at(level: Settings) -> Estimate:
        return bootstrap.clustered_ratio(
            sums,
            sizes,
            seed=level.seed,
            confidence=level.confidence,
            bounds=bounds,
            what=name,
        )

    mean = mean_at(settings)
    limits = EstimateInterval.of(mean).magnitude(EstimateInterval.of(mean_at(settings.halved())))
    return replace(
        mean,
        value=abs(mean.value),
        exact=abs(mean.rational),
        low=None if limits.low is None else float(limits.low),
        high=None if limits.high is None else float(limits.high),
    )


def _throughput(data: SliceData, settings: Settings) -> Estimate:
    """Return tokens per second; its limits are those of the seconds per token, inverted.

    A stalled run increases the seconds per token without bound, so the limits of the inverse
    approach zero, but stay positive. The runs of a request are drawn together.
    """
    every = unit_values(Metric("latency"), data.runs, data.measures)
    own: dict[str, list[tuple[float, int]]] = {}
    for run, latency in zip(data.runs, every, strict=True):
        own.setdefault(run.key, []).append((float(latency[0]), run.tokens))
    seconds = [math.fsum(second for second, _ in runs) for runs in own.values()]
    tokens = [math.fsum(count for _, count in runs) for runs in own.values()]
    slow = bootstrap.clustered_ratio(
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
