"""Requests of a token table, reduced to the columns that statistics need.

Sums are exact. A value below 2^h is n_0 2^(h-61) + n_1 2^(h-122) + ... with integers of at most 61
bits, found by truncation: each remainder is exact. Sums of integers do not depend on their order,
so they are the same for every number of threads, files and row groups, and are rounded once.

Logged values may not be those of the metric that names their column: a divergence below zero, or
several values of a metric that has one per request, are faults (`as_measured`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from kcdsl.ir.formulas import subterms
from kcdsl.ir.terms import Abs, Arith, Metric, Number, Term
from kcdsl.metrics import MetricDefinition
from kcdsl_backends.empirical.sources.tokens.database import Database
from kcdsl_backends.empirical.sources.tokens.tables import (
    PLACE,
    REQUEST,
    belonging_nowhere,
    double,
    quoted,
    text,
)
from kcdsl_backends.empirical.statistics.estimates import beyond_range
from kcdsl_backends.empirical.table.evidence import OUTSIDE, SEVERAL, Column, Floats, Reduced

_FIRST, _MORE = 2, 4


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one slice, and the exact sums of the finite values of each term."""

    reduced: Reduced
    totals: Mapping[Term, Fraction]


def reduce_requests(
    database: Database, slice_of: str, terms: Sequence[Term]
) -> dict[str, Requests]:
    """Return the requests of every slice that has any, in the order of their first rows.

    Raises Refusal (KC680) for rows without a request or a slice.
    """
    largest = database.rows(extreme_query(terms))[0]
    tops = [largest[f"largest_{i}"] or 1.0 for i in range(len(terms))]
    count = _FIRST
    while True:
        steps = [steps_for(top, count) for top in tops]
        found = database.columns(request_query(slice_of, terms, steps))
        rests = [found.column(f"rest_{i}").to_numpy() for i in range(len(steps))]
        if not any(bool((rest > 0).any()) for rest in rests):
            break
        count += _MORE
    for name in ("slice", "request"):
        if found.column(name).null_count:
            raise belonging_nowhere("some", name)
    return _by_slice(database, slice_of, terms, steps, found)


def _by_slice(
    database: Database,
    slice_of: str,
    terms: Sequence[Term],
    steps: Sequence[Sequence[float]],
    found: Any,
) -> dict[str, Requests]:
    coded = found.column("slice").combine_chunks().dictionary_encode()
    numbers, names = coded.indices.to_numpy(), coded.dictionary.to_pylist()
    order = np.lexsort((found.column("place").to_numpy(), numbers))
    numbers, ordered = numbers[order], found.take(order)
    keys = ordered.column("request").to_pylist()
    tokens = ordered.column("tokens").to_numpy()
    sums = [_sums(ordered, i, own) for i, own in enumerate(steps)]
    columns = {term: _column(ordered, i, sums[i]) for i, term in enumerate(terms)}
    changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    starts = [0, *changes.tolist()] if numbers.size else []
    ends = [*changes.tolist(), numbers.size] if numbers.size else []
    slices: dict[str, Requests] = {}
    for start, end in zip(starts, ends, strict=True):
        name: str = names[numbers[start]]

        def rows_of(request: str, term: Term, name: str = name) -> Floats:
            query = rows_query(slice_of, name, request, term)
            values = database.columns(query).column("x").to_numpy(zero_copy_only=False)
            return np.asarray(values, dtype=np.float64)

        whole = Reduced(keys, columns, tokens, rows_of)
        totals = {
            term: one.unit * sum(one.integers[start:end])
            for term, one in zip(terms, sums, strict=True)
        }
        slices[name] = Requests(whole.part(start, end), totals)
    return slices


def _sums(found: Any, i: int, steps: Sequence[float]) -> ExactSums:
    digits = [found.column(f"sum_{i}_{j}").fill_null("0").to_pylist() for j in range(len(steps))]
    return exact_sums(digits, steps)


