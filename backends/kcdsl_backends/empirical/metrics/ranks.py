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

from functools import partial

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.statistics.estimates import Array

Tokens = NDArray[np.int64]

PERSISTENCE = 0.9
"""The p of rank-biased overlap: rank r + 1 is inspected with probability p after rank r."""


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

    A pair of tokens counts 1 if the lists order it differently (a token outside a list ranks below
    those in it), and 1/2 if one list has both and the other neither.
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


overlap5, overlap10 = partial(overlap, k=5), partial(overlap, k=10)
jaccard1, jaccard5, jaccard10 = (partial(jaccard, k=k) for k in (1, 5, 10))
rbo10 = partial(rank_biased_overlap, k=10)
kendall10 = partial(kendall_distance, k=10)
