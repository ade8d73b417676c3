"""Bounds of a difference with splits of rounded hidden values: levels up to one, and the rest.

"Fixed point" in section 9 of docs/proofs/difference-planes.md. The parts of the levels of some
hidden element are bounded on their own, with slopes of their own, and split again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.qebverif_bounds import FixedPointPair, Functionals, Points, Slopes, packed
from bench.qebverif_checker import LEAF

_BATCH, _STEPS, _RATE, _LAST = 64, 50, 0.01, 0.1
_FEW = 4
"""An element with more levels is split at the bend of ReLU first."""


@dataclass(slots=True)
class _Part:
    """Levels [N] of all hidden elements, slopes [N, 2], a bound, and the split."""

    levels: Tensor
    slopes: Tensor
    bound: float = math.inf
    split: tuple[int, int] = (0, 0)
    parts: tuple[_Part, ...] = ()

    def halves(self) -> tuple[_Part, _Part]:
        """Split the levels, and remember the two parts."""
        element, level = self.split
        first, second = self.levels.clone(), self.levels.clone()
        first[1, element], second[0, element] = level, level + 1
        self.parts = _Part(first, self.slopes), _Part(second, self.slopes)
        return self.parts[0], self.parts[1]


@dataclass(frozen=True, slots=True)
class Tree:
    """Splits in preorder as the checker reads them, and the slopes [leaves, N, 2]."""

    cuts: list[list[int]]
    slopes: NDArray[np.float32]


@dataclass(slots=True)
class Splitting:
    """A search for splits that show a functional [1, outputs] of the outputs below a limit."""

    pair: FixedPointPair
    row: Functionals
    limit: float
    single: FixedPointPair = field(init=False)

    def __post_init__(self) -> None:
        self.single = self.pair.single()

    def searched(self, slopes: Slopes, most: int) -> Tree | None:
        """Return the tree, or None after `most` parts; the search starts with these slopes."""
        start = torch.from_numpy(packed(slopes, 0)).double()[0]
        levels = torch.zeros(2, len(start), dtype=torch.float64)
        levels[1] = self.pair.grid.most
        root = _Part(levels, start)
        self._bound([root])
        opened, count = [root] if root.bound >= self.limit else [], 1
        while opened:
            opened.sort(key=lambda part: part.bound)
            taken, opened = opened[-_BATCH // 2 :], opened[: -_BATCH // 2]
            parts = [half for part in taken for half in part.halves()]
            count += len(parts)
            if count > most:
                return None
            self._bound(parts)
            opened += [part for part in parts if part.bound >= self.limit]
        return _tree(root)

    def _bound(self, parts: list[_Part]) -> None:
        """Improve the slopes of parts, bound them, and choose where they would be split."""
        sizes = [len(ranges.z[0]) for ranges in self.pair.ranges]
        levels = torch.stack([part.levels for part in parts])
        each = zip(self.pair.ranges, torch.split(levels, sizes, 2), strict=True)
        points = [r.points(self.pair.grid, low_high[:, 0], low_high[:, 1]) for r, low_high in each]
        faster = [Points(one.table.float()) for one in points]
        slopes = torch.stack([part.slopes for part in parts]).float().requires_grad_()
        best, kept = torch.full((len(parts),), math.inf), slopes.detach().clone()
        optimiser = torch.optim.Adam([slopes], lr=_RATE)
        image, counted = torch.zeros(len(parts), self.pair.box.shape[1]), 0
        for step in range(_STEPS):
            optimiser.param_groups[0]["lr"] = _RATE * _LAST ** (step / _STEPS)
            walk = self._walked(self.single, faster, torch.split(slopes, sizes, 1))
            lower = walk.bound.detach() < best
            kept[lower] = slopes.detach()[lower]
            best = torch.minimum(best, walk.bound.detach())
            if step >= _STEPS // 3:
                image, counted = image + walk.image, counted + 1
            if bool((best < self.limit * (1 - 2.0**-18)).all()):
                break
            optimiser.zero_grad()
            torch.autograd.backward(walk.bound.sum())
            optimiser.step()
        with torch.no_grad():
            kept = kept.double()
            walk = self._walked(self.pair, points, torch.split(kept, sizes, 1))
            mean = (image / counted).double() if counted else walk.image
            gaps, second = self._gaps(walk, mean)
        elements, at = self._split(levels, gaps, second)
        for part, *found in zip(parts, kept, walk.bound.tolist(), elements, at, strict=True):
            part.slopes, part.bound, part.split = found[0], found[1], (found[2], found[3])

    def _walked(
        self, pair: FixedPointPair, points: list[Points], slopes: tuple[Tensor, ...]
    ) -> _Walk:
        """Bound the functional in all parts."""
        count, kind = len(slopes[0]), slopes[0].dtype
        p, q = (side.to(kind).expand(count, -1) for side in (self.row.first, self.row.second))
        bound, terms = torch.zeros(count, dtype=kind), list[tuple[Tensor, ...]]()
        for k in range(len(slopes), -1, -1):
            (weight, bias), (other, shift) = (network[k] for network in pair.networks)
            bound = bound + p @ bias + q @ shift
            p, q = p @ weight, q @ other
            if k:
                a, b = slopes[k - 1].unbind(-1)
                most = points[k - 1].most(p, q, a, b)
                terms.append((p, q, a, b, most))
                bound, p, q = bound + most.sum(-1), a, b
        image = torch.where(p + q > 0, pair.box[1], pair.box[0]).detach()
        return _Walk(bound + ((p + q) * image).sum(-1), image, terms[::-1])

    def _gaps(self, walk: _Walk, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return by how much the term of an element exceeds its value at an image, and z + D."""
        z, other, gaps, seconds = image, image, list[Tensor](), list[Tensor]()
        grid = self.pair.grid
        layers = zip(*self.pair.networks, strict=True)
        for ((weight, bias), (served, shift)), (p, q, a, b, most) in zip(
            layers, walk.terms, strict=False
        ):
            z, other = z @ weight.T + bias, other @ served.T + shift
            seconds.append(other)
            gaps.append(most + a * z + b * other)
            z = z.clamp_min(0)
            other = grid.step * (other / grid.step + 0.5).floor().clamp(0, grid.most)
            gaps[-1] -= p * z + q * other
        return torch.cat(gaps, 1), torch.cat(seconds, 1)

    def _split(self, levels: Tensor, gaps: Tensor, second: Tensor) -> tuple[list[int], list[int]]:
        """Return the element of every part with the largest gap, and the level nearest to z + D."""
        step, most = self.pair.grid.step, self.pair.grid.most
        ends = [torch.cat([ranges.other[k] for ranges in self.pair.ranges]) for k in (0, 1)]
        low, high = ((end / step + 0.5).floor().clamp(0, most) for end in ends)
        low, high = torch.maximum(levels[:, 0], low), torch.minimum(levels[:, 1], high)
        element = torch.where(high > low, gaps, -math.inf).argmax(1, keepdim=True)
        low, high, second = (part.gather(1, element) for part in (low, high, second))
        near = (second / step - 0.5).round()
        near = torch.where((low == 0) & (high > _FEW), 0.0, near)
        level = torch.maximum(low, torch.minimum(near, high - 1))
        return element[:, 0].tolist(), [int(v) for v in level[:, 0].tolist()]


@dataclass(frozen=True, slots=True)
class _Walk:
    """Bounds [M], the images of the box that attain them, and p, q, a, b, k of each layer."""

    bound: Tensor
    image: Tensor
    terms: list[tuple[Tensor, ...]]


def _tree(root: _Part) -> Tree:
    cuts, leaves, stack = list[list[int]](), list[Tensor](), [root]
    while stack:
        part = stack.pop()
        if part.parts:
            cuts.append(list(part.split))
            stack += part.parts[::-1]
        else:
            cuts.append(LEAF)
            leaves.append(part.slopes)
    return Tree(cuts, np.asarray(torch.stack(leaves).float().numpy(), dtype=np.float32))
