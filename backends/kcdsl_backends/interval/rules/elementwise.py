"""Elementwise operations (section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.interval.box import Box, gamma, up
from kcdsl_backends.interval.context import Parameter, Step
from kcdsl_backends.interval.errors import NoBound, refuse_overflow
from kcdsl_backends.interval.readings import Apart, added, times
from kcdsl_backends.interval.rounding import Rounding
from kcdsl_backends.interval.state import State, settle


def _relative(kernel: Rounding, exact: Box, times: int = 1) -> Tensor:
    return up(times * kernel.u_function * exact.mag(), 2)


def add(step: Step) -> State:
    """Bound a + b."""
    step.promoted()
    a, b = step.operand(0), step.operand(1)
    train, infer = a.train + b.train, a.infer + b.infer
    return step.finish(
        train,
        infer,
        a.drift + b.drift,
        _relative(step.kernels.train, train),
        _relative(step.kernels.infer, infer),
        apart=_together(a, b),
    )


def sub(step: Step) -> State:
    """Bound a - b."""
    step.promoted()
    a, b = step.operand(0), step.operand(1)
    train, infer = a.train - b.train, a.infer - b.infer
    return step.finish(
        train,
        infer,
        a.drift - b.drift,
        _relative(step.kernels.train, train),
        _relative(step.kernels.infer, infer),
        apart=_together(a, b),
    )


def _together(a: State, b: State) -> tuple[Apart, Apart]:
    """Return how far readings of a sum are apart by those of its terms."""
    return added(a.apart[0], b.apart[0]), added(a.apart[1], b.apart[1])


def mul(step: Step) -> State:
    """Bound a * b: Δ(ab) = (a + Δa/2) Δb + Δa (b + Δb/2)."""
    step.promoted()
    a, b = step.operand(0), step.operand(1)
    train, infer = a.train * b.train, a.infer * b.infer
    return step.finish(
        train,
        infer,
        a.middle * b.drift + a.drift * b.middle,
        up(_relative(step.kernels.train, train) + step.kernels.train.eta_function),
        up(_relative(step.kernels.infer, infer) + step.kernels.infer.eta_function),
        apart=(
            added(times(a.apart[0], b.train.mag()), times(b.apart[0], a.train.mag())),
            added(times(a.apart[1], b.infer.mag()), times(b.apart[1], a.infer.mag())),
        ),
    )


def constant_of(node: Node, name: str) -> float:
    """Return a number of an operation: normal in float32, as its reciprocal is, or a term or
    factor of 0.

    Raises:
        NoBound: another one, which loses more than a relative rounding.
    """
    constant = float(node.attrs[name])
    if constant == 0 and name != "divisor":
        return constant
    if not 2.0**-126 <= abs(constant) <= 2.0**126:
        raise NoBound(node.name, f"the constant {constant!r} leaves the range of float32")
    return constant


def scalar_of(node: Node, name: str, kernel: Rounding) -> tuple[float, float]:
    """Return between which numbers a kernel takes the number of an operation (section 4).

    The factor of attention scores is one of the kernel, which it does not round to their format.

    Raises:
        NoBound: as `constant_of` and `Rounding.scalar`; or a divisor that may be 0.
    """
    constant = constant_of(node, name)
    if node.role == "scores" and name != "offset":
        return constant, constant
    low, high = kernel.scalar(constant, kernel.format_for(node.role, node.op), node.name)
    if name == "divisor" and low * high <= 0:
        raise NoBound(node.name, f"the divisor {constant!r} may be rounded to 0")
    return low, high


def _off(step: Step, name: str, away: Callable[[Box, float], Box]) -> tuple[Box, Box] | None:
    """Return what rounding the number of an operation first adds in either kernel.

    `away` is what using another number in its place adds.
    """
    x, constant, found = step.operand(0), constant_of(step.node, name), []
    for kernel, own in ((step.kernels.train, x.train), (step.kernels.infer, x.infer)):
        ends = scalar_of(step.node, name, kernel)
        found.append([Box.point(torch.zeros_like(own.lo))] * (constant in ends))
        found[-1] += [away(own, end) for end in ends if end != constant]
    if all(len(parts) == 1 for parts in found):
        return None
    train, infer = (reduce(Box.hull, parts) for parts in found)
    return train, infer


def _by_constant(step: Step, name: str, apply: Callable[[Box], Box]) -> State:
    """Bound x·c or x/c: c may be rounded, and a quotient may be a product with 1/c: 3 roundings."""
    x, constant = step.operand(0), constant_of(step.node, name)

    def away(box: Box, end: float) -> Box:
        """Return x·(end - c), or x·(1/end - 1/c)."""
        change = Box.point(torch.tensor(end, dtype=torch.float64)) - Box.point(
            torch.tensor(constant, dtype=torch.float64)
        )
        if name == "factor":
            return box * change
        over = torch.tensor(-end * constant, dtype=torch.float64)
        part = change * Box.point(1 / over).reaching((1 / over).abs() * 2.0**-50)
        return box * part

    moved = _off(step, name, away)

    def steepest(kernel: Rounding) -> float:
        ends = (constant, *scalar_of(step.node, name, kernel))
        return max(abs(c) if name == "factor" else 1 / abs(c) for c in ends) * (1 + 2.0**-50)

    train, infer = apply(x.train), apply(x.infer)
    sizes = [apply(x.train), apply(x.infer)]
    if moved is not None:
        sizes = [own + more for own, more in zip(sizes, moved, strict=True)]
    return step.finish(
        train,
        infer,
        apply(x.drift),
        up(_relative(step.kernels.train, sizes[0], 3) + step.kernels.train.eta_function),
        up(_relative(step.kernels.infer, sizes[1], 3) + step.kernels.infer.eta_function),
        moved=moved,
        apart=(
            times(x.apart[0], steepest(step.kernels.train)),
            times(x.apart[1], steepest(step.kernels.infer)),
        ),
    )


def scale(step: Step) -> State:
    """Bound x * factor."""
    factor = constant_of(step.node, "factor")
    return _by_constant(step, "factor", lambda box: box.scaled(factor))


def divide(step: Step) -> State:
    """Bound x / divisor."""
    divisor = constant_of(step.node, "divisor")

    def apply(box: Box) -> Box:
        ends = Box(box.lo / divisor, box.hi / divisor)
        ordered = ends if divisor > 0 else Box(ends.hi, ends.lo)
        return ordered.widen(torch.zeros_like(ordered.lo))

    return _by_constant(step, "divisor", apply)


def shift(step: Step) -> State:
    """Bound x + offset."""
    x, offset = step.operand(0), constant_of(step.node, "offset")
    constant = Box.point(torch.full_like(x.train.lo, offset))
    train, infer = x.train + constant, x.infer + constant

    def away(box: Box, end: float) -> Box:
        return Box.point(torch.full_like(box.lo, end)) - constant

    moved = _off(step, "offset", away)

    def rounded(kernel: Rounding, value: Box, more: Box | None) -> Tensor:
        u = kernel.u_function  # the sum rounds what the offset was off by once more
        value = value if more is None else value + more
        return up(_relative(kernel, value) + u * (1 + u) * abs(offset), 4)

    return step.finish(
        train,
        infer,
        x.drift,
        rounded(step.kernels.train, train, moved and moved[0]),
        rounded(step.kernels.infer, infer, moved and moved[1]),
        moved=moved,
        apart=x.apart,
    )


def relu(step: Step) -> State:
    """Bound max(x, 0), which no kernel rounds."""
    x = step.operand(0)

    def clamp(box: Box) -> Box:
        return Box(box.lo.clamp_min(0), box.hi.clamp_min(0))

    both_on = (x.train.lo >= 0) & (x.infer.lo >= 0)
    both_off = (x.train.hi <= 0) & (x.infer.hi <= 0)
    low = torch.where(both_on, x.drift.lo, x.drift.lo.clamp_max(0))
    high = torch.where(both_on, x.drift.hi, x.drift.hi.clamp_min(0))
    zero = torch.zeros_like(low)
    drift = Box(torch.where(both_off, zero, low), torch.where(both_off, zero, high))
    return settle(step.node.name, clamp(x.train), clamp(x.infer), drift, x.apart)


@dataclass(frozen=True, slots=True)
class Smooth:
    """A smooth activation: its value, derivative, the places where either turns, and its rounding.

    `turn` is the place of the minimum (None: monotone); `derivative_turns` the places where the
    derivative is extreme. `error` bounds the rounding inside a kernel from (argument, value, u).
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    turn: float | None
    derivative_turns: tuple[float, ...]
    error: Callable[[Tensor, Tensor, float], Tensor]

    def range(self, x: Box) -> Box:
        """Return the range of the function on a box."""
        at_lo, at_hi = self.value(x.lo), self.value(x.hi)
        low, high = torch.minimum(at_lo, at_hi), torch.maximum(at_lo, at_hi)
        if self.turn is not None:
            least = self.value(torch.full_like(x.lo, self.turn))
            inside = (x.lo <= self.turn + 1e-6) & (x.hi >= self.turn - 1e-6)
            low = torch.where(inside, torch.minimum(low, least), low)
        return _trusted(Box(low, high), x.mag())

    def slopes(self, x: Box) -> Box:
        """Return the range of the derivative on a box."""
        at_lo, at_hi = self.derivative(x.lo), self.derivative(x.hi)
        low, high = torch.minimum(at_lo, at_hi), torch.maximum(at_lo, at_hi)
        for place in self.derivative_turns:
            extreme = self.derivative(torch.full_like(x.lo, place))
            inside = (x.lo <= place + 1e-6) & (x.hi >= place - 1e-6)
            low = torch.where(inside, torch.minimum(low, extreme), low)
            high = torch.where(inside, torch.maximum(high, extreme), high)
        return _trusted(Box(low, high), x.mag())


