"""The product with the values in the interval domain, and attention at any length."""

from __future__ import annotations

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.any_length import KEY
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Bools, Box, Floats
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Own,
    Probabilities,
    Rows,
    State,
    Value,
    numeric,
    reduce,
    settle,
)
from kcdsl_certs.recheck.interval.sums import rounding_of_sums
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.attention import probabilities, rope
from kcdsl_certs.recheck.ops.linear.matmul import check_product


def context_interval(problem: DriftProblem, node: Node, p: Probabilities, v: State) -> State:
    """Return the probabilities times the values."""
    node.attrs.exactly()
    check_product(p.shape, v.shape)
    values_d, values_t = hull(v.d, p.allowed), hull(v.t, p.allowed)
    carried = box.meet(box.matmul(p.star.i, v.d), values_d)
    moved = box.around(box.up(p.variation * box.lifted(box.add_up(values_t.hi, -values_t.lo))))
    for centre in _centres(v.t):
        moved = box.meet(moved, box.matmul(p.star.d, box.sub(v.t, box.exact(centre))))
    y_t = box.meet(box.matmul(p.star.t, v.t), values_t)
    y_i = box.meet(box.matmul(p.star.i, v.i), hull(v.i, p.allowed))
    errors = (
        _context_error(problem.train, p.star.t, p.rounding_t, v.t, y_t),
        _context_error(problem.infer, p.star.i, p.rounding_i, v.i, y_i),
    )
    inner = problem.train.accumulate, problem.infer.accumulate
    return settle(problem, node, (y_t, y_i, box.add(carried, moved)), errors, inner)


def _centres(v: Box) -> tuple[Floats, Floats]:
    """Return two constants near the middle of each column; any constant may be subtracted."""
    low, high = v.lo.min(axis=-2, keepdims=True), v.hi.max(axis=-2, keepdims=True)
    return low / 2 + high / 2, (v.lo / 2 + v.hi / 2).mean(axis=-2, keepdims=True)


