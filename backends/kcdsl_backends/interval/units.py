"""Sums formed by a matrix unit, or of bytes in 16 bits (section 3), in any order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kcdsl.model.formats import CODE_FORMATS, FORMATS, CodeFormat, ScaleLayout
from kcdsl.model.numerics import Activations, Numerics, Unit, Weights
from kcdsl_backends.interval.box import up
from kcdsl_backends.interval.rounding import Rounding
from kcdsl_backends.interval.scales import static_scale

_BLOCK = 2**22
"""Products formed at a time."""
_ROUGH = 1.0 + 2.0**-10
_WIDER = 1.0 + 2.0**-6
"""More than what a product may grow by while its operands are rounded to bfloat16."""
_SMALL = 2.0**-20
_LARGEST_BYTE, _LARGEST_PAIR = 255.0, 2.0**15 - 1


def unit_of(kernel: Rounding, quantised: bool) -> Unit | None:
    """Return the unit that forms a product's sums; None where they are rounded to nearest.

    Args:
        quantised: whether it is a linear that reads quantised activations.
    """
    core = kernel.numerics.tensor_core
    if core is None:
        return None
    return core.linears if quantised else core.others


def chains(unit: Unit, terms: int, extra: int) -> tuple[int, int]:
    """Return how many chains of instructions form a sum, and how long the longest is."""
    count = -(-terms // unit.chunk) + extra
    if not unit.promote:
        return 1, count
    length = unit.promote // unit.chunk
    return -(-count // length), min(length, count)


def largest_term(
    left: Tensor, right: Tensor, kernel: Rounding, quantised: bool, weight: str = ""
) -> tuple[Tensor, Tensor]:
    """Return X, the largest term of left @ right, and what subnormal operands add to it.

    Their sum is what no 2^(exponent of a + exponent of b) exceeds: a subnormal operand counts with
    the least exponent of its format. `weight` names that of a linear.
    """
    found = torch.zeros_like(left[..., :1] * right[..., :1, :])
    step = max(1, _BLOCK // max(1, found.numel()))
    for k in range(0, left.shape[-1], step):
        products = left[..., k : k + step].unsqueeze(-1) * right[..., k : k + step, :].unsqueeze(-3)
        found = torch.maximum(found, products.amax(-2))
    low_left, low_right = _floors(left, right, kernel, quantised, weight)
    top_left, top_right = left.amax(-1, keepdim=True), right.amax(-2, keepdim=True)
    least = low_left * top_right + low_right * top_left + low_left * low_right
    return up(found * _WIDER, 4), up(least * _WIDER, 4)


def _floors(
    left: Tensor, right: Tensor, kernel: Rounding, quantised: bool, weight: str
) -> tuple[Tensor | float, Tensor | float]:
    """Return the sizes that operands count with at least: of subnormal codes times their scale."""
    numerics = kernel.numerics
    names = (numerics.compute, numerics.attention.probabilities, numerics.attention.scores)
    least = 2.0 ** max(FORMATS[name].min_exponent for name in names)
    if not quantised:
        return least, least
    scaled, weights = numerics.activations, numerics.weights
    return _least_input(left, scaled, least, weight), _least_weight(right, weights, least)


def _least_input(left: Tensor, spec: Activations, plain: float, weight: str) -> Tensor | float:
    """Return the size that a code of the input counts with at least: 2^(least exponent)·scale."""
    form, layout = spec.codes, spec.layout
    if form.integer:
        return plain
    least = 2.0**form.grid.min_exponent
    if spec.static:
        return least * static_scale(left, spec, weight, weight).amax()
    if layout is None:
        return least
    top = (left.amax() if layout.whole else left.amax(-1, keepdim=True)).expand_as(left)[..., :1]
    scale = _largest_scale(top.clamp_min(spec.batch_amax), form, layout)
    return scale.clamp_min(spec.least_scale) * least


def _least_weight(right: Tensor, stored: Weights, plain: float) -> Tensor | float:
    form = CODE_FORMATS.get(stored.format)
    if form is None or form.integer:
        return plain
    least = 2.0**form.grid.min_exponent
    if stored.layout is None:
        return least
    return _largest_scale(right.amax(), form, stored.layout) * least


def _largest_scale(top: Tensor, form: CodeFormat, layout: ScaleLayout) -> Tensor:
    """Return what no scale exceeds, by the largest magnitude of what was quantised.

    amax codes for 2^emax at least; for half of that where scales are rounded up or to FP8.
    """
    twice = 1 if layout.rule in ("amax", "floor", "batch") else 2
    return top * (twice * 2.0**-form.top_exponent * _ROUGH)


def truncation_error(
    unit: Unit,
    count: tuple[int, int],
    total: Tensor,
    partial: Tensor,
    largest: tuple[Tensor, Tensor],
) -> Tensor:
    """Return what `chains` of instructions cut off in all.

    Args:
        count: the number of chains and the length of the longest.
        total: S, the magnitudes of the terms.
        partial: what no partial sum of the terms exceeds.
        largest: as `largest_term` returns it.
    """
    many, length = count
    terms = (unit.chunk + 1) * 2.0**-unit.fraction_bits
    kept = 2.0**-unit.result_bits * (1 + terms)
    each = terms + kept
    growth = math.expm1(length * math.log1p(each)) / each * (1 + 2.0**-40)
    aligned = torch.minimum(
        total * _WIDER + many * largest[1],
        many * torch.maximum(partial, largest[0] + largest[1]),
    )
    cut = growth * (terms * aligned + kept * torch.minimum(total, many * partial))
    return up(cut * (1 + 2.0**-40), 4)


def pair_loss(weight: Tensor, numerics: Numerics) -> Tensor:
    """Return [out], what sums of pairs in 16 bits lose at most, over the scale of the input.

    The codes of the input, zero point included, are any of 0 to 255. Two products with weights
    w + w' > 0 lose max(0, 255(w + w') - (2^15 - 1)s), a convex function of w + w': so the most is
    lost where the weights are paired by size. Losses of the two signs cancel.

    Args:
        weight: the stored weight [out, in], codes times their scale.
    """
    last, layout = numerics.weights.codes.below, numerics.weights.layout
    rows = weight.abs().amax(-1, keepdim=True)
    step = (rows.amax() if layout is not None and layout.whole else rows) / last
    limit = _LARGEST_PAIR * step * (1 - _SMALL)
    lost = torch.zeros_like(rows[:, 0])
    for side in (weight, -weight):
        ordered = side.clamp_min(0).sort(dim=-1, descending=True).values
        ordered = torch.nn.functional.pad(ordered, (0, ordered.shape[-1] % 2))
        pairs = ordered[:, 0::2] + ordered[:, 1::2]
        lost = torch.maximum(lost, (_LARGEST_BYTE * pairs - limit).clamp_min(0).sum(-1))
    return lost * (1 + _SMALL)
