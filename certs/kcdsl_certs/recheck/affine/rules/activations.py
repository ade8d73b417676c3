"""gelu, silu and tanh (section 3): the tangent, and what the second derivative leaves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.form import UNIT, Form, Operand, Walk, numeric, raised
from kcdsl_certs.recheck.affine.reaches import tight
from kcdsl_certs.recheck.affine.storing import Formed, settle
from kcdsl_certs.recheck.affine.tape import FAINT
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.rules.elementwise import (
    GELU,
    SILU,
    SLACK,
    TANH,
    Function,
    image,
    slopes,
)
from kcdsl_certs.recheck.rules.state import gamma, target

Bend = Callable[[Box], Box]


def gelu(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x·Φ(x)."""
    return _activation(walk, node, inputs, GELU, gelu_bend, True)


def silu(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x·σ(x)."""
    return _activation(walk, node, inputs, SILU, silu_bend, False)


def tanh(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return tanh(x)."""
    return _activation(walk, node, inputs, TANH, tanh_bend, False)


def gelu_bend(x: Box) -> Box:
    """Return the range of (2 - x²)·density(x), whose extremes are at 0 and ±2."""
    ends = [_gelu_second(x.lo), _gelu_second(x.hi)]
    lo, hi = np.minimum(*ends), np.maximum(*ends)
    for turn in (-2.0, 0.0, 2.0):
        inside = (x.lo <= turn) & (turn <= x.hi)
        at = _gelu_second(np.array(turn))
        lo, hi = np.where(inside, np.minimum(lo, at), lo), np.where(inside, np.maximum(hi, at), hi)
    return Box(lo - 2.0**-46, hi + 2.0**-46)


def _gelu_second(x: Floats) -> Floats:
    return np.asarray((2 - x * x) * np.exp(-x * x / 2) * (1 / math.sqrt(2 * math.pi)))


def silu_bend(x: Box) -> Box:
    """Return a box of the second derivative of silu anywhere."""
    return Box(np.full(x.shape, -0.1), np.full(x.shape, 0.5 + 2.0**-40))


def tanh_bend(x: Box) -> Box:
    """Return a box of the second derivative of tanh anywhere, 4/(3√3) < 0.77 in size."""
    return Box(np.full(x.shape, -0.77), np.full(x.shape, 0.77))


def _activation(
    walk: Walk,
    node: Node,
    inputs: list[Operand],
    function: Function,
    bend: Bend,
    by_input: bool,
) -> Form:
    """Return φ(x); the error inside is 16·u_f of x (`by_input`) or of the value."""
    node.attrs.exactly()
    x = tight(walk, node.inputs[0], numeric(inputs[0]))
    reference, wrong = _middle(*function.value(x.reference))
    slope, lean = _middle(*function.slope(x.reference))
    remainder = second_order(function, bend, x, slope, lean)
    carried = raised(np.abs(slope) * x.reach)
    value = image(function, x.box)
    size = x.size if by_input else box.mag(value)
    error = 16 * walk.kernel.inner.u * size + SLACK
    centre = remainder.lo / 2 + remainder.hi / 2
    radius = np.maximum(box.add_up(remainder.hi, -centre), box.add_up(centre, -remainder.lo))
    whole = raised(radius + wrong + error + gamma(4, UNIT) * carried + FAINT)
    operands = () if x.place is None else ((x.place, lambda a: a.times(slope)),)
    formed = Formed(reference, carried, operands, whole, centre)
    return settle(walk, formed, target(walk.kernel, node), walk.kernel.inner)


def _middle(lo: Floats, hi: Floats) -> tuple[Floats, Floats]:
    """Return a number between two ends and its distance from them."""
    middle = lo / 2 + hi / 2
    return middle, np.maximum(box.add_up(hi, -middle), box.add_up(middle, -lo))


def second_order(function: Function, bend: Bend, x: Form, slope: Floats, lean: Floats) -> Box:
    """Return a box of φ(h̃ + e) - φ(h̃) - slope·e, |slope - φ'(h̃)| ≤ lean, for |e| ≤ ρ."""
    bends, tangents = bend(x.box), slopes(function, x.box)
    square = raised(x.reach**2) / 2
    tilted = raised(lean * x.reach)
    lo = box.down(np.minimum(bends.lo, 0.0) * square - tilted)
    hi = box.above(np.maximum(bends.hi, 0.0) * square + tilted)
    apart = np.maximum(np.abs(tangents.lo - slope), np.abs(tangents.hi - slope))
    plain = raised(apart * (1 + 2.0**-40) * x.reach) + FAINT
    lo, hi = np.maximum(lo - FAINT, -plain), np.minimum(hi + FAINT, plain)
    still = x.reach == 0
    return Box(np.where(still, 0.0, lo), np.where(still, 0.0, hi))
