"""Operands of products that come straight from a linear (section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.ellipsoids import Ellipsoids, longest
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.reaches import rows
from kcdsl_backends.affine.rules.structural import MOVES, moved
from kcdsl_backends.affine.spectra import largest_eigenvalue
from kcdsl_backends.affine.tape import SAFE


@dataclass(frozen=True, slots=True)
class Heads:
    """An operand [heads, T, d] that comes straight from a linear: e[h, t] = W_h e_x[t] + o[h, t].

    `weight` [heads, d, D], `own` [heads, T, d] bounds |o|, `reach` [T, D] bounds |e_x|, e_x is the
    entry `source` (None: a known number). `plain`: nothing else is known of o, and no two heads
    have the same of it.
    """

    weight: Tensor
    own: Tensor
    reach: Tensor
    source: int | None
    ellipsoids: Ellipsoids = field(default_factory=dict)
    plain: bool = False

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
    below, read = run.operand(source, 0), outputs.flatten()
    apart = len(set(read.tolist())) == len(read)
    plain = apart and entry.centre is None and entry.apart is None
    return Heads(weight[outputs[:, 0]], own, below.reach, below.index, plain=plain)
