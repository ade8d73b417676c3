"""Exact norms of finite matrices, and the order of their entries."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from tests.support.semantics.interpretations import Matrix, Pair


class Undefined(ValueError):
    """Raised where a statement has no truth value, with the reason."""


@dataclass(frozen=True, slots=True)
class Root:
    """The irrational square root of a fraction."""

    square: Fraction


Length = Fraction | Root


def difference(pair: Pair) -> tuple[tuple[Fraction, ...], ...]:
    """Return inference minus training, entry by entry; undefined where the shapes differ."""
    train, infer = finite(pair.train), finite(pair.infer)
    if [len(row) for row in train] != [len(row) for row in infer]:
        raise Undefined("the two runs have different shapes")
    return tuple(
        tuple(b - a for a, b in zip(old, new, strict=True))
        for old, new in zip(train, infer, strict=True)
    )


def finite(matrix: Matrix) -> tuple[tuple[Fraction, ...], ...]:
    """Return a matrix of numbers; undefined where it is empty or holds anything else."""
    rows = tuple(tuple(x for x in row if x is not None) for row in matrix)
    if not rows or not all(rows) or sum(map(len, rows)) != sum(map(len, matrix)):
        raise Undefined("a run has no values, or one that is not a finite number")
    return rows


def norm(kind: str, drift: tuple[tuple[Fraction, ...], ...]) -> Length:
    """Return the norm of the worst row: "inf", "2" or "span"."""
    match kind:
        case "inf":
            return max(abs(x) for row in drift for x in row)
        case "span":
            return max(max(row) - min(row) for row in drift)
        case "2":
            return root(max(sum((x * x for x in row), Fraction(0)) for row in drift))
        case _:
            raise ValueError(f"unknown norm {kind!r}")


def root(square: Fraction) -> Length:
    """Return the square root, as a fraction where it is one."""
    top, bottom = isqrt(square.numerator), isqrt(square.denominator)
    if top * top == square.numerator and bottom * bottom == square.denominator:
        return Fraction(top, bottom)
    return Root(square)


def less(left: Length, right: Length) -> bool:
    """Return whether left < right."""
    match left, right:
        case Root(a), Root(b):
            return a < b
        case Root(a), Fraction():
            return right > 0 and a < right * right
        case Fraction(), Root(b):
            return left < 0 or left * left < b
        case Fraction(), Fraction():
            return left < right
    raise TypeError(f"{left!r} and {right!r}")


def keeps_first(pair: Pair, k: int) -> bool:
    """Return whether both runs have the same k largest entries in every row.

    A tie at the border counts as a change. Undefined for k beyond the row.
    """
    difference(pair)
    for old, new in zip(finite(pair.train), finite(pair.infer), strict=True):
        if not 1 <= k <= len(old):
            raise Undefined(f"a row of {len(old)} has no first {k}")
        if k == len(old):
            continue
        first = set(sorted(range(len(old)), key=lambda i: old[i], reverse=True)[:k])
        for row in (old, new):
            rest = [x for i, x in enumerate(row) if i not in first]
            if min(row[i] for i in first) <= max(rest):
                return False
    return True
