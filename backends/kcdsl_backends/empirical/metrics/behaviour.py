"""Drift of behaviour: rewards, refusals, and outputs that must parse (tier D, recorded rows).

Row i of every array belongs to the same prompt on both sides; all comparisons are paired.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binomtest

from kcdsl_backends.empirical.metrics.evidence import Array, Unmeasured, columns, indicators


@dataclass(frozen=True, slots=True)
class Paired:
    """A paired difference: mean of infer - train over n prompts, and its standard error (None for
    one prompt)."""

    mean: float
    error: float | None
    n: int

    @property
    def gap(self) -> float:
        """Return |mean|, what contracts bound."""
        return abs(self.mean)


@dataclass(frozen=True, slots=True)
class Flips:
    """Paired outcomes that differ: gained by the inference kernel and lost by it, of n prompts.

    `p_value` is that of McNemar's exact test of equal rates; it says nothing about the size.
    """

    gained: int
    lost: int
    n: int
    p_value: float

    @property
    def rate(self) -> float:
        """Return the share of prompts whose outcome differs."""
        return (self.gained + self.lost) / self.n

    @property
    def gap(self) -> float:
        """Return |rate of infer - rate of train|, what is left where flips cancel."""
        return abs(self.gained - self.lost) / self.n


def paired(train: ArrayLike, infer: ArrayLike) -> Paired:
    """Return the mean difference of two columns of prompts, rewards for example."""
    a, b = columns(train=train, infer=infer)
    return _paired(b - a)


def paired_by_prompt(prompts: Sequence[str], train: ArrayLike, infer: ArrayLike) -> Paired:
    """Return the mean difference of rows of prompts: a prompt is one unit, its value the
    mean of its rows, however many rollouts it has. Raises Unmeasured for misaligned columns."""
    a, b = columns(train=train, infer=infer)
    if len(prompts) != a.size:
        raise Unmeasured(f"{len(prompts)} prompts for {a.size} rows")
    groups: dict[str, list[float]] = {}
    for prompt, gap in zip(prompts, b - a, strict=True):
        groups.setdefault(prompt, []).append(float(gap))
    return _paired(np.array([math.fsum(rows) / len(rows) for rows in groups.values()]))


def _paired(gaps: Array) -> Paired:
    n = gaps.size
    mean = math.fsum(gaps) / n
    if n == 1:
        return Paired(mean, None, 1)
    return Paired(mean, math.sqrt(math.fsum((gaps - mean) ** 2) / (n - 1) / n), n)


def flips(train: ArrayLike, infer: ArrayLike) -> Flips:
    """Compare two columns of 0 and 1: refusals, outputs that parse, exact matches."""
    a, b = columns(train=train, infer=infer)
    indicators(a, "train")
    indicators(b, "infer")
    gained, lost = int(np.sum((b == 1) & (a == 0))), int(np.sum((a == 1) & (b == 0)))
    both = gained + lost
    p_value = float(binomtest(gained, both, 0.5).pvalue) if both else 1.0
    return Flips(gained, lost, a.size, p_value)


def parses_as_json(texts: Sequence[str]) -> Array:
    """Return 1 for each text that is one JSON value (NaN and Infinity are none), else 0."""
    return np.array([float(_value_of(text) is not _NOTHING) for text in texts])


def calls_tool(texts: Sequence[str], required: Mapping[str, type | tuple[type, ...]]) -> Array:
    """Return 1 for each text that is a JSON object with fields of the required types, else 0.

    `required` maps a field to the Python type of its value; true and false are no numbers.
    """
    return np.array([float(_follows(_value_of(text), required)) for text in texts])


def exact_matches(texts: Sequence[str], references: Sequence[str]) -> Array:
    """Return 1 where a text is its reference, spaces at both ends aside, else 0."""
    if len(texts) != len(references):
        raise Unmeasured(f"{len(texts)} texts for {len(references)} references")
    return np.array([float(a.strip() == b.strip()) for a, b in zip(texts, references, strict=True)])


_NOTHING = object()


def _value_of(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _follows(value: Any, required: Mapping[str, type | tuple[type, ...]]) -> bool:
    if not isinstance(value, dict):
        return False
    for name, kind in required.items():
        found = value.get(name, _NOTHING)
        wants_truth = kind is bool or (isinstance(kind, tuple) and bool in kind)
        if not isinstance(found, kind) or (isinstance(found, bool) and not wants_truth):
            return False
    return True
