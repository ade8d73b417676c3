"""Errors of the limits of times at the limit of a clause, counted by timed run and by request.

All runs of a request take the same time, which is the worst case of what they have in common.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from scipy import stats

from kcdsl_backends.empirical.statistics import bootstrap, rates
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK

REQUESTS, RUNS = 30, 10
Errors = tuple[float, float]
"""How often a clause at its limit passes, and how often it is violated."""


def errors_of_shares(runs: int, rate: Fraction = Fraction(1, 10)) -> Errors:
    """Return the errors of a percentile or a budget, exactly: a request is beyond with the chance
    that is allowed, and counts `runs` times."""
    k = np.arange(REQUESTS + 1)
    chance = stats.binom.pmf(k, REQUESTS, float(rate))
    n = runs * REQUESTS
    passes = [rates.shows_below(int(runs * i), n, rate, ONE_LOOK) for i in k]
    fails = [rates.shows_above(int(runs * i), n, rate, ONE_LOOK) for i in k]
    return float(chance[passes].sum()), float(chance[fails].sum())


def errors_of_means(runs: int, samples: int) -> Errors:
    """Return the errors of a mean, and of the throughput, of requests that take 1 ± 0.2 s."""
    generator, passes, fails = np.random.default_rng(11), 0, 0
    for sample in range(samples):
        seconds = np.repeat(generator.normal(1.0, 0.2, REQUESTS), runs)
        found = bootstrap.clustered_ratio(seconds, np.ones(seconds.size), seed=sample)
        passes += found.high is not None and found.high <= 1
        fails += found.low is not None and found.low > 1
    return passes / samples, fails / samples
