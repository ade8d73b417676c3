"""Drift of expert routing in mixtures of experts, from recorded routes.

Routes are arrays [N, L, k]: for N tokens and L layers the ids of the k chosen experts, in any
order; scores are [N, L, E]. Every function raises Unmeasured for nothing, shapes that differ,
negative ids and an expert chosen twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kcdsl_backends.empirical.metrics.evidence import Array, Unmeasured, columns

Routes = NDArray[np.int64]


def router_agreement(train: ArrayLike, infer: ArrayLike) -> Array:
    """Return the mean share of chosen experts that both sides share, one value per layer [L]."""
    a, b = _routes(train, infer)
    shared: Array = (a[..., :, None] == b[..., None, :]).any(axis=-1).sum(axis=-1)
    found: Array = shared.mean(axis=0) / a.shape[2]
    return found


def any_flip(train: ArrayLike, infer: ArrayLike) -> Array:
    """Return 1 for each token with another set of experts in at least one layer, [N]."""
    a, b = _routes(train, infer)
    same = (np.sort(a, axis=2) == np.sort(b, axis=2)).all(axis=(1, 2))
    found: Array = 1.0 - same
    return found


def tokens_any_flip(train: ArrayLike, infer: ArrayLike) -> float:
    """Return the share of tokens with another set of experts in at least one layer."""
    return float(any_flip(train, infer).mean())


def router_margin(scores: ArrayLike, k: int) -> Array:
    """Return the k-th best score minus the next, [N, L]: what a drift must exceed to reroute."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 3 or values.size == 0 or not 1 <= k < values.shape[2]:
        raise Unmeasured(f"scores {values.shape} have no margin of the {k} best")
    if not bool(np.isfinite(values).all()):
        raise Unmeasured("scores must be finite")
    ordered = np.sort(values, axis=2)
    found: Array = ordered[..., -k] - ordered[..., -k - 1]
    return found


def drift_by_flip(drift: ArrayLike, flips: ArrayLike) -> Mapping[str, tuple[float | None, int]]:
    """Return (mean drift, tokens) of the tokens that were rerouted and of those that were not; the
    mean is None where there are none."""
    values, flipped = columns(drift=drift, flips=flips)
    found: dict[str, tuple[float | None, int]] = {}
    for name, chosen in (("flip", values[flipped == 1]), ("no_flip", values[flipped == 0])):
        found[name] = (math.fsum(chosen) / chosen.size if chosen.size else None, chosen.size)
    if found["flip"][1] + found["no_flip"][1] != values.size:
        raise Unmeasured("flips must hold 0 or 1 only")
    return found


def _routes(train: ArrayLike, infer: ArrayLike) -> tuple[Routes, Routes]:
    a, b = np.asarray(train), np.asarray(infer)
    if a.ndim != 3 or a.shape != b.shape or a.size == 0:
        raise Unmeasured(f"routes must be two [N, L, k] arrays, not {a.shape} and {b.shape}")
    for side in (a, b):
        if side.dtype.kind not in "iu" or int(side.min()) < 0:
            raise Unmeasured("routes must hold the ids of experts")
        ordered = np.sort(side, axis=2)
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise Unmeasured("an expert is chosen twice for one token")
    return a.astype(np.int64), b.astype(np.int64)
