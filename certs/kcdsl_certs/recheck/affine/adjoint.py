"""Batches of adjoints, each batch on one window of a node: everything outside is zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.graphs.graph import View
from kcdsl_certs.recheck.interval.box import Bools, Floats


@dataclass(frozen=True, slots=True)
class Adjoint:
    """Functionals of one node: `values` is [B, *extent], its window begins at `start`."""

    values: Floats
    start: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Return the number of functionals."""
        return len(self.values)

    @property
    def extent(self) -> tuple[int, ...]:
        """Return the size of the window."""
        return self.values.shape[1:]

    @property
    def window(self) -> tuple[slice, ...]:
        """Return the slices of the window."""
        return tuple(slice(s, s + e) for s, e in zip(self.start, self.extent, strict=True))

    def times(self, factor: Floats | Bools) -> Adjoint:
        """Return the elementwise product with an array of the node's shape."""
        return Adjoint(self.values * factor[self.window], self.start)

    def without(self, some: Bools) -> Adjoint:
        """Return the same with zeros for some of the functionals [B]."""
        if not some.any():
            return self
        kept = ~some.reshape(-1, *(1 for _ in self.extent))
        return Adjoint(self.values * kept, self.start)

    def sizes(self, weights: Floats) -> Floats:
        """Return Σ |α|·weights of every functional, weights an array of the node's shape."""
        flat = np.abs(self.values).reshape(self.batch, -1)
        return np.asarray(flat @ weights[self.window].reshape(-1))

    def sums(self, weights: Floats) -> Floats:
        """Return Σ α·weights of every functional."""
        return np.asarray(self.values.reshape(self.batch, -1) @ weights[self.window].reshape(-1))


def units(shape: tuple[int, ...], row: tuple[int, ...], first: int, count: int) -> Adjoint:
    """Return the unit functionals of `count` elements of one row, from `first` on."""
    ones = (1,) * (len(shape) - 1)
    return Adjoint(np.eye(count).reshape(count, *ones, count), (*row, first))


def same(one: Floats, two: Floats) -> bool:
    """Return whether two arrays of functionals are equal; the first ones are compared first."""
    if one is two:
        return True
    return bool(np.array_equal(one[:1], two[:1]) and np.array_equal(one, two))


def reads_one_each(values: Floats) -> bool:
    """Return whether functionals [n, n] read one element each, and no two the same."""
    if values.shape[0] != values.shape[1]:
        return False
    return bool(np.count_nonzero(values) == np.count_nonzero(np.diagonal(values)))


_SAME = 2.0**-40  # tolerance of parallel columns, scaled to a largest element of 1


def gathered(columns: Floats) -> tuple[Floats, Floats]:
    """Merge parallel columns of [B, n], none of which is zero, to one of the sum of their sizes;
    return the columns and a bound [B] of the error."""
    nothing, n = np.zeros(len(columns)), columns.shape[1]
    peaks = np.take_along_axis(columns, np.abs(columns).argmax(axis=0)[None], axis=0)[0]
    marks = np.cos(np.arange(len(columns), dtype=np.float64)) @ columns / peaks
    order = np.argsort(marks)
    begins = np.diff(marks[order], prepend=-np.inf) > 2.0**-36 * (1 + np.abs(marks[order]))
    if 2 * np.count_nonzero(begins) > n:
        return columns, nothing
    sizes, group = np.abs(peaks[order]), np.cumsum(begins) - 1
    each = columns[:, order] / peaks[order]
    first = each[:, begins]
    away = np.abs(each - first[:, group])
    same = away.max(axis=0) <= _SAME
    known = np.where(same, sizes, 0.0)
    lost = np.where(same, away + 2.0**-50 * np.abs(each), 0.0) @ known
    whole = np.bincount(group, weights=known, minlength=first.shape[1])
    found = np.concatenate([first * (whole * (1 + 2.0**-40)), columns[:, order[~same]]], axis=1)
    return found, lost * (1 + 2.0**-40)


def embedded(adjoint: Adjoint, start: tuple[int, ...], extent: tuple[int, ...]) -> Adjoint:
    """Return the same functionals on a larger window."""
    if (start, extent) == (adjoint.start, adjoint.extent):
        return adjoint
    values = np.zeros((adjoint.batch, *extent))
    inner = zip(adjoint.start, start, adjoint.extent, strict=True)
    values[(slice(None), *(slice(a - s, a - s + e) for a, s, e in inner))] = adjoint.values
    return Adjoint(values, start)


def merged(a: Adjoint, b: Adjoint) -> Adjoint:
    """Return the sum, on the hull of both windows."""
    start = tuple(map(min, a.start, b.start))
    ends = [
        max(s + e, t + f) for s, e, t, f in zip(a.start, a.extent, b.start, b.extent, strict=True)
    ]
    extent = tuple(e - s for e, s in zip(ends, start, strict=True))
    one, two = embedded(a, start, extent), embedded(b, start, extent)
    return Adjoint(one.values + two.values, start)


def shortened(adjoint: Adjoint, axis: int) -> Adjoint:
    """Return the same functionals on a window without its zero ends along an axis."""
    others = tuple(k for k in range(adjoint.values.ndim) if k != axis + 1)
    used = np.flatnonzero(adjoint.values.any(axis=others))
    if not used.size:
        return adjoint
    first, last = int(used[0]), int(used[-1]) + 1
    values = adjoint.values[(slice(None),) * (axis + 1) + (slice(first, last),)]
    start = list(adjoint.start)
    start[axis] += first
    return Adjoint(values, tuple(start))


