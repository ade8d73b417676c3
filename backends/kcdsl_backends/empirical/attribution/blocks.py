"""The drift of each block by itself, and its part of the drift of the output.

`alone`: the training activations enter the block, the inference kernel's block runs, and the
training kernel goes on. `cumulative`: all blocks up to this one are the inference kernel's, each on
what the ones before made. The gain of a block is what `cumulative` grows by; gains sum up to the
drift of all blocks together.

What enters a block in the training kernel is recorded, the inference kernel's block runs on it, and
its output takes the place of the training block's in one more pass of the training kernel. All that
lies between blocks (embeddings, residual sums) is the training kernel's in every such pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.model.architecture import Model
from kcdsl.verdict.studies.attribution import Layer, Layers, Mismatch
from kcdsl_backends.empirical.attribution.envelopes import HEAD
from kcdsl_backends.empirical.attribution.measurement import AttributedMetric, values_between
from kcdsl_backends.empirical.attribution.shapley import Array, Statistic, Table, column
from kcdsl_backends.empirical.collection.context import Progress
from kcdsl_backends.empirical.diagnoses.model import size
from kcdsl_backends.empirical.diagnoses.reference import own_blocks
from kcdsl_backends.empirical.sources.kernels import Kernel
from kcdsl_backends.empirical.sources.kernels.engines import as_it_is
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.requests import Request

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class _Seen:
    """The outputs of both kernels by block, and values of the metric, for one request."""

    train: Mapping[str, Tensor]
    infer: Mapping[str, Tensor]
    floor: Mapping[str, float]
    entered: Mapping[str, Tensor]
    base: Array
    alone: Mapping[str, Array]
    cumulative: Mapping[str, Array]
    total: Array


def swap_layers(
    subject: AttributedMetric,
    statistic: Statistic = "mean",
    progress: Progress = lambda stage, done, total: None,
) -> Layers:
    """Swap every block, on requests that are run alone.

    Raises NoSwap, or what a kernel raises, where that cannot be done.
    """
    if len(subject.parts) > 1:
        raise NoSwap(f"{subject.metric} reads states and logits, of which one pass gives one")
    swaps = swapper(subject.pair.model, subject.pair.train, subject.plan.encoder)

    def value(rows: Sequence[Array]) -> float:
        known = {0: column(rows, subject.better, subject.metric)}
        return Table(statistic, subject.better, known).values()[0]

    seen: list[_Seen] = []
    for done, request in enumerate(subject.requests, 1):
        seen.append(_look(subject, swaps, request))
        progress("blocks", done, len(subject.requests))
    base = value([s.base for s in seen])
    layers: list[Layer] = []
    before = 0.0
    for name in swaps.names:
        so_far = value([s.cumulative[name] for s in seen]) - base
        alone = value([s.alone[name] for s in seen]) - base
        layers.append(_layer(name, seen, alone, so_far, so_far - before))
        before = so_far
    return Layers(
        tuple(layers),
        tuple(r.key for r in subject.requests),
        value([s.total for s in seen]) - base,
        _first_mismatch(subject, swaps.names, seen),
    )


def _look(subject: AttributedMetric, swaps: Swapper, request: Request) -> _Seen:
    tokens = request.tokens
    plain = swaps.run(tokens, {})
    alone, floors, infer = {}, {}, {}
    for name in swaps.names:
        x = plain.entered[name]
        infer[name] = _cpu(subject.pair.infer.block(name, x))
        floors[name] = _floor(subject.pair.train, name, x)
        swapped = swaps.run(tokens, {name: infer[name]})
        alone[name] = _values(subject, request, plain.output, swapped.output)
    cumulative: dict[str, Array] = {}
    done: dict[str, Tensor] = {}
    entering = plain
    for name in swaps.names:
        done[name] = _cpu(subject.pair.infer.block(name, entering.entered[name]))
        entering = swaps.run(tokens, done)
        cumulative[name] = _values(subject, request, plain.output, entering.output)
    kernel = subject.pair.infer
    forward = kernel.hidden if subject.plan.encoder else kernel.logits
    with torch.no_grad():
        whole = forward(tokens)
    return _Seen(
        plain.left,
        infer,
        floors,
        plain.entered,
        _values(subject, request, plain.output, plain.output),
        alone,
        cumulative,
        _values(subject, request, plain.output, whole),
    )


def _floor(train: Kernel, name: str, x: Tensor) -> float:
    """Return how far the training kernel's block moves when it is run again, and in a batch."""
    with torch.no_grad():
        first, again = _cpu(train.block(name, x)), _cpu(train.block(name, x))
        found = [size(first, again, states=True)]
        try:
            together = _cpu(train.block(name, torch.stack([x, x.flip(0)])))
        except (RuntimeError, ValueError, IndexError):  # a block without a dimension for batches
            return found[0]
    if together.shape == (2, *first.shape):
        found.append(size(first, together[0], states=True))
    return max(found)


