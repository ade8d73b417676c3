"""Operations that move numbers without rounding them: view, concat, neg, embedding; and casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kcdsl.model.graph import Node, View
from kcdsl.model.numerics import held_formats
from kcdsl.model.numerics.formats import FORMATS
from kcdsl_backends.drift.affine.adjoint import Adjoint, part_of, permuted, reshaped, summed
from kcdsl_backends.drift.affine.cases import Cases
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.tape import Adjoints, Entry
from kcdsl_backends.drift.boxes.box import Box, gamma
from kcdsl_backends.drift.boxes.rounding import Apart
from kcdsl_backends.drift.boxes.state import State, Step
from kcdsl_backends.drift.linear.run import LinearOperand, LinearPart, LinearRun, zero_part
from kcdsl_backends.drift.linear.tape import Functional, Source
from kcdsl_backends.drift.ops.operation import Operation, Pointwise


def move(state: State, change: Callable[[Tensor], Tensor]) -> State:
    """Apply a rearrangement of elements to every end of a state."""
    one, two = (None if a is None else change(a) for a in state.apart)
    boxes = (state.train, state.infer, state.drift)
    train, infer, drift = (Box(change(b.lo), change(b.hi)) for b in boxes)
    return State(train, infer, drift, (one, two))


def interval_view(step: Step) -> State:
    """Return the elements where a view puts them."""
    return move(step.operand(0), View.of(step.node).moved)


def interval_concat(step: Step) -> State:
    """Return the operands joined along one dimension."""
    dim = int(step.node.attrs["dim"])
    parts = [step.operand(i) for i in range(len(step.node.inputs))]

    def join(boxes: list[Box]) -> Box:
        return Box(torch.cat([b.lo for b in boxes], dim), torch.cat([b.hi for b in boxes], dim))

    def side(which: int) -> Apart:
        each = [p.apart[which] for p in parts]
        if all(apart is None for apart in each):
            return None
        whole = [
            torch.zeros_like(p.train.lo) if apart is None else apart.expand(p.train.shape)
            for p, apart in zip(parts, each, strict=True)
        ]
        return torch.cat(whole, dim)

    return State(
        join([p.train for p in parts]),
        join([p.infer for p in parts]),
        join([p.drift for p in parts]),
        (side(0), side(1)),
    )


def interval_neg(step: Step) -> State:
    """Return the state with its sign changed."""
    x = step.operand(0)
    return State(-x.train, -x.infer, -x.drift, x.apart)


def interval_embedding(step: Step) -> State:
    """Return the rows of the table at the node's token ids."""
    table = step.kernels.plain(step.operand_node(0))
    ids = torch.tensor(step.node.attrs["ids"], device=table.train.device)
    return move(table.rows(ids).state(), lambda x: x.reshape(step.node.shape))


def view_vjp(view: View, a: Adjoint, shape: tuple[int, ...]) -> Adjoint:
    """Return functionals of a view as functionals of the x of this shape that it reads."""
    a = reshaped(a, view.sizes)
    if view.sizes != view.turned:
        a = summed(a, view.turned)
    a = permuted(a, view.order)
    if view.cuts:
        a = _scattered(a, view)
    return reshaped(a, shape)


def _scattered(a: Adjoint, view: View) -> Adjoint:
    """Put functionals where the ranges of a view took their elements from."""
    window = list(a.window)
    for d, (start, _, step) in enumerate(view.ranges):
        if step == 1:
            window[d] = (window[d][0] + start, window[d][1] + start)
    if all(step == 1 for _, _, step in view.ranges):
        return Adjoint(a.values, tuple(window), view.split)
    values = a.values.new_zeros((a.values.shape[0], *view.split))
    values[(slice(None), *view.slices)] = a.dense().values
    return Adjoint.full(values)


def _moved_cases(view: View, cases: Cases | None) -> Cases | None:
    """Return the cases of moved elements, where their blocks stay together."""
    if view.cuts or view.sizes != view.turned:
        return None
    if cases is not None:
        cases = cases.reshaped(view.split)
    if cases is not None:
        cases = cases.permuted(view.order)
    return None if cases is None else cases.reshaped(view.shape)


def affine_view(run: KernelRun, node: Node) -> None:
    """Append a view of one operand; of a known number it is a known number.

    Functionals of several copies are added up, which rounds.
    """
    x, found = run.operand(node, 0), View.of(node)
    if x.index is None:
        run.known[node.name] = found.moved(x.reference)
        return
    index, shape = x.index, tuple(x.reference.shape)
    error_bound = found.moved(x.error_bound)
    entry = Entry(
        node.name,
        found.moved(x.reference),
        error_bound,
        lambda a: [(index, view_vjp(found, a, shape))],
        radius=None if found.copies == 1 else gamma(found.copies) * error_bound,
        cases=_moved_cases(found, run.tape.entries[index].cases),
    )
    run.computed[node.name] = run.tape.add(entry)
    again = run.again(node, 0)
    run.keep(node, None if again is None else found.moved(again))


def affine_cast(run: KernelRun, node: Node) -> None:
    """Append x in the format of the node: as it is where that holds all of it."""
    source, kernel = node.inputs[0], run.rounding
    held = held_formats(run.nodes, source, kernel.own, handed=run.handed)
    formats = [FORMATS[name] for name in held]
    form = kernel.format_for(node.role, node.op)
    if all(form.holds(other) for other in formats):
        same(run, node)
        return
    index, x = run.entry(node, 0)
    nothing = torch.zeros_like(x.reference)
    again = run.again(node, 0)
    result = Result(
        x.reference, lambda a: [(index, a)], x.error_bound, nothing, cases=x.cases, again=again
    )
    round_result(run, node, result, inner=max(formats, key=lambda other: other.precision))