def _context_error(kernel: KernelNumerics, p: Box, rounding: Floats, v: Box, y: Box) -> Floats:
    n = p.shape[-1]
    tiles = -(-n // kernel.tile) if kernel.fused else 1
    size = box.mag(v)
    weights = box.up(box.lifted(p.hi) + box.lifted(rounding))
    wrong = box.product_up(box.lifted(rounding), size)
    total, result = box.product_up(weights, size), box.up(box.mag(y) + wrong)
    sums = rounding_of_sums(kernel, (weights, size), (total, result), extra=2 * tiles + 4)
    return box.up(wrong + sums)


def hull(v: Box, allowed: Bools) -> Box:
    """Return for every row the hull of the rows of v [..., n, d] that its columns allow."""
    if allowed.all():
        shape = np.broadcast_shapes(allowed.shape[:-2], v.shape[:-2])
        shape = (*shape, allowed.shape[-2], v.shape[-1])
        lo, hi = v.lo.min(axis=-2, keepdims=True), v.hi.max(axis=-2, keepdims=True)
        return Box(np.broadcast_to(lo, shape), np.broadcast_to(hi, shape))
    rows: list[tuple[Floats, Floats]] = []
    for row in range(allowed.shape[-2]):
        if row and np.array_equal(allowed[..., row, :], allowed[..., row - 1, :]):
            rows.append(rows[-1])
            continue
        part = allowed[..., row, :, None]
        lo = np.where(part, v.lo, np.inf).min(axis=-2)
        rows.append((lo, np.where(part, v.hi, -np.inf).max(axis=-2)))
    return Box(np.stack([r[0] for r in rows], axis=-2), np.stack([r[1] for r in rows], axis=-2))


_CHUNK = 512  # positions at a time


def at_any_length(problem: DriftProblem, node: Node, inputs: list[Value]) -> Value | None:
    """Return the value of a node with a rule of its own at any length; None for all others."""
    rows = problem.rows
    if rows is None:
        return None
    if node.op == "softmax" and KEY in rows.marks[node.name]:
        return probabilities_at_any_length(problem, node, inputs, rows.longest)
    if node.op == "matmul" and node.role == "context":
        return context_at_any_length(problem, node, inputs, rows.longest)
    if node.op == "rope":
        return rotation(problem, node, inputs, rows)
    return None


def probabilities_at_any_length(
    problem: DriftProblem, node: Node, inputs: list[Value], longest: int
) -> Probabilities:
    """Return the softmax over any number of columns that have the same box of scores.

    A mask removes columns; it must be a mask constant that leaves a column in every row.
    """
    node.attrs.exactly()
    scores = numeric(inputs[0])
    allowed = probabilities.allowed_columns(inputs[1:], scores.shape)
    spread = box.add_up(scores.d.hi.max(axis=-1), -scores.d.lo.min(axis=-1))[..., None]
    most = np.minimum(box.up(np.tanh(box.lifted(spread) / 4), 8), 1.0)
    unit = Box(np.zeros(scores.shape), np.ones(scores.shape))
    star = reduce(unit, unit, box.around(np.broadcast_to(most, scores.shape)))
    everywhere = np.ones(scores.shape, dtype=np.bool_)
    single, total = [], []
    for kernel, read, own in (
        (problem.train, scores.t, scores.own[0]),
        (problem.infer, scores.i, scores.own[1]),
    ):
        theta = probabilities.relative_rounding(kernel, read, everywhere, longest, own)
        single.append(np.broadcast_to(_misplaced(kernel, theta, 1), scores.shape))
        total.append(_misplaced(kernel, theta, longest))
    stored = reduce(
        box.widen(star.t, single[0]),
        box.widen(star.i, single[1]),
        box.widen(star.d, box.up(single[0] + single[1])),
        (
            None if problem.train.stepped else box.up(1 + single[0]),
            None if problem.infer.stepped else box.up(1 + single[1]),
        ),
    )
    return Probabilities(star, most, single[0], single[1], allowed, stored, (total[0], total[1]))


def _misplaced(kernel: KernelNumerics, theta: Floats, columns: int) -> Floats:
    """Return a bound of Σ|stored - p| over `columns` columns, whose p sum to at most 1."""
    u, eta = kernel.off(kernel.probabilities)
    lost = columns * probabilities.ZETA
    found = box.up(theta + lost + u * (1 + theta + lost) + columns * eta)
    if not bool(np.isfinite(found).all()):
        raise Rejected("bound/not-finite", "the rounding of a softmax has no bound")
    return found


def context_at_any_length(
    problem: DriftProblem, node: Node, inputs: list[Value], longest: int
) -> State:
    """Return probabilities at any length times values that all have the same box."""
    node.attrs.exactly()
    p = inputs[0]
    if not isinstance(p, Probabilities) or p.total is None:
        raise Rejected("graph/rows", "a context product without its softmax")
    v = numeric(inputs[1])
    check_product(p.shape, v.shape)
    shape = (*np.broadcast_shapes(p.shape[:-2], v.shape[:-2]), p.shape[-2], v.shape[-1])
    one = State(_widest(v.t), _widest(v.i), _widest(v.d))
    moved = box.up(p.variation * box.lifted(box.add_up(one.t.hi, -one.t.lo)))
    errors = [
        np.broadcast_to(_error(kernel, off, values, longest), shape)
        for kernel, off, values in (
            (problem.train, p.total[0], one.t),
            (problem.infer, p.total[1], one.i),
        )
    ]
    drift = box.add(one.d, box.around(moved))
    exact = _filled(one.t, shape), _filled(one.i, shape), _filled(drift, shape)
    inner = problem.train.accumulate, problem.infer.accumulate
    return settle(problem, node, exact, (errors[0], errors[1]), inner)


def _widest(v: Box) -> Box:
    """Return the hull of all rows as one row."""
    return Box(v.lo.min(axis=-2, keepdims=True), v.hi.max(axis=-2, keepdims=True))


def _filled(v: Box, shape: tuple[int, ...]) -> Box:
    return v.map(lambda ends: np.broadcast_to(ends, shape))


def _error(kernel: KernelNumerics, off: Floats, values: Box, longest: int) -> Floats:
    """Return E of the product for every number of columns from 1 to `longest`."""
    size = box.mag(values)
    weight, wrong = box.up(1 + off), box.up(box.lifted(off) * size)
    tiles = -(-longest // kernel.tile) if kernel.fused else 1
    sizes = box.up(weight * size), box.up(size + wrong)
    sums = rounding_of_sums(kernel, (weight, size), sizes, extra=2 * tiles + 4, columns=longest)
    return box.up(wrong + sums)


def rotation(problem: DriftProblem, node: Node, inputs: list[Value], rows: Rows) -> State:
    """Return the hull of the rotations by all positions."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    first_t, first_i, first_d = (
        part.map(lambda ends: ends[..., :1, :]) for part in (x.t, x.i, x.d)
    )
    first = State(first_t, first_i, first_d)
    versions = [None if own is None else own[..., :1, :] for own in x.own]
    cos, sin = (rows.tables[name] for name in node.inputs[1:3])
    found: list[tuple[Box, Box, Box, Floats, Floats]] = []
    own: list[Own] = [None, None]
    for start in range(0, rows.longest, _CHUNK):
        some = slice(start, start + _CHUNK)
        c, s = (_rows_of(table, some) for table in (cos, sin))
        exact, errors = rope.rotated(problem, first, c, s)
        boxes = [_widest(part) for part in exact]
        turned = [
            rope.rotated_own(one, table_c.lo, table_s.lo)
            for one, table_c, table_s in zip(versions, (c.t, c.i), (s.t, s.i), strict=True)
        ]
        for side, part in enumerate(turned):
            if part is not None:
                most = part.max(axis=-2, keepdims=True)
                before = own[side]
                own[side] = most if before is None else np.maximum(before, most)
        worst = [error.max(axis=-2, keepdims=True) for error in errors]
        found.append((boxes[0], boxes[1], boxes[2], worst[0], worst[1]))
    t, i, d, wrong_t, wrong_i = found[0]
    for more in found[1:]:
        t, i, d = box.join(t, more[0]), box.join(i, more[1]), box.join(d, more[2])
        wrong_t, wrong_i = np.maximum(wrong_t, more[3]), np.maximum(wrong_i, more[4])
    errors = np.broadcast_to(wrong_t, x.shape), np.broadcast_to(wrong_i, x.shape)
    exact = _filled(t, x.shape), _filled(i, x.shape), _filled(d, x.shape)
    return settle(problem, node, exact, errors, own=(own[0], own[1]))


def _rows_of(table: State, some: slice) -> State:
    t, i, d = (part.map(lambda ends: ends[some]) for part in (table.t, table.i, table.d))
    return State(t, i, d)