def _layer(
    name: str, seen: Sequence[_Seen], logits: float, cumulative: float, gain: float
) -> Layer:
    train = torch.cat([s.train[name].reshape(-1) for s in seen])
    infer = torch.cat([s.infer[name].reshape(-1) for s in seen])
    gap = infer - train
    drift = float(gap.square().mean().sqrt())
    scale = float(train.square().mean().sqrt())
    return Layer(
        name,
        drift,
        float(gap.abs().max()),
        drift / scale if scale > 0 else 0.0,
        max(s.floor[name] for s in seen),
        float((train != infer).to(torch.float64).mean()),
        logits,
        cumulative,
        gain,
    )


def _first_mismatch(
    subject: AttributedMetric, names: Sequence[str], seen: Sequence[_Seen]
) -> Mismatch | None:
    for name in names:
        for request, found in zip(subject.requests, seen, strict=True):
            unequal = (found.train[name] != found.infer[name]).nonzero()
            if not len(unequal):
                continue
            token, index = (int(i) for i in unequal[0])
            number = _NUMBER.search(name) if not name.startswith("norm") else None
            return Mismatch(
                name,
                None if number is None else int(number[1]),
                first_operation(subject.pair.train, subject.pair.infer, name, found.entered[name]),
                request.key,
                token,
                index,
                float(found.train[name][token, index]),
                float(found.infer[name][token, index]),
            )
    return None


def _values(subject: AttributedMetric, request: Request, train: Tensor, other: Tensor) -> Array:
    (part,) = subject.parts
    return values_between(subject, request, {part: train}, {part: other})


def _cpu(output: Tensor) -> Tensor:
    return output.detach().to("cpu", torch.float64)


# --- passes with exchanged outputs ----------------------------------------------------------------

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
        with ExitStack() as hooks:
            for name in self.names:
                enter = _entering(entered[name])
                swap = _swapping(left[name], replaced.get(name))
                hooks.enter_context(self._entries[name].register_forward_pre_hook(enter))
                hooks.enter_context(self._exits[name].register_forward_hook(swap))
            output = self.forward(tokens)
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


def _entering(found: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
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


# --- the first operation that differs -------------------------------------------------------------

Noted = list[tuple[str, str, Tensor]]
"""Inputs ("enters") and outputs ("leaves") of the parts of a block, in the order of the run."""


def first_operation(train: Kernel, infer: Kernel, block: str, x: Tensor) -> str:
    """Return where a block's run on x first differs: a part of it, what comes before that part, or
    the block where its parts cannot be told apart."""
    runs = [_noted(kernel, block, x) for kernel in (train, infer)]
    if not runs[0] or [(n, w) for n, w, _ in runs[0]] != [(n, w) for n, w, _ in runs[1]]:
        return block
    before = ""
    for (name, what, a), (_, _, b) in zip(runs[0], runs[1], strict=True):
        if a.shape == b.shape and torch.equal(a, b):
            before = name
            continue
        if what == "leaves":
            return name
        return f"between {before} and {name}" if before else f"before {name}"
    return f"after {before}"


def _noted(kernel: Kernel, block: str, x: Tensor) -> Noted:
    blocks = getattr(kernel.module, "blocks", None) if isinstance(kernel, TorchKernel) else None
    if blocks is None:
        return []
    part: nn.Module = blocks()[block]
    found: Noted = []
    with ExitStack() as hooks:
        for name, module in part.named_modules():
            if name and not list(module.children()):
                hooks.enter_context(module.register_forward_hook(_noting(name, found)))
        kernel.block(block, x)
    return found


def _noting(name: str, found: Noted) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        for what, value in (("enters", arguments[0] if arguments else None), ("leaves", output)):
            if isinstance(value, Tensor):
                found.append((name, what, value.detach().to("cpu", torch.float64)))

    return hook