def permuted(adjoint: Adjoint, dims: list[int]) -> Adjoint:
    """Return the adjoint of the operand of a permutation."""
    back = [dims.index(axis) for axis in range(len(dims))]
    values = adjoint.values.transpose(0, *(1 + axis for axis in back))
    return Adjoint(np.ascontiguousarray(values), tuple(adjoint.start[axis] for axis in back))


def summed(adjoint: Adjoint, shape: tuple[int, ...]) -> Adjoint:
    """Return the adjoint of an operand of this shape that was broadcast."""
    extra = len(adjoint.start) - len(shape)
    values = adjoint.values
    if extra:
        values = values.sum(axis=tuple(range(1, 1 + extra)))
    start = list(adjoint.start[extra:])
    for axis, size in enumerate(shape):
        if size == 1:
            values, start[axis] = values.sum(axis=1 + axis, keepdims=True), 0
    return Adjoint(values, tuple(start))


def spread(adjoint: Adjoint, axis: int, start: int, step: int) -> Adjoint:
    """Return the adjoint of the operand of start:…:step along an axis."""
    begin = start + adjoint.start[axis] * step
    values = adjoint.values
    if step > 1:
        extent = list(values.shape)
        extent[1 + axis] = (extent[1 + axis] - 1) * step + 1
        values = np.zeros(extent)
        index = (slice(None),) * (1 + axis) + (slice(None, None, step),)
        values[index] = adjoint.values
    return Adjoint(values, (*adjoint.start[:axis], begin, *adjoint.start[axis + 1 :]))


def viewed(adjoint: Adjoint, view: View) -> Adjoint:
    """Return the adjoint of the operand of a view; those of copies are summed."""
    if view.sizes != view.shape:
        adjoint = reshaped(adjoint, view.shape, view.sizes)
    if view.sizes != view.turned:
        adjoint = summed(adjoint, view.turned)
    adjoint = permuted(adjoint, list(view.order))
    for axis, (start, _, step) in enumerate(view.ranges):
        if (start, step) != (0, 1):
            adjoint = spread(adjoint, axis, start, step)
    if view.split != view.before:
        adjoint = reshaped(adjoint, view.split, view.before)
    return adjoint


def part(adjoint: Adjoint, axis: int, offset: int, size: int) -> Adjoint | None:
    """Return the adjoint of one operand of a concatenation; None where the window misses it."""
    first = max(adjoint.start[axis], offset)
    last = min(adjoint.start[axis] + adjoint.extent[axis], offset + size)
    if first >= last:
        return None
    shift = adjoint.start[axis]
    index = (slice(None),) * (1 + axis) + (slice(first - shift, last - shift),)
    start = (*adjoint.start[:axis], first - offset, *adjoint.start[axis + 1 :])
    return Adjoint(np.ascontiguousarray(adjoint.values[index]), start)


def reshaped(adjoint: Adjoint, shape: tuple[int, ...], before: tuple[int, ...]) -> Adjoint:
    """Return the adjoint of an operand of shape `before` that was reshaped to `shape`.

    The window becomes the smallest window of `before` in each group of dimensions that has one, and
    covers the whole group otherwise.
    """
    outer_start, outer_extent = list(adjoint.start), list(adjoint.extent)
    start, extent = [0] * len(before), [1] * len(before)
    for outer, inner in _groups(shape, before):
        sizes, targets = [shape[k] for k in outer], [before[k] for k in inner]
        run = _run(sizes, [outer_start[k] for k in outer], [outer_extent[k] for k in outer])
        placed = None if run is None else _placed(targets, *run)
        if placed is None:
            for k in outer:
                outer_start[k], outer_extent[k] = 0, shape[k]
            placed = [0] * len(targets), targets
        for k, first, count in zip(inner, *placed, strict=True):
            start[k], extent[k] = first, count
    wide = embedded(adjoint, tuple(outer_start), tuple(outer_extent))
    return Adjoint(wide.values.reshape(adjoint.batch, *extent), tuple(start))


def _groups(shape: tuple[int, ...], before: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of dimensions of both shapes that hold the same elements."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(before):
        outer, inner = [], []
        a = b = 1
        if i < len(shape):
            outer.append(i)
            a, i = shape[i], i + 1
        if j < len(before):
            inner.append(j)
            b, j = before[j], j + 1
        while a != b:
            if a < b:
                outer.append(i)
                a, i = a * shape[i], i + 1
            else:
                inner.append(j)
                b, j = b * before[j], j + 1
        found.append((outer, inner))
    return found


def _run(sizes: list[int], start: list[int], extent: list[int]) -> tuple[int, int] | None:
    """Return first and count of a window of consecutive elements, else None."""
    first, wide = 0, False
    for size, begin, count in zip(sizes, start, extent, strict=True):
        if wide and count != size:
            return None
        wide = wide or count > 1
        first = first * size + begin
    return first, math.prod(extent)


def _placed(sizes: list[int], first: int, count: int) -> tuple[list[int], list[int]] | None:
    """Return start and extent of the window with exactly these elements, else None."""
    for axis in range(len(sizes)):
        inner = math.prod(sizes[axis + 1 :])
        if first % inner or count % inner:
            continue
        place, length = first // inner, count // inner
        if place % sizes[axis] + length <= sizes[axis]:
            before = [int(k) for k in np.unravel_index(place, sizes[: axis + 1])]
            return (
                before + [0] * (len(sizes) - axis - 1),
                [1] * axis + [length, *sizes[axis + 1 :]],
            )
    return None
