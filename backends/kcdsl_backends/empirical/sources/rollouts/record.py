"""One rollout: a prompt, the tokens sampled after it, and their log-probabilities on both sides.

Without full logits, a side has the log-probabilities of the sampled tokens (tier C), and possibly
those of the k likeliest tokens at each position (tier B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.ir.kernels import LogProbabilities

Array = NDArray[np.float64]

ROUNDING = 1e-4
"""Tolerance of a log-probability above 0, for rounding."""
LOWEST = -1e100
"""Lower bound of the finite log-probabilities of a softmax."""
LEAST = math.log(math.ulp(0.0))
"""The log-probability of the least float64, about -744.4: tokens below it are never drawn; engines
write such values, as -9999, for -inf."""


@dataclass(frozen=True, slots=True)
class Law:
    """A policy computed from logits z: softmax(z / temperature), truncated and renormalised."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def filters(self) -> str:
        """Name the truncations, such as "top_p 0.95"; empty if there are none."""
        parts = [
            f"top_p {self.top_p:g}" if self.top_p < 1 else "",
            f"top_k {self.top_k}" if self.top_k > 0 else "",
            f"min_p {self.min_p:g}" if self.min_p > 0 else "",
        ]
        return ", ".join(part for part in parts if part)

    def __str__(self) -> str:
        cut = f", {self.filters}" if self.filters else ""
        return f"temperature {self.temperature:g}{cut}"


@dataclass(frozen=True, slots=True)
class Semantics:
    """The law that log-probabilities are of.

    `values`: "raw" for the softmax of the logits as the model gives them, "processed" for the law
    that tokens were drawn from, after `temperature` and the truncations. The settings are those of
    sampling in either case.
    """

    values: Literal["raw", "processed"]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, stated: LogProbabilities) -> Semantics:
        """Return the semantics that a contract states."""
        return cls(
            "raw" if stated.values == "raw" else "processed",
            float(stated.temperature),
            float(stated.top_p),
            stated.top_k,
            float(stated.min_p),
        )

    @property
    def drawn(self) -> Law:
        """Return the law that tokens were drawn from."""
        return Law(self.temperature, self.top_p, self.top_k, self.min_p)

    @property
    def law(self) -> Law:
        """Return the law that the log-probabilities are of."""
        return Law() if self.values == "raw" else self.drawn


@dataclass(frozen=True, slots=True)
class TopLogs:
    """Tokens of each position with their ln-probabilities, both [L, k], likeliest first.

    The first `depth` are the likeliest of the whole vocabulary; None: all of them are.
    """

    ids: NDArray[np.int64]
    logs: Array
    depth: int | None = None

    @property
    def likeliest(self) -> int:
        """Return the number of leading tokens that are the likeliest of the whole vocabulary."""
        return self.ids.shape[1] if self.depth is None else self.depth


