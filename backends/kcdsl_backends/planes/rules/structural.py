"""Operations that move numbers without rounding them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint, permuted, reshaped
from kcdsl_backends.affine.rules.structural import moved
from kcdsl_backends.interval.box import Box, gamma
from kcdsl_backends.planes.functional import Functional
from kcdsl_backends.planes.run import Operand, Part, Rule, Run, zero_part
from kcdsl_backends.planes.tape import Source

Back = Callable[[Adjoint, tuple[int, ...]], Adjoint]


def _move(back: Back) -> Rule:
    def rule(run: Run, node: Node) -> None:
        x = run.operand(node, 0)
        shape, reference = tuple(x.reference.shape), moved(node, x.reference)
        nothing = zero_part(reference)

        def pull(a: Functional) -> list[Source]:
            return [(x.index, a.each(lambda part: back(part, shape)))]

        run.append(node, reference, pull, nothing, nothing)

    return rule


def permute(run: Run, node: Node) -> None:
    """Append x with its dimensions in another order."""
    dims = [int(d) for d in node.attrs["dims"]]
    _move(lambda a, _: permuted(a, dims))(run, node)


def cast(run: Run, node: Node) -> None:
    """Append x in another format; what that rounds is counted with what is stored."""
    x = run.operand(node, 0)
    nothing = zero_part(x.reference)
    run.append(node, x.reference, lambda a: [(x.index, a)], nothing, nothing)


def neg(run: Run, node: Node) -> None:
    """Append -x."""
    x = run.operand(node, 0)
    nothing = zero_part(x.reference)
    run.append(node, -x.reference, lambda a: [(x.index, a.negative())], nothing, nothing)


def gathered(a: Adjoint, shape: tuple[int, ...]) -> Adjoint:
    """Pull functionals of x.expand(...) back to x of this shape."""
    if a.shape == shape:
        return a
    added = len(a.shape) - len(shape)
    repeated = [d for d in range(added, len(a.shape)) if shape[d - added] != a.shape[d]]
    values = a.values.sum([1 + d for d in range(added)]) if added else a.values
    window = list(a.window[added:])
    for d in repeated:
        values = values.sum(1 + d - added, keepdim=True)
        window[d - added] = (0, 1)
    return Adjoint(values, tuple(window), shape)


reshape = _move(reshaped)
"""Append x in another shape."""


def expand(run: Run, node: Node) -> None:
    """Append x repeated along dimensions of length 1; functionals of the copies are summed."""
    x = run.operand(node, 0)
    shape, reference = tuple(x.reference.shape), moved(node, x.reference)
    inexact = 2 * gamma(reference.numel() // max(x.reference.numel(), 1) + 4)
    zero = torch.zeros_like(reference)

    def part(box: Box) -> Part:
        return Part(zero, inexact * moved(node, box.mag()))

    def pull(a: Functional) -> list[Source]:
        return [(x.index, a.each(lambda values: gathered(values, shape)))]

    run.append(node, reference, pull, part(x.deviation), part(x.drift))


def slice_(run: Run, node: Node) -> None:
    """Append a slice along one dimension."""
    dim, start, stop, step = (int(node.attrs[k]) for k in ("dim", "start", "stop", "step"))

    def back(a: Adjoint, shape: tuple[int, ...]) -> Adjoint:
        at = dim % len(shape)
        if step == 1:
            first = start % shape[at] if start < 0 else start
            window = list(a.window)
            window[at] = (window[at][0] + first, window[at][1] + first)
            return Adjoint(a.values, tuple(window), shape)
        values = a.values.new_zeros((a.values.shape[0], *shape))
        place = (slice(None), *(slice(None) for _ in range(at)), slice(start, stop, step))
        values[place] = a.dense().values
        return Adjoint.full(values)

    _move(back)(run, node)


def concat(run: Run, node: Node) -> None:
    """Append the operands joined along one dimension."""
    parts = [run.operand(node, i) for i in range(len(node.inputs))]
    dim = int(node.attrs["dim"]) % len(node.shape)
    reference = torch.cat([p.reference for p in parts], dim)
    nothing = zero_part(reference)

    def pull(a: Functional) -> list[Source]:
        found: list[Source] = []
        offset = 0
        for part in parts:
            length = part.reference.shape[dim]
            taken = Functional(
                _piece(a.deviation, part, dim, offset), _piece(a.drift, part, dim, offset)
            )
            if taken.parts:
                found.append((part.index, taken))
            offset += length
        return found

    run.append(node, reference, pull, nothing, nothing)


def _piece(a: Adjoint | None, part: Operand, dim: int, offset: int) -> Adjoint | None:
    """Return what functionals of a concatenation read of one of its parts, None for nothing."""
    if a is None:
        return None
    start, stop = a.window[dim]
    first, last = max(start, offset), min(stop, offset + part.reference.shape[dim])
    if first >= last:
        return None
    window = list(a.window)
    window[dim] = (first - offset, last - offset)
    values = a.values.narrow(1 + dim, first - start, last - first)
    return Adjoint(values, tuple(window), tuple(part.reference.shape))


def embedding(run: Run, node: Node) -> None:
    """Append the rows of the table at the node's token ids, which are known."""
    table = run.kernels.plain(run.source(node, 0))
    ids = torch.tensor(node.attrs["ids"], device=table.train.device)
    reference: Tensor = table.train[ids].reshape(node.shape)
    middle, radius = run.state(node).drift.midpoint()
    run.append(node, reference, lambda a: [], zero_part(reference), Part(middle, radius))
