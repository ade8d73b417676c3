"""layer_norm and rms_norm in the interval domain and in linear bounds (section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, ULP, UNIT, Box, Floats, others, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Own,
    State,
    Value,
    gamma,
    numeric,
    settle,
)
from kcdsl_certs.recheck.linear_bounds.context import (
    DEVIATION,
    DRIFT,
    Added,
    Context,
    Reading,
    along,
    halves,
    less_mean,
)
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.arithmetic import underflow
from kcdsl_certs.recheck.ops.norm_errors import (
    LEAST_VARIANCE,
    MOST_SQUARES,
    Norm,
    losses,
    root_error,
)


@dataclass(frozen=True, slots=True)
class Side:
    """One kernel's normalisation: c, the square sums, v, r (as boxes) and y = c·r."""

    c: Box
    v: Box
    r: Box
    y: Box


def rms_norm_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return x / sqrt(mean(x²) + eps) * weight."""
    return _norm_interval(problem, node, inputs, False)


def layer_norm_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return (x - mean) / sqrt(var + eps) * weight + bias."""
    return _norm_interval(problem, node, inputs, True)


def _norm_interval(problem: DriftProblem, node: Node, inputs: list[Value], centred: bool) -> State:
    eps = node.attrs.exactly("eps").real("eps")
    x = numeric(inputs[0])
    n = x.shape[-1]
    if not eps >= 0 or (centred and n < 2):
        raise Rejected("graph/field", "a norm needs eps ≥ 0 and, if centred, two elements")
    weight = _affine(problem, node, inputs, 1, n)
    bias = _affine(problem, node, inputs, 2, n)
    t, i = side(x.t, eps, centred), side(x.i, eps, centred)
    d_c = _centred(x.d) if centred else x.d
    d_y = _drift(t, i, d_c, n)
    exact = (
        _map(t.y, weight[0], bias[0]),
        _map(i.y, weight[1], bias[1]),
        box.add(
            box.add(box.mul(weight[1], d_y), box.mul(weight[2], t.y)),
            bias[2],
        ),
    )
    own = _scaled_own(x.own[0], t, weight[0]), _scaled_own(x.own[1], i, weight[1])
    if node.written:
        return settle(
            problem,
            node,
            exact,
            (
                _written(problem.train, node, eps, x.t, t, weight[0], bias[0], x.own[0]),
                _written(problem.infer, node, eps, x.i, i, weight[1], bias[1], x.own[1]),
            ),
            own=own,
        )
    errors = (
        _error(problem.train, x.t, t, weight[0], bias[0], centred, x.own[0]),
        _error(problem.infer, x.i, i, weight[1], bias[1], centred, x.own[1]),
    )
    return settle(problem, node, exact, errors, own=own)


def _scaled_own(own: Own, side: Side, weight: Box) -> Own:
    """Return the distance of results that normalise readings of x by the same mean and root."""
    return None if own is None else box.up(own * side.r.hi * box.mag(weight), 4)


def _written(
    kernel: KernelNumerics,
    node: Node,
    eps: float,
    x: Box,
    own: Side,
    weight: Box,
    bias: Box,
    apart: Own,
) -> Floats:
    """Return the error inside a norm that is written out, the affine map included."""
    usual = np.zeros((*x.shape[:-1], 1))
    if node.op == "layer_norm":
        ends = [np.abs(end.mean(axis=-1, keepdims=True)) for end in (x.lo, x.hi)]
        lost = gamma(x.shape[-1] + 4, 2.0**-53) * box.mag(x).mean(axis=-1, keepdims=True)
        usual = box.up(np.maximum(*ends) + 2 * lost)
    away = np.zeros(x.shape) if apart is None else np.broadcast_to(2 * apart, x.shape)
    norm = Norm(box.mag(x), box.mag(own.c), usual, own.v.lo, own.v.hi, away)
    loss = losses(node, kernel, eps, norm)
    root, y, gain = box.up(own.r.hi * (1 + loss.theta)), box.mag(own.y), box.mag(weight)
    error = box.up(loss.theta * y + loss.mean * root + loss.elements(y, root))
    return box.up(error * gain + loss.last(y, error, gain, box.magnitude(bias)))


