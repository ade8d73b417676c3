"""Boxes: elementwise float64 intervals that round outward, and refusals without a finite bound.

An operation on exact operands is computed in round-to-nearest float64 and moved outward: by one
unit in the last place for a single operation, by an a-priori bound γ·Σ|terms| for sums and products
of many terms (docs/proofs/relational-interval.md, section 7). Tensors may live on any torch device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics import Numerics, narrower
from kcdsl.model.numerics.formats import Format


class NoBound(Exception):
    """No finite bound exists for this node."""

    def __init__(self, node: str, reason: str) -> None:
        self.node = node
        self.reason = reason
        super().__init__(f"{node}: {reason}")


def refuse_wide(nodes: Mapping[str, Node], node: Node, numerics: Numerics) -> None:
    """Refuse a sum or product of which an operand has a format that the result does not hold.

    Raises:
        NoBound: naming the operand.
    """
    name = narrower(nodes, node, numerics)
    if name is not None:
        raise NoBound(node.name, f"{name} has a format that the result does not hold: cast it")


def refuse_overflow(node: str, size: Tensor, form: Format, which: str = "") -> None:
    """Refuse magnitudes that may exceed the largest finite number of a format, or that are NaN.

    `which` names the tensor if it is not the result of the node.

    Raises:
        NoBound: naming the largest element.
    """
    if bool((size <= form.largest).all()):
        return
    raise overflow(node, size, f"{which} may exceed {form.largest:g} ({form.name})")


def refuse_unbounded_sums(node: str, error: Tensor, form: Format) -> None:
    """Refuse sums whose error in the format of the accumulator has no bound.

    Raises:
        NoBound: naming the first such element.
    """
    if bool(torch.isfinite(error).all()):
        return
    limit = f"{form.largest:g} ({form.name})"
    raise overflow(
        node, error, f" is a sum that may exceed {limit}, or has too many roundings for that format"
    )


def overflow(node: str, size: Tensor, what: str) -> NoBound:
    """Return the error that an overflow is reachable, at the element where `size` is largest."""
    flat = int(torch.nan_to_num(size, nan=torch.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), size.shape)]
    return NoBound(node, f"overflow reachable: element {index}{what}")


EPS = 2.0**-53
"""Unit roundoff of float64."""
TINY = 2.0**-1074
"""Smallest positive float64."""


def gamma(terms: int, unit_roundoff: float = EPS) -> float:
    """Return γ_k = k·u/(1 - k·u), rounded up; infinity where k·u >= 1."""
    product = terms * unit_roundoff
    return float("inf") if product >= 1.0 else product / (1.0 - product) * (1.0 + 2.0**-50)


@cache
def _infinities(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return minus and plus infinity, each of shape []; one of x's shape costs a third of `up`."""
    least = torch.tensor(-torch.inf, dtype=dtype, device=device)
    return least, -least


def down(x: Tensor, ulps: int = 1) -> Tensor:
    """Return x moved `ulps` representable numbers towards minus infinity."""
    limit = _infinities(x.dtype, x.device)[0]
    for _ in range(ulps):
        x = torch.nextafter(x, limit)
    return x


def up(x: Tensor, ulps: int = 1) -> Tensor:
    """Return x moved `ulps` representable numbers towards plus infinity."""
    limit = _infinities(x.dtype, x.device)[1]
    for _ in range(ulps):
        x = torch.nextafter(x, limit)
    return x