def same(run: KernelRun, node: Node) -> None:
    """Append x as it is."""
    x = run.operand(node, 0)
    if x.index is None:
        run.known[node.name] = x.reference
        return
    index, cases = x.index, run.tape.entries[x.index].cases
    entry = Entry(node.name, x.reference, x.error_bound, lambda a: [(index, a)], cases=cases)
    run.computed[node.name] = run.tape.add(entry)
    run.keep(node, run.again(node, 0))


def affine_neg(run: KernelRun, node: Node) -> None:
    """Append -x."""
    x = run.operand(node, 0)
    if x.index is None:
        run.known[node.name] = -x.reference
        return
    index = x.index
    entry = Entry(node.name, -x.reference, x.error_bound, lambda a: [(index, a.times(-1.0))])
    run.computed[node.name] = run.tape.add(entry)
    run.keep(node, run.again(node, 0))


def affine_concat(run: KernelRun, node: Node) -> None:
    """Append the operands joined along one dimension."""
    parts = [run.operand(node, i) for i in range(len(node.inputs))]
    dim = int(node.attrs["dim"]) % len(node.shape)
    reference, offsets = torch.cat([p.reference for p in parts], dim), _offsets(parts, dim)
    if all(p.index is None for p in parts):
        run.known[node.name] = reference
        return

    def vjp(a: Adjoint) -> Adjoints:
        found = [
            (part.index, part_of(a, dim, offset, tuple(part.reference.shape)))
            for part, offset in zip(parts, offsets, strict=True)
        ]
        return [(i, each) for i, each in found if i is not None and each is not None]

    error_bound = torch.cat([p.error_bound for p in parts], dim)
    run.computed[node.name] = run.tape.add(Entry(node.name, reference, error_bound, vjp))
    again = [run.again(node, i) for i in range(len(parts))]
    if any(each is not None for each in again):
        whole = [
            torch.zeros_like(part.error_bound) if each is None else each
            for part, each in zip(parts, again, strict=True)
        ]
        run.keep(node, torch.cat(whole, dim))


def affine_embedding(run: KernelRun, node: Node) -> None:
    """Know the rows of the table at the node's token ids."""
    table = run.parameters.plain(run.source(node, 0))
    ids = torch.tensor(node.attrs["ids"], device=table.device)
    found, around = table[ids].reshape(node.shape), run.around(node, 0)
    if around is not None:
        moved = around[ids].reshape(node.shape)
        run.moving(node.name, run.source(node, 0), found, moved)
        return
    run.known[node.name] = found


def linear_view(run: LinearRun, node: Node) -> None:
    """Append a view of one operand; functionals of several copies are summed, which rounds."""
    x, found = run.operand(node, 0), View.of(node)
    shape, reference = tuple(x.reference.shape), found.moved(x.reference)
    inexact = 0.0 if found.copies == 1 else 2 * gamma(found.copies + 4)
    zero = torch.zeros_like(reference)

    def part(box: Box) -> LinearPart:
        return LinearPart(zero, inexact * found.moved(box.mag()))

    def vjp(a: Functional) -> list[Source]:
        return [(x.index, a.each(lambda values: view_vjp(found, values, shape)))]

    run.append(node, reference, vjp, part(x.deviation), part(x.drift))


def linear_cast(run: LinearRun, node: Node) -> None:
    """Append x in another format; what that rounds is counted with what is stored."""
    x = run.operand(node, 0)
    nothing = zero_part(x.reference)
    run.append(node, x.reference, lambda a: [(x.index, a)], nothing, nothing)


def linear_neg(run: LinearRun, node: Node) -> None:
    """Append -x."""
    x = run.operand(node, 0)
    nothing = zero_part(x.reference)
    run.append(node, -x.reference, lambda a: [(x.index, a.negative())], nothing, nothing)


def linear_concat(run: LinearRun, node: Node) -> None:
    """Append the operands joined along one dimension."""
    parts = [run.operand(node, i) for i in range(len(node.inputs))]
    dim = int(node.attrs["dim"]) % len(node.shape)
    reference, offsets = torch.cat([p.reference for p in parts], dim), _offsets(parts, dim)
    nothing = zero_part(reference)

    def vjp(a: Functional) -> list[Source]:
        found: list[Source] = []
        for part, offset in zip(parts, offsets, strict=True):
            shape = tuple(part.reference.shape)
            taken = Functional(
                *(
                    None if b is None else part_of(b, dim, offset, shape)
                    for b in (a.deviation, a.drift)
                )
            )
            if taken.parts:
                found.append((part.index, taken))
        return found

    run.append(node, reference, vjp, nothing, nothing)


def _offsets(parts: Sequence[Operand | LinearOperand], dim: int) -> list[int]:
    """Return where each of the operands of a concatenation begins."""
    lengths = [part.reference.shape[dim] for part in parts]
    return [sum(lengths[:i]) for i in range(len(lengths))]


def linear_embedding(run: LinearRun, node: Node) -> None:
    """Append the rows of the table at the node's token ids, which are known."""
    table = run.kernels.plain(run.source(node, 0))
    ids = torch.tensor(node.attrs["ids"], device=table.train.device)
    reference: Tensor = table.train[ids].reshape(node.shape)
    middle, radius = run.state(node).drift.midpoint()
    run.append(node, reference, lambda a: [], zero_part(reference), LinearPart(middle, radius))


OPERATIONS = {
    "embedding": Operation(interval_embedding, affine_embedding, linear_embedding),
    "cast": Operation(Step.cast, affine_cast, linear_cast),
    "neg": Operation(interval_neg, affine_neg, linear_neg, pointwise=Pointwise(lambda x, node: -x)),
    "view": Operation(interval_view, affine_view, linear_view),
    "concat": Operation(interval_concat, affine_concat, linear_concat),
}