def _affine(
    problem: DriftProblem, node: Node, values: list[Value], place: int, n: int
) -> tuple[Box, Box, Box]:
    """Return T, I and D of the weight (at 1) or bias (at 2) of a norm; 1 and 0 where absent."""
    if len(values) <= place:
        known = box.exact(np.full((n,), 1.0 if place == 1 else 0.0))
        return known, known, box.zeros((n,))
    state = numeric(values[place])
    points = state.t.point and state.i.point
    if not points and node.inputs[place] not in problem.keys:
        raise Rejected("rule/weight", "the weight and bias of a norm must be known")
    if state.shape != (n,):
        raise Rejected("graph/shape", "the weight of a norm does not fit its input")
    return state.t, state.i, box.sub(state.i, state.t) if points else state.d


def _map(y: Box, weight: Box, bias: Box) -> Box:
    return box.add(box.mul(y, weight), bias)


def _centred(x: Box) -> Box:
    """Return x - mean(x): midpoint m - mean(m), radius r(1 - 2/n) + mean(r)."""
    n = x.shape[-1]
    middle, radius = box.midpoint(x)
    slack = (n + 8) * ULP
    mean = middle.mean(axis=-1, keepdims=True)
    wrong = np.abs(middle).mean(axis=-1, keepdims=True) * slack
    spread = wrong * (1 + slack)
    if radius is not None:
        share = radius * (1 - 2 / n) * (1 + 4 * ULP)
        spread = spread + share + radius.mean(axis=-1, keepdims=True) * (1 + slack)
    spread = np.broadcast_to(np.where(spread == 0, 0.0, box.up(spread) + box.FLUSH), x.shape)
    centre = box.sub(box.exact(middle), box.exact(mean))
    return box.widen(centre, spread)


def side(x: Box, eps: float, centred: bool) -> Side:
    """Return the boxes of one kernel's normalisation on a box of x.

    Raises Rejected "bound/not-finite".
    """
    n = x.shape[-1]
    c = _centred(x) if centred else x
    least, most = _squares(c)
    slack = (n + 8) * ULP
    v_lo = least.mean(axis=-1, keepdims=True) * (1 - slack) - box.FLUSH
    v_hi = most.mean(axis=-1, keepdims=True) * (1 + slack) + box.FLUSH
    v = Box(box.add_down(np.maximum(v_lo, 0.0), np.array(eps)), box.add_up(v_hi, np.array(eps)))
    sums = n * box.magnitude(x).max(axis=-1) ** 2 + eps
    if not bool((v.lo >= LEAST_VARIANCE).all() and (sums <= MOST_SQUARES).all()):
        raise Rejected("bound/not-finite", "the variance may leave the range of float32")
    r = Box(1 / np.sqrt(v.hi) * (1 - 8 * ULP), 1 / np.sqrt(v.lo) * (1 + 8 * ULP))
    cap = np.sqrt(n - 1 if centred else n) * (1 + 4 * ULP)
    top = np.minimum(_greatest(c.hi, least, most, n, eps), cap)
    bottom = np.maximum(-_greatest(-c.lo, least, most, n, eps), -cap)
    return Side(c, v, r, box.meet(Box(bottom, top), box.mul(c, r)))


def _squares(c: Box) -> tuple[Floats, Floats]:
    """Return the range of c², element by element."""
    inner = np.maximum(np.maximum(c.lo, -c.hi), 0.0)
    outer = box.magnitude(c)
    return np.maximum(box.down(inner * inner), 0.0), box.up(box.lifted(outer) ** 2)


def _greatest(high: Floats, least: Floats, most: Floats, n: int, eps: float) -> Floats:
    """Return an upper bound of c_i·r for c_i = `high` and the least squares of the others."""
    slack = (n + 16) * ULP
    rising = high >= 0
    rest = np.where(rising, others(least) * (1 - slack), others(most) * (1 + slack))
    below = (high * high + rest) / n + eps
    found = high / np.sqrt(np.where(below > 0, below, 1.0))
    return np.where(high == 0, 0.0, box.above(found + np.abs(found) * slack))


