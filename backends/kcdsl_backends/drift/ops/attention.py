"""Attention: rotary positions (section 4), and probabilities times values (section 5)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.cases import Cases, choices, of_product, split
from kcdsl_backends.drift.affine.ellipsoids import ImageEllipsoid, Part, largest_singular_value
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.tape import PASS, Adjoints, Nonlinear
from kcdsl_backends.drift.boxes import (
    SAFE,
    Box,
    NoBound,
    gamma,
    magnitude_product,
    matmul,
    refuse_overflow,
    up,
)
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding, added, times
from kcdsl_backends.drift.boxes.state import Parameter, Rows, SoftmaxState, State, Step
from kcdsl_backends.drift.boxes.sums import Sums
from kcdsl_backends.drift.linear import LinearPart, LinearRun
from kcdsl_backends.drift.linear.tape import LINEAR_PASS, Functional, Source, added_adjoints
from kcdsl_backends.drift.ops.arithmetic import _sizes
from kcdsl_backends.drift.ops.bilinear import Heads, heads
from kcdsl_backends.drift.ops.matmul import affine_product, linear_matmul
from kcdsl_backends.drift.ops.one_row import row_of_values, through_values
from kcdsl_backends.drift.ops.operation import Operation
from kcdsl_backends.drift.ops.row_images import images_of_values


def interval_context(step: Step) -> State:
    """Bound probabilities @ values with bounds that a generic product lacks.

    Σ p' Δv is a convex combination of the drifts of the values; in Σ Δp v any constant may be
    subtracted from v, and the sum is at most (total variation) * (max v - min v).
    """
    left = step.known[step.node.inputs[0]]
    if not isinstance(left, SoftmaxState):
        raise NoBound(step.node.name, "a context product without its softmax")
    values, mask, p = step.operand(1), left.mask, left.exact
    by_values = matmul(p.infer, values.drift).meet(_hull_over_keys(values.drift, mask))
    error_bound = _hull_over_keys(values.train, mask)
    by_probabilities = Box.around(
        up(left.variation.unsqueeze(-1) * up(error_bound.hi - error_bound.lo))
    )
    for centre in _centres(values.train):
        centred = values.train - Box.point(centre.expand(values.train.shape))
        by_probabilities = by_probabilities.meet(matmul(p.drift, centred))
    train = matmul(p.train, values.train).meet(error_bound)
    infer = matmul(p.infer, values.infer).meet(_hull_over_keys(values.infer, mask))
    errors = (
        _context_error(p.train, left.rounding_train, values.train, train, step.kernels.train),
        _context_error(p.infer, left.rounding_infer, values.infer, infer, step.kernels.infer),
    )
    return step.finish((train, infer), by_values + by_probabilities, errors, accumulates=True)


def _centres(values: Box) -> tuple[Tensor, Tensor]:
    """Return two constants per column to subtract from the values: the middle and the mean."""
    low, high = values.lo.amin(-2, keepdim=True), values.hi.amax(-2, keepdim=True)
    return low / 2 + high / 2, (values.lo / 2 + values.hi / 2).mean(-2, keepdim=True)


def _hull_over_keys(values: Box, mask: Tensor | None) -> Box:
    """Return [min, max] of the values over the keys that each query row may read."""
    if mask is None:
        return Box(values.lo.amin(-2, keepdim=True), values.hi.amax(-2, keepdim=True))
    lows, highs = [], []
    for row in range(mask.shape[-2]):
        readable = mask[..., row, :, None]
        lows.append(torch.where(readable, values.lo, torch.inf).amin(-2))
        highs.append(torch.where(readable, values.hi, -torch.inf).amax(-2))
    return Box(torch.stack(lows, -2), torch.stack(highs, -2))


def _context_error(p: Box, rounding: Tensor, values: Box, result: Box, kernel: Rounding) -> Tensor:
    extra = 2 * kernel.numerics.attention.tiles(p.shape[-1]) + 4
    magnitude = values.mag()
    wrong = magnitude_product(rounding, magnitude)
    weights = up(p.hi + rounding)
    total = magnitude_product(weights, magnitude)
    sums = Sums(weights, magnitude, total, up(result.mag() + wrong), kernel, extra)
    return up(wrong + sums.error(), 4)


def context_at_any_length(step: Step, rows: Rows) -> State:
    """Bound the product of such probabilities with values that all lie in one box.

    Σ p' Δv is a convex combination of drifts of values, Σ p v one of values, and Σ Δp v is at most
    (total variation) * (max v - min v), for any number of columns.
    """
    left = step.known[step.node.inputs[0]]
    if not isinstance(left, SoftmaxState) or left.sums is None:
        raise NoBound(step.node.name, "a context product without its softmax")
    values, shape = step.operand(1), step.node.shape
    train, infer, drift = (
        Box(box.lo.amin(-2, keepdim=True), box.hi.amax(-2, keepdim=True))
        for box in (values.train, values.infer, values.drift)
    )
    moved = Box.around(up(left.variation.unsqueeze(-1) * up(train.hi - train.lo)))
    wrong, kernels = left.sums, step.kernels
    errors = (
        _any_length_error(wrong[0], train, kernels.train, rows.longest).expand(shape),
        _any_length_error(wrong[1], infer, kernels.infer, rows.longest).expand(shape),
    )
    exact = train.expand(shape), infer.expand(shape)
    return step.finish(exact, (drift + moved).expand(shape), errors, accumulates=True)


def _any_length_error(wrong: Tensor, values: Box, kernel: Rounding, longest: int) -> Tensor:
    """Return E of a context product [..., rows, n]; `wrong` is Σ|computed p - p| of every row."""
    extra = 2 * kernel.numerics.attention.tiles(longest) + 4
    magnitude = values.mag()
    weights = up(1 + wrong)
    off, total = up(wrong * magnitude), up(weights * magnitude)
    sums = Sums(weights, magnitude, total, up(magnitude + off), kernel, extra, columns=longest)
    return up(off + sums.error(), 4)


def affine_context(run: KernelRun, node: Node) -> None:
    """Append probabilities @ values."""
    p, v = run.operand(node, 0), run.operand(node, 1)
    keys = p.reference.shape[-1]
    steps = keys + 2 * run.rounding.numerics.attention.tiles(keys) + 4
    result = affine_product(run, node, p, v, steps, 2)
    second = p.error_bound @ v.error_bound * SAFE
    cases = _in_cases(run, p, v, result.internal)
    tight = bool((run.tape.radius > 0).any())
    values = heads(run, node, 1)
    matters = second.sum() > run.small(node, result.reference.abs().sum(-1, keepdim=True)).sum()
    rows = torch.ones_like(v.error_bound[..., :1], dtype=torch.bool) & matters
    nonlinear = None
    if values is not None and v.index is not None and run.passing(node, v.index, "product", rows):
        nonlinear = _second_order(p.error_bound, values)
    internal, parts = result.internal, result.roundings
    if nonlinear is None:
        internal = (internal + second) * SAFE
        parts = None if parts is None else parts.with_sure(second)
    one_row = None
    if values is not None:
        one_row = row_of_values(run, p, values, v.reference, second_order=nonlinear is not None)
    formed = Result(
        result.reference,
        result.vjp,
        result.linear,
        internal,
        nonlinear=nonlinear,
        extra=None if nonlinear is None else second,
        cases=cases,
        roundings=parts,
        one_row=one_row,
        gathered=images_of_values(run, node, p, v.reference, values),
    )
    round_result(run, node, formed, accumulates=True, tight=tight)


def _in_cases(run: KernelRun, p: Operand, v: Operand, error: Tensor) -> Cases | None:
    """Return the product in each case of the probabilities, for probabilities known by steps."""
    ends = None if p.index is None else run.tape.entries[p.index].choices
    if ends is None:
        return None
    around = Box(v.reference - v.error_bound * SAFE, v.reference + v.error_bound * SAFE)
    room = choices(error.shape) - int(math.log2(ends.low.shape[0]))
    worth = v.reference.abs().sum(-1)[..., None, :]
    return of_product(split(ends, worth, room), around, error)


def _second_order(moved: Tensor, values: Heads) -> Nonlinear:
    """Bound Σ_j moved[h, t, j]·|a·e_v[h, j]| with e_v[h, j] = W_h e_x[j] + o[h, j]."""
    beyond = through_values(values, moved)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, last), (row, end), (start, stop) = a.window
        total = a.values.new_zeros(a.values.shape[0])
        for h in range(first, last):
            own = moved[h, row:end] @ values.own[h, :, start:stop] * SAFE  # [rows, d]
            total = total + (a.values[:, h - first].abs() * own).flatten(1).sum(-1)
            total = total + beyond(a, h)
        total = total * SAFE
        return -total, total

    lengths: list[Tensor] = []

    def each_row(a: Adjoint) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the functionals of every row [B, heads, d], and bounds [heads] of the norm of the
        remainder in each head."""
        if not lengths:
            each = values.lengths + values.own.norm(dim=-1) * SAFE
            lengths.append((moved @ each[..., None])[..., 0] * SAFE)
        (first, last), (row, end), _ = a.window
        for t in range(row, end):
            yield a.values[:, :, t - row], lengths[0][first:last, t]

    def norm(a: Adjoint) -> float:
        total = 0.0
        for part, sizes in each_row(a):
            by_head = sum(
                largest_singular_value(part[:, h]) * float(size) for h, size in enumerate(sizes)
            )
            total += min(
                by_head, largest_singular_value(part.flatten(1)) * float(sizes.norm()) * SAFE
            )
        low, high = between(a)
        return min(total, float(torch.maximum(-low, high).norm())) * SAFE

    def around(a: Adjoint) -> list[Part]:
        found = list[Part]()
        for part, sizes in each_row(a):
            flat = part.flatten(1)
            size = float(sizes.square().sum()) * SAFE
            found.append(ImageEllipsoid.of(flat, flat.new_full(flat.shape[1:], size)))
        return found

    return Nonlinear(between, norm, around)


