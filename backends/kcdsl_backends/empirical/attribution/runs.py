"""Running a hybrid on the requests: alone or in batches, with its own experts or replayed ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kcdsl_backends.empirical.attribution.routes import (
    Choices,
    Group,
    Recorder,
    Replay,
)
from kcdsl_backends.empirical.sources.kernels.run import Kernel
from kcdsl_backends.requests import Request

Outputs = dict[str, Tensor]
"""What was run ("logits", "hidden") to its output [T, ...] for one request."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One request, what a kernel gave for it, and the experts that it chose."""

    request: Request
    outputs: Outputs
    choices: Choices


@dataclass(frozen=True, slots=True)
class Known:
    """A kernel whose outputs for one request are known already."""

    kernel: Kernel
    outputs: Outputs

    def logits(self, ids: Any) -> Tensor:
        """Return the logits [T, V]."""
        return self.outputs["logits"]

    def hidden(self, ids: Any) -> Tensor:
        """Return the last hidden states [T, D]."""
        return self.outputs["hidden"]

    def block(self, name: str, x: Tensor) -> Tensor:
        """Run the real block."""
        return self.kernel.block(name, x)

    def tokens(self, ids: Any) -> Tensor:
        """Return checked token ids on the kernel's device."""
        return self.kernel.tokens(ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the real kernel."""
        return self.kernel.forward(tokens)

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the kernel."""
        return self.kernel.fingerprint()


@dataclass(frozen=True, slots=True)
class Batches:
    """How requests are grouped where they are not run alone: `size` at a time, in their order.

    With `padding` the rows of a batch are filled up behind, with the token 0, to the longest: a
    causal model cannot see it. Without it only requests of one length share a batch, and what is
    missing of a batch is filled with further copies of its last request.
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
class Manner:
    """How a kernel is run: in `batches` (None: alone), with `replayed` experts by request (None:
    its own)."""

    parts: tuple[str, ...]
    batches: Batches | None = None
    replayed: Mapping[str, Choices] | None = None


def run_all(kernel: Kernel, requests: Sequence[Request], manner: Manner) -> Iterator[Ran]:
    """Yield what the kernel gives for every request.

    Raises what the kernel raises, ValueError where it does not take batches, and Unreplayable
    where its routers are not those that were recorded.
    """
    if manner.batches is None:
        for request in requests:
            group = Group((request.length,), together=False)
            outputs, choices = _call(kernel, [request], request.tokens, group, manner)
            yield Ran(request, outputs, choices[0])
        return
    for members in manner.batches.groups(requests):
        rows = manner.batches.rows(members)
        lengths = tuple(r.length for r in members)
        filled = (*lengths, *[lengths[-1]] * (len(rows) - len(members)))
        outputs, choices = _call(kernel, members, rows, Group(filled, together=True), manner)
        for index, request in enumerate(members):
            own = {name: out[index, : request.length] for name, out in outputs.items()}
            yield Ran(request, own, choices[index])


def _call(
    kernel: Kernel, members: Sequence[Request], ids: Any, group: Group, manner: Manner
) -> tuple[Outputs, tuple[Choices, ...]]:
    outputs: Outputs = {}
    choices: tuple[Choices, ...] = tuple(() for _ in group.lengths)
    for part in manner.parts:
        recorder = Recorder(group)
        replay = None
        if manner.replayed is not None:
            known = [manner.replayed[r.key] for r in members]
            missing = len(group.lengths) - len(members)
            replay = Replay(group, [*known, *[known[-1]] * missing])
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
