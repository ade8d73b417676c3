"""gelu, silu and tanh (section 3): the tangent, and what the second derivative leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.ellipsoids import longest
from kcdsl_certs.recheck.affine.form import UNIT, Form, Operand, Walk, numeric, raised
from kcdsl_certs.recheck.affine.reaches import together, until
from kcdsl_certs.recheck.affine.remainder import Remainder
from kcdsl_certs.recheck.affine.rules.straight import norm_of
from kcdsl_certs.recheck.affine.storing import Formed, settle
from kcdsl_certs.recheck.affine.tape import FAINT
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.rules.elementwise import (
    GELU,
    GELU_TANH,
    SILU,
    SLACK,
    TANH,
    Function,
    approximated,
    gelu_tanh_second,
    image,
    sigmoid_stored,
    slopes,
)
from kcdsl_certs.recheck.rules.state import gamma, target
from kcdsl_certs.recheck.versions import by

Bend = Callable[[Box], Box]


def gelu(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x·Φ(x), or its approximation by tanh."""
    if approximated(node):
        return _activation(walk, node, inputs, GELU_TANH, gelu_tanh_bend, True)
    return _activation(walk, node, inputs, GELU, gelu_bend, True)


def silu(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x·σ(x)."""
    return _activation(walk, node, inputs, SILU, silu_bend, walk.kernel.absolute_sigmoid)


def tanh(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return tanh(x)."""
    return _activation(walk, node, inputs, TANH, tanh_bend, False)


def gelu_bend(x: Box) -> Box:
    """Return the range of (2 - x²)·density(x), whose extremes are at 0 and ±2."""
    return _even(x, _gelu_second, 2.0)


def gelu_tanh_bend(x: Box) -> Box:
    """Return the range of the same of the form by tanh, whose extremes are at 0 and ±2.0134807…"""
    return _even(x, gelu_tanh_second, 2.013480724624258)


def _even(x: Box, second: Callable[[Floats], Floats], far: float) -> Box:
    """Return the range of an even function with extremes at 0 and ±far."""
    ends = [second(x.lo), second(x.hi)]
    lo, hi = np.minimum(*ends), np.maximum(*ends)
    for turn in (-far, 0.0, far):
        inside = (x.lo <= turn + 2.0**-40) & (turn - 2.0**-40 <= x.hi)
        at = second(np.array(turn))
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
    node.attrs.exactly(optional=("approximate",) if node.op == "gelu" else ())
    x = numeric(inputs[0])
    reference, wrong = _middle(*function.value(x.reference))
    slope, lean = _middle(*function.slope(x.reference))
    x = until(walk, node, node.inputs[0])
    total = _total(walk, node, bend, x)
    remainder = second_order(function, bend, x, slope, lean)
    carried = raised(np.abs(slope) * x.reach)
    apart = walk.own(node, 0)
    wide = x if apart is None else replace(x, reach=raised(x.reach + apart))
    value = image(function, wide.box)
    size = wide.size if by_input else box.mag(value)
    error = 16 * walk.kernel.inner.u * size + SLACK
    error = error + sigmoid_stored(
        walk.kernel, node, wide.size, box.mag(value), error, by(apart, 2)
    )
    turned = by(apart, box.mag(slopes(function, wide.box)))
    if node.written and turned is not None:  # it reads x by itself, whoever reads the result
        error = error + turned
    # what the slope is off by is no remainder: it is bounded element by element
    tilted = raised(lean * x.reach)
    own = raised(wrong + tilted + error + gamma(4, UNIT) * carried + FAINT)
    operands = () if x.place is None else ((x.place, lambda a: a.times(slope)),)
    bent = np.maximum(-remainder.lo, remainder.hi)
    curved = (Remainder(remainder.lo, remainder.hi, total).curve,)
    formed = Formed(reference, carried, operands, own, bent=bent, curved=curved, own=turned)
    return settle(walk, node, formed, target(walk.kernel, node), walk.kernel.inner)


def _middle(lo: Floats, hi: Floats) -> tuple[Floats, Floats]:
    """Return a number between two ends and its distance from them."""
    middle = lo / 2 + hi / 2
    return middle, np.maximum(box.add_up(hi, -middle), box.add_up(middle, -lo))


def _steepest(bend: Bend, x: Form) -> Floats:
    """Return a bound of |φ''| between h̃ - ρ and h̃ + ρ."""
    return box.mag(bend(x.box))


def _plain(walk: Walk, bend: Bend, x: Form) -> Floats:
    """Return a bound of Σ K e²/2 in every row without passes: by ρ, and through the weight."""
    steepest = _steepest(bend, x)
    plain = (steepest * raised(x.reach**2) / 2).sum(axis=-1, keepdims=True)
    plain = raised(plain * (1 + x.shape[-1] * 4 * UNIT)) + FAINT
    reach = _below(walk, x)
    if reach is None:
        return plain
    lengths = np.full(plain.shape, math.sqrt(reach.shape[-1]))
    plain = np.minimum(plain, _through(x, steepest, reach, lengths))
    assert x.origin is not None
    source = numeric(walk.forms[x.origin.source])
    if source.place is None:
        return plain
    for row, shape in walk.tape.entries[source.place].ellipsoids.items():
        size = longest(shape, np.sqrt(steepest[row])[:, None] * x.origin.weight)
        found = _halved(size, x.origin.rest[row], steepest[row])
        plain[row] = np.minimum(plain[row], raised(np.array(found)) + FAINT)
    return plain


def _below(walk: Walk, x: Form) -> Floats | None:
    """Return the reach of what a linear made x of, row by row; None where x was moved."""
    if x.place is None or x.origin is None or x.origin.rest.shape != x.shape:
        return None
    reach = numeric(walk.forms[x.origin.source]).reach
    straight = np.array_equal(x.origin.index, np.arange(x.reference.size).reshape(x.shape))
    return reach if straight and reach.shape[:-1] == x.shape[:-1] else None


def _through(x: Form, steepest: Floats, scale: Floats, lengths: Floats) -> Floats:
    """Return a bound of Σ K e²/2 for e = W e_x + o with |e_x / scale|₂ ≤ lengths, row by row."""
    origin = x.origin
    assert origin is not None
    found = np.empty(lengths.shape)
    for row in np.ndindex(*x.shape[:-1]):
        root = np.sqrt(steepest[row])
        moved = norm_of(root[:, None] * origin.weight * scale[row], float(lengths[row][0]))
        found[row] = _halved(moved, origin.rest[row], steepest[row])
    return raised(found) + FAINT


def _halved(moved: float, rest: Floats, steepest: Floats) -> float:
    """Return a bound of Σ K (e + o)²/2 with |√K e|₂ ≤ moved and |o| ≤ rest."""
    own = float(np.linalg.norm(np.sqrt(steepest) * rest)) * (1 + 2.0**-40)
    return (moved + own) ** 2 / 2


def _total(walk: Walk, node: Node, bend: Bend, x: Form) -> Floats:
    """Return a bound of Σ K e²/2 in every row: by the reach, and by norms where they count."""
    steepest, total, reach = _steepest(bend, x), _plain(walk, bend, x), _below(walk, x)
    if reach is not None:
        assert x.origin is not None
        name, identity = x.origin.source, np.eye(reach.shape[-1])
        needed = walk.chosen(node, name, "norm")
        lengths = together(walk, numeric(walk.forms[name]), needed, lambda _: identity)
        some = np.where(needed, lengths, 0.0)
        through = _through(x, steepest, np.ones(reach.shape), some)
        total = np.where(needed, np.minimum(total, through), total)
    root = raised(np.sqrt(steepest))
    needed = walk.chosen(node, node.inputs[0], "norm")
    norm = together(walk, x, needed, lambda row: np.diag(root[row]))
    return np.minimum(total, raised(norm**2 / 2) + FAINT)


def second_order(function: Function, bend: Bend, x: Form, slope: Floats, lean: Floats) -> Box:
    """Return a box around 0 of φ(h̃ + e) - φ(h̃) - φ'(h̃)·e for |e| ≤ ρ.

    The computed slope is off by up to `lean`.
    """
    bends, tangents = bend(x.box), slopes(function, x.box)
    square = raised(x.reach**2) / 2
    lo = box.down(np.minimum(bends.lo, 0.0) * square)
    hi = box.above(np.maximum(bends.hi, 0.0) * square)
    apart = np.maximum(np.abs(tangents.lo - slope), np.abs(tangents.hi - slope)) + lean
    plain = raised(apart * (1 + 2.0**-40) * x.reach) + FAINT
    lo, hi = np.maximum(lo - FAINT, -plain), np.minimum(hi + FAINT, plain)
    still = x.reach == 0
    return Box(np.where(still, 0.0, lo), np.where(still, 0.0, hi))
