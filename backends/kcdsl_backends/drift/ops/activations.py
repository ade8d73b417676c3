"""Activations: relu, tanh, silu, gelu (section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint, Row
from kcdsl_backends.drift.affine.error_bounds import tighten_error, weighted_norms
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.row_ellipsoids import squares
from kcdsl_backends.drift.affine.tape import INPUT, PASS, Adjoints, Remainder, TapeEntry
from kcdsl_backends.drift.boxes import EPS, SAFE, Box, gamma, refuse_overflow, up
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding, times
from kcdsl_backends.drift.boxes.state import State, Step, settle
from kcdsl_backends.drift.linear import LinearPart, LinearRun
from kcdsl_backends.drift.linear.tape import (
    LINEAR_PASS,
    Functional,
    LinearEntry,
    ReluChange,
    ReluPlanes,
    Source,
    added_adjoints,
    first_slopes,
)
from kcdsl_backends.drift.ops.linear import before_linear
from kcdsl_backends.drift.ops.operation import Operation, Pointwise


def interval_relu(step: Step) -> State:
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


Error = Callable[[Tensor, Tensor, Rounding], Tensor]


@dataclass(frozen=True, slots=True)
class Smooth:
    """A smooth activation: its value, first and second derivative, their extremes, its rounding.

    `turn` is the place of the minimum (None: monotone); `derivative_turns` the places where the
    derivative is extreme. The second derivative is even and extreme at 0 and at ±`second_turn`, or
    lies between two numbers on all reals. `steepest` and `third` bound the magnitudes of the second
    and of the third derivative. `error` bounds the rounding inside a kernel from the magnitudes of
    the argument and of the value.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]
    turn: float | None
    derivative_turns: tuple[float, ...]
    second_turn: float | tuple[float, float]
    steepest: float
    third: float
    error: Error

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

    def curvature(self, x: Box) -> tuple[Tensor, Tensor]:
        """Return the range of the second derivative on a box."""
        if isinstance(self.second_turn, tuple):
            least, most = self.second_turn
            return torch.full_like(x.lo, least), torch.full_like(x.lo, most)
        ends = self.second(x.lo), self.second(x.hi)
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        for place in (-self.second_turn, 0.0, self.second_turn):
            inside = (x.lo <= place + 1e-6) & (x.hi >= place - 1e-6)
            value = self.second(torch.full_like(x.lo, place))
            low = torch.where(inside, torch.minimum(low, value), low)
            high = torch.where(inside, torch.maximum(high, value), high)
        return low - 2.0**-40, high + 2.0**-40


def _trusted(box: Box, magnitude: Tensor) -> Box:
    """Widen a box by the error of evaluating exp, tanh and erf (4 ulp each) in float64."""
    return box.widen(up(2.0**-46 * torch.maximum(box.mag(), magnitude.clamp_max(1.0)) + 2.0**-1000))


def function_error(size: Callable[[Tensor, Tensor, Rounding], Tensor]) -> Error:
    """Return the error of a function that has an error of 16 ulp of the magnitude `size`."""
    return lambda x, y, kernel: 16 * kernel.u_function * size(x, y, kernel) + 2.0**-100


def absolute_sigmoid(kernel: Rounding) -> bool:
    """Return whether the error of a sigmoid is absolute: some ulp of 1, however small it is."""
    return kernel.numerics.sigmoid == "absolute"


def _gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return 0.5 * torch.erfc(-x / math.sqrt(2)) + x * density


def _gelu_second(x: Tensor) -> Tensor:
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (2 - x * x)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + x * s * torch.sigmoid(-x)


def _silu_second(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _tanh_second(x: Tensor) -> Tensor:
    t = torch.tanh(x)
    return -2 * t * (1 - t * t)


GELU = Smooth(
    lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2)),
    _gelu_slope,
    _gelu_second,
    -0.7517915246935645,
    (-math.sqrt(2), math.sqrt(2)),
    2.0,
    0.7979,
    0.7788,
    function_error(lambda x, y, kernel: x),
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


