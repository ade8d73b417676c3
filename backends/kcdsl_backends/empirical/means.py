"""Means and rates: every token weighs the same, and limits resample whole requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kcdsl.ir.terms import Term
from kcdsl.ir.words import term_text
from kcdsl_backends.empirical import statistics
from kcdsl_backends.empirical.measured import SliceData
from kcdsl_backends.empirical.statistics import Confidence, Estimate, NotMeasurable
from kcdsl_backends.empirical.term_values import token_sums, unit_values, units_of, value_range


@dataclass(frozen=True, slots=True)
class Settings:
    """How estimates are formed: the seed of resampling and the confidence of each limit (None:
    values alone, without limits)."""

    seed: int
    confidence: Confidence | None

    def halved(self) -> Settings:
        """Return the same with half the error: for limits of which either may be missed."""
        return (
            self
            if self.confidence is None
            else replace(self, confidence=self.confidence.divided(2))
        )


def mean_of(of: Term, data: SliceData, settings: Settings) -> Estimate:
    """Return the mean of a pointwise term over all tokens of a slice."""
    sums, sizes = token_sums(of, data)
    return statistics.clustered_ratio(
        sums,
        sizes,
        seed=settings.seed,
        confidence=settings.confidence,
        bounds=value_range(of, data),
        what=term_text(of),
    )


def rate_of(of: Term, data: SliceData, settings: Settings) -> Estimate:
    """Return the mean of a pointwise term that is 0 or 1; a share of requests where each has one
    value. Raises `NotMeasurable` for other values."""
    if data.reduced is not None:
        sums, sizes = token_sums(of, data)
        binary = not data.reduced.of(of).fractions.any()
    else:
        values = unit_values(of, units_of(of, data), data.measures)
        every = statistics.check_values(np.concatenate(values) if values else [], term_text(of))
        sums, sizes = np.array([v.sum() for v in values]), np.array([v.size for v in values])
        binary = bool(np.isin(every, (0.0, 1.0)).all())
    if not binary:
        raise NotMeasurable(f"rate({term_text(of)}): the values are not all 0 or 1")
    if bool((sizes == 1).all()):
        return statistics.proportion(int(sums.sum()), sums.size, settings.confidence)
    return mean_of(of, data, settings)
