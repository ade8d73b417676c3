"""Functionals of many rows that attention forms of its input, bounded row by row.

Row j of a functional of row t is α_j = Σ_h p_hj u_h + Σ_h w_hj v_hj: through the values, and
through score j. It is formed in float32, some rows at a time, and not stored. The float32 error is
at most a multiple of the unit roundoff times Σ_h |p_hj||u_h| + Σ_h |w_hj||v_hj|.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.ellipsoids import norm_of
from kcdsl_certs.recheck.interval.box import UNIT, Floats, raised
from kcdsl_certs.recheck.interval.state import gamma

Singles = NDArray[np.float32]

_SINGLE = 2.0**-24  # unit roundoff of float32
_VANISHED = 2.0**-100  # exceeds the underflow error of a sum of products of numbers up to 1
_LEAST = 2.0**-200  # exceeds the float64 underflow error of such a sum
_FLOOR = 2.0**-960  # exceeds the float64 underflow error of a sum of squares
_LARGE = 2**19  # rows · columns · heads; above it rows are bounded by norms
_TALL, _WIDE = 32, 32  # rows and columns of one block
_TOGETHER = 8  # rows t whose own parts are formed at a time, from numbers that are read once


@dataclass(frozen=True, slots=True)
class Line:
    """A direction [T, n] of every row, with the size [T] of the error along it."""

    direction: Floats
    size: Floats


@dataclass(frozen=True)
class RowErrors:
    """The bound |α·e_j| ≤ |α|·radius_j + Σ |α·direction_j| size_j, a sum over the lines, for a
    functional of one row of an entry [T, n]; all entries below are included."""

    radius: Floats
    lines: tuple[Line, ...] = ()

    @cached_property
    def error_bound(self) -> Floats:
        """Return the bound of single elements."""
        found = self.radius
        for line in self.lines:
            found = found + np.abs(line.direction) * line.size[:, None]
        return raised(found)

    @cached_property
    def unit(self) -> float:
        """Return a power of two above the radius."""
        return _unit(self.radius)

    @cached_property
    def measure(self) -> Floats:
        """Return weights [n] > 0 of squares: column means of the radius, scaled to at most 1."""
        means = self.radius.mean(axis=0)
        largest = float(means.max(initial=0.0)) or 1.0
        return np.asarray(np.maximum(means / largest, 2.0**-100))

    def widened(self, own: Floats) -> RowErrors:
        """Return the bound of e with up to `own` added to every element."""
        return RowErrors(raised(self.radius + own), self.lines)


@dataclass(frozen=True)
class Weighted:
    """The bound of functionals α of one row t of W e by that of the rows of e, without α W.

    |α·W e_t| ≤ |α|₂ σ(W √measure) √(Σ_n radius_tn²/measure_n) + Σ |α·W direction_t| size_t.
    """

    weight: Floats
    rows: RowErrors

    @cached_property
    def stretch(self) -> float:
        """Return a bound of σ(W √measure)."""
        return norm_of(self.weight * np.sqrt(self.rows.measure), 1.0)

    @cached_property
    def across(self) -> Floats:
        """Return a bound of √(Σ_n radius_tn²/measure_n) of every row t."""
        unit, n = self.rows.unit, self.rows.radius.shape[1]
        scaled = self.rows.radius / unit
        sums = (scaled * scaled / self.rows.measure).sum(axis=-1)
        return raised(np.sqrt(sums * (1 + 4 * gamma(n + 8, UNIT)) + _LEAST) * unit)

    @cached_property
    def lines(self) -> list[tuple[Floats, Floats]]:
        """Return W direction [T, outputs] of every line, with a bound of the float64 error of its
        sums with a functional of ones."""
        turned = self.weight.T
        lost = 4 * gamma(sum(turned.shape) + 16, UNIT)
        each = [line.direction for line in self.rows.lines]
        return [(one @ turned, raised(np.abs(one) @ np.abs(turned)) * lost) for one in each]

    def bound(self, adjoint: Adjoint) -> Floats:
        """Return bounds [B] of functionals of one row."""
        t, columns = adjoint.start[0], adjoint.window[-1]
        alpha = adjoint.values.reshape(adjoint.batch, -1)
        squares = np.einsum("bn,bn->b", alpha, alpha) * (1 + 2 * gamma(alpha.shape[1], UNIT))
        found = np.sqrt(squares + _FLOOR) * (self.stretch * float(self.across[t]))
        for line, (along, lost) in zip(self.rows.lines, self.lines, strict=True):
            off = np.abs(alpha) @ lost[t, columns]
            found = found + (np.abs(alpha @ along[t, columns]) + off) * float(line.size[t])
        return raised(found * (1 + 2 * gamma(alpha.shape[1] + 8, UNIT)))


def _unit(values: Floats | Singles) -> float:
    """Return a power of two above all magnitudes; 1 if all are zero."""
    top = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))
    return math.ldexp(1.0, min(max(math.frexp(top)[1], -900), 1000)) if top else 1.0


def _singles(values: Floats, unit: float) -> Singles:
    return np.asarray(values * (1 / unit), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Through:
    """u = rows of α_h W_h, kept in float32 as multiples of `unit`, [heads, n, B].

    `along` is u·direction [lines, heads, B, T]; `most` bounds |u| times the largest error
    bound of all rows [heads, B], underflow of `single` included; `squares` [B, heads, heads] are
    Σ_n measure_n u_gn u_hn of `single`, where there are many rows.
    """

    single: Singles
    unit: float
    along: Floats
    most: Floats
    squares: Floats | None = None
    formed: dict[int, Singles] = field(default_factory=dict)

    @staticmethod
    def of(alpha: Floats, weight: Floats, rows: RowErrors) -> Through:
        """Return α [heads, B, d] times weights [heads, d, n]."""
        heads, batch = alpha.shape[:2]
        n, tokens = rows.radius.shape[1], rows.radius.shape[0]
        unit = _unit(np.abs(alpha).sum(axis=-1)) * _unit(weight)
        single = np.empty((heads, n, batch), dtype=np.float32)
        along = np.zeros((len(rows.lines), heads, batch, tokens))
        most, largest = np.empty((heads, batch)), rows.error_bound.max(axis=0)
        for h in range(heads):
            formed = alpha[h] @ weight[h]
            for k, line in enumerate(rows.lines):
                along[k, h] = formed @ line.direction.T
            most[h] = np.abs(formed) @ largest
            single[h] = formed.T * (1 / unit)
        vanished = n * _VANISHED * unit * float(largest.max())  # what float32 loses of tiny u
        most = raised(most * (1 + gamma(2 * n, UNIT)) + vanished)
        squares = _squares(single, rows.measure) if heads * n * tokens >= _LARGE else None
        return Through(single, unit, along, most, squares)

    def row(self, diagonal: Floats, t: int) -> Singles:
        """Return Σ_h p_htt u_h as [n, B], of shares p of each row in itself [heads, T]."""
        block, place = divmod(t, _TOGETHER)
        if block not in self.formed:
            self.formed.clear()
            some = diagonal[:, block * _TOGETHER : (block + 1) * _TOGETHER].T.astype(np.float32)
            found = some @ self.single.reshape(len(self.single), -1)
            self.formed[block] = found.reshape(len(some), *self.single.shape[1:])
        row: Singles = self.formed[block][place]
        return row

    def sizes(self, shares: Floats, error_bound: Floats) -> Floats:
        """Bound Σ_h |u_h| · (shares_ht error_bound) [B, T] for shares [heads, T, J] ≥ 0 of rows
        with an error bound [J, n] ≥ 0."""
        n, found = error_bound.shape[-1], np.zeros((self.single.shape[-1], shares.shape[1]))
        for single, share in zip(self.single, shares, strict=True):
            weights = raised(share @ error_bound)
            unit = _unit(weights)
            product = np.abs(single).T @ _singles(weights, unit).T
            found += (product.astype(np.float64) * _above(n + 8) + n * _VANISHED) * unit
        return raised(found * self.unit)


def _squares(single: Singles, measure: Floats) -> Floats:
    """Return Σ_n measure_n u_gnb u_hnb of u [heads, n, B] as [B, heads, heads]."""
    heads, _, batch = single.shape
    found = np.empty((batch, heads, heads))
    for begin in range(0, batch, _WIDE):
        some = slice(begin, begin + _WIDE)
        u = np.ascontiguousarray(single[:, :, some].transpose(2, 0, 1), dtype=np.float64)
        np.matmul(u, (u * measure).swapaxes(-1, -2), out=found[some])
    return found


def _lengths(square: Floats, triangle: Floats, terms: int) -> Floats:
    """Bound roots of quadratic forms w G w; `triangle` is Σ_h |w_h| √G_hh, and no sum has more than
    `terms` terms: the float64 error is at most that share of the square of the triangle."""
    off = 4 * gamma(terms + 32, UNIT) * triangle * triangle
    return raised(np.sqrt(np.maximum(square, 0.0) + off + _LEAST))


@dataclass(frozen=True)
class Places:
    """The functionals of the keys' input by the scores of one row of queries: v [heads, J, n] for
    the keys from row `first` on, of an entry with a bound of its rows.

    Products with the bound are cached for all functionals of the row.
    """

    v: Floats
    rows: RowErrors
    first: int

    @property
    def last(self) -> int:
        """Return the row after the last one."""
        return self.first + int(self.v.shape[1])

    @property
    def read(self) -> slice:
        """Return the rows of the entry that are read."""
        return slice(self.first, self.last)

    @cached_property
    def unit(self) -> float:
        """Return a power of two above v."""
        return _unit(self.v)

    @cached_property
    def sizes(self) -> Floats:
        """Bound |v| · error bound and |v| · radius of every row, [heads, J, 2]."""
        weights = np.stack([self.rows.error_bound[self.read], self.rows.radius[self.read]], axis=-1)
        found = np.abs(self.v).swapaxes(0, 1) @ weights
        lost = 1 + 4 * gamma(self.v.shape[-1] + 8, UNIT)
        return np.ascontiguousarray(raised(found * lost).swapaxes(0, 1))

    @cached_property
    def moved(self) -> list[Floats]:
        """Return v · direction of every line, [heads, J]."""
        by_row = self.v.swapaxes(0, 1)
        lines = (line.direction[self.read, :, None] for line in self.rows.lines)
        return [(by_row @ line)[..., 0].T for line in lines]

    @cached_property
    def squares(self) -> Floats:
        """Return Σ_n radius_jn v_gjn v_hjn [J, heads, heads], as multiples of both units."""
        v = self.v.swapaxes(0, 1) * (1 / self.unit)
        return (v * (self.rows.radius[self.read, None] * (1 / self.rows.unit))) @ v.swapaxes(-1, -2)


@dataclass(frozen=True)
class ManyRows:
    """Functionals α [B] of an entry, as above, with the bound of its rows; `own` is the row t.

    `shares` p are [heads, J] of rows 0 to J, with `through` u, and `diagonal` [heads, T] those of
    every row in itself; `weights` w [B, heads, J'] are those
    of some `heads` of the `places` v.
    """

    rows: RowErrors
    own: int
    batch: int
    shares: Floats | None = None
    through: Through | None = None
    diagonal: Floats | None = None
    weights: Floats | None = None
    places: Places | None = None
    heads: slice = field(default_factory=lambda: slice(None))

    def joined(self, other: ManyRows) -> ManyRows | None:
        """Return the sum; None if it does not have this form."""
        if self.own != other.own or self.rows is not other.rows:
            return None
        one, two = (self, other) if self.through is not None else (other, self)
        if one.weights is not None or two.through is not None:
            return None
        return ManyRows(
            *(self.rows, self.own, self.batch, one.shares, one.through, one.diagonal),
            *(two.weights, two.places, two.heads),
        )

    @property
    def row(self) -> Adjoint:
        """Return the part of row t; its float32 error is part of `bound`."""
        found = np.empty((self.batch, self.rows.radius.shape[1]))
        if self.through is not None and self.diagonal is not None and self._in_values(self.own):
            each = self.through.row(self.diagonal, self.own).T
            np.multiply(each, self.through.unit, out=found, dtype=np.float64)
        else:
            found[:] = 0.0
        if self.weights is not None and self.places is not None and self._in_keys(self.own):
            j = self.own - self.places.first
            found += self.weights[..., j] @ self.places.v[self.heads, j]
        return Adjoint(found[:, None], (self.own, 0))

    @property
    def all_rows(self) -> Adjoint:
        """Return the functionals of every row; `lost` bounds their float32 error."""
        n = self.rows.radius.shape[1]
        found = np.zeros((self.batch, *self.rows.radius.shape))
        if self.through is not None and self.shares is not None:
            p, u = self.shares, self.through.single.astype(np.float64)
            formed = p.T @ u.reshape(len(u), -1)
            formed = formed.reshape(-1, n, self.batch).transpose(2, 0, 1)
            found[:, : p.shape[1]] += formed * self.through.unit
        if self.weights is not None and self.places is not None:
            by_row = self.places.v[self.heads].swapaxes(0, 1)
            found[:, self.places.read] += (self.weights.transpose(2, 0, 1) @ by_row).swapaxes(0, 1)
        return Adjoint(found, (0, 0))

    def bound(self) -> Floats:
        """Return a bound [B] of all rows but t, plus the float32 error of all rows."""
        total = self.lost()
        for start, stop in self._parts():
            formed = self._by_norms if self._large else self._formed
            if not self._in_values(start):
                formed = self._of_one_head if self._one_head else self._formed
            total = total + formed(start, stop) + self._along(start, stop)
        return raised(total)

    @property
    def _large(self) -> bool:
        if self.shares is None or self.through is None or self.through.squares is None:
            return False
        return bool(self.shares.size * self.rows.radius.shape[1] >= _LARGE)

    def _in_values(self, row: int) -> bool:
        return self.shares is not None and row < self.shares.shape[1]

    def _in_keys(self, row: int) -> bool:
        return self.places is not None and self.places.first <= row < self.places.last

    @property
    def _one_head(self) -> bool:
        return self.weights is not None and self.weights.shape[1] == 1

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of the rows but t, each read by values and keys or by one of them."""
        ends = {0, self.own, self.own + 1}
        if self.shares is not None:
            ends.add(self.shares.shape[1])
        if self.places is not None:
            ends |= {self.places.first, self.places.last}
        places = sorted(ends)
        for start, stop in pairwise(places):
            if start != self.own and (self._in_values(start) or self._in_keys(start)):
                yield start, stop

    def whole(self) -> Floats:
        """Return a bound [B] of all rows, without cancellation between heads."""
        total, each = self._sizes
        return raised(total * (1 + each))

    def lost(self) -> Floats:
        """Bound the float32 error of α_j, times the error bound of its row."""
        total, each = self._sizes
        return raised(total * each)

    @cached_property
    def _sizes(self) -> tuple[Floats, float]:
        """Return Σ_j (Σ_h |p_hj||u_h| + Σ_h |w_hj||v_hj|)·error_bound_j, [B], and the share of it
        that bounds the float32 error."""
        total, terms, n = np.zeros(self.batch), 24, self.rows.radius.shape[1]
        if self.through is not None and self.shares is not None:
            total = total + np.abs(self.shares).sum(axis=-1) @ self.through.most
            terms += 2 * len(self.shares)
        if self.weights is not None and self.places is not None:
            sizes = self.places.sizes[self.heads, :, 0].reshape(-1)
            total = total + np.abs(self.weights).reshape(self.batch, -1) @ sizes
            terms += 2 * self.weights.shape[1]
        total = raised(total * (1 + 4 * gamma(self.rows.radius.shape[0] * terms + 64, UNIT)))
        return total, terms * _SINGLE / (1 - terms * _SINGLE) + 4 * gamma(n + terms + 64, UNIT)

    def _inner(self, start: int, stop: int) -> slice:
        """Return the slice of some rows in weights and places."""
        first = 0 if self.places is None else self.places.first
        return slice(start - first, stop - first)

    def _of_one_head(self, start: int, stop: int) -> Floats:
        """Bound Σ_j |α_j|·radius_j through one head: α_j is a multiple of row j of the places."""
        assert self.weights is not None
        assert self.places is not None
        inner = self._inner(start, stop)
        each = self.places.sizes[self.heads, inner, 1][0]
        found = np.abs(self.weights[:, 0, inner]) @ each
        return raised(found * (1 + 2 * gamma(stop - start + 8, UNIT)))

    def _along(self, start: int, stop: int) -> Floats:
        """Bound the error along the lines of rows start to stop."""
        total = np.zeros(self.batch)
        for k, line in enumerate(self.rows.lines):
            moved = np.zeros((self.batch, stop - start))
            if self.through is not None and self.shares is not None and self._in_values(start):
                along = self.through.along[k, :, :, start:stop]
                moved += np.einsum("hj,hbj->bj", self.shares[:, start:stop], along)
            if self.weights is not None and self.places is not None and self._in_keys(start):
                inner = self._inner(start, stop)
                sums = self.places.moved[k][self.heads, inner]
                moved += np.einsum("bhj,hj->bj", self.weights[..., inner], sums)
            total += np.abs(moved) @ line.size[start:stop]
        return raised(total)

    def _by_norms(self, start: int, stop: int) -> Floats:
        """Bound Σ_j |α_j|·radius_j by the inequality of Cauchy and Schwarz: through values with one
        measure for all rows, through keys with the radius of each row."""
        n = self.rows.radius.shape[1]
        unit_r = self.rows.unit
        radius = self.rows.radius[start:stop] / unit_r
        total = np.zeros(self.batch)
        through, shares = self.through, self.shares
        if through is not None and shares is not None and through.squares is not None:
            p, squares = shares[:, start:stop], through.squares
            both = (p[:, None] * p).reshape(-1, stop - start)
            single = np.sqrt(np.diagonal(squares, axis1=1, axis2=2)) @ np.abs(p)
            norms = _lengths(squares.reshape(self.batch, -1) @ both, single, n + len(both))
            across = raised(np.sqrt((radius * radius / self.rows.measure).sum(axis=-1)))
            vanished = (stop - start) * n * _VANISHED
            total += (norms @ across + vanished) * (through.unit * unit_r)
        if self.weights is not None and self.places is not None and self._in_keys(start):
            inner = self._inner(start, stop)
            weights = self.weights[..., inner].transpose(2, 1, 0)
            by, w = _unit(weights), np.empty(weights.shape)
            np.multiply(weights, 1 / by, out=w)  # [rows, heads, B]
            squares = self.places.squares[inner, self.heads, self.heads]
            roots = np.sqrt(np.diagonal(squares, axis1=1, axis2=2))
            square = ((squares @ w) * w).sum(axis=1)
            single = (roots[:, None] @ np.abs(w, out=w))[:, 0]
            norms = _lengths(square, single, n + weights.shape[1] ** 2)
            total += np.sqrt(radius.sum(axis=-1)) @ norms * (by * self.places.unit * unit_r)
        return raised(total * (1 + 4 * gamma(n + stop - start + 32, UNIT)))

    def _formed(self, start: int, stop: int) -> Floats:
        """Bound Σ_j |α_j|·radius_j over rows start to stop, with α in float32."""
        n, count = self.rows.radius.shape[1], stop - start
        radius = self.rows.radius[start:stop]
        unit_r = _unit(radius)
        sizes = np.nextafter(_singles(radius, unit_r), np.float32(np.inf)) + np.float32(2.0**-120)
        unit, u, w, v = 0.0, None, None, None
        p: Singles | None = None
        if self.through is not None and self.shares is not None and self._in_values(start):
            unit, u = self.through.unit, self.through.single
        if self.weights is not None and self.places is not None and self._in_keys(start):
            inner = self._inner(start, stop)
            weights, places = self.weights[..., inner], self.places.v[self.heads, inner]
            by = _unit(weights)
            unit = max(unit, by * self.places.unit)
            w = np.ascontiguousarray(_singles(weights, by).transpose(2, 1, 0))
            v = np.ascontiguousarray(_singles(places, unit / by).transpose(1, 2, 0))
        if u is not None and self.through is not None and self.shares is not None:
            p = _singles(self.shares[:, start:stop].T, unit / self.through.unit)
            p = np.ascontiguousarray(p)
        total = np.zeros(self.batch)
        first = np.empty(_TALL * _WIDE * self.batch, dtype=np.float32)
        second = np.empty_like(first)
        for top in range(0, count, _TALL):
            low = min(top + _TALL, count)
            for begin in range(0, n, _WIDE):
                end = min(begin + _WIDE, n)
                shape = (low - top, end - begin, self.batch)
                one = first[: math.prod(shape)].reshape(shape)
                two = second[: math.prod(shape)].reshape(shape)
                if p is not None and u is not None:
                    flat = u[:, begin:end].reshape(len(u), -1)
                    np.matmul(p[top:low], flat, out=one.reshape(low - top, -1))
                if w is not None and v is not None:
                    np.matmul(v[top:low, begin:end], w[top:low], out=two)
                    one = np.add(one, two, out=one) if p is not None else two
                np.abs(one, out=one)
                each_row = sizes[top:low, None, begin:end] @ one
                total += each_row[:, 0].sum(axis=0, dtype=np.float64)
        return self._scaled(total, unit * unit_r, count)

    def _scaled(self, total: Floats, unit: float, count: int) -> Floats:
        n = self.rows.radius.shape[1]
        return np.asarray((total * _above(n + 16) + count * n * _VANISHED) * unit)


def _above(terms: int) -> float:
    """Return the factor that turns a sum of non-negative float32 terms into an upper bound."""
    lost = terms * _SINGLE
    return (1 + 2.0**-40) / (1 - lost / (1 - lost))