def _gelu_tanh_second(x: Tensor) -> Tensor:
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
    _gelu_tanh_second,
    -0.7524614220710163,
    (-1.4185040087908284, 1.4185040087908284),
    2.0134807246242579,
    0.7979,
    0.7788,
    function_error(lambda x, y, kernel: x),
)
SILU = Smooth(
    lambda x: x * torch.sigmoid(x),
    _silu_slope,
    _silu_second,
    -1.2784645427610738,
    (-2.399357280520841, 2.399357280520841),
    (-0.1, 0.5 + 2.0**-40),
    0.5001,
    0.3083,
    function_error(lambda x, y, kernel: x if absolute_sigmoid(kernel) else y),
)
TANH = Smooth(
    torch.tanh,
    lambda x: 1 / torch.cosh(x.clamp(-300, 300)) ** 2,
    _tanh_second,
    None,
    (0.0,),
    (-0.77, 0.77),
    0.7699,
    2.0001,
    function_error(lambda x, y, kernel: y),
)


Choice = Callable[[Node], Smooth]
"""Returns the function that a node applies."""


def interval_activation(choice: Choice, step: Step) -> State:
    """Bound a smooth activation: Δφ = φ'(ξ) Δx for some ξ between both arguments."""
    x, node, function = step.operand(0), step.node, choice(step.node)
    exact = function.range(x.train), function.range(x.infer)
    slopes = function.slopes(x.train.hull(x.infer))
    kernels, apart = (step.kernels.train, step.kernels.infer), []
    errors = []
    for kernel, box, y, own in zip(kernels, (x.train, x.infer), exact, x.apart, strict=True):
        twice = times(own, 2.0)
        errors.append(up(activation_error(function, node, kernel, box.mag(), y.mag(), twice), 2))
        apart.append(times(own, slopes.mag()))
    wrong, away = (errors[0], errors[1]), (apart[0], apart[1])
    return step.finish(exact, slopes * x.drift, wrong, apart=away)


def activation_error(
    function: Smooth, node: Node, kernel: Rounding, x: Tensor, y: Tensor, apart: Apart = None
) -> Tensor:
    """Return E of an activation: x and y are magnitudes of its argument and its value.

    If a silu is written out, its sigmoid is stored before the product, and may be of a reading of x
    up to `apart` from the factor x.
    """
    error = function.error(x, y, kernel)
    if node.attrs.get("form", "fused") == "fused":
        return error
    form = kernel.format_for(node.role, node.op)
    turned = torch.zeros_like(y) if apart is None else x * apart / 4
    error, y = error + turned, y + turned
    if not kernel.free and form.precision >= max(24, kernel.inner(False).precision):
        return error
    stored = kernel.unit(form) * y + kernel.faint(form) * x
    return (error + stored) * (1.0 + 2.0**-10)


STEEP = 2.0**-3
"""A remainder above this share of the linear part is bounded by ellipsoids."""
SMALL = 2.0**-9
"""A remainder up to this share of the linear part is not bounded by norms."""
_OWN = 2.0**-52
"""Relative error of one float64 operation, doubled."""


def affine_relu(run: KernelRun, node: Node) -> None:
    """Append max(x, 0), which no kernel rounds."""
    index, x = run.entry(node, 0)
    slope = (x.reference > x.error_bound).to(torch.float64)
    open_ = (x.reference.abs() <= x.error_bound).to(torch.float64)
    low, high = (
        (x.reference - x.error_bound).clamp_min(0),
        (x.reference + x.error_bound).clamp_min(0),
    )
    reference = torch.where(open_ > 0, low / 2 + high / 2, x.reference.clamp_min(0))
    half = open_ * ((high - low) / 2 * SAFE + _OWN * high)
    entry = TapeEntry(
        node.name,
        reference,
        torch.where(open_ > 0, half, slope * x.error_bound) * SAFE,
        lambda a: [(index, a.times(slope))],
        None,
        (half + gamma(PASS) * slope * x.error_bound) * SAFE,
    )
    refuse_overflow(node.name, entry.size, run.rounding.compute)
    run.computed[node.name] = run.tape.add(entry)
    run.keep(node, run.again(node, 0))


