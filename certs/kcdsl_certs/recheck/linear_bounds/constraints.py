"""Linear constraints on inputs and outputs of ReLU networks: refute them by bounds, evaluate them.

Rule 9.5 of docs/proofs/difference-planes.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.box import Floats

Layer = tuple[NDArray[np.floating], NDArray[np.floating]]
"""Weight [out, in] and bias [out], of at most float64."""
Halfspace = tuple[Sequence[float], Sequence[float], Sequence[float], Fraction]
"""p, a, b, c of the constraint p·x + a·f(x) + b·g(x) <= c; b is empty for one network."""

LARGEST = 2.0**100
"""Larger numbers are refused: they have no bound."""
_MOST_LIMIT = 2**1000
_MOST_LEVELS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Query:
    """A box and constraints as arrays, rounded outward.

    `first`, `second`, `direct` are coefficients [rows, n] of all constraints. A constraint cannot
    hold where an upper bound of its negated left side is below its entry of `limits`.
    """

    low: Floats
    high: Floats
    first: Floats
    second: Floats
    direct: Floats
    limits: Floats
    places: tuple[tuple[int, ...], ...]
    """The rows of each conjunction."""

    @staticmethod
    def of(
        inputs: int,
        outputs: tuple[int, int],
        low: Sequence[Fraction],
        high: Sequence[Fraction],
        unsafe: Sequence[Sequence[Halfspace]],
    ) -> Query:
        """Read a disjunction of conjunctions; `outputs` are the sizes of a and b.

        Raises Rejected "document/splits".
        """
        facts = [one for group in unsafe for one in group]
        if (
            not facts
            or not all(unsafe)
            or any(tuple(map(len, one[:3])) != (inputs, *outputs) for one in facts)
            or not all(math.isfinite(v) for one in facts for part in one[:3] for v in part)
            or not all(abs(one[3]) <= _MOST_LIMIT for one in facts)
            or not (len(low) == len(high) == inputs)
        ):
            raise Rejected("document/splits", "the constraints or the box do not fit the networks")
        if not all(-LARGEST <= a <= b <= LARGEST for a, b in zip(low, high, strict=True)):
            # up to this size the underflow of a functional is below the allowance for it
            raise Rejected("document/splits", "the box is empty or too large")
        first, second, direct = (
            np.array([one[k] for one in facts], dtype=np.float64).reshape(len(facts), -1)
            for k in (1, 2, 0)
        )
        corners = np.array([_towards(v, -1) for v in low]), np.array([_towards(v, 1) for v in high])
        limits = np.array([_towards(-one[3], -1) for one in facts])
        places, start = [], 0
        for group in unsafe:
            places.append(tuple(range(start, start + len(group))))
            start += len(group)
        return Query(*corners, first, second, direct, limits, tuple(places))

    def cannot(self, most: Floats) -> NDArray[np.bool_]:
        """Return for each box whether no conjunction holds, from bounds `most` [B, rows]."""
        missed = most < self.limits
        found: NDArray[np.bool_] = np.ones(len(missed), dtype=np.bool_)
        for place in self.places:
            found &= missed[:, list(place)].any(1)
        return found


def _towards(value: Fraction, side: int) -> float:
    """Return the nearest double that is not below (side 1) or not above (side -1)."""
    near = value.numerator / value.denominator
    if (Fraction(near) - value) * side >= 0:
        return near
    return math.nextafter(near, side * math.inf)


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of the second network's hidden values: 0 to `most` times a power of two, `step`."""

    step: float
    most: int

    def __post_init__(self) -> None:
        if not (2.0**-40 <= self.step <= 2.0**40 and math.frexp(self.step)[0] == 0.5):
            raise Rejected("document/splits", f"a step of {self.step}")
        if not 1 <= self.most < _MOST_LEVELS:
            raise Rejected("document/splits", f"{self.most} levels")

    def level(self, value: Fraction) -> int:
        """Return the multiple to which a number is rounded, halves upward."""
        nearest = math.floor(value / Fraction(self.step) + Fraction(1, 2))
        return min(max(nearest, 0), self.most)


def replay(
    networks: Sequence[Sequence[Layer]],
    low: Sequence[Fraction],
    high: Sequence[Fraction],
    unsafe: Sequence[Sequence[Halfspace]],
    point: Sequence[Fraction],
    grid: Grid | None = None,
) -> bool:
    """Return whether an input of the box meets all constraints of a conjunction, exactly.

    With a grid the second network rounds its hidden values to it in place of ReLU.
    """
    if len(point) != len(low) or not all(
        a <= x <= b for a, x, b in zip(low, point, high, strict=True)
    ):
        return False
    grids = (None, grid)
    outputs = [_exactly(*both, point) for both in zip(networks, grids, strict=False)] + [[]]
    for group in unsafe:
        sums = [
            sum(Fraction(c) * x for c, x in zip(p, point, strict=True))
            + sum(Fraction(c) * y for c, y in zip(a, outputs[0], strict=True))
            + sum(Fraction(c) * y for c, y in zip(b, outputs[1], strict=True))
            <= limit
            for p, a, b, limit in group
        ]
        if sums and all(sums):
            return True
    return False


def _exactly(
    network: Sequence[Layer], grid: Grid | None, point: Sequence[Fraction]
) -> list[Fraction]:
    """Return the outputs of a network, evaluated in integers over a common denominator."""
    common = math.lcm(*(x.denominator for x in point))
    values = [x.numerator * (common // x.denominator) for x in point]
    for number, (weight, bias) in enumerate(network):
        parts = [float(v).as_integer_ratio() for v in [*np.ravel(weight), *np.ravel(bias)]]
        scale = max(below for _, below in parts)
        whole = [top * (scale // below) for top, below in parts]
        rows, columns = np.shape(weight)
        values = [
            sum(w * v for w, v in zip(whole[r * columns : (r + 1) * columns], values, strict=True))
            + whole[rows * columns + r] * common
            for r in range(rows)
        ]
        common *= scale
        if number + 1 == len(network):
            break
        if grid is None:
            values = [max(v, 0) for v in values]
        else:
            step, below = Fraction(grid.step).as_integer_ratio()
            values = [grid.level(Fraction(v, common)) * step for v in values]
            common = below
    return [Fraction(v, common) for v in values]