_POSITIONS = 256
"""Positions whose rotations are formed at a time."""


def interval_rope(step: Step) -> State:
    """Bound the rotary embedding x∘C + rot(x)∘S with known tables."""
    cos = step.kernels.plain(step.operand_node(1))
    sin = step.kernels.plain(step.operand_node(2))
    if cos.moved is not None or sin.moved is not None:
        raise NoBound(step.node.name, "the tables of a rotation are parameters that may move")
    x = step.operand(0)
    (train, infer, drift), errors = rotated(step, x, cos, sin)
    apart = turned_apart(x.apart[0], cos.train, sin.train)
    other = turned_apart(x.apart[1], cos.infer, sin.infer)
    return step.finish((train, infer), drift, errors, apart=(apart, other))


def turned_apart(apart: Apart, cos: Tensor, sin: Tensor) -> Apart:
    """Return how far rotated readings may differ from each other."""
    if apart is None:
        return None
    first, second = apart.chunk(2, -1)
    return added(times(apart, cos.abs()), times(torch.cat([second, first], -1), sin.abs()))


def rotated(
    step: Step, x: State, cos: Parameter, sin: Parameter
) -> tuple[tuple[Box, Box, Box], tuple[Tensor, Tensor]]:
    """Return T, I and D of x∘C + rot(x)∘S before it is stored, and E of both kernels."""

    def rotate(box: Box) -> Box:
        half = box.shape[-1] // 2
        return Box(
            torch.cat([-box.hi[..., half:], box.lo[..., :half]], -1),
            torch.cat([-box.lo[..., half:], box.hi[..., :half]], -1),
        )

    def turned(box: Box, c: Tensor, s: Tensor) -> Box:
        return box * Box.point(c) + rotate(box) * Box.point(s)

    def error(box: Box, c: Tensor, s: Tensor, kernel: Rounding) -> Tensor:
        terms = up(box.mag() * c.abs() + rotate(box).mag() * s.abs(), 2)
        total = gamma(4, kernel.u_function) * terms + 2 * kernel.eta_function
        if kernel.coarse:
            refuse_overflow(step.node.name, terms, kernel.compute, ", a product of the rotation,")
            u, eta = kernel.unit(kernel.compute), kernel.faint(kernel.compute)
            total = total + (u * terms + 2 * eta) * (1.0 + 2.0**-10)
        return up(total, 4)

    drift = turned(x.drift, cos.infer, sin.infer) + (
        x.train * cos.difference + rotate(x.train) * sin.difference
    )
    boxes = turned(x.train, cos.train, sin.train), turned(x.infer, cos.infer, sin.infer), drift
    return boxes, (
        error(x.train, cos.train, sin.train, step.kernels.train),
        error(x.infer, cos.infer, sin.infer, step.kernels.infer),
    )


