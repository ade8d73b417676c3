"""The sorts of request fields: a field of one data file holds texts, numbers or truth values.

A contract does not declare fields; what it compares a field with says what it takes the field for.
Two places that take a field of the same data for two things cannot both be meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from kcdsl.check.report import Reporter
from kcdsl.diagnostics.codes import FIELD_OF_TWO_SORTS
from kcdsl.diagnostics.model import Label
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir

LENGTH = "length"
"""The number of tokens, a field that every request has."""

_WORDS = {"Text": "a text", "Real": "a number", "Bool": "a truth value"}


def value_sort(value: str | Fraction | bool) -> str:
    """Return the sort of a value: Text, Bool or Real."""
    if isinstance(value, bool):
        return "Bool"
    return "Text" if isinstance(value, str) else "Real"


def tests_of(predicate: ir.Predicate) -> Iterator[ir.FieldTest]:
    """Yield every test of a field in a predicate."""
    match predicate:
        case ir.FieldTest():
            yield predicate
        case ir.AllOf(parts=parts) | ir.AnyOf(parts=parts):
            for part in parts:
                yield from tests_of(part)
        case ir.NoneOf(part=part):
            yield from tests_of(part)


def field_sorts(slices: Sequence[ir.Slice | None], data: str | None) -> Mapping[str, str]:
    """Return what the slices on one data file take its fields for, by the first test of each."""
    found = {LENGTH: "Int"}
    for item in slices:
        if item is not None and (item.data or data) == data:
            for test in tests_of(item.where):
                found.setdefault(test.field, value_sort(test.value))
    return found


def check_fields(
    slices: Sequence[ir.Slice | None],
    imported: Sequence[ir.Slice],
    tables: Sequence[ir.ThresholdTable | None],
    data: str | None,
    reporter: Reporter,
) -> None:
    """Report a field that is taken for two sorts; `data` is that of slices that name none.

    Slices from other files are compared with, and not reported: their own file is checked.
    """
    by_data: dict[str | None, dict[str, tuple[str, Span | None]]] = {}
    for item in imported:
        known = by_data.setdefault(item.data or data, {})
        for test in tests_of(item.where):
            known.setdefault(test.field, (value_sort(test.value), None))
    for own in slices:
        if own is not None:
            _compare(own.where, by_data.setdefault(own.data or data, {}), reporter)
    for table in tables:
        known = {}
        for row in table.rows if table is not None else ():
            _compare(row.where, known, reporter)


def _compare(
    where: ir.Predicate, known: dict[str, tuple[str, Span | None]], reporter: Reporter
) -> None:
    for test in tests_of(where):
        sort = value_sort(test.value)
        if test.field == LENGTH and sort != "Real":
            reporter.error(
                FIELD_OF_TWO_SORTS,
                f"`{LENGTH}` is the number of tokens, and here {_WORDS[sort]}",
                test.span,
                "compare it with a number",
            )
            continue
        first, place = known.setdefault(test.field, (sort, test.span))
        if first == sort:
            continue
        labels = (Label(place, f"{_WORDS[first]} here"),) if place is not None else ()
        reporter.error(
            FIELD_OF_TWO_SORTS,
            f"`{test.field}` is {_WORDS[sort]} here and {_WORDS[first]} elsewhere",
            test.span,
            "a field holds one of them; numbers stand without quotation marks, texts with them",
            labels,
        )
