"""Were tokens drawn from the law of their own ln-probabilities, as far as lists can tell?

The e-value of `drawn_law` without whole policies: a side's list of its likeliest tokens gives other
laws that are known before a token is drawn, by filters and temperatures inside of the list; the
tokens outside of it keep their probabilities, or have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.drawn_law import KINDS, SLIP, judged
from kcdsl_backends.empirical.diagnoses.model import not_applicable
from kcdsl_backends.empirical.sources.rollouts.record import Array, Law, Rollout, Side


def listed_law(name: str, rollouts: Sequence[Rollout], stated: float) -> Precheck:
    """Say whether the tokens of rollouts whose inference side lists its likeliest ones are samples
    of the law of its values, at temperature `stated`."""
    gains, tokens = np.zeros(len(KINDS)), 0
    for rollout in rollouts:
        if rollout.infer is not None and rollout.infer.top is not None and rollout.counted:
            found = _gains(rollout, rollout.infer)
            gains += found.sum(axis=1)
            tokens += found.shape[1]
    if tokens == 0:
        return not_applicable(name, "no side lists its likeliest tokens")
    return judged(name, torch.from_numpy(gains), tokens, stated)


def _gains(rollout: Rollout, side: Side) -> Array:
    """Return ln a(y) - ln q(y) [laws, n] of the counted tokens under each of the other laws."""
    assert side.top is not None
    depth = side.top.likeliest
    rows = rollout.mask & np.isfinite(side.logs)
    own = side.logs[rows]
    logs = side.top.logs[rows, :depth]
    here = side.top.ids[rows, :depth] == np.array(rollout.tokens, np.int64)[rows, None]
    rank = np.where(here.any(axis=1), here.argmax(axis=1), depth)
    found = []
    for law in KINDS:
        other = _tempered(law, logs, rank, own) if law.temperature != 1 else _cut(law, logs, rank)
        mixed = np.logaddexp(other + math.log1p(-SLIP), own + math.log(SLIP))
        found.append(mixed - own)
    return np.array(found)


def _tempered(law: Law, logs: Array, rank: Array, own: Array) -> Array:
    """Return ln-probabilities [n] where the tokens of the list share its mass at a temperature."""
    hot = logs / law.temperature
    mass = np.logaddexp.reduce(logs, axis=1) - np.logaddexp.reduce(hot, axis=1)
    inside = rank < logs.shape[1]
    place = np.minimum(rank, logs.shape[1] - 1)[:, None]
    listed = np.take_along_axis(hot, place, axis=1)[:, 0] + mass
    return np.where(inside, listed, own)


def _cut(law: Law, logs: Array, rank: Array) -> Array:
    """Return ln-probabilities [n] under a filter of the list, -inf for tokens that it cuts off."""
    shares = np.exp(logs)
    before = np.cumsum(shares, axis=1) - shares
    if law.top_k:
        kept = np.broadcast_to(np.arange(logs.shape[1]) < law.top_k, logs.shape)
    elif law.top_p < 1:
        kept = before < law.top_p
    else:
        kept = logs >= logs[:, :1] + math.log(law.min_p)
    mass = np.log(np.where(kept, shares, 0.0).sum(axis=1))
    place = np.minimum(rank, logs.shape[1] - 1)[:, None]
    inside = (rank < logs.shape[1]) & np.take_along_axis(kept, place, axis=1)[:, 0]
    listed = np.take_along_axis(logs, place, axis=1)[:, 0]
    return np.where(inside, listed - mass, -np.inf)
