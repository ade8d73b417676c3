"""One order statistic of a slice that is too large to be held: found by counting.

Rows between two values are counted on both sides of pivots drawn among them, and the part with the
wanted rank is searched on, until it fits into memory. Counts decide, so the answer is exact
whichever pivots were drawn; NaN is the greatest value, as DuckDB orders it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kcdsl_backends.empirical.aggregation.engine import Database
from kcdsl_backends.empirical.aggregation.sql import quoted, rows_of, text

_PIVOTS = 15
_SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class _Part:
    """The values above `low` and below `high` (None: no end), `before` of which are smaller."""

    low: float | None
    high: float | None
    before: int
    values: int


def order_statistic(
    database: Database, slice_of: str, name: str, metric: str, rank: int, values: int, room: int
) -> float:
    """Return the value of a rank (from 1) among `values` of a metric in a slice; at most `room`
    values are sorted at a time."""
    part = _Part(None, None, 0, values)
    while part.values > room:
        rows = _rows(slice_of, name, metric, part)
        pivots = _pivots(database, rows)
        counts = database.rows(
            "SELECT "
            + ", ".join(
                f"count_if(x < {_value(p)}) AS below_{i}, count_if(x <= {_value(p)}) AS upto_{i}"
                for i, p in enumerate(pivots)
            )
            + f"\nFROM {rows}"
        )[0]
        low, before, high, end = part.low, 0, part.high, part.values
        for i, pivot in enumerate(pivots):
            below, upto = int(counts[f"below_{i}"]), int(counts[f"upto_{i}"])
            wanted = rank - part.before
            if below < wanted <= upto:
                return pivot
            if upto < wanted:
                low, before = pivot, upto
            else:
                high, end = pivot, below
                break
        part = _Part(low, high, part.before + before, end - before)
    rows = _rows(slice_of, name, metric, part)
    found = database.rows(
        f"SELECT x FROM {rows}\nORDER BY x LIMIT 1 OFFSET {rank - part.before - 1}"
    )
    return float(found[0]["x"])


def _rows(slice_of: str, name: str, metric: str, part: _Part) -> str:
    x = quoted(metric)
    tests = [f"slice = {text(name)}", f"{x} IS NOT NULL"]
    if part.low is not None:
        tests.append(f"{x} > {_value(part.low)}")
    if part.high is not None:
        tests.append(f"{x} < {_value(part.high)}")
    rows = rows_of(slice_of, x)
    return f"(SELECT {x}::DOUBLE AS x FROM {rows}\n      WHERE {' AND '.join(tests)})"


def _pivots(database: Database, rows: str) -> list[float]:
    sample = database.rows(f"SELECT x FROM {rows} USING SAMPLE reservoir({_SAMPLE} ROWS)")
    drawn = sorted({float(row["x"]) for row in sample if not math.isnan(row["x"])})
    if any(math.isnan(row["x"]) for row in sample):
        drawn.append(math.nan)
    steps = max(1, len(drawn) // (_PIVOTS + 1))
    chosen = drawn[steps - 1 :: steps]
    return chosen if chosen else drawn


def _value(value: float) -> str:
    return f"'{value!r}'::DOUBLE"
