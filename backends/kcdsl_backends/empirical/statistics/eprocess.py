"""Limits of a rate that hold at every look at growing data.

The state is two integers, k of n units beyond the threshold, so it merges across shards and does
not depend on the order of anything. Evidence against "the rate is at least δ" is the mixture of
likelihood ratios over p < δ with a Beta(1/2, 1/2) prior cut off at δ; against "at most δ" the same
over p > δ. Each is a non-negative supermartingale that starts at 1, so (Ville 1939) the chance that
it ever reaches 1/α is at most α, whatever rule stops the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np
from scipy import special

from kcdsl_backends.empirical.statistics.vocabulary import Confidence, check_counts, check_rate

_A = _B = 0.5
_STEPS = 200
_PRECISION = 1e-12
Outcome = Literal["held", "violated", "unknown"]
Kind = Literal["cusum", "shiryaev-roberts"]


@dataclass(frozen=True, slots=True)
class Counts:
    """k of n units beyond the threshold: all that an e-process remembers. States add up."""

    k: int = 0
    n: int = 0

    def __post_init__(self) -> None:
        check_counts(self.k, self.n)

    def __add__(self, other: Counts) -> Counts:
        """Return the state after the units of both."""
        return Counts(self.k + other.k, self.n + other.n)


def log_certify(k: int, n: int, rate: Fraction) -> float:
    """Return ln E against "the true rate is at least `rate`" after k of n.

    0 where k/n is not below the rate: there is nothing against it. Raises ValueError for a rate of
    0 or 1: no number of units without a failure shows that none ever comes.
    """
    check_counts(k, n)
    check_rate(rate)
    return 0.0 if k >= n * rate else _log_mixture(k, n, rate, below=True)


def log_alarm(k: int, n: int, rate: Fraction) -> float:
    """Return ln E against "the true rate is at most `rate`" after k of n."""
    check_counts(k, n)
    check_rate(rate)
    return 0.0 if k <= n * rate else _log_mixture(k, n, rate, below=False)


def shows_below(k: int, n: int, rate: Fraction, error: Fraction) -> bool:
    """Say whether k of n show, at this and every other look, a rate of at most `rate`."""
    return _reaches(log_certify(k, n, rate), n, error)


def shows_above(k: int, n: int, rate: Fraction, error: Fraction) -> bool:
    """Say whether k of n show, at this and every other look, a rate of at least `rate`."""
    return _reaches(log_alarm(k, n, rate), n, error)


def upper_limit(k: int, n: int, error: Fraction) -> float:
    """Return the least rate above k/n that is excluded, rounded up; 1 where none is."""
    check_counts(k, n)
    if k == n or not shows_below(k, n, Fraction(math.nextafter(1.0, 0.0)), error):
        return 1.0
    low, high = k / n, math.nextafter(1.0, 0.0)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if high - low <= _PRECISION * high or not low < middle < high:
            break
        if shows_below(k, n, Fraction(middle), error):
            high = middle
        else:
            low = middle
    return high


def lower_limit(k: int, n: int, error: Fraction) -> float:
    """Return the greatest rate below k/n that is excluded, rounded down; 0 where none is."""
    check_counts(k, n)
    least = 2.0**-1000
    if k == 0 or not shows_above(k, n, Fraction(least), error):
        return 0.0
    low, high = least, k / n
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if high - low <= _PRECISION * high or not low < middle < high:
            break
        if shows_above(k, n, Fraction(middle), error):
            low = middle
        else:
            high = middle
    return low


def most_exceedances(n: int, rate: Fraction, error: Fraction) -> int | None:
    """Return the largest k that still shows at most `rate`, or None where not even 0 does."""
    check_rate(rate)
    if n <= 0 or not shows_below(0, n, rate, error):
        return None
    low, high = 0, math.ceil(n * rate)
    while high - low > 1:
        middle = (low + high) // 2
        if shows_below(middle, n, rate, error):
            low = middle
        else:
            high = middle
    return low


def judge(
    counts: Counts,
    rate: Fraction,
    *,
    certify: Confidence = Confidence(anytime=True),  # noqa: B008
    alarm: Confidence = Confidence(anytime=True),  # noqa: B008
    fewest: int = 1,
) -> Outcome:
    """Return what a window shows of "at most `rate` exceed".

    Held only if the window certifies with at least `fewest` units, violated if it raises an alarm.
    A window starts with no units: evidence that is never forgotten makes late faults invisible.
    """
    if shows_above(counts.k, counts.n, rate, alarm.error):
        return "violated"
    if counts.n >= fewest and shows_below(counts.k, counts.n, rate, certify.error):
        return "held"
    return "unknown"


def _log_mixture(k: int, n: int, rate: Fraction, *, below: bool) -> float:
    """Return the logarithm of the mixture, without any floor: no mass below δ is no evidence."""
    delta = float(rate)
    complement = math.log1p(-delta) if delta < 0.5 else math.log(float(1 - rate))
    mass = special.betainc if below else special.betaincc
    posterior, prior = float(mass(k + _A, n - k + _B, delta)), float(mass(_A, _B, delta))
    if posterior <= 0 or prior <= 0:
        return -math.inf
    return (
        float(special.betaln(k + _A, n - k + _B))
        + math.log(posterior)
        - float(special.betaln(_A, _B))
        - math.log(prior)
        - k * math.log(delta)
        - (n - k) * complement
    )


def _reaches(evidence: float, n: int, error: Fraction) -> bool:
    """Compare ln E with ln 1/α, less what rounding may have added to it."""
    slack = 64 * 2.0**-52 * (n + 2) * math.log(n + 2)
    return evidence - slack >= -math.log(float(error))


# --- detectors of a change ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Detector:
    """A detector of a rate that was within its budget and no longer is: one number.

    An e-process that never starts again grows insensitive to late faults. A detector restarts by
    itself: with L the likelihood ratio of a batch (k of n) between the rate `alternative` and the
    budget, e-CUSUM follows M = max(M, 1) L and Shiryaev-Roberts R = (R + 1) L. As long as the rate
    is at most the budget, L has a mean of at most 1, so the mean number of batches until either
    reaches `limit` is at least `limit` (Shin, Ramdas and Rinaldo 2024).

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
