"""Metrics that are one number of a slice: formed from all its requests, never token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from kcdsl.ir.terms import Metric
from kcdsl.metrics.arrays import CACHE
from kcdsl_backends.empirical import statistics
from kcdsl_backends.empirical.interval import Interval
from kcdsl_backends.empirical.means import Settings, mean_of
from kcdsl_backends.empirical.measured import SliceData
from kcdsl_backends.empirical.metrics import calibration
from kcdsl_backends.empirical.metrics.columns import Unmeasured
from kcdsl_backends.empirical.metrics.measures import (
    AGGREGATES,
    MAGNITUDES,
    RECORDED_AGGREGATES,
    UNMEASURED,
)
from kcdsl_backends.empirical.statistics import Estimate, NotMeasurable
from kcdsl_backends.empirical.term_values import recorded, require, unit_values

_RESAMPLES = 299


def slice_metric(metric: Metric, data: SliceData, settings: Settings) -> Estimate | None:
    """Return the estimate of a metric that is one number per slice, None for a pointwise one.

    Raises `NotMeasurable` where the slice has no such number.
    """
    match metric.name:
        case name if name in UNMEASURED and name not in data.measures:
            raise NotMeasurable(f"{name}: {UNMEASURED[name]}")
        case name if name in MAGNITUDES:
            return _magnitude(name, data, settings)
        case "kv_memory":
            largest = [float(recorded(CACHE, u).max()) for u in data.requests]
            return statistics.largest(statistics.check_values(largest, "kv_memory"))
        case "ece_gap":
            return _ece_gap(data, settings)
        case "grad_bias":
            return mean_of(metric, data, settings)
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
    parts = [[recorded(of, unit) for of in aggregate.inputs] for unit in data.requests]

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
        count=_RESAMPLES,
    )


def _magnitude(name: str, data: SliceData, settings: Settings) -> Estimate:
    """Return the absolute value of a mean, with limits from those of the mean itself."""
    array, bounds = MAGNITUDES[name]
    values = [recorded(array, unit) for unit in data.requests]
    statistics.check_values(np.concatenate(values) if values else [], name)
    sums, sizes = [statistics.rounded_sum(v) for v in values], [float(v.size) for v in values]

    def mean_at(level: Settings) -> Estimate:
        return statistics.clustered_ratio(
            sums,
            sizes,
            seed=level.seed,
            confidence=level.confidence,
            bounds=bounds,
            what=name,
        )

    mean = mean_at(settings)
    limits = Interval.of(mean).magnitude(Interval.of(mean_at(settings.halved())))
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
    seconds = [float(v[0]) for v in unit_values(Metric("latency"), data.runs, data.measures)]
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
        require(unit)
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
        count=_RESAMPLES,
    )
