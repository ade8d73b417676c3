"""Errors of sums of products in any order (section 3): accumulators, tensor cores, byte pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.numerics import Activations, MatrixUnit, Numerics, Weights
from kcdsl.model.numerics.formats import CODE_FORMATS, FORMATS, CodeFormat, ScaleLayout
from kcdsl_backends.drift.boxes import Box, NoBound, gamma, up
from kcdsl_backends.drift.boxes.matrices import Magnitudes
from kcdsl_backends.drift.boxes.quantisers import quantiser, static_scale
from kcdsl_backends.drift.boxes.rounding import Rounding

_BLOCK = 2**22
"""Most products computed at a time."""
_ROUGH = 1.0 + 2.0**-10
_WIDER = 1.0 + 2.0**-6
"""Bounds the growth of a product whose operands are rounded to bfloat16."""
_SMALL = 2.0**-20
_LARGEST_BYTE, _LARGEST_PAIR = 255.0, 2.0**15 - 1


def instruction_chains(unit: MatrixUnit, terms: int, extra: int) -> tuple[int, int]:
    """Return the number of chains of instructions of a sum, and the length of the longest."""
    count = -(-terms // unit.chunk) + extra
    if not unit.promote:
        return 1, count
    length = unit.promote // unit.chunk
    return -(-count // length), min(length, count)


def _least_input(left: Tensor, spec: Activations, plain: float, weight: str) -> Tensor | float:
    """Return the least size that a unit assumes of an input: 2^(least exponent)·scale."""
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


def _least_weight(right: Tensor | Magnitudes, stored: Weights, plain: float) -> Tensor | float:
    form = CODE_FORMATS.get(stored.format)
    if form is None or form.integer:
        return plain
    least = 2.0**form.grid.min_exponent
    if stored.layout is None:
        return least
    return _largest_scale(right.amax(), form, stored.layout) * least


def _largest_scale(top: Tensor, form: CodeFormat, layout: ScaleLayout) -> Tensor:
    """Return an upper bound of scales from the largest quantised magnitude.

    The code of amax is at least 2^emax, or half of it if scales are rounded up or to FP8.
    """
    twice = 1 if layout.rule in ("amax", "floor", "batch") else 2
    return top * (twice * 2.0**-form.top_exponent * _ROUGH)


def truncation_error(
    unit: MatrixUnit,
    count: tuple[int, int],
    total: Tensor,
    partial: Tensor,
    largest: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the truncation error of all chains of instructions together.

    Args:
        count: the number of chains and the length of the longest.
        total: S, the magnitudes of the terms.
        partial: an upper bound of all partial sums of the terms.
        largest: as `Sums.largest` returns it.
    """
    many, length = count
    terms = (unit.chunk + 1) * 2.0**-unit.fraction_bits
    kept = 2.0**-unit.result_bits * (1 + terms)
    each = terms + kept
    growth = math.expm1(length * math.log1p(each)) / each * (1 + 2.0**-40)
    aligned = torch.minimum(
        total * _WIDER + many * largest[1], many * torch.maximum(partial, largest[0] + largest[1])
    )
    cut = growth * (terms * aligned + kept * torch.minimum(total, many * partial))
    return up(cut * (1 + 2.0**-40), 4)