def _trusted(box: Box, magnitude: Tensor) -> Box:
    """Push a box outward by the error of evaluating exp, tanh and erf (4 ulp each) in float64."""
    return box.widen(up(2.0**-46 * torch.maximum(box.mag(), magnitude.clamp_max(1.0)) + 2.0**-1000))


def _gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return 0.5 * torch.erfc(-x / math.sqrt(2)) + x * density


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + x * s * torch.sigmoid(-x)


GELU = Smooth(
    lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2)),
    _gelu_slope,
    -0.7517915246935645,
    (-math.sqrt(2), math.sqrt(2)),
    lambda x, y, u: 16 * u * x + 2.0**-100,
)


def _cubic(x: Tensor) -> Tensor:
    """Return 2√(2/π)(x + 0.044715 x³); beyond 30 its sigmoid is 0 or 1 in float64."""
    near = x.clamp(-30, 30)
    return 2 * _ROOT * (near + _CUBE * near**3)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    near = x.clamp(-30, 30)
    argument = _cubic(near)
    s = torch.sigmoid(argument)
    return s + near * s * torch.sigmoid(-argument) * (2 * _ROOT * (1 + 3 * _CUBE * near**2))


def gelu_tanh_curvature(x: Tensor) -> Tensor:
    """Return the second derivative, s(u' + x·u''/2 - x·t·u'²) with t = tanh u, s = 1 - t²."""
    near = x.clamp(-30, 30)
    t = torch.tanh(_cubic(near) / 2)
    first = _ROOT * (1 + 3 * _CUBE * near**2)
    flat = 4 * torch.sigmoid(_cubic(near)) * torch.sigmoid(-_cubic(near))
    return flat * (first + 3 * _ROOT * _CUBE * near**2 - near * t * first**2)


