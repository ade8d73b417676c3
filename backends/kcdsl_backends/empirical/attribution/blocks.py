"""The drift of each block by itself, and its part of the drift of the output.

`alone`: the training activations enter the block, the inference kernel's block runs, and the
training kernel computes the rest. `cumulative`: all blocks up to this one are the inference
kernel's, each on the output of those before it. The gain of a block is the increase of
`cumulative`; gains sum to the drift of all blocks.

The inputs of the training blocks are recorded, the inference kernel's block runs on them, and its
output replaces that of the training block in another pass of the training kernel. That kernel
computes all that lies between blocks (embeddings, residual sums) in every pass.
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
from kcdsl_backends.empirical.sources.kernels.engines import run_part
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.requests import Request

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class _RequestSwaps:
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

    Raises NoSwap, or the error of a kernel, if that fails.
    """
    if len(subject.parts) > 1:
        raise NoSwap(f"{subject.metric} reads states and logits, of which one pass gives one")
    swaps = swapper(subject.pair.model, subject.pair.train, subject.plan.encoder)

    def value(rows: Sequence[Array]) -> float:
        known = {0: column(rows, subject.better, subject.metric)}
        return Table(statistic, subject.better, known).values()[0]

    measured: list[_RequestSwaps] = []
    for done, request in enumerate(subject.requests, 1):
        measured.append(_swap_request(subject, swaps, request))
        progress("blocks", done, len(subject.requests))
    base = value([s.base for s in measured])
    layers: list[Layer] = []
    before = 0.0
    for name in swaps.names:
        so_far = value([s.cumulative[name] for s in measured]) - base
        alone = value([s.alone[name] for s in measured]) - base
        layers.append(_layer(name, measured, alone, so_far, so_far - before))
        before = so_far
    return Layers(
        tuple(layers),
        tuple(r.key for r in subject.requests),
        value([s.total for s in measured]) - base,
        _first_mismatch(subject, swaps.names, measured),
    )


def _swap_request(subject: AttributedMetric, swaps: Swapper, request: Request) -> _RequestSwaps:
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
    current = plain
    for name in swaps.names:
        done[name] = _cpu(subject.pair.infer.block(name, current.entered[name]))
        current = swaps.run(tokens, done)
        cumulative[name] = _values(subject, request, plain.output, current.output)
    kernel = subject.pair.infer
    forward = kernel.hidden if subject.plan.encoder else kernel.logits
    with torch.no_grad():
        infer_output = forward(tokens)
    return _RequestSwaps(
        plain.left,
        infer,
        floors,
        plain.entered,
        _values(subject, request, plain.output, plain.output),
        alone,
        cumulative,
        _values(subject, request, plain.output, infer_output),
    )


def _floor(train: Kernel, name: str, x: Tensor) -> float:
    """Return the largest change of the training block's output when run again and in a batch."""
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
    name: str, measured: Sequence[_RequestSwaps], logits: float, cumulative: float, gain: float
) -> Layer:
    train = torch.cat([s.train[name].reshape(-1) for s in measured])
    infer = torch.cat([s.infer[name].reshape(-1) for s in measured])
    gap = infer - train
    drift = float(gap.square().mean().sqrt())
    scale = float(train.square().mean().sqrt())
    return Layer(
        name,
        drift,
        float(gap.abs().max()),
        drift / scale if scale > 0 else 0.0,
        max(s.floor[name] for s in measured),
        float((train != infer).to(torch.float64).mean()),
        logits,
        cumulative,
        gain,
    )


def _first_mismatch(
    subject: AttributedMetric, names: Sequence[str], measured: Sequence[_RequestSwaps]
) -> Mismatch | None:
    for name in names:
        for request, found in zip(subject.requests, measured, strict=True):
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
    """One pass of the training kernel: the final output [T, ...], and the input and own output of
    each block (also of a replaced one); float32 or the compute format."""

    output: Tensor
    entered: Mapping[str, Tensor]
    left: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Swapper:
    """Runs the training kernel with given outputs in place of those of some blocks."""

    kernel: TorchKernel
    forward: Forward
    names: tuple[str, ...]
    _entries: Mapping[str, nn.Module]
    _exits: Mapping[str, nn.Module]

    def run(self, tokens: Sequence[int], replaced: Mapping[str, Tensor]) -> Pass:
        """Run one pass; `replaced` gives the outputs of some blocks, [T, D] float64 on the CPU.

        Raises NoSwap if a block does not run exactly once, on hidden states [T, D].
        """
        entered: dict[str, list[Tensor]] = {name: [] for name in self.names}
        left: dict[str, list[Tensor]] = {name: [] for name in self.names}
        with ExitStack() as hooks:
            for name in self.names:
                enter = _input_hook(entered[name])
                swap = _output_hook(left[name], replaced.get(name))
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
    """Return the swapper for the training kernel's logits or, with `states`, for its last hidden
    states, which do not pass through the head. Raises NoSwap if no block can be exchanged."""
    if not isinstance(train, TorchKernel) or train.engine is not run_part:
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


def _input_hook(found: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0].detach())

    return hook


def _output_hook(
    found: list[Tensor], other: Tensor | None
) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        found.append(output.detach().to("cpu", torch.float64))
        return None if other is None else other.to(output.device, output.dtype)

    return hook


# --- the first operation that differs -------------------------------------------------------------

PartRecords = list[tuple[str, str, Tensor]]
"""Inputs ("enters") and outputs ("leaves") of the parts of a block, in the order of the run."""


def first_operation(train: Kernel, infer: Kernel, block: str, x: Tensor) -> str:
    """Return the first place, in words, at which both kernels differ in a block on x: a part, the
    code before a part, or the whole block if its parts cannot be compared."""
    runs = [_record_parts(kernel, block, x) for kernel in (train, infer)]
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


def _record_parts(kernel: Kernel, block: str, x: Tensor) -> PartRecords:
    blocks = getattr(kernel.module, "blocks", None) if isinstance(kernel, TorchKernel) else None
    if blocks is None:
        return []
    part: nn.Module = blocks()[block]
    found: PartRecords = []
    with ExitStack() as hooks:
        for name, module in part.named_modules():
            if name and not list(module.children()):
                hooks.enter_context(module.register_forward_hook(_recording_hook(name, found)))
        kernel.block(block, x)
    return found


def _recording_hook(name: str, found: PartRecords) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        for what, value in (("enters", arguments[0] if arguments else None), ("leaves", output)):
            if isinstance(value, Tensor):
                found.append((name, what, value.detach().to("cpu", torch.float64)))

    return hook
