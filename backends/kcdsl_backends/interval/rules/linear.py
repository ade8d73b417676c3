"""Linear maps and products of matrices (section 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kcdsl.model.formats import (
    CODE_FORMATS,
    E8M0_EXPONENTS,
    FORMATS,
    NESTED_MOST,
    CodeFormat,
)
from kcdsl.model.numerics import Activations
from kcdsl_backends.interval.box import Box, Factor, gamma, magnitude_product, matmul, up
from kcdsl_backends.interval.context import Parameter, Step
from kcdsl_backends.interval.errors import NoBound, refuse_overflow
from kcdsl_backends.interval.quantisers import staircase
from kcdsl_backends.interval.readings import Apart
from kcdsl_backends.interval.rounding import Rounding, Stored
from kcdsl_backends.interval.scales import (
    group_maximum,
    nested_scales,
    quantiser,
    refuse_batch,
    static_quantiser,
)
from kcdsl_backends.interval.state import State
from kcdsl_backends.interval.units import (
    chains,
    largest_term,
    pair_loss,
    truncation_error,
    unit_of,
)

_DIVISION = 1.0 + 2.0**-20
_FAINT_SCALE, _FAINT_PRODUCT = 2.0**-133, 2.0**-117
"""What a code loses where its scale is subnormal, and a product of codes where the product of both
scales is: a code has at most 17 bits before the point, and an error of 2^-150 counts that often."""
_FAINT_TENSOR = 2.0**-113
"""More than a number and the largest of its group where the reciprocal of m·s (nvfp4) is infinite,
or s is taken for zero: then every code may be the largest one, of zeros too."""
_SHORTENED = 2.0**-9 + 2.0**-20
"""What a term loses relatively where both factors are cut to tfloat32, each by 2^-10."""
_LEAST_POWER = 2.0 ** E8M0_EXPONENTS[0]
_ROUNDED_TERMS, _CODED_TERMS = 2, 4
"""Roundings of a term before it is added: its product and one more; of codes the weight's own
value, the product, and both scales, wherever they are multiplied in; one more for each scale that
is a rounded product of two."""
_OFF_ZERO = 2.0**-14
"""More than what roundings of the scale move the ends of 255 steps by, in steps."""


def linear(step: Step) -> State:
    """Bound x @ weight.T + bias with the stored weights of both kernels."""
    x = step.operand(0)
    weight = step.kernels.linear(step.operand_node(1))
    bias = step.kernels.plain(step.operand_node(2)) if len(step.node.inputs) > 2 else None
    name, key = step.node.name, str(step.operand_node(1).attrs["key"])
    quantised_train = _quantised(x.train, step.kernels.train, name, key)
    quantised_infer = _quantised(x.infer, step.kernels.infer, name, key)
    x_train, x_infer, drift_in = x.train, x.infer, x.drift
    if quantised_train is not None:
        x_train, drift_in = quantised_train.value, drift_in - quantised_train.error
    if quantised_infer is not None:
        x_infer, drift_in = quantised_infer.value, drift_in + quantised_infer.error
    if quantised_train is not None or quantised_infer is not None:
        drift_in = drift_in.meet(x_infer - x_train)
    weight_train, weight_infer = _factors(weight)
    train = product_train = matmul(x_train, weight_train)
    infer = product_infer = matmul(x_infer, weight_infer)
    drift = matmul(drift_in, weight_infer)
    if not weight.alike:
        drift = drift + matmul(x_train, _transposed(weight.difference))
    added: tuple[Tensor | None, Tensor | None] = (None, None)
    if bias is not None:
        bias_train, bias_infer = bias.boxes
        train = train + bias_train
        infer = infer + bias_infer
        drift = drift + bias.difference
        added = (bias_train.mag(), bias_infer.mag())
    errors = [
        _linear_error(entering, product, result, factor, size, kernel, key, lost)
        for entering, product, result, factor, size, kernel, lost in (
            (
                *(x_train, product_train, train, weight_train, added[0], step.kernels.train),
                saturation_error(x.train, weight.boxes[0], step.kernels.train, name, key),
            ),
            (
                *(x_infer, product_infer, infer, weight_infer, added[1], step.kernels.infer),
                saturation_error(x.infer, weight.boxes[1], step.kernels.infer, name, key),
            ),
        )
    ]
    (error_train, early_train), (error_infer, early_infer) = errors
    return step.finish(
        train,
        infer,
        drift,
        error_train,
        error_infer,
        accumulates=True,
        apart=(early_train, early_infer),
    )


def _quantised(x: Box, kernel: Rounding, node: str, weight: str) -> Stored | None:
    """Return a linear's input after its quantisation, and its error; None without it."""
    error = activation_error(x, kernel, node, weight)
    if error is None:
        return None
    known = staircase(x, error, kernel, weight, node)
    return known or Stored(x.widen(error), Box.around(error))