_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715
GELU_TANH = Smooth(
    lambda x: x * torch.sigmoid(_cubic(x)),
    _gelu_tanh_slope,
    -0.7524614220710163,
    (-1.4185040087908284, 1.4185040087908284),
    lambda x, y, u: 16 * u * x + 2.0**-100,
)
SILU = Smooth(
    lambda x: x * torch.sigmoid(x),
    _silu_slope,
    -1.2784645427610738,
    (-2.399357280520841, 2.399357280520841),
    lambda x, y, u: 16 * u * y + 2.0**-100,
)
TANH = Smooth(
    torch.tanh,
    lambda x: 1 / torch.cosh(x.clamp(-300, 300)) ** 2,
    None,
    (0.0,),
    lambda x, y, u: 16 * u * y + 2.0**-100,
)


def gelu(node: Node) -> Smooth:
    """Return the form of GELU that a node is."""
    return GELU_TANH if node.attrs.get("approximate") == "tanh" else GELU


def activation(function_of: Callable[[Node], Smooth]) -> Callable[[Step], State]:
    """Return the rule of a smooth activation: Δφ = φ'(ξ) Δx for some ξ between both arguments."""

    def rule(step: Step) -> State:
        x, node, function = step.operand(0), step.node, function_of(step.node)
        train, infer = function.range(x.train), function.range(x.infer)
        slopes = function.slopes(x.train.hull(x.infer))
        drift, steep = slopes * x.drift, slopes.mag()
        return step.finish(
            train,
            infer,
            drift,
            up(_activation(function, node, step.kernels.train, x.train, train, x.apart[0]), 2),
            up(_activation(function, node, step.kernels.infer, x.infer, infer, x.apart[1]), 2),
            apart=(times(x.apart[0], steep), times(x.apart[1], steep)),
        )

    return rule


