"""Batches of linear functionals of a tensor, stored on the window where they are not zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

Window = tuple[tuple[int, int], ...]
"""Half-open ranges, one for each dimension of a tensor."""


def whole(shape: Sequence[int]) -> Window:
    """Return the window of a whole tensor."""
    return tuple((0, size) for size in shape)


def at(window: Window) -> tuple[slice, ...]:
    """Return the index of a window."""
    return tuple(slice(start, stop) for start, stop in window)


@dataclass(frozen=True, slots=True)
class Adjoint:
    """B functionals e -> Σ values·e of a tensor e of shape `shape`.

    `values` is [B, *lengths of window], float64; outside of the window they are zero.
    """

    values: Tensor
    window: Window
    shape: tuple[int, ...]

    @staticmethod
    def full(values: Tensor) -> Adjoint:
        """Return functionals without zeros that are known beforehand: values [B, *shape]."""
        shape = tuple(values.shape[1:])
        return Adjoint(values, whole(shape), shape)

    @property
    def single_row(self) -> bool:
        """Say whether the functionals read one row of the last dimension only."""
        return all(stop - start == 1 for start, stop in self.window[:-1])

    @property
    def one_row(self) -> bool:
        """Say whether the functionals read one row of the last two dimensions, in any heads."""
        start, stop = self.window[-2]
        return stop - start == 1

    @property
    def first(self) -> tuple[int, ...]:
        """Return the index of the window's first element."""
        return tuple(start for start, _ in self.window)

    def on(self, window: Window) -> Tensor:
        """Return the values on a window that holds this one."""
        if window == self.window:
            return self.values
        lengths = [stop - start for start, stop in window]
        padded = self.values.new_zeros((self.values.shape[0], *lengths))
        inner = [
            slice(start - outer, stop - outer)
            for (start, stop), (outer, _) in zip(self.window, window, strict=True)
        ]
        padded[(slice(None), *inner)] = self.values
        return padded

    def dense(self) -> Adjoint:
        """Return the same functionals on the whole tensor."""
        everything = whole(self.shape)
        return Adjoint(self.on(everything), everything, self.shape)

    def plus(self, other: Adjoint) -> Adjoint:
        """Return the sums of functionals."""
        if self.window == other.window:
            return Adjoint(self.values + other.values, self.window, self.shape)
        hull = tuple(
            (min(a, c), max(b, d)) for (a, b), (c, d) in zip(self.window, other.window, strict=True)
        )
        total = self.on(hull).clone() if hull == self.window else self.on(hull)
        inner = [
            slice(start - outer, stop - outer)
            for (start, stop), (outer, _) in zip(other.window, hull, strict=True)
        ]
        total[(slice(None), *inner)] += other.values
        return Adjoint(total, hull, self.shape)

    def times(self, factor: Tensor | float) -> Adjoint:
        """Return the functionals of factor∘e, for a factor of the tensor's shape."""
        if isinstance(factor, Tensor):
            factor = factor.expand(self.shape)[at(self.window)]
        return Adjoint(self.values * factor, self.window, self.shape)

    def against(self, tensor: Tensor) -> Tensor:
        """Return Σ values·tensor [B]."""
        part = tensor.expand(self.shape)[at(self.window)]
        return self.values.flatten(1) @ part.flatten()

    def magnitude(self, radius: Tensor) -> Tensor:
        """Return Σ |values|·radius [B]: the largest value on |e| <= radius."""
        part = radius.expand(self.shape)[at(self.window)]
        return self.values.abs().flatten(1) @ part.flatten()

    def each(self, radius: Tensor) -> Tensor:
        """Return |values|·radius of every element of the window [B, n]."""
        part = radius.expand(self.shape)[at(self.window)]
        return (self.values * part).abs().flatten(1)


def meet(pending: dict[int, Adjoint], adjoints: Iterable[tuple[int, Adjoint]]) -> None:
    """Add functionals of a reverse pass to those that wait at entries already."""
    for index, part in adjoints:
        before = pending.get(index)
        pending[index] = part if before is None else before.plus(part)


def by_rows(adjoint: Adjoint) -> Iterator[tuple[tuple[int, ...], Adjoint]]:
    """Yield the parts of functionals that read one row of the last dimension each."""
    *lead, columns = adjoint.window
    for place in product(*(range(stop - start) for start, stop in lead)):
        row = tuple(i + start for i, (start, _) in zip(place, lead, strict=True))
        window = (*((i, i + 1) for i in row), columns)
        part = (slice(None), *(slice(i, i + 1) for i in place))
        yield row, Adjoint(adjoint.values[part], window, adjoint.shape)


