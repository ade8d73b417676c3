"""The choice of experts: recorded from one run, replayed in another.

A program chooses experts by `topk` of router scores, the only use of `topk` in a forward pass. A
replay takes the recorded experts and the replaying program's own scores of them, so that what is
exchanged is the choice alone (routed replay). Programs without `topk` have no experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Choices = tuple[Tensor, ...]
"""The experts [T, k] of each router of one request, in the order in which the routers ran."""


class Unreplayable(ValueError):
    """The routers of a program are not those that were recorded."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one call: the lengths of the requests, padded behind to the longest.

    `together` False: a call with one request and without a dimension for the batch.
    """

    lengths: tuple[int, ...]
    together: bool

    def rows(self, indices: Tensor) -> Tensor:
        """Return [B, T, k] of what a router gave in this call."""
        shape = (len(self.lengths), max(self.lengths), indices.shape[-1])
        if indices.numel() != shape[0] * shape[1] * shape[2]:
            raise Unreplayable(
                f"a router chose for {indices.numel() // indices.shape[-1]} rows, and the call has "
                f"{shape[0] * shape[1]}"
            )
        return indices.reshape(shape)


class Recorder(TorchFunctionMode):
    """Remembers the experts that every router chooses."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self._seen: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function, and remember it where it chooses."""
        result = func(*args, **(kwargs or {}))
        if _chooses(func):
            self._seen.append(self._group.rows(result[1].detach().cpu()))
        return result

    def choices(self) -> tuple[Choices, ...]:
        """Return the experts of each request of the call."""
        return tuple(
            tuple(rows[index, :length].clone() for rows in self._seen)
            for index, length in enumerate(self._group.lengths)
        )


class Replay(TorchFunctionMode):
    """Gives every router the experts that were recorded; padding keeps its own.

    After the run, `finish` raises Unreplayable where routers were left over.
    """

    def __init__(self, group: Group, recorded: Sequence[Choices]) -> None:
        super().__init__()
        self._group = group
        self._recorded = recorded
        self._next = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function, with the recorded choice in place of its own."""
        result = func(*args, **(kwargs or {}))
        return self._replayed(result, args[0]) if _chooses(func) else result

    def finish(self) -> None:
        """Say that the run has ended."""
        left = {len(choices) for choices in self._recorded} - {self._next}
        if left:
            raise Unreplayable(f"{self._next} routers ran, and {left.pop()} were recorded")

    def _replayed(self, result: Any, scores: Tensor) -> Any:
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


def _chooses(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "") == "topk"


def equal(first: Sequence[Choices], second: Sequence[Choices]) -> bool:
    """Say whether both sides chose the same experts for every token, in any order of preference."""
    return all(
        len(a) == len(b) and all(_same_experts(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(first, second, strict=True)
    )


def _same_experts(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.sort(-1).values, second.sort(-1).values)
