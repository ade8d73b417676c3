"""Sets of tokens that a sampler kept at each position, on which both policies are compared.

A sampler with top-p, top-k or min-p draws from its truncated and renormalised policy; a trainer's
log-probabilities are of all tokens. Their difference by the removed mass is no drift.
Restricted to the kept set, both policies have one support. The set is recorded (`infer_kept`), or
it is a list of the likeliest tokens whose probabilities sum to 1. It cannot be derived otherwise: a
filter on the trainer's logits may keep other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl_backends.empirical.sources.rollouts.record import LEAST, ROUNDING, Rollout, Side

Kept = tuple[NDArray[np.int64], ...]
"""The kept ids at each token; empty if the token does not count."""
_WHOLE = 1e-3
"""Tolerance of the sum of the probabilities of a list that is the whole support: values are rounded
to float32 or printed with few digits."""


def kept_of(rollout: Rollout) -> Kept | None:
    """Return the kept sets; None if that of a counted token is not known."""
    if "infer_kept" in rollout.arrays:
        flat, ends = rollout.arrays["infer_kept"], rollout.arrays["infer_kept_ends"]
        return tuple(np.split(flat, ends[:-1])) if ends.size else ()
    top = None if rollout.infer is None else rollout.infer.top
    if top is None:
        return None
    found = []
    for at, counts in enumerate(rollout.mask.tolist()):
        inside = top.logs[at] >= LEAST
        total = float(np.exp(top.logs[at][inside]).sum())
        ids = top.ids[at][inside]
        if counts and (abs(total - 1) > _WHOLE or rollout.tokens[at] not in ids):
            return None
        found.append(ids if counts else ids[:0])
    return tuple(found)


def problem_of_kept(rollout: Rollout, vocabulary: int | None) -> str | None:
    """Return the fault of a recorded set; None if there is none."""
    kept = kept_of(rollout)
    if "infer_kept" not in rollout.arrays or kept is None:
        return None
    for at, (ids, token) in enumerate(zip(kept, rollout.tokens, strict=True)):
        if not rollout.mask[at]:
            continue
        if token not in ids:
            return f"the token {token} at position {at} was drawn, and is not among those kept"
        if np.unique(ids).size != ids.size:
            return f"a token occurs twice among those kept at position {at}"
        if vocabulary is not None and int(ids.max()) >= vocabulary:
            return (
                f"{int(ids.max())} at position {at} is no token id of a vocabulary of {vocabulary}"
            )
    return None


def restricted_logits(logits: Tensor, kept: Kept) -> Tensor:
    """Return logits [L, V] with -inf for tokens that were not kept; rows without a set stay
    whole."""
    found = torch.full_like(logits, -math.inf)
    for at, ids in enumerate(kept):
        if ids.size:
            place = torch.from_numpy(np.asarray(ids, dtype=np.int64))
            found[at, place] = logits[at, place]
        else:
            found[at] = logits[at]
    return found


def restricted(rollout: Rollout, kept: Kept) -> Rollout | None:
    """Return the rollout with recorded log-probabilities of train renormalised over the kept sets.

    None if its list of the likeliest tokens lacks a kept one, whose mass is then not known. A value
    is NaN, which is invalid evidence, where the kept set has no mass, or less than its token.
    """
    train = rollout.train
    if train is None or train.top is None:
        return None
    logs = train.logs.copy()
    for at, ids in enumerate(kept):
        if not ids.size:
            continue
        listed = np.isin(train.top.ids[at], ids)
        known = dict(
            zip(train.top.ids[at][listed].tolist(), train.top.logs[at][listed], strict=True)
        )
        known.setdefault(rollout.tokens[at], train.logs[at])
        if len(known) != ids.size:
            return None
        mass = math.fsum(math.exp(v) for v in known.values())
        value = train.logs[at] - math.log(mass) if mass else math.nan
        logs[at] = min(value, 0.0) if value <= ROUNDING else math.nan
    return replace(rollout, train=Side(logs, train.semantics, None))


def mean_kept(every: Sequence[Kept]) -> float:
    """Return the mean size of the non-empty kept sets."""
    sizes = [ids.size for kept in every for ids in kept if ids.size]
    return sum(sizes) / len(sizes) if sizes else 0.0
