"""Operations that move elements: view, concat, neg, embedding; casts; caches of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, View
from kcdsl.model.lowering.kv_cache import uncached
from kcdsl.model.numerics import Activations, Numerics, held_formats
from kcdsl.model.numerics.formats import FORMATS
from kcdsl_backends.drift.affine.adjoint import Adjoint, part_of, permuted, reshaped, summed
from kcdsl_backends.drift.affine.cases import Cases, beyond
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.tape import Adjoints, TapeEntry
from kcdsl_backends.drift.boxes import SAFE, Box, NoBound, gamma, up
from kcdsl_backends.drift.boxes.quantisers import quantiser_steps
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding, StoredResult
from kcdsl_backends.drift.boxes.state import State, Step, combine
from kcdsl_backends.drift.linear import LinearOperand, LinearPart, LinearRun, zero_part
from kcdsl_backends.drift.linear.tape import Functional, Source
from kcdsl_backends.drift.ops.operation import Operation, Pointwise
from kcdsl_backends.drift.ops.quantised.inputs import activation_error
from kcdsl_backends.drift.ops.quantised.tensors import affine_tensor, interval_quantise


def move(state: State, change: Callable[[Tensor], Tensor]) -> State:
    """Apply a rearrangement of elements to every end of a state."""
    one, two = (None if a is None else change(a) for a in state.apart)

    def moved(box: Box) -> Box:
        low = change(box.lo)
        return Box(low, low if box.hi is box.lo else change(box.hi))

    return State(moved(state.train), moved(state.infer), moved(state.drift), (one, two))


def interval_view(step: Step) -> State:
    """Return the boxes of the operand in another arrangement."""
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
    """Return the boxes of -x."""
    return -step.operand(0)


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
    """Return functionals at the elements that the ranges of a view selected."""
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
    """Return the cases of moved elements; None unless their blocks stay together."""
    if view.cuts or view.sizes != view.turned:
        return None
    if cases is not None:
        cases = cases.reshaped(view.split)
    if cases is not None:
        cases = cases.permuted(view.order)
    return None if cases is None else cases.reshaped(view.shape)


def _append_moved(
    run: KernelRun,
    node: Node,
    change: Callable[[Tensor], Tensor],
    back: Callable[[Adjoint, tuple[int, ...]], Adjoint],
    cases: Callable[[Cases | None], Cases | None] = lambda cases: cases,
    copies: int = 1,
) -> None:
    """Append an operand changed without rounding; a known number stays one.

    `back` returns functionals of the result as those of the operand of a shape. The sum of the
    functionals of several copies has roundings.
    """
    x = run.operand(node, 0)
    if x.index is None:
        run.known[node.name] = change(x.reference)
        return
    index, shape, error_bound = x.index, tuple(x.reference.shape), change(x.error_bound).abs()
    entry = TapeEntry(
        node.name,
        change(x.reference),
        error_bound,
        lambda a: [(index, back(a, shape))],
        radius=None if copies == 1 else gamma(copies) * error_bound,
        cases=cases(run.tape.entries[index].cases),
        moved=(index, lambda part: change(part).abs()),
    )
    run.computed[node.name] = run.tape.add(entry)
    again = run.again(node, 0)
    run.keep(node, None if again is None else change(again).abs())


def affine_view(run: KernelRun, node: Node) -> None:
    """Append a view of one operand."""
    view = View.of(node)
    _append_moved(
        *(run, node, view.moved, lambda a, shape: view_vjp(view, a, shape)),
        cases=lambda cases: _moved_cases(view, cases),
        copies=view.copies,
    )


def affine_cast(run: KernelRun, node: Node) -> None:
    """Append x cast to the format of the node, unchanged if that holds its values."""
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
    """Append x unchanged."""
    _append_moved(run, node, lambda x: x, lambda a, shape: a)


def affine_neg(run: KernelRun, node: Node) -> None:
    """Append -x."""
    _append_moved(run, node, torch.neg, lambda a, shape: a.times(-1.0), lambda cases: None)


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
    run.computed[node.name] = run.tape.add(TapeEntry(node.name, reference, error_bound, vjp))
    again = [run.again(node, i) for i in range(len(parts))]
    if any(each is not None for each in again):
        whole = [
            torch.zeros_like(part.error_bound) if each is None else each
            for part, each in zip(parts, again, strict=True)
        ]
        run.keep(node, torch.cat(whole, dim))


def affine_embedding(run: KernelRun, node: Node) -> None:
    """Record the rows of the table at the node's token ids as known numbers."""
    table = run.parameters.plain(run.source(node, 0))
    ids = torch.tensor(node.attrs["ids"], device=table.device)
    found, around = table[ids].reshape(node.shape), run.around(node, 0)
    if around is not None:
        moved = around[ids].reshape(node.shape)
        run.moving(node.name, run.source(node, 0), found, moved)
        return
    run.known[node.name] = found


