"""Inputs, parameters and data movement in rational numbers."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from fractions import Fraction

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Array, Node, View
from kcdsl_certs.recheck.numerics.formats import FLOAT32, FORMATS
from tests.support.rationals.cells import (
    ZERO,
    Cells,
    Pair,
    Shape,
    add,
    both,
    nearest,
    points,
    spread,
    sub,
    widened,
)
from tests.support.rationals.state import DriftProblem, Known, held, reduce, stored
from tests.support.rationals.weights import as_stored


def input_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return the block input."""
    node.attrs.exactly()
    centre, radius = problem.region
    if centre is None or radius is None or node.role:
        raise Rejected("rule/input", "a block on token ids has no block input")
    c, r = (_numbers(array, "d", 8) for array in (centre, radius))
    wide = spread(radius.shape, centre.shape)
    x = widened(points(centre.shape, c), [r[k] for k in wide])
    if problem.drift is not None:
        low, high = (_numbers(array, "d", 8) for array in problem.drift)
        apart = Cells(x.shape, tuple(zip(low, high, strict=True)))
        return reduce(x, both(x, apart, add), apart)
    sides = []
    for kernel in (problem.train, problem.infer):
        form = kernel.result("input", "")
        if form.precision >= FLOAT32.precision:
            sides.append((x, points(x.shape, [ZERO] * len(c))))
        else:
            sides.append(stored(kernel, form, x, [ZERO] * len(c), FLOAT32))
    (t, wrong_t), (i, wrong_i) = sides
    return reduce(t, i, both(wrong_i, wrong_t, sub))


def _numbers(array: Array, code: str, size: int) -> list[Fraction]:
    try:
        values = struct.unpack(f"<{len(array.data) // size}{code}", array.data)
        return [Fraction(v) for v in values]
    except (OverflowError, ValueError):
        raise Rejected("parameter/not-finite", "an array holds NaN or infinity") from None


def param_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return a checkpoint tensor as either kernel stores it."""
    key = node.attrs.exactly("key").text("key")
    return held(problem, key, linear=node.name in problem.weights)


def _known(t: Cells, i: Cells) -> Known:
    return Known(t, i, both(i, t, sub))


def constant_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return a float32 constant as either kernel stores it."""
    key = node.attrs.exactly("key").text("key")
    array = problem.block.constants.get(key)
    if array is None or array.dtype != "float32":
        raise Rejected("graph/field", f"there is no float32 constant {key[:80]!r}")
    values = _numbers(array, "f", 4)
    if node.format:
        if values != [nearest(v, FORMATS[node.format]) for v in values]:
            raise Rejected("graph/field", f"constant {key[:80]!r} is not one of {node.format}")
        held_so = points(array.shape, values)
        return _known(held_so, held_so)
    t, i = (
        points(array.shape, [as_stored(v, k.holding, k) for v in values])
        for k in (problem.train, problem.infer)
    )
    return _known(t, i)


def embedding_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return rows of a table."""
    ids = node.attrs.exactly("ids").integers("ids", 0)
    key = problem.keys.get(node.inputs[0])
    if key is None:
        raise Rejected("rule/weight", "the table of an embedding must be a parameter")
    table = held(problem, key, linear=False)
    if not ids or len(table.t.shape) != 2 or max(ids) >= table.t.shape[0]:
        raise Rejected("graph/shape", "an embedding needs ids within a matrix")
    width = table.t.shape[1]
    order = [k * width + j for k in ids for j in range(width)]
    return _moved(table, (len(ids), width), order)


def _moved(x: Known, shape: Shape, order: Sequence[int]) -> Known:
    return Known(*(part.taken(shape, order) for part in (x.t, x.i, x.d)))


def view_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return the elements where a view puts them."""
    view = View.of(node, inputs[0].t.shape)
    places: list[list[int]] = []
    for axis, many in zip(view.order, view.sizes, strict=True):
        stride = math.prod(view.split[axis + 1 :])
        kept = [k * stride for k in range(*view.ranges[axis])]
        places.append(kept if len(kept) == many else kept * many)
    return _moved(inputs[0], node.shape, [sum(index) for index in itertools.product(*places)])


def concat_rule(problem: DriftProblem, node: Node, inputs: list[Known]) -> Known:
    """Return the inputs one after another along one dimension."""
    shapes = [x.t.shape for x in inputs]
    rank = len(shapes[0])
    dim = node.attrs.exactly("dim").integer("dim", -rank)
    if dim >= rank or any(len(shape) != rank for shape in shapes):
        raise Rejected("graph/shape", "the inputs of a concat do not fit")
    dim %= rank
    rests = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(rests) != 1:
        raise Rejected("graph/shape", "the inputs of a concat do not fit")
    total = sum(shape[dim] for shape in shapes)
    shape = (*shapes[0][:dim], total, *shapes[0][dim + 1 :])

    def joined(parts: list[Cells]) -> Cells:
        pairs: list[Pair] = []
        for outer in range(math.prod(shape[:dim])):
            for part in parts:
                length = math.prod(part.shape[dim:])
                pairs += part.pairs[outer * length : (outer + 1) * length]
        return Cells(shape, tuple(pairs))

    t, i, d = (joined([getattr(x, part) for x in inputs]) for part in ("t", "i", "d"))
    return Known(t, i, d)
