"""Predicates of requests: satisfiability, and inclusion of slices.

A predicate compares fields with constants, so it has the same value for all numbers between two
neighbouring constants and for all texts that it does not name. A few representative values of each
field suffice, and enumerating their combinations decides satisfiability. A field has the type of
the constants it is compared with: requests where it is absent or of another type are refused before
any predicate is evaluated. Problems with too many combinations are undecided, which never counts as
yes.
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
"""A value for each tested field."""

MOST_CASES = 20_000
MOST_TESTS = 2_000_000


class Undecided(Exception):
    """Raised where there are too many combinations."""


def find_case(predicate: Predicate, whole: Iterable[str] = ()) -> Case | None:
    """Return a request that satisfies a predicate, or None if it is unsatisfiable.

    The fields in `whole` are positive integers. Raises `Undecided` beyond 20,000 combinations or
    two million comparisons, and where a field is compared with constants of two types.
    """
    cases = _cases([predicate], whole)
    return next((case for case in cases if holds(predicate, case)), None)


def first_taken(
    predicates: Sequence[Predicate], whole: Iterable[str] = ()
) -> tuple[frozenset[int], Case | None]:
    """Return the indices of the predicates that are the first satisfied one for some request, and a
    request that satisfies none of them, if possible.

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
    """Yield representative requests of all combinations that predicates distinguish."""
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
"""inside(a, b): whether every request of the slice a is known to be in the slice b."""

Division = Callable[[str, tuple[str, ...]], tuple[bool, bool]]
"""division(whole, parts): whether the whole is known to be the union of the parts, which lie inside
it; and whether the parts are known to be disjoint."""


def implies(inner: Predicate, outer: Predicate) -> bool | None:
    """Return whether every request that satisfies `inner` satisfies `outer`; None if undecided."""
    return is_empty(AllOf((inner, NoneOf(outer))))


def is_empty(predicate: Predicate) -> bool | None:
    """Return whether no request satisfies a predicate; None if undecided."""
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
    """Return the inclusion relation of the slices of a program, with cached results.

    `within` returns whether each request of one slice is known to be in another.
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
    """Return whether every input of one region is known to be in the other."""
    if inner == outer:
        return True
    if not inside(inner.slice, outer.slice):
        return False
    if outer.kind is RegionKind.ROWS:  # requests may exceed the length limit of `rows`
        shorter = inner.longest is not None and inner.longest <= (outer.longest or 0)
        return inner.kind is outer.kind and shorter and inner.radius <= outer.radius
    if inner.kind is RegionKind.POINTS:
        return True
    return inner.kind is outer.kind and inner.radius <= outer.radius


def division(program: Program, empty: Callable[[Predicate], bool | None] = is_empty) -> Division:
    """Return the function that recognises unions of slices of a program, with cached results.

    `empty` returns whether a predicate is known to be unsatisfiable.
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
