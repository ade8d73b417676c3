"""Functionals of many rows of a matrix, bounded a few rows at a time (section 4).

A functional of one row t of attention reads every row j that t attends to, as

    α_j = Σ_h p_hj c_h + Σ_h s_hj k_hj,

c_h the functional carried through the values of head h, k_hj that of score j carried through the
keys. These T² D numbers for every output of a row are not stored. They are formed in float32, never
in TF32 or bfloat16 even if the process allows them. The rounding error is at most a share of
Σ_h p_hj |c_h| + Σ_h |s_hj| |k_hj|, which is added to the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint, largest_eigenvalue, square_of
from kcdsl_backends.drift.boxes import SAFE, gamma
from kcdsl_backends.process import exact_products

_UNIT = 2.0**-24
"""Unit roundoff of float32."""
_FAINT = 2.0**-100
"""More than float32 loses below its normal numbers, of a sum of products of numbers up to 1."""
_NOTHING = 2.0**-200
"""More than float64 loses below its normal numbers, of a sum of products of numbers up to 1."""
_ROOT = 2.0**-480
"""More than a norm loses where squares are below the normal numbers of float64."""
MANY = 2**19
"""Products of rows, columns and heads from which on rows are bounded by their norms."""
_ROWS, _FUNCTIONALS = 32, 32
"""Rows and functionals that are formed at a time, so that they stay in the cache of a core."""
_AHEAD = 8
"""Rows t whose own parts are formed at a time: what they are formed of is large, and read once."""


@dataclass(frozen=True, slots=True)
class RowBound:
    """A bound of functionals α of single rows j of an entry [T, n], down to the block input.

    |α·e_j| <= |α|·radius_j + Σ_k |α·along_kj| size_kj,   along [K, T, n] and size [K, T].
    """

    radius: Tensor
    along: Tensor
    size: Tensor

    @staticmethod
    def of(radius: Tensor) -> RowBound:
        """Return the bound of an entry whose elements have independent errors."""
        rows, columns = radius.shape
        return RowBound(radius, radius.new_zeros(0, rows, columns), radius.new_zeros(0, rows))

    @property
    def whole(self) -> Tensor:
        """Return the bound element by element [T, n]."""
        return (self.radius + (self.along.abs() * self.size[..., None]).sum(0)) * SAFE

    def wider(self, own: Tensor) -> RowBound:
        """Return the bound of the entry plus an error of up to `own` of each element."""
        return replace(self, radius=(self.radius + own) * SAFE)


@dataclass(frozen=True, slots=True)
class _Single:
    """Numbers in float32, as multiples of a power of two `scale`; none is above 1 in size."""

    values: Tensor
    scale: float

    @staticmethod
    def of(values: Tensor) -> _Single:
        scale = power(values)
        return _Single((values / scale).float(), scale)


@dataclass(frozen=True, slots=True)
class BoundedRows:
    """The bound of the rows of an entry, as sums over rows read it.

    Σ_n |α_n| radius_jn <= sqrt(Σ_n metric_n α_n²) lengths_j of every row j, in units of the scale
    of the radius: by Cauchy and Schwarz, for any metric > 0.
    """

    rows: RowBound
    whole: Tensor
    radius: _Single
    metric: Tensor
    lengths: Tensor

    @staticmethod
    def of(rows: RowBound) -> BoundedRows:
        single = _Single.of(rows.radius)
        above = torch.nextafter(single.values, torch.tensor(torch.inf)) + 2.0**-120
        sizes = above.double()
        metric = (sizes.mean(0) / sizes.amax()).clamp_min(2.0**-100)
        lengths = (sizes.square() / metric).sum(-1).sqrt() * (1 + gamma(rows.radius.shape[1] + 32))
        return BoundedRows(rows, rows.whole, _Single(above, single.scale), metric, lengths)


@dataclass(frozen=True)
class WeightedRows:
    """A bound of functionals α of single rows j of W e, for a bound of the rows of e.

    |α·W e_j| <= |α|₂ gain lengths_j + Σ_k |α·W along_kj| size_kj,

    where no product α W is formed.
    """

    weight: Tensor
    bound: BoundedRows

    @cached_property
    def gain(self) -> float:
        """Bound the largest singular value of W √metric, times the scale of the radius."""
        scale = power(self.weight)
        sides = (self.weight.double() / scale) * self.bound.metric.sqrt()
        sides = sides if len(sides) <= sides.shape[1] else sides.T
        trace = float(sides.square().sum()) * (1 + 2.0**-30)
        largest = largest_eigenvalue(square_of(sides), trace)
        return math.sqrt(largest) * scale * self.bound.radius.scale * SAFE

    @cached_property
    def lines(self) -> tuple[Tensor, Tensor]:
        """Return W along_kj [K, T, outputs], and a bound [T, outputs] of the float64 error of
        functionals of it, times the size, for functionals of 1."""
        rows, weight = self.bound.rows, self.weight.double().T
        sizes = ((rows.along.abs() @ weight.abs()) * rows.size[..., None]).sum(0)
        lost = 2 * gamma(sum(weight.shape) + 16) * sizes * SAFE
        return rows.along @ weight, lost

    def magnitude(self, a: Adjoint) -> Tensor:
        """Bound |α·W e_j| of functionals of one row [B]."""
        row, columns, values = a.first[0], slice(*a.window[-1]), a.values.flatten(1)
        norms = values.norm(dim=-1) * (1 + gamma(values.shape[1] + 8)) + _ROOT
        total: Tensor = norms * (self.gain * float(self.bound.lengths[row]))
        size = self.bound.rows.size[:, row]
        if len(size):
            along, lost = self.lines
            total = total + (values @ along[:, row, columns].T).abs() @ size
            total = total + values.abs() @ lost[row, columns]
        return total * SAFE


@dataclass(frozen=True, slots=True)
class Vectors:
    """Functionals c [heads, B, n] of every row of an entry, with their products with its bound.

    `along` [heads, B, K, T] are c·along, and `most` [heads, B] bounds |c|·whole of any row; `gram`
    [B, heads, heads] are Σ_n metric_n c_hn c_gn of `single`, used for many rows.
    """

    single: _Single
    sizes: Tensor
    along: Tensor
    most: Tensor
    gram: Tensor | None
    ahead: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(each: Tensor, weight: Tensor, bound: BoundedRows) -> Vectors:
        """Return functionals [heads, B, d] of values, multiplied by the weights [heads, d, n], as
        functionals of the linear's input."""
        heads, count, columns = len(each), each.shape[1], weight.shape[-1]
        lines = bound.rows.along
        scale = power(each.abs().sum(-1).amax() * weight.abs().amax())
        single = torch.empty(heads, count, columns, dtype=torch.float32, device=each.device)
        along = each.new_empty(heads, count, lines.shape[0] * lines.shape[1])
        for head in range(heads):
            values = each[head] @ weight[head]
            along[head] = values @ lines.reshape(-1, columns).T
            single[head] = values.div_(scale)
        sizes, peaks = single.abs(), bound.whole.amax(0)[None]
        most = torch.stack([_weighed(size, scale, peaks)[:, 0] for size in sizes])
        return Vectors(
            _Single(single, scale),
            sizes,
            along.view(heads, count, *lines.shape[:2]),
            most,
            _gram(single, bound.metric) if heads * bound.whole.numel() >= MANY else None,
        )

    @property
    def columns(self) -> int:
        """Return the number n of elements of a functional."""
        return self.sizes.shape[-1]

    def weighed(self, shares: Tensor, whole: Tensor) -> Tensor:
        """Bound Σ_h Σ_n |c_hbn| Σ_j shares_htj whole_jn of shares [heads, T, J] >= 0 and a bound
        [J, n] of rows -> [B, T]."""
        found = whole.new_zeros(self.sizes.shape[1], shares.shape[1])
        for size, share in zip(self.sizes, shares, strict=True):
            found += _weighed(size, self.single.scale, share @ whole * SAFE)
        return found * SAFE

    @exact_products()
    def row(self, own: Tensor, t: int) -> Tensor:
        """Return Σ_h own_ht c_h [B, n] of row t of shares [heads, T]; some rows are formed at a
        time."""
        heads, count, columns = self.sizes.shape
        block, place = divmod(t, _AHEAD)
        if block not in self.ahead:
            self.ahead.clear()
            some = own[:, block * _AHEAD : (block + 1) * _AHEAD].T.float()
            found = some @ self.single.values.view(heads, -1)
            self.ahead[block] = found.view(-1, count, columns)
        return self.ahead[block][place].double() * self.single.scale