def part_of(adjoint: Adjoint, dim: int, offset: int, shape: tuple[int, ...]) -> Adjoint | None:
    """Return what functionals of a concatenation along `dim` read of the operand of this shape that
    begins at `offset`; None for nothing."""
    start, stop = adjoint.window[dim]
    first, last = max(start, offset), min(stop, offset + shape[dim])
    if first >= last:
        return None
    window = list(adjoint.window)
    window[dim] = (first - offset, last - offset)
    values = adjoint.values.narrow(1 + dim, first - start, last - first)
    return Adjoint(values, tuple(window), shape)


def permuted(adjoint: Adjoint, dims: Sequence[int]) -> Adjoint:
    """Return functionals of x.permute(dims) as functionals of x."""
    if list(dims) == list(range(len(dims))):
        return adjoint
    inverse = [dims.index(d) for d in range(len(dims))]
    return Adjoint(
        adjoint.values.permute(0, *(1 + d for d in inverse)),
        tuple(adjoint.window[d] for d in inverse),
        tuple(adjoint.shape[d] for d in inverse),
    )


def summed(adjoint: Adjoint, shape: tuple[int, ...]) -> Adjoint:
    """Return functionals of x.expand(...) as functionals of x of this shape, those of copies
    added up."""
    if adjoint.shape == shape:
        return adjoint
    added = len(adjoint.shape) - len(shape)
    values = adjoint.values.sum([1 + d for d in range(added)]) if added else adjoint.values
    window = list(adjoint.window[added:])
    for d, size in enumerate(shape):
        if size != adjoint.shape[added + d]:
            values, window[d] = values.sum(1 + d, keepdim=True), (0, 1)
    return Adjoint(values, tuple(window), shape)


def reshaped(adjoint: Adjoint, shape: tuple[int, ...]) -> Adjoint:
    """Return functionals of x.reshape(...) as functionals of x of this shape; windows stay where
    they can."""
    if adjoint.shape == shape:
        return adjoint
    window: list[tuple[int, int]] = []
    current = adjoint
    for mine, theirs in _groups(shape, adjoint.shape):
        found = _regrouped(
            [shape[d] for d in mine],
            [adjoint.shape[d] for d in theirs],
            [adjoint.window[d] for d in theirs],
        )
        if found is None:
            everything = list(current.window)
            for d in theirs:
                everything[d] = (0, adjoint.shape[d])
            current = Adjoint(current.on(tuple(everything)), tuple(everything), adjoint.shape)
            found = [(0, shape[d]) for d in mine]
        window += found
    lengths = [stop - start for start, stop in window]
    return Adjoint(current.values.reshape(current.values.shape[0], *lengths), tuple(window), shape)


def _groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of consecutive dimensions with equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        mine, theirs = [i] if i < len(a) else [], [j] if j < len(b) else []
        left, right = a[i] if mine else 1, b[j] if theirs else 1
        i, j = i + len(mine), j + len(theirs)
        while left != right:
            if left < right:
                left, mine, i = left * a[i], [*mine, i], i + 1
            else:
                right, theirs, j = right * b[j], [*theirs, j], j + 1
        groups.append((mine, theirs))
    return groups


def _regrouped(
    mine: Sequence[int], theirs: Sequence[int], window: Sequence[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Return the window of one group in other dimensions, None where it is no window there."""
    if list(mine) == list(theirs):
        return list(window)
    if all(w == (0, size) for w, size in zip(window, theirs, strict=True)):
        return [(0, size) for size in mine]
    start, length, inner = 0, 1, 1
    for size, (first, stop) in zip(reversed(theirs), reversed(window), strict=True):
        if length != inner and stop - first != 1:
            return None
        start, length, inner = start + first * inner, length * (stop - first), inner * size
    found: list[tuple[int, int]] = []
    for size in reversed(mine):
        if length % size == 0 and start % size == 0:
            found.insert(0, (0, size))
            start, length = start // size, length // size
        elif start % size + length <= size:
            found.insert(0, (start % size, start % size + length))
            start, length = start // size, 1
        else:
            return None
    return found