@dataclass(frozen=True, slots=True)
class Box:
    """All tensors z of one shape with lo <= z <= hi, element by element (float64)."""

    lo: Tensor
    hi: Tensor

    @staticmethod
    def point(x: Tensor) -> Box:
        return Box(x, x)

    @staticmethod
    def around(radius: Tensor) -> Box:
        return Box(-radius, radius)

    @property
    def shape(self) -> torch.Size:
        return self.lo.shape

    @property
    def is_point(self) -> bool:
        """Return whether both ends coincide everywhere."""
        return self.lo is self.hi or bool((self.lo == self.hi).all())

    def mag(self) -> Tensor:
        """Return the largest absolute value, element by element (exact)."""
        return torch.maximum(self.lo.abs(), self.hi.abs())

    def midpoint(self) -> tuple[Tensor, Tensor]:
        """Return (m, r) with [lo, hi] inside [m - r, m + r]; r is 0 for a point."""
        if self.is_point:
            return self.lo, torch.zeros_like(self.lo)
        middle = self.lo + (self.hi - self.lo) / 2
        return middle, up(torch.maximum(self.hi - middle, middle - self.lo))

    def widen(self, radius: Tensor) -> Box:
        """Return the box with `radius` (>= 0) added on both sides."""
        return Box(down(self.lo - radius), up(self.hi + radius))

    def reaching(self, radius: Tensor) -> Box:
        """Return the box with `radius` added on both sides; exact where the sums are float64."""
        return Box(-_sum_up(-self.lo, radius), _sum_up(self.hi, radius))

    def __add__(self, other: Box) -> Box:
        return Box(down(self.lo + other.lo), up(self.hi + other.hi))

    def __sub__(self, other: Box) -> Box:
        return Box(down(self.lo - other.hi), up(self.hi - other.lo))

    def __neg__(self) -> Box:
        return Box(-self.hi, -self.lo)

    def __mul__(self, other: Box) -> Box:
        a, b = self.lo * other.lo, self.lo * other.hi
        c, d = self.hi * other.lo, self.hi * other.hi
        low = torch.minimum(torch.minimum(a, b), torch.minimum(c, d))
        high = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
        return Box(down(low), up(high))

    def expand(self, shape: tuple[int, ...]) -> Box:
        return Box(self.lo.expand(shape), self.hi.expand(shape))

    def half(self) -> Box:
        """Return the box divided by two (exact up to underflow, which is pushed outward)."""
        return Box(down(self.lo / 2), up(self.hi / 2))

    def square(self) -> Box:
        """Return the range of z²."""
        a, b = self.lo * self.lo, self.hi * self.hi
        straddles = (self.lo <= 0) & (self.hi >= 0)
        low = torch.where(straddles, torch.zeros_like(a), down(torch.minimum(a, b)).clamp_min(0))
        return Box(low, up(torch.maximum(a, b)))

    def meet(self, other: Box) -> Box:
        return Box(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi))

    def hull(self, other: Box) -> Box:
        """Return the smallest box that holds both."""
        return Box(torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi))

    def total(self, dim: int = -1) -> Box:
        """Return the range of the sum over `dim` (kept), with the error of float64 summation."""
        terms = self.shape[dim]
        slack = up(gamma(terms) * self.mag().sum(dim, keepdim=True), 2)
        return Box(self.lo.sum(dim, keepdim=True), self.hi.sum(dim, keepdim=True)).widen(slack)

    def mean(self, dim: int = -1) -> Box:
        total = self.total(dim)
        return Box(down(total.lo / self.shape[dim]), up(total.hi / self.shape[dim]))

    def scaled(self, factor: float) -> Box:
        a, b = self.lo * factor, self.hi * factor
        return Box(down(torch.minimum(a, b)), up(torch.maximum(a, b)))


def _sum_up(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b, rounded up unless it is exact in float64."""
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)
    return torch.where(rest > 0, up(total), total)


@dataclass(frozen=True, slots=True)
class Factor:
    """The right factor of matrix products, all tensors z with |z - middle| <= radius, prepared once
    for all products that read it.

    `radius` is None for a single tensor; `size` is at least |z|, and equal for a single tensor.
    """

    middle: Tensor
    radius: Tensor | None
    size: Tensor

    @staticmethod
    def of(box: Box) -> Factor:
        if box.is_point:
            return Factor(box.lo, None, box.lo.abs())
        middle, radius = box.midpoint()
        return Factor(middle, radius, up(middle.abs() + radius))


def matmul(a: Box, b: Box | Factor) -> Box:
    """Return a box around every product A @ B with A in a and B in b (last two dimensions)."""
    right = b if isinstance(b, Factor) else Factor.of(b)
    a_mid, a_rad = (a.lo, None) if a.is_point else a.midpoint()
    terms = a.shape[-1]
    a_abs = a_mid.abs()
    magnitude = (a_abs if a_rad is None else a_abs + a_rad) @ right.size
    radius = gamma(terms + 8) * magnitude + terms * 4 * TINY
    if right.radius is not None:
        radius = radius + a_abs @ right.radius
    if a_rad is not None:
        radius = radius + a_rad @ right.size
    return Box.point(a_mid @ right.middle).widen(up(radius * (1.0 + 16 * EPS), 2))


def magnitude_product(a: Tensor, b: Tensor) -> Tensor:
    """Return an upper bound of a @ b for matrices of non-negative numbers."""
    terms = a.shape[-1]
    return up((a @ b) * (1.0 + 2.0 * gamma(terms + 4)) + terms * 4 * TINY, 2)


def exclusive_sums(terms: Tensor) -> Tensor:
    """Return, for every i of the last dimension, the sum of the non-negative terms j != i.

    Prefix and suffix sums, no subtraction: the relative error is at most γ_{n+2}(2^-53).
    """
    zero = torch.zeros_like(terms[..., :1])
    before = torch.cat([zero, terms.cumsum(-1)[..., :-1]], -1)
    after = torch.cat([terms.flip(-1).cumsum(-1).flip(-1)[..., 1:], zero], -1)
    return before + after


def exclusive_max(values: Tensor) -> Tensor:
    """Return, for every i of the last dimension, the largest value j != i (-inf for no other)."""
    nothing = torch.full_like(values[..., :1], -torch.inf)
    before = torch.cat([nothing, values.cummax(-1).values[..., :-1]], -1)
    after = torch.cat([values.flip(-1).cummax(-1).values.flip(-1)[..., 1:], nothing], -1)
    return torch.maximum(before, after)


SAFE = 1.0 + 2.0**-40
"""Bounds 1 + the relative error of sums of up to 4,000 non-negative terms."""
