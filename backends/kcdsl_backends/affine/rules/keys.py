"""Keys of a product that come from a linear, turned by their position or not (section 3).

With k[h, j] = R_j k'[g, j], g the group of head h, a functional of one row of scores reads

    Σ_h a_hj q_h·e_k[h, j] = Σ_h a_hj (q_h·o'[g, j] + R_jᵀ q_h·(W_g e_x[j] + o[g, j])),

o what the linear adds and o' what the rotation adds: vectors that are the same for all functionals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.rules.heads import Heads, behind, heads, places, straight
from kcdsl_backends.affine.tape import PASS, SAFE
from kcdsl_backends.interval.box import gamma


@dataclass(frozen=True, slots=True)
class Turn:
    """A rotation R_j of every row: tables [T, d], and a bound [groups, T, d] of what it adds."""

    cos: Tensor
    sin: Tensor
    own: Tensor

    def back(self, vectors: Tensor, rows: slice) -> Tensor:
        """Return R_jᵀ v of vectors [heads, 1, d] -> [heads, rows, d]."""
        first, second = (vectors * self.sin[rows]).chunk(2, -1)
        return vectors * self.cos[rows] + torch.cat([second, -first], -1)

    def size(self, vectors: Tensor, rows: slice) -> Tensor:
        """Return |R_jᵀ| |v| of vectors [heads, 1, d] -> [heads, rows, d]."""
        sizes = vectors.abs()
        first, second = (sizes * self.sin[rows].abs()).chunk(2, -1)
        return sizes * self.cos[rows].abs() + torch.cat([second, first], -1)


@dataclass(frozen=True, slots=True)
class Keys:
    """Where keys come from: `below`, whose heads are turned, and read by the heads of `groups`.

    `size` [heads of `below`, T, d] bounds |W_g e_x[j] + o[g, j]|.
    """

    below: Heads
    groups: tuple[int, ...]
    turn: Turn | None
    size: Tensor

    @staticmethod
    def of(below: Heads, groups: tuple[int, ...], turn: Turn | None) -> Keys:
        """Return the keys of heads."""
        return Keys(below, groups, turn, below.carried + below.own)

    def own(self, each: Tensor, queries: Tensor, first: int, rows: slice) -> Tensor:
        """Bound what rotation and linear add to functionals of one row of scores.

        Args:
            each: a [B, heads, rows], of heads from the one numbered `first`.
            queries: q [heads, d].
            rows: the keys that are read.

        Returns:
            [B]. What float64 loses on the way to e_x is part of it.
        """
        read, vectors = self.groups[first : first + len(queries)], queries[:, None]
        size, gathered = self.size[:, rows], list(read)
        total = _size(each, self._back(vectors, rows), self.below.own[:, rows], read)
        if self.turn is None:
            sizes = vectors.abs() * size[gathered]
        else:
            added = self.turn.own[:, rows]
            total = total + _size(each, vectors, added, read)
            sizes = vectors.abs() * added[gathered]
            sizes = sizes + self.turn.size(vectors, rows) * size[gathered]
        inexact = gamma(len(read) + vectors.shape[-1] + 2 * PASS) * sizes.sum(-1)
        return (total + each.abs().flatten(1) @ inexact.flatten()) * SAFE

    def directions(self, queries: Tensor, first: int, rows: slice) -> Tensor:
        """Return W_gᵀ R_jᵀ q_h of queries [heads, d] -> [heads, rows, D]; [heads, 1, D] where it is
        the same in every row."""
        read = list(self.groups[first : first + len(queries)])
        return self._back(queries[:, None], rows) @ self.below.weight[read]

    def _back(self, vectors: Tensor, rows: slice) -> Tensor:
        return vectors if self.turn is None else self.turn.back(vectors, rows)


def _size(each: Tensor, vectors: Tensor, own: Tensor, read: tuple[int, ...]) -> Tensor:
    """Bound Σ_j Σ_h a_hj v_hj·o[g, j] of |o| <= own, the heads of a group taken together.

    Args:
        each: a [B, heads, rows].
        vectors: v [heads, rows or 1, d].
        own: [groups, rows, d].
        read: the group of every head.
    """
    total = each.new_zeros(len(each))
    for group in dict.fromkeys(read):
        members = [h for h, other in enumerate(read) if other == group]
        if len(members) == 1:
            size = (vectors[members[0]].abs() * own[group]).sum(-1)
            total = total + each[:, members[0]].abs() @ size
            continue
        turned = vectors[members].expand(-1, each.shape[-1], -1)
        joint = torch.einsum("bhj,hjd->bjd", each[:, members], turned)
        total = total + joint.abs().flatten(1) @ own[group].flatten()
    return total * (1 + 2 * gamma(own[0].numel() + PASS))


def keys(run: KernelRun, node: Node) -> Keys | None:
    """Return the keys [heads, d, T] of a product of scores; None where they come from elsewhere."""
    moves, source = behind(run, run.source(node, 1))
    if source.op != "rope":
        found = heads(run, node, 1, transposed=True)
        return None if found is None or not found.plain else Keys.of(found, found.groups, None)
    entry = run.tape.entries[run.computed[source.name]]
    below = straight(run, *behind(run, run.source(source, 0)))
    simple = entry.kept and entry.centre is None and entry.apart is None
    if below is None or not below.plain or not simple or entry.radius is None:
        return None
    _, tokens, width = entry.shape
    place = places(entry, moves, transposed=True)
    if place.shape[1:] != (tokens, width):
        return None
    inner = torch.arange(tokens * width, device=place.device).reshape(tokens, width)
    if not bool((place == place[:, :1, :1] + inner).all()):
        return None
    groups = tuple((place[:, 0, 0] // (tokens * width)).tolist())
    cos, sin = (run.parameters.plain(run.source(source, i)) for i in (1, 2))
    own = run.own(source.name)
    assert own is not None
    turn = Turn(cos.expand(tokens, width), sin.expand(tokens, width), own)
    return Keys.of(below, groups, turn)
