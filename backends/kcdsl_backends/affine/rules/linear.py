"""Linear maps and products of matrices (section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint, at
from kcdsl_backends.affine.kernel import KernelRun, Operand
from kcdsl_backends.affine.quantising import quantise
from kcdsl_backends.affine.rules.structural import MOVES, moved
from kcdsl_backends.affine.storing import Result, store
from kcdsl_backends.affine.tape import PASS, SAFE, Entry
from kcdsl_backends.interval.box import Box, gamma
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rules.linear import (
    activation_error,
    summation_error,
)

Pulled = Sequence[tuple[int, Adjoint]]


def linear(run: KernelRun, node: Node) -> None:
    """Append x @ weight.T + bias."""
    index, x = _quantised(run, node)
    weight = run.parameters.linear(run.source(node, 1))
    bias, kernel, terms = run.optional(node, 2), run.rounding, weight.shape[1]
    absolute = weight.abs().T
    product = x.reference @ weight.T
    reference = product if bias is None else product + bias
    reach = x.reach @ absolute * SAFE
    total = x.size @ absolute * SAFE
    if bias is not None:
        total = (total + bias.abs()) * SAFE
    value, dynamic = (reference.abs() + reach) * SAFE, kernel.numerics.activations.format != "none"
    error = summation_error(x.size, absolute, total, value, kernel, quantised=dynamic)
    if bias is not None and kernel.free and kernel.coarse:
        early = kernel.compute
        stored = product.abs() + reach + error
        error = error + early.unit_roundoff * stored * SAFE + early.underflow
    own = gamma(terms + 4) * total + gamma(max(weight.shape) + PASS) * reach

    def pull(a: Adjoint) -> Pulled:
        start, stop = a.window[-1]
        values = a.values @ weight[start:stop]
        return [(index, Adjoint(values, (*a.window[:-1], (0, terms)), (*a.shape[:-1], terms)))]

    store(run, node, Result(reference, pull, reach, (error + own) * SAFE), accumulates=True)


def _quantised(run: KernelRun, node: Node) -> tuple[int, Entry]:
    """Return the input of a linear, as an entry of its own where it is quantised."""
    index, x = run.entry(node, 0)
    box = Box(x.reference - x.reach * SAFE, x.reference + x.reach * SAFE)
    error = activation_error(box, run.rounding, node.name)
    if error is None:
        return index, x
    stairs = quantise(run, node.name, index, x, error)
    if stairs is not None:
        return run.tape.add(stairs), stairs
    reach = (x.reach + error) * SAFE
    quantised = Entry(
        f"{node.name}/input", x.reference, reach, lambda a: [(index, a)], None, error * SAFE
    )
    return run.tape.add(quantised), quantised


def matmul(run: KernelRun, node: Node) -> None:
    """Append a @ b of two computed matrices."""
    a, b = run.operand(node, 0), run.operand(node, 1)
    scores = node.role == "scores"
    before = 6 if scores and run.rounding.numerics.attention.style == "fused" else 2
    second = a.reach @ b.reach * SAFE
    if scores:
        both = _through_weights(run, node)
        second = second if both is None else torch.minimum(second, both)
    result = product(run, a, b, a.reference.shape[-1], before)
    internal = (result.internal + second) * SAFE
    store(
        run,
        node,
        Result(result.reference, result.pull, result.linear, internal),
        accumulates=True,
    )


def product(run: KernelRun, a: Operand, b: Operand, steps: int, before: int) -> Result:
    """Return a @ b without its remainder of second order."""
    if a.reference.shape[:-2] != b.reference.shape[:-2]:
        raise NoBound(run.graph.output, "a product of matrices that broadcasts")
    p, q, terms = a.reference, b.reference, a.reference.shape[-1]
    reference = p @ q
    linear = (a.reach @ q.abs() + p.abs() @ b.reach) * SAFE
    total = a.size @ b.size * SAFE
    value = (reference.abs() + a.reach @ b.size + p.abs() @ b.reach) * SAFE
    error = summation_error(
        a.size, b.size, total, value, run.rounding, extra=steps - terms, before=before
    )
    own = gamma(terms + 4) * total + gamma(max(terms, *p.shape[-2:], q.shape[-1]) + PASS) * linear

    def pull(adjoint: Adjoint) -> Pulled:
        *lead, rows, columns = adjoint.window
        inner = (0, terms)
        found = []
        if a.index is not None:
            back = adjoint.values @ q[at((*lead, inner, columns))].mT
            found.append((a.index, Adjoint(back, (*lead, rows, inner), tuple(p.shape))))
        if b.index is not None:
            back = p[at((*lead, rows, inner))].mT @ adjoint.values
            found.append((b.index, Adjoint(back, (*lead, inner, columns), tuple(q.shape))))
        return found

    return Result(reference, pull, linear, (error + own) * SAFE)


@dataclass(frozen=True, slots=True)
class Heads:
    """An operand [heads, T, d] that comes straight from a linear: e[h, t] = W_h e_x[t] + o[h, t].

    `weight` [heads, d, D], `own` [heads, T, d] bounds |o|, `reach` [T, D] bounds |e_x|.
    """

    weight: Tensor
    own: Tensor
    reach: Tensor

    @property
    def carried(self) -> Tensor:
        """Return |W_h| reach [heads, T, d]."""
        return self.reach @ self.weight.abs().mT * SAFE


def heads(run: KernelRun, node: Node, position: int, *, transposed: bool = False) -> Heads | None:
    """Return the heads behind an operand, None where it does not come straight from a linear.

    Args:
        transposed: the operand is [heads, d, T].
    """
    moves, source = [], run.source(node, position)
    while source.op in MOVES:
        moves.append(source)
        source = run.source(source, 0)
    if source.op != "linear" or run.rounding.numerics.activations.format != "none":
        return None
    entry = run.tape.entries[run.computed[source.name]]
    if not entry.kept or entry.radius is None or len(entry.shape) != 2:
        return None
    tokens, features = entry.shape
    place = torch.arange(tokens * features, device=entry.radius.device).reshape(entry.shape)
    for move in reversed(moves):
        place = moved(move, place)
    if place.dim() != 3:
        return None
    place = place.mT if transposed else place
    outputs = place[:, :1] % features
    row = torch.arange(tokens, device=place.device)[:, None]
    if place.shape[1] != tokens or not bool((place == row * features + outputs).all()):
        return None
    weight = run.parameters.linear(run.source(source, 1))
    own = entry.radius.flatten()[place.flatten()].reshape(place.shape)
    return Heads(weight[outputs[:, 0]], own, run.operand(source, 0).reach)


def _through_weights(run: KernelRun, node: Node) -> Tensor | None:
    """Bound |e_q·e_k| through the product of both weights; None where they are not at hand."""
    query, key = heads(run, node, 0), heads(run, node, 1, transposed=True)
    if query is None or key is None or query.weight.shape[1] != key.weight.shape[1]:
        return None
    width = query.weight.shape[1]
    inner = (query.weight.mT @ key.weight).abs()
    inner = inner + gamma(width + 4) * (query.weight.abs().mT @ key.weight.abs())
    both = query.reach @ inner @ key.reach.T
    mixed = query.own @ key.carried.mT + query.carried @ key.own.mT + query.own @ key.own.mT
    return (both + mixed) * SAFE
