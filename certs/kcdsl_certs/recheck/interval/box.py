"""Interval arithmetic on float64 arrays, every end rounded outward.

An end is exact if the arithmetic was (sums), else moved outward by at least the rounding error of
its computation. Intermediate ends may be infinite or NaN; `checked` refuses them at each node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ULP = 2.0**-52
FAINT = 2.0**-500  # non-negative error terms below this are lifted to it, so products stay normal
FLUSH = 2.0**-1000  # a generous bound of the underflow error of one product or sum
_INF = np.inf


@dataclass(frozen=True, slots=True)
class Box:
    """Lower and upper ends, of one shape. A point has the same array as both ends."""

    lo: Floats
    hi: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the boxed array."""
        return self.lo.shape

    @property
    def point(self) -> bool:
        """Return whether the box is known to be a single array."""
        return self.lo is self.hi

    def map(self, move: Callable[[Floats], Floats]) -> Box:
        """Return the box after the same selection or reordering of elements at both ends."""
        lo = move(self.lo)
        return Box(lo, lo if self.point else move(self.hi))


def exact(values: Floats) -> Box:
    """Return the box that holds these numbers alone."""
    return Box(values, values)


def zeros(shape: tuple[int, ...]) -> Box:
    """Return the box {0}."""
    return exact(np.zeros(shape))


def around(radius: Floats) -> Box:
    """Return ±radius."""
    return Box(-radius, radius)


def checked(box: Box, what: str) -> Box:
    """Return the box; refuse it if an end is not finite or the ends are crossed.

    Raises Rejected "bound/not-finite" or "bound/empty".
    """
    if not (np.isfinite(box.lo).all() and (box.point or np.isfinite(box.hi).all())):
        raise Rejected("bound/not-finite", f"{what} has no finite bound")
    if not (box.point or (box.lo <= box.hi).all()):
        raise Rejected("bound/empty", f"{what} is empty: the enclosures contradict each other")
    return box


def down(values: Floats) -> Floats:
    """Return the next doubles below."""
    return np.nextafter(values, -_INF)


def above(values: Floats) -> Floats:
    """Return the next doubles above."""
    return np.nextafter(values, _INF)


def up(values: Floats, operations: int = 8) -> Floats:
    """Return an upper bound of non-negative values computed in a few operations; 0 stays 0.

    The operations must not lose bits near zero: see `lifted`.
    """
    return np.where(values == 0, values, above(values * (1 + operations * ULP)))


def lifted(values: Floats) -> Floats:
    """Return non-negative values with all but zeros at least 2^-500."""
    return np.where(values == 0, values, np.maximum(values, FAINT))


def _sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return fl(a + b) and the sign-exact rest (a + b) - fl(a + b)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def add_down(a: Floats, b: Floats) -> Floats:
    """Return a + b rounded down; exact where the sum is a double."""
    total, rest = _sum(a, b)
    return np.where(rest < 0, down(total), total)


def add_up(a: Floats, b: Floats) -> Floats:
    """Return a + b rounded up; exact where the sum is a double."""
    total, rest = _sum(a, b)
    return np.where(rest > 0, above(total), total)


def add(a: Box, b: Box) -> Box:
    """Return a + b."""
    return Box(add_down(a.lo, b.lo), add_up(a.hi, b.hi))


def sub(a: Box, b: Box) -> Box:
    """Return a - b; of two points, a point if every difference is a double."""
    if a.point and b.point:
        total, rest = _sum(a.lo, -b.lo)
        if not rest.any():
            return exact(total)
    return Box(add_down(a.lo, -b.hi), add_up(a.hi, -b.lo))


def neg(a: Box) -> Box:
    """Return -a."""
    return exact(-a.lo) if a.point else Box(-a.hi, -a.lo)


def widen(a: Box, radius: Floats) -> Box:
    """Return a ± radius."""
    if radius.shape == a.shape and not radius.any():
        return a
    return Box(add_down(a.lo, -radius), add_up(a.hi, radius))


def mul(a: Box, b: Box) -> Box:
    """Return the elementwise product."""
    products = [x * y for x in _ends(a) for y in _ends(b)]
    lo, hi = products[0], products[0]
    for product in products[1:]:
        lo, hi = np.minimum(lo, product), np.maximum(hi, product)
    null = _null(a) | _null(b)
    return Box(np.where(null, 0.0, down(lo)), np.where(null, 0.0, above(hi)))


def half(a: Box) -> Box:
    """Return a / 2; exact but for the smallest subnormal numbers."""
    lo, hi = a.lo / 2, a.hi / 2
    return Box(np.where(2 * lo == a.lo, lo, down(lo)), np.where(2 * hi == a.hi, hi, above(hi)))


def meet(a: Box, b: Box) -> Box:
    """Return the intersection, whose ends may be crossed."""
    return Box(np.maximum(a.lo, b.lo), np.minimum(a.hi, b.hi))


def join(a: Box, b: Box) -> Box:
    """Return the hull of the union."""
    return Box(np.minimum(a.lo, b.lo), np.maximum(a.hi, b.hi))


def magnitude(a: Box) -> Floats:
    """Return the largest absolute value in each box."""
    return np.maximum(np.abs(a.lo), np.abs(a.hi))


def mag(a: Box) -> Floats:
    """Return the magnitude for use in error terms: zero or at least 2^-500."""
    return lifted(magnitude(a))


def matmul(a: Box, b: Box) -> Box:
    """Return a @ b by midpoint and radius, with the a-priori error of float64 sums."""
    n = a.shape[-1]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if not (a.lo.any() or a.hi.any()) or not (b.lo.any() or b.hi.any()):
        return zeros(shape)
    (am, ar), (bm, br) = midpoint(a), midpoint(b)
    middle = am @ bm
    terms = np.abs(am) @ np.abs(bm)
    spread = np.zeros(())
    if ar is not None:
        spread = spread + ar @ (np.abs(bm) if br is None else np.abs(bm) + br)
    if br is not None:
        spread = spread + np.abs(am) @ br
    radius = spread * (1 + (n + 16) * ULP) + terms * ((n + 8) * ULP) + (4 * n + 4) * FLUSH
    return widen(exact(middle), radius)


def midpoint(a: Box) -> tuple[Floats, Floats | None]:
    """Return midpoints and radii that cover the box; no radii for a point."""
    if a.point:
        return a.lo, None
    middle = a.lo / 2 + a.hi / 2
    return middle, np.maximum(add_up(a.hi, -middle), add_up(middle, -a.lo))


def product_up(a: Floats, b: Floats) -> Floats:
    """Return an upper bound of a @ b for non-negative lifted operands."""
    return up(a @ b, a.shape[-1] + 8)


def _ends(a: Box) -> tuple[Floats, ...]:
    return (a.lo,) if a.point else (a.lo, a.hi)


def _null(a: Box) -> Bools:
    return np.asarray((a.lo == 0) & (a.hi == 0))


UNIT = 2.0**-53


def raised(values: Floats) -> Floats:
    """Return an upper bound of a short sum of products of non-negative numbers."""
    return np.asarray(values * (1 + 2.0**-40))


TINY = 2.0**-900  # bounds the float64 underflow error of an operation


def others(terms: Floats) -> Floats:
    """Return for each element the sum of all others of its row, without a subtraction."""
    none = np.zeros((*terms.shape[:-1], 1))
    before = np.concatenate([none, np.cumsum(terms, axis=-1)[..., :-1]], axis=-1)
    after = np.cumsum(terms[..., ::-1], axis=-1)[..., ::-1][..., 1:]
    return np.asarray(before + np.concatenate([after, none], axis=-1))