def _drift(t: Side, i: Side, d_c: Box, n: int) -> Box:
    """Return a box of the drift of y = c·r."""
    slack = (n + 16) * ULP
    twice = box.meet(box.add(box.add(t.c, t.c), d_c), box.add(t.c, i.c))
    terms = box.mul(d_c, twice)
    sizes = box.mag(terms).mean(axis=-1, keepdims=True)
    mean = Box(
        terms.lo.mean(axis=-1, keepdims=True) - sizes * slack,
        terms.hi.mean(axis=-1, keepdims=True) + sizes * slack,
    )
    # Cauchy and Schwarz: |Σ a b| / n ≤ ‖a‖₂ ‖b‖₂ / n.
    norms = [np.sqrt((box.mag(part) ** 2).sum(axis=-1, keepdims=True)) for part in (d_c, twice)]
    product = box.up(norms[0] * norms[1] / n, n + 24)
    d_v = box.meet(box.meet(mean, box.around(product)), box.sub(i.v, t.v))
    omega = Box(_omega(t.r.lo, i.r.lo) * (1 - 8 * ULP), _omega(t.r.hi, i.r.hi) * (1 + 8 * ULP))
    d_r = box.meet(box.neg(box.mul(d_v, omega)), box.sub(i.r, t.r))
    d_y = box.add(box.mul(d_c, i.r), box.mul(t.c, d_r))
    return box.meet(d_y, box.sub(i.y, t.y))


def _omega(a: Floats, b: Floats) -> Floats:
    """Return (ab)²/(a + b), which increases in both."""
    return (a * b) ** 2 / (a + b)


def _error(
    kernel: KernelNumerics, x: Box, side: Side, weight: Box, bias: Box, centred: bool, own: Own
) -> Floats:
    """Return the error inside the norm, the affine map included.

    Mean and root may be of a reading of x that is up to 2·own from the normalised one.
    """
    n, u = x.shape[-1], kernel.inner.u
    size = box.mag(x)
    if centred:
        count = gamma(n + 6, u)
        from_c = 4 * u * size + count * size.mean(axis=-1, keepdims=True) * (1 + n * ULP)
        from_c = from_c + (n + 6) * underflow(kernel)
    else:
        from_c = np.zeros(x.shape)
    theta = root_error(kernel, size, side.v.lo, centred)
    if own is not None:
        away = np.broadcast_to(2 * own, x.shape)
        if centred:
            from_c = box.up(from_c + away.mean(axis=-1, keepdims=True) * (1 + n * ULP))
        length = np.sqrt((away**2).mean(axis=-1, keepdims=True) / side.v.lo) * (1 + (n + 8) * ULP)
        theta = box.up(theta + length * (1 + theta))
    theta = box.up((1 + theta) * (1 + u) ** 2 - 1 + 16 * ULP)
    y = box.mag(side.y)
    error = box.up(theta * y + box.up(from_c) * side.r.hi * (1 + theta))
    if kernel.coarse:
        relative, faint = kernel.off(kernel.compute)
        error = box.up(error + relative * (y + error) + faint)
    scale = box.mag(weight)
    tiny = underflow(kernel)
    lost = np.where(y == 0, 0.0, tiny * scale)  # the product c·r may underflow before the weight
    # So may the product of inverse root and weight before it meets c, |c| ≤ 2 max|x|.
    lost = lost + 3 * tiny * size.max(axis=-1, keepdims=True)
    parts = y * scale + error * scale + box.magnitude(bias)
    return box.up(error * scale + 3 * u * parts + tiny + lost, 16)


_SPARE = 64


@dataclass(frozen=True, slots=True)
class _Slope:
    """δ ↦ r(δ - y mean(yδ)), and `away`, a bound of its difference to the slope on the segment."""

    r: Floats
    y: Floats
    away: Floats


def rms_norm_bounds(context: Context, node: Node) -> None:
    """Write x / sqrt(mean(x²) + eps) * weight."""
    _norm_bounds(context, node, False)


def layer_norm_bounds(context: Context, node: Node) -> None:
    """Write (x - mean) / sqrt(var + eps) * weight + bias."""
    _norm_bounds(context, node, True)