def _gram(single: Tensor, metric: Tensor) -> Tensor:
    """Return Σ_n metric_n c_hbn c_gbn of c [heads, B, n] -> [B, heads, heads]."""
    found = metric.new_empty(single.shape[1], len(single), len(single))
    for begin in range(0, single.shape[1], _FUNCTIONALS):
        part = single[:, begin : begin + _FUNCTIONALS].transpose(0, 1).double()
        torch.bmm(part * metric, part.mT, out=found[begin : begin + _FUNCTIONALS])
    return found


def _norms(squares: Tensor, sizes: Tensor, terms: int) -> Tensor:
    """Bound |Σ_h w_h c_h|, given its square from float64 sums of so many terms, and `sizes` = Σ_h
    |w_h| |c_h|."""
    inexact = 2 * gamma(terms + 32) * sizes.square()
    return (squares.clamp_min(0) + inexact + _NOTHING).sqrt() * SAFE


@exact_products()
def _weighed(sizes: Tensor, scale: float, weights: Tensor) -> Tensor:
    """Bound Σ_n sizes_bn weights_tn of weights [T, n] >= 0 -> [B, T]."""
    top, columns = power(weights), weights.shape[-1]
    single = (sizes @ (weights / top).float().T).double()
    return (single * _raised(columns + 6) + columns * _FAINT) * (scale * top)


