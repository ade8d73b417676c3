"""Agreement of the most probable tokens (tiers A and B). Ties go to the smaller token id.

Lists are compared to depth k = 1, 5 or 10:

| name | value |
|---|---|
| top{k}_overlap | shared tokens / k |
| jaccard{k} | shared tokens / tokens in either list |
| rbo10 | rank-biased overlap, p = 0.9, extrapolated from depth 10 (Webber et al. 2010, 32) |
| kendall10 | Kendall distance of top-10 lists, penalty 1/2, over its largest (Fagin et al. 2003) |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl_backends.empirical.metrics.policies import PolicyPair
from kcdsl_backends.empirical.metrics.segments import Array

Tokens = NDArray[np.int64]

PERSISTENCE = 0.9
"""The p of rank-biased overlap: rank r + 1 is looked at with probability p after rank r."""


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest logits of each row, [N, k]; ties by the smaller id.

    Raises ValueError if the vocabulary has fewer than k tokens.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"top-{k} needs at least {k} tokens, the vocabulary has {logits.shape[-1]}"
        )
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]


def top_overlap(pair: PolicyPair, k: int) -> Tensor:
    """Return |Top_k(p) and Top_k(q)| / k, [N]; NaN where a logit of the row is NaN."""
    return of_pair(pair, partial(overlap, k=k), k)


def top1_agreement(pair: PolicyPair) -> Tensor:
    """Return 1 where both kernels put the same token first, else 0."""
    return top_overlap(pair, 1)


def of_pair(pair: PolicyPair, metric: Callable[[Tokens, Tokens], Array], k: int) -> Tensor:
    """Return a metric of lists of tokens for both policies, [N]; NaN where a logit is NaN."""
    train, infer = (
        top_tokens(side, k).cpu().numpy() for side in (pair.train_logits, pair.infer_logits)
    )
    undefined = (pair.train_logits.isnan() | pair.infer_logits.isnan()).any(dim=-1).cpu()
    return torch.where(undefined, torch.nan, torch.from_numpy(metric(train, infer)))


def overlap(train: Tokens, infer: Tokens, k: int) -> Array:
    """Return the share of k first tokens on which two lists [N, at least k] agree, [N]."""
    _check(train, infer, k)
    return _shared(train[:, :k], infer[:, :k]) / k


def jaccard(train: Tokens, infer: Tokens, k: int) -> Array:
    """Return the tokens in both lists over the tokens in either, of k first tokens, [N]."""
    _check(train, infer, k)
    shared = _shared(train[:, :k], infer[:, :k])
    return shared / (2 * k - shared)


def rank_biased_overlap(
    train: Tokens, infer: Tokens, k: int, persistence: float = PERSISTENCE
) -> Array:
    """Return RBO_ext = p^k A_k + (1 - p)/p sum_d p^d A_d, A_d the agreement at depth d, [N].

    1 for equal lists of k tokens, 0 for disjoint ones. Raises ValueError unless 0 < p < 1.
    """
    _check(train, infer, k)
    if not 0 < persistence < 1:
        raise ValueError(f"the persistence must lie in (0, 1), not {persistence}")
    total = np.zeros(train.shape[0])
    agreement = total
    for depth in range(1, k + 1):
        agreement = _shared(train[:, :depth], infer[:, :depth]) / depth
        total = total + persistence**depth * agreement
    found: Array = persistence**k * agreement + (1 - persistence) / persistence * total
    return np.clip(found, 0.0, 1.0)


def kendall_distance(train: Tokens, infer: Tokens, k: int) -> Array:
    """Return the Kendall distance K^(1/2) of two top-k lists over its largest, k(3k - 1)/2, [N].

    A pair of tokens counts 1 where the lists order it otherwise, also where a list shows its order
    only by leaving one of them out, and 1/2 where one list has both and the other neither.
    """
    _check(train, infer, k)
    here, there = train[:, :k], infer[:, :k]
    equal = here[:, :, None] == there[:, None, :]
    in_there, in_here = equal.any(axis=2), equal.any(axis=1)
    place = np.where(in_there, equal.argmax(axis=2), k)
    ahead = np.triu(np.ones((k, k), dtype=bool), 1)
    both = in_there[:, :, None] & in_there[:, None, :] & ahead
    turned = (both & (place[:, :, None] > place[:, None, :])).sum(axis=(1, 2))
    left_out = _absent_ahead(in_there, ahead) + _absent_ahead(in_here, ahead)
    alone = k - in_there.sum(axis=1)
    count = turned + left_out + alone * alone + alone * (alone - 1) / 2
    found: Array = count / (k * (3 * k - 1) / 2)
    return found


def _absent_ahead(present: NDArray[np.bool_], ahead: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Count the pairs of a list whose first token the other list lacks and whose second it has."""
    pairs = ~present[:, :, None] & present[:, None, :] & ahead
    counts: NDArray[np.int64] = pairs.sum(axis=(1, 2))
    return counts


def _shared(train: Tokens, infer: Tokens) -> Array:
    same = train[:, :, None] == infer[:, None, :]
    counts: Array = same.any(axis=2).sum(axis=1).astype(np.float64)
    return counts


def _check(train: Tokens, infer: Tokens, k: int) -> None:
    if train.ndim != 2 or train.shape != infer.shape or train.shape[0] == 0:
        raise ValueError(
            f"lists of tokens must be two [N, K] arrays of one shape, not {train.shape} and "
            f"{infer.shape}"
        )
    if not 1 <= k <= train.shape[1]:
        raise ValueError(f"lists of {train.shape[1]} tokens cannot be compared to depth {k}")


LIST_METRICS: Mapping[str, tuple[Callable[..., Array], int]] = {
    "top5_overlap": (overlap, 5),
    "top10_overlap": (overlap, 10),
    "jaccard1": (jaccard, 1),
    "jaccard5": (jaccard, 5),
    "jaccard10": (jaccard, 10),
    "rbo10": (rank_biased_overlap, 10),
    "kendall10": (kendall_distance, 10),
}
"""Metrics of two lists of tokens, with the depth that they read."""


def depth_of(name: str) -> int:
    """Return how many tokens a metric looks at, 1 for one that compares no lists."""
    return LIST_METRICS[name][1] if name in LIST_METRICS else 1


def list_metrics(train: Tokens, infer: Tokens, names: Collection[str]) -> dict[str, Any]:
    """Return the named metrics of two lists [N, K] of tokens, each [N]."""
    return {name: LIST_METRICS[name][0](train, infer, LIST_METRICS[name][1]) for name in names}