def _norm_bounds(context: Context, node: Node, centred: bool) -> None:
    x, state, eps = context.operand(node, 0), context.state(node.inputs[0]), node.attrs.real("eps")
    n = x.shape[-1]
    (g_t, g_i), (b_t, b_i) = (_known(context, node, k, n, 2.0 - k) for k in (1, 2))
    r, y = _at(x.reference, eps, centred)
    there = x.reference + halves(x.e)[0] + halves(x.d)[0] / 2
    to_train = box.join(box.exact(x.reference), state.t)
    own = _slope(context, x, DEVIATION, x.reference, to_train, eps, centred)
    moved = _slope(context, x, DRIFT, there, box.join(state.t, state.i), eps, centred)
    values = side(state.t, eps, centred).y
    apart = box.sub(box.exact(g_i), box.exact(g_t))
    beside = box.add(box.mul(values, apart), box.sub(box.exact(b_i), box.exact(b_t)))
    middle, radius = halves(beside)
    lost = gamma(n + _SPARE, UNIT)
    size = np.abs(x.reference)
    size = size + size.mean(axis=-1, keepdims=True) if centred else size
    off_e = lost * (np.abs(g_t) * (r * size + np.abs(y)) + np.abs(b_t))
    off_e = off_e + lost * np.abs(g_t) * _carried(own, box.magnitude(x.e))
    off_d = lost * np.abs(g_i) * _carried(moved, box.magnitude(x.d))

    def vjp(f: FunctionalBatch) -> tuple[tuple[int, FunctionalBatch], ...]:
        e = None if f.e is None else _back(f.e, own, g_t, centred)
        d = None if f.d is None else _back(f.d, moved, g_i, centred)
        return ((x.place, FunctionalBatch(e, d)),)

    context.write(
        node,
        y * g_t + b_t,
        vjp,
        Added(np.zeros(y.shape), raised(np.abs(g_t) * own.away + off_e) + TINY),
        Added(middle, raised(np.abs(g_i) * moved.away + radius + off_d) + TINY),
    )


def _known(
    context: Context, node: Node, position: int, n: int, otherwise: float
) -> tuple[Floats, Floats]:
    """Return the weight or the bias of both kernels."""
    if len(node.inputs) <= position:
        return np.full(n, otherwise), np.full(n, otherwise)
    state = context.state(node.inputs[position])
    return state.t.lo, state.i.lo


def _at(x: Floats, eps: float, centred: bool) -> tuple[Floats, Floats]:
    c = x - x.mean(axis=-1, keepdims=True) if centred else x
    r = 1 / np.sqrt((c * c).mean(axis=-1, keepdims=True) + eps)
    return r, c * r


def _slope(
    context: Context,
    x: Reading,
    unknown: str,
    middle: Floats,
    way: Box,
    eps: float,
    centred: bool,
) -> _Slope:
    """Return the slope at the middle, and a bound of its difference to others on the segment."""
    r, y = _at(middle, eps, centred)
    n = y.shape[-1]
    size = box.magnitude(x.e if unknown == DEVIATION else x.d)
    delta = size
    if centred:
        even = np.full(y.shape, 1 / n)
        delta = box.magnitude(less_mean(context.tape, x.place, unknown, even))
    lost = gamma(n + _SPARE, UNIT)
    seen = along(context.tape, x.place, unknown, y / n)
    seen = seen + lost * (np.abs(y) * size).mean(axis=-1, keepdims=True)
    if centred:  # y is centred up to float64 errors, the functional is not
        off = np.abs(y.mean(axis=-1, keepdims=True)) + lost * np.abs(y).mean(axis=-1, keepdims=True)
        seen = seen + off * size.mean(axis=-1, keepdims=True)
    seen = raised(seen)
    places = side(way, eps, centred)
    r_away = raised(np.maximum(places.r.hi - r, r - places.r.lo) + lost * r)
    y_away = np.maximum(np.abs(places.y.hi - y), np.abs(places.y.lo - y)) + lost * np.abs(y)
    apart = raised((y_away * delta).mean(axis=-1, keepdims=True) * (1 + lost))
    whole = (box.magnitude(places.y) * delta).mean(axis=-1, keepdims=True) * (1 + lost)
    whole = np.minimum(raised(whole), raised(seen + apart))
    away = r_away * (delta + np.abs(y) * seen)
    away = away + places.r.hi * (y_away * whole + np.abs(y) * apart)
    return _Slope(r, y, raised(away))


def _carried(slope: _Slope, size: Floats) -> Floats:
    """Return the sum of magnitudes of the terms of the slope and of its adjoint."""
    size = size + size.mean(axis=-1, keepdims=True)
    turned = np.abs(slope.y) * (np.abs(slope.y) * size).mean(axis=-1, keepdims=True)
    return raised(slope.r * (size + turned))


def _back(adjoint: Adjoint, slope: _Slope, gain: Floats, centred: bool) -> Adjoint:
    whole = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], len(gain)))
    values, y = whole.values * gain, slope.y[whole.window]
    back = values - y * (values * y).mean(axis=-1, keepdims=True)
    back = back * slope.r[whole.window[:-1]]
    if centred:
        back = back - back.mean(axis=-1, keepdims=True)
    return Adjoint(back, whole.start)
