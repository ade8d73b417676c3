"""Which slices can have requests, and which lie inside others.

Answers come from looking at every case (`kcdsl.ir.cases`), so they need no solver; what has too
many cases is left open, and an open question is never answered with yes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from kcdsl.ir.cases import Undecided, find_case
from kcdsl.ir.terms import AllOf, NoneOf, Predicate, Program

Inside = Callable[[str, str], bool]
"""inside(a, b): is every request of the slice a known to be one of the slice b."""

Division = Callable[[str, tuple[str, ...]], tuple[bool, bool]]
"""division(whole, parts): is every request of the whole known to be in one of the parts, which lie
inside it; and are the parts known to share none."""


def implies(inner: Predicate, outer: Predicate) -> bool | None:
    """Say whether every request that satisfies `inner` satisfies `outer`; None where it is open."""
    return is_empty(AllOf((inner, NoneOf(outer))))


def is_empty(predicate: Predicate) -> bool | None:
    """Say whether no request satisfies a predicate; None where it is open."""
    try:
        return find_case(predicate) is None
    except Undecided:
        return None


def inclusion(program: Program) -> Inside:
    """Return which slices of a program are known to lie inside which; answers are remembered."""
    declared = {item.name: item for item in program.slices}
    known: dict[tuple[str, str], bool] = {}

    def inside(inner: str, outer: str) -> bool:
        if inner == outer:
            return True
        if inner not in declared or outer not in declared:
            return False
        key = inner, outer
        if key not in known:
            a, b = declared[inner], declared[outer]
            same_data = (a.data or program.data) == (b.data or program.data)
            known[key] = same_data and implies(a.where, b.where) is True
        return known[key]

    return inside


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
