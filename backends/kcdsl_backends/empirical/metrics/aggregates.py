"""Metrics that are one number of a whole slice, from arrays that its requests recorded.

`AGGREGATES` names, for each of them, the arrays of a request that it reads and the function of
the arrays of all requests, joined in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kcdsl_backends.empirical.metrics import calibration
from kcdsl_backends.empirical.metrics.evidence import Array, Unmeasured
from kcdsl_backends.empirical.metrics.tails import pareto_k
from kcdsl_backends.empirical.metrics.weights import (
    ess_fraction,
    pearson,
    pearson_probabilities,
)

TRAIN_LOG, INFER_LOG = "sampled_train_log", "sampled_infer_log"
"""Under these names a request records ln p and ln q of its sampled tokens."""
RANKED = ("ace_train", "ace_train_hits", "ace_infer", "ace_infer_hits")
"""Under these names it records the flattened [N, 5] arrays of `calibration.Scores`."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """How one number comes from the requests of a slice."""

    inputs: tuple[str, ...]
    function: Callable[..., float]

    def of(self, requests: Sequence[Sequence[Array]]) -> float:
        """Return the value of requests, each given by its arrays in the order of `inputs`.

        Raises Unmeasured where they support none.
        """
        if not requests:
            raise Unmeasured("there are no values")
        return self.function(*(np.concatenate(parts) for parts in zip(*requests, strict=True)))


def _magnitude_of_mean(values: Array) -> float:
    if values.size == 0 or not bool(np.isfinite(values).all()):
        raise Unmeasured("the scores are missing or not finite")
    return abs(math.fsum(values) / values.size)


def _ace_gap(*ranked: Array) -> float:
    ranks = calibration.RANKS
    if any(part.size % ranks for part in ranked):
        raise Unmeasured(f"the vocabulary has fewer than {ranks} tokens")
    train, train_hits, infer, infer_hits = (part.reshape(-1, ranks) for part in ranked)
    if train.shape[0] < calibration.BINS:
        raise Unmeasured(f"{train.shape[0]} positions cannot fill {calibration.BINS} bins")
    return abs(
        calibration.adaptive_calibration_error(train, train_hits)
        - calibration.adaptive_calibration_error(infer, infer_hits)
    )


AGGREGATES: Mapping[str, Aggregate] = {
    "ess_frac": Aggregate(("log_ratio",), ess_fraction),
    "tail_index": Aggregate(("log_ratio",), pareto_k),
    "pearson_p": Aggregate((TRAIN_LOG, INFER_LOG), pearson_probabilities),
    "pearson_logp": Aggregate((TRAIN_LOG, INFER_LOG), pearson),
    "brier_gap": Aggregate(("brier_gap",), _magnitude_of_mean),
    "nll_gap": Aggregate(("nll_gap",), _magnitude_of_mean),
    "ace_gap": Aggregate(RANKED, _ace_gap),
}
"""The aggregates of the language that are measured request by request."""
