"""One rollout: a prompt, what was sampled after it, and what both kernels say of it.

Where a kernel does not give all logits, this is what it gives: the log-probabilities of the tokens
that were sampled (tier C), and perhaps those of the k likeliest tokens at each position (tier B).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Semantics:
    """What log-probabilities are of.

    `values`: "raw" for the softmax of the logits as the model gives them, "processed" for the law
    that tokens were drawn from, after `temperature` and the truncations. The settings are those of
    sampling in either case: they say how far "raw" is from what was drawn.
    """

    values: Literal["raw", "processed"]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class TopLogs:
    """The k likeliest tokens of each position: ids [L, k] and their ln-probabilities [L, k]."""

    ids: NDArray[np.int64]
    logs: Array


@dataclass(frozen=True, slots=True)
class Side:
    """What one kernel says of the sampled tokens: ln-probabilities [L] (nats)."""

    logs: Array
    semantics: Semantics | None
    """None where nothing states it: then no metric may compare it with the other side."""
    top: TopLogs | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """Tokens [L] that the inference kernel sampled after a prompt, and both sides' logs of them."""

    key: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    mask: NDArray[np.bool_]
    """Which of the tokens count [L]: those of tools, of users and of padding do not."""
    train: Side
    infer: Side
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Single numbers of the rollout, such as its rewards, under the names of their columns."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other columns, which slices test and metrics of behaviour read."""
