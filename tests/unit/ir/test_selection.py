"""Emptiness and inclusion of slices, without a solver."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from kcdsl.ir.predicates import division, implies, inclusion, is_empty
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate, Slice
from tests.support import contracts as made


def number(op: str, value: int, field: str = "n") -> FieldTest:
    return FieldTest(field, op, Fraction(value))


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (number(">", 5), number(">", 3), True),
        (number(">", 3), number(">", 5), False),
        (number(">", 3), number(">=", 3), True),
        (number(">=", 3), number(">", 3), False),
        (number("==", 3), AllOf(), True),
        (AllOf(), number("==", 3), False),
        (AllOf(), AnyOf((number("<", 3), number(">=", 3))), True),
        (AllOf(), AnyOf((number("<", 3), number(">", 3))), False),
        (FieldTest("k", "==", "a"), FieldTest("k", "!=", "b"), True),
        (FieldTest("k", "!=", "b"), FieldTest("k", "==", "a"), False),
        (NoneOf(FieldTest("t", "==", True)), FieldTest("t", "==", False), True),
        (number(">", 3), number(">", 3, "m"), False),
        (AnyOf(), number(">", 3), True),
    ],
)
def test_inclusion_of_slices(inner: Predicate, outer: Predicate, expected: bool) -> None:
    assert implies(inner, outer) is expected


def test_emptiness_of_slices() -> None:
    assert is_empty(AllOf((number("<", 1), number(">", 1)))) is True
    assert is_empty(AllOf((number("<=", 1), number(">=", 1)))) is False
    assert is_empty(AnyOf()) is True
    assert is_empty(AllOf((number(">", 1), number("<", 2)))) is False  # numbers, not integers
    assert is_empty(number("<", 1)) is False
    assert is_empty(number(">", 1)) is False


def test_slices_of_different_data_are_disjoint() -> None:
    slices = (
        Slice("all"),
        Slice("same", "data.jsonl"),
        Slice("other", "other.jsonl"),
        Slice("long", where=number(">", 5)),
    )
    inside = inclusion(replace(made.program(), slices=slices))
    found = {(a.name, b.name) for a in slices for b in slices if a != b and inside(a.name, b.name)}
    assert found == {("all", "same"), ("same", "all"), ("long", "all"), ("long", "same")}
    assert not inside("none", "all")


def test_parts_of_a_slice() -> None:
    slices = (
        Slice("all"),
        Slice("long", where=number(">", 5)),
        Slice("brief", where=number("<=", 5)),
        Slice("most", where=number("<=", 9)),
    )
    divided = division(replace(made.program(), slices=slices))
    assert divided("all", ("long", "brief")) == (True, True)
    assert divided("all", ("long", "most")) == (True, False)
    assert divided("all", ("brief", "most")) == (False, False)


@pytest.mark.parametrize("other", [Fraction(1), "true"])
def test_field_of_two_types_is_undecided(other: str | Fraction) -> None:
    """Python treats True and 1 as equal, but a field is one or the other."""
    both = AllOf((FieldTest("x", "==", True), FieldTest("x", "==", other)))
    assert is_empty(both) is None
    assert implies(both, AllOf((both, both))) is None


def test_too_many_cases_are_undecided() -> None:
    fields = AllOf(tuple(number(">", 0, f"n{i}") for i in range(12)))
    assert is_empty(fields) is None
