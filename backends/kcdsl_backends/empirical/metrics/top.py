"""The most probable tokens of each row, found without sorting the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_STEP = 128
"""Elements that one maximum stands for when candidates are sought."""


@dataclass(frozen=True, slots=True)
class Top:
    """The k largest logits of R rows: token ids [R, k] and their values [R, k], largest first.

    Equal logits stand in the order of their ids. A row with NaN has the ids -1 and values NaN.
    """

    tokens: NDArray[np.int64]
    values: NDArray[np.float64]


def top_of_rows(logits: NDArray[Any], best: NDArray[Any], k: int) -> Top:
    """Return the k largest of each row of [R, V] floats, whose maxima are `best` [R].

    The k-th largest of maxima over disjoint parts of a row is at most its k-th largest element, so
    only what reaches it can be among the k. Raises ValueError if a row has fewer than k elements.
    """
    rows, width = logits.shape
    if not 1 <= k <= width:
        raise ValueError(f"top-{k} needs at least {k} tokens, the vocabulary has {width}")
    tokens = np.full((rows, k), -1, dtype=np.int64)
    values = np.full((rows, k), np.nan)
    reached = logits >= _threshold(logits, k)[:, None]
    for row in range(rows):
        if best[row] == best[row]:
            candidates = np.flatnonzero(reached[row])
            found = logits[row, candidates]
            order = np.argsort(-found, kind="stable")[:k]
            tokens[row], values[row] = candidates[order], found[order]
    return Top(tokens, values)


def _threshold(logits: NDArray[Any], k: int) -> NDArray[Any]:
    rows, width = logits.shape
    groups = width // _STEP
    if groups < 2 * k:
        cut: NDArray[Any] = np.partition(logits, width - k, axis=1)[:, width - k]
        return cut
    maxima = logits[:, : groups * _STEP].reshape(rows, _STEP, groups).max(axis=1)
    least: NDArray[Any] = np.partition(maxima, groups - k, axis=1)[:, groups - k]
    return least