def _factors(weight: Parameter) -> tuple[Factor, Factor]:
    """Return the weight [in, out] of both kernels; one and the same where they hold the same."""
    train, infer = weight.boxes
    one = _transposed(train)
    return one, one if weight.alike else _transposed(infer)


def _transposed(box: Box) -> Factor:
    return Factor.of(Box.point(box.lo.T) if box.lo is box.hi else Box(box.lo.T, box.hi.T))


def _linear_error(
    x: Box,
    product: Box,
    result: Box,
    weight: Factor,
    bias: Tensor | None,
    kernel: Rounding,
    key: str,
    lost: Tensor | float,
) -> tuple[Tensor, Apart]:
    """Return E of a linear, any order of summation and a free cast before the bias, and what of it
    is that cast.

    `weight` is [in, out] and has the name `key`, `bias` is a magnitude. `lost` is what sums of
    bytes lose.
    """
    size = weight.size
    total = magnitude_product(x.mag(), size)
    if bias is not None:
        total = up(total + bias)
    quantised = kernel.numerics.activations.format != "none"
    error = summation_error(
        *(x.mag(), size, total, result.mag(), kernel),
        before=term_roundings(kernel),
        quantised=quantised,
        weight=key,
    )
    error = error + lost
    error = error + all_reduce_error(total, error, kernel)
    biased = bias is not None
    error = error + late_scale_error(x.mag(), size, total, product.mag(), error, kernel, biased)
    early: Apart = None
    if bias is not None and kernel.free and kernel.coarse:
        stored = kernel.compute
        cast = kernel.unit(stored) * (product.mag() + error) + kernel.faint(stored)
        # the sum with the bias, which is rounded, is off by that as well
        early = up(cast * (1.0 + 2.0 * kernel.u_accumulate), 6)
        error = error + early
    return up(error, 4), early


def term_roundings(kernel: Rounding) -> int:
    """Return how often a term of a linear may be rounded before it is added."""
    if not kernel.numerics.by_codes:
        return _ROUNDED_TERMS
    sections = kernel.numerics.weights, kernel.numerics.activations
    return _CODED_TERMS + sum(
        one.layout is not None and one.layout.rule == "nested" for one in sections
    )


