"""Which requests there can be, as far as predicates tell them apart.

A predicate compares fields with constants. Between two neighbouring constants it cannot tell one
number from another, and no text from another that it does not name; so a few values of each field
stand for all of them, and looking at every combination decides whether any request satisfies a
predicate. A field has the kind of the constants it is compared with: a request where it is absent
or of another kind is refused before any predicate is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise, product
from math import ceil, floor, prod

from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate

Value = str | Fraction | bool
Case = Mapping[str, Value]
"""A value for each field that is tested."""

MOST_CASES = 20_000


class Undecided(Exception):
    """Raised where there are too many combinations to look at."""


def find_case(predicate: Predicate, whole: Iterable[str] = ()) -> Case | None:
    """Return a request that satisfies a predicate, or None if there can be none.

    The fields in `whole` hold whole numbers from 1 on. Raises `Undecided` beyond 20,000
    combinations, and where a field is compared with constants of two kinds.
    """
    constants: dict[str, set[Value]] = {}
    for test in tests_of(predicate):
        values = constants.setdefault(test.field, set())
        if any(type(value) is not type(test.value) for value in values):  # True == 1 in Python
            raise Undecided
        values.add(test.value)
    counted = frozenset(whole)
    choices = {
        name: _representatives(values, name in counted) for name, values in constants.items()
    }
    if prod(len(values) for values in choices.values()) > MOST_CASES:
        raise Undecided
    for chosen in product(*choices.values()):
        case = dict(zip(choices, chosen, strict=True))
        if holds(predicate, case):
            return case
    return None


def tests_of(predicate: Predicate) -> Iterator[FieldTest]:
    """Yield every comparison of a predicate."""
    match predicate:
        case FieldTest():
            yield predicate
        case AllOf(parts=parts) | AnyOf(parts=parts):
            for part in parts:
                yield from tests_of(part)
        case NoneOf(part=part):
            yield from tests_of(part)


def holds(predicate: Predicate, case: Case) -> bool:
    """Say whether a request satisfies a predicate."""
    match predicate:
        case FieldTest(field=field, op=op, value=value):
            return _compare(case[field], op, value)
        case AllOf(parts=parts):
            return all(holds(part, case) for part in parts)
        case AnyOf(parts=parts):
            return any(holds(part, case) for part in parts)
        case NoneOf(part=part):
            return not holds(part, case)


def _compare(left: Value, op: str, right: Value) -> bool:
    if op in {"==", "!="}:
        return (left == right) is (op == "==")
    if not isinstance(left, Fraction) or not isinstance(right, Fraction):
        raise Undecided
    return {"<=": left <= right, "<": left < right, ">=": left >= right, ">": left > right}[op]


def _representatives(constants: set[Value], whole: bool) -> list[Value]:
    if len({type(value) for value in constants}) > 1:
        raise Undecided
    texts = sorted(value for value in constants if isinstance(value, str))
    if texts:
        other = "other"
        while other in texts:
            other += "-"
        return [*texts, other]
    numbers = sorted(value for value in constants if isinstance(value, Fraction))
    if not numbers:
        return [True, False]
    if whole:
        near = {end + step for n in numbers for end in (floor(n), ceil(n)) for step in (-1, 0, 1)}
        return [Fraction(n) for n in sorted({*near, 1}) if n >= 1]
    between = [(a + b) / 2 for a, b in pairwise(numbers)]
    return [numbers[0] - 1, *sorted([*numbers, *between]), numbers[-1] + 1]
