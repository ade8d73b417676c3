"""Kernels of this machine: their protocols, the plan of a measurement, and the drift of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.metrics import METRICS
from kcdsl.metrics.definition import STATES
from kcdsl.model.graph import array_digest
from kcdsl_backends.empirical.metrics.user import UserFunction
from kcdsl_backends.empirical.table.evidence import Array
from kcdsl_backends.requests import Request

_OF_STATES = frozenset(m.name for m in METRICS.values() if m.reads == STATES)


class BlockProgram(Protocol):
    """A program that runs single blocks of a model."""

    def block(self, name: str, x: Tensor) -> Tensor:
        """Return the output of a block for the states x [T, D]."""
        ...


class Outputs(BlockProgram, Protocol):
    """A program that returns the outputs of a model for token ids [T]."""

    def logits(self, ids: Any) -> Tensor:
        """Return the logits [T, V], in the output format of the kernel."""
        ...

    def hidden(self, ids: Any) -> Tensor:
        """Return the last hidden states [T, D]."""
        ...


class Kernel(Outputs, Protocol):
    """A program that runs the model: token ids [T] in, logits [T, V] or states [T, D] out."""

    def tokens(self, ids: Any) -> Tensor:
        """Return checked token ids on the device of the kernel."""
        ...

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the model on tokens of `tokens`; the result stays on the device."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return the record that identifies the kernel."""
        ...


class NotRun:
    """A kernel on a server or in a recording, not run here: it has only the outputs of its class.

    `lacks` is the beginning of the message about a missing output, `instead` its help.
    """

    __slots__ = ()
    lacks: ClassVar[str]
    instead: ClassVar[str]

    def logits(self, ids: Any) -> Tensor:
        """Refuse."""
        raise self._refusal("logits")

    def hidden(self, ids: Any) -> Tensor:
        """Refuse."""
        raise self._refusal("hidden states")

    def block(self, name: str, x: Tensor) -> Tensor:
        """Refuse."""
        raise self._refusal(f"block {name}")

    def tokens(self, ids: Any) -> Tensor:
        """Refuse."""
        raise self._refusal("forward pass")

    def forward(self, tokens: Tensor) -> Tensor:
        """Refuse."""
        raise self._refusal("forward pass")

    def _refusal(self, what: str) -> Refusal:
        return refuse(codes.METRIC_OUT_OF_REACH, f"{self.lacks} {what}", help=self.instead)


BlockInput = Callable[[Request, str], Tensor]
"""Returns the input of a block for a request in the training kernel, float32 [T, D]."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """The values to measure for each request."""

    metrics: frozenset[str]
    temperature: float
    seed: int
    encoder: bool
    gradient: Callable[[Array], Array] | None = None
    """The bound of the gradient bias; None unless the contract states its constants."""
    norms: frozenset[tuple[str, str]] = frozenset()
    """(block, norm) of every measured drift that a clause reads."""
    user: tuple[UserFunction, ...] = ()
    """The functions of the user's metrics that clauses read."""
    context: frozenset[str] = frozenset()
    """Metrics that charts read in addition; left out if the vocabulary is too small for them."""
    needs_hidden: bool = field(init=False)

    def __post_init__(self) -> None:
        states = self.encoder or not self.metrics.isdisjoint(_OF_STATES)
        asked = any("hidden" in user.metric.needs for user in self.user)
        object.__setattr__(self, "needs_hidden", states or asked)

    @property
    def needs_logits(self) -> bool:
        """Return whether logits are read at all."""
        return not self.encoder


def block_drift(train: BlockProgram, infer: BlockProgram, block: str, x: Tensor) -> Tensor:
    """Return infer - train of a block on the same float32 input, float64 [T, D]."""
    a, b = train.block(block, x), infer.block(block, x)
    if a.shape != b.shape:
        raise ValueError(f"block {block} returns shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return (b.to(torch.float64) - a.to(torch.float64)).cpu()


def tensor_digest(tensor: Tensor) -> str:
    """Return the sha256 of a tensor; formats without a numpy type are widened exactly first."""
    wide = tensor.detach().cpu()
    if wide.dtype not in (torch.float32, torch.float64, torch.float16):
        wide = wide.to(torch.float32)
    return array_digest(wide.numpy())
