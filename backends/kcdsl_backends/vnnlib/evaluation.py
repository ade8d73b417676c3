"""The values of a program at one point: exact, or enclosed by intervals if that is too costly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from kcdsl_backends.vnnlib.bounds import Boxes, down, enclosed, nearest, rounded, sum_ends, up
from kcdsl_backends.vnnlib.program import Affine, Array, NetworkProgram, ProgramBlock, fractions_of

_EXACT = frozenset({
    *("linear", "relu", "difference", "factor", "mul", "power", "reciprocal", "floor", "ceil"),
    *("truncate", "positive", "zero", "select"),
})  # fmt: skip
_MOST = 200_000
"""Largest number of coefficients for evaluation in rational numbers: about a second."""

Sign = Literal["<=", "<", "==", "!="]


@dataclass(slots=True)
class Point:
    """An input point, and the values of sums of blocks there."""

    program: NetworkProgram
    x: tuple[Fraction, ...]
    boxes: Boxes
    _exact: list[list[Fraction]] | None = None

    @staticmethod
    def at(program: NetworkProgram, x: Sequence[Fraction]) -> Point:
        """Enclose every block at a point."""
        lo, hi = (np.asarray([[rounded(v, end) for v in x]]) for end in (down, up))
        return Point(program, tuple(x), enclosed(program, lo, hi, linear=False))

    def satisfies(self, sums: Affine, relations: Sequence[Sign]) -> bool:
        """Return whether all sums are proved to be in their relation to 0."""
        ends = sum_ends(self.boxes, sums)
        unsure: list[int] = []
        for i, relation in enumerate(relations):
            lo, hi = float(ends.lo[0, i]), float(ends.hi[0, i])
            if not _holds(lo, hi, relation):
                if _fails(lo, hi, relation):
                    return False
                unsure.append(i)
        if not unsure:
            return True
        values = self.exactly(sums.rows(np.asarray(unsure)))
        return values is not None and all(
            _holds(v, v, relations[i]) for v, i in zip(values, unsure, strict=True)
        )

    def exactly(self, sums: Affine) -> list[Fraction] | None:
        """Return exact sums; None if some function has no rational values or the cost is too
        high."""
        if self._exact is None:
            held = _rationals(self.program, self.x)
            if held is None:
                return None
            self._exact = held
        return fractions_of(sums, self._exact)

    def near(self, sums: Affine) -> Array:
        """Return sums in float64: exact values rounded, or midpoints of the enclosures."""
        values = self.exactly(sums)
        if values is not None:
            return np.asarray([nearest(v) for v in values])
        ends = sum_ends(self.boxes, sums)
        middle: Array = ends.lo[0] / 2 + ends.hi[0] / 2
        return middle


def _holds(lo: float | Fraction, hi: float | Fraction, relation: Sign) -> bool:
    match relation:
        case "<=":
            return hi <= 0
        case "<":
            return hi < 0
        case "==":
            return lo == 0 == hi
        case "!=":
            return lo > 0 or hi < 0


def _fails(lo: float, hi: float, relation: Sign) -> bool:
    match relation:
        case "<=":
            return lo > 0
        case "<":
            return lo >= 0
        case "==":
            return lo > 0 or hi < 0
        case "!=":
            return lo == 0 == hi


def _rationals(program: NetworkProgram, x: Sequence[Fraction]) -> list[list[Fraction]] | None:
    cost = sum(a.entries for block in program.blocks for a in block.operands)
    if cost > _MOST or any(b.kind not in _EXACT for b in program.blocks[1:]):
        return None
    values = [list(x)]
    for block in program.blocks[1:]:
        operands = [fractions_of(a, values) for a in block.operands]
        found = _exact(block, operands)
        if found is None:
            return None
        values.append(found)
    return values


def _exact(block: ProgramBlock, operands: Sequence[list[Fraction]]) -> list[Fraction] | None:
    x = operands[0]
    match block.kind:
        case "linear":
            return x
        case "relu":
            return [max(v, Fraction(0)) for v in x]
        case "difference":
            pairs = zip(x, operands[1], strict=True)
            return [max(v + d, Fraction(0)) - max(v, Fraction(0)) for v, d in pairs]
        case "factor":
            factors = [f if isinstance(f, Fraction) else f.exact for f in block.value]
            if None in factors:
                return None
            return [v * f for v, f in zip(x, factors, strict=True)]
        case "mul":
            return [v * w for v, w in zip(x, operands[1], strict=True)]
        case "power":
            return [v ** int(block.value) for v in x]
        case "reciprocal":
            return None if 0 in x else [1 / v for v in x]
        case "floor":
            return [Fraction(v.__floor__()) for v in x]
        case "ceil":
            return [Fraction(v.__ceil__()) for v in x]
        case "truncate":
            return [Fraction(v.__trunc__()) for v in x]
        case "positive":
            return [Fraction(v > 0) for v in x]
        case "zero":
            return [Fraction(v == 0) for v in x]
        case "select":
            return [a if c > 0 else b for c, a, b in zip(*operands, strict=True)]
    return None
