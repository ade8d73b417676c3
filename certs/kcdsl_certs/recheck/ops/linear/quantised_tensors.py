"""Tensors that a kernel stores as codes with a static scale (Rules 2.22, 2.13)."""

from __future__ import annotations

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.form import Form, Operand, Version, Walk, form_of, known_form
from kcdsl_certs.recheck.affine.tape import VJP, TapeEntry
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, Box, Floats, raised
from kcdsl_certs.recheck.interval.state import DriftProblem, Own, State, Value, numeric, reduce
from kcdsl_certs.recheck.numerics.kernel import TensorCodes
from kcdsl_certs.recheck.ops.operation import Operation

_CODES = 256.0
_RATIO = 2.0**-22  # bounds the relative error of a ratio
_ROUNDINGS = 2.0**-12  # bounds the roundings of a ratio and of a product, in steps


def _codes(kernel_codes: tuple[tuple[str, TensorCodes], ...], node: Node) -> TensorCodes | None:
    """Return the codes in which a kernel stores a node's tensor; None if it does not quantise."""
    name = node.attrs.exactly("tensor").text("tensor")
    if node.role or node.format:
        raise Rejected("graph/field", f"quantise {node.name[:80]!r} has a role or a format")
    return next((codes for tensor, codes in kernel_codes if tensor == name), None)


def read_back(x: Box, codes: TensorCodes) -> tuple[Box, Box]:
    """Return the values of codes, and their errors.

    The value is monotone in x, so its ends are those of the ends of x. Its error is at most half a
    step, and beyond the last codes the distance to these.
    """
    step = codes.scale
    bottom, top = -codes.zero * step, (_CODES - 1 - codes.zero) * step  # exact: 8 and 24 bits

    def number(value: Floats, slack: float) -> Floats:
        ratio = value / step
        code = np.clip(np.rint(ratio + slack * np.abs(ratio)) + codes.zero, 0.0, _CODES - 1)
        found = ((code - codes.zero) * step).astype(np.float32)
        return np.asarray(found, dtype=np.float64)

    value = Box(number(x.lo, -_RATIO), number(x.hi, _RATIO))
    slip = step * _ROUNDINGS

    def most(beyond: Floats) -> Floats:
        return np.maximum(box.above(beyond + slip), step / 2 + slip)

    over = most(box.add_up(x.hi, np.full(x.shape, -top)))
    under = most(box.add_up(-x.lo, np.full(x.shape, bottom)))
    return value, box.meet(box.sub(value, x), Box(-over, under))


def tensor_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return the tensor as both kernels read it; the operand where a kernel does not quantise it.

    Raises Rejected "rule/quantise" if neither does.
    """
    if problem.rows is not None:
        raise Rejected("bound/not-finite", "a quantised tensor of sequences of any length")
    x = numeric(inputs[0])
    held: list[Box] = []
    off: list[Box] = []
    own: list[Own] = []
    for kernel, given, apart in zip((problem.train, problem.infer), (x.t, x.i), x.own, strict=True):
        codes = _codes(kernel.tensors, node)
        value, wrong = (given, box.zeros(x.shape)) if codes is None else read_back(given, codes)
        held.append(value)
        off.append(wrong)
        own.append(apart if codes is None else None)
    if all(_codes(kernel.tensors, node) is None for kernel in (problem.train, problem.infer)):
        raise Rejected("rule/quantise", f"no kernel quantises the tensor of {node.name[:80]!r}")
    if problem.errors is not None:
        problem.errors[node.name] = (off[0], off[1])
    drift = box.add(x.d, box.sub(off[1], off[0]))
    return reduce(held[0], held[1], drift, (own[0], own[1]))


def tensor_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return the tensor as the kernel reads it: the same value of one reading for all readers."""
    codes = _codes(walk.kernel.tensors, node)
    if codes is None:
        return _passed_on(walk, node, form_of(inputs[0]))
    x = form_of(walk.forms[walk.reading(node.inputs[0], (node, 0))])
    value, off = read_back(x.box, codes)
    middle, shift = value.lo / 2 + value.hi / 2, off.lo / 2 + off.hi / 2
    half = np.maximum(box.add_up(value.hi, -middle), box.add_up(middle, -value.lo))
    wide = np.maximum(box.add_up(off.hi, -shift), box.add_up(shift, -off.lo))
    flat = half <= wide
    shifted = x.reference + shift
    reference = np.where(flat, middle, shifted)
    radius = raised(np.where(flat, half, wide + 2.0**-52 * np.abs(shifted))) + TINY
    farthest = np.maximum(box.add_up(value.hi, -reference), box.add_up(reference, -value.lo))
    error_bound = np.minimum(raised(np.where(flat, 0.0, x.error_bound) + radius), farthest) + TINY
    operands: tuple[tuple[int, VJP], ...] = ()
    if x.place is not None and not flat.all():
        operands = ((x.place, lambda a: a.times(np.where(flat, 0.0, 1.0))),)
    return Form(reference, error_bound, walk.tape.add(TapeEntry(error_bound, operands, radius)))


def _passed_on(walk: Walk, node: Node, x: Form) -> Form:
    """Return the operand unchanged, with all its readings."""
    if x.place is None:
        return known_form(x.reference)
    own = walk.own(node, 0)
    if own is not None:
        walk.versions[node.name] = Version(own)
    place = walk.tape.add(TapeEntry(x.error_bound, ((x.place, lambda a: a),)))
    return Form(x.reference, x.error_bound, place, cases=x.cases)


OPERATIONS = {"quantise": Operation(1, 1, tensor_interval, tensor_affine, None, forms=False)}
