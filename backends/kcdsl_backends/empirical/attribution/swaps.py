"""One block of the inference kernel inside the training kernel, by forcing what leaves it.

What enters a block in the training kernel is recorded, the inference kernel's block runs on it, and
its output takes the place of the training block's in one more pass of the training kernel. All that
lies between blocks (embeddings, residual sums) is the training kernel's in every such pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.model.architecture import Model
from kcdsl_backends.empirical.attribution.envelopes import HEAD
from kcdsl_backends.empirical.diagnoses import own_blocks
from kcdsl_backends.empirical.sources.kernels.programs import as_it_is
from kcdsl_backends.empirical.sources.kernels.run import Kernel
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel

Forward = Callable[[Any], Tensor]


class NoSwap(ValueError):
    """The training kernel shows no blocks whose outputs could be exchanged."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the training kernel: the final output [T, ...], what entered and what left each
    block (its own output, also where another took its place); float32 or the compute format."""

    output: Tensor
    entered: Mapping[str, Tensor]
    left: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Swapper:
    """Runs the training kernel with some outputs of blocks in place of its own."""

    kernel: TorchKernel
    forward: Forward
    names: tuple[str, ...]
    _entries: Mapping[str, nn.Module]
    _exits: Mapping[str, nn.Module]

    def run(self, tokens: Sequence[int], replaced: Mapping[str, Tensor]) -> Pass:
        """Return a pass with the outputs of the blocks `replaced`, [T, D] float64 on the CPU.

        Raises NoSwap where a block did not run exactly once, on hidden states [T, D].
        """
        entered: dict[str, list[Tensor]] = {name: [] for name in self.names}
        left: dict[str, list[Tensor]] = {name: [] for name in self.names}
        handles = []
        for name in self.names:
            handles.append(self._entries[name].register_forward_pre_hook(_noting(entered[name])))
            swap = _swapping(left[name], replaced.get(name))
            handles.append(self._exits[name].register_forward_hook(swap))
        try:
            output = self.forward(tokens)
        finally:
            for handle in handles:
                handle.remove()
        for name in self.names:
            if len(entered[name]) != 1 or len(left[name]) != 1 or entered[name][0].dim() != 2:
                raise NoSwap(f"the block {name} did not run once, on hidden states [T, D]")
        return Pass(
            output,
            {name: found[0] for name, found in entered.items()},
            {name: found[0] for name, found in left.items()},
        )


def swapper(model: Model, train: Kernel, states: bool) -> Swapper:
    """Return what swaps blocks of the training kernel on the way to its logits, or to the last
    `states`, which do not pass through the head. Raises NoSwap where nothing can."""
    if not isinstance(train, TorchKernel) or train.engine is not as_it_is:
        raise NoSwap("the training kernel runs as one program, whose blocks cannot be exchanged")
    blocks: Mapping[str, nn.Module] = getattr(train.module, "blocks", dict)()
    passed = (name for name in own_blocks(model) if name in blocks)
    names = tuple(name for name in passed if not (states and name == HEAD))
    if not names:
        raise NoSwap("the model names no blocks")
    entries = {**blocks, **getattr(train.module, "block_entries", dict)()}
    exits = {**blocks, **getattr(train.module, "block_exits", dict)()}
    forward = train.hidden if states else train.logits
    return Swapper(train, forward, names, entries, exits)


def _noting(found: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0].detach())

    return hook


def _swapping(
    found: list[Tensor], other: Tensor | None
) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        found.append(output.detach().to("cpu", torch.float64))
        return None if other is None else other.to(output.device, output.dtype)

    return hook