@dataclass(frozen=True, slots=True)
class ValueRows:
    """Rows from 0 on: row j is Σ_h shares_hj c_h, shares [heads, keys] >= 0; `own` [heads, T] are
    those with which every row t reads itself."""

    vectors: Vectors
    shares: Tensor
    own: Tensor

    @property
    def bounds(self) -> Tensor:
        """Bound Σ_j |α_j|·whole_j [B], with absolute values of every factor."""
        found: Tensor = torch.einsum("h,hb->b", self.shares.abs().sum(-1), self.vectors.most)
        return found * SAFE

    @property
    def many(self) -> bool:
        """Return whether there are so many rows that their norms are bounded."""
        heads, rows = self.shares.shape
        return self.vectors.gram is not None and rows * heads * self.vectors.columns >= MANY

    def norms(self, rows: slice) -> Tensor:
        """Bound sqrt(Σ_n metric_n α_jn²) [B, rows] of α formed from float32 numbers c."""
        gram, shares = self.vectors.gram, self.shares[:, rows]
        assert gram is not None
        pairs = (shares[:, None] * shares).flatten(0, 1)  # [heads·heads, rows]
        sizes = gram.diagonal(dim1=1, dim2=2).sqrt() @ shares.abs() * SAFE
        return _norms(gram.flatten(1) @ pairs, sizes, self.vectors.columns + len(pairs))

    def along(self, rows: slice) -> Tensor:
        """Return α_j·along_kj [B, K, rows]."""
        return torch.einsum("hj,hbkj->bkj", self.shares[:, rows], self.vectors.along[..., rows])


