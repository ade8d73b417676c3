"""Digests of the rows of a token table that do not depend on how its files are written.

Each row is written as text and hashed by md5 to an integer of 64 bits. The sum is the same for any
order, compression, number of row groups and width of numbers. It detects copies, not rows that were
constructed to collide.

A sketch has the k least digests of single requests (bottom-k; Cohen and Kaplan 2007). Two sketches
together have the k least digests of both tables, so they show whether the tables have a common
request: always for tables of at most k requests, else with a probability of about 1 - (1 - f)^k,
where f is the share of common requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from kcdsl_backends.empirical.sources.tokens.database import Database
from kcdsl_backends.empirical.sources.tokens.tables import (
    PLACE,
    REQUEST,
    SLICE,
    TokenTable,
    quoted,
)

SKETCH = 64
"""Number of digests in a sketch: a common share of 10 % is missed once in 800."""


def content_digests(database: Database) -> tuple[str, dict[int, str]]:
    """Return the sha256 of all rows, and that of the rows of each file by its number; files without
    rows are left out."""
    table = database.table
    head = json.dumps([*_columns(table), *table.names])
    found = {
        int(r["file"]): (r["rows"], int(r["sum"])) for r in database.rows(content_query(table))
    }
    whole = sum(rows for rows, _ in found.values()), sum(total for _, total in found.values())
    return _digest(head, *whole), {file: _digest(head, *own) for file, own in found.items()}


def content_query(table: TokenTable) -> str:
    """Return the query of the sum of rows by file: file, rows, sum."""
    parts = ", ' ', ".join(_written(table, name) for name in _columns(table))
    return (
        "SELECT file, count(*) AS rows, sum(md5_number_lower(row)::HUGEINT)::VARCHAR AS sum\n"
        f"FROM (SELECT {PLACE} // {2**40} AS file, concat({parts}) AS row FROM tokens)\n"
        "GROUP BY file"
    )


def sketches(database: Database, metrics: Iterable[str]) -> dict[str, list[str]]:
    """Return two sketches as sha256: `ids` of the names of requests, and `values` of the name of
    each and its values of these metrics."""
    parts = ", ' ', ".join(["''", *(_written(database.table, name) for name in sorted(metrics))])
    found = {
        "ids": sketch_query("strlen(name), ':', name"),
        "values": sketch_query(
            "strlen(name), ':', name, ' ', rows, ' ', sum",
            f"sum(md5_number_lower(concat({parts}))::HUGEINT) AS sum",
        ),
    }
    return {
        kind: sorted(
            hashlib.sha256(f"{kind} {row['digest']}".encode("ascii")).hexdigest()
            for row in database.rows(query)
        )
        for kind, query in found.items()
    }


def sketch_query(written: str, *columns: str) -> str:
    """Return the query of the least md5 of requests written as the expression `written`: digest."""
    name = f"{quoted(REQUEST)}::VARCHAR AS name"
    return (
        f"SELECT md5(concat({written})) AS digest\n"
        f"FROM (SELECT {', '.join((name, 'count(*) AS rows', *columns))}\n"
        f"      FROM tokens GROUP BY {quoted(REQUEST)})\nORDER BY digest LIMIT {SKETCH}"
    )


def _columns(table: TokenTable) -> list[str]:
    return sorted({*table.fields, *([] if table.slices is None else [SLICE])})


def _written(table: TokenTable, name: str) -> str:
    """Return the SQL of a value as text: a number, `-` for null, other values after their
    length."""
    if name in table.metrics:
        return f"coalesce({quoted(name)}::DOUBLE::VARCHAR, '-')"
    x = f"{quoted(name)}::VARCHAR"
    return f"coalesce(strlen({x})::VARCHAR || ':' || {x}, '-')"


def _digest(head: str, rows: int, total: int) -> str:
    return hashlib.sha256(f"{head} {rows} {total}".encode()).hexdigest()
