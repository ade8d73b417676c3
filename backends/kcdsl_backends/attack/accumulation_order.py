"""Sums of products in an accumulator: how far any order may be off, and concrete orders.

docs/relational-interval.md, section 3. A concrete order is what a kernel could do: products are
fused into the sum, and every partial sum is rounded to nearest in the accumulator's format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from kcdsl.model.numerics.formats import FORMATS, Format

_ELEMENTS = 2**24
"""Products that are held at once."""


def straight(x: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
    """Round by a step function; gradients pass through unchanged."""
    still = x.detach()
    return x + (step(still) - still)


def sum_error(
    total: Tensor, exact: Tensor, format: Format, roundings: int, before: int = 2
) -> Tensor:
    """Return A_k,j(Σ|terms|, sum) without its share of underflow; 0 where there is no bound.

    Args:
        total: Σ|terms|.
        exact: the exact sum.
        roundings: k, of partial sums.
        before: j, of a term before it is added.
    """
    u = format.unit_roundoff
    if (roundings + before) * u >= 1:
        return torch.zeros_like(total)
    size = roundings * (total + exact.abs()) / 2 + before * total
    return size * (u / (1 - (roundings + before) * u))


def ordered_product(
    left: Tensor, right: Tensor, bias: Tensor | None, accumulator: str, order: str
) -> Tensor:
    """Return left @ right (+ bias), summed in one of `ORDERS`.

    Args:
        left, right: [..., m, n] and [..., n, p], float64, leading dimensions alike or absent.
        bias: [p], added after the products.
        accumulator: format of partial sums, coarser than float64.

    Raises:
        ValueError: an order that there is not.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}")
    format = FORMATS[accumulator]
    heads = (left[..., :1, :1] * right[..., :1, :1]).shape[:-2]
    a = left.expand(*heads, *left.shape[-2:]).reshape(-1, *left.shape[-2:])
    b = right.expand(*heads, *right.shape[-2:]).reshape(-1, *right.shape[-2:])
    parts = [_rows(one, two, bias, format, order) for one, two in zip(a, b, strict=True)]
    return torch.stack(parts).reshape(*heads, left.shape[-2], right.shape[-1])


def _rows(a: Tensor, b: Tensor, bias: Tensor | None, format: Format, order: str) -> Tensor:
    step = max(1, _ELEMENTS // b.numel())
    done = []
    for start in range(0, a.shape[0], step):
        terms = a[start : start + step, :, None] * b  # in float64: as good as fused
        done.append(ORDERS[order](terms.movedim(1, 0), format))
    result = torch.cat(done)
    return result if bias is None else straight(result + bias, format.nearest)


def _one_by_one(terms: Iterator[Tensor], format: Format) -> Tensor:
    total = straight(next(terms), format.nearest)
    for term in terms:
        total = straight(total + term, format.nearest)
    return total


def _by(key: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Format], Tensor]:
    """Return the order of growing keys, element by element."""

    def summed(terms: Tensor, format: Format) -> Tensor:
        order = key(terms).argsort(dim=0, stable=True)
        return _one_by_one(iter(terms.gather(0, order)), format)

    return summed


def _pairwise(terms: Tensor, format: Format) -> Tensor:
    level = straight(terms, format.nearest)
    while level.shape[0] > 1:
        rest = level[level.shape[0] // 2 * 2 :]
        pairs = straight(level[0 : level.shape[0] - 1 : 2] + level[1::2], format.nearest)
        level = torch.cat([pairs, rest])
    return level[0]


ORDERS: Mapping[str, Callable[[Tensor, Format], Tensor]] = {
    "forward": lambda terms, format: _one_by_one(iter(terms), format),
    "backward": lambda terms, format: _one_by_one(iter(terms.flip(0)), format),
    "pairwise": _pairwise,
    "growing": _by(lambda terms: terms.abs()),
    "falling": _by(lambda terms: -terms.abs()),
    "positive first": _by(lambda terms: -torch.sign(terms)),
    "negative first": _by(lambda terms: torch.sign(terms)),
}
"""Orders by name: [n, m, p] terms and a format -> [m, p]."""