def saturation_error(
    x: Box, weight: Box | Tensor, kernel: Rounding, node: str, key: str
) -> Tensor | float:
    """Return what a linear loses where products of bytes are summed in pairs of 16 bits.

    Args:
        x: the input before its quantisation.
        weight: [out, in], has the name `key`.

    Raises:
        NoBound: the weight is not known, or as `quantiser`.
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


def all_reduce_error(total: Tensor, error: Tensor, kernel: Rounding) -> Tensor | float:
    """Return what adding the parts of a linear in the compute format loses; infinite where a part
    or a sum of parts may overflow it.

    Each part is stored, n of them are added in any order, and a bias after them: no part of a term
    is rounded more than n + 1 times.

    Args:
        total: S, the magnitudes of all terms.
        error: how far the parts are off before, together.
    """
    shards = kernel.numerics.shards
    if shards == 1:
        return 0.0
    grown = math.expm1((shards + 1) * math.log1p(kernel.unit(kernel.compute))) * (1 + 2.0**-40)
    faint = (2 * shards + 2) * (1 + grown) * kernel.faint(kernel.compute)
    lost = up((total + error) * grown + faint, 6)
    return torch.where(total + error + lost <= kernel.compute.largest, lost, torch.inf)


def late_scale_error(
    left: Tensor,
    right: Tensor,
    total: Tensor,
    product: Tensor,
    error: Tensor,
    kernel: Rounding,
    biased: bool,
) -> Tensor | float:
    """Return what a linear loses besides where scales of weights are multiplied with sums of
    products of its input with codes; infinite where such a sum may overflow.

    Near zero, numbers are off in units of codes, and count as often as the greatest scale, which
    the largest weight is no smaller than.

    Args:
        left, right: magnitudes of the input and of the weight [in, out].
        total: S, the magnitudes of all terms.
        product: the magnitude of the sum without a bias.
        error: how far the sum is off before.
        biased: whether a bias is added to what was stored.
    """
    stored, terms = kernel.numerics.weights, left.shape[-1]
    if stored.applied == "weights":
        return 0.0
    form = CODE_FORMATS[stored.format]
    most, whole = right.amax() * _DIVISION, stored.applied == "stored_sums"
    lost = 2.0**-126 * (2 * terms + 8) * most + torch.zeros_like(total)
    largest = FORMATS[kernel.numerics.accumulate].largest
    if whole:
        u, faint = kernel.unit(kernel.compute), kernel.faint(kernel.compute)
        once = u * (product + error + lost) * (1 + u) + faint * (1 + most)
        lost = up(lost + once * ((2 if biased else 1) * (1 + 2.0**-6)), 6)
        largest = min(largest, kernel.compute.largest)
    codes = left.sum(-1, keepdim=True) * (2 * max(form.above, form.below) * _DIVISION)
    close = (8 * error <= total) | (total == 0)
    if unit_of(kernel, quantised=False) is None:
        close = torch.full_like(close, (terms + 8) * kernel.u_accumulate <= 2.0**-4)
    return torch.where((codes <= largest) & close, up(lost, 4), torch.inf)


def summation_error(
    left: Tensor,
    right: Tensor,
    total: Tensor,
    result: Tensor,
    kernel: Rounding,
    *,
    extra: int = 0,
    before: int = 2,
    quantised: bool = False,
    weight: str = "",
    columns: int | None = None,
) -> Tensor:
    """Return how far the sums of left @ right may be off; infinite where one may overflow.

    Args:
        left, right: magnitudes of the operands.
        total: S, the magnitudes of all terms, a bias among them.
        result: mag(Y), the magnitude of the exact sum.
        extra: roundings of partial sums beside one for each term.
        before: roundings of a term before it is added.
        quantised: whether it is a linear that reads quantised activations.
        weight: the name of its weight, by which it may have a static scale.
        columns: where given, `left` [..., rows, 1] is the sum of up to so many factors, and
            `right` [..., 1, n] bounds what each of them meets.
    """
    terms, unit = columns or left.shape[-1], unit_of(kernel, quantised)
    short = 0.0 if kernel.numerics.products == "compute" else up(total * _SHORTENED, 2)
    total, result = total + short, result + short
    if unit is None:
        error = accumulation_error(total, result, terms + extra, kernel, before)
    else:
        count = chains(unit, terms, extra)
        steps = count[0] + extra + 1
        rounded = accumulation_error(total, result, steps, kernel, before)
        cut = truncation_error(
            unit,
            count,
            up(total + rounded),
            up((total + result) / 2 + rounded, 2),
            largest_term(left, right, kernel, quantised, weight),
        )
        error = up(rounded + cut * (1 + 4 * steps * kernel.u_accumulate), 4)
        largest = FORMATS[kernel.numerics.accumulate].largest
        error = torch.where(total + error <= largest, error, torch.inf)
    return up(error + short + flushing_error(left, right, kernel, columns), 4)


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
    largest = FORMATS[kernel.numerics.accumulate].largest
    return torch.where(total + error <= largest, error, torch.inf)


def flushing_error(
    left: Tensor, right: Tensor, kernel: Rounding, columns: int | None = None
) -> Tensor | float:
    """Return how much a product loses near zero.

    Matrix units of coarse formats may treat operands, products and partial sums as zero that are
    subnormal: 2^-126·(Σ|a| + Σ|b| + 2n + 4) per element. Nothing for kernels that multiply in
    float32, unless activations are quantised: then the product of two scales may be subnormal.
    """
    faint = _FAINT_PRODUCT if kernel.numerics.activations.quantised else 0.0
    terms, each = columns or left.shape[-1], columns or 1
    if not kernel.coarse and kernel.numerics.products == "compute":
        return faint * terms
    sizes = left.sum(-1, keepdim=True) + right.sum(-2, keepdim=True) * each + (2 * terms + 4)
    return up(2.0**-126 * (sizes * _DIVISION) + faint * terms, 2)


def activation_error(x: Box, kernel: Rounding, node: str, weight: str = "") -> Tensor | None:
    """Return Q, the error of quantising a linear's input; None without it.

    Args:
        weight: the name of the linear's weight, by which it may have a static scale.

    Raises:
        NoBound: a format without scale or with a static one may overflow, or that is not known, or
            casts are directed.
    """
    if not kernel.numerics.activations.quantised:
        return None
    if kernel.casts.units != 1:  # no rule says how a quantiser rounds beside such casts
        raise NoBound(node, f"a quantiser beside casts {kernel.numerics.casts!r}")
    return up(_activation_error(x, kernel, node, weight) + _FAINT_SCALE)


def _activation_error(x: Box, kernel: Rounding, node: str, weight: str) -> Tensor:
    spec, magnitude = kernel.numerics.activations, x.mag()
    if spec.static:
        return _static_error(x, kernel, node, weight)
    if spec.nested:
        return _nested_error(x, spec, node, weight)
    form = spec.codes
    if form.zero_point:
        low = group_maximum((-x.lo).clamp_min(0), spec.layout)
        high = group_maximum(x.hi.clamp_min(0), spec.layout)
        step = (low + high) / form.divisor
        return up((step * (0.5 + _OFF_ZERO) + magnitude * 2.0**-20) * _DIVISION, 4)
    if spec.layout is None:
        refuse_overflow(node, magnitude, form.grid, " of the input")
    refuse_batch(x, spec, node)
    scale = _largest_scale(magnitude, spec, form)
    if form.reciprocal:
        rounded = torch.minimum(magnitude, scale / 2) + magnitude * 2.0**-20
    elif form.integer:
        rounded = scale / 2 + magnitude * 2.0**-20
    else:
        rounded = form.grid.unit_roundoff * magnitude + scale * form.grid.underflow
    rounded = rounded * _DIVISION
    if spec.amax_limit < math.inf:
        last = spec.amax_limit * (min(form.above, form.below) / form.divisor) * (1 - 2.0**-20)
        beyond = (magnitude - last).clamp_min(0)
        rounded = torch.maximum(rounded, beyond + magnitude * 2.0**-20)
    if spec.layout is not None and spec.layout.cuts:
        rounded = torch.maximum(rounded, _saturation(x, spec))
    return up(rounded, 4)


def _largest_scale(magnitude: Tensor, spec: Activations, form: CodeFormat) -> Tensor:
    """Return what no dynamic scale exceeds but for its roundings."""
    if spec.layout is None:
        return torch.ones_like(magnitude)
    largest = group_maximum(magnitude, spec.layout).clamp(spec.batch_amax, spec.amax_limit)
    match spec.layout.rule:
        case "floor":
            scale = (largest * 2.0**-form.top_exponent).clamp_min(_LEAST_POWER)
        case "ceil":
            scale = up(2 * largest / form.divisor).clamp_min(_LEAST_POWER)
        case _:
            scale = up(largest / form.divisor)
    return scale.clamp_min(max(form.least_scale, spec.least_scale))


def _static_error(x: Box, kernel: Rounding, node: str, weight: str) -> Tensor:
    """Return Q of a static scale that holds all of x: half a step, or that of the fp8 number."""
    spec, magnitude = kernel.numerics.activations, x.mag()
    scale = static_quantiser(x, spec, weight, node).scale.hi
    form = spec.codes
    if form.integer:
        least = torch.minimum(magnitude, scale / 2)
        return up((least + magnitude * 2.0**-20) * _DIVISION, 4)
    target = form.grid
    return up((target.unit_roundoff * magnitude + scale * target.underflow) * _DIVISION, 4)


def _nested_error(x: Box, spec: Activations, node: str, weight: str) -> Tensor:
    """Return Q of NVFP4: of a rounding, or of what the largest code cuts off.

    The multiple m of the scale s of the tensor is within 1/16 of amax/(6s), or within 2^-10 where
    that is below 2^-6, or 448 where that is less. So 6·m·s keeps 15/16 of the group's own maximum,
    or all of it but 6·2^-10·s, or 2688·s. A scale that is made from the tensor may be subnormal.
    """
    form, magnitude = spec.codes, x.mag()
    whole, scale = nested_scales(x, spec, weight, node)
    rounded = (form.grid.unit_roundoff * magnitude + scale * form.grid.underflow) * _DIVISION
    least = group_maximum(torch.maximum(x.lo, -x.hi).clamp_min(0), spec.layout)
    kept = (15 / 16) * least * (1 - 2.0**-20)
    cut = torch.minimum(magnitude / 16, (magnitude - kept).clamp_min(0))
    faint = torch.minimum(magnitude, form.above * 2.0**-10 * whole * _DIVISION)
    most = form.above * NESTED_MOST * whole * (1 - 2.0**-20)
    cut = torch.maximum(torch.maximum(cut, faint), (magnitude - most).clamp_min(0))
    found = torch.maximum(rounded, cut + magnitude * 2.0**-20)
    return up(found if spec.input_scale else found + _FAINT_TENSOR, 4)


def _saturation(x: Box, spec: Activations) -> Tensor:
    """Return how much of a number an mx scale may cut off.

    The scale is 2^(floor(log2 amax) - emax), so at least κ = qmax·2^-(emax+1) of the block's own
    maximum is kept, and that maximum is known from both sides only: a number is cut by at most
    1 - κ of itself, and not at all below κ of the least possible maximum.
    """
    form, magnitude = spec.codes, x.mag()
    kept = form.above * 2.0 ** -(form.top_exponent + 1)
    least = torch.maximum(x.lo, -x.hi).clamp_min(0)
    certain = kept * group_maximum(least, spec.layout) * (1 - 2.0**-20)
    cut = torch.minimum(magnitude * (1 - kept), (magnitude - certain).clamp_min(0))
    return cut + magnitude * 2.0**-20


def product(step: Step) -> State:
    """Bound a @ b where both operands vary: Δ(ab) = (a + Δa/2) Δb + Δa (b + Δb/2)."""
    a, b = step.operand(0), step.operand(1)
    drift = matmul(a.middle, b.drift) + matmul(a.drift, b.middle)
    train, infer = matmul(a.train, b.train), matmul(a.infer, b.infer)
    return step.finish(
        train,
        infer,
        drift,
        _matmul_error(step, a.train, b.train, train, step.kernels.train),
        _matmul_error(step, a.infer, b.infer, infer, step.kernels.infer),
        accumulates=True,
    )


def _matmul_error(step: Step, a: Box, b: Box, result: Box, kernel: Rounding) -> Tensor:
    total = magnitude_product(a.mag(), b.mag())
    before = kernel.numerics.attention.term_roundings if step.node.role == "scores" else 2
    return summation_error(a.mag(), b.mag(), total, result.mag(), kernel, before=before)