def rope_at_any_length(step: Step, rows: Rows) -> State:
    """Bound the rotation at any position, by the hull of the tables over all positions."""
    cos, sin = (rows.tables[step.operand_node(place).name] for place in (1, 2))
    found: tuple[Box, Box, Box] | None = None
    errors: tuple[Tensor, Tensor] | None = None
    one, apart = _first_row(step.operand(0)), list[Apart]([None, None])
    for here in _places(cos, sin):
        c, s = here
        for side, tables in enumerate(((c.train, s.train), (c.infer, s.infer))):
            turned = turned_apart(one.apart[side], *tables)
            if turned is not None:
                most, before = turned.amax(-2, keepdim=True), apart[side]
                apart[side] = most if before is None else torch.maximum(before, most)
        boxes, wrong = rotated(step, one, *here)
        some = _over_rows(boxes[0]), _over_rows(boxes[1]), _over_rows(boxes[2])
        worst = wrong[0].amax(-2, keepdim=True), wrong[1].amax(-2, keepdim=True)
        if found is None or errors is None:
            found, errors = some, worst
        else:
            found = found[0].hull(some[0]), found[1].hull(some[1]), found[2].hull(some[2])
            errors = torch.maximum(errors[0], worst[0]), torch.maximum(errors[1], worst[1])
    if found is None or errors is None:
        raise NoBound(step.node.name, "the tables of positions are empty")
    shape = step.node.shape
    train, infer, drift = (box.expand(shape) for box in found)
    wrong = errors[0].expand(shape), errors[1].expand(shape)
    return step.finish((train, infer), drift, wrong, apart=(apart[0], apart[1]))


