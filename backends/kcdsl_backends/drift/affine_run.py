"""Write the tape of one kernel (section 1), with ellipsoids around the drift of its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, weight_of
from kcdsl_backends.drift.affine.adjoint import Adjoint, by_rows
from kcdsl_backends.drift.affine.ellipsoids import (
    Ellipsoids,
    RankOne,
    around_sum,
    norm_on_ellipsoid,
    reached,
)
from kcdsl_backends.drift.affine.independent import Chance
from kcdsl_backends.drift.affine.kernel import KernelRun, Private, StoredSpread
from kcdsl_backends.drift.affine.result_rounding import Result, round_result, stored_format
from kcdsl_backends.drift.affine.row_sums import BoundedRows, RowBound
from kcdsl_backends.drift.affine.tape import INPUT, Nonlinear, Tape, TapeEntry
from kcdsl_backends.drift.boxes import SAFE, Box, NoBound, up
from kcdsl_backends.drift.boxes.rounding import Rounding, several
from kcdsl_backends.drift.boxes.state import ALONE, Entering, InterfaceEllipsoids, StoredParameters
from kcdsl_backends.drift.ops import operation_of
from kcdsl_backends.drift.ops.view import refuse_uncached


def coarsest(graph: BlockGraph, *sides: StoredParameters) -> float:
    """Return the unit roundoff of the coarsest result of these kernels."""
    nodes = [node for node in graph.nodes if node.op not in ("param", "constant")]
    kernels = [Rounding(side.numerics) for side in sides]
    formats = [kernel.at(n).format_for(n.role, n.op) for kernel in kernels for n in nodes]
    return max(form.unit_roundoff for form in formats)


def affine_run(
    graph: BlockGraph,
    parameters: StoredParameters,
    centre: Tensor | None,
    radius: Tensor,
    grain: float,
    entering: Entering = ALONE,
    *,
    side: int = 1,
    spread: StoredSpread | None = None,
    chance: Chance | None = None,
    boxes: Mapping[str, Box] | None = None,
    common: Mapping[str, Tensor] | None = None,
    other: KernelRun | None = None,
) -> KernelRun:
    """Return the reference run of a kernel on the centre of a region, with the tape of its errors.

    Args:
        graph: the block.
        parameters: what the kernel stores; its numerics are the kernel's.
        centre: [T, D] float64; None for a block on token ids.
        radius: broadcastable to [T, D], float64, >= 0.
        grain: unit roundoff of the coarser kernel of the pair.
        entering: the difference of the states that both kernels read; if they drift, another block
            stored them already.
        side: 0 for the training kernel, which reads the states of the region; 1 for the inference
            kernel, which reads them with the drift added.
        spread: the distance of parameters from those stored; None: zero.
        chance: the probability with which bounds hold; None: in the worst case.
        boxes: boxes of this kernel's results by another domain, by node.
        common: the operands of the other kernel's operations with weights (`KernelRun.common`).
        other: the run of the inference kernel, for that of the training kernel (`KernelRun.other`).

    Raises:
        NoBound: some result has no finite bound.
    """
    refuse_uncached(graph, parameters.numerics)
    shape = (1, 1) if centre is None else tuple(centre.shape)
    tape = Tape(radius.expand(shape).contiguous(), chance=chance)
    nodes = {node.name: node for node in graph.nodes}
    rounding = Rounding(parameters.numerics)
    run = KernelRun(graph, rounding, parameters, tape, nodes, grain, spread=spread)
    if rounding.free:
        run.several = several(graph, followed=entering.followed)
    run.common.update(common or {})
    run.other = other
    run.handed = entering.drift is not None
    tape.add(TapeEntry("region", torch.zeros_like(tape.radius), tape.radius, lambda a: []))
    for node in graph.nodes:
        if node.op in ("param", "constant"):
            continue
        run.rounding = rounding.at(node, weight_of(node, nodes))
        if node.op == "input":
            _input(run, node, centre, entering, side)
            apart = entering.readings[side]
            if rounding.free and apart is not None:
                run.private[node.name] = Private(apart)
        else:
            operation_of(node).affine(run, node)
        if node.op == "input":
            _bound_rows(run, node)
        if boxes is not None and node.name in boxes and node.name in run.computed:
            _meet(run, node, boxes[node.name])
    run.rounding = rounding
    if graph.output in run.computed:
        run.computed[graph.output] = run.reading(graph.output)
    return run


def _bound_rows(run: KernelRun, node: Node) -> None:
    """Record that the elements of an input at a point have unrelated errors, those of storing, so
    that functionals of many of its rows may be bounded row by row."""
    index = run.computed[node.name]
    entry, tape = run.tape.entries[index], run.tape
    fixed = tape.chance is None and run.spread is None and not bool(tape.radius.any())
    if fixed and entry.nonlinear is None and len(entry.shape) == 2 and tape.cut == INPUT:
        rows = BoundedRows.of(RowBound.of(entry.error_bound))
        tape.entries[index] = replace(entry, rows=rows)


def _meet(run: KernelRun, node: Node, box: Box) -> None:
    """Lower the error bound of a result to the farthest end of its box."""
    index = run.computed[node.name]
    reference = run.tape.entries[index].reference
    run.tape.tighten(index, up(torch.maximum(box.hi - reference, reference - box.lo)))


def _input(
    run: KernelRun, node: Node, centre: Tensor | None, entering: Entering, side: int
) -> None:
    """Append the input as a kernel reads it: kernels coarser than float32 store it, unless another
    block did."""
    if centre is None or tuple(centre.shape) != tuple(node.shape):
        raise NoBound(node.name, "the region does not have the shape of the block's input")
    if entering.drift is not None and side == 1:
        _stored_before(run, node, centre, entering.drift, entering.ellipsoids)
        return
    error_bound = run.tape.radius
    zero = torch.zeros_like(centre)
    result = Result(centre, lambda a: [(0, a)], error_bound, 2.0**-52 * error_bound)
    if not run.handed and stored_format(run, node).coarse:
        round_result(run, node, result)
        return
    entry = TapeEntry(node.name, centre, error_bound, result.vjp, None, zero)
    run.computed[node.name] = run.plain = run.tape.add(entry)


def _stored_before(
    run: KernelRun,
    node: Node,
    centre: Tensor,
    drift: Box,
    handed: InterfaceEllipsoids | None = None,
) -> None:
    """Append an input that another block stored: x + e, with a new symbol e within `drift`.

    With ellipsoids e is an entry of its own, at which reverse passes may stop.
    """
    if tuple(drift.shape) != tuple(centre.shape):
        raise NoBound(node.name, "the drift does not have the shape of the block's input")
    middle, own = drift.midpoint()
    reference = centre + middle
    own = (own + torch.where(middle == 0, 0.0, 2.0**-52 * reference.abs())) * SAFE
    error_bound = (run.tape.radius + own) * SAFE
    if handed is not None:
        apart = run.tape.cut = drift_entry(run, handed, middle, own, reference)
        entry = TapeEntry(node.name, reference, error_bound, lambda a: [(0, a), (apart, a)])
        run.computed[node.name] = run.tape.add(entry)
        return
    entry = TapeEntry(node.name, reference, error_bound, lambda a: [(0, a)], None, own)
    run.computed[node.name] = run.tape.add(entry)


def drift_entry(
    run: KernelRun, handed: InterfaceEllipsoids, middle: Tensor, own: Tensor, reference: Tensor
) -> int:
    """Append the drift of an input as an entry of its own; return its index.

    Args:
        middle: the midpoint of the box of the drift.
        own: half its width, plus the rounding of `reference`.
        reference: the input's centre + middle, as rounded.
    """
    shifts = handed.middle - middle
    slips = 2.0**-51 * reference.abs()  # the errors of the shifts are less than around_sum adds
    found: Ellipsoids = {
        (t,): around_sum(
            [
                handed.shapes[t],
                RankOne(shifts[t]),
                RankOne(slips[t], 0.0, float(slips[t].norm()) ** 2),
            ]
        )
        for t in range(middle.shape[0])
    }

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        size = reached(found, own, a)
        return -size, size

    def together(a: Adjoint) -> float:
        total = 0.0
        for row, part in by_rows(a):
            columns = slice(*part.window[-1])
            by_box = float(part.magnitude(own).norm())
            total += min(
                norm_on_ellipsoid(found[row][columns, columns], part.values.flatten(1)), by_box
            )
        return total * SAFE

    zero = torch.zeros_like(own)
    nonlinear = Nonlinear(between, together)
    entry = TapeEntry("drift", zero, own, lambda a: [], nonlinear=nonlinear, ellipsoids=found)
    return run.tape.add(entry)
