"""Values of several runs on the same requests, aligned request by request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kcdsl.ir.terms import Abs, Metric, Statistic, Term
from kcdsl_backends.empirical.decision.values import recorded, runs_of, token_sums
from kcdsl_backends.empirical.metrics.measures import MAGNITUDES
from kcdsl_backends.empirical.statistics.estimates import (
    NotMeasurable,
    check_values,
    rounded_sum,
)
from kcdsl_backends.empirical.statistics.paired import PairedChange, change_of_means
from kcdsl_backends.empirical.table.evidence import FEWEST_ROUNDS, Array, SliceData


def within_of_requests(
    kept: NDArray[np.bool_], term: Term, data: SliceData, order: Sequence[int]
) -> NDArray[np.int64]:
    """Return the number of runs in which each request is within the threshold: timed runs of one
    request are dependent, and not units of their own."""
    counts: NDArray[np.int64] = np.add.reduceat(kept.astype(np.int64), _firsts(term, data, order))
    return counts


def _firsts(term: Term, data: SliceData, order: Sequence[int]) -> NDArray[np.intp]:
    """Return the index of the first unit of each request, in an order that groups them by
    request."""
    units = runs_of(term, data)
    keys = [units[at].key for at in order]
    return np.flatnonzero([True, *(one != two for one, two in pairwise(keys))])


def equally_timed(runs: Sequence[SliceData]) -> list[SliceData]:
    """Return the slices with as many timed runs of each request in all of them.

    Where the numbers differ, the first rounds that every evaluation makes count: how many more
    there are depends on the times themselves.
    """
    counts = [Counter(unit.key for unit in data.runs) for data in runs]
    if all(one == counts[0] for one in counts) or not all(counts):
        return list(runs)
    kept = min(FEWEST_ROUNDS, *(least for one in counts for least in one.values()))
    found = []
    for data in runs:
        turn, first = Counter[str](), []
        for unit in data.runs:
            turn[unit.key] += 1
            if turn[unit.key] <= kept:
                first.append(unit)
        found.append(replace(data, runs=tuple(first)))
    return found


def orders_of(term: Term, runs: Sequence[SliceData]) -> list[list[int]]:
    """Return the orders that align the units of the runs by request and timed run. Raises
    NotMeasurable if there are none."""
    orders, keys = [], []
    for data in runs:
        own = [unit.key for unit in runs_of(term, data)]
        orders.append(sorted(range(len(own)), key=own.__getitem__))
        keys.append(sorted(own))
    if not keys[0] or any(own != keys[0] for own in keys):
        raise NotMeasurable("other requests were measured or timed")
    return orders


def change_of(
    term: Term, runs: Sequence[SliceData], *, upward: bool, signed: bool = False
) -> tuple[list[float], PairedChange]:
    """Compare means: ratios of sums over requests; return those of the runs, and the change.

    `signed`: of a metric that is the magnitude of a mean, the mean itself.
    """
    values, residuals = _means(term, runs, signed)
    return values, change_of_means(values, residuals, upward=upward)


def _means(term: Term, runs: Sequence[SliceData], signed: bool) -> tuple[list[float], list[Array]]:
    """Return the means of the runs and the influence of each request; the timed runs of a request
    count as one."""
    array = magnitude(term)
    unsigned = not signed and (array is not None or isinstance(term, Abs))
    inner = Statistic("mean", term) if array else term.of if isinstance(term, Abs) else term
    if not isinstance(inner, Statistic):
        raise NotMeasurable("it is no mean")
    values, residuals = [], []
    orders_of(inner.of, runs)
    for data in runs:
        sums, sizes = _recorded_sums(array, data) if array else token_sums(inner.of, data)
        keys = list(dict.fromkeys(unit.key for unit in runs_of(inner.of, data)))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        value, residual = linear(sums[order], sizes[order])
        sign = -1.0 if unsigned and value < 0 else 1.0
        values.append(sign * value)
        residuals.append(sign * residual)
    return values, residuals


def magnitude(term: Term) -> str | None:
    """Return the recorded array whose mean has the term as its magnitude; None for other terms."""
    named = term.of if isinstance(term, Statistic) and term.kind == "aggregate" else term
    if not isinstance(named, Metric) or named.name not in MAGNITUDES:
        return None
    return MAGNITUDES[named.name][0]


def _recorded_sums(array: str, data: SliceData) -> tuple[Array, Array]:
    """Return the sum and the number of the recorded values of each request."""
    values = [recorded(array, unit) for unit in data.requests]
    check_values(np.concatenate(values) if values else [], array)
    return np.array([rounded_sum(v) for v in values]), np.array([float(v.size) for v in values])


def linear(sums: Array, sizes: Array) -> tuple[float, Array]:
    """Return a ratio of sums, and the influence of each request on it."""
    total = math.fsum(sizes)
    if total == 0.0:
        raise NotMeasurable("there are no values")
    value = math.fsum(sums) / total
    return value, (sums - value * sizes) / total
