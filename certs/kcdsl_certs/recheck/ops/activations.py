"""GELU, SiLU and tanh in every domain (section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kcdsl_certs.recheck.affine.ellipsoids import Row, norm_of, norm_on_ellipsoid
from kcdsl_certs.recheck.affine.form import Form, Operand, Walk, form_of
from kcdsl_certs.recheck.affine.remainders import Remainder, squares
from kcdsl_certs.recheck.affine.result_rounding import Formed, round_result
from kcdsl_certs.recheck.affine.reverse_passes import bound_asked_norms, tighten_by_floors
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Box, Floats, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Own,
    State,
    Value,
    by,
    gamma,
    numeric,
    settle,
    target,
)
from kcdsl_certs.recheck.linear_bounds.context import SPARE, Added, Context, halves
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch, joined
from kcdsl_certs.recheck.numerics.formats import FLOAT32
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.functions import (
    GELU_CURVE,
    GELU_TANH_CURVE,
    SILU_CURVE,
    TANH_CURVE,
    Bend,
    Curve,
    Function,
    curvature,
    image,
    slope_of,
    slopes,
    value_of,
)
from kcdsl_certs.recheck.ops.operation import Operation

SLACK = 2.0**-100


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation whose inner error is 16·u_f times `sized` of the magnitudes of argument and
    value."""

    curve: Curve
    sized: Callable[[KernelNumerics, Floats, Floats], Floats]


Choice = Callable[[Node], Activation]
"""Returns the activation of a node; refuses attributes that the activation does not have."""


def _activation_interval(
    choice: Choice, problem: DriftProblem, node: Node, inputs: list[Value]
) -> State:
    """Return the state of φ(x)."""
    activation, x = choice(node), numeric(inputs[0])
    function = activation.curve.function
    y_t, y_i = image(function, x.t), image(function, x.i)
    tangents = slopes(function, box.join(x.t, x.i))
    d, steep = box.mul(tangents, x.d), box.mag(tangents)

    def error(kernel: KernelNumerics, x: Box, y: Box, apart: Own) -> Floats:
        sizes = box.mag(x), box.mag(y)
        inside = 16 * kernel.inner.u * activation.sized(kernel, *sizes) + SLACK
        stored = sigmoid_stored(kernel, node, *sizes, inside, by(apart, 2))
        return box.up(inside + stored)

    errors = error(problem.train, x.t, y_t, x.own[0]), error(problem.infer, x.i, y_i, x.own[1])
    own = by(x.own[0], steep), by(x.own[1], steep)
    return settle(problem, node, (y_t, y_i, d), errors, own=own)


def sigmoid_stored(
    kernel: KernelNumerics, node: Node, x: Floats, y: Floats, inside: Floats, apart: Own
) -> Floats | float:
    """Return the error that x·σ(x) has in addition if σ(x) is stored before the product, and if it
    is of a reading of x up to `apart` from the factor x."""
    if not node.written:
        return 0.0
    form = target(kernel, node)
    turned = 0.0 if apart is None else x * apart / 4
    if kernel.stepped and form.precision >= max(FLOAT32.precision, kernel.inner.precision):
        return turned
    u, eta = kernel.off(form)
    return (u * (y + turned) + eta * x + turned) * (1 + 2.0**-10) + 2.0**-10 * inside


