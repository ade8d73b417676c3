"""What rows a token table has, as digests that do not depend on how its files are written.

Each row is written as text, and md5 makes an integer of 64 bits of it. Their sum is the same in any
order, compression, number of row groups and width of numbers. It finds copies; it is no protection
against rows that somebody made to collide.
"""

from __future__ import annotations

import hashlib
import json

from kcdsl_backends.empirical.sources.tokens.database import Database
from kcdsl_backends.empirical.sources.tokens.tables import PLACE, SLICE, TokenTable, quoted


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
