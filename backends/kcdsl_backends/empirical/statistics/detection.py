"""Detectors of a change: a rate that was within its budget, and no longer is.

An e-process that never starts again grows insensitive to late faults. A detector restarts by
itself: with L the likelihood ratio of a batch (k of n) between the rate `alternative` and the
budget, e-CUSUM follows M = max(M, 1) L and Shiryaev-Roberts R = (R + 1) L. As long as the rate is
at most the budget, L has a mean of at most 1, so the mean number of batches until either reaches
`limit` is at least `limit` (Shin, Ramdas and Rinaldo 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from kcdsl_backends.empirical.statistics.vocabulary import check_counts, check_rate

Kind = Literal["cusum", "shiryaev-roberts"]


@dataclass(frozen=True, slots=True)
class Detector:
    """The state of a detector: one number, -inf before the first batch.

    `alternative` is the rate that it is most sensitive to, above the budget `rate`. `limit` is the
    mean number of batches between two false alarms, at least.
    """

    rate: Fraction
    alternative: Fraction
    limit: float
    kind: Kind = "cusum"
    log_value: float = -math.inf

    def __post_init__(self) -> None:
        check_rate(self.rate)
        check_rate(self.alternative)
        if self.alternative <= self.rate:
            raise ValueError(f"{self.alternative} is no excess over {self.rate}")
        if not self.limit > 1:
            raise ValueError(f"a limit is above 1, not {self.limit}")

    @property
    def alarmed(self) -> bool:
        """Say whether the last batch raised the alarm."""
        return self.log_value >= math.log(self.limit)

    def after(self, k: int, n: int) -> Detector:
        """Return the detector after a batch of n units, k of them beyond."""
        check_counts(k, n)
        up = math.log(float(self.alternative / self.rate))
        down = math.log(float((1 - self.alternative) / (1 - self.rate)))
        start = (
            max(self.log_value, 0.0)
            if self.kind == "cusum"
            else float(np.logaddexp(self.log_value, 0.0))
        )
        return replace(self, log_value=start + k * up + (n - k) * down)


def detector(
    rate: Fraction,
    *,
    alternative: Fraction | None = None,
    limit: float = 1000.0,
    kind: Kind = "cusum",
) -> Detector:
    """Return a detector without data; its alternative is twice the budget unless given."""
    if alternative is None:
        alternative = min(2 * rate, (1 + rate) / 2)
    return Detector(rate, alternative, limit, kind)
