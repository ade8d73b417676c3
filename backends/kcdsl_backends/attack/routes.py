"""Search for runs in which a router chooses other experts than those of the graph (Rule 5.8).

A bound needs a proof that both kernels take the route of the graph. A run that chooses other
experts shows that there is no such proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.attack.gradient_ascent import Key, Symbols, ascend, input_at, leaf_gradients
from kcdsl_backends.attack.simulation import Overflowed, Simulator
from kcdsl_backends.drift.ops.route import chosen_mask

_PAIRS = 8
"""Pairs of experts that are tried, those with the closest logits first."""
_INPUT, _KERNEL = ("x", "x"), "kernel"
"""Keys of the symbols of the input, and first part of the keys of the kernel's symbols."""
Place = tuple[int, int, int]
"""A position, an expert that the graph chooses there, and one that it does not."""


@dataclass(frozen=True, slots=True)
class OtherRoute:
    """A run of a kernel that chooses another expert at a position.

    `above` is the logit of `other`, which the graph does not choose, minus that of `expert`, which
    it chooses. `moved` says whether the input differs from the centre.
    """

    kernel: str
    position: int
    expert: int
    other: int
    above: float
    moved: bool

    def __str__(self) -> str:
        place = "at an input of the region" if self.moved else "at the input itself"
        return (
            f"a run of the {self.kernel} kernel {place} chooses expert {self.other} in place of"
            f" {self.expert} at position {self.position}: its logit is larger by {self.above:.3g}"
        )


def other_route(
    train: Simulator, infer: Simulator, centre: Tensor | None, radius: Tensor, *, rounds: int = 12
) -> OtherRoute | None:
    """Return a run of either kernel that leaves the route of the graph; None if none is found.

    For the pairs of experts with the closest logits, an ascent over rounding symbols and the input
    maximises the difference of the logits. The first other choice is returned. Deterministic.

    Args:
        centre, radius: the region, [T, D] and broadcastable; centre None for a block on token ids.
        rounds: largest number of steps of an ascent.
    """
    for node in train.graph.nodes:
        if node.op != "route":
            continue
        for kernel, simulator in (("training", train), ("inference", infer)):
            router = _Router(node, _logits_of(simulator, node), centre, radius)
            found = router.leaves(kernel, rounds)
            if found is not None:
                return found
    return None


def _logits_of(simulator: Simulator, node: Node) -> Simulator:
    """Return the simulator of the logits that a route reads."""
    graph = replace(simulator.graph, output=node.inputs[0])
    return Simulator(graph, simulator.numerics, simulator.parameters)


@dataclass(frozen=True, slots=True)
class _Router:
    """The logits of a router in one kernel, on a region."""

    node: Node
    simulator: Simulator
    centre: Tensor | None
    radius: Tensor

    def leaves(self, kernel: str, rounds: int) -> OtherRoute | None:
        """Return the first run that chooses another expert; None if none is found."""
        start = self._zero()
        logits = self._logits(start)
        if logits is None:
            return None
        for place in self._closest(logits):
            at, above = self._push(start, place, rounds)
            if above > 0:
                moved = _INPUT in at and bool((at[_INPUT] != 0).any())
                return OtherRoute(kernel, *place, above, moved)
        return None

    def _push(self, start: Symbols, place: Place, rounds: int) -> tuple[Symbols, float]:
        """Maximise the difference of two logits; return the last symbols and the difference."""
        row, expert, other = place

        def above(symbols: Symbols) -> float:
            logits = self._logits(symbols)
            return -math.inf if logits is None else float(logits[row, other] - logits[row, expert])

        def gradient(symbols: Symbols) -> Symbols | None:
            leaves = {key: value.clone().requires_grad_(True) for key, value in symbols.items()}
            logits = self._run(leaves)
            if logits is None or not logits.requires_grad:
                return None
            return leaf_gradients(logits[row, other] - logits[row, expert], leaves)

        return ascend(start, above, gradient, rounds)

    def _zero(self) -> Symbols:
        device = self.simulator.parameters.device
        shapes: dict[Key, tuple[int, ...]]
        shapes = {(_KERNEL, name): shape for name, shape in self.simulator.symbol_shapes().items()}
        if self.centre is not None and bool((self.radius > 0).any()):
            shapes[_INPUT] = tuple(self.centre.shape)
        return {
            key: torch.zeros(shape, dtype=torch.float64, device=device)
            for key, shape in shapes.items()
        }

    def _logits(self, symbols: Symbols) -> Tensor | None:
        """Return the logits [T, E] of a run; None if it overflows."""
        with torch.no_grad():
            return self._run(symbols)

    def _run(self, symbols: Symbols) -> Tensor | None:
        own = {name: value for (side, name), value in symbols.items() if side == _KERNEL}
        try:
            logits = self.simulator.run(input_at(self.centre, self.radius, symbols), own)
        except Overflowed:
            return None
        return logits if bool(torch.isfinite(logits).all()) else None

    def _closest(self, logits: Tensor) -> Iterator[Place]:
        """Yield position, chosen expert and other expert, the closest logits first."""
        chosen = chosen_mask(self.node, logits.device)
        inside = logits.masked_fill(~chosen, torch.inf)
        outside = logits.masked_fill(chosen, -torch.inf)
        apart = inside[:, :, None] - outside[:, None, :]
        order = apart.flatten().argsort(stable=True)[:_PAIRS]
        for flat in order.tolist():
            row, rest = divmod(flat, apart.shape[1] * apart.shape[2])
            if bool(torch.isfinite(apart.flatten()[flat])):
                yield row, *divmod(rest, apart.shape[2])
