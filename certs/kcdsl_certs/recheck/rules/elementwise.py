"""Elementwise arithmetic, activation functions and rotary embedding (section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import ULP, Box, Floats
from kcdsl_certs.recheck.rules.state import (
    Scene,
    State,
    Value,
    gamma,
    middle,
    numeric,
    recast,
    reduce,
    settle,
    target,
)
from kcdsl_certs.recheck.spec import FLOAT32, Kernel
from kcdsl_certs.recheck.versions import Own, by, plus
from kcdsl_certs.rejected import Rejected

SLACK = 2.0**-100
_TRUST = 2.0**-48  # 4 ulp of a library function and the arithmetic around it
_BELOW_NORMAL = 2.0**-126


def add(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return a + b."""
    return _linear_pair(scene, node, inputs, box.add)


def sub(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return a - b."""
    return _linear_pair(scene, node, inputs, box.sub)


def _linear_pair(
    scene: Scene, node: Node, inputs: list[Value], combine: Callable[[Box, Box], Box]
) -> State:
    node.attrs.exactly()
    a, b = numeric(inputs[0]), numeric(inputs[1])
    y_t, y_i = combine(a.t, b.t), combine(a.i, b.i)
    errors = _relative(scene.train, y_t), _relative(scene.infer, y_i)
    own = plus(a.own[0], b.own[0]), plus(a.own[1], b.own[1])
    return settle(scene, node, (y_t, y_i, combine(a.d, b.d)), errors, own=own)


def mul(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return a * b."""
    node.attrs.exactly()
    a, b = numeric(inputs[0]), numeric(inputs[1])
    y_t, y_i = box.mul(a.t, b.t), box.mul(a.i, b.i)
    d = box.add(box.mul(middle(a), b.d), box.mul(a.d, middle(b)))
    errors = _relative(scene.train, y_t, 1, True), _relative(scene.infer, y_i, 1, True)
    own = (
        plus(by(a.own[0], box.mag(b.t)), by(b.own[0], box.mag(a.t))),
        plus(by(a.own[1], box.mag(b.i)), by(b.own[1], box.mag(a.i))),
    )
    return settle(scene, node, (y_t, y_i, d), errors, own=own)


def _relative(kernel: Kernel, y: Box, count: int = 1, faint: bool = False) -> Floats:
    """Return count·u_f·mag(Y), and η_f where a product may underflow."""
    form = kernel.inner
    return box.up(count * form.u * box.mag(y) + (underflow(kernel) if faint else 0.0))


def underflow(kernel: Kernel) -> float:
    """Return η_f: one smallest subnormal of the inner format."""
    return 2 * kernel.inner.eta if kernel.inner == FLOAT32 else kernel.inner.eta


def scale(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x * factor."""
    factor = constant(node, "factor")

    def ends(kernel: Kernel) -> tuple[float, float]:
        return kernel.scalar(factor, node)

    def move(b: Box) -> Box:
        return box.mul(b, box.exact(np.array(factor)))

    return _scaled(scene, node, inputs, factor, move, ends)


def divide(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x / divisor."""
    divisor = constant(node, "divisor")
    if divisor == 0:
        raise Rejected("graph/field", "a division by zero")

    def ends(kernel: Kernel) -> tuple[float, float]:
        return inverse(kernel.scalar(divisor, node))

    return _scaled(scene, node, inputs, 1 / divisor, lambda b: _divided(b, divisor), ends)


def inverse(ends: tuple[float, float]) -> tuple[float, float]:
    """Return the inverses of numbers, of which none is 0.

    Raises:
        Rejected: "bound/not-finite".
    """
    if ends[0] * ends[1] <= 0:
        raise Rejected("bound/not-finite", "a divisor may be rounded to 0")
    return 1 / ends[1], 1 / ends[0]


def _other(ends: tuple[float, float], value: float) -> Box:
    """Return how far numbers between the ends are from a value; nothing if there is no other."""
    if ends[0] == ends[1]:
        return box.zeros(())
    lost = 4 * ULP * abs(value)
    low, high = np.array(ends[0] - value - lost), np.array(ends[1] - value + lost)
    return Box(np.minimum(low, 0.0), np.maximum(high, 0.0))


def _divided(b: Box, divisor: float) -> Box:
    if divisor < 0:
        b, divisor = box.neg(b), -divisor
    lo, hi = b.lo / divisor, b.hi / divisor
    return Box(np.where(b.lo == 0, 0.0, box.down(lo)), np.where(b.hi == 0, 0.0, box.above(hi)))


def _scaled(
    scene: Scene,
    node: Node,
    inputs: list[Value],
    factor: float,
    move: Callable[[Box], Box],
    ends: Callable[[Kernel], tuple[float, float]],
) -> State:
    """Return a multiple of x; `ends` are those of the numbers that a kernel may take as factor."""
    x = numeric(inputs[0])
    y_t, y_i = move(x.t), move(x.i)
    between = ends(scene.train), ends(scene.infer)
    other = box.mul(x.t, _other(between[0], factor)), box.mul(x.i, _other(between[1], factor))
    errors = (
        _relative(scene.train, box.add(y_t, other[0]), 3, True),
        _relative(scene.infer, box.add(y_i, other[1]), 3, True),
    )
    steepest = [max(abs(low), abs(high)) for low, high in between]
    own = by(x.own[0], steepest[0]), by(x.own[1], steepest[1])
    return settle(scene, node, (y_t, y_i, move(x.d)), errors, beside=other, own=own)


def shift(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x + offset."""
    offset = constant(node, "offset")
    x = numeric(inputs[0])
    moved = box.exact(np.array(offset))
    y_t, y_i = box.add(x.t, moved), box.add(x.i, moved)
    other = (
        _other(scene.train.scalar(offset, node), offset),
        _other(scene.infer.scalar(offset, node), offset),
    )

    def error(kernel: Kernel, y: Box, more: Box) -> Floats:
        return box.up(
            kernel.inner.u * (box.mag(box.add(y, more)) + abs(offset) * (1 + kernel.inner.u))
        )

    errors = error(scene.train, y_t, other[0]), error(scene.infer, y_i, other[1])
    return settle(scene, node, (y_t, y_i, x.d), errors, beside=other, own=x.own)


def cast(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x in the format of the node."""
    node.attrs.exactly()
    return recast(scene, node, numeric(inputs[0]))


def constant(node: Node, name: str) -> float:
    """Return a float attribute: 0, or normal in float32, and so is its reciprocal.

    Raises:
        Rejected: "graph/field".
    """
    raw = node.attrs.exactly(name).raw(name)
    whole = isinstance(raw, int) and not isinstance(raw, bool)
    value = float(raw) if whole else node.attrs.real(name)
    if value != 0 and not _BELOW_NORMAL <= abs(value) <= 2.0**126:
        raise Rejected("graph/field", f"{name} = {value} leaves the range of float32")
    return value


def relu(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return max(x, 0): no rounding, and where the sign is known no new drift."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    t = x.t.map(lambda v: np.maximum(v, 0.0))
    i = x.i.map(lambda v: np.maximum(v, 0.0))
    on = (x.t.lo >= 0) & (x.i.lo >= 0)
    off = (x.t.hi <= 0) & (x.i.hi <= 0)
    lo = np.where(on, x.d.lo, np.where(off, 0.0, np.minimum(x.d.lo, 0.0)))
    hi = np.where(on, x.d.hi, np.where(off, 0.0, np.maximum(x.d.hi, 0.0)))
    return reduce(t, i, Box(lo, hi), x.own)


def neg(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return -x."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    return State(box.neg(x.t), box.neg(x.i), box.neg(x.d), x.own)


_SPREAD, _CUBIC = math.sqrt(2 / math.pi), 0.044715  # of the form of GELU by tanh


@dataclass(frozen=True, slots=True)
class Function:
    """A smooth function with its derivative, both as (lower, upper) at given doubles.

    `valley` is where the function has its only minimum (None: it increases); `turns` are the
    critical points of the derivative. Both are doubles next to the true points: there the functions
    are so flat that the difference is far below the slack of the values.
    """

    value: Callable[[Floats], tuple[Floats, Floats]]
    slope: Callable[[Floats], tuple[Floats, Floats]]
    valley: float | None
    turns: tuple[float, ...]


def _gelu_value(x: Floats) -> tuple[Floats, Floats]:
    return _about(x * _normal(x), np.abs(x) * 2.0**-50)


def _gelu_slope(x: Floats) -> tuple[Floats, Floats]:
    density = np.exp(-x * x / 2) * (1 / math.sqrt(2 * math.pi))
    return _about(_normal(x) + x * density, np.full(x.shape, 2.0**-47))


def _by_tanh(x: Floats) -> tuple[Floats, Floats]:
    """Return 2u and 2u' of u = √(2/π)(x + 0.044715 x³), for x within ±30: beyond, σ(2u) is flat."""
    square = x * x
    first = 2 * _SPREAD * x * (1 + _CUBIC * square)
    return first, 2 * _SPREAD * (1 + 3 * _CUBIC * square)


def _gelu_tanh_value(x: Floats) -> tuple[Floats, Floats]:
    twice, _ = _by_tanh(np.clip(x, -30.0, 30.0))
    return _about(x * _logistic(twice), np.abs(x) * 2.0**-49)


def _gelu_tanh_slope(x: Floats) -> tuple[Floats, Floats]:
    near = np.clip(x, -30.0, 30.0)
    twice, steep = _by_tanh(near)
    s, other = _logistic(twice), _logistic(-twice)
    return _about(s + near * s * other * steep, np.full(x.shape, 2.0**-46))


def gelu_tanh_second(x: Floats) -> Floats:
    """Return the second derivative of x·σ(w), w = 2u: σ'(2w' + xw'' + x(1 - 2σ)w'²)."""
    near = np.clip(x, -30.0, 30.0)
    twice, steep = _by_tanh(near)
    s, other = _logistic(twice), _logistic(-twice)
    bent = 12 * _SPREAD * _CUBIC * near
    return np.asarray(s * other * (2 * steep + near * bent + near * (other - s) * steep * steep))


def _normal(x: Floats) -> Floats:
    """Return Φ(x) with an absolute error below 2^-51."""
    return np.clip(0.5 * (1 + _erf(x * math.sqrt(0.5))), 0.0, 1.0)


def _erf(x: Floats) -> Floats:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), dtype=np.float64)


def _silu_value(x: Floats) -> tuple[Floats, Floats]:
    return _about(x * _logistic(x), np.abs(x) * _logistic(x) * _TRUST)


def _silu_slope(x: Floats) -> tuple[Floats, Floats]:
    s, other = _logistic(x), _logistic(-x)
    return _about(s + x * s * other, np.full(x.shape, 2.0**-47))


def _logistic(x: Floats) -> Floats:
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, e) / (1 + e))


def _tanh_value(x: Floats) -> tuple[Floats, Floats]:
    y = np.tanh(x)
    lo, hi = _about(y, np.abs(y) * _TRUST)
    return np.maximum(lo, -1.0), np.minimum(hi, 1.0)


def _tanh_slope(x: Floats) -> tuple[Floats, Floats]:
    y = np.tanh(x)
    return _about(1 - y * y, np.full(x.shape, 2.0**-47))


def _about(y: Floats, radius: Floats) -> tuple[Floats, Floats]:
    wide = radius * (1 + 2.0**-40) + 2.0**-1000
    return box.down(y - wide), box.above(y + wide)


GELU = Function(_gelu_value, _gelu_slope, -0.7517915246935645, (-math.sqrt(2), math.sqrt(2)))
GELU_TANH = Function(
    *(_gelu_tanh_value, _gelu_tanh_slope, -0.75246142207101626),
    (-1.41850400879082836, 1.41850400879082836),
)
SILU = Function(
    _silu_value, _silu_slope, -1.2784645427610738, (-2.3993572805154677, 2.3993572805154677)
)
TANH = Function(_tanh_value, _tanh_slope, None, (0.0,))


def approximated(node: Node) -> bool:
    """Say whether a GELU is the form by tanh."""
    return node.attrs.has("approximate") and bool(node.attrs.choice("approximate", ("tanh",)))


def gelu(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x·Φ(x), or its approximation by tanh."""
    function = GELU_TANH if approximated(node) else GELU
    return _activation(scene, node, inputs, function, lambda kernel, x, y: x)


def silu(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x·σ(x), with σ good to a share of itself or of 1."""

    def scaled_by(kernel: Kernel, x: Box, y: Box) -> Box:
        return x if kernel.absolute_sigmoid else y

    return _activation(scene, node, inputs, SILU, scaled_by)


def tanh(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return tanh(x)."""
    return _activation(scene, node, inputs, TANH, lambda kernel, x, y: y)


def _activation(
    scene: Scene,
    node: Node,
    inputs: list[Value],
    function: Function,
    scaled_by: Callable[[Kernel, Box, Box], Box],
) -> State:
    """Return the state of f(x); the error is 16·u_f of what `scaled_by` picks from x and Y."""
    node.attrs.exactly(optional=("approximate",) if node.op == "gelu" else ())
    x = numeric(inputs[0])
    y_t, y_i = image(function, x.t), image(function, x.i)
    tangents = slopes(function, box.join(x.t, x.i))
    d, steep = box.mul(tangents, x.d), box.mag(tangents)

    def error(kernel: Kernel, x: Box, y: Box, apart: Own) -> Floats:
        inside = 16 * kernel.inner.u * box.mag(scaled_by(kernel, x, y)) + SLACK
        stored = sigmoid_stored(kernel, node, box.mag(x), box.mag(y), inside, by(apart, 2))
        return box.up(inside + stored)

    errors = error(scene.train, x.t, y_t, x.own[0]), error(scene.infer, x.i, y_i, x.own[1])
    own = by(x.own[0], steep), by(x.own[1], steep)
    return settle(scene, node, (y_t, y_i, d), errors, own=own)


def sigmoid_stored(
    kernel: Kernel, node: Node, x: Floats, y: Floats, inside: Floats, apart: Own
) -> Floats | float:
    """Return what it adds to the error inside of x·σ(x) that σ(x) is stored before the product,
    and that it may be of a reading of x up to `apart` from the one that it multiplies."""
    if not node.written:
        return 0.0
    form = target(kernel, node)
    turned = 0.0 if apart is None else x * apart / 4
    if kernel.stepped and form.precision >= max(FLOAT32.precision, kernel.inner.precision):
        return turned
    u, eta = kernel.off(form)
    return (u * (y + turned) + eta * x + turned) * (1 + 2.0**-10) + 2.0**-10 * inside


def image(function: Function, x: Box) -> Box:
    """Return the range of a function on a box."""
    low, high = function.value(x.lo), function.value(x.hi)
    lo, hi = np.minimum(low[0], high[0]), np.maximum(low[1], high[1])
    if function.valley is not None:
        bottom = function.value(np.array(function.valley))[0]
        lo = np.where(_holds(x, function.valley), np.minimum(lo, bottom), lo)
    return Box(lo, hi)


def slopes(function: Function, x: Box) -> Box:
    """Return the range of a function's derivative on a box."""
    low, high = function.slope(x.lo), function.slope(x.hi)
    lo, hi = np.minimum(low[0], high[0]), np.maximum(low[1], high[1])
    for turn in function.turns:
        at = function.slope(np.array(turn))
        inside = _holds(x, turn)
        lo = np.where(inside, np.minimum(lo, at[0]), lo)
        hi = np.where(inside, np.maximum(hi, at[1]), hi)
    return Box(lo, hi)


def _holds(x: Box, point: float) -> box.Bools:
    """Return where a box holds a point known to a few ulp."""
    wide = abs(point) * 2.0**-40 + 2.0**-1000
    found: box.Bools = (x.lo <= point + wide) & (x.hi >= point - wide)
    return found


def rope(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x * cos + concat(-x[…, h:], x[…, :h]) * sin."""
    node.attrs.exactly()
    x, cos, sin = (numeric(value) for value in inputs)
    if x.shape[-1] % 2 or not (cos.t.point and cos.i.point and sin.t.point and sin.i.point):
        raise Rejected("rule/rope", "rope needs an even last dimension and known tables")
    exact, errors = rotated(scene, x, cos, sin)
    own = rotated_own(x.own[0], cos.t.lo, sin.t.lo), rotated_own(x.own[1], cos.i.lo, sin.i.lo)
    return settle(scene, node, exact, errors, own=own)


def rotated_own(own: Own, cos: Floats, sin: Floats) -> Own:
    """Return how far readings are apart after the rotation."""
    if own is None:
        return None
    h = own.shape[-1] // 2
    other = np.concatenate([own[..., h:], own[..., :h]], axis=-1)
    return plus(by(own, np.abs(cos)), by(other, np.abs(sin)))


def rotated(
    scene: Scene, x: State, cos: State, sin: State
) -> tuple[tuple[Box, Box, Box], tuple[Floats, Floats]]:
    """Return the rotated boxes before they are stored, and E of both kernels; known tables."""
    turned = State(_rotate(x.t), _rotate(x.i), _rotate(x.d))
    y_t = box.add(box.mul(x.t, cos.t), box.mul(turned.t, sin.t))
    y_i = box.add(box.mul(x.i, cos.i), box.mul(turned.i, sin.i))
    by_cos = box.add(box.mul(x.d, cos.i), box.mul(x.t, box.sub(cos.i, cos.t)))
    by_sin = box.add(box.mul(turned.d, sin.i), box.mul(turned.t, box.sub(sin.i, sin.t)))
    errors = (
        rope_error(scene.train, x.t, turned.t, cos.t.lo, sin.t.lo),
        rope_error(scene.infer, x.i, turned.i, cos.i.lo, sin.i.lo),
    )
    return (y_t, y_i, box.add(by_cos, by_sin)), errors


def _rotate(x: Box) -> Box:
    h = x.shape[-1] // 2
    lo = np.concatenate([-x.hi[..., h:], x.lo[..., :h]], axis=-1)
    hi = lo if x.point else np.concatenate([-x.lo[..., h:], x.hi[..., :h]], axis=-1)
    return Box(lo, hi)


def rope_error(kernel: Kernel, x: Box, turned: Box, cos: Floats, sin: Floats) -> Floats:
    """Return E of rope, `turned` the boxes that the sines meet.

    Raises:
        Rejected: "bound/overflow".
    """
    parts = (
        box.up(box.mag(x) * box.lifted(np.abs(cos))),
        box.up(box.mag(turned) * box.lifted(np.abs(sin))),
    )
    size = box.up(parts[0] + parts[1])
    error = box.up(gamma(4, kernel.inner.u) * size + 2 * underflow(kernel))
    if kernel.coarse:
        if not bool((np.maximum(*parts) * (1 + 2.0**-10) <= kernel.compute.largest).all()):
            raise Rejected("bound/overflow", f"a product may overflow {kernel.compute.name}")
        u, eta = kernel.off(kernel.compute)
        cast = (1 + 2.0**-10) * (u * size + 2 * eta)
        error = box.up(error + cast)
    return error
