"""The queries, written so that a reader can check them: what is counted, and how it is compared.

- exceedance is `NOT (x <= threshold)`, so that a NaN exceeds; both sides are doubles, because
  `0.05::FLOAT > 0.05::DOUBLE` is true; a NULL is no value and is counted apart;
- a threshold is the largest double that is not above the exact one: for doubles it is the same;
- percentiles are order statistics of rank ceil(q n);
- sums are sums of integers (`sums`), so they do not depend on the order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kcdsl.ir.terms import Abs, Arith, Metric, Number, Term
from kcdsl_backends.empirical.sources.tokens.tables import REQUEST, TokenTable

PLACE = "kcdsl_place"
"""Where a row stands: the number of its file and its number in there, as one integer."""


def quoted(name: str) -> str:
    """Return a name of a column."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """Return a string."""
    return "'" + value.replace("'", "''") + "'"


def double(value: float) -> str:
    """Return a float64: a bare 0.05 would be a decimal number, compared otherwise."""
    return f"'{value!r}'::DOUBLE"


def below(value: Fraction) -> float:
    """Return the largest float64 that is at most a number: x <= it says the same of doubles."""
    try:
        nearest = float(value)
    except OverflowError:
        return math.nextafter(math.inf, 0) if value > 0 else -math.inf
    return nearest if Fraction(nearest) <= value else math.nextafter(nearest, -math.inf)


def above(value: Fraction) -> float:
    """Return the smallest float64 that is at least a number."""
    return -below(-value)


# --- rows ----------------------------------------------------------------------------------------


def view(table: TokenTable) -> str:
    """Return the statement that gives the files a name."""
    files = ", ".join(text(str(file)) for file in table.files)
    return (
        f"CREATE VIEW tokens AS SELECT *, file_index * {2**40} + file_row_number AS {PLACE}\n"
        f"FROM read_parquet([{files}])"
    )


# --- tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """A requirement on a value: `op` is <=, <, >= or >."""

    op: str
    value: Fraction

    def holds(self, x: str) -> str:
        """Return the condition that a column meets it, in doubles."""
        down = self.op in ("<=", "<")
        nearest = below(self.value) if down else above(self.value)
        op = self.op if Fraction(nearest) == self.value else self.op[0] + "="
        test = f"{x}::DOUBLE {op} {double(nearest)}"
        return test if down else f"{test} AND NOT isnan({x})"  # to DuckDB NaN is the greatest value


@dataclass(frozen=True, slots=True)
class Asked:
    """What is counted of one metric: requirements that values do not meet, and the q of
    percentiles."""

    metric: str
    limits: tuple[Limit, ...] = ()
    quantiles: tuple[Fraction, ...] = ()


def token_query(slice_of: str, asked: Sequence[Asked], only: Sequence[str] | None = None) -> str:
    """Return the query of counts and percentiles of tokens, one row per slice.

    Columns: slice, rows, then of metric i: values_i, beyond_i_j for each limit, ranks_i.
    """
    columns = ["slice", "count(*) AS rows"]
    for i, one in enumerate(asked):
        x = quoted(one.metric)
        columns.append(f"count({x}) AS values_{i}")
        columns += [
            f"sum((NOT ({limit.holds(x)}))::INTEGER) AS beyond_{i}_{j}"
            for j, limit in enumerate(one.limits)
        ]
        if one.quantiles:
            wanted = ", ".join(map(decimal, one.quantiles))
            columns.append(f"quantile_disc({x}, [{wanted}]) AS ranks_{i}")
    names = ", ".join(dict.fromkeys(quoted(one.metric) for one in asked))
    return (
        f"SELECT {(',' + chr(10) + '       ').join(columns)}\n"
        f"FROM {rows_of(slice_of, names, only)}\n"
        "GROUP BY slice"
    )


def rows_of(slice_of: str, names: str, only: Sequence[str] | None = None) -> str:
    """Return the rows with their slice, of some slices or of all."""
    rows = f"(SELECT {slice_of} AS slice, {names} FROM tokens)"
    if only is None:
        return rows
    return f"(SELECT * FROM {rows}\n      WHERE slice IN ({', '.join(map(text, only))}))"


def decimal(q: Fraction) -> str:
    """Return a share as a decimal number, whose rank DuckDB finds in integers."""
    digits = 0
    while (q * 10**digits).denominator != 1:
        digits += 1
        if digits > 9:
            raise ValueError(f"{q} is no decimal number of at most 9 digits")
    digits = max(1, digits)
    whole, rest = divmod(int(q * 10**digits), 10**digits)
    return f"{whole}.{rest:0{digits}d}"


# --- requests ------------------------------------------------------------------------------------


def expression(term: Term) -> str:
    """Return a pointwise term in float64, operation by operation as numpy has it."""
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

    `steps` has the powers of two of which each finite value is written as a sum of integer
    multiples, the largest first; `rest_i` is what of the values is left, and must be 0. Columns:
    slice, request, place (of its first row), tokens, then of term i: values_i, nan_i, infinite_i,
    fractions_i, least_i, most_i, sum_i_j (decimal digits) and rest_i.
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
