"""Elementwise operations (section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint
from kcdsl_backends.affine.independent import Roundings
from kcdsl_backends.affine.kernel import KernelRun, Operand
from kcdsl_backends.affine.reaches import tighten, weighted_norms
from kcdsl_backends.affine.remainder import Remainder
from kcdsl_backends.affine.rules.linear import before_linear, sharpen
from kcdsl_backends.affine.storing import Result, store
from kcdsl_backends.affine.tape import PASS, SAFE, Entry, Pulled
from kcdsl_backends.interval.box import Box, gamma
from kcdsl_backends.interval.errors import NoBound, refuse_overflow, refuse_wide
from kcdsl_backends.interval.readings import added, times
from kcdsl_backends.interval.rules.elementwise import (
    GELU,
    GELU_TANH,
    SILU,
    TANH,
    Smooth,
    activation_error,
    gelu_tanh_curvature,
    scalar_of,
)

SMALL = 2.0**-9
"""Up to this share of the linear part a remainder is worth no norms."""
_OWN = 2.0**-52
"""Relative error of one float64 operation, doubled."""


def total(sign: float) -> Callable[[KernelRun, Node], None]:
    """Return the rule of a + b (sign 1) or a - b (sign -1)."""

    def rule(run: KernelRun, node: Node) -> None:
        refuse_wide(run.nodes, node, run.rounding.numerics)
        a, b = run.operand(node, 0), run.operand(node, 1)
        reference = a.reference + sign * b.reference
        reach = (a.reach + b.reach) * SAFE
        error = run.rounding.u_function * (reference.abs() + reach)
        own = _OWN * reference.abs() + gamma(PASS) * reach

        def pull(adjoint: Adjoint) -> Pulled:
            found = [] if a.index is None else [(a.index, adjoint)]
            return found if b.index is None else [*found, (b.index, adjoint.times(sign))]

        _same_shape(node, a, b)
        parts, internal = Roundings.one(own, error * SAFE), (error + own) * SAFE
        again = added(run.again(node, 0), run.again(node, 1))
        if again is not None:
            internal = internal + run.rounding.u_function * again
        result = Result(reference, pull, reach, internal, roundings=parts, again=again)
        store(run, node, result)

    return rule


def _same_shape(node: Node, *operands: Operand) -> None:
    """Refuse errors that are broadcast; known numbers may be."""
    if any(o.index is not None and o.reference.shape != node.shape for o in operands):
        raise NoBound(node.name, f"{node.op} of shapes that broadcast")


def mul(run: KernelRun, node: Node) -> None:
    """Append a * b."""
    refuse_wide(run.nodes, node, run.rounding.numerics)
    _same_shape(node, run.operand(node, 0), run.operand(node, 1))
    sharpen(run, node, torch.mul)
    a, b = run.operand(node, 0), run.operand(node, 1)
    reference = a.reference * b.reference
    linear = (a.reach * b.reference.abs() + a.reference.abs() * b.reach) * SAFE
    size = (a.size * b.size).expand(reference.shape) * SAFE
    rounded, faint = run.rounding.u_function * size, run.rounding.eta_function
    second = (a.reach * b.reach).expand(reference.shape) * SAFE
    own = _OWN * reference.abs() + gamma(PASS) * linear

    def pull(adjoint: Adjoint) -> Pulled:
        found = [] if a.index is None else [(a.index, adjoint.times(b.reference))]
        return found if b.index is None else [*found, (b.index, adjoint.times(a.reference))]

    rest = (second + own + faint) * SAFE
    parts = Roundings.one(rest, rounded * SAFE)
    first, other = run.again(node, 0), run.again(node, 1)
    again = added(times(first, b.size), times(other, a.size))
    if first is not None and other is not None:
        again = added(again, times(first, other))
    internal = (rounded + rest) * SAFE
    if again is not None:
        internal = internal + run.rounding.u_function * again
    result = Result(reference, pull, linear, internal, roundings=parts, again=again)
    store(run, node, result)


def scale(run: KernelRun, node: Node) -> None:
    """Append x·c or x/c: c may be rounded, and a quotient may be a product with 1/c."""
    name = "factor" if node.op == "scale" else "divisor"
    low, high = scalar_of(node, name, run.rounding)
    if node.op == "divide":
        low, high = 1 / high, 1 / low
    factor, off = low / 2 + high / 2, (high - low) / 2
    index, x = run.entry(node, 0)
    reference, linear = x.reference * factor, x.reach * abs(factor) * SAFE
    moved = off * x.size * SAFE
    size = (reference.abs() + linear + moved) * SAFE
    error = 3 * run.rounding.u_function * size + run.rounding.eta_function + moved
    own = gamma(PASS + 4) * size

    def pull(adjoint: Adjoint) -> Pulled:
        return [(index, adjoint.times(factor))]

    again = times(run.again(node, 0), (abs(factor) + off) * SAFE)
    if again is not None:
        error = error + 3 * run.rounding.u_function * again
    store(run, node, Result(reference, pull, linear, (error + own) * SAFE, again=again))


def shift(run: KernelRun, node: Node) -> None:
    """Append x + offset."""
    index, x = run.entry(node, 0)
    low, high = scalar_of(node, "offset", run.rounding)
    offset, off = low / 2 + high / 2, (high - low) / 2
    most = max(abs(low), abs(high))
    reference = x.reference + offset
    u = run.rounding.u_function
    error = u * (reference.abs() + x.reach + off) + u * (1 + u) * most + off
    own = _OWN * (reference.abs() + most) + gamma(PASS) * x.reach
    again = run.again(node, 0)
    if again is not None:
        error = error + u * again
    internal = (error + own) * SAFE
    result = Result(reference, lambda a: [(index, a)], x.reach, internal, again=again)
    store(run, node, result)


def relu(run: KernelRun, node: Node) -> None:
    """Append max(x, 0), which no kernel rounds."""
    index, x = run.entry(node, 0)
    slope = (x.reference > x.reach).to(torch.float64)
    open_ = (x.reference.abs() <= x.reach).to(torch.float64)
    low, high = (x.reference - x.reach).clamp_min(0), (x.reference + x.reach).clamp_min(0)
    reference = torch.where(open_ > 0, low / 2 + high / 2, x.reference.clamp_min(0))
    half = open_ * ((high - low) / 2 * SAFE + _OWN * high)
    entry = Entry(
        node.name,
        reference,
        torch.where(open_ > 0, half, slope * x.reach) * SAFE,
        lambda a: [(index, a.times(slope))],
        None,
        (half + gamma(PASS) * slope * x.reach) * SAFE,
    )
    refuse_overflow(node.name, entry.size, run.rounding.compute)
    run.computed[node.name] = run.tape.add(entry)
    run.keep(node, run.again(node, 0))


def _gelu_curvature(x: Box) -> tuple[Tensor, Tensor]:
    """Return the range of the second derivative (2 - x²)·density(x), extreme at 0 and ±2."""

    def second(v: Tensor) -> Tensor:
        return torch.exp(-v * v / 2) / math.sqrt(2 * math.pi) * (2 - v * v)

    return _extremes(x, second, 2.0)


def _gelu_tanh_curvature(x: Box) -> tuple[Tensor, Tensor]:
    """Return the range of the second derivative of the form by tanh, extreme at 0 and two more."""
    return _extremes(x, gelu_tanh_curvature, 2.0134807246242579)


def _extremes(x: Box, second: Callable[[Tensor], Tensor], turn: float) -> tuple[Tensor, Tensor]:
    """Return the range of an even function on a box that is extreme at 0 and at ±turn."""
    ends = second(x.lo), second(x.hi)
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    for place in (-turn, 0.0, turn):
        inside = (x.lo <= place + 1e-6) & (x.hi >= place - 1e-6)
        value = second(torch.full_like(x.lo, place))
        low = torch.where(inside, torch.minimum(low, value), low)
        high = torch.where(inside, torch.maximum(high, value), high)
    return low - 2.0**-40, high + 2.0**-40


def _constant(low: float, high: float) -> Callable[[Box], tuple[Tensor, Tensor]]:
    return lambda x: (torch.full_like(x.lo, low), torch.full_like(x.lo, high))


_CURVATURES: dict[str, tuple[Smooth, Callable[[Box], tuple[Tensor, Tensor]]]] = {
    "gelu": (GELU, _gelu_curvature),
    "gelu by tanh": (GELU_TANH, _gelu_tanh_curvature),
    "silu": (SILU, _constant(-0.1, 0.5 + 2.0**-40)),
    "tanh": (TANH, _constant(-0.77, 0.77)),
}


def activation(run: KernelRun, node: Node) -> None:
    """Append a smooth activation: tangent at the reference, remainder by the second derivative."""
    by_tanh = node.attrs.get("approximate") == "tanh"
    function, curvature = _CURVATURES["gelu by tanh" if by_tanh else node.op]
    index, x = run.entry(node, 0)
    h, slope = x.reference, function.derivative(x.reference)
    worth = run.negligible * function.value(h).abs().clamp_max(1.0).sum(-1, keepdim=True)

    before = before_linear(run, node)

    def second(reach: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest |second derivative|, and a bound of Σ|o| in every row."""
        box, square = _around(h, reach)
        steepest = torch.maximum(*(side.abs() for side in curvature(box)))
        sums = (steepest * square).sum(-1, keepdim=True) * SAFE
        if before is not None:
            sums = torch.minimum(sums, before.energy(run.tape, steepest))
        return steepest, sums

    def matters(reach: Tensor) -> Tensor:
        box, square = _around(h, reach)
        large = _matters(*curvature(box), square, slope * reach, SMALL)
        return large & ~(second(reach)[1] <= worth)

    tighten(run, node, index, matters)
    reach = run.tape.entries[index].reach
    box, square = _around(h, reach)
    least, most = curvature(box)
    steepest, sums = second(reach)
    large = _matters(least, most, square, slope * reach, SMALL)
    if before is not None:
        needed = ~large & ~(sums <= worth)
        if run.passing(node, before.source, "norm", needed):
            sums = before.sharpened(run.tape, steepest, sums, needed)
    needed = large & ~(sums <= worth)
    if run.passing(node, index, "norm", needed):
        together = weighted_norms(run.tape, index, steepest.sqrt() * SAFE, needed)
        sums = torch.minimum(sums, together.square() / 2 * SAFE)
    linear = slope.abs() * reach * SAFE
    slopes = function.slopes(box)
    wide = torch.maximum((slopes.lo - slope).abs(), (slopes.hi - slope).abs()) * reach * SAFE
    low = torch.maximum(least.clamp_max(0) * square, -wide)
    high = torch.minimum(most.clamp_min(0) * square, wide)
    again = run.again(node, 0)
    wider = reach if again is None else (reach + again) * SAFE
    around = box if again is None else _around(h, wider)[0]
    twice = times(again, 2.0)
    values, again = function.range(around), times(again, function.slopes(around).mag())
    reference = function.value(h)
    size = (h.abs() + wider) * SAFE
    inside = activation_error(function, node, run.rounding, size, values.mag(), twice)
    trust = 2.0**-45 * torch.maximum(reference.abs(), h.abs().clamp_max(1.0)) + 2.0**-45 * reach
    own = trust + gamma(PASS) * linear + 2.0**-1000
    if again is not None and node.attrs.get("form") == "written":  # its readings are its own
        inside = inside + again
    internal = (inside + own) * SAFE

    def pull(adjoint: Adjoint) -> Pulled:
        return [(index, adjoint.times(slope))]

    remainder = Remainder(low, high, sums).curved()
    extra = torch.maximum(-low, high)
    result = Result(reference, pull, linear, internal, curved=remainder, extra=extra, again=again)
    store(run, node, result)