def _column(found: Any, i: int, sums: ExactSums) -> Column:
    def counts(name: str) -> Any:
        return found.column(f"{name}_{i}").fill_null(0).to_numpy().astype(np.int64)

    def extremes(name: str) -> Any:  # 0 for -0: which of them is found depends on the order of rows
        return found.column(f"{name}_{i}").fill_null(float("nan")).to_numpy() + 0.0

    values = counts("values")
    return Column(
        values,
        found.column("tokens").to_numpy() - values,
        counts("nan"),
        counts("infinite"),
        counts("fractions"),
        extremes("least"),
        extremes("most"),
        np.array([sums.rounded(n) for n in sums.integers], dtype=np.float64),
        np.zeros(len(values), dtype=np.int64),
    )


# --- sums ----------------------------------------------------------------------------------------


_BITS = 61
_LEAST = -1074
"""The exponent of the smallest double, which leaves no remainder."""


def steps_for(largest: float, count: int) -> tuple[float, ...]:
    """Return the powers of two of `count` integers for values of at most `largest`; fewer if they
    reach the smallest double."""
    high = math.frexp(largest)[1]
    exponents: list[int] = []
    for i in range(1, count + 1):
        exponents.append(max(high - _BITS * i, _LEAST))
        if exponents[-1] == _LEAST:
            break
    return tuple(math.ldexp(1.0, exponent) for exponent in exponents)


@dataclass(frozen=True, slots=True)
class ExactSums:
    """Sums as integers times one power of two."""

    integers: Sequence[int]
    unit: Fraction

    def rounded(self, integer: int) -> float:
        """Return the nearest double of a sum; infinite beyond the largest."""
        try:
            return integer * self.unit.numerator / self.unit.denominator
        except OverflowError:
            return math.inf if integer > 0 else -math.inf


def exact_sums(columns: Sequence[Sequence[str]], steps: Sequence[float]) -> ExactSums:
    """Return one sum for each row of digits; there is a column for each step."""
    unit = Fraction(steps[-1])
    weights = [int(Fraction(step) / unit) for step in steps]
    integers = [
        sum(int(n) * weight for n, weight in zip(row, weights, strict=True))
        for row in zip(*columns, strict=True)
    ]
    return ExactSums(integers, unit)


# --- faults --------------------------------------------------------------------------------------


def as_measured(reduced: Reduced, measures: Mapping[str, MetricDefinition]) -> Reduced:
    """Return requests with the faults of their values named.

    A term whose metrics all have one value per request has one value, which all rows of the request
    repeat. A term that combines metrics is checked by those that have columns of their own.
    """
    columns = {term: _as_measured(term, reduced.columns, measures) for term in reduced.columns}
    return replace(reduced, columns=columns)


def _as_measured(
    term: Term, columns: Mapping[Term, Column], measures: Mapping[str, MetricDefinition]
) -> Column:
    names = [part.name for part in subterms(term) if isinstance(part, Metric)]
    column = columns[term]
    faults = np.zeros_like(column.faults)
    for name in names:
        of, measure = columns.get(Metric(name)), measures.get(name)
        if of is not None and measure is not None:
            bounds = (measure.low, measure.high)
            faults[beyond_range(of.least, bounds) | beyond_range(of.most, bounds)] = OUTSIDE
    if names and all(name in measures and measures[name].per == "request" for name in names):
        return _once(column, faults)
    return replace(column, faults=faults)


