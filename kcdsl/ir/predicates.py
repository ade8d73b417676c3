"""Predicates of requests: which requests there can be, which slices lie inside others.

A predicate compares fields with constants. Between two neighbouring constants it cannot tell one
number from another, and no text from another that it does not name; so a few values of each field
stand for all of them, and looking at every combination decides whether any request satisfies a
predicate. A field has the kind of the constants it is compared with: a request where it is absent
or of another kind is refused before any predicate is evaluated. What has too many cases is left
open, and an open question is never answered with yes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product
from math import ceil, floor, prod

from kcdsl.ir.terms import (
    AllOf,
    AnyOf,
    FieldTest,
    NoneOf,
    Predicate,
    Program,
    Region,
    RegionKind,
    Slice,
)

Value = str | Fraction | bool
Case = Mapping[str, Value]
"""A value for each field that is tested."""

MOST_CASES = 20_000
MOST_TESTS = 2_000_000


class Undecided(Exception):
    """Raised where there are too many combinations to look at."""


def find_case(predicate: Predicate, whole: Iterable[str] = ()) -> Case | None:
    """Return a request that satisfies a predicate, or None if there can be none.

    The fields in `whole` hold whole numbers from 1 on. Raises `Undecided` beyond 20,000
    combinations or two million comparisons, and where a field is compared with constants of two
    kinds.
    """
    cases = _cases([predicate], whole)
    return next((case for case in cases if holds(predicate, case)), None)


def first_taken(
    predicates: Sequence[Predicate], whole: Iterable[str] = ()
) -> tuple[frozenset[int], Case | None]:
    """Return which of several predicates are the first that some request satisfies, and a request
    that satisfies none of them, if there can be one.

    Raises `Undecided` as `find_case` does.
    """
    reached: set[int] = set()
    left: Case | None = None
    for case in _cases(predicates, whole):
        first = next((i for i, where in enumerate(predicates) if holds(where, case)), None)
        if first is not None:
            reached.add(first)
        elif left is None:
            left = case
    return frozenset(reached), left


def _cases(predicates: Sequence[Predicate], whole: Iterable[str]) -> Iterator[Case]:
    """Return requests that stand for all that predicates tell apart."""
    constants: dict[str, set[Value]] = {}
    tests = 0
    for predicate in predicates:
        for test in tests_of(predicate):
            values = constants.setdefault(test.field, set())
            if values and type(next(iter(values))) is not type(test.value):  # True == 1 in Python
                raise Undecided
            values.add(test.value)
            tests += 1
    counted = frozenset(whole)
    choices = {
        name: _representatives(values, name in counted) for name, values in constants.items()
    }
    cases = prod(len(values) for values in choices.values())
    if cases > MOST_CASES or cases * tests > MOST_TESTS:
        raise Undecided
    return (dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values()))


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
    """Return whether a request satisfies a predicate."""
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
    match op:
        case "<=":
            return left <= right
        case "<":
            return left < right
        case ">=":
            return left >= right
        case _:
            return left > right


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


# --- slices ---------------------------------------------------------------------------------------


Inside = Callable[[str, str], bool]
"""inside(a, b): is every request of the slice a known to be one of the slice b."""

Division = Callable[[str, tuple[str, ...]], tuple[bool, bool]]
"""division(whole, parts): is every request of the whole known to be in one of the parts, which lie
inside it; and are the parts known to share none."""


def implies(inner: Predicate, outer: Predicate) -> bool | None:
    """Return whether every request that satisfies `inner` satisfies `outer`; None where it is open."""
    return is_empty(AllOf((inner, NoneOf(outer))))


def is_empty(predicate: Predicate) -> bool | None:
    """Return whether no request satisfies a predicate; None where it is open."""
    try:
        return find_case(predicate) is None
    except Undecided:
        return None


def _selects_within(program: Program, inner: Slice, outer: Slice) -> bool:
    same_data = (inner.data or program.data) == (outer.data or program.data)
    return same_data and implies(inner.where, outer.where) is True


def inclusion(
    program: Program, within: Callable[[Program, Slice, Slice], bool] = _selects_within
) -> Inside:
    """Return which slices of a program are known to lie inside which; answers are remembered.

    `within` says whether each request of one slice is known to be one of another.
    """
    declared = {item.name: item for item in program.slices}
    known: dict[tuple[str, str], bool] = {}

    def inside(inner: str, outer: str) -> bool:
        if inner == outer:
            return True
        if inner not in declared or outer not in declared:
            return False
        key = inner, outer
        if key not in known:
            known[key] = within(program, declared[inner], declared[outer])
        return known[key]

    return inside


def region_inside(inner: Region, outer: Region, inside: Inside) -> bool:
    """Return whether every input of one region is known to be one of the other."""
    if inner == outer:
        return True
    if not inside(inner.slice, outer.slice):
        return False
    if outer.kind is RegionKind.ROWS:  # a request may be longer than the longest sequence
        shorter = inner.longest is not None and inner.longest <= (outer.longest or 0)
        return inner.kind is outer.kind and shorter and inner.radius <= outer.radius
    if inner.kind is RegionKind.POINTS:
        return True
    return inner.kind is outer.kind and inner.radius <= outer.radius


def division(program: Program, empty: Callable[[Predicate], bool | None] = is_empty) -> Division:
    """Return how slices of a program are made up of others; answers are remembered.

    `empty` says whether a predicate is known to select nothing.
    """
    known: dict[tuple[str, ...], tuple[bool, bool]] = {}
    where = {item.name: item.where for item in program.slices}

    def divided(whole: str, parts: tuple[str, ...]) -> tuple[bool, bool]:
        key = (whole, *parts)
        if key not in known:
            rest = AllOf((where[whole], *(NoneOf(where[part]) for part in parts)))
            covered = empty(rest) is True
            apart = covered and all(
                empty(AllOf((where[a], where[b]))) is True for a, b in combinations(parts, 2)
            )
            known[key] = covered, apart
        return known[key]

    return divided
