"""The slices of the rows of a token table, and checks that each row belongs to known ones.

A slice has a name in a column or a predicate on fields of the table; thresholds of predicates are
exact, as they are where requests are selected. A row without a field that a slice tests belongs to
no slice, a request whose rows have several values of a field is split between slices, and a file
that is given twice counts its tokens twice. Such tables are refused, not repaired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.inequalities import round_down, round_up
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate
from kcdsl.source.files import shown
from kcdsl_backends.empirical.sources.tokens.database import Database
from kcdsl_backends.empirical.sources.tokens.tables import (
    POSITION,
    REQUEST,
    SLICE,
    TokenTable,
    belonging_nowhere,
    double,
    quoted,
    text,
)


@dataclass(frozen=True, slots=True)
class SliceMember:
    """A slice: the rows with `named` in the column of slices that satisfy `where` (None: no
    condition)."""

    name: str
    where: Predicate | None
    named: str | None


def membership(table: TokenTable, members: Sequence[SliceMember] | None) -> str:
    """Return the expression of the slice of a row; one row for each slice it belongs to.

    `members` None stands for every slice that the column names.
    """
    column = quoted(SLICE)
    if members is None:
        match table.slices:
            case None:
                return text("all")
            case "names":
                return column
            case "numbers":
                return _named(table)
            case _:
                return f"unnest(list_distinct({column}))"
    tests = belonging(table, members)
    if tests == ["TRUE"]:
        return text(members[0].name)
    listed = ", ".join(
        f"CASE WHEN {test} THEN {text(member.name)} END"
        for member, test in zip(members, tests, strict=True)
    )
    return f"unnest(list_filter([{listed}], lambda name: name IS NOT NULL))"


def belonging(table: TokenTable, members: Sequence[SliceMember]) -> list[str]:
    """Return the condition of each slice on its rows."""
    found = []
    for member in members:
        tests = [] if member.named is None else [_has_name(table, member.named)]
        if member.where is not None and member.where != AllOf(()):
            tests.append(predicate(member.where, table, member.name))
        found.append(" AND ".join(tests) if tests else "TRUE")
    return found


def _has_name(table: TokenTable, name: str) -> str:
    match table.slices:
        case "names":
            return f"{quoted(SLICE)} = {text(name)}"
        case "numbers":
            return f"{_named(table)} = {text(name)}"
        case _:
            return f"list_contains({quoted(SLICE)}, {text(name)})"


def _named(table: TokenTable) -> str:
    if not table.names:
        return f"{quoted(SLICE)}::VARCHAR"
    names = ", ".join(map(text, table.names))
    return f"CASE WHEN {quoted(SLICE)} >= 0 THEN ([{names}])[{quoted(SLICE)} + 1] END"


_NUMBERS = ("number", "integer")


def predicate(where: Predicate, table: TokenTable, name: str) -> str:
    """Return a predicate of a slice as a condition on rows; raises Refusal (KC622)."""
    match where:
        case AllOf(parts):
            return f"({' AND '.join(predicate(p, table, name) for p in parts) or 'TRUE'})"
        case AnyOf(parts):
            return f"({' OR '.join(predicate(p, table, name) for p in parts) or 'FALSE'})"
        case NoneOf(part):
            return f"(NOT {predicate(part, table, name)})"
        case FieldTest(field, op, value):
            kind = table.fields.get(field)
            wanted = {bool: ("boolean",), str: ("string",)}.get(type(value), _NUMBERS)
            if kind is None or kind not in wanted:
                problem = "no such column" if kind is None else f"a column of kind {kind}"
                raise refuse(
                    codes.REQUEST_FIELD,
                    f"the slice `{name}` compares `{field}` with a {wanted[0]}, and the token "
                    f"table has {problem}",
                    help="write the field of its request into each row",
                )
            return _test(quoted(field), op, value, kind)
        case _:
            assert_never(where)


def field_query(table: TokenTable, fields: Sequence[str]) -> str:
    """Return the query of the rows without a value of each field: lacking_i."""
    parts = []
    for i, field in enumerate(fields):
        test = f"{quoted(field)} IS NULL"
        if table.fields.get(field) == "number":
            test += f" OR isnan({quoted(field)})"
        if field == SLICE and table.slices == "numbers":
            test = f"{_named(table)} IS NULL"
        elif field == SLICE and table.slices == "lists":
            column = quoted(SLICE)
            test += f" OR len({column}) = 0 OR list_count({column}) < len({column})"
        parts.append(f"count_if({test}) AS lacking_{i}")
    return f"SELECT {', '.join(parts)} FROM tokens"


def split_query(field: str, kind: str | None = None) -> str:
    """Return the query of a request of which a field has several values; `kind` is that of a column
    of slices, whose lists are sets."""
    x = f"list_sort(list_distinct({quoted(field)}))" if kind == "lists" else quoted(field)
    return (
        f"SELECT {quoted(REQUEST)}::VARCHAR AS request FROM tokens\n"
        f"GROUP BY {quoted(REQUEST)} HAVING min({x}) <> max({x})\nORDER BY request LIMIT 1"
    )


def position_query() -> str:
    """Return the query of a request without exactly one row at each position: request, rows, places
    (distinct positions), first and last."""
    x = quoted(POSITION)
    return (
        f"SELECT {quoted(REQUEST)}::VARCHAR AS request, count(*) AS rows,\n"
        f"       count(DISTINCT {x}) AS places, min({x}) AS first, max({x}) AS last\n"
        f"FROM tokens GROUP BY {quoted(REQUEST)}\n"
        "HAVING rows <> places OR last::HUGEINT - first::HUGEINT + 1 <> rows\n"
        "ORDER BY request LIMIT 1"
    )


def tested_fields(where: Predicate) -> frozenset[str]:
    """Return the fields that a predicate reads."""
    match where:
        case AllOf(parts) | AnyOf(parts):
            return frozenset().union(*map(tested_fields, parts))
        case NoneOf(part):
            return tested_fields(part)
        case FieldTest(field):
            return frozenset((field,))
        case _:
            assert_never(where)


def _test(column: str, op: str, value: str | bool | Fraction, kind: str) -> str:
    sign = {"==": "=", "!=": "<>"}.get(op, op)
    if isinstance(value, bool):
        return f"{column} {sign} {str(value).upper()}"
    if isinstance(value, str):
        return f"{column} {sign} {text(value)}"
    there = value.denominator == 1 if kind == "integer" else Fraction(round_down(value)) == value
    if not there:  # the column cannot hold the number itself
        if op in ("==", "!="):
            return "TRUE" if op == "!=" else "FALSE"
        sign = f"{op[0]}="
    down = op in ("<=", "<", "==", "!=")
    if kind == "integer":  # of at most 64 bits, and DuckDB reads literals of at most 128
        whole = math.floor(value) if down else math.ceil(value)
        return f"{column} {sign} {min(max(whole, -(2**65)), 2**65)}"
    return f"{column}::DOUBLE {sign} {double(round_down(value) if down else round_up(value))}"


# --- checks --------------------------------------------------------------------------------------


def check_rows(database: Database, members: Sequence[SliceMember] | None) -> None:
    """Refuse a table whose rows do not belong to one request, one slice and one position each.

    `members` are the wanted slices; None stands for every slice that the column names. Raises
    Refusal: KC622 for a field that slices test, KC680 for the rest.
    """
    table = database.table
    wheres = [m.where for m in members or () if m.where is not None]
    fields = sorted(frozenset[str]().union(*map(tested_fields, wheres)))
    named = any(m.named for m in members or ())
    if members is None:  # counting detects a missing name, but not an empty list
        named = table.slices == "lists"
    _refuse_lacking(database, [*fields, *([SLICE] if named else [])])
    if table.slices is not None and (members is None or any(m.named for m in members)):
        fields = sorted({*fields, SLICE})
    for field in fields:
        torn = database.rows(split_query(field, table.slices if field == SLICE else None))
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
            raise belonging_nowhere(str(lacking), "slice")
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


def left_out(database: Database, members: Sequence[SliceMember] | None) -> int:
    """Return the number of rows outside all wanted slices."""
    tests = [] if members is None else belonging(database.table, members)
    if not tests or "TRUE" in tests:
        return 0
    query = f"SELECT count_if(NOT ({' OR '.join(f'({test})' for test in tests)})) AS n FROM tokens"
    return int(database.rows(query)[0]["n"])


def refuse_copies(table: TokenTable, digests: Sequence[str], what: str = "bytes") -> None:
    """Refuse a file with rows whose digest equals that of another; `digests` are by file."""
    import pyarrow.parquet as pq

    first: dict[str, int] = {}
    for i, digest in enumerate(digests):
        other = first.setdefault(digest, i)
        if other != i and pq.read_metadata(table.files[i]).num_rows:
            raise refuse(
                codes.TOKEN_TABLE,
                f"{shown(table.files[i])} has the {what} of {shown(table.files[other])}",
                help="every token of it would weigh twice: give it once",
            )
