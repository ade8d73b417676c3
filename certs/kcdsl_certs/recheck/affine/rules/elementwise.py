"""Elementwise arithmetic and rotary embedding (section 3)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded, merged, summed
from kcdsl_certs.recheck.affine.form import (
    UNIT,
    Form,
    Operand,
    Version,
    Walk,
    known,
    numeric,
    raised,
)
from kcdsl_certs.recheck.affine.independent import only_sure
from kcdsl_certs.recheck.affine.reaches import until
from kcdsl_certs.recheck.affine.storing import Formed, settle
from kcdsl_certs.recheck.affine.tape import FAINT, Entry, Pull
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.rules.cache import coded
from kcdsl_certs.recheck.rules.elementwise import constant, rope_error, rotated_own, underflow
from kcdsl_certs.recheck.rules.elementwise import inverse as inverses
from kcdsl_certs.recheck.rules.state import gamma, target
from kcdsl_certs.recheck.versions import by, plus
from kcdsl_certs.rejected import Rejected


def add(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return a + b."""
    return _sum(walk, node, inputs, 1.0)


def sub(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return a - b."""
    return _sum(walk, node, inputs, -1.0)


def _sum(walk: Walk, node: Node, inputs: list[Operand], sign: float) -> Form:
    node.attrs.exactly()
    a, b = numeric(inputs[0]), numeric(inputs[1])
    reference = a.reference + sign * b.reference
    carried = raised(a.reach + b.reach)
    error = walk.kernel.inner.u * raised(np.abs(reference) * (1 + 2 * UNIT) + carried)
    own = 2 * UNIT * np.abs(reference) + _copies(reference, a, b) * carried
    operands = _operands((a, _spread(a.shape)), (b, _scaled(b.shape, sign)))
    split, apart = only_sure(own).with_one(error), plus(walk.own(node, 0), walk.own(node, 1))
    radius = error + own
    if apart is not None:
        radius = raised(radius + walk.kernel.inner.u * apart)
    formed = Formed(reference, carried, operands, radius, split=split, own=apart)
    kernel = walk.kernel
    return settle(walk, node, formed, target(kernel, node), kernel.inner, sums=True)


def mul(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return a * b."""
    node.attrs.exactly()
    a, b = numeric(inputs[0]), numeric(inputs[1])
    reference = a.reference * b.reference
    if a.shape == b.shape:
        for name in node.inputs:
            until(walk, node, name)
        a, b = (numeric(walk.forms[name]) for name in node.inputs)
    carried = raised(a.reach * np.abs(b.reference) + np.abs(a.reference) * b.reach)
    rest = a.reach * b.reach
    own = 2 * UNIT * np.abs(reference) + FAINT
    size = raised(np.abs(reference) + own + carried + rest)
    error, faint = raised(walk.kernel.inner.u * size), underflow(walk.kernel)
    others = rest + own + faint + _copies(reference, a, b) * carried
    radius, split = raised(others + error), only_sure(others).with_one(error)
    left, right = _broadcast(b, reference), _broadcast(a, reference)
    operands = _operands((a, _times(left, a.shape)), (b, _times(right, b.shape)))
    one, two = walk.own(node, 0), walk.own(node, 1)
    apart = plus(by(one, b.size), by(two, a.size), None if two is None else by(one, two))
    if apart is not None:
        radius = raised(radius + walk.kernel.inner.u * apart)
    formed = Formed(reference, carried, operands, radius, split=split, own=apart)
    return _settled(walk, node, formed)


def scale(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x * factor."""
    return _proportional(walk, node, inputs, constant(node, "factor"), False)


def divide(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x / divisor."""
    divisor = constant(node, "divisor")
    if divisor == 0:
        raise Rejected("graph/field", "a division by zero")
    return _proportional(walk, node, inputs, divisor, True)


def _proportional(
    walk: Walk, node: Node, inputs: list[Operand], number: float, inverse: bool
) -> Form:
    x = numeric(inputs[0])
    ends = walk.kernel.scalar(number, node)
    ends = inverses(ends) if inverse else ends
    factor, away = ends[0] / 2 + ends[1] / 2, (ends[1] - ends[0]) / 2
    reference = x.reference * factor
    carried = raised(x.reach * abs(factor))
    own = 6 * UNIT * np.abs(reference) + FAINT
    other = raised(away * x.size)
    whole = raised(np.abs(reference) + own + carried + other)
    error = 3 * walk.kernel.inner.u * whole + underflow(walk.kernel)
    radius = raised(own + error + other + gamma(6, UNIT) * carried)
    operands = _operands((x, _scaled(x.shape, factor)))
    apart = by(walk.own(node, 0), raised(np.asarray(abs(factor) + away)))
    if apart is not None:
        radius = raised(radius + 3 * walk.kernel.inner.u * apart)
    return _settled(walk, node, Formed(reference, carried, operands, radius, own=apart))


def shift(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x + offset."""
    x, offset = numeric(inputs[0]), constant(node, "offset")
    low, high = walk.kernel.scalar(offset, node)
    middle, away = low / 2 + high / 2, (high - low) / 2
    reference = x.reference + middle
    own = 2 * UNIT * (np.abs(reference) + abs(middle)) + FAINT
    u = walk.kernel.inner.u
    size = raised(np.abs(reference) + own + x.reach + away)
    error = u * raised(size + max(abs(low), abs(high)) * (1 + u)) + away
    operands = _operands((x, _spread(x.shape)))
    apart, radius = walk.own(node, 0), raised(own + error)
    if apart is not None:
        radius = raised(radius + u * apart)
    return _settled(walk, node, Formed(reference, x.reach, operands, radius, own=apart))


def cast(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x in the format of the node, as it is where that holds all that it may be."""
    node.attrs.exactly()
    x, form = numeric(inputs[0]), target(walk.kernel, node)
    nodes = walk.scene.block.named
    read = walk.kernel.reads(nodes, nodes[node.name].inputs[0], walk.scene.handed)
    if all(form.holds(other) for other in read):
        if x.place is None:
            return known(x.reference)
        place = walk.tape.add(Entry(x.reach, ((x.place, lambda a: a),)))
        own = walk.own(node, 0)
        if own is not None:
            walk.versions[node.name] = Version(own)
        return Form(x.reference, x.reach, place, x.origin, cases=x.cases)
    widest = max(read, key=lambda other: other.precision)
    pulls = _operands((x, lambda a: a))
    formed = Formed(x.reference, x.reach, pulls, np.zeros(x.shape), cases=x.cases)
    return settle(walk, node, replace(formed, own=walk.own(node, 0)), form, widest)


def cache(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return keys or values as they are read back; the operand where the kernel has no cache.

    With casts to nearest what is known of a code's value to half a step or better is known whatever
    came in; elsewhere the error that came in is carried on.
    """
    node.attrs.exactly("part", "source")
    kernel, x = walk.kernel, numeric(inputs[0])
    found = coded(kernel, node, x.box)
    if found is None:
        if x.place is None:
            return known(x.reference)
        place = walk.tape.add(Entry(x.reach, ((x.place, lambda a: a),)))
        own = walk.own(node, 0)
        if own is not None:
            walk.versions[node.name] = Version(own)
        return Form(x.reference, x.reach, place, cases=x.cases)
    value, off = found
    error = box.mag(off)
    middle = value.lo / 2 + value.hi / 2
    half = np.maximum(box.add_up(value.hi, -middle), box.add_up(middle, -value.lo))
    flat = (half <= error) if kernel.stepped else np.zeros(x.shape, dtype=bool)
    keep = np.where(flat, 0.0, 1.0)
    reference = np.where(flat, middle, x.reference)
    operands = _operands((x, _times(keep, x.shape)))
    radius = raised(np.where(flat, half, error)) + FAINT
    formed = Formed(reference, x.reach * keep, operands, radius, own=walk.own(node, 0))
    return settle(walk, node, formed, target(kernel, node), kernel.inner)


def rope(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x * cos + concat(-x[…, h:], x[…, :h]) * sin."""
    node.attrs.exactly()
    x, cos, sin = (numeric(value) for value in inputs)
    if x.shape[-1] % 2 or cos.place is not None or sin.place is not None:
        raise Rejected("rule/rope", "rope needs an even last dimension and known tables")
    h = x.shape[-1] // 2
    turned = np.concatenate([-x.reference[..., h:], x.reference[..., :h]], axis=-1)
    far = np.concatenate([x.reach[..., h:], x.reach[..., :h]], axis=-1)
    c, s = np.broadcast_to(cos.reference, x.shape), np.broadcast_to(sin.reference, x.shape)
    reference = x.reference * c + turned * s
    carried = raised(x.reach * np.abs(c) + far * np.abs(s))
    own = 4 * UNIT * (np.abs(x.reference * c) + np.abs(turned * s)) + FAINT
    apart = walk.own(node, 0)
    wide = x if apart is None else replace(x, reach=raised(x.reach + apart))
    far_wide = np.concatenate([wide.reach[..., h:], wide.reach[..., :h]], axis=-1)
    around = box.widen(box.exact(turned), far_wide)
    error = rope_error(walk.kernel, wide.box, around, c, s)
    own = own + gamma(8, UNIT) * carried
    split, kernel = only_sure(own + error), walk.kernel
    if kernel.coarse:  # both products are stored: their roundings are no part of what is sure
        terms = raised(x.size * np.abs(c) + raised(np.abs(turned) + far) * np.abs(s))
        inside = raised(gamma(4, kernel.inner.u) * terms) + 2 * underflow(kernel)
        u, eta = kernel.off(kernel.compute)
        cast = raised(u * (1 + 2.0**-10) * terms)
        split = only_sure(own + inside).with_cast(kernel, cast, 2 * (1 + 2.0**-10) * eta)
    operands = _operands((x, _turned(c, s)))
    return _settled(
        walk,
        node,
        Formed(
            reference,
            carried,
            operands,
            raised(own + error),
            split=split,
            own=rotated_own(apart, c, s),
        ),
    )


def _turned(cos: Floats, sin: Floats) -> Pull:
    """Return the pullback of rope: α·cos, and α·sin turned back."""
    h = cos.shape[-1] // 2

    def pull(adjoint: Adjoint) -> Adjoint:
        wide = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], cos.shape[-1]))
        by_sin = wide.times(sin).values
        back = np.concatenate([by_sin[..., h:], -by_sin[..., :h]], axis=-1)
        return merged(wide.times(cos), Adjoint(back, wide.start))

    return pull


def _settled(walk: Walk, node: Node, formed: Formed) -> Form:
    return settle(walk, node, formed, target(walk.kernel, node), walk.kernel.inner)


def _operands(*parts: tuple[Form, Pull]) -> tuple[tuple[int, Pull], ...]:
    return tuple((form.place, pull) for form, pull in parts if form.place is not None)


def _copies(reference: Floats, *operands: Form) -> float:
    """Return γ of the sums that broadcasting makes of adjoints."""
    least = min(math.prod(form.shape) for form in operands)
    return gamma(4 + reference.size // max(1, least), UNIT)


def _broadcast(form: Form, reference: Floats) -> Floats:
    return np.broadcast_to(form.reference, reference.shape)


def _spread(shape: tuple[int, ...]) -> Pull:
    return lambda a: summed(a, shape)


def _scaled(shape: tuple[int, ...], factor: float) -> Pull:
    return lambda a: summed(Adjoint(a.values * factor, a.start), shape)


def _times(factor: Floats, shape: tuple[int, ...]) -> Pull:
    return lambda a: summed(a.times(factor), shape)