def _first_row(state: State) -> State:
    """Return the state of the first row; all rows have the same state."""
    boxes = (state.train, state.infer, state.drift)
    train, infer, drift = (Box(b.lo[..., :1, :], b.hi[..., :1, :]) for b in boxes)
    return State(train, infer, drift, (_row(state.apart[0]), _row(state.apart[1])))


def _row(apart: Apart) -> Apart:
    return None if apart is None else apart[..., :1, :]


def _over_rows(box: Box) -> Box:
    return Box(box.lo.amin(-2, keepdim=True), box.hi.amax(-2, keepdim=True))


def _places(cos: Parameter, sin: Parameter) -> Iterator[tuple[Parameter, Parameter]]:
    """Yield both tables, a block of positions at a time."""
    for first in range(0, cos.train.shape[0], _POSITIONS):
        some = slice(first, first + _POSITIONS)
        yield (
            Parameter(cos.train[some], cos.infer[some]),
            Parameter(sin.train[some], sin.infer[some]),
        )


def affine_rope(run: KernelRun, node: Node) -> None:
    """Append the rotary embedding x∘C + rot(x)∘S with known tables."""
    index, x = run.entry(node, 0)
    if run.spread is not None and any(run.source(node, i).op == "param" for i in (1, 2)):
        raise NoBound(node.name, "the tables of a rotation are parameters that may move")
    cos, sin = run.parameters.plain(run.source(node, 1)), run.parameters.plain(run.source(node, 2))
    half, kernel = node.shape[-1] // 2, run.rounding
    shape = x.reference.shape
    cos, sin = cos.expand(shape), sin.expand(shape)

    def turned(values: Tensor) -> Tensor:
        return torch.cat([-values[..., half:], values[..., :half]], -1)

    def swapped(values: Tensor) -> Tensor:
        return torch.cat([values[..., half:], values[..., :half]], -1)

    reference = x.reference * cos + turned(x.reference) * sin
    linear = (x.error_bound * cos.abs() + swapped(x.error_bound) * sin.abs()) * SAFE
    size, apart = x.size, run.again(node, 0)
    if apart is not None:
        size = (size + apart) * SAFE
        apart = (apart * cos.abs() + swapped(apart) * sin.abs()) * SAFE
    terms = (size * cos.abs() + swapped(size) * sin.abs()) * SAFE
    own = gamma(4) * terms + gamma(PASS + 2) * linear
    error = gamma(4, kernel.u_function) * terms + 2 * kernel.eta_function
    parts = Roundings.none((error + own) * SAFE)
    if kernel.coarse:
        refuse_overflow(node.name, terms, kernel.compute)
        early = kernel.compute
        again = 1.0 + 2.0**-10  # the sum of both is rounded too
        cast, faint = again * kernel.unit(early) * terms, 2 * again * kernel.faint(early)
        error, parts = error + cast + faint, parts.cast(cast, faint, kernel.casts)

    def vjp(adjoint: Adjoint) -> Adjoints:
        window = (*adjoint.window[:-1], (0, 2 * half))
        part = (slice(None), *(slice(a, b) for a, b in window))
        values = adjoint.on(window)
        by_sin = values * sin[part[1:]]
        back = values * cos[part[1:]] + torch.cat([by_sin[..., half:], -by_sin[..., :half]], -1)
        return [(index, Adjoint(back, window, adjoint.shape))]

    internal = (error + own) * SAFE
    result = Result(reference, vjp, linear, internal, roundings=parts, again=apart)
    round_result(run, node, result)