def pair_loss(weight: Tensor, numerics: Numerics) -> Tensor:
    """Return [out], the saturation error of sums of pairs in 16 bits over the scale of the input.

    The codes of the input, zero point included, are any of 0 to 255. Two products with weights
    w + w' > 0 lose max(0, 255(w + w') - (2^15 - 1)s), a convex function of w + w': so pairing the
    weights by size gives the largest error. Errors of the two signs cancel.

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


_SHORTENED = 2.0**-9 + 2.0**-20
"""Relative error of a term whose factors are truncated to tfloat32, each by 2^-10."""
_ROUNDED_TERMS, _CODED_TERMS = 2, 4
"""Roundings of a term before it is added: its product and one more; for codes the weight's own
value, the product, and both scales, wherever they are applied; one more for each scale that is a
rounded product of two."""


def term_roundings(kernel: Rounding) -> int:
    """Return the number of roundings of a term of a linear before it is added."""
    if not kernel.numerics.by_codes:
        return _ROUNDED_TERMS
    sections = kernel.numerics.weights, kernel.numerics.activations
    return _CODED_TERMS + sum(
        one.layout is not None and one.layout.rule == "nested" for one in sections
    )


def saturation_error(
    x: Box, weight: Box | Tensor, kernel: Rounding, node: str, key: str
) -> Tensor | float:
    """Return the saturation error of a linear that sums products of bytes in pairs of 16 bits.

    Args:
        x: the input before its quantisation.
        weight: [out, in], has the name `key`.

    Raises:
        NoBound: the weight is not a point, or as `quantiser` does.
    """
    numerics = kernel.numerics
    if numerics.byte_sums == "wide":
        return 0.0
    if isinstance(weight, Box):
        if weight.lo is not weight.hi:
            raise NoBound(node, "sums of bytes in 16 bits with weights that are not known")
        weight = weight.lo
    scale = quantiser(x, numerics.activations, key, node).scale.hi.amax(-1, keepdim=True)
    return up(scale * pair_loss(weight, numerics) * _DIVISION, 4)


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of the terms of left @ right, which a kernel adds in any order.

    Args:
        left, right: magnitudes of the operands.
        total: S, the magnitudes of all terms, a bias among them.
        result: mag(Y), the magnitude of the exact sum.
        kernel: the kernel.
        extra: roundings of partial sums in addition to one for each term.
        before: roundings of a term before it is added.
        quantised: whether it is a linear that reads quantised activations.
        weight: the name of its weight, by which it may have a static scale.
        columns: if given, `left` [..., rows, 1] is the sum of up to this many factors, and
            `right` [..., 1, n] the maximum of the other factors.
    """

    left: Tensor
    right: Tensor | Magnitudes
    total: Tensor
    result: Tensor
    kernel: Rounding
    extra: int = 0
    before: int = 2
    quantised: bool = False
    weight: str = ""
    columns: int | None = None

    @property
    def terms(self) -> int:
        """Return the number of terms of a sum."""
        return self.columns or self.left.shape[-1]

    @property
    def unit(self) -> MatrixUnit | None:
        """Return the unit that forms the sums; None where they are rounded to nearest."""
        core = self.kernel.numerics.tensor_core
        if core is None:
            return None
        return core.linears if self.quantised else core.others

    def error(self) -> Tensor:
        """Return the error of the sums; infinite where one may overflow."""
        kernel, unit = self.kernel, self.unit
        short = 0.0 if kernel.numerics.products == "compute" else up(self.total * _SHORTENED, 2)
        total, result = self.total + short, self.result + short
        if unit is None:
            error = accumulation_error(total, result, self.terms + self.extra, kernel, self.before)
        else:
            many, length = instruction_chains(unit, self.terms, self.extra)
            steps = many + self.extra + 1
            rounded = accumulation_error(total, result, steps, kernel, self.before)
            partial = up((total + result) / 2 + rounded, 2)
            cut = truncation_error(
                unit, (many, length), up(total + rounded), partial, self.largest()
            )
            error = up(rounded + cut * (1 + 4 * steps * kernel.u_accumulate), 4)
            fits = total + error <= kernel.accumulator.largest
            error = torch.where(fits, error, torch.inf)
        return up(error + short + self.flushed(), 4)

    def largest(self) -> tuple[Tensor, Tensor]:
        """Return X, the largest term, and a bound of its increase by subnormal operands.

        Their sum bounds every 2^(exponent of a + exponent of b), where a subnormal operand has the
        least exponent of its format.
        """
        left, right = self.left, self.right
        found = torch.zeros_like(left[..., :1] * right[..., :1, :])
        step = max(1, _BLOCK // max(1, found.numel()))
        for k in range(0, left.shape[-1], step):
            a, b = left[..., k : k + step].unsqueeze(-1), right[..., k : k + step, :].unsqueeze(-3)
            found = torch.maximum(found, (a * b).amax(-2))
        low_left, low_right = self._floors()
        top_left, top_right = left.amax(-1, keepdim=True), right.amax(-2, keepdim=True)
        least = low_left * top_right + low_right * top_left + low_left * low_right
        return up(found * _WIDER, 4), up(least * _WIDER, 4)

    def _floors(self) -> tuple[Tensor | float, Tensor | float]:
        """Return the least sizes that a unit assumes of operands: subnormal codes times scales."""
        numerics = self.kernel.numerics
        names = (numerics.compute, numerics.attention.probabilities, numerics.attention.scores)
        least = 2.0 ** max(FORMATS[name].min_exponent for name in names)
        if not self.quantised:
            return least, least
        first = _least_input(self.left, numerics.activations, least, self.weight)
        return first, _least_weight(self.right, numerics.weights, least)

    def flushed(self) -> Tensor | float:
        """Return the error of a product by flushing subnormals to zero.

        Tensor cores of coarse formats may treat subnormal operands, products and partial sums as
        zero: 2^-126·(Σ|a| + Σ|b| + 2n + 4) per element. Zero for kernels that multiply in float32,
        unless activations are quantised: then the product of two scales may be subnormal.
        """
        kernel, terms = self.kernel, self.terms
        faint = _FAINT_PRODUCT if kernel.numerics.activations.quantised else 0.0
        if not kernel.coarse and kernel.numerics.products == "compute":
            return faint * terms
        right = self.right.sum(-2, keepdim=True) * (self.columns or 1)
        sizes = self.left.sum(-1, keepdim=True) + right + (2 * terms + 4)
        return up(2.0**-126 * (sizes * _DIVISION) + faint * terms, 2)

    def beyond(
        self, error: Tensor, lost: Tensor | float, product: Tensor, biased: bool
    ) -> Tensor | float:
        """Return the errors of a linear in addition to that of its sums.

        Args:
            error: the error of the sums.
            lost: the saturation error of sums of bytes.
            product: the magnitude of the sum without a bias.
            biased: whether there is a bias.
        """
        lost = lost + self._reduced(error + lost)
        return lost + self._scaled(product, error + lost, biased)

    def _reduced(self, error: Tensor) -> Tensor | float:
        """Return the error of adding the parts of a linear in the compute format; infinite where a
        part or a sum of parts may overflow it. `error` is the earlier error of all parts together.

        Each of n parts is stored, they are added in any order, and a bias after them: no term is
        rounded more than n + 1 times.
        """
        kernel, shards = self.kernel, self.kernel.numerics.shards
        if shards == 1:
            return 0.0
        grown = math.expm1((shards + 1) * math.log1p(kernel.unit(kernel.compute))) * (1 + 2.0**-40)
        faint = (2 * shards + 2) * (1 + grown) * kernel.faint(kernel.compute)
        lost = up((self.total + error) * grown + faint, 6)
        return torch.where(self.total + error + lost <= kernel.compute.largest, lost, torch.inf)

    def _scaled(self, product: Tensor, error: Tensor, biased: bool) -> Tensor | float:
        """Return the error of a linear that multiplies sums of products with codes by the scales of
        weights; infinite where such a sum may overflow. `error` is the earlier error.

        The underflow errors are in units of codes, so they are multiplied by the greatest scale,
        which is at most the largest weight.
        """
        kernel, total = self.kernel, self.total
        stored, terms = kernel.numerics.weights, self.left.shape[-1]
        if stored.applied == "weights":
            return 0.0
        form = CODE_FORMATS[stored.format]
        most, whole = self.right.amax() * _DIVISION, stored.applied == "stored_sums"
        lost = 2.0**-126 * (2 * terms + 8) * most + torch.zeros_like(total)
        largest = kernel.accumulator.largest
        if whole:
            u, faint = kernel.unit(kernel.compute), kernel.faint(kernel.compute)
            once = u * (product + error + lost) * (1 + u) + faint * (1 + most)
            lost = up(lost + once * ((2 if biased else 1) * (1 + 2.0**-6)), 6)
            largest = min(largest, kernel.compute.largest)
        codes = self.left.sum(-1, keepdim=True) * (2 * max(form.above, form.below) * _DIVISION)
        close = (8 * error <= total) | (total == 0)
        if kernel.numerics.tensor_core is None:
            close = torch.full_like(close, (terms + 8) * kernel.u_accumulate <= 2.0**-4)
        return torch.where((codes <= largest) & close, up(lost, 4), torch.inf)


def accumulation_error(
    total: Tensor, result: Tensor, steps: int, kernel: Rounding, before: int = 2
) -> Tensor:
    """Return A_k,j(S, Y), the error of a sum in the accumulator; infinite where one may overflow.

    Args:
        total: S, the magnitudes of the terms.
        result: mag(Y), the magnitude of the exact sum.
        steps: k, the roundings of partial sums.
        before: j, the roundings of a term before it is added.
    """
    roundings = steps + before
    each = gamma(roundings, kernel.u_accumulate) / roundings * (1.0 + 2.0**-50)
    size = steps * (total + result) / 2 + before * total
    error = up(each * size + roundings * kernel.eta_accumulate, 8)
    return torch.where(total + error <= kernel.accumulator.largest, error, torch.inf)


_DIVISION = 1.0 + 2.0**-20


_FAINT_SCALE, _FAINT_PRODUCT = 2.0**-133, 2.0**-117
"""Error of a code with a subnormal scale, and of a product of codes with a subnormal product of
scales: a code has at most 17 integer bits, and multiplies an error of 2^-150."""
