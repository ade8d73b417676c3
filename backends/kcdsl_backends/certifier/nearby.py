"""A block whose parameters may lie anywhere near those of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.affine.kernel import Nearby, Spread
from kcdsl_backends.affine.pair import Both, both
from kcdsl_backends.certifier.sequences import SequenceProblem
from kcdsl_backends.certifier.workshop import BlockProblem
from kcdsl_backends.interval.box import up
from kcdsl_backends.interval.context import Kernels, Parameter
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.neighbourhood import Moved, Neighbourhood
from kcdsl_backends.interval.propagate import Bounds, propagate
from kcdsl_backends.parameters import StoredParameters
from kcdsl_backends.planes.propagate import Found as Planes
from kcdsl_backends.threads import threads_for

Reader = Callable[[Node], Moved]
Distance = Callable[[Node], Tensor]


@dataclass(frozen=True, slots=True)
class NearbyProblem:
    """A block under every θ' with |θ' - θ| <= ρ|θ|."""

    problem: BlockProblem | SequenceProblem
    around: Neighbourhood

    @property
    def graph(self) -> BlockGraph:
        """Return the graph of the block."""
        return self.problem.graph

    def forms(self, centre: Tensor | None, radius: Tensor, alpha: Fraction | None = None) -> Both:
        """Return the affine forms of both kernels around their runs at θ; see `affine.pair.both`.

        Raises:
            NoBound: also where the block is read at any length.
        """
        if isinstance(self.problem, SequenceProblem):
            raise NoBound(self.graph.output, "no region is of any length and around the weights")
        train, infer = self.problem.train, self.problem.infer
        spreads = self._spread(train, 0), self._spread(infer, 1)
        nearby = Nearby(*spreads, self._kernels(self.problem))
        return both(self.graph, train, infer, centre, radius, nearby=nearby, alpha=alpha)

    def _spread(self, stored: StoredParameters, side: int) -> Spread:
        around = self.around
        return Spread(
            _distance(stored.linear, around.linear, side),
            _distance(stored.plain, around.plain, side),
            lambda node: around.linear(node).alike,
            lambda node: around.plain(node).alike,
        )

    def planes(self, centre: Tensor | None, radius: Tensor, *_: object) -> Planes:
        """Planes are of one checkpoint; raises NoBound."""
        raise NoBound(self.graph.output, "planes do not cover a region around the weights")

    def bound(self, centre: Tensor | None, radius: Tensor) -> Bounds:
        """Propagate the region through the graph; see `propagate`.

        Raises:
            NoBound: also where the block is read at any length.
        """
        if isinstance(self.problem, SequenceProblem):
            raise NoBound(self.graph.output, "no region is of any length and around the weights")
        with threads_for(self.problem.size):
            return propagate(self.graph, self._kernels(self.problem), centre, radius)

    def _kernels(self, problem: BlockProblem) -> Kernels:
        """Return both kernels as the rules read them: parameters are boxes."""
        known, around = problem.kernels(), self.around

        def plain(node: Node) -> Parameter:
            return _around(known.plain(node), node, around.plain)

        def linear(node: Node) -> Parameter:
            return _around(known.linear(node), node, around.linear)

        return replace(known, plain=plain, linear=linear, around_weights=True)


def _distance(stored: Callable[[Node], Tensor], around: Reader, side: int) -> Distance:
    """Return how far what a kernel stores may be from what it stores of θ."""

    def distance(node: Node) -> Tensor:
        centre, moved = stored(node), around(node)
        box = (moved.train, moved.infer)[side]
        return up(torch.maximum(box.hi - centre, centre - box.lo).clamp_min(0))

    return distance


def _around(known: Parameter, node: Node, moved: Reader) -> Parameter:
    """Return what is held of a parameter near that of the checkpoint; constants do not move."""
    return known if node.op != "param" else replace(known, moved=moved(node))