def linear_view(run: LinearRun, node: Node) -> None:
    """Append a view of one operand; the sum of functionals of several copies has roundings."""
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
    """Append x in another format; the rounding is part of the error of storing."""
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
    """Return the offset of each operand of a concatenation."""
    lengths = [part.reference.shape[dim] for part in parts]
    return [sum(lengths[:i]) for i in range(len(lengths))]


def linear_embedding(run: LinearRun, node: Node) -> None:
    """Append the rows of the table at the node's token ids, known numbers."""
    table = run.kernels.plain(run.source(node, 0))
    ids = torch.tensor(node.attrs["ids"], device=table.train.device)
    reference: Tensor = table.train[ids].reshape(node.shape)
    middle, radius = run.state(node).drift.midpoint()
    run.append(node, reference, lambda a: [], zero_part(reference), LinearPart(middle, radius))


ANY = "*"
"""The name of the static scales of an arranged quantiser."""


def interval_cache(step: Step) -> State:
    """Bound keys or values as both kernels read them; the operand for one without a cache."""
    x, node = step.operand(0), step.node
    if step.kernels.rows is not None:
        raise NoBound(node.name, "a quantised kv_cache of sequences of any length")
    zero = torch.zeros_like(x.drift.lo)
    drift, sides = x.drift, []
    codes = [coded(own, node, k) for own, k in zip((x.train, x.infer), _both(step), strict=True)]
    for sign, found in zip((-1, 1), codes, strict=True):
        if found is not None:
            drift = drift + found.error if sign > 0 else drift - found.error
    values = [
        own if found is None else found.value
        for own, found in zip((x.train, x.infer), codes, strict=True)
    ]
    drift = drift.meet(values[1] - values[0])
    for value, found, kernel in zip(values, codes, _both(step), strict=True):
        same = StoredResult(value, Box(zero, zero))
        back = same if found is None else read_back(value, kernel, node)
        sides.append(replace(back, apart=None))  # only one product reads it
    return combine(node.name, drift, *sides)


def _both(step: Step) -> tuple[Rounding, Rounding]:
    return step.kernels.train, step.kernels.infer


def read_back(value: Box, kernel: Rounding, node: Node) -> StoredResult:
    """Return the values of codes in the format in which a kernel reads them back."""
    form = kernel.format_for(node.role, node.op)
    return kernel.store(value, torch.zeros_like(value.lo), form, node.name, kernel.inner(False))


def coded(x: Box, node: Node, kernel: Rounding) -> StoredResult | None:
    """Return the values of the codes of keys or values and their errors; None without a cache.

    Raises:
        NoBound: a static scale is missing, or may be exceeded.
    """
    spec = cache_quantiser(node, kernel.numerics)
    if spec is None:
        return None
    inside = replace(kernel, numerics=as_linears(kernel.numerics, spec))
    rows = Box(*(arranged(end, node, kernel.numerics) for end in (x.lo, x.hi)))
    error = activation_error(rows, inside, node.name, ANY)
    assert error is not None
    found = quantiser_steps(rows, error, inside, ANY, node.name)
    found = found or StoredResult(rows.widen(error), Box.around(error))

    def back(box: Box) -> Box:
        return Box(*(replaced(end, node, kernel.numerics, x.lo) for end in (box.lo, box.hi)))

    return StoredResult(back(found.value), back(found.error))


def as_linears(numerics: Numerics, spec: Activations) -> Numerics:
    """Return numerics that quantise the input of any linear like keys or values."""
    return replace(numerics, activations=spec, overrides=())