def _activation_affine(choice: Choice, walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return φ(x)."""
    activation, x = choice(node), form_of(inputs[0])
    function, bend = activation.curve.function, activation.curve.bend
    reference, wrong = _middle(*function.value(x.reference))
    slope, lean = _middle(*function.slope(x.reference))
    apart = walk.own(node, 0)
    around = None if apart is not None else squares(walk, node, node.inputs[0])
    x = tighten_by_floors(walk, node, node.inputs[0])
    by_norms = x.origin is not None and x.origin.norms is not None
    total = _sums_of(bend, x) if by_norms else _total(walk, node, bend, x)
    steepest = raised(_steepest(bend, x) / 2)
    if around is not None:
        total = np.minimum(total, raised(around.each(steepest) ** 2) + TINY)
    remainder = second_order(function, bend, x, slope, lean)
    carried = raised(np.abs(slope) * x.error_bound)
    wide = x if apart is None else replace(x, error_bound=raised(x.error_bound + apart))
    value = image(function, wide.box)
    sizes = wide.size, box.mag(value)
    error = 16 * walk.kernel.inner.u * activation.sized(walk.kernel, *sizes) + SLACK
    error = error + sigmoid_stored(walk.kernel, node, *sizes, error, by(apart, 2))
    turned = by(apart, box.mag(slopes(function, wide.box)))
    if node.written and turned is not None:  # the sigmoid has a reading of x of its own
        error = error + turned
    # the error of the slope is not in the remainder: it is bounded element by element
    tilted = raised(lean * x.error_bound)
    own = raised(wrong + tilted + error + gamma(4, UNIT) * carried + TINY)
    operands = () if x.place is None else ((x.place, lambda a: a.times(slope)),)
    bent = np.maximum(-remainder.lo, remainder.hi)

    def sums(row: Row, weights: Floats) -> Floats:
        assert around is not None
        return raised(around.root(row, weights * steepest[row]) ** 2) + TINY

    nonlinear = (
        Remainder(remainder.lo, remainder.hi, total, None if around is None else sums).nonlinear,
    )
    formed = Formed(reference, carried, operands, own, bent=bent, nonlinear=nonlinear, own=turned)
    form = round_result(walk, node, formed, target(walk.kernel, node), walk.kernel.inner)
    if around is not None and form.place is not None and node.name not in walk.versions:
        entry = walk.tape.entries[form.place]
        most = raised(box.mag(slopes(function, x.box)))
        known = None if entry.radius is None else replace(around, factor=most, own=entry.radius)
        walk.tape.entries[form.place] = replace(entry, squares=known)
    return form


def _middle(lo: Floats, hi: Floats) -> tuple[Floats, Floats]:
    """Return a number between two ends and its distance from them."""
    middle = lo / 2 + hi / 2
    return middle, np.maximum(box.add_up(hi, -middle), box.add_up(middle, -lo))


def _steepest(bend: Bend, x: Form) -> Floats:
    """Return a bound of |φ''| between h̃ - ρ and h̃ + ρ."""
    return box.mag(bend(x.box))


def _plain(walk: Walk, bend: Bend, x: Form) -> Floats:
    """Return a bound of Σ K e²/2 in every row without reverse passes: by ρ, and by the weight."""
    steepest, plain = _steepest(bend, x), _sums_of(bend, x)
    error_bound = _below(walk, x)
    if error_bound is None:
        return plain
    lengths = np.full(plain.shape, math.sqrt(error_bound.shape[-1]))
    plain = np.minimum(plain, _through(x, steepest, error_bound, lengths))
    assert x.origin is not None
    source = form_of(walk.forms[x.origin.source])
    if source.place is None:
        return plain
    for row, shape in walk.tape.entries[source.place].ellipsoids.items():
        size = norm_on_ellipsoid(shape, np.sqrt(steepest[row])[:, None] * x.origin.weight)
        found = _halved(size, x.origin.rest[row], steepest[row])
        plain[row] = np.minimum(plain[row], raised(np.array(found)) + TINY)
    return plain


def _sums_of(bend: Bend, x: Form) -> Floats:
    """Return a bound of Σ K e²/2 in every row by ρ."""
    plain = (_steepest(bend, x) * raised(x.error_bound**2) / 2).sum(axis=-1, keepdims=True)
    return np.asarray(raised(plain * (1 + x.shape[-1] * 4 * UNIT)) + TINY)


def _below(walk: Walk, x: Form) -> Floats | None:
    """Return the error bound of the input of the linear that made x; None if x was moved since."""
    if x.place is None or x.origin is None or x.origin.rest.shape != x.shape:
        return None
    error_bound = form_of(walk.forms[x.origin.source]).error_bound
    straight = np.array_equal(x.origin.index, np.arange(x.reference.size).reshape(x.shape))
    return error_bound if straight and error_bound.shape[:-1] == x.shape[:-1] else None


def _through(x: Form, steepest: Floats, scale: Floats, lengths: Floats) -> Floats:
    """Return a bound of Σ K e²/2 for e = W e_x + o with |e_x / scale|₂ ≤ lengths, row by row."""
    origin = x.origin
    assert origin is not None
    found = np.empty(lengths.shape)
    for row in np.ndindex(*x.shape[:-1]):
        root = np.sqrt(steepest[row])
        moved = norm_of(root[:, None] * origin.weight * scale[row], float(lengths[row][0]))
        found[row] = _halved(moved, origin.rest[row], steepest[row])
    return raised(found) + TINY


def _halved(moved: float, rest: Floats, steepest: Floats) -> float:
    """Return a bound of Σ K (e + o)²/2 with |√K e|₂ ≤ moved and |o| ≤ rest."""
    own = float(np.linalg.norm(np.sqrt(steepest) * rest)) * (1 + 2.0**-40)
    return (moved + own) ** 2 / 2


def _total(walk: Walk, node: Node, bend: Bend, x: Form) -> Floats:
    """Return a bound of Σ K e²/2 in every row: by ρ, and by norms in the rows of the hints."""
    steepest, total, error_bound = _steepest(bend, x), _plain(walk, bend, x), _below(walk, x)
    if error_bound is not None:
        assert x.origin is not None
        name, identity = x.origin.source, np.eye(error_bound.shape[-1])
        lengths = bound_asked_norms(walk, node, name, lambda _: identity)
        needed = np.isfinite(lengths)
        some = np.where(needed, lengths, 0.0)
        through = _through(x, steepest, np.ones(error_bound.shape), some)
        total = np.where(needed, np.minimum(total, through), total)
    root = raised(np.sqrt(steepest))
    norm = bound_asked_norms(walk, node, node.inputs[0], lambda row: np.diag(root[row]))
    return np.minimum(total, raised(norm**2 / 2) + TINY)


def second_order(function: Function, bend: Bend, x: Form, slope: Floats, lean: Floats) -> Box:
    """Return a box around 0 of φ(h̃ + e) - φ(h̃) - φ'(h̃)·e for |e| ≤ ρ.

    `lean` bounds the error of the computed slope.
    """
    bends, tangents = bend(x.box), slopes(function, x.box)
    square = raised(x.error_bound**2) / 2
    lo = box.down(np.minimum(bends.lo, 0.0) * square)
    hi = box.above(np.maximum(bends.hi, 0.0) * square)
    apart = np.maximum(np.abs(tangents.lo - slope), np.abs(tangents.hi - slope)) + lean
    plain = raised(apart * (1 + 2.0**-40) * x.error_bound) + TINY
    lo, hi = np.maximum(lo - TINY, -plain), np.minimum(hi + TINY, plain)
    still = x.error_bound == 0
    return Box(np.where(still, 0.0, lo), np.where(still, 0.0, hi))


_TRUST = 2.0**-45


def activation_bounds(choice: Choice, context: Context, node: Node) -> None:
    """Write φ(x): φ'(m) e, and φ'(m + D_c) D + (φ'(m + D_c) - φ'(m)) e, around the middles."""
    curve = choice(node).curve
    function = curve.function
    x = context.operand(node, 0)
    h, (ec, er), (dc, dr) = x.reference, halves(x.e), halves(x.d)
    m = h + ec
    there = m + dc
    trust = _TRUST * np.maximum(np.abs(h) + np.abs(ec) + np.abs(dc), 1.0)
    reference, at_m = value_of(function, h), value_of(function, m)
    slope, steep = slope_of(function, m), slope_of(function, there)
    k, _ = curvature(curve, m, er)
    e_radius = k * er * er / 2 + trust * (1 + er)
    k, apart = curvature(curve, m + dc / 2, er + dr + np.abs(dc) / 2)
    step, off_step = _step(function, m, dc, value_of(function, there) - at_m, trust)
    turn, off_turn = _turn(curve, m, dc, steep - slope, trust)
    d_radius = k * (er * dr + dr * dr / 2) + np.abs(dc) * apart * er
    d_radius = d_radius + off_step + off_turn * er + trust * dr
    lost = 4 * gamma(SPARE, UNIT)
    far_e, far_d = er + np.abs(ec), dr + np.abs(dc)
    e_radius = e_radius + lost * np.abs(slope) * far_e
    d_radius = d_radius + lost * (np.abs(steep) * far_d + np.abs(turn) * far_e)

    def vjp(f: FunctionalBatch) -> tuple[tuple[int, FunctionalBatch], ...]:
        e = None if f.e is None else f.e.times(slope)
        if f.d is None:
            return ((x.place, FunctionalBatch(e, None)),)
        return ((x.place, FunctionalBatch(joined(e, f.d.times(turn)), f.d.times(steep))),)

    context.write(
        node,
        reference,
        vjp,
        Added(at_m - reference - slope * ec, raised(e_radius) + TINY),
        Added(step - turn * ec - steep * dc, raised(d_radius) + TINY),
    )


def _step(
    function: Function, m: Floats, step: Floats, direct: Floats, trust: Floats
) -> tuple[Floats, Floats]:
    """Return φ(m + s) - φ(m) and its error: by the difference, or by the slopes in between."""
    ends = m, m + step
    between = slopes(function, Box(np.minimum(*ends), np.maximum(*ends)))
    middle, radius = halves(between)
    by_slope = raised((radius + 4 * UNIT * np.abs(middle)) * np.abs(step))
    better = by_slope < 2 * trust
    return np.where(better, middle * step, direct), np.where(better, by_slope, 2 * trust)


def _turn(
    curve: Curve, m: Floats, step: Floats, direct: Floats, trust: Floats
) -> tuple[Floats, Floats]:
    """Return φ'(m + s) - φ'(m) and its error: by the difference, or by the curvature."""
    by_curve = raised((curve.third * np.abs(step) / 2 + 2.0**-40) * np.abs(step))
    better = by_curve < 2 * trust
    found = np.where(better, curve.second(m + step / 2) * step, direct)
    return found, np.where(better, by_curve, 2 * trust)


def activation(choice: Choice) -> Operation:
    """Return the operation of an activation."""
    return Operation(
        1,
        1,
        partial(_activation_interval, choice),
        partial(_activation_affine, choice),
        partial(activation_bounds, choice),
        (0,),
        pointwise=True,
    )


def always(curve: Curve, sized: Callable[[KernelNumerics, Floats, Floats], Floats]) -> Choice:
    """Return the choice of an activation without attributes."""

    def choice(node: Node) -> Activation:
        node.attrs.exactly()
        return Activation(curve, sized)

    return choice


def _gelu(node: Node) -> Activation:
    node.attrs.exactly(optional=("approximate",))
    by_tanh = node.attrs.has("approximate") and node.attrs.choice("approximate", ("tanh",))
    return Activation(GELU_TANH_CURVE if by_tanh else GELU_CURVE, lambda kernel, x, y: x)


OPERATIONS = {
    "tanh": activation(always(TANH_CURVE, lambda kernel, x, y: y)),
    "silu": activation(always(SILU_CURVE, lambda k, x, y: x if k.absolute_sigmoid else y)),
    "gelu": activation(_gelu),
}
