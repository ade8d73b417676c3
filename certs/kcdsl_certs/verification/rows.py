"""The rows of a data file, and the selection of a slice, read independently of the prover."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from kcdsl_certs.encoding.reals import parse_real
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import OPERATORS, holds

BYTES = "bytes"
"""The tokenizer of this package: one token per UTF-8 byte."""
_LARGEST_POWER = 400


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `tokens` is None if only the model's own tokenizer can compute them."""

    id: str
    fields: Mapping[str, str | bool | Fraction]
    tokens: tuple[int, ...] | None

    @property
    def length(self) -> int | None:
        """Return the number of tokens; None if unknown."""
        return None if self.tokens is None else len(self.tokens)


@dataclass(frozen=True, slots=True)
class Selected:
    """The rows that a slice selects, and those that only a tokenizer could decide."""

    rows: tuple[Row, ...]
    open: tuple[Row, ...] = ()


def read_rows(data: bytes, tokens: str) -> tuple[Row, ...]:
    """Return the rows of a JSON-lines file; raises Rejected `recount/rows` for anything unclear."""
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeError:
        raise Rejected("recount/rows", "the data is not UTF-8") from None
    rows = [_row(line, number, tokens) for number, line in enumerate(lines, 1) if line.strip()]
    known: set[str] = set()
    for row in rows:
        if row.id in known:
            raise Rejected("recount/rows", f"the id {row.id!r} is given twice")
        known.add(row.id)
    return tuple(rows)


def select(rows: Sequence[Row], where: Any) -> Selected:
    """Return the rows that satisfy a predicate, in three-valued logic."""
    found = [(row, _holds(where, row)) for row in rows]
    return Selected(
        tuple(row for row, holds in found if holds is True),
        tuple(row for row, holds in found if holds is None),
    )


def _row(line: str, number: int, tokens: str) -> Row:
    def refused(what: str) -> Rejected:
        return Rejected("recount/rows", f"line {number} of the data {what}")

    try:
        record = json.loads(
            line,
            object_pairs_hook=_without_duplicates,
            parse_float=_decimal,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError):
        raise refused("is no JSON object") from None
    if not isinstance(record, dict):
        raise refused("is no JSON object")
    name = record.get("id")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name:
        raise refused("has no id")
    fields: dict[str, str | bool | Fraction] = {}
    for key, value in record.items():
        if isinstance(value, str | bool):
            fields[key] = value
        elif isinstance(value, int | Decimal):
            fields[key] = Fraction(value)
    given = _tokens(record, tokens)
    if given is not None:
        fields.setdefault("length", Fraction(len(given)))
    return Row(name, fields, given)


def _tokens(record: Mapping[str, Any], how: str) -> tuple[int, ...] | None:
    given, text = record.get("tokens"), record.get("text")
    if isinstance(given, list) and all(type(token) is int for token in given):
        return tuple(given)
    if how == BYTES and isinstance(text, str):
        return tuple(text.encode("utf-8", "surrogatepass"))
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key is given twice")
    return record


def _decimal(digits: str) -> Decimal:
    number = Decimal(digits)
    if number and abs(number.adjusted()) > _LARGEST_POWER:
        raise ValueError("out of range")
    return number


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON value")


def _holds(where: Any, row: Row) -> bool | None:
    """Evaluate a predicate on a row; None where it depends on an unknown length."""
    match where:
        case {"all": list(parts), **rest} if not rest:
            found = [_holds(part, row) for part in parts]
            return False if False in found else None if None in found else True
        case {"any": list(parts), **rest} if not rest:
            found = [_holds(part, row) for part in parts]
            return True if True in found else None if None in found else False
        case {"none": part, **rest} if not rest:
            inner = _holds(part, row)
            return None if inner is None else not inner
        case {"field": str(name), "op": str(op), "value": value, **rest} if not rest:
            return _test(row, name, op, value)
    raise Rejected("recount/predicate", "a slice is selected in a way that is not known here")


def _test(row: Row, name: str, op: str, stated: Any) -> bool | None:
    actual = row.fields.get(name)
    if actual is None and name == "length" and row.tokens is None:
        return None
    value: Any = stated
    if isinstance(stated, dict) and stated.keys() == {"real"} and isinstance(stated["real"], str):
        value = parse_real(stated["real"])
    elif not isinstance(stated, str | bool):
        raise Rejected("recount/predicate", f"the field {name} is compared with no value")
    if actual is None or type(actual) is not type(value):
        raise Rejected("recount/rows", f"the row {row.id} has no such field {name}")
    if op == "!=":
        return bool(actual != value)
    if op not in OPERATORS:
        raise Rejected("recount/predicate", f"there is no comparison {op!r}")
    return holds(actual, op, value)