def affine_activation(choice: Choice, run: KernelRun, node: Node) -> None:
    """Append a smooth activation: tangent at the reference, remainder by the second derivative."""
    function = choice(node)
    index, x = run.entry(node, 0)
    h, slope = x.reference, function.derivative(x.reference)
    worth = run.small(node, function.value(h).abs().clamp_max(1.0).sum(-1, keepdim=True))

    before = None if node.inputs[0] in run.by_length else before_linear(run, node)

    def known(error_bound: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the range of the second derivative, a bound of Σ|o| in every row, and the rows
        [..., 1] whose remainder may be more than a small share of the linear part."""
        box, square = _around(h, error_bound)
        least, most = function.curvature(box)
        sums = (torch.maximum(least.abs(), most.abs()) * square).sum(-1, keepdim=True)
        large = ~(sums <= SMALL * (slope * error_bound).abs().sum(-1, keepdim=True))
        sums = sums * SAFE
        if before is not None:
            steepest = torch.maximum(least.abs(), most.abs())
            sums = torch.minimum(sums, before.weighted_squares(run.tape, steepest))
        return least, most, sums, large

    def matters(error_bound: Tensor) -> Tensor:
        _, _, sums, large = known(error_bound)
        return large & ~(sums <= worth)

    near, row_squares = run.tape.near, None
    if run.again(node, 0) is None:
        linear = (slope * x.error_bound).abs().sum(-1, keepdim=True)
        bent = bool((known(x.error_bound)[2] > STEEP * linear).any())
        row_squares = squares(run, node, index, matters(x.error_bound) & bent)
    later = near != INPUT and not bool(run.tape.radius.any())  # passes may go on to the input
    floors = run.tape.floors
    tighten_error(run, node, index, matters, floors[:1] if later else floors)
    least, most, sums, large = known(run.tape.entries[index].error_bound)
    steepest, sharper = torch.maximum(least.abs(), most.abs()), torch.full_like(sums, torch.inf)
    if before is not None:
        needed = ~large & ~(sums <= worth)
        if run.passing(node, before.source, "norm", needed, near):
            sharper = before.sharpened(run.tape, steepest, sharper, needed, near)
    if row_squares is not None:
        sharper = torch.minimum(sharper, row_squares.whole(steepest).square() / 2 * SAFE)
    needed = large & ~(torch.minimum(sums, sharper) <= worth)
    if row_squares is None and run.passing(node, index, "norm", needed, near):
        together = weighted_norms(run.tape, index, steepest.sqrt() * SAFE, needed, near)
        sharper = torch.minimum(sharper, together.square() / 2 * SAFE)
    if later:
        tighten_error(run, node, index, lambda e: matters(e) & ~(sharper <= worth), floors[1:])
    error_bound = run.tape.entries[index].error_bound
    box, square = _around(h, error_bound)
    least, most, sums, _ = known(error_bound)
    sums = torch.minimum(sums, sharper)
    linear = slope.abs() * error_bound * SAFE
    slopes = function.slopes(box)
    wide = torch.maximum((slopes.lo - slope).abs(), (slopes.hi - slope).abs()) * error_bound * SAFE
    low = torch.maximum(least.clamp_max(0) * square, -wide)
    high = torch.minimum(most.clamp_min(0) * square, wide)
    again = run.again(node, 0)
    wider = error_bound if again is None else (error_bound + again) * SAFE
    around = box if again is None else _around(h, wider)[0]
    twice = times(again, 2.0)
    values, again = function.range(around), times(again, function.slopes(around).mag())
    reference = function.value(h)
    size = (h.abs() + wider) * SAFE
    inside = activation_error(function, node, run.rounding, size, values.mag(), twice)
    trust = (
        2.0**-45 * torch.maximum(reference.abs(), h.abs().clamp_max(1.0)) + 2.0**-45 * error_bound
    )
    own = trust + gamma(PASS) * linear + 2.0**-1000
    if again is not None and node.attrs.get("form") == "written":  # it has its own readings of x
        inside = inside + again
    internal = (inside + own) * SAFE

    def vjp(adjoint: Adjoint) -> Adjoints:
        return [(index, adjoint.times(slope))]

    half = torch.maximum(least.abs(), most.abs()) / 2 * SAFE

    def by_squares(row: Row, weights: Tensor) -> Tensor:
        assert row_squares is not None
        return row_squares.root(row, weights * half[row]).square() * SAFE

    remainder = Remainder(low, high, sums, None if row_squares is None else by_squares).nonlinear()
    extra = torch.maximum(-low, high)
    result = Result(reference, vjp, linear, internal, nonlinear=remainder, extra=extra, again=again)
    place = round_result(run, node, result)
    radius = run.tape.entries[place].radius
    if row_squares is not None and node.name not in run.private and radius is not None:
        found = replace(row_squares, factor=slopes.mag(), own=radius)
        run.tape.entries[place] = replace(run.tape.entries[place], squares=found)


def _around(reference: Tensor, error_bound: Tensor) -> tuple[Box, Tensor]:
    """Return the interval of an argument, and half the square of its error bound."""
    return Box(
        reference - error_bound * SAFE, reference + error_bound * SAFE
    ), error_bound * error_bound / 2 * SAFE


def linear_relu(run: LinearRun, node: Node) -> None:
    """Append max(x, 0) by planes with free slopes."""
    x, state = run.operand(node, 0), run.state(run.source(node, 0))
    after = run.state(node)
    reference = x.reference.clamp_min(0)
    own = ReluChange(Box.point(x.reference), x.deviation, state.train)
    pair = ReluChange(state.train, state.drift, state.infer)
    planes = ReluPlanes(x.index, x.reference, own, pair, first_slopes(own, pair))
    boxes = (after.train - Box.point(reference), after.drift)
    entry = LinearEntry(node.name, reference, *boxes, lambda a: [], planes=planes)
    run.index[node.name] = run.tape.add(entry)


def linear_activation(choice: Choice, run: LinearRun, node: Node) -> None:
    """Append a smooth activation by its slopes at the midpoints of deviation and drift."""
    function = choice(node)
    x = run.operand(node, 0)
    h = x.reference
    (ec, er), (dc, dr) = x.deviation.midpoint(), x.drift.midpoint()
    middle = h + ec
    reference, at_middle, at_moved = (function.value(v) for v in (h, middle, middle + dc))
    slope, steep = function.derivative(middle), function.derivative(middle + dc)
    trust = 2.0**-45 * torch.maximum(
        torch.maximum(h.abs(), middle.abs()) + dc.abs(), torch.ones_like(h)
    )
    # deviation: |φ(m + ê) - φ(m) - φ'(m) ê| <= K ê²/2
    k_e, _ = _curvature(function, middle, er)
    e_centre = at_middle - reference - slope * ec
    e_radius = k_e * er * er / 2 + trust * (1 + er)
    # drift: K (|ê||d̂| + d̂²/2) + |Δ_c| ω |ê|, ω the range of φ'' where m + ê + [0, Δ] lies
    k_d, wide = _curvature(function, middle + dc / 2, er + dr + dc.abs() / 2)
    change = _difference(function, middle, dc, at_moved - at_middle, trust)
    turn = _slope_difference(function, middle, dc, steep - slope, trust)
    d_centre = change.centre - turn.centre * ec - steep * dc
    d_radius = (
        k_d * (er * dr + dr * dr / 2)
        + dc.abs() * wide * er
        + change.radius
        + turn.radius * er
        + trust * dr
    )
    away = gamma(LINEAR_PASS) * 4
    run.append(
        node,
        reference,
        _along(x.index, slope, turn.centre, steep),
        LinearPart(e_centre, (e_radius + away * (slope.abs() * (er + ec.abs()))) * SAFE),
        LinearPart(
            d_centre,
            (
                d_radius
                + away * (steep.abs() * (dr + dc.abs()) + turn.centre.abs() * (er + ec.abs()))
            )
            * SAFE
            + 2.0**-1000,
        ),
    )


def _along(index: int, slope: Tensor, turn: Tensor, steep: Tensor) -> Callable[..., list[Source]]:
    moves = bool(turn.any())

    def vjp(f: Functional) -> list[Source]:
        on_e: Adjoint | None = None if f.deviation is None else f.deviation.times(slope)
        on_d = None if f.drift is None else f.drift.times(steep)
        if f.drift is not None and moves:
            on_e = added_adjoints(on_e, f.drift.times(turn))
        return [(index, Functional(on_e, on_d))]

    return vjp


def _curvature(function: Smooth, middle: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest |φ''| on middle ± radius, and the length of its range."""
    value = function.second(middle)
    spread, most = function.third * radius + 2.0**-40, torch.full_like(value, function.steepest)
    largest = torch.minimum(value.abs() + spread, most) * SAFE
    return largest, torch.minimum(2 * spread, 2 * most) * SAFE


def _difference(
    function: Smooth, middle: Tensor, step: Tensor, direct: Tensor, trust: Tensor
) -> LinearPart:
    """Return φ(m + s) - φ(m): by the difference, or by the slope where its error is smaller."""
    span = function.slopes(
        Box(torch.minimum(middle, middle + step), torch.maximum(middle, middle + step))
    )
    slope, radius = span.midpoint()
    by_slope = up((radius + 2 * EPS * slope.abs()) * step.abs() * SAFE)
    by_values = 2 * trust
    better = by_slope < by_values
    return LinearPart(
        torch.where(better, slope * step, direct), torch.where(better, by_slope, by_values)
    )


def _slope_difference(
    function: Smooth, middle: Tensor, step: Tensor, direct: Tensor, trust: Tensor
) -> LinearPart:
    """Return φ'(m + s) - φ'(m): by the difference, or by the curvature where it is better."""
    value = function.second(middle + step / 2)
    by_curve = ((function.third * step.abs() / 2 + 2.0**-40) * step.abs()) * SAFE
    by_values = 2 * trust
    better = by_curve < by_values
    return LinearPart(
        torch.where(better, value * step, direct), torch.where(better, by_curve, by_values)
    )


def activation(choice: Choice, pointwise: Pointwise) -> Operation:
    """Return the operation of a smooth activation."""
    return Operation(
        partial(interval_activation, choice),
        partial(affine_activation, choice),
        partial(linear_activation, choice),
        (0,),
        pointwise,
    )


def _gelu(node: Node) -> Smooth:
    return GELU_TANH if node.attrs.get("approximate") == "tanh" else GELU


OPERATIONS = {
    "relu": Operation(
        interval_relu, affine_relu, linear_relu, (0,), Pointwise(lambda x, node: torch.relu(x))
    ),
    "tanh": activation(
        lambda node: TANH, Pointwise(lambda x, node: torch.tanh(x), lambda x, y: 16 * y.abs())
    ),
    "silu": activation(
        lambda node: SILU,
        Pointwise(lambda x, node: x * torch.sigmoid(x), lambda x, y: 16 * y.abs()),
    ),
    "gelu": activation(
        _gelu,
        Pointwise(
            lambda x, node: functional.gelu(x, approximate=node.attrs.get("approximate", "none")),
            lambda x, y: 16 * x.abs(),
        ),
    ),
}
