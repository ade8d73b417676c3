"""What is known of one metric on one slice: counts, extremes and exact sums, which add up.

Two of them of different rows make one of all their rows, whatever the order, so parts of a table
can be counted anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from kcdsl.ir.terms import Metric
from kcdsl.verdict.result import number
from kcdsl_backends.empirical.aggregation.requests import Requests
from kcdsl_backends.empirical.aggregation.sql import Asked, Limit, above, below
from kcdsl_backends.empirical.aggregation.tokens import Tokens
from kcdsl_backends.empirical.reduced import Floats
from kcdsl_backends.empirical.statistics import quantile_rank


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Rows of one metric on one slice: how many, those with a value, NaN and infinite ones, those
    that do not meet each limit, the extremes (None without a number), and the exact sum of the
    finite values."""

    rows: int = 0
    values: int = 0
    nan: int = 0
    infinite: int = 0
    beyond: tuple[int, ...] = ()
    least: float | None = None
    most: float | None = None
    total: Fraction = Fraction(0)

    def __add__(self, other: Aggregate) -> Aggregate:
        """Return the aggregate of the rows of both; raise ValueError for other limits."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        if len(self.beyond) != len(other.beyond):
            raise ValueError("aggregates of other limits do not add up")
        return Aggregate(
            self.rows + other.rows,
            self.values + other.values,
            self.nan + other.nan,
            self.infinite + other.infinite,
            tuple(a + b for a, b in zip(self.beyond, other.beyond, strict=True)),
            _one_of(self.least, other.least, min),
            _one_of(self.most, other.most, max),
            self.total + other.total,
        )

    @property
    def mean(self) -> float | None:
        """Return the mean, rounded once; None unless every value is finite."""
        if not self.values or self.nan or self.infinite:
            return None
        return float(self.total / self.values)


def _one_of(a: float | None, b: float | None, choose: Any) -> float | None:
    return (a if b is None else b) if a is None or b is None else choose(a, b)


def aggregate_of(requests: Requests, metric: str, tokens: Tokens) -> Aggregate:
    """Return the aggregate of a metric from its requests and the counts of its tokens."""
    column = requests.reduced.columns[Metric(metric)]
    least = column.least[~np.isnan(column.least)]
    most = column.most[~np.isnan(column.most)]
    return Aggregate(
        tokens.rows,
        tokens.values,
        int(column.nan.sum()),
        int(column.infinite.sum()),
        tokens.beyond,
        float(least.min()) if least.size else None,
        float(most.max()) if most.size else None,
        requests.totals[Metric(metric)],
    )


# --- as a document -------------------------------------------------------------------------------


def slice_record(
    name: str,
    requests: Requests,
    tokens: Mapping[str, Tokens],
    asked: Sequence[Asked],
    better: Mapping[str, str],
) -> dict[str, Any]:
    """Return what is reported of a slice: each metric by tokens and by requests."""
    return {
        "slice": name,
        "rows": int(requests.reduced.tokens.sum()),
        "requests": len(requests.reduced),
        "metrics": [
            _metric_record(requests, one, tokens[one.metric], better.get(one.metric, "lower"))
            for one in asked
        ],
    }


def _metric_record(requests: Requests, asked: Asked, tokens: Tokens, better: str) -> dict[str, Any]:
    found = aggregate_of(requests, asked.metric, tokens)
    column = requests.reduced.columns[Metric(asked.metric)]
    side: Literal["upper", "lower"] = "lower" if better == "higher" else "upper"
    complete = bool(((column.missing == 0) & (column.values > 0)).all())
    sides: dict[str, Any] = {
        "tokens": {
            "values": found.values,
            "missing": found.rows - found.values,
            "nan": found.nan,
            "infinite": found.infinite,
            "mean": found.mean,
            "least": number(found.least),
            "most": number(found.most),
            "percentiles": _percentiles(asked.quantiles, tokens.percentiles),
            "beyond": [
                _beyond(limit, k, found.values)
                for limit, k in zip(asked.limits, found.beyond, strict=True)
            ],
        },
        "requests": None,
    }
    if complete:
        worst = column.worst(side)
        ranked = np.sort(worst)
        ranks = tuple(float(ranked[quantile_rank(worst.size, q) - 1]) for q in asked.quantiles)
        sides["requests"] = {
            "values": int(worst.size),
            "worst": "least" if side == "lower" else "most",
            "percentiles": _percentiles(asked.quantiles, ranks),
            "beyond": [
                _beyond(limit, _outside(limit, column.worst(_side(limit))), int(worst.size))
                for limit in asked.limits
            ],
        }
    return {"metric": asked.metric, **sides}


def _side(limit: Limit) -> Literal["upper", "lower"]:
    return "upper" if limit.op in ("<=", "<") else "lower"


def _outside(limit: Limit, worst: Floats) -> int:
    """Count the requests of which not every value meets a limit."""
    exact = Fraction(below(limit.value)) == limit.value
    if limit.op in ("<=", "<"):
        tau = below(limit.value)
        meets = worst < tau if limit.op == "<" and exact else worst <= tau
    else:
        tau = above(limit.value)
        meets = worst > tau if limit.op == ">" and exact else worst >= tau
    return int(np.count_nonzero(~meets))


def _percentiles(
    quantiles: Sequence[Fraction], found: Sequence[float] | None
) -> dict[str, float | None]:
    values: Sequence[float | None] = [None] * len(quantiles) if found is None else found
    return {f"p{_text(100 * q)}": number(x) for q, x in zip(quantiles, values, strict=True)}


def _text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _beyond(limit: Limit, k: int, n: int) -> dict[str, Any]:
    return {"op": limit.op, "limit": float(limit.value), "k": k, "n": n}