@dataclass(frozen=True, slots=True)
class Side:
    """The ln-probabilities [L] (nats) of the sampled tokens by one kernel."""

    logs: Array
    semantics: Semantics | None
    """None if it is not stated: then no metric may compare the sides."""
    top: TopLogs | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """Tokens [L] that the inference kernel sampled after a prompt, with both sides'
    log-probabilities.

    A side without log-probabilities is None.
    """

    key: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    mask: NDArray[np.bool_]
    """Mask of the tokens that count [L]: those of tools, of users and of padding do not."""
    train: Side | None
    infer: Side | None
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Single numbers of the rollout, such as its rewards, by role (`columns.ROLES`)."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other columns, which slices test and metrics of behaviour read."""
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Routes, gradients, advantages and times of tokens, by role."""
    group: str | None = None
    """The name of its group of dependent rollouts; None: only rollouts with the same prompt are."""
    place: str = ""
    """Where it was read, such as "row 7"."""
    row: int = 0
    """The number of its row, from 1; 0 if it was not read from a file."""

    @property
    def unit(self) -> str:
        """Return the name of its sampling unit: the group, the prompt, or the rollout itself. Equal
        prompts must have equal groups (`recording.joined`)."""
        if self.group is not None:
            return f"group {self.group}"
        if self.prompt:
            return "prompt " + ",".join(map(str, self.prompt))
        return f"rollout {self.key}"

    @property
    def counted(self) -> int:
        """Return the number of tokens that count."""
        return int(self.mask.sum())

    def delta(self) -> Array | None:
        """Return ln w = ln p - ln q of the tokens that count; None if a side is missing."""
        if self.train is None or self.infer is None:
            return None
        found: Array = (self.train.logs - self.infer.logs)[self.mask]
        return found


@dataclass(frozen=True, slots=True)
class Policy:
    """The logits [n, V], float64, of the training kernel at counted positions of one rollout, with
    the sampled tokens [n] and their ln-probabilities by the inference kernel [n]."""

    key: str
    logits: Tensor
    tokens: Tensor
    infer_logs: Tensor


def problem_of(rollout: Rollout, vocabulary: int | None = None) -> tuple[str, str] | None:
    """Return (column, fault) of a rollout that cannot be used; None if it can.

    Faults are different lengths, token ids out of range, NaN, +inf, a drawn token whose probability
    is 0 in float64, and probabilities above 1 beyond rounding, also that of a list and of the
    sampled token together.
    """
    length = len(rollout.tokens)
    if rollout.mask.shape != (length,):
        return "mask", f"{rollout.mask.size} values for {length} tokens"
    for name, ids in (("prompt", rollout.prompt), ("tokens", rollout.tokens)):
        wrong = next(
            (i for i, t in enumerate(ids) if t < 0 or (vocabulary is not None and t >= vocabulary)),
            None,
        )
        if wrong is not None:
            most = "" if vocabulary is None else f" of a vocabulary of {vocabulary}"
            return name, f"{ids[wrong]} at position {wrong} is no token id{most}"
    for side, found in (("train", rollout.train), ("infer", rollout.infer)):
        if found is None:
            continue
        said = _problem_of_side(found, rollout, vocabulary)
        if said is not None:
            column, what = said
            return f"{side}_{column}", what
        if side == "infer":
            never = np.flatnonzero((found.logs < LEAST) & rollout.mask)
            if never.size:
                value = float(found.logs[never[0]])
                what = f"a token with probability 0 was drawn at position {never[0]} ({value:g})"
                return "infer_logs", what
    return None


def _problem_of_side(
    side: Side, rollout: Rollout, vocabulary: int | None
) -> tuple[str, str] | None:
    length, mask = len(rollout.tokens), rollout.mask
    if side.logs.shape != (length,):
        return "logs", f"{side.logs.size} values for {length} tokens"
    bad = np.flatnonzero(_invalid_logs(side.logs) & mask)
    if bad.size:
        value = float(side.logs[bad[0]])
        return "logs", f"{value:g} at position {bad[0]} is no log-probability"
    top = side.top
    if top is None:
        return None
    if top.ids.ndim != 2 or top.ids.shape != top.logs.shape or top.ids.shape[0] != length:
        return "top_logs", f"lists of shapes {top.ids.shape} and {top.logs.shape}, {length} tokens"
    ordered = np.sort(top.ids, axis=1)
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return "top_ids", "a token occurs twice in the list of one position"
    if vocabulary is not None and top.ids.size and int(top.ids.max()) >= vocabulary:
        return "top_ids", f"{int(top.ids.max())} is no token id of a vocabulary of {vocabulary}"
    if bool(_invalid_logs(top.logs).any()):
        return "top_logs", "a value is no log-probability"
    unlisted = (top.ids != np.array(rollout.tokens, dtype=np.int64)[:, None]).all(axis=1) & mask
    sums = np.exp(top.logs).sum(axis=1) + np.exp(np.where(unlisted, side.logs, -np.inf))
    if bool((sums > 1 + 10 * ROUNDING).any()):
        return "top_logs", "the probabilities of a position sum to more than 1"
    return None


def _invalid_logs(logs: Array) -> NDArray[np.bool_]:
    """Return the mask of values that are no log-probabilities."""
    low: NDArray[np.bool_] = np.isfinite(logs) & (logs < LOWEST)
    return np.isnan(logs) | (logs > ROUNDING) | low