def _once(column: Column, faults: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Column:
    """Return a column reduced to one value per request, which all its rows must repeat."""
    number = column.nan == 0
    mixed = ~number & (column.nan < column.values)
    faults[mixed | (number & (column.least != column.most) & (column.values > 0))] = SEVERAL
    return replace(
        column,
        values=np.minimum(column.values, 1),
        nan=np.minimum(column.nan, 1),
        infinite=np.minimum(column.infinite, 1),
        fractions=np.minimum(column.fractions, 1),
        totals=np.where(np.isfinite(column.least), column.least, 0.0),
        faults=faults,
    )


# --- requests ------------------------------------------------------------------------------------


def expression(term: Term) -> str:
    """Return the SQL of a pointwise term in float64, with the operations of numpy."""
    match term:
        case Metric(name):
            return f"{quoted(name)}::DOUBLE"
        case Number(value):
            return double(float(value))
        case Abs(of):
            return f"abs({expression(of)})"
        case Arith(op, left, right):
            return f"({expression(left)} {op} {expression(right)})"
        case _:
            raise ValueError(f"{term} is no value of a token")


def extreme_query(terms: Sequence[Term]) -> str:
    """Return the query of the largest finite magnitude of each term."""
    parts = ", ".join(
        f"max(CASE WHEN isfinite({x}) THEN abs({x}) END) AS largest_{i}"
        for i, x in enumerate(map(expression, terms))
    )
    return f"SELECT {parts} FROM tokens"


def request_query(slice_of: str, terms: Sequence[Term], steps: Sequence[Sequence[float]]) -> str:
    """Return the query that reduces requests: one row per slice and request.

    `steps` has powers of two, the largest first; each finite value is a sum of their integer
    multiples. `rest_i` is the remainder, which must be 0. Columns: slice, request, place (of its
    first row), tokens, then of term i: values_i, nan_i, infinite_i, fractions_i, least_i, most_i,
    sum_i_j (decimal digits) and rest_i.
    """
    source = f"SELECT {slice_of} AS slice, {quoted(REQUEST)}, {PLACE}"
    for i, term in enumerate(terms):
        source += f",\n             {expression(term)} AS x_{i}"
    source += "\n      FROM tokens"
    if steps:
        first = ", ".join(
            f"CASE WHEN isfinite(x_{i}) THEN x_{i} ELSE 0 END AS left_{i}_0"
            for i in range(len(terms))
        )
        source = f"SELECT *, {first}\n      FROM ({source})"
        for j in range(max(map(len, steps))):
            parts = ", ".join(
                f"trunc(left_{i}_{j} / {double(own[j])}) AS n_{i}_{j},"
                f" left_{i}_{j} - n_{i}_{j} * {double(own[j])} AS left_{i}_{j + 1}"
                for i, own in enumerate(steps)
                if j < len(own)
            )
            source = f"SELECT *, {parts}\n      FROM ({source})"
    columns = [
        "slice",
        f"{quoted(REQUEST)}::VARCHAR AS request",
        f"min({PLACE}) AS place",
        "count(*) AS tokens",
    ]
    for i in range(len(terms)):
        x = f"x_{i}"
        columns += [
            f"count({x}) AS values_{i}",
            f"count_if(isnan({x})) AS nan_{i}",
            f"count_if(isinf({x})) AS infinite_{i}",
            f"count_if({x} <> 0 AND {x} <> 1) AS fractions_{i}",
            f"min({x}) AS least_{i}",
            f"max(CASE WHEN NOT isnan({x}) THEN {x} END) AS most_{i}",
        ]
        if steps:
            columns += [
                f"sum(n_{i}_{j}::BIGINT)::VARCHAR AS sum_{i}_{j}" for j in range(len(steps[i]))
            ]
            columns.append(f"max(abs(left_{i}_{len(steps[i])})) AS rest_{i}")
    return (
        f"SELECT {(',' + chr(10) + '       ').join(columns)}\n"
        f"FROM ({source})\n"
        f"GROUP BY slice, {quoted(REQUEST)}"
    )


def rows_query(slice_of: str, name: str, request: str, term: Term) -> str:
    """Return the query of the values of one request in the order of its rows."""
    return (
        f"SELECT x FROM (SELECT {slice_of} AS slice, {quoted(REQUEST)}::VARCHAR AS request,"
        f" {PLACE}, {expression(term)} AS x FROM tokens)\n"
        f"WHERE slice = {text(name)} AND request = {text(request)} ORDER BY {PLACE}"
    )
