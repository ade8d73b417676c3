"""Operands of products that come straight from a linear (section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.view import View
from kcdsl_backends.affine.ellipsoids import Ellipsoids, longest
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.reaches import rows
from kcdsl_backends.affine.spectra import largest_eigenvalue
from kcdsl_backends.affine.tape import SAFE, Entry


@dataclass(frozen=True, slots=True)
class Heads:
    """An operand [heads, T, d] that comes straight from a linear: e[h, t] = W_h e_x[t] + o[h, t].

    `weight` [heads, d, D], `own` [heads, T, d] bounds |o|, `reach` [T, D] bounds |e_x|, e_x is the
    entry `source` (None: a known number). `groups` names for every head the first that is the same,
    of several that read one; `plain`: nothing else is known of o, and no others share any of it.
    """

    weight: Tensor
    own: Tensor
    reach: Tensor
    source: int | None
    ellipsoids: Ellipsoids = field(default_factory=dict)
    plain: bool = False
    groups: tuple[int, ...] = ()

    @property
    def carried(self) -> Tensor:
        """Return |W_h| reach [heads, T, d]."""
        return self.reach @ self.weight.abs().mT * SAFE

    @property
    def lengths(self) -> Tensor:
        """Return bounds of |W_h e_x|₂ [heads, T]: √n times the largest singular value of W_h ρ."""
        found = self.own.new_empty(self.own.shape[:-1])
        for h, t in rows((*found.shape, 1)):
            scaled = self.weight[h] * self.reach[t]
            trace = float(scaled.square().sum()) * SAFE
            found[h, t] = math.sqrt(largest_eigenvalue(scaled @ scaled.T, trace))
        found = found * math.sqrt(self.reach.shape[-1]) * SAFE
        for (t,), matrix in self.ellipsoids.items():
            for h in range(found.shape[0]):
                found[h, t] = min(float(found[h, t]), longest(matrix, self.weight[h]))
        return found

    def again(self, run: KernelRun) -> Heads:
        """Return the same with the reach as it is by now."""
        return (
            self
            if self.source is None
            else replace(
                self,
                reach=run.tape.entries[self.source].reach,
                ellipsoids=run.tape.entries[self.source].ellipsoids,
            )
        )


def heads(run: KernelRun, node: Node, position: int, *, transposed: bool = False) -> Heads | None:
    """Return the heads behind an operand, None where it does not come straight from a linear.

    Args:
        transposed: the operand is [heads, d, T].
    """
    moves, source = behind(run, run.source(node, position))
    return straight(run, moves, source, transposed=transposed)


def behind(run: KernelRun, source: Node) -> tuple[list[Node], Node]:
    """Return the operations that only moved what a node holds, the last one first, and where it
    was computed."""
    moves = []
    while source.op == "view":
        moves.append(source)
        source = run.source(source, 0)
    return moves, source


def straight(
    run: KernelRun, moves: Sequence[Node], source: Node, *, transposed: bool = False
) -> Heads | None:
    """Return the heads that `moves` make of a linear; None of other nodes, or where rows mix."""
    if source.op != "linear" or run.quantises(source):
        return None
    entry = run.tape.entries[run.computed[source.name]]
    if not entry.kept or entry.radius is None or len(entry.shape) != 2:
        return None
    tokens, features = entry.shape
    place = places(entry, moves, transposed=transposed)
    if place.dim() != 3:
        return None
    outputs = place[:, :1] % features
    row = torch.arange(tokens, device=place.device)[:, None]
    if place.shape[1] != tokens or not bool((place == row * features + outputs).all()):
        return None
    weight = run.parameters.linear(run.source(source, 1))
    own = run.own(source.name)
    assert own is not None
    own = own.flatten()[place.flatten()].reshape(place.shape)
    below, read = run.operand(source, 0), [tuple(each) for each in outputs[:, 0].tolist()]
    groups = tuple(read.index(each) for each in read)
    each_once = [output for h in sorted(set(groups)) for output in read[h]]
    apart = len(set(each_once)) == len(each_once)
    plain = apart and entry.centre is None and entry.apart is None
    return Heads(weight[outputs[:, 0]], own, below.reach, below.index, plain=plain, groups=groups)


def places(entry: Entry, moves: Sequence[Node], *, transposed: bool) -> Tensor:
    """Return which element of an entry stands where, after `moves`, the last of them first."""
    count = entry.reference.numel()
    place = torch.arange(count, device=entry.reference.device).reshape(entry.shape)
    for move in reversed(moves):
        place = View.of(move).moved(place)
    return place.mT if transposed else place
