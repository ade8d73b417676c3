"""Kernels between train and infer: loading them, and running them on the requests.

A hybrid has some sources of infer and is else train. It runs alone or in batches, with its own
experts or replayed ones; where no kernel computes so, the reason is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kcdsl.ir.terms import KernelRef
from kcdsl.model.adapters import ADAPTERS
from kcdsl.model.architecture import Model
from kcdsl.model.numerics import Activations, Numerics
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.attribution.sources import different, mixed
from kcdsl_backends.empirical.diagnoses.reference import input_quantiser
from kcdsl_backends.empirical.sources.kernels import Kernel, NotRun
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.requests import Request

Load = Callable[[KernelRef], Kernel]
"""Prepares a kernel; raises Refusal where none computes so."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides: their descriptions in the contract, their kernels, and a loader of others."""

    train_ref: KernelRef
    infer_ref: KernelRef
    train: Kernel
    infer: Kernel
    model: Model
    load: Load


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A kernel between both sides. `simulated`: the inputs of its linears are quantised by their
    definition, element by element, and not by the inference kernel."""

    kernel: Kernel
    numerics: Numerics
    simulated: bool = False


def hybrid(pair: Pair, taken: Collection[str]) -> Hybrid:
    """Return the kernel with the sources `taken` from infer: train with none, infer with all.

    Raises Refusal if no kernel computes so.
    """
    own = frozenset(different(pair.train_ref, pair.infer_ref))
    chosen = frozenset(taken) & own
    if not chosen:
        return Hybrid(pair.train, resolve(pair.train_ref))
    if chosen == own:
        return Hybrid(pair.infer, resolve(pair.infer_ref))
    ref = mixed(pair.train_ref, pair.infer_ref, chosen)
    numerics = resolve(ref)
    if not _simulates(ref, numerics, pair.model):
        return Hybrid(pair.load(ref), numerics)
    unquantised = dict(ref.numerics) | {"activations": Activations().to_json()}
    kernel = pair.load(replace(ref, numerics=tuple(sorted(unquantised.items()))))
    if not isinstance(kernel, TorchKernel):
        return Hybrid(pair.load(ref), numerics)
    _quantise_inputs(kernel.module, pair.model, numerics)
    return Hybrid(replace(kernel, ref=ref, numerics=numerics), numerics, simulated=True)


def _simulates(ref: KernelRef, numerics: Numerics, model: Model) -> bool:
    """Return whether an adapter that quantises no activations is to run with quantised ones."""
    adapter = ADAPTERS.get(ref.run)
    if numerics.overrides or adapter is None or not model.built_in:
        return False
    if numerics.activations.format == "none":
        return False
    return adapter.engine == "torch" and adapter.activations == (Activations("none"),)


def _quantise_inputs(module: nn.Module, model: Model, numerics: Numerics) -> None:
    names = {id(t): n for n, t in model.module.named_parameters(remove_duplicate=False)}
    for original, linear in zip(model.module.modules(), module.modules(), strict=True):
        if isinstance(original, nn.Linear) and isinstance(linear, nn.Linear):
            key = names[id(original.weight)]
            linear.register_forward_pre_hook(input_quantiser(numerics, key))


@dataclass(frozen=True, slots=True)
class InBatch:
    """A kernel whose blocks run in a batch of two equal sequences."""

    kernel: Kernel

    def block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block for the states x [T, D]."""
        return self.kernel.block(name, torch.stack([x, x]))[0]


# --- runs of a kernel -----------------------------------------------------------------------------

Outputs = dict[str, Tensor]
"""Output [T, ...] by the name of the run part ("logits", "hidden"), for one request."""


@dataclass(frozen=True, slots=True)
class RequestOutputs:
    """One request, a kernel's outputs for it, and the experts that it chose."""

    request: Request
    outputs: Outputs
    choices: Choices


