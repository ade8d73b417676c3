"""Values of pointwise terms, unit by unit: as measured, or as reduced by a token table.

A value outside the range of its metric, such as a divergence below zero, is no evidence: it was
logged with another sign, or by an estimator with cancellation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kcdsl.ir.formulas import subterms
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Compare,
    Formula,
    Metric,
    Norm,
    Number,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.metrics import DRAWN, UNMEASURED, MetricDefinition
from kcdsl_backends.empirical.statistics.estimates import (
    NotMeasurable,
    beyond_range,
    check_finite,
    check_values,
    rounded_sum,
)
from kcdsl_backends.empirical.table.evidence import (
    FAULTS,
    Array,
    Column,
    Floats,
    Reduced,
    SamplingUnit,
    SliceData,
)
from kcdsl_backends.empirical.table.requirements import WINDOW, norm_name, window_count

Side = Literal["upper", "lower"]
"""The harmful tail: "upper" if a value must stay below a threshold."""


def is_timed(term: Term, data: SliceData) -> bool:
    """Return whether a term ranges over timed runs.

    Raises `NotMeasurable` for one that mixes them with values of the model.
    """
    runtime = {
        data.measures[t.name].tier == "E"
        for t in subterms(term)
        if isinstance(t, Metric) and t.name in data.measures
    }
    if runtime == {True, False}:
        raise NotMeasurable(f"{term_text(term)} mixes times with values of the model")
    return runtime == {True}


def runs_of(term: Term, data: SliceData) -> tuple[SamplingUnit, ...]:
    """Return what a term has values of: every timed run for runtime metrics, else requests."""
    return data.runs if is_timed(term, data) else data.requests


def counted_units(data: SliceData, *, timed: bool) -> tuple[SamplingUnit, ...]:
    """Return the units that percentiles and budgets count: requests; of times
    every run, of a sample one run of each request."""
    if not timed:
        return data.requests
    return data.runs if data.drawn is None else data.drawn


def unit_values(
    term: Term, units: Sequence[SamplingUnit], measures: Mapping[str, MetricDefinition]
) -> list[Array]:
    """Return the values of a pointwise term, one array per unit.

    Raises `NotMeasurable` if a unit failed, lacks a metric, or has a value outside its range.
    """
    return [np.atleast_1d(_pointwise(term, unit, measures)) for unit in units]


def worst_of_units(term: Term, data: SliceData, side: Side) -> Array:
    """Return the worst value of every unit, for percentiles and counts; NaN if one of its values is
    not finite."""
    if data.reduced is not None:
        return _worst_of_rows(term, data.reduced, side)
    units = counted_units(data, timed=is_timed(term, data))
    return _worst(unit_values(term, units, data.measures), side)


def extreme_of_requests(term: Term, data: SliceData, side: Side) -> Array:
    """Return the worst value of every request, of all its timed runs, for extremes; NaN if one of
    its values is not finite."""
    if data.reduced is not None:
        return _worst_of_rows(term, data.reduced, side)
    return _worst(request_values(term, data), side)


def _worst_of_rows(term: Term, reduced: Reduced, side: Side) -> Array:
    column = column_of(term, reduced)
    return np.where(column.infinite > 0, np.nan, column.worst(side))


def _worst(values: Sequence[Array], side: Side) -> Array:
    reduce = np.max if side == "upper" else np.min
    worst = [float(reduce(v)) if np.isfinite(v).all() else np.nan for v in values]
    return np.array(worst, dtype=np.float64)


def request_values(term: Term, data: SliceData) -> list[Array]:
    """Return the values of a term, one array per request, of all its timed runs."""
    runs = runs_of(term, data)
    values = unit_values(term, runs, data.measures)
    own: dict[str, list[Array]] = {}
    for run, value in zip(runs, values, strict=True):
        own.setdefault(run.key, []).append(value)
    return values if len(own) == len(values) else [np.concatenate(each) for each in own.values()]


def token_sums(term: Term, data: SliceData) -> tuple[Array, Array]:
    """Return the sum of the values of each request, tokens or timed runs, correctly rounded, and
    their number."""
    if data.reduced is not None:
        column = column_of(term, data.reduced)
        check_finite(
            int(column.nan.sum() + column.infinite.sum()), int(column.values.sum()), term_text(term)
        )
        return column.totals, column.values.astype(np.float64)
    values = request_values(term, data)
    check_values(np.concatenate(values) if values else [], term_text(term))
    sums = [rounded_sum(v) for v in values]
    return np.array(sums), np.array([float(v.size) for v in values])


def column_of(term: Term, reduced: Reduced) -> Column:
    """Return the column of a term; raise `NotMeasurable` if a request lacks values."""
    name = term_text(term)
    if term not in reduced.columns:
        raise NotMeasurable(f"{name}: the table has no such values")
    column = reduced.columns[term]
    lacking = np.flatnonzero(~column.complete)
    if lacking.size:
        row = int(lacking[0])
        if column.faults[row]:
            raise NotMeasurable(_fault(term, reduced, row))
        missing, there = int(column.missing[row]), int(column.values[row])
        raise NotMeasurable(
            f"{name}: the request {reduced.keys[row]}: {missing} of {missing + there} values are "
            "missing"
        )
    return column


def _fault(term: Term, reduced: Reduced, row: int) -> str:
    """Return the message about the first metric of a term with faulty values of a request."""
    parts = [*(t for t in subterms(term) if isinstance(t, Metric)), term]
    own = [(t, reduced.columns[t]) for t in parts if t in reduced.columns]
    of, column = next((t, found) for t, found in own if found.faults[row])
    values = f"{column.least[row]:g} to {column.most[row]:g}"
    fault = FAULTS[column.faults[row]]
    return f"{term_text(of)}: the request {reduced.keys[row]}: {values}: {fault}"


def recorded(name: str, unit: SamplingUnit) -> Array:
    """Return the values of a metric of a unit; raise `NotMeasurable` if there are none."""
    require(unit)
    values = unit.values.get(name)
    if name in unit.problems:
        raise NotMeasurable(f"{name}: the request {unit.key}: {unit.problems[name]}")
    if values is None and name in UNMEASURED:
        raise NotMeasurable(f"{name}: {UNMEASURED[name]}")
    if values is None or values.size == 0:
        raise NotMeasurable(f"{name}: the request {unit.key} has no values")
    return values


def require(unit: SamplingUnit) -> None:
    """Raise `NotMeasurable` for a request that failed."""
    if unit.failure is not None:
        raise NotMeasurable(f"the request {unit.key} failed: {unit.failure}")


def _pointwise(term: Term, unit: SamplingUnit, measures: Mapping[str, MetricDefinition]) -> Array:
    match term:
        case Number(value):
            return np.array([float(value)])
        case Metric(name):
            return _in_range(name, unit, measures)
        case Norm(kind, of):
            if not of.measured:
                raise NotMeasurable(f"{term_text(term)} quantifies over all admissible runs")
            return recorded(norm_name(of.block, kind), unit)
        case Abs(of):
            return np.abs(_pointwise(of, unit, measures))
        case Arith(op, left, right):
            a, b = _pointwise(left, unit, measures), _pointwise(right, unit, measures)
            if a.size != b.size and 1 not in (a.size, b.size):
                raise NotMeasurable(
                    f"{term_text(term)}: the request {unit.key}: {a.size} and {b.size} values"
                )
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
            raise NotMeasurable(f"{term_text(term)}: a statistic inside a statistic")
        case TableValue():
            raise NotMeasurable(f"{term_text(term)}: a table inside a statistic")


def _in_range(name: str, unit: SamplingUnit, measures: Mapping[str, MetricDefinition]) -> Array:
    """Return the values of a metric; raise `NotMeasurable` for one outside its range."""
    values, measure = recorded(name, unit), measures.get(name)
    if measure is None or measure.per == "slice":
        return values
    beyond = values[beyond_range(values, (measure.low, measure.high))]
    if beyond.size:
        raise NotMeasurable(
            f"{name}: the request {unit.key}: the value {beyond[0]:g} lies outside of its range"
        )
    return values


# --- ranges --------------------------------------------------------------------------------------


def value_range(
    term: Term, data: SliceData, *, population: bool = False
) -> tuple[float | None, float | None]:
    """Return the range of one value of a pointwise term, as far as it is known.

    If both policies are equal at every position, the value of a sampled token is the same for all
    tokens, so its range is one point; not for a `population`, since policies that are equal on
    these requests may differ on others.
    """
    sampled = {t.name for t in subterms(term) if isinstance(t, Metric)} & DRAWN
    if sampled and not population and _equal_policies(data):
        if data.reduced is not None:
            column = column_of(term, data.reduced)
            every = np.concatenate([column.least, column.most])
        else:
            every = np.concatenate(unit_values(term, data.requests, data.measures))
        if bool((every == every[0]).all()):  # other values contradict equal policies
            return float(every[0]), float(every[0])
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
        if column is None or not len(data.reduced) or not column.complete.all():
            return False
        return not (column.nan.any() or column.least.any() or column.most.any())
    spread = [unit.values.get("log_ratio_linf") for unit in data.requests]
    return bool(spread) and all(s is not None and not s.any() for s in spread)


# --- requests of a token table --------------------------------------------------------------------


_NEAR = 1e-9
"""Relative distance from the threshold within which doubles do not decide; far above the rounding
of quotients and of stored shares."""
_ORDERS = ("<=", "<", ">=", ">")


def beyond_of(
    body: Formula,
    reduced: Reduced,
    decide: Callable[[Reduced], str],
    range_of: Callable[[Term], tuple[float | None, float | None]],
    *,
    per_window: bool = False,
    negated: bool = False,
) -> tuple[bool, ...]:
    """Return the mask of requests, or windows of them, that do not meet a formula by themselves.

    `decide` decides some requests together, and raises `NotMeasurable`; `range_of` gives the range
    of a term, within which means must lie; `negated`: the formula is under an odd number of
    negations, which swaps the harmful tail.
    """
    n = len(reduced)
    if n == 0:
        raise NotMeasurable(f"there are no {'windows' if per_window else 'requests'}")
    if per_window:
        ends = _window_ends(n)
        parts = (reduced.part(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))
        return tuple(decide(part) != "held" for part in parts)
    clear, held = _decided_by_doubles(body, reduced, range_of, negated)
    beyond: NDArray[np.bool_] = ~held
    known: dict[tuple[Any, ...], bool] = {}
    for row in np.flatnonzero(~clear).tolist():
        key = tuple(column.fingerprint(row) for column in reduced.columns.values())
        if key not in known:
            known[key] = decide(reduced.part(row, row + 1)) != "held"
        beyond[row] = known[key]
    return tuple(beyond.tolist())


def _window_ends(n: int) -> list[int]:
    """Return the ends of the windows of n requests; a short rest joins the last."""
    return [*(WINDOW * i for i in range(1, window_count(n))), n]


def _decided_by_doubles(
    body: Formula,
    reduced: Reduced,
    range_of: Callable[[Term], tuple[float | None, float | None]],
    negated: bool,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the masks of requests that doubles decide, and of those that meet the formula."""
    undecided = np.zeros(len(reduced), dtype=bool)
    if not isinstance(body, Compare) or body.op not in _ORDERS:
        return undecided, undecided
    term, op, limit = body.left, body.op, body.right
    if not isinstance(limit, Number):
        return undecided, undecided
    side: Side = "lower" if (op in (">=", ">")) != negated else "upper"
    numbers = _numbers(term, side, reduced)
    if numbers is None:
        return undecided, undecided
    tau = float(limit.value)
    certain = np.isfinite(numbers) & (np.abs(numbers - tau) > _NEAR * max(abs(tau), 1e-300))
    if isinstance(term, Statistic) and term.kind == "mean":
        low, high = range_of(term.of)
        certain &= (numbers >= low) if low is not None else True
        certain &= (numbers <= high) if high is not None else True
    for column in reduced.columns.values():
        certain &= column.complete & (column.nan == 0) & (column.infinite == 0)
    return certain, certain & ((numbers < tau) if op in ("<=", "<") else (numbers > tau))


