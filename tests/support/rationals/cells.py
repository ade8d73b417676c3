"""Exact boxes of rational numbers, with the standard library alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.numerics.formats import Format

MOST_TERMS = 4_000_000
Shape = tuple[int, ...]
Pair = tuple[Fraction, Fraction]
ZERO = Fraction(0)


@dataclass(frozen=True, slots=True)
class Cells:
    """An array of boxes in row-major order, each a pair (lower, upper)."""

    shape: Shape
    pairs: tuple[Pair, ...]

    def each(self, change: Callable[[Pair], Pair]) -> Cells:
        """Return the array with every box mapped."""
        return Cells(self.shape, tuple(change(pair) for pair in self.pairs))

    def taken(self, shape: Shape, order: Sequence[int]) -> Cells:
        """Return the boxes at flat positions, in another shape."""
        return Cells(shape, tuple(self.pairs[i] for i in order))

    @property
    def mags(self) -> list[Fraction]:
        """Return the largest absolute value of every box."""
        return [max(abs(lo), abs(hi)) for lo, hi in self.pairs]


def points(shape: Shape, values: Sequence[Fraction]) -> Cells:
    """Return the array of exact numbers."""
    return Cells(shape, tuple((v, v) for v in values))


def both(a: Cells, b: Cells, combine: Callable[[Pair, Pair], Pair]) -> Cells:
    """Return the elementwise combination after broadcasting."""
    if a.shape == b.shape:
        return Cells(a.shape, tuple(map(combine, a.pairs, b.pairs)))
    shape = broadcast(a.shape, b.shape)
    left, right = spread(a.shape, shape), spread(b.shape, shape)
    pairs = zip(left, right, strict=True)
    return Cells(shape, tuple(combine(a.pairs[i], b.pairs[j]) for i, j in pairs))


def add(a: Pair, b: Pair) -> Pair:
    """Return a + b."""
    return a[0] + b[0], a[1] + b[1]


def sub(a: Pair, b: Pair) -> Pair:
    """Return a - b."""
    return a[0] - b[1], a[1] - b[0]


def mul(a: Pair, b: Pair) -> Pair:
    """Return a * b."""
    found = [x * y for x in a for y in b]
    return min(found), max(found)


def meet(a: Pair, b: Pair) -> Pair:
    """Return the intersection.

    Raises:
        Rejected: "bound/empty".
    """
    lo, hi = max(a[0], b[0]), min(a[1], b[1])
    if lo > hi:
        raise Rejected("bound/empty", "the enclosures contradict each other")
    return lo, hi


def widened(a: Cells, radius: Sequence[Fraction]) -> Cells:
    """Return a ± radius."""
    pairs = zip(a.pairs, radius, strict=True)
    return Cells(a.shape, tuple((lo - r, hi + r) for (lo, hi), r in pairs))


def matmul(a: Cells, b: Cells) -> Cells:
    """Return a @ b by midpoint and radius."""
    rows, columns, pick_a, pick_b = _product(a.shape, b.shape)
    am = [((lo + hi) / 2, (hi - lo) / 2) for lo, hi in a.pairs]
    bm = [((lo + hi) / 2, (hi - lo) / 2) for lo, hi in b.pairs]
    found = []
    for i, j in zip(pick_a, pick_b, strict=True):
        middle = radius = ZERO
        for k, m in zip(i, j, strict=True):
            (x, r), (y, s) = am[k], bm[m]
            middle += x * y
            radius += abs(x) * s + r * abs(y) + r * s
        found.append((middle - radius, middle + radius))
    return Cells((*rows, columns), tuple(found))


def product(a: Shape, x: Sequence[Fraction], b: Shape, y: Sequence[Fraction]) -> list[Fraction]:
    """Return the flat matrix product of exact numbers."""
    _rows, _columns, pick_a, pick_b = _product(a, b)
    return [
        sum((x[k] * y[m] for k, m in zip(i, j, strict=True)), ZERO)
        for i, j in zip(pick_a, pick_b, strict=True)
    ]


def _product(a: Shape, b: Shape) -> tuple[Shape, int, list[range], list[range]]:
    """Return leading shape, columns, and the flat positions of the factors of each element."""
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        raise Rejected("graph/shape", f"no matrix product of {list(a)} and {list(b)}")
    lead = broadcast(a[:-2], b[:-2])
    t, n, d = a[-2], a[-1], b[-1]
    if math.prod(lead) * t * n * d > MOST_TERMS:
        raise Rejected("exact/size", "the block is too large for exact arithmetic")
    left, right = [], []
    for i, j in zip(spread(a[:-2], lead), spread(b[:-2], lead), strict=True):
        for row, column in itertools.product(range(t), range(d)):
            start = (i * t + row) * n
            left.append(range(start, start + n))
            right.append(range(j * n * d + column, j * n * d + column + n * d, d))
    return (*lead, t), d, left, right


def broadcast(a: Shape, b: Shape) -> Shape:
    """Return the common shape.

    Raises:
        Rejected: "graph/shape".
    """
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(left, right, strict=True)):
        raise Rejected("graph/shape", f"{list(a)} and {list(b)} do not fit")
    return tuple(max(m, n) for m, n in zip(left, right, strict=True))


def spread(shape: Shape, to: Shape) -> list[int]:
    """Return for each element of the wider shape the flat position of its source."""
    if broadcast(shape, to) != to:
        raise Rejected("graph/shape", f"{list(shape)} does not expand to {list(to)}")
    full = (1,) * (len(to) - len(shape)) + shape
    strides = [math.prod(full[k + 1 :]) if full[k] > 1 else 0 for k in range(len(full))]
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*(range(n) for n in to))
    ]


def nearest(value: Fraction, form: Format) -> Fraction:
    """Return the nearest number of a format, ties to even.

    Raises:
        Rejected: "bound/overflow" beyond its largest number.
    """
    found = rounded(value, form)
    if abs(found) > Fraction(form.largest):
        raise Rejected("bound/overflow", f"a number overflows {form.name}")
    return found


def rounded(value: Fraction, form: Format) -> Fraction:
    """Return the nearest number with this precision and no upper limit, ties to even."""
    if value == 0:
        return ZERO
    spacing = Fraction(2) ** (max(exponent(abs(value)), form.least) - form.precision + 1)
    return round(value / spacing) * spacing  # Fraction rounds halves to even


def cut(value: Fraction, form: Format) -> Fraction:
    """Return the neighbour of a value in a format toward zero.

    Raises: Rejected: "bound/overflow" where the format has no next number beyond its largest.
    """
    if value == 0:
        return ZERO
    spacing = Fraction(2) ** (max(exponent(abs(value)), form.least) - form.precision + 1)
    found = math.trunc(value / spacing) * spacing
    if abs(found) > Fraction(form.largest):
        raise Rejected("bound/overflow", f"a number overflows {form.name}")
    return found


def exponent(value: Fraction) -> int:
    """Return floor(log2 value) of a positive number."""
    found = value.numerator.bit_length() - value.denominator.bit_length()
    return found if Fraction(2) ** found <= value else found - 1


def ceiling(value: Fraction) -> float:
    """Return the smallest double that is at least `value`."""
    found = float(value)
    return found if Fraction(found) >= value else math.nextafter(found, math.inf)


def root(value: Fraction) -> Fraction:
    """Return an upper bound of the square root, off by at most 2^-200."""
    if value == 0:
        return ZERO
    return Fraction(math.isqrt(math.ceil(value * 2**400)) + 1, 2**200)