def linear_rope(run: LinearRun, node: Node) -> None:
    """Append the rotary embedding x∘C + rot(x)∘S with known tables."""
    x = run.operand(node, 0)
    shape, half = x.reference.shape, node.shape[-1] // 2
    cos, sin = (run.kernels.plain(run.source(node, i)) for i in (1, 2))
    c, s = cos.train.expand(shape), sin.train.expand(shape)
    c_i, s_i = cos.infer.expand(shape), sin.infer.expand(shape)
    dc, ds = c_i - c, s_i - s

    def turned(values: Tensor) -> Tensor:
        return torch.cat([-values[..., half:], values[..., :half]], -1)

    def swapped(values: Tensor) -> Tensor:
        return torch.cat([values[..., half:], values[..., :half]], -1)

    def sizes(values: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return values * p.abs() + swapped(values) * q.abs()

    def back(part: Adjoint, p: Tensor, q: Tensor) -> Adjoint:
        window = (*part.window[:-1], (0, 2 * half))
        at = tuple(slice(first, last) for first, last in window)
        values = part.on(window)
        by_sin = values * q[at]
        result = values * p[at] + torch.cat([by_sin[..., half:], -by_sin[..., :half]], -1)
        return Adjoint(result, window, part.shape)

    def vjp(f: Functional) -> list[Source]:
        on_e = None if f.deviation is None else back(f.deviation, c, s)
        on_d = None if f.drift is None else back(f.drift, c_i, s_i)
        if f.drift is not None and bool(dc.any() or ds.any()):
            on_e = added_adjoints(on_e, back(f.drift, dc, ds))
        return [(x.index, Functional(on_e, on_d))]

    own, e, d = _sizes(x)
    back_error = gamma(LINEAR_PASS + 4)
    reference = x.reference * c + turned(x.reference) * s
    known = x.reference * dc + turned(x.reference) * ds
    run.append(
        node,
        reference,
        vjp,
        LinearPart(
            torch.zeros_like(known), back_error * (sizes(own, c, s) + sizes(e, c, s)) * SAFE
        ),
        LinearPart(
            known, (back_error * (sizes(own + e, dc, ds) + sizes(d, c_i, s_i)) + 2.0**-1000) * SAFE
        ),
    )


OPERATIONS = {
    "context": Operation(
        *(interval_context, affine_context, linear_matmul, (0, 1)),
        any_length=context_at_any_length,
    ),
    "rope": Operation(interval_rope, affine_rope, linear_rope, any_length=rope_at_any_length),
}