def _activation(
    function: Smooth, node: Node, kernel: Rounding, x: Box, y: Box, apart: Apart
) -> Tensor:
    return activation_error(function, node, kernel, x.mag(), y.mag(), times(apart, 2.0))


def activation_error(
    function: Smooth, node: Node, kernel: Rounding, x: Tensor, y: Tensor, apart: Apart = None
) -> Tensor:
    """Return E of an activation: x and y are magnitudes of its argument and its value.

    Of a silu that is written out the sigmoid is stored before the product, and may be of a reading
    of x up to `apart` from the one that it multiplies.
    """
    by_argument = function is SILU and kernel.numerics.sigmoid == "absolute"
    error = function.error(x, x if by_argument else y, kernel.u_function)
    if node.attrs.get("form", "fused") == "fused":
        return error
    form = kernel.format_for(node.role, node.op)
    turned = torch.zeros_like(y) if apart is None else x * apart / 4
    error, y = error + turned, y + turned
    if not kernel.free and form.precision >= max(24, kernel.inner(False).precision):
        return error
    stored = kernel.unit(form) * y + kernel.faint(form) * x
    return (error + stored) * (1.0 + 2.0**-10)


def rope(step: Step) -> State:
    """Bound the rotary embedding x∘C + rot(x)∘S with known tables."""
    cos = step.kernels.plain(step.operand_node(1))
    sin = step.kernels.plain(step.operand_node(2))
    if cos.moved is not None or sin.moved is not None:
        raise NoBound(step.node.name, "the tables of a rotation are parameters that may move")
    x = step.operand(0)
    (train, infer, drift), errors = rotated(step, x, cos, sin)
    apart = turned_apart(x.apart[0], cos.train, sin.train)
    other = turned_apart(x.apart[1], cos.infer, sin.infer)
    return step.finish(train, infer, drift, *errors, apart=(apart, other))


def turned_apart(apart: Apart, cos: Tensor, sin: Tensor) -> Apart:
    """Return how far rotated readings are apart."""
    if apart is None:
        return None
    first, second = apart.chunk(2, -1)
    return added(times(apart, cos.abs()), times(torch.cat([second, first], -1), sin.abs()))


def rotated(
    step: Step, x: State, cos: Parameter, sin: Parameter
) -> tuple[tuple[Box, Box, Box], tuple[Tensor, Tensor]]:
    """Return T, I and D of x∘C + rot(x)∘S before it is stored, and E of both kernels."""

    def rotate(box: Box) -> Box:
        half = box.shape[-1] // 2
        return Box(
            torch.cat([-box.hi[..., half:], box.lo[..., :half]], -1),
            torch.cat([-box.lo[..., half:], box.hi[..., :half]], -1),
        )

    def turned(box: Box, c: Tensor, s: Tensor) -> Box:
        return box * Box.point(c) + rotate(box) * Box.point(s)

    def error(box: Box, c: Tensor, s: Tensor, kernel: Rounding) -> Tensor:
        terms = up(box.mag() * c.abs() + rotate(box).mag() * s.abs(), 2)
        total = gamma(4, kernel.u_function) * terms + 2 * kernel.eta_function
        if kernel.coarse:
            refuse_overflow(step.node.name, terms, kernel.compute, ", a product of the rotation,")
            u, eta = kernel.unit(kernel.compute), kernel.faint(kernel.compute)
            total = total + (u * terms + 2 * eta) * (1.0 + 2.0**-10)
        return up(total, 4)

    drift = turned(x.drift, cos.infer, sin.infer) + (
        x.train * cos.difference + rotate(x.train) * sin.difference
    )
    boxes = turned(x.train, cos.train, sin.train), turned(x.infer, cos.infer, sin.infer), drift
    return boxes, (
        error(x.train, cos.train, sin.train, step.kernels.train),
        error(x.infer, cos.infer, sin.infer, step.kernels.infer),
    )