@dataclass(frozen=True, slots=True)
class Known(NotRun):
    """A kernel whose outputs for one request are known already."""

    lacks: ClassVar[str] = "a kernel that ran already gives no"
    instead: ClassVar[str] = "read logits or hidden states"
    outputs: Outputs

    def logits(self, ids: Any) -> Tensor:
        """Return the logits [T, V]."""
        return self.outputs["logits"]

    def hidden(self, ids: Any) -> Tensor:
        """Return the last hidden states [T, D]."""
        return self.outputs["hidden"]


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of requests: `size` at a time, in their order.

    With `padding`, rows are padded at the end, with token 0, to the longest; a causal model does
    not read padding. Without it only requests of one length share a batch, and a short batch is
    filled with copies of its last request.
    """

    size: int
    padding: bool

    def groups(self, requests: Sequence[Request]) -> Iterator[tuple[Request, ...]]:
        """Yield the requests of each batch."""
        if self.padding:
            kinds = [list(requests)]
        else:
            lengths = dict.fromkeys(r.length for r in requests)
            kinds = [[r for r in requests if r.length == length] for length in lengths]
        for kind in kinds:
            for start in range(0, len(kind), self.size):
                yield tuple(kind[start : start + self.size])

    def rows(self, group: Sequence[Request]) -> list[list[int]]:
        """Return the token ids of a batch, `size` rows of one length."""
        longest = max(r.length for r in group)
        filled = [*group, *[group[-1]] * (self.size - len(group))]
        return [[*r.tokens, *[0] * (longest - r.length)] for r in filled]


@dataclass(frozen=True, slots=True)
class RunMode:
    """The mode of a run: in `batches` (None: alone), with `replayed` experts (None: its own)."""

    parts: tuple[str, ...]
    batches: Batches | None = None
    replayed: Mapping[str, Choices] | None = None


def run_all(kernel: Kernel, requests: Sequence[Request], mode: RunMode) -> Iterator[RequestOutputs]:
    """Yield the outputs of the kernel for every request.

    Raises the errors of the kernel, ValueError if it does not take batches, and Unreplayable if its
    routers are not those that were recorded.
    """
    if mode.batches is None:
        for request in requests:
            group = RequestBatch((request.length,), together=False)
            outputs, choices = _call(kernel, [request], request.tokens, group, mode)
            yield RequestOutputs(request, outputs, choices[0])
        return
    for members in mode.batches.groups(requests):
        rows = mode.batches.rows(members)
        lengths = tuple(r.length for r in members)
        filled = (*lengths, *[lengths[-1]] * (len(rows) - len(members)))
        outputs, choices = _call(kernel, members, rows, RequestBatch(filled, together=True), mode)
        for index, request in enumerate(members):
            own = {name: out[index, : request.length] for name, out in outputs.items()}
            yield RequestOutputs(request, own, choices[index])


def _call(
    kernel: Kernel, members: Sequence[Request], ids: Any, group: RequestBatch, mode: RunMode
) -> tuple[Outputs, tuple[Choices, ...]]:
    outputs: Outputs = {}
    choices: tuple[Choices, ...] = tuple(() for _ in group.lengths)
    for part in mode.parts:
        recorder = Recorder(group)
        replay = None
        if mode.replayed is not None:
            known = [mode.replayed[r.key] for r in members]
            missing = len(group.lengths) - len(members)
            replay = RouterReplay(group, [*known, *[known[-1]] * missing])
        with torch.no_grad(), recorder, replay if replay is not None else nullcontext():
            output = getattr(kernel, part)(ids)
        if replay is not None:
            replay.finish()
        if group.together and output.shape[:2] != (len(group.lengths), max(group.lengths)):
            raise ValueError(
                f"the kernel returned {part} of shape {tuple(output.shape)} for a batch"
            )
        outputs[part] = output
        choices = recorder.choices()
    return outputs, choices


# --- the choice of experts ------------------------------------------------------------------------

Choices = tuple[Tensor, ...]
"""The experts [T, k] of each router of one request, in the order in which the routers ran."""


class Unreplayable(ValueError):
    """The routers of a program are not those that were recorded."""


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """The rows of one call: the lengths of the requests, padded at the end to the longest.

    `together` False: a call with one request and without a dimension for the batch.
    """

    lengths: tuple[int, ...]
    together: bool

    def rows(self, indices: Tensor) -> Tensor:
        """Return the indices that a router gave in this call as [B, T, k]."""
        shape = (len(self.lengths), max(self.lengths), indices.shape[-1])
        if indices.numel() != shape[0] * shape[1] * shape[2]:
            raise Unreplayable(
                f"a router chose for {indices.numel() // indices.shape[-1]} rows, and the call has "
                f"{shape[0] * shape[1]}"
            )
        return indices.reshape(shape)


class _Routers(TorchFunctionMode):
    """Intercepts every choice of experts (`topk`) and may replace it."""

    def __init__(self, group: RequestBatch) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function."""
        result = func(*args, **(kwargs or {}))
        return self._chosen(result, args[0]) if getattr(func, "__name__", "") == "topk" else result

    def _chosen(self, result: Any, scores: Tensor) -> Any:
        raise NotImplementedError


class Recorder(_Routers):
    """Records the experts that every router chooses."""

    def __init__(self, group: RequestBatch) -> None:
        super().__init__(group)
        self._seen: list[Tensor] = []

    def _chosen(self, result: Any, scores: Tensor) -> Any:
        self._seen.append(self._group.rows(result[1].detach().cpu()))
        return result

    def choices(self) -> tuple[Choices, ...]:
        """Return the experts of each request of the call."""
        return tuple(
            tuple(rows[index, :length].clone() for rows in self._seen)
            for index, length in enumerate(self._group.lengths)
        )


class RouterReplay(_Routers):
    """Gives every router the experts that were recorded; padding keeps its own.

    After the run, `finish` raises Unreplayable if fewer routers ran than were recorded.
    """

    def __init__(self, group: RequestBatch, recorded: Sequence[Choices]) -> None:
        super().__init__(group)
        self._recorded = recorded
        self._next = 0

    def finish(self) -> None:
        """Check that all recorded routers ran."""
        left = {len(choices) for choices in self._recorded} - {self._next}
        if left:
            raise Unreplayable(f"{self._next} routers ran, and {left.pop()} were recorded")

    def _chosen(self, result: Any, scores: Tensor) -> Any:
        own = self._group.rows(result[1]).clone()
        for index, choices in enumerate(self._recorded):
            if self._next >= len(choices):
                raise Unreplayable(f"more routers ran than the {len(choices)} that were recorded")
            wanted = choices[self._next].to(own.device)
            if wanted.shape[-1] != own.shape[-1]:
                raise Unreplayable(
                    f"a router chose {own.shape[-1]} experts, and {wanted.shape[-1]} were recorded"
                )
            own[index, : wanted.shape[0]] = wanted
        self._next += 1
        experts = own.reshape(result[1].shape)
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def equal_choices(first: Sequence[Choices], second: Sequence[Choices]) -> bool:
    """Return whether both sides chose the same experts, in any order, for every token."""
    return all(
        len(a) == len(b)
        and all(
            torch.equal(x.sort(-1).values, y.sort(-1).values) for x, y in zip(a, b, strict=True)
        )
        for a, b in zip(first, second, strict=True)
    )
