"""Operations that move numbers without rounding them."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.view import View
from kcdsl_backends.affine.adjoint import Adjoint
from kcdsl_backends.affine.rules.structural import pulled
from kcdsl_backends.interval.box import Box, gamma
from kcdsl_backends.planes.functional import Functional
from kcdsl_backends.planes.run import Operand, Part, Run, zero_part
from kcdsl_backends.planes.tape import Source


def view(run: Run, node: Node) -> None:
    """Append a view of one operand; functionals of several copies are summed, which rounds."""
    x, found = run.operand(node, 0), View.of(node)
    shape, reference = tuple(x.reference.shape), found.moved(x.reference)
    inexact = 0.0 if found.copies == 1 else 2 * gamma(found.copies + 4)
    zero = torch.zeros_like(reference)

    def part(box: Box) -> Part:
        return Part(zero, inexact * found.moved(box.mag()))

    def pull(a: Functional) -> list[Source]:
        return [(x.index, a.each(lambda values: pulled(found, values, shape)))]

    run.append(node, reference, pull, part(x.deviation), part(x.drift))


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
