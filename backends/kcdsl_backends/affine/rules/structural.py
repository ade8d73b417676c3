"""Operations that move numbers without rounding them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS
from kcdsl.model.graph import Node
from kcdsl.model.numerics import held_formats
from kcdsl_backends.affine.adjoint import Adjoint, permuted, reshaped
from kcdsl_backends.affine.cases import Cases
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.storing import Result, store
from kcdsl_backends.affine.tape import Entry
from kcdsl_backends.interval.box import gamma

Back = Callable[[Adjoint, tuple[int, ...]], Adjoint]


MOVES = frozenset({"reshape", "permute", "expand", "slice"})
"""Operations whose result is made of elements of one operand."""


def moved(node: Node, x: Tensor) -> Tensor:
    """Return the elements of x where an operation of `MOVES` puts them."""
    match node.op:
        case "reshape":
            return x.reshape(node.shape)
        case "permute":
            return x.permute([int(d) for d in node.attrs["dims"]])
        case "expand":
            return x.expand(node.shape).contiguous()
        case "cast" | "cache":
            return x
        case "slice":
            dim, start, stop, step = (int(node.attrs[k]) for k in ("dim", "start", "stop", "step"))
            return x[(*(slice(None) for _ in range(dim % x.dim())), slice(start, stop, step))]
        case _:
            raise ValueError(f"{node.op} does not only move elements")


def _moved_cases(node: Node, cases: Cases | None) -> Cases | None:
    """Return the cases of moved elements, where their blocks stay together."""
    match node.op:
        case "cast" | "cache":
            return cases
        case "reshape" if cases is not None:
            return cases.reshaped(node.shape)
        case "permute" if cases is not None:
            return cases.permuted([int(d) for d in node.attrs["dims"]])
        case _:
            return None


def _move(run: KernelRun, node: Node, back: Back, copies: int = 1) -> None:
    """Append a rearrangement of one operand; of a known number it is a known number.

    Functionals of several copies are added up, which rounds.
    """
    x = run.operand(node, 0)
    if x.index is None:
        run.known[node.name] = moved(node, x.reference)
        return
    index, shape = x.index, tuple(x.reference.shape)
    reach = moved(node, x.reach)
    entry = Entry(
        node.name,
        moved(node, x.reference),
        reach,
        lambda a: [(index, back(a, shape))],
        radius=None if copies == 1 else gamma(copies) * reach,
        cases=_moved_cases(node, run.tape.entries[index].cases),
    )
    run.computed[node.name] = run.tape.add(entry)
    again = run.again(node, 0)
    run.keep(node, None if again is None else moved(node, again))


def cast(run: KernelRun, node: Node) -> None:
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
        x.reference, lambda a: [(index, a)], x.reach, nothing, cases=x.cases, again=again
    )
    store(run, node, result, inner=max(formats, key=lambda other: other.precision))


def same(run: KernelRun, node: Node) -> None:
    """Append x as it is."""
    _move(run, node, lambda a, _: a)


def reshape(run: KernelRun, node: Node) -> None:
    """Append x in another shape."""
    _move(run, node, reshaped)


def permute(run: KernelRun, node: Node) -> None:
    """Append x with its dimensions in another order."""
    dims = [int(d) for d in node.attrs["dims"]]
    _move(run, node, lambda a, _: permuted(a, dims))


def neg(run: KernelRun, node: Node) -> None:
    """Append -x."""
    x = run.operand(node, 0)
    if x.index is None:
        run.known[node.name] = -x.reference
        return
    index = x.index
    entry = Entry(node.name, -x.reference, x.reach, lambda a: [(index, a.times(-1.0))])
    run.computed[node.name] = run.tape.add(entry)
    run.keep(node, run.again(node, 0))


def expand(run: KernelRun, node: Node) -> None:
    """Append x repeated along dimensions of length 1."""

    def back(a: Adjoint, shape: tuple[int, ...]) -> Adjoint:
        added = len(a.shape) - len(shape)
        repeated = [d for d in range(added, len(a.shape)) if shape[d - added] != a.shape[d]]
        values = a.values.sum([1 + d for d in range(added)]) if added else a.values
        window = list(a.window[added:])
        for d in repeated:
            values = values.sum(1 + d - added, keepdim=True)
            window[d - added] = (0, 1)
        return Adjoint(values, tuple(window), shape)

    before = run.operand(node, 0).reference.numel()
    _move(run, node, back, math.prod(node.shape) // max(1, before))


def slice_(run: KernelRun, node: Node) -> None:
    """Append a slice along one dimension."""
    dim, start, stop, step = (int(node.attrs[k]) for k in ("dim", "start", "stop", "step"))

    def back(a: Adjoint, shape: tuple[int, ...]) -> Adjoint:
        at = dim % len(shape)
        first = start % shape[at] if start < 0 else start
        a = a.dense() if step != 1 else a
        window = list(a.window)
        if step == 1:
            window[at] = (window[at][0] + first, window[at][1] + first)
            return Adjoint(a.values, tuple(window), shape)
        values = a.values.new_zeros((a.values.shape[0], *shape))
        change_at = (slice(None), *(slice(None) for _ in range(at)), slice(start, stop, step))
        values[change_at] = a.values
        return Adjoint.full(values)

    _move(run, node, back)


def concat(run: KernelRun, node: Node) -> None:
    """Append the operands joined along one dimension."""
    parts = [run.operand(node, i) for i in range(len(node.inputs))]
    dim = int(node.attrs["dim"]) % len(node.shape)
    reference = torch.cat([p.reference for p in parts], dim)
    if all(p.index is None for p in parts):
        run.known[node.name] = reference
        return

    def pull(a: Adjoint) -> Sequence[tuple[int, Adjoint]]:
        found, offset = [], 0
        start, stop = a.window[dim]
        for part in parts:
            length = part.reference.shape[dim]
            first, last = max(start, offset), min(stop, offset + length)
            if part.index is not None and first < last:
                values = a.values.narrow(1 + dim, first - start, last - first)
                window = list(a.window)
                window[dim] = (first - offset, last - offset)
                found.append(
                    (part.index, Adjoint(values, tuple(window), tuple(part.reference.shape)))
                )
            offset += length
        return found

    reach = torch.cat([p.reach for p in parts], dim)
    run.computed[node.name] = run.tape.add(Entry(node.name, reference, reach, pull))
    again = [run.again(node, i) for i in range(len(parts))]
    if any(each is not None for each in again):
        whole = [
            torch.zeros_like(part.reach) if each is None else each
            for part, each in zip(parts, again, strict=True)
        ]
        run.keep(node, torch.cat(whole, dim))


def embedding(run: KernelRun, node: Node) -> None:
    """Know the rows of the table at the node's token ids."""
    table = run.parameters.plain(run.source(node, 0))
    ids = torch.tensor(node.attrs["ids"], device=table.device)
    found, around = table[ids].reshape(node.shape), run.around(node, 0)
    if around is not None:
        moved = around[ids].reshape(node.shape)
        run.moving(node.name, run.source(node, 0), found, moved)
        return
    run.known[node.name] = found