def _numbers(term: Term, side: Side, reduced: Reduced) -> Floats | None:
    """Return the value of a statistic of each request alone, within rounding; None for others."""
    match term:
        case Statistic("quantile" | "aggregate", of):
            return _column(of, reduced, side)
        case Statistic("max", of):
            return _column(of, reduced, "upper")
        case Statistic("min", of):
            return _column(of, reduced, "lower")
        case Statistic("mean", of):
            column = reduced.columns.get(of)
            return None if column is None else column.totals / np.maximum(column.values, 1)
        case Metric() | Abs():
            return _column(term, reduced, side)
        case _:
            return None


def _column(of: Term, reduced: Reduced, side: Side) -> Floats | None:
    column: Column | None = reduced.columns.get(of)
    return None if column is None else column.worst(side)


def worst_request(
    reduced: Reduced, beyond: Sequence[bool], windows: bool, term: Term, op: str
) -> dict[str, Any]:
    """Return the worst of the requests, or of those in windows, beyond a threshold: its name, and
    its worst value with its position; empty for a term without a column."""
    column = reduced.columns.get(term)
    if column is None:
        return {}
    side: Side = "lower" if op in (">=", ">") else "upper"
    sign = -1.0 if side == "lower" else 1.0
    outside = np.array(beyond)
    if windows:
        ends = _window_ends(len(reduced))
        outside = np.repeat(outside, np.diff([0, *ends]))
    rows = np.flatnonzero(outside)
    row = int(rows[int((sign * column.worst(side)[rows]).argmax())])
    values = reduced.rows_of(reduced.keys[row], term)
    position = int((sign * values).argmax())
    found: dict[str, Any] = {"request": reduced.keys[row], "worst": float(values[position])}
    if values.size > 1:
        found["token"] = position
    return found
