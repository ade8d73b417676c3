"""Counting reduced requests beyond a threshold: all at once where that is certain.

A request whose number lies clearly on one side of a constant is decided by comparing doubles; the
rest, and every formula that is no such comparison, by the code that decides single requests, each
different request once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kcdsl.ir.terms import Abs, Compare, Formula, Metric, Number, Statistic, Term
from kcdsl_backends.empirical.reduced import Column, Floats, Reduced
from kcdsl_backends.empirical.statistics import NotMeasurable
from kcdsl_backends.empirical.windows import WINDOW, window_count

_NEAR = 1e-9
"""Relative distance from the threshold within which doubles do not decide: rounding of a quotient
and of stored shares is far below."""
Side = Literal["upper", "lower"]
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
    """Return which requests, or windows of them, do not meet a formula by themselves.

    `decide` decides some requests together, and raises `NotMeasurable`; `range_of` gives the range
    of a term, which a mean must not leave; `negated` says that the
    formula stands under an odd number of negations, which turns the harmful tail around.
    """
    n = len(reduced)
    if n == 0:
        raise NotMeasurable(f"there are no {'windows' if per_window else 'requests'}")
    if per_window:
        ends = _window_ends(n)
        parts = (reduced.part(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))
        return tuple(decide(part) != "held" for part in parts)
    clear, held = _at_once(body, reduced, range_of, negated)
    beyond: NDArray[np.bool_] = ~held
    known: dict[tuple[Any, ...], bool] = {}
    for row in np.flatnonzero(~clear).tolist():
        key = tuple(column.fingerprint(row) for column in reduced.columns.values())
        if key not in known:
            known[key] = decide(reduced.part(row, row + 1)) != "held"
        beyond[row] = known[key]
    return tuple(beyond.tolist())


def _window_ends(n: int) -> list[int]:
    """Return where the windows of n requests end; a short rest joins the last."""
    return [*(WINDOW * i for i in range(1, window_count(n))), n]


def _at_once(
    body: Formula,
    reduced: Reduced,
    range_of: Callable[[Term], tuple[float | None, float | None]],
    negated: bool,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which requests doubles decide, and which of those meet the formula."""
    nothing = np.zeros(len(reduced), dtype=bool)
    if not isinstance(body, Compare) or body.op not in _ORDERS:
        return nothing, nothing
    term, op, limit = body.left, body.op, body.right
    if not isinstance(limit, Number):
        return nothing, nothing
    side: Side = "lower" if (op in (">=", ">")) != negated else "upper"
    numbers = _numbers(term, side, reduced)
    if numbers is None:
        return nothing, nothing
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
) -> dict[str, Any] | None:
    """Return the worst of the requests, or of those in windows, beyond a threshold: its name, and
    its worst value with its position."""
    column = reduced.columns.get(term)
    if column is None:
        return None
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
