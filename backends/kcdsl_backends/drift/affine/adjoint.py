"""Batches of linear functionals of a tensor, stored on the window outside of which they are zero;
their Gram matrices, and bounds of the largest eigenvalues of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from kcdsl_backends.drift.boxes import gamma

Window = tuple[tuple[int, int], ...]
"""Half-open ranges, one for each dimension of a tensor."""


def whole(shape: Sequence[int]) -> Window:
    """Return the window of a whole tensor."""
    return tuple((0, size) for size in shape)


def at(window: Window) -> tuple[slice, ...]:
    """Return the index that selects a window."""
    return tuple(slice(start, stop) for start, stop in window)


CACHED = 2**16
"""Numbers of functionals that go through elementwise operations together, on a processor."""


def in_cache(values: Tensor) -> Sequence[Tensor]:
    """Split functionals [B, ...] into parts that stay in the cache of a processor."""
    if values.device.type != "cpu":
        return [values]
    count = max(1, CACHED // max(1, math.prod(values.shape[1:])))
    return [values[start : start + count] for start in range(0, max(1, len(values)), count)]


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
        """Return functionals whose window is the whole tensor: values [B, *shape]."""
        shape = tuple(values.shape[1:])
        return Adjoint(values, whole(shape), shape)

    @property
    def single_row(self) -> bool:
        """Return whether the functionals read one row of the last dimension only."""
        return all(stop - start == 1 for start, stop in self.window[:-1])

    @property
    def one_row(self) -> bool:
        """Return whether the functionals read one row of the last two dimensions, in any heads."""
        start, stop = self.window[-2]
        return stop - start == 1

    @property
    def first(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.window)

    def on(self, window: Window) -> Tensor:
        """Return the values on a window that contains the one of the functionals."""
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
        everything = whole(self.shape)
        return Adjoint(self.on(everything), everything, self.shape)

    def plus(self, other: Adjoint) -> Adjoint:
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

    def without(self, some: Tensor) -> Adjoint:
        """Return the functionals with those marked in `some` [B] set to zero."""
        if not bool(some.any()):
            return self
        kept = (~some).reshape(-1, *(1 for _ in self.window))
        return Adjoint(self.values * kept, self.window, self.shape)

    def narrowed(self, dim: int) -> Adjoint:
        """Return the same functionals on a window without the zeros at both ends of a dimension."""
        others = [d for d in range(len(self.values.shape)) if d != dim % len(self.shape) + 1]
        used = (self.values != 0).sum(others).nonzero()
        if not len(used):
            return self
        first, last = int(used[0]), int(used[-1]) + 1
        window, start = list(self.window), self.window[dim][0]
        window[dim] = (start + first, start + last)
        values = self.values.narrow(dim % len(self.shape) + 1, first, last - first)
        return Adjoint(values, tuple(window), self.shape)

    def against(self, tensor: Tensor) -> Tensor:
        """Return Σ values·tensor [B]."""
        part = tensor.expand(self.shape)[at(self.window)]
        return self.values.flatten(1) @ part.flatten()

    def magnitude(self, radius: Tensor) -> Tensor:
        """Return Σ |values|·radius [B]: the largest value on |e| <= radius."""
        return self.magnitudes(radius)[0]

    def magnitudes(self, *radii: Tensor) -> list[Tensor]:
        """Return Σ |values|·radius [B] of several radii."""
        window = at(self.window)
        each = [radius.expand(self.shape)[window].flatten() for radius in radii]
        found = list[list[Tensor]]()
        for values in in_cache(self.values):
            sizes = values.abs().flatten(1)
            found.append([sizes @ radius for radius in each])
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def each(self, radius: Tensor) -> Tensor:
        """Return |values|·radius of every element of the window [B, n]."""
        part = radius.expand(self.shape)[at(self.window)]
        return (self.values * part).abs().flatten(1)


def meet(pending: dict[int, Adjoint], adjoints: Iterable[tuple[int, Adjoint]]) -> None:
    """Add functionals of a reverse pass to the pending ones of their entries."""
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
    """Return the functionals of one operand of a concatenation along `dim`: of this shape,
    beginning at `offset`. None if they read nothing of it."""
    start, stop = adjoint.window[dim]
    first, last = max(start, offset), min(stop, offset + shape[dim])
    if first >= last:
        return None
    window = list(adjoint.window)
    window[dim] = (first - offset, last - offset)
    values = adjoint.values.narrow(1 + dim, first - start, last - first)
    return Adjoint(values, tuple(window), shape)


def diagonal(values: Tensor) -> Tensor | None:
    """Return the diagonal of functionals [n, n] that read one element each; None of others."""
    if values.shape[0] != values.shape[1]:
        return None
    found = values.diagonal()
    return found if int(values.count_nonzero()) == int(found.count_nonzero()) else None


FEW = 64
"""Columns that are not worth being looked at for multiples of one another."""
PARTS = 8
"""Parts of the rows of a matrix, each of which is multiplied with those up to it."""


def square_of(matrix: Tensor, other: Tensor | None = None) -> Tensor:
    """Return A Aᵀ of a matrix [B, n], or A Bᵀ if that is symmetric; the upper triangle is copied
    from the lower one."""
    count, other = len(matrix), matrix if other is None else other
    size = max(64, -(-count // PARTS))
    found = matrix.new_empty(count, count)
    for start in range(0, count, size):
        stop = min(start + size, count)
        torch.mm(matrix[start:stop], other[:stop].T, out=found[start:stop, :stop])
        found[:start, start:stop] = found[start:stop, :start].T
    return found


SAME = 2.0**-40
"""Up to this share of a column it may be off from a multiple of another one."""


def parallel(columns: Tensor) -> tuple[Tensor, Tensor | None]:
    """Add up the sizes of columns [B, n] that are multiples of one another.

    b_j w_j for many j is one column b_j Σ|w_j|: the norm of Σ b_j w_j ξ_j over |ξ_j| <= 1 is the
    same. Also return a bound [B] of the deviation of merged columns from exact multiples; None if
    no columns were merged.
    """
    count, n = columns.shape
    if n < 2 * FEW or count < 2:
        return columns, None
    angles = torch.arange(1, count + 1, dtype=columns.dtype, device=columns.device)
    first, second = torch.stack([(angles * 0.7).cos(), (angles * 1.3).sin()]) @ columns
    ratio, order = (first / second).sort()
    begins = torch.ones_like(order, dtype=torch.bool)
    begins[1:] = ~((ratio[1:] - ratio[:-1]).abs() <= 2.0**-32 * ratio[1:].abs())
    places = begins.nonzero()[:, 0]
    if 2 * len(places) > n:
        return columns, None
    group = begins.cumsum(0) - 1
    lead = order[places][group]
    times = (first[order] / first[lead]).nan_to_num(0.0, 0.0, 0.0)
    chosen = columns[:, order]
    off = (chosen - columns[:, lead] * times).abs_()
    most = chosen.abs().amax(0)
    same = off.amax(0) <= SAME * most
    size = torch.zeros(len(places), dtype=columns.dtype, device=columns.device)
    size.index_add_(0, group, torch.where(same, times.abs(), 0.0))
    lost = torch.where(same, off + 2.0**-50 * chosen.abs(), 0.0).sum(-1)
    joined = columns[:, order[places]] * (size * MORE)
    return torch.cat([joined, chosen[:, ~same]], 1), lost * MORE


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
    """Return functionals of x.expand(...) as functionals of x of this shape: the sums over all
    copies."""
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
    """Return functionals of x.reshape(...) as functionals of x of this shape; windows are kept if
    possible."""
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
    """Return the window of one group in the other dimensions; None if it is not a window there."""
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


RISES = (-20, -14, -12, -10, -8, -6, -4, -4)
"""By how much an estimate is raised, one after the other, until the factorisation succeeds; then
once more, so that a reader whose estimate is off in other digits finds no larger bound."""
STEPS = 48
"""Steps of the Lanczos iteration."""
AGAIN = 6
"""Steps after which the largest eigenvalue found so far is looked at."""
SETTLED = 2.0**-22
"""By what share of itself it may grow in so many steps and count as found."""
SMALL = 160
"""Up to this size all eigenvalues are computed."""


def largest_eigenvalue(products: Tensor, trace: float, known: float = math.inf) -> float:
    """Bound the largest eigenvalue, by a Cholesky factorisation that succeeds (Rump 2006).

    Args:
        products: [n, n], a Gram matrix.
        trace: a bound of its trace.
        known: another bound of the same; returned if the eigenvalue is not smaller.
    """
    if not (0 < trace < math.inf and bool(torch.isfinite(products).all())):
        return trace
    n = products.shape[0]
    even = products / 2 / trace
    even = even + even.T
    value = _estimate(even, known / trace)
    if trace * value >= known:
        return known
    below = even.neg_()
    diagonal = below.diagonal().clone()
    for rise, more in pairwise(RISES):
        value = value * (1 + 2.0**rise)
        below.diagonal().copy_(diagonal + value)
        _, failed = torch.linalg.cholesky_ex(below)
        if not int(failed) and math.isfinite(value):
            sure = value * (1 + 2.0**more) * (1 + 4 * n * gamma(n + 4)) + 2.0**-30
            return trace * min(1.0, sure) * (1 + 2.0**-50)
    return trace


def largest_eigenvalues(products: Tensor, traces: Tensor) -> Tensor:
    """Bound the largest eigenvalue of each of many matrices, as `largest_eigenvalue` does.

    Args:
        products: [k, n, n], Gram matrices.
        traces: [k], bounds of their traces.
    """
    n = products.shape[-1]
    if n > SMALL or not bool(torch.isfinite(products).all() and (traces > 0).all()):
        each = zip(products, traces.tolist(), strict=True)
        return traces.new_tensor([largest_eigenvalue(product, trace) for product, trace in each])
    even = products / (2 * traces[:, None, None])
    even = even + even.mT
    value, unit = torch.linalg.eigvalsh(even)[:, -1], torch.eye(n, dtype=even.dtype).to(even)
    found = torch.ones_like(value)
    missing = torch.ones_like(value, dtype=torch.bool)
    for rise, more in pairwise(RISES):
        value = value * (1 + 2.0**rise)
        _, failed = torch.linalg.cholesky_ex(value[:, None, None] * unit - even)
        sure = value * (1 + 2.0**more) * (1 + 4 * n * gamma(n + 4)) + 2.0**-30
        shown = missing & (failed == 0) & torch.isfinite(value)
        found, missing = torch.where(shown, sure.clamp_max(1.0), found), missing & ~shown
        if not bool(missing.any()):
            break
    return traces * found * (1 + 2.0**-50)


def _estimate(even: Tensor, enough: float) -> float:
    """Return an estimate of the largest eigenvalue by the Lanczos iteration, which stops when the
    estimate has not grown for some steps, or is `enough`: it only grows."""
    n = even.shape[0]
    if n <= SMALL:
        return _eigenvalue_estimate(even)
    vector = even.abs().sum(-1)
    length = float(vector.norm())
    if length == 0:
        return 0.0
    vector = vector / length
    basis, found = even.new_zeros(STEPS, n), 0.0
    projected = even.new_zeros(STEPS, STEPS)
    for step in range(STEPS):
        basis[step] = vector
        known = basis[: step + 1]
        vector = even @ vector
        projected[step, : step + 1] = known @ vector
        if step % AGAIN == AGAIN - 1 or step == STEPS - 1:
            before, found = found, _eigenvalue_estimate(projected[: step + 1, : step + 1])
            if found - before <= SETTLED * found or found >= enough:
                break
        for _ in range(2):
            vector = vector - known.T @ (known @ vector)
        size = float(vector.norm())
        if size < 2.0**-40:
            return _eigenvalue_estimate(projected[: step + 1, : step + 1])
        vector = vector / size
    return found


def _eigenvalue_estimate(matrix: Tensor) -> float:
    """Return an estimate of the largest eigenvalue of a small matrix."""
    return float(torch.linalg.eigvalsh(matrix)[-1])


Row = tuple[int, ...]
"""The index of a row of the last dimension."""
MORE = 1.0 + 2.0**-30
"""More than the relative error of what is formed of few sums here."""
