"""Ellipsoids around the errors of rows (section 1): |a·e| ≤ √(aᵀ P a) for every functional a.

Eigenvalues of their Gram matrices are bounded in floating point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, reads_one_each
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Floats
from kcdsl_certs.recheck.interval.state import gamma

_AT_A_TIME = 16  # matrices
_SMALL = 160  # up to this size all eigenvalues are computed
_STEPS = 48  # of the Lanczos iteration
_LOOKS, _STILL = 5, 2.0**-24  # steps between two checks, relative growth that ends the iteration
_RISES = (-20, -14, -12, -10, -8, -6, -4)


def largest_eigenvalue(gram: Floats, trace: float, otherwise: float = math.inf) -> float:
    """Return a bound of the largest eigenvalue of a positive semidefinite matrix.

    Args:
        gram: [n, n], within 2^-30·trace (in the norm) of the exact matrix.
        trace: a bound of the trace of that matrix.
        otherwise: another bound of the same; returned if the eigenvalue is about as large.
    """
    if not (math.isfinite(trace) and trace > 0 and bool(np.isfinite(gram).all())):
        return trace
    n = gram.shape[0]
    even = gram / 2 / trace
    even = even + even.T
    value = _estimate(even, otherwise / trace)
    if value * trace >= otherwise:
        return otherwise
    rest = np.negative(even, out=even)
    own, places = np.diagonal(rest).copy(), np.arange(n)
    for rise in _RISES:
        value = value * (1 + 2.0**rise)
        rest[places, places] = own + value
        try:
            np.linalg.cholesky(rest)
        except np.linalg.LinAlgError:
            continue
        sure = value * (1 + 4 * n * gamma(n + 4, UNIT)) + 2.0**-30
        return float(trace * min(1.0, sure) * (1 + 2.0**-50))
    return trace


def _estimate(even: Floats, enough: float) -> float:
    """Return an estimate of the largest eigenvalue: by Lanczos steps until it is constant, or
    `enough`."""
    n = even.shape[0]
    if n <= _SMALL:
        return float(np.linalg.eigvalsh(even)[-1])
    start = np.abs(even).sum(axis=-1)
    if not start.any():
        return 0.0
    basis, inner, best = np.zeros((_STEPS, n)), np.zeros((_STEPS, _STEPS)), 0.0
    vector = start / np.linalg.norm(start)
    for step in range(_STEPS):
        basis[step] = vector
        so_far = basis[: step + 1]
        vector = even @ vector
        inner[step, : step + 1] = so_far @ vector
        for _ in range(2):
            vector = vector - so_far.T @ (so_far @ vector)
        size = float(np.linalg.norm(vector))
        ends = size < 2.0**-40 or step == _STEPS - 1
        if ends or step % _LOOKS == 0:
            last, best = best, float(np.linalg.eigvalsh(inner[: step + 1, : step + 1])[-1])
            if ends or best - last <= _STILL * best or best >= enough:
                break
        vector = vector / size
    return best


Row = tuple[int, ...]
Ellipsoids = Mapping[Row, Floats]
_MORE = 1 + 2.0**-30
_SAMPLE, _HALVINGS = 384, 10  # elements of a row and steps to find a price
_FAINT = 2.0**-240  # so that float64 holds products of squares of weights and shapes


def bound_on_ellipsoid(shape: Floats, functionals: Floats) -> Floats:
    """Return bounds [B] of functionals [B, n] on an ellipsoid, infinite if it gives none."""
    if reads_one_each(functionals):
        squares = np.diagonal(functionals) ** 2 * np.diagonal(shape)
    else:
        squares = np.einsum("bi,bi->b", functionals @ shape, functionals)
    found = np.sqrt(np.maximum(squares, 0.0) + _lost(shape, functionals)) * _MORE
    return np.where(np.isfinite(found), found, np.inf)


def image(shape: Floats, functionals: Floats) -> Floats:
    """Return the ellipsoid A P Aᵀ of functionals A [B, n], raised by the error of the products."""
    return image_with_bounds(shape, functionals)[0]


def image_with_bounds(shape: Floats, functionals: Floats) -> tuple[Floats, Floats]:
    """Return the same, and the bounds of `bound_on_ellipsoid`, from its diagonal."""
    if reads_one_each(functionals):
        alone = np.diagonal(functionals)
        product = alone[:, None] * shape * alone
    else:
        product = symmetric(functionals @ shape, functionals)
    lost, places = _lost(shape, functionals), np.arange(len(functionals))
    squares = np.diagonal(product).copy()
    extents = np.sqrt(np.maximum(squares, 0.0) + lost) * _MORE
    product[places, places] = squares + lost.sum()
    return product, np.where(np.isfinite(extents), extents, np.inf)


_BLOCK = 256


def symmetric(a: Floats, b: Floats) -> Floats:
    """Return A Bᵀ, a symmetric matrix, from one computed half."""
    n = len(a)
    found = np.empty((n, n))
    for first in range(0, n, _BLOCK):
        last = min(n, first + _BLOCK)
        rows = found[first:last]
        rows[:, :last] = a[first:last] @ b[:last].T
        found[:first, first:last] = rows[:, :first].T
    return found


def _lost(shape: Floats, functionals: Floats) -> Floats:
    """Bound the float64 error of aᵀ P a, as |P_ij| ≤ √P_ii √P_jj; P may be its diagonal."""
    size = np.abs(functionals) @ np.sqrt(np.maximum(_diagonal(shape), 0.0))
    return np.asarray(size**2 * 4 * gamma(2 * len(shape) + 8, UNIT))


def _diagonal(shape: Floats) -> Floats:
    return shape if shape.ndim == 1 else np.diagonal(shape)


@dataclass(frozen=True, slots=True)
class EllipsoidImage:
    """The ellipsoid A P Aᵀ for an ellipsoid P [n, n], or its diagonal [n], and functionals A [B,
    n]; it is formed in one product with others of the same functionals. `half` is A P."""

    functionals: Floats
    shape: Floats
    half: Floats

    @staticmethod
    def of(functionals: Floats, shape: Floats) -> EllipsoidImage:
        """Return the image of an ellipsoid, or of a diagonal, by functionals."""
        half = functionals * shape if shape.ndim == 1 else functionals @ shape
        return EllipsoidImage(functionals, shape, half)

    @property
    def trace(self) -> float:
        """Return the trace, as float64 forms it."""
        return float(np.einsum("bn,bn->", self.half, self.functionals))

    @property
    def extents(self) -> Floats:
        """Return bounds of the functionals [B]."""
        squares = np.einsum("bn,bn->b", self.half, self.functionals)
        lost = _lost(self.shape, self.functionals)
        found = np.sqrt(np.maximum(squares, 0.0) + lost) * _MORE
        return np.where(np.isfinite(found), found, np.inf)


def _sum_of_images(parts: Sequence[tuple[float, EllipsoidImage]]) -> Floats:
    """Return Σ factor·A P Aᵀ of images by the same functionals, raised by the error of the
    product."""
    functionals = parts[0][1].functionals
    half, own = np.zeros(functionals.shape), np.zeros(functionals.shape[1])
    for factor, part in parts:
        half += part.half * factor
        own += factor * _diagonal(part.shape)
    if reads_one_each(functionals):
        found = half * np.diagonal(functionals)
    else:
        found = symmetric(half, functionals)
    places = np.arange(len(found))
    found[places, places] += float(_lost(own, functionals).sum())
    return found


@dataclass(frozen=True, slots=True)
class RankOne:
    """The ellipsoid scale·e eᵀ + diag(rest) of the vector `ends`, e [n], with one number or n."""

    ends: Floats
    scale: float
    rest: float | Floats

    @staticmethod
    def near(ends: Floats, lost: float) -> RankOne:
        """Return an ellipsoid around t·v, -1 ≤ t ≤ 1, for a vector v within `lost` of `ends`: (v +
        w)(v + w)ᵀ ≤ (1 + t) v vᵀ + (1 + 1/t) w wᵀ."""
        size = float(np.linalg.norm(ends)) * _MORE
        t = lost / size if size > lost else 1.0
        return RankOne(ends, (1 + t) * _MORE, lost * (lost + max(lost, size)) * _MORE)

    @property
    def largest(self) -> float:
        """Return a bound of the largest eigenvalue."""
        return (self.scale * float((self.ends**2).sum()) + float(np.max(self.rest))) * _MORE

    @property
    def trace(self) -> float:
        """Return the trace, as float64 forms it."""
        rest = float(np.broadcast_to(self.rest, self.ends.shape).sum())
        return self.scale * float((self.ends**2).sum()) + rest


Part = Floats | RankOne | EllipsoidImage
"""An ellipsoid around functionals [B, B]."""


def multiplied(parts: Sequence[Part]) -> list[Floats | RankOne]:
    """Return ellipsoids whose members have the same sums: images by the same functionals become one
    ellipsoid, weighted as in `around_sum`."""
    found, seen = list[Floats | RankOne](), dict[tuple[int, ...], list[EllipsoidImage]]()
    for part in parts:
        if isinstance(part, EllipsoidImage):
            by = part.functionals
            key = by.__array_interface__["data"][0], *by.shape, *by.strides
            seen.setdefault(key, []).append(part)
        else:
            found.append(part)
    for some in seen.values():
        roots = [math.sqrt(max(part.trace, 0.0)) for part in some]
        shares = [(sum(roots) / w, part) for w, part in zip(roots, some, strict=True) if w != 0]
        if shares:
            found.append(_sum_of_images(shares))
    return found


def around_sum(parts: Sequence[Part]) -> Floats:
    """Return an ellipsoid around sums of members: (Σ w) Σ P_k/w_k, w_k = √trace(P_k)."""
    each, n = multiplied(parts), _count(parts[0])
    traces = [part.trace if isinstance(part, RankOne) else float(np.trace(part)) for part in each]
    roots = [math.sqrt(max(trace, 0.0)) for trace in traces]
    total, whole, places = np.zeros((n, n)), sum(roots), np.arange(n)
    for part, root in zip(each, roots, strict=True):
        if root == 0:
            continue
        if isinstance(part, RankOne):
            if part.scale > 0:
                total += np.outer(whole / root * part.scale * part.ends, part.ends)
            total[places, places] += whole / root * part.rest
        else:
            total += whole / root * part
    found = total + total.T
    found *= _MORE / 2
    found[places, places] += 2.0**-30 * float(np.trace(total))
    return found


def _count(part: Part) -> int:
    """Return the number of functionals."""
    if isinstance(part, RankOne):
        return len(part.ends)
    return len(part.functionals if isinstance(part, EllipsoidImage) else part)


def norm_on_ellipsoid(shape: Floats, functionals: Floats) -> float:
    """Return a bound of |A e|₂ for functionals A [B, n]."""
    n = len(shape)
    if len(functionals) <= n:
        product = image(shape, functionals)
        return math.sqrt(largest_eigenvalue(product, float(np.trace(product)) * _MORE)) * _MORE
    trace = float(np.trace(shape))
    try:
        root = np.linalg.cholesky(shape + 2.0**-30 * trace * np.eye(n))
    except np.linalg.LinAlgError:
        return math.inf
    sides = functionals @ root
    size = math.sqrt(largest_eigenvalue(sides.T @ sides, float((sides**2).sum()) * _MORE))
    off = gamma(n + 4, UNIT) * float(np.linalg.norm(functionals) * np.linalg.norm(root))
    found = (size + off) * _MORE
    return found if math.isfinite(found) else math.inf


def reached(ellipsoids: Ellipsoids, error_bound: Floats, adjoint: Adjoint) -> Floats:
    """Return bounds [B] of functionals of an error: rows by ellipsoids or error bounds."""
    found = np.zeros(adjoint.batch)
    for row, part in rows_of(adjoint):
        within = part.sizes(error_bound)
        if row in ellipsoids:
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            within = np.minimum(
                within, bound_on_ellipsoid(ellipsoids[row][columns, columns], values)
            )
        found = found + within
    return found * _MORE


def rows_of(adjoint: Adjoint) -> list[tuple[Row, Adjoint]]:
    """Return the rows of a window with the part of the functionals that reads each."""
    *lead, _ = adjoint.extent
    ones = (1,) * len(lead)
    found = []
    for place in np.ndindex(*lead):
        row = tuple(int(i + s) for i, s in zip(place, adjoint.start[:-1], strict=True))
        values = adjoint.values[(slice(None), *place)].reshape(adjoint.batch, *ones, -1)
        found.append((row, Adjoint(values, (*row, adjoint.start[-1]))))
    return found


def norm_of(matrix: Floats, size: float) -> float:
    """Return a bound of |M x|₂ for |x|₂ ≤ size."""
    small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    trace = float((matrix**2).sum()) * (1 + 2.0**-30) + TINY
    return math.sqrt(largest_eigenvalue(small, trace)) * size * (1 + 2.0**-40)


def norms_of(matrix: Floats, scales: Floats, size: float) -> Floats:
    """Return bounds [T] of |M diag(s_t) x|₂ for |x|₂ ≤ size and every row of scales [T, n]."""
    found = np.zeros(len(scales))
    if not scales.any():
        return found
    for first in range(0, len(scales), _AT_A_TIME):
        some = slice(first, first + _AT_A_TIME)
        scaled = matrix * scales[some, None]
        grams = scaled @ scaled.swapaxes(-1, -2)
        traces = np.trace(grams, axis1=1, axis2=2) * (1 + 2.0**-30) + TINY
        found[some] = np.sqrt(_each_largest(grams, traces))
    return found * (size * (1 + 2.0**-40))


def _each_largest(grams: Floats, traces: Floats) -> Floats:
    """Return bounds of the largest eigenvalues of Gram matrices, as for a single one."""
    n = grams.shape[-1]
    if n <= _SMALL and np.isfinite(grams).all() and np.isfinite(traces).all():
        even = grams / 2 / traces[:, None, None]
        even = even + even.swapaxes(-1, -2)
        value = np.linalg.eigvalsh(even)[:, -1] * (1 + 2.0 ** _RISES[0])
        try:
            np.linalg.cholesky(value[:, None, None] * np.eye(n) - even)
        except np.linalg.LinAlgError:
            pass  # a matrix needs a larger shift
        else:
            sure = value * (1 + 4 * n * gamma(n + 4, UNIT)) + 2.0**-30
            return np.asarray(traces * np.minimum(1.0, sure) * (1 + 2.0**-50))
    return np.array(
        [largest_eigenvalue(gram, float(trace)) for gram, trace in zip(grams, traces, strict=True)]
    )


@dataclass(frozen=True, slots=True)
class RowSquares:
    """One row e in an ellipsoid Q, with Σ e_k² at most `whole`; `squares` are the Q_kl², `sums`
    those of their rows."""

    whole: float
    squares: Floats
    sums: Floats

    @staticmethod
    def of(shape: Floats, norm: float) -> RowSquares:
        """Return the bounds that an ellipsoid and a norm give for the squares of a row."""
        most = largest_eigenvalue(shape, float(np.trace(shape)) * _MORE, norm**2) + _FAINT
        squares, places = shape**2, np.arange(len(shape))
        squares[places, places] = (np.diagonal(shape) + _FAINT) ** 2
        return RowSquares(min(most, norm**2) * _MORE, squares, squares.sum(axis=-1))

    def _both(self, weights: Floats) -> Floats:
        """Return Σ_kl β_k β_l Q_kl² [B]: the diagonal blocks, plus twice the blocks above them."""
        found, n = np.zeros(len(weights)), len(self.squares)
        for first in range(0, n, _BLOCK):
            last = min(n, first + _BLOCK)
            mixed = weights[:, first:last] @ self.squares[first:last, :last]
            before = np.einsum("bn,bn->b", mixed[:, :first], weights[:, :first])
            block = np.einsum("bn,bn->b", mixed[:, first:], weights[:, first:last])
            found += 2 * before + block
        return found

    def root(self, weights: Floats) -> Floats:
        """Return bounds [B] of √(Σ β e²) for weights β ≥ 0 [B, n].

        Σ β e² ≤ c·whole + |√Q diag(β - c) √Q|_F for every c ≥ 0, and the square of this norm is
        Σ_kl β_k β_l Q_kl² - 2c Σ_kl β_k Q_kl² + c² Σ_kl Q_kl².
        """
        weights = (weights + _FAINT) * _MORE
        both, one, total = self._both(weights), weights @ self.sums, float(self.sums.sum())
        least = np.full(len(weights), np.inf)
        if not total > 0:
            return least
        off = np.sqrt(np.maximum(both - one**2 / total, 0.0) / total)
        steep = self.whole / math.sqrt(max(total - self.whole**2, 2.0**-40 * total))
        lost = gamma(4 * len(self.squares) + 64, UNIT)
        for price in (np.maximum(one / total - steep * off, 0.0), np.zeros(len(weights))):
            middle, last = 2 * price * one, price**2 * total
            norm = np.maximum(both - middle + last, 0.0) + lost * (both + middle + last)
            least = np.minimum(least, price * self.whole + np.sqrt(norm) * _MORE)
        return np.asarray(np.sqrt(least * _MORE) * _MORE)


@dataclass(frozen=True, slots=True)
class RowExcess:
    """The same without the squares: of weights, what exceeds a price counts."""

    whole: float
    sums: Floats

    def root(self, weights: Floats) -> Floats:
        """Return bounds [B] of √(Σ β e²) for weights β ≥ 0 [B, n].

        Σ β e² ≤ c·whole + √(Σ_kl f_k f_l Q_kl²) for every c ≥ 0, with f = max(β - c, 0), and 2 f_k
        f_l ≤ f_k² + f_l².
        """
        weights = (weights + _FAINT) * _MORE
        step = max(1, weights.shape[-1] // _SAMPLE)
        some, sums = weights[:, ::step], self.sums[::step] * step
        least, most = np.zeros((len(weights), 1)), weights.max(axis=-1, keepdims=True)
        for _ in range(_HALVINGS):  # a convex function of the price
            price = (least + most) / 2
            above = np.maximum(some - price, 0.0)
            scaled = above * sums
            slope = self.whole * np.sqrt(np.einsum("bn,bn->b", scaled, above))
            more = (slope < scaled.sum(axis=-1))[:, None]
            least, most = np.where(more, price, least), np.where(more, most, price)
        above = np.maximum(weights - most, 0.0)
        below = (weights - above).max(axis=-1)
        found = below * self.whole + np.sqrt(above**2 @ self.sums)
        return np.asarray(np.sqrt(found * _MORE + _FAINT**2) * _MORE)


@dataclass(frozen=True, slots=True)
class WeightNorms:
    """Bounds of a weight W [m, n]: |W_k|, Σ_l (W_k·W_l)² by rows k, |W|₂ and the root of Σ W²."""

    rows: Floats
    products: Floats
    largest: float
    all: float

    @staticmethod
    def of(weight: Floats) -> WeightNorms:
        """Return the bounds of a weight."""
        inner = weight.T @ weight
        rows = np.linalg.norm(weight, axis=-1) * _MORE + _FAINT
        whole = float(np.linalg.norm(rows)) * _MORE
        off = (np.abs(weight) @ np.sqrt(np.diagonal(inner))) ** 2
        products = np.maximum(np.einsum("kn,kn->k", weight @ inner, weight), 0.0)
        products = (products + off * 4 * gamma(2 * sum(weight.shape) + 32, UNIT)) * _MORE
        most = math.sqrt(largest_eigenvalue(inner, whole**2 * _MORE)) * _MORE
        return WeightNorms(rows, products, most, whole)


@dataclass(frozen=True, slots=True)
class LinearImage:
    """Rows W e_x + o, |e_x|₂ ≤ lengths [..., 1], |o| ≤ rest [..., m]. `far`: errors are so far
    above the result that these bounds replace passes for elements and squares, too."""

    norms: WeightNorms
    lengths: Floats
    rest: Floats
    far: bool = False

    @property
    def elements(self) -> Floats:
        """Return bounds of the elements."""
        return np.asarray((self.norms.rows * self.lengths + self.rest) * _MORE + _FAINT)

    @property
    def totals(self) -> Floats:
        """Return bounds [..., 1] of the norms of rows."""
        own = np.linalg.norm(self.rest, axis=-1, keepdims=True) * _MORE + _FAINT
        return np.asarray((self.norms.largest * self.lengths + own) * _MORE)

    def _parts(self, row: Row) -> tuple[float, float]:
        """Return the roots of the traces of l² W Wᵀ and |o|² 1."""
        rest = self.rest[row]
        return self.norms.all * float(self.lengths[row][0]), float(
            np.linalg.norm(rest) * math.sqrt(len(rest))
        )

    def trace(self, row: Row) -> float:
        """Return the trace of the ellipsoid around a row."""
        return sum(self._parts(row)) ** 2

    def row(self, row: Row) -> RowExcess:
        """Return bounds of a row by the ellipsoid around sums of members of both parts."""
        (image, own), length = self._parts(row), float(self.lengths[row][0])
        radius = float(np.linalg.norm(self.rest[row])) * _MORE
        a = 0.0 if image == 0 else (image + own) / image * length**2
        b = 0.0 if own == 0 else (image + own) / own * radius**2
        sums = a**2 * self.norms.products + 2 * a * b * self.norms.rows**2 + b**2
        whole = float(self.totals[row][0]) ** 2 * _MORE + _FAINT
        return RowExcess(whole, sums * _MORE + _FAINT**2)


@dataclass(frozen=True, slots=True)
class Squares:
    """Rows |e_k| ≤ factor_k·|x_k| + own_k, with bounds `rows` of x."""

    rows: Mapping[Row, RowSquares | RowExcess]
    factor: Floats | None = None
    own: Floats | None = None

    def root(self, row: Row, weights: Floats) -> Floats:
        """Return bounds [B] of √(Σ β e²) of a row for β [B, n], infinite if there is none."""
        if row not in self.rows:
            return np.full(len(weights), np.inf)
        sized = weights if self.factor is None else weights * (self.factor[row] ** 2 * _MORE)
        found = self.rows[row].root(sized)
        if self.own is not None:
            found = found + np.sqrt(weights @ self.own[row] ** 2 * _MORE) * _MORE
        return np.asarray(found * _MORE)

    def each(self, weights: Floats) -> Floats:
        """Return bounds [..., 1] of √(Σ β e²) of every row for β [..., n]."""
        found = np.full((*weights.shape[:-1], 1), np.inf)
        for row in self.rows:
            found[row] = self.root(row, weights[row][None])[0]
        return found