def _around(reference: Tensor, reach: Tensor) -> tuple[Box, Tensor]:
    """Return the interval of an argument, and half the square of its reach."""
    return Box(reference - reach * SAFE, reference + reach * SAFE), reach * reach / 2 * SAFE


def _matters(least: Tensor, most: Tensor, square: Tensor, linear: Tensor, share: float) -> Tensor:
    """Say of every row [..., 1] whether its remainder may exceed a share of the linear part."""
    loose = (torch.maximum(most.abs(), least.abs()) * square).sum(-1, keepdim=True)
    return ~(loose <= share * linear.abs().sum(-1, keepdim=True))


def rope(run: KernelRun, node: Node) -> None:
    """Append the rotary embedding x∘C + rot(x)∘S with known tables."""
    index, x = run.entry(node, 0)
    if run.spread is not None and any(run.source(node, i).op == "param" for i in (1, 2)):
        raise NoBound(node.name, "the tables of a rotation are parameters that may move")
    cos, sin = run.parameters.plain(run.source(node, 1)), run.parameters.plain(run.source(node, 2))
    half, kernel = node.shape[-1] // 2, run.rounding
    shape = x.reference.shape
    cos, sin = cos.expand(shape), sin.expand(shape)

    def turned(values: Tensor) -> Tensor:
        return torch.cat([-values[..., half:], values[..., :half]], -1)

    def swapped(values: Tensor) -> Tensor:
        return torch.cat([values[..., half:], values[..., :half]], -1)

    reference = x.reference * cos + turned(x.reference) * sin
    linear = (x.reach * cos.abs() + swapped(x.reach) * sin.abs()) * SAFE
    size, apart = x.size, run.again(node, 0)
    if apart is not None:
        size = (size + apart) * SAFE
        apart = (apart * cos.abs() + swapped(apart) * sin.abs()) * SAFE
    terms = (size * cos.abs() + swapped(size) * sin.abs()) * SAFE
    own = gamma(4) * terms + gamma(PASS + 2) * linear
    error = gamma(4, kernel.u_function) * terms + 2 * kernel.eta_function
    parts = Roundings.none((error + own) * SAFE)
    if kernel.coarse:
        refuse_overflow(node.name, terms, kernel.compute)
        early = kernel.compute
        again = 1.0 + 2.0**-10  # the sum of both is rounded too
        cast, faint = again * kernel.unit(early) * terms, 2 * again * kernel.faint(early)
        error, parts = error + cast + faint, parts.cast(cast, faint, kernel.casts)

    def pull(adjoint: Adjoint) -> Pulled:
        window = (*adjoint.window[:-1], (0, 2 * half))
        part = (slice(None), *(slice(a, b) for a, b in window))
        values = adjoint.on(window)
        by_sin = values * sin[part[1:]]
        back = values * cos[part[1:]] + torch.cat([by_sin[..., half:], -by_sin[..., :half]], -1)
        return [(index, Adjoint(back, window, adjoint.shape))]

    internal = (error + own) * SAFE
    result = Result(reference, pull, linear, internal, roundings=parts, again=apart)
    store(run, node, result)
