"""Ellipsoids around the errors of rows: bounds of functionals and of weighted sums of squares
(Rules 1.6 and 3.9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import (
    MORE,
    PARTS,
    Adjoint,
    Row,
    by_rows,
    diagonal,
    largest_eigenvalue,
    square_of,
)
from kcdsl_backends.drift.boxes import SAFE, gamma

Ellipsoids = Mapping[Row, Tensor]
"""P [n, n] of some rows of a tensor [..., n]."""
FAINT = 2.0**-240
"""Added to weights and ellipsoids, so that float64 holds the products of their squares."""


def bound_on_ellipsoid(matrix: Tensor, functionals: Tensor) -> Tensor:
    """Bound |a·e| by √(aᵀ P a) for functionals a [B, n] -> [B]; infinite where that is NaN."""
    alone = diagonal(functionals)
    if alone is None:
        value = ((functionals @ matrix) * functionals).sum(-1)
    else:
        value = alone.square() * matrix.diagonal()
    found = (value.clamp_min(0) + _rounding(matrix, functionals)).sqrt() * MORE
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)


def image(matrix: Tensor, functionals: Tensor) -> tuple[Tensor, Tensor]:
    """Return A P Aᵀ for functionals A [B, n], with its float64 error added on the diagonal, and the
    bounds [B] of `bound_on_ellipsoid`: the roots of the diagonal."""
    lost = _rounding(matrix, functionals)
    alone = diagonal(functionals)
    if alone is not None:
        found = alone[:, None] * matrix * alone
    else:
        found = square_of(functionals @ matrix, functionals)
    sizes = (found.diagonal().clamp_min(0) + lost).sqrt() * MORE
    found.diagonal().add_(lost.sum())
    return found, sizes.nan_to_num(nan=torch.inf, posinf=torch.inf)


def norm_on_ellipsoid(matrix: Tensor, functionals: Tensor) -> float:
    """Bound |A e|₂ for functionals A [B, n]: √λ_max of A P Aᵀ.

    Of many functionals that is the largest singular value of A L, with P + 2^-30·trace = L Lᵀ;
    infinite where the factorisation fails.
    """
    n = matrix.shape[0]
    if functionals.shape[0] <= n:
        inner, _ = image(matrix, functionals)
        return math.sqrt(largest_eigenvalue(inner, float(inner.diagonal().sum()) * MORE)) * MORE
    unit = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    trace = float(matrix.diagonal().sum())
    root, failed = torch.linalg.cholesky_ex(matrix + 2.0**-30 * trace * unit)
    if int(failed) or not math.isfinite(trace):
        return math.inf
    sized = functionals @ root
    products = square_of(sized.T)
    size = math.sqrt(largest_eigenvalue(products, float(sized.square().sum()) * MORE))
    lost = gamma(n + 4) * float(functionals.norm() * root.norm())
    return (size + lost) * MORE


def largest_singular_value(functionals: Tensor) -> float:
    """Bound the largest singular value of functionals [B, n]."""
    few = functionals.shape[0] <= functionals.shape[1]
    products = square_of(functionals if few else functionals.T)
    trace = float(functionals.square().sum()) * MORE
    return math.sqrt(largest_eigenvalue(products, trace)) * MORE


def _rounding(matrix: Tensor, functionals: Tensor) -> Tensor:
    """Return the float64 error of aᵀ P a: γ (Σ |a_i| √P_ii)², as |P_ij| <= √P_ii √P_jj, of an
    ellipsoid P or of its diagonal."""
    diagonal = matrix.diagonal() if matrix.dim() == 2 else matrix
    size = functionals.abs() @ diagonal.clamp_min(0).sqrt()
    return 4 * gamma(2 * len(diagonal) + 8) * size.square()


@dataclass(frozen=True, slots=True)
class RankOne:
    """The ellipsoid scale·v vᵀ + diag(rest), for a vector v [n] and one number or n."""

    values: Tensor
    scale: float = 1.0
    rest: float | Tensor = 0.0

    @staticmethod
    def axes(squares: Tensor) -> RankOne:
        """Return the ellipsoid with these squares of half axes [n] along the elements."""
        return RankOne(torch.zeros_like(squares), 0.0, squares)

    @staticmethod
    def near(values: Tensor, lost: float) -> RankOne:
        """Return an ellipsoid around t·v, -1 <= t <= 1, for a vector v [n] within `lost` of these
        values.

        (v + w)(v + w)ᵀ is at most (1 + t) v vᵀ + (1 + 1/t) w wᵀ for every t > 0; t = |w|/|v| here,
        1 if v is shorter than w.
        """
        length = float(values.norm()) * SAFE
        share = lost / length if length > lost else 1.0
        return RankOne(values, (1 + share) * SAFE, lost * (lost + max(lost, length)) * SAFE)

    @property
    def largest(self) -> float:
        """Return a bound of the largest eigenvalue."""
        rest = self.rest if isinstance(self.rest, float) else float(self.rest.amax())
        return (self.scale * float(self.values.square().sum()) + rest) * MORE

    @property
    def trace(self) -> float:
        """Return the trace, as float64 forms it."""
        rest = torch.as_tensor(self.rest).expand(len(self.values)).sum()
        return self.scale * float(self.values.square().sum()) + float(rest)


@dataclass(frozen=True, slots=True)
class ImageEllipsoid:
    """The ellipsoid A P Aᵀ of functionals A [B, n], of P [n, n] or its diagonal [n].

    The product with Aᵀ is computed when it is needed.
    """

    functionals: Tensor
    matrix: Tensor
    product: Tensor

    @staticmethod
    def of(functionals: Tensor, matrix: Tensor) -> ImageEllipsoid:
        """Return the image of an ellipsoid, given as matrix or as diagonal."""
        whole = matrix.dim() == 2
        product = functionals @ matrix if whole else functionals * matrix
        return ImageEllipsoid(functionals, matrix, product)

    @property
    def squares(self) -> Tensor:
        """Return the diagonal [B], as float64 forms it."""
        return torch.einsum("bn,bn->b", self.product, self.functionals)

    @property
    def trace(self) -> float:
        """Return the trace, as float64 forms it."""
        return float(self.squares.sum())

    @property
    def sizes(self) -> Tensor:
        """Return bounds of the functionals [B]; infinite where they are NaN."""
        lost = _rounding(self.matrix, self.functionals)
        found = (self.squares.clamp_min(0) + lost).sqrt() * MORE
        return found.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def of_same(self, other: ImageEllipsoid) -> bool:
        """Return whether another image has the same functionals."""
        return self.functionals.is_set_to(other.functionals)


def _images(parts: Sequence[tuple[ImageEllipsoid, float]]) -> Tensor:
    """Return the sum of images by the same functionals, each with a factor, as one product, with
    its float64 error added on the diagonal."""
    (first, factor), *others = parts
    alone, product = diagonal(first.functionals), first.product * factor
    sizes = (first.matrix.diagonal() if first.matrix.dim() == 2 else first.matrix) * factor
    for part, factor in others:
        product.add_(part.product, alpha=factor)
        sizes = sizes + (part.matrix.diagonal() if part.matrix.dim() == 2 else part.matrix) * factor
    lost = float(_rounding(sizes, first.functionals).sum())
    found = square_of(product, first.functionals) if alone is None else product * alone
    found.diagonal().add_(lost)
    return found


Part = Tensor | RankOne | ImageEllipsoid
"""An ellipsoid [B, B]."""


def joined(parts: Sequence[Part]) -> list[Tensor | RankOne]:
    """Return ellipsoids whose members have the same sums: images by the same functionals become one
    product, weighted as in `around_sum`."""
    found, images = list[Tensor | RankOne](), list[list[ImageEllipsoid]]()
    for part in parts:
        if not isinstance(part, ImageEllipsoid):
            found.append(part)
            continue
        same = next((each for each in images if each[0].of_same(part)), None)
        if same is None:
            images.append(same := [])
        same.append(part)
    for each in images:
        weights = [math.sqrt(max(part.trace, 0.0)) for part in each]
        some = [(part, sum(weights) / w) for part, w in zip(each, weights, strict=True) if w > 0]
        if some:
            found.append(_images(some))
    return found


def around_sum(parts: Sequence[Part]) -> Tensor:
    """Return an ellipsoid around the sums of members of others: (Σ w) Σ P_k/w_k.

    By Cauchy and Schwarz (Σ √q_k)² <= (Σ w) Σ q_k/w_k for all w > 0; w_k = √trace here. The share
    of 2^-30 of the trace exceeds the float64 error of sums of up to 2^22 products.
    """
    each = joined(parts)
    traces = [part.trace if isinstance(part, RankOne) else float(part.trace()) for part in each]
    weights = [math.sqrt(max(trace, 0.0)) for trace in traces]
    like = parts[0]
    if not isinstance(like, Tensor):
        like = like.values if isinstance(like, RankOne) else like.functionals
    total = like.new_zeros(len(like), len(like))
    for part, weight in zip(each, weights, strict=True):
        share = sum(weights) / weight if weight > 0 else 0.0
        if share == 0:
            continue
        if isinstance(part, RankOne):
            if part.scale > 0:
                total.addr_(part.values, part.values, alpha=share * part.scale)
            total.diagonal().add_(share * part.rest)
        else:
            total.add_(part, alpha=share)
    found = (total + total.T).mul_(MORE / 2)
    found.diagonal().add_(2.0**-30 * float(total.diagonal().sum()))
    return found


def reached(ellipsoids: Ellipsoids, error_bound: Tensor, functional: Adjoint) -> Tensor:
    """Bound functionals [B] of an error: row by row by the ellipsoid, or by the error bound."""
    if not ellipsoids:
        return functional.magnitude(error_bound)
    total = torch.zeros_like(functional.values.flatten(1)[:, 0])
    columns = slice(*functional.window[-1])
    for row, part in by_rows(functional):
        within = part.magnitude(error_bound)
        if row in ellipsoids:
            matrix = ellipsoids[row][columns, columns]
            within = torch.minimum(within, bound_on_ellipsoid(matrix, part.values.flatten(1)))
        total = total + within
    return total * MORE


PRICED, HALVINGS = 256, 8
"""About so many elements of a row are looked at for a price, in so many steps."""


@dataclass(frozen=True, slots=True)
class WeightedSquares:
    """Bounds of Σ β_k e_k² of one row for weights β >= 0, with e in an ellipsoid Q.

    `largest` bounds Σ e_k²; `squares` [n, n] are the Q_kl², `rows` their sums.
    """

    largest: float
    squares: Tensor
    rows: Tensor

    @staticmethod
    def of(matrix: Tensor, length: float) -> WeightedSquares:
        """Return the bounds for errors in an ellipsoid with norm at most `length`."""
        most = largest_eigenvalue(matrix, float(matrix.diagonal().sum()) * SAFE, length**2)
        squares = matrix.square()
        squares.diagonal().copy_((matrix.diagonal() + FAINT).square())
        return WeightedSquares(min(most + FAINT, length**2) * SAFE, squares, squares.sum(-1))

    def _mixed(self, weights: Tensor) -> Tensor:
        """Return Σ_kl β_k β_l Q_kl² [B], from one triangle of Q."""
        found, size = weights.new_zeros(len(weights)), max(64, -(-len(self.squares) // PARTS))
        for start in range(0, len(self.squares), size):
            own = weights[:, start : start + size]
            part = own @ self.squares[start : start + size, : start + own.shape[1]]
            part[:, :start] *= 2
            found += torch.einsum("bn,bn->b", part, weights[:, : part.shape[1]])
        return found

    def root(self, weights: Tensor) -> Tensor:
        """Bound √(Σ β_k e_k²) for weights β [B, n] -> [B].

        Σ β e² = c Σ e² + Σ (β - c) e², for every c >= 0. The first sum is at most `largest`,
        the second the root of Σ_kl (β_k - c)(β_l - c) Q_kl².
        """
        weights = (weights + FAINT) * SAFE
        first, second, third = self._mixed(weights), weights @ self.rows, self.rows.sum()
        middle = second / third
        left = (first - middle * second).clamp_min(0) / third
        slope = self.largest / (third - self.largest**2).clamp_min(2.0**-40 * third).sqrt()
        price = (middle - slope * left.sqrt()).clamp_min(0)
        inexact = gamma(4 * len(self.squares) + 32) * (
            first + 2 * price * second + price.square() * third
        )
        found = first - 2 * price * second + price.square() * third + inexact
        return ((price * self.largest + found.clamp_min(0).sqrt()) * SAFE).sqrt() * SAFE


@dataclass(frozen=True, slots=True)
class Excess:
    """The same bounds, without the squares themselves: of weights, only the excess over a price
    counts. `rows` [n] bound Σ_l Q_kl²."""

    largest: float
    rows: Tensor

    def root(self, weights: Tensor) -> Tensor:
        """Bound √(Σ β_k e_k²) for weights β [B, n] -> [B].

        Σ β e² <= c Σ e² + Σ (β - c)₊ e², for every c >= 0. The second sum is at most the root of
        Σ_kl f_k f_l Q_kl² <= Σ_k f_k² Σ_l Q_kl² with f = (β - c)₊.
        """
        weights = (weights + FAINT) * SAFE
        over = (weights - self._price(weights)).clamp_min_(0)
        price = weights.sub(over).amax(-1)  # as rounded
        found = price * self.largest + (over.square_() @ self.rows).sqrt()
        return (found * MORE + FAINT**2).sqrt() * SAFE

    def _price(self, weights: Tensor) -> Tensor:
        """Return the price [B, 1] with about the least bound, which is a convex function of it, by
        some of the elements."""
        step = max(1, weights.shape[-1] // PRICED)
        some, rows = weights[:, ::step], self.rows[::step] * step
        low = torch.zeros_like(some[:, :1])
        high = weights.amax(-1, keepdim=True)
        for _ in range(HALVINGS):
            price = (low + high) / 2
            over = (some - price).clamp_min(0)
            sized = over * rows
            falls = sized.sum(-1) > self.largest * torch.einsum("bn,bn->b", sized, over).sqrt()
            low = torch.where(falls[:, None], price, low)
            high = torch.where(falls[:, None], high, price)
        return high


@dataclass(frozen=True, slots=True)
class Maps:
    """Bounds of a weight W [m, n]: the norms of its rows, Σ_l (W_k·W_l)² of each row k, the largest
    singular value, and the norm of all elements; `inputs` is n."""

    norms: Tensor
    crossed: Tensor
    largest: float
    whole: float
    inputs: int

    @staticmethod
    def of(weight: Tensor) -> Maps:
        """Return the bounds of a weight in float64."""
        gram, inexact = square_of(weight.T), gamma(2 * sum(weight.shape) + 16)
        norms = weight.norm(dim=-1) * SAFE
        lost = 4 * inexact * (weight.abs() @ gram.diagonal().sqrt()).square()
        crossed = (torch.einsum("kn,kn->k", weight @ gram, weight).clamp_min(0) + lost) * SAFE
        whole = float(norms.norm()) * SAFE
        largest = math.sqrt(largest_eigenvalue(gram, whole**2 * MORE)) * MORE
        return Maps(norms, crossed, largest, whole, weight.shape[1])


@dataclass(frozen=True, slots=True)
class RowSquares:
    """Bounds by rows, of errors |e_k| <= factor_k |x_k| + own_k with x in an ellipsoid."""

    rows: Mapping[Row, WeightedSquares | Excess]
    factor: Tensor | None = None
    own: Tensor | None = None

    def root(self, row: Row, weights: Tensor) -> Tensor:
        """Bound √(Σ β_k e_k²) of a row for weights β [B, n] -> [B]; infinite if unknown."""
        if row not in self.rows:
            return weights.new_full(weights.shape[:1], torch.inf)
        scaled = weights if self.factor is None else weights * self.factor[row].square() * SAFE
        found = self.rows[row].root(scaled)
        if self.own is not None:
            found = found + (weights @ self.own[row].square() * SAFE).sqrt() * SAFE
        return found * SAFE

    def whole(self, weights: Tensor) -> Tensor:
        """Bound √(Σ β_k e_k²) of every row for weights β [..., n] -> [..., 1]."""
        found = torch.full_like(weights[..., :1], torch.inf)
        for row in self.rows:
            found[row] = self.root(row, weights[row][None])
        return found