@dataclass(frozen=True)
class KeyVectors:
    """The vectors k [heads, keys or 1, n] by which the scores of one row read the input of their
    keys, from row `first` on, as multiples of `scale`; none is above 1 in size.

    Products with the bound of the rows are cached, for all functionals that read the row.
    """

    places: Tensor
    scale: float
    bound: BoundedRows
    first: int
    count: int

    @property
    def rows(self) -> slice:
        """Return the slice of rows of the entry that is read."""
        return slice(self.first, self.first + self.count)

    @property
    def wide(self) -> Tensor:
        """Return k as [heads, keys, n]."""
        return self.places.expand(-1, self.count, -1)

    @cached_property
    def sizes(self) -> Tensor:
        """Bound Σ_n |k_hj| whole_j, and Σ_n |k_hj| radius_j: [2, heads, keys]."""
        rows, whole = self.bound.rows, self.bound.whole
        each = torch.stack([whole[self.rows], rows.radius[self.rows]], -1)
        found = torch.bmm(self.places.abs().expand_as(self.wide).transpose(0, 1), each)
        return found.permute(2, 1, 0) * (self.scale * (1 + 2 * gamma(whole.shape[1] + 8)) * SAFE)

    @cached_property
    def lines(self) -> Tensor:
        """Return k_hj·along_kj [K, heads, keys]."""
        along = self.bound.rows.along[:, self.rows].permute(1, 2, 0)
        return torch.bmm(self.wide.transpose(0, 1), along).permute(2, 1, 0) * self.scale

    @cached_property
    def gram(self) -> Tensor:
        """Return Σ_n radius_jn k_hjn k_gjn [keys, heads, heads], of multiples of both scales."""
        radius = self.bound.radius.values[self.rows].double()[:, None]
        vectors = self.wide.transpose(0, 1)
        return torch.bmm(vectors * radius, vectors.mT)

    @cached_property
    def lengths(self) -> Tensor:
        """Bound sqrt(Σ_n radius_jn) [keys], of the radius as a multiple of its scale."""
        radius = self.bound.radius.values[self.rows].double()
        return radius.sum(-1).sqrt() * (1 + gamma(radius.shape[-1] + 32))


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Row j is Σ_h weights_hbj k_hj: weights [B, heads, keys], key vectors k of some `heads`."""

    weights: Tensor
    vectors: KeyVectors
    heads: slice

    @property
    def first(self) -> int:
        """Return the first row."""
        return self.vectors.first

    @property
    def last(self) -> int:
        """Return the row after the last one."""
        return self.vectors.first + self.vectors.count

    def part(self, rows: slice) -> tuple[Tensor, slice]:
        """Return the weights [B, heads, rows] of some rows, and their slice in the key vectors."""
        inner = slice(rows.start - self.first, rows.stop - self.first)
        return self.weights[..., inner], inner

    def formed(self, rows: slice) -> Tensor:
        """Return k [heads, rows, n] of some rows."""
        return self.vectors.wide[self.heads, self.part(rows)[1]] * self.vectors.scale

    @property
    def bounds(self) -> Tensor:
        """Bound Σ_j |α_j|·whole_j [B], with absolute values of every factor."""
        sizes = self.vectors.sizes[0, self.heads].reshape(-1)
        return self.weights.abs().flatten(1) @ sizes * (1 + 2 * gamma(sizes.numel())) * SAFE

    def along(self, rows: slice) -> Tensor:
        """Return α_j·along_kj [B, K, rows]."""
        weights, inner = self.part(rows)
        return torch.einsum("bhj,khj->bkj", weights, self.vectors.lines[:, self.heads, inner])

    def of_radius(self, rows: slice) -> Tensor:
        """Bound Σ_j |α_j|·radius_j by Cauchy and Schwarz row by row, [B]."""
        weights, inner = self.part(rows)
        by, gram = power(weights), self.vectors.gram[inner, self.heads, self.heads]
        each = weights.new_empty(weights.shape[2], weights.shape[0], weights.shape[1])
        torch.mul(weights.permute(2, 0, 1), 1 / by, out=each)  # [rows, B, heads]
        squares = torch.bmm(each, gram).mul_(each).sum(-1)
        sizes = torch.bmm(each.abs_(), gram.diagonal(dim1=1, dim2=2).sqrt()[..., None])[..., 0]
        columns = self.vectors.places.shape[-1]
        norms = _norms(squares, sizes * SAFE, columns + each.shape[-1] ** 2)
        scale = by * self.vectors.scale * self.vectors.bound.radius.scale
        return (self.vectors.lengths[inner] @ norms) * scale * SAFE

    def apart(self, rows: slice) -> Tensor:
        """Bound Σ_j |α_j·e_j| of the functionals of one head, [B]."""
        weights, inner = self.part(rows)
        whole, radius = self.vectors.sizes[:, self.heads, inner]
        lines = (
            self.vectors.lines[:, self.heads, inner].abs()
            * self.vectors.bound.rows.size[:, None, rows]
        )
        lost = gamma(self.vectors.places.shape[-1] + 8) * whole
        each = (radius + lines.sum(0) + lost) * SAFE
        found: Tensor = weights[:, 0].abs() @ each[0] * SAFE
        return found


@dataclass(frozen=True, slots=True)
class RowSums:
    """Functionals of the rows [start, stop) of a matrix, α_j as above; `own` is row t, whose part
    is carried on with all other functionals of this row."""

    bound: BoundedRows
    own: int
    start: int
    stop: int
    count: int
    values: ValueRows | None = None
    keys: KeyRows | None = None

    def plus(self, other: RowSums) -> RowSums | None:
        """Return the sum of both; None if it does not have this form."""
        if self.own != other.own or self.bound is not other.bound:
            return None
        if (self.values and other.values) or (self.keys and other.keys):
            return None
        start, stop = min(self.start, other.start), max(self.stop, other.stop)
        return RowSums(
            *(self.bound, self.own, start, stop, self.count),
            self.values or other.values,
            self.keys or other.keys,
        )

    @property
    def row(self) -> Adjoint:
        """Return the functionals of row t; `magnitude` bounds the rounding in float32."""
        shape, at = tuple(self.bound.whole.shape), slice(self.own, self.own + 1)
        found = self.bound.whole.new_zeros(self.count, shape[1])
        if self.values is not None and self.own < self.values.shares.shape[1]:
            found = found + self.values.vectors.row(self.values.own, self.own)
        if self.keys is not None and self._reads(self.keys, at):
            weights, _ = self.keys.part(at)
            found = found + weights[..., 0] @ self.keys.formed(at)[:, 0]
        return Adjoint(found[:, None], ((self.own, self.own + 1), (0, shape[1])), shape)

    @property
    def all_rows(self) -> Adjoint:
        """Return the functionals of every row; `lost` bounds the rounding in float32."""
        shape = tuple(self.bound.whole.shape)
        found = self.bound.whole.new_zeros(self.count, *shape)
        if self.values is not None:
            single = self.values.vectors.single
            part = found[:, : self.values.shares.shape[1]]
            part += torch.einsum("hj,hbn->bjn", self.values.shares, single.values.double())
            part *= single.scale
        if self.keys is not None:
            rows = slice(self.keys.first, self.keys.last)
            wide = self.keys.formed(rows)
            found[:, rows] += torch.einsum("bhj,hjn->bjn", self.keys.weights, wide)
        return Adjoint(found, tuple((0, n) for n in shape), shape)

    @exact_products()
    def magnitude(self) -> Tensor:
        """Bound Σ_j |α_j·e_j| over all rows but t, plus the float32 rounding of row t, [B]."""
        total = self.lost()
        for rows in self._others:
            values, keys = self._values(rows), self._keys(rows)
            if keys is not None and values is None and keys.weights.shape[1] == 1:
                total = total + keys.apart(rows)
                continue
            if values is not None and values.many:
                total = total + self._by_norms(rows, values, keys)
            else:
                total = total + self._each(rows, values, keys)
            total = total + self._lines(rows, values, keys)
        return total * SAFE

    @property
    def _others(self) -> Iterator[slice]:
        """Yield slices of the rows but t, each read by values and keys or by one of them."""
        cuts = {self.start, self.own, self.own + 1, self.stop}
        if self.values is not None:
            cuts.add(self.values.shares.shape[1])
        if self.keys is not None:
            cuts |= {self.keys.first, self.keys.last}
        places = sorted(cut for cut in cuts if self.start <= cut <= self.stop)
        for start, stop in pairwise(places):
            if start != self.own:
                yield slice(start, stop)

    def _values(self, rows: slice) -> ValueRows | None:
        values = self.values
        return values if values is not None and rows.start < values.shares.shape[1] else None

    def _keys(self, rows: slice) -> KeyRows | None:
        return self.keys if self.keys is not None and self._reads(self.keys, rows) else None

    @staticmethod
    def _reads(keys: KeyRows, rows: slice) -> bool:
        inside: bool = keys.first <= rows.start < keys.last
        return inside

    def whole(self) -> Tensor:
        """Bound Σ_j |α_j·e_j| over all rows without cancellation between heads, [B]."""
        total, share = self._sizes()
        return total * (1 + share) * SAFE

    def lost(self) -> Tensor:
        """Bound the rounding error of α: in float32, and of α·along in float64."""
        total, share = self._sizes()
        return total * share

    def _sizes(self) -> tuple[Tensor, float]:
        """Bound Σ_j |α_j|·whole_j with absolute values of every factor, and return the share of it
        that bounds the rounding error."""
        terms = 16
        total = self.bound.whole.new_zeros(self.count)
        if self.values is not None:
            total = total + self.values.bounds
            terms += len(self.values.shares)
        if self.keys is not None:
            total = total + self.keys.bounds
            terms += self.keys.weights.shape[1]
        columns = self.bound.whole.shape[1]
        return total, _gamma(terms) + gamma(columns + terms + 64) + 2.0**-40

    def _lines(self, rows: slice, values: ValueRows | None, keys: KeyRows | None) -> Tensor:
        """Bound Σ_j Σ_k |α_j·along_kj| size_kj [B]."""
        size = self.bound.rows.size[:, rows]
        found = size.new_zeros(self.count, *size.shape)
        if not len(size):
            return found.flatten(1).sum(-1)
        if values is not None:
            found = found + values.along(rows)
        if keys is not None:
            found = found + keys.along(rows)
        return found.abs().flatten(1) @ size.flatten() * SAFE

    def _by_norms(self, rows: slice, values: ValueRows, keys: KeyRows | None) -> Tensor:
        """Bound Σ_j |α_j|·radius_j [B] by norms, of the parts through values and through keys."""
        unit = values.vectors.single.scale * self.bound.radius.scale
        total: Tensor = values.norms(rows) @ self.bound.lengths[rows]
        faint = (rows.stop - rows.start) * values.vectors.columns * _FAINT
        total = (total + faint) * unit
        return total if keys is None else total + keys.of_radius(rows)

    def _each(self, rows: slice, values: ValueRows | None, keys: KeyRows | None) -> Tensor:
        """Bound Σ_j |α_j|·radius_j [B] of α_j as float32 forms it."""
        radius, columns = self.bound.radius, self.bound.whole.shape[1]
        total = self.bound.whole.new_zeros(self.count)
        scale = 0.0
        if values is not None:
            scale, vectors = values.vectors.single.scale, values.vectors.single.values
            shares = values.shares[:, rows].T.float().contiguous()
        if keys is not None:
            weights, inner = keys.part(rows)
            by, to = power(weights), keys.vectors.scale
            scale = max(scale, by * to)
            single = (weights / by).float().permute(2, 0, 1).contiguous()
            places = keys.vectors.wide[keys.heads, inner]
            lines = (places * (by * to / scale)).float().transpose(0, 1)
        if values is not None and scale != values.vectors.single.scale:
            shares = shares * (values.vectors.single.scale / scale)
        room = torch.empty(_ROWS * _FUNCTIONALS * columns, dtype=torch.float32, device=total.device)
        for first in range(0, rows.stop - rows.start, _ROWS):
            last = min(first + _ROWS, rows.stop - rows.start)
            sizes = radius.values[rows.start + first : rows.start + last]
            for begin in range(0, self.count, _FUNCTIONALS):
                end = min(begin + _FUNCTIONALS, self.count)
                part = room[: (last - first) * (end - begin) * columns]
                formed = part.view(last - first, end - begin, columns)
                if values is not None:
                    torch.mm(
                        shares[first:last],
                        vectors[:, begin:end].flatten(1),
                        out=part.view(last - first, -1),
                    )
                if keys is not None:
                    formed.baddbmm_(
                        single[first:last, begin:end],
                        lines[first:last],
                        beta=0.0 if values is None else 1.0,
                    )
                formed.abs_()
                for row, size in zip(formed, sizes, strict=True):
                    total[begin:end] += torch.mv(row, size)
        faint = (rows.stop - rows.start) * columns * _FAINT
        found: Tensor = (total * _raised(columns + 8) + faint) * (scale * radius.scale)
        return found


def power(values: Tensor) -> float:
    """Return a power of two that no value exceeds in size; 1 if all are zero."""
    top = max(float(abs(end)) for end in values.aminmax()) if values.numel() else 0.0
    if not 0 < top < math.inf:
        return 1.0 if top == 0 else math.inf
    return 2.0 ** min(max(math.frexp(top)[1], -900), 1000)


def _gamma(terms: int) -> float:
    """Return γ of float32."""
    return terms * _UNIT / (1 - terms * _UNIT)


def _raised(terms: int) -> float:
    """Return the factor that makes a float32 sum of so many terms >= 0 an upper bound."""
    return 1 / (1 - _gamma(terms)) * (1 + 2.0**-40)
