"""What each block drifts by itself, and what it adds on the way to the output.

`alone`: the training activations enter the block, the inference kernel's block runs, and the
training kernel goes on. `cumulative`: all blocks up to this one are the inference kernel's, each on
what the ones before made. The gain of a block is what `cumulative` grows by; gains sum up to the
drift of all blocks together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.architecture import Model
from kcdsl.verdict.attribution import Layer, Layers, Mismatch
from kcdsl_backends.empirical.attribution.mismatch import first_operation
from kcdsl_backends.empirical.attribution.runs import Known
from kcdsl_backends.empirical.attribution.swaps import NoSwap, Swapper, swapper
from kcdsl_backends.empirical.attribution.values import Array, Statistic, Table, column
from kcdsl_backends.empirical.diagnoses import size
from kcdsl_backends.empirical.sources.kernels.run import Kernel, Plan, run_request
from kcdsl_backends.requests import Request

Progress = Callable[[str, int, int], None]
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Question:
    """Two kernels, a metric and the requests that blocks are swapped on."""

    model: Model
    train: Kernel
    infer: Kernel
    plan: Plan
    metric: str
    better: str
    statistic: Statistic
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one request showed: by block the outputs of both, and the values of the metric."""

    train: Mapping[str, Tensor]
    infer: Mapping[str, Tensor]
    floor: Mapping[str, float]
    entered: Mapping[str, Tensor]
    base: Array
    alone: Mapping[str, Array]
    cumulative: Mapping[str, Array]
    total: Array


def swap_layers(question: Question, progress: Progress = lambda stage, done, total: None) -> Layers:
    """Swap every block. Raises NoSwap, or what a kernel raises, where that cannot be done."""
    q = question
    if q.plan.needs_logits and q.plan.needs_hidden:
        raise NoSwap(f"{q.metric} reads states and logits, of which one pass gives one")
    swaps = swapper(q.model, q.train, q.plan.encoder)
    seen: list[_Seen] = []
    for done, request in enumerate(q.requests, 1):
        seen.append(_look(q, swaps, request))
        progress("blocks", done, len(q.requests))
    base = _value(q, [s.base for s in seen])
    layers: list[Layer] = []
    before = 0.0
    for name in swaps.names:
        so_far = _value(q, [s.cumulative[name] for s in seen]) - base
        alone = _value(q, [s.alone[name] for s in seen]) - base
        layers.append(_layer(name, seen, alone, so_far, so_far - before))
        before = so_far
    return Layers(
        tuple(layers),
        tuple(r.key for r in q.requests),
        _value(q, [s.total for s in seen]) - base,
        _first_mismatch(q, swaps.names, seen),
    )


def _look(q: Question, swaps: Swapper, request: Request) -> _Seen:
    tokens = request.tokens
    plain = swaps.run(tokens, {})
    alone, floors, infer = {}, {}, {}
    for name in swaps.names:
        x = plain.entered[name]
        infer[name] = _cpu(q.infer.block(name, x))
        floors[name] = _floor(q.train, name, x)
        swapped = swaps.run(tokens, {name: infer[name]})
        alone[name] = _values(q, request, plain.output, swapped.output)
    cumulative: dict[str, Array] = {}
    done: dict[str, Tensor] = {}
    for name in swaps.names:
        entering = plain if not done else swaps.run(tokens, done)
        if done:
            cumulative[list(done)[-1]] = _values(q, request, plain.output, entering.output)
        done[name] = _cpu(q.infer.block(name, entering.entered[name]))
    last = swaps.run(tokens, done)
    cumulative[swaps.names[-1]] = _values(q, request, plain.output, last.output)
    forward = q.infer.hidden if q.plan.encoder else q.infer.logits
    with torch.no_grad():
        whole = forward(tokens)
    return _Seen(
        plain.left,
        infer,
        floors,
        plain.entered,
        _values(q, request, plain.output, plain.output),
        alone,
        cumulative,
        _values(q, request, plain.output, whole),
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


def _first_mismatch(q: Question, names: Sequence[str], seen: Sequence[_Seen]) -> Mismatch | None:
    for name in names:
        for request, found in zip(q.requests, seen, strict=True):
            unequal = (found.train[name] != found.infer[name]).nonzero()
            if not len(unequal):
                continue
            token, index = (int(i) for i in unequal[0])
            number = _NUMBER.search(name) if not name.startswith("norm") else None
            return Mismatch(
                name,
                None if number is None else int(number[1]),
                first_operation(q.train, q.infer, name, found.entered[name]),
                request.key,
                token,
                index,
                float(found.train[name][token, index]),
                float(found.infer[name][token, index]),
            )
    return None


def _value(q: Question, values: Sequence[Array]) -> float:
    return Table(q.statistic, q.better, {0: column(values, q.better, q.metric)}).values()[0]


def _values(q: Question, request: Request, train: Tensor, other: Tensor) -> Array:
    part = "hidden" if q.plan.encoder else "logits"
    plan = q.plan
    pair = (Known(q.train, {part: train}), Known(q.infer, {part: other}))
    unit = run_request(request, *pair, plan, _no_block).unit
    if unit.failure is not None or q.metric not in unit.values:
        raise ValueError(unit.failure or f"{q.metric} cannot be read off a pass with one block")
    return unit.values[q.metric]


def _no_block(request: Request, block: str) -> Tensor:
    raise ValueError(f"{block} of {request.key} is not measured")


def _cpu(output: Tensor) -> Tensor:
    return output.detach().to("cpu", torch.float64)