def cache_quantiser(node: Node, numerics: Numerics) -> Activations | None:
    """Return the quantiser of arranged keys or values; None where they are not cached.

    Raises:
        NoBound: there is no static scale for them.
    """
    if numerics.kv_cache is None:
        return None
    part, source = str(node.attrs["part"]), str(node.attrs["source"])
    found = numerics.kv_cache.quantiser(part, source)
    if found is None:
        raise NoBound(node.name, f"no static scale is given for the {part} of {source or 'this'}")
    return found


def arranged(x: Tensor, node: Node, numerics: Numerics) -> Tensor:
    """Return keys [.., d, T] or values [.., T, d] arranged so that a row shares a scale.

    [H, T, d]; [H, T·d] if a head shares one; [T, d, H] with static scales.
    """
    assert numerics.kv_cache is not None
    x = x.mT if node.attrs["part"] == "keys" else x
    x = x.reshape(-1, *x.shape[-2:])
    if numerics.kv_cache.by_head:
        return x.reshape(len(x), -1)
    return x.permute(1, 2, 0) if numerics.kv_cache.static else x


def replaced(x: Tensor, node: Node, numerics: Numerics, like: Tensor) -> Tensor:
    """Return arranged numbers in the arrangement of `like`."""
    assert numerics.kv_cache is not None
    keys = node.attrs["part"] == "keys"
    rows, width = like.shape[-2:][::-1] if keys else like.shape[-2:]
    x = x.permute(2, 0, 1) if numerics.kv_cache.static else x
    x = x.reshape(*like.shape[:-2], rows, width)
    return (x.mT if keys else x).contiguous()


def refuse_uncached(graph: BlockGraph, *kernels: Numerics) -> None:
    """Refuse a graph without `cache` nodes for the keys and values of a kernel with a cache.

    Raises:
        NoBound: naming an operation.
    """
    unknown = uncached(graph) if any(k.kv_cache is not None for k in kernels) else None
    if unknown is not None:
        raise NoBound(graph.output, f"a kernel with a kv_cache: {unknown}")


def affine_cache(run: KernelRun, node: Node) -> None:
    """Append keys or values as a kernel reads them back; without a cache, the operand."""
    if run.rounding.numerics.kv_cache is None:
        same(run, node)
        return
    index, x = run.entry(node, 0)
    around = beyond(Box(x.reference - x.error_bound * SAFE, x.reference + x.error_bound * SAFE))
    found = coded(around, node, run.rounding)
    assert found is not None
    low, high, error = found.value.lo, found.value.hi, found.error.mag()
    middle = low / 2 + high / 2
    half = up(torch.maximum(high - middle, middle - low), 2)
    by_steps = (half <= error) if not run.rounding.free else torch.zeros_like(error).bool()
    keep = (~by_steps).to(error.dtype)
    reference = torch.where(by_steps, middle, x.reference)
    linear = torch.where(by_steps, 0.0, x.error_bound)
    internal = torch.where(by_steps, half, error) * SAFE

    def vjp(a: Adjoint) -> Adjoints:
        return [(index, a.times(keep))]

    parts = None if run.tape.chance is None else Roundings.none(internal)
    again = run.again(node, 0)
    result = Result(reference, vjp, linear, internal, roundings=parts, again=again)
    round_result(run, node, result)


def affine_quantise(run: KernelRun, node: Node) -> None:
    """Append a tensor that a kernel may quantise, as it reads it back."""
    by = run.rounding.numerics.quantiser(node)
    if by is None:
        same(run, node)
    else:
        affine_tensor(run, node, by)


OPERATIONS = {
    "embedding": Operation(interval_embedding, affine_embedding, linear_embedding),
    "cast": Operation(Step.cast, affine_cast, linear_cast),
    "cache": Operation(interval_cache, affine_cache),
    "quantise": Operation(interval_quantise, affine_quantise),
    "neg": Operation(interval_neg, affine_neg, linear_neg, pointwise=Pointwise(lambda x, node: -x)),
    "view": Operation(interval_view, affine_view, linear_view),
    "concat": Operation(interval_concat, affine_concat, linear_concat),
}
