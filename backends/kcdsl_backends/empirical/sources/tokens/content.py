"""The rows of a token table, as digests that do not depend on how its files are written.

Each row is written as text, and md5 makes an integer of 64 bits of it. Their sum is the same in any
order, compression, number of row groups and width of numbers. It finds copies; it is no protection
against rows that somebody made to collide.

A sketch has the k least digests of single requests (bottom-k; Cohen and Kaplan 2007). It has what
its table has of the k least of two tables together, so that two sketches show a common request: any
one of tables of at most k requests, and else with a chance of about 1 - (1 - f)^k, where f is the
common share of the requests of both.
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
"""How many digests of requests a sketch has: a common share of 10 % stays unseen once in 800."""


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
    """Return the query of the least md5 of requests as they are written: digest."""
    name = f"{quoted(REQUEST)}::VARCHAR AS name"
    return (
        f"SELECT md5(concat({written})) AS digest\n"
        f"FROM (SELECT {', '.join((name, 'count(*) AS rows', *columns))}\n"
        f"      FROM tokens GROUP BY {quoted(REQUEST)})\nORDER BY digest LIMIT {SKETCH}"
    )


def _columns(table: TokenTable) -> list[str]:
    return sorted({*table.fields, *([] if table.slices is None else [SLICE])})


def _written(table: TokenTable, name: str) -> str:
    """Return a value as text: a number, `-` where there is none, and else its length before it."""
    if name in table.metrics:
        return f"coalesce({quoted(name)}::DOUBLE::VARCHAR, '-')"
    x = f"{quoted(name)}::VARCHAR"
    return f"coalesce(strlen({x})::VARCHAR || ':' || {x}, '-')"


def _digest(head: str, rows: int, total: int) -> str:
    return hashlib.sha256(f"{head} {rows} {total}".encode()).hexdigest()
