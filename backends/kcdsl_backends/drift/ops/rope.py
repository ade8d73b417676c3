"""Rotary positions (section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.tape import PASS, Adjoints
from kcdsl_backends.drift.boxes.box import SAFE, Box, NoBound, gamma, refuse_overflow, up
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding, added, times
from kcdsl_backends.drift.boxes.state import Parameter, State, Step
from kcdsl_backends.drift.linear.run import LinearPart, LinearRun
from kcdsl_backends.drift.linear.tape import LINEAR_PASS, Functional, Source, added_adjoints
from kcdsl_backends.drift.ops.arithmetic import _sizes
from kcdsl_backends.drift.ops.operation import Operation


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
    return step.finish(train, infer, drift, *errors, apart=(apart, other))


def turned_apart(apart: Apart, cos: Tensor, sin: Tensor) -> Apart:
    """Return how far rotated readings are apart."""
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
            known,
            (back_error * (sizes(own + e, dc, ds) + sizes(d, c_i, s_i)) + 2.0**-1000) * SAFE,
        ),
    )


OPERATIONS = {"rope": Operation(interval_rope, affine_rope, linear_rope)}
