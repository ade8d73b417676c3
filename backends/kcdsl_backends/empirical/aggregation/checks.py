"""What rows must be before anything of them is counted: each of one request, whole, and once.

A row without what tells slices apart belongs nowhere, a request whose rows have several values of a
field is torn apart between slices, and a file that is there twice makes every token of it weigh
twice. Nothing of that is dropped or mended.
"""

from __future__ import annotations

from collections.abc import Sequence

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.source.files import shown
from kcdsl_backends.empirical.aggregation.engine import Database
from kcdsl_backends.empirical.aggregation.selecting import (
    Member,
    belonging,
    field_query,
    position_query,
    tested_fields,
    torn_query,
)
from kcdsl_backends.empirical.aggregation.tables import POSITION, SLICE, TokenTable


def check_rows(database: Database, members: Sequence[Member] | None) -> None:
    """Refuse a table whose rows do not belong to one request, one slice and one position each.

    `members` are the slices that are wanted; None stands for every slice that the column names.
    Raises Refusal: KC622 for a field by which slices are told apart, KC680 for the rest.
    """
    table = database.table
    wheres = [m.where for m in members or () if m.where is not None]
    fields = sorted(frozenset[str]().union(*map(tested_fields, wheres)))
    named = any(m.named for m in members or ())
    if members is None:  # counting finds a row without a name, but not an empty list of them
        named = table.slices == "lists"
    _refuse_lacking(database, [*fields, *([SLICE] if named else [])])
    for field in fields:
        torn = database.rows(torn_query(field))
        if torn:
            raise refuse(
                codes.REQUEST_FIELD,
                f"the request `{torn[0]['request']}` has several values of `{field}`, by which "
                "slices are told apart",
                help="write the field of its request into each row, the same into all",
            )
    if POSITION in table.fields:
        _refuse_positions(database)


def _refuse_lacking(database: Database, fields: Sequence[str]) -> None:
    if not fields:
        return
    found = database.rows(field_query(database.table, fields))[0]
    for i, field in enumerate(fields):
        lacking = int(found[f"lacking_{i}"])
        if lacking and field == SLICE:
            raise refuse(
                codes.TOKEN_TABLE,
                f"{lacking} rows have no slice",
                help="a row that belongs nowhere is not dropped: name its slice, or leave it out",
            )
        if lacking:
            raise refuse(
                codes.REQUEST_FIELD,
                f"{lacking} rows have no `{field}`, by which slices are told apart",
                help="give the field to every row: a row that belongs nowhere is not dropped",
            )


def _refuse_positions(database: Database) -> None:
    kind = database.table.fields[POSITION]
    if kind != "integer":
        raise _positions(f"the column `{POSITION}` holds {kind}s")
    lacking = int(database.rows(field_query(database.table, [POSITION]))[0]["lacking_0"])
    if lacking:
        raise _positions(f"{lacking} rows have no `{POSITION}`")
    for row in database.rows(position_query()):
        raise _positions(
            f"the request `{row['request']}` has {row['rows']} rows at {row['places']} of the "
            f"positions {row['first']} to {row['last']}: each must be there once"
        )


def _positions(message: str) -> Refusal:
    return refuse(
        codes.TOKEN_TABLE,
        message,
        help=f"number the rows of each request without gaps, or leave `{POSITION}` out",
    )


def left_out(database: Database, members: Sequence[Member] | None) -> int:
    """Return how many rows are in none of the wanted slices."""
    tests = [] if members is None else belonging(database.table, members)
    if not tests or "TRUE" in tests:
        return 0
    query = f"SELECT count_if(NOT ({' OR '.join(f'({test})' for test in tests)})) AS n FROM tokens"
    return int(database.rows(query)[0]["n"])


def refuse_copies(table: TokenTable, digests: Sequence[str]) -> None:
    """Refuse a file that has rows and the bytes of another one (`digests`, by file)."""
    import pyarrow.parquet as pq

    first: dict[str, int] = {}
    for i, digest in enumerate(digests):
        other = first.setdefault(digest, i)
        if other != i and pq.read_metadata(table.files[i]).num_rows:
            raise refuse(
                codes.TOKEN_TABLE,
                f"{shown(table.files[i])} has the bytes of {shown(table.files[other])}",
                help="every token of it would weigh twice: give it once",
            )
