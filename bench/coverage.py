"""Errors of the limits of samples: false passes, false violations, coverage, by simulation.

`make bench-coverage` prints the figures that docs/explanation/statistics.md quotes. Every
simulation is seeded and reproducible.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bench.common import Better, Figure, report
from bench.coverage_shares import shares_held
from bench.coverage_times import REQUESTS, RUNS, errors_of_means, errors_of_shares
from kcdsl.ir.terms import Abs, Metric, Statistic
from kcdsl_backends.empirical.decision.estimates import Settings, evaluate
from kcdsl_backends.empirical.questions.baselines import prediction
from kcdsl_backends.empirical.statistics import bootstrap, estimates, rates
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK, Confidence, confidence_over
from kcdsl_backends.empirical.statistics.rates import CLOPPER_PEARSON, limit_ranks, most_exceedances
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData

Array = NDArray[np.float64]
Level = Callable[[np.random.Generator, int], Array]

ANYTIME = confidence_over(None)
LEVELS: dict[str, Level] = {
    "normal": lambda g, n: 1 + g.normal(size=n) / 4,
    "exponential": lambda g, n: g.exponential(size=n),
    "lognormal 1": lambda g, n: np.exp(g.normal(size=n) - 0.5),
    "lognormal 1.5": lambda g, n: np.exp(1.5 * g.normal(size=n) - 1.125),
}
"""Distributions of the request levels, each with mean 1."""


def clustered(generator: np.random.Generator, n: int, level: Level) -> tuple[Array, Array]:
    """Return sums and sizes of n requests; the tokens of a request share its level."""
    sizes = generator.integers(5, 40, size=n).astype(np.float64)
    noise = generator.normal(size=n) * np.sqrt(sizes) / 10
    return level(generator, n) * sizes + noise, sizes


def mean_misses(level: Level, n: int, runs: int, confidence: Confidence) -> tuple[float, float]:
    """Return the frequencies of the mean 1 below the lower and above the upper limit."""
    generator = np.random.default_rng(n)
    below = above = 0
    for run in range(runs):
        sums, sizes = clustered(generator, n, level)
        found = bootstrap.clustered_ratio(sums, sizes, seed=run, confidence=confidence)
        below += found.low is not None and found.low > 1
        above += found.high is not None and found.high < 1
    return below / runs, above / runs


def percentile_misses(n: int, q: Fraction, runs: int, confidence: Confidence) -> float:
    """Return the frequency of the q-quantile of an exponential above its upper limit."""
    _, rank = limit_ranks(n, q, confidence)
    if rank is None:
        return 0.0
    drawn = np.sort(np.random.default_rng(n).exponential(size=(runs, n)), axis=1)
    return float((drawn[:, rank - 1] < -math.log(float(1 - q))).mean())


def looks(p: float, runs: int, *, rate: Fraction, units: int, every: int) -> dict[str, float]:
    """Return the frequency of a verdict of each rule on a rate p at any of many looks.

    Rules: `naive` (k/n against the budget) and Clopper-Pearson at every look, Clopper-Pearson once
    at the end, and the e-processes for certification and for alarms.
    """
    generator = np.random.default_rng(round(p * 10**6))
    n = np.arange(every, units + 1, every)
    k = generator.binomial(every, p, size=(runs, n.size)).cumsum(axis=1)

    def passes(confidence: Confidence) -> NDArray[np.int64]:
        allowed = (most_exceedances(int(m), rate, confidence) for m in n)
        return np.array([-1 if a is None else a for a in allowed])

    def alarms() -> NDArray[np.int64]:
        """Return the least k for each n that raises an alarm, by certifying n - k others."""
        allowed = (most_exceedances(int(m), 1 - rate, ANYTIME) for m in n)
        return np.array([m + 1 if a is None else m - a for m, a in zip(n, allowed, strict=True)])

    fixed, sequential = passes(ONE_LOOK), passes(ANYTIME)
    naive = k * rate.denominator <= n * rate.numerator
    return {
        "naive at the end": float(naive[:, -1].mean()),
        "Clopper-Pearson at every look": float((k <= fixed).any(axis=1).mean()),
        "Clopper-Pearson once": float((k[:, -1] <= fixed[-1]).mean()),
        "e-process certifies": float((k <= sequential).any(axis=1).mean()),
        "e-process alarms": float((k >= alarms()).any(axis=1).mean()),
        "naive ever alarms": float((~naive).any(axis=1).mean()),
    }


def false_alarms(family: int, runs: int) -> tuple[float, float]:
    """Return the frequency of a false violation in a report of `family` sampled clauses, all
    exactly at their limits: each tested at 5 %, and by Holm's method."""
    rate, n = Fraction(1, 20), 400
    k = np.random.default_rng(family).binomial(n, float(rate), size=(runs, family))
    p = stats.binom.sf(k - 1, n, float(rate))
    alone, holm = 0, 0
    for row in p:
        values = [Fraction(x) for x in row.tolist()]
        candidates = [i for i in range(family) if values[i] <= ONE_LOOK.error]
        found, _ = estimates.holm(family, ONE_LOOK.error, candidates, _reached(values))
        alone += bool((row <= 0.05).any())
        holm += bool(found)
    return alone / runs, holm / runs


def magnitudes(runs: int) -> tuple[float, float]:
    """Return the frequency of a false violation of |mean| <= τ, for mean 0 and τ far below the
    noise of 40 requests: by two limits at 95 %, and by the clause, which halves their error."""
    generator, sizes = np.random.default_rng(3), np.ones(40)
    tau, alone, halved = 0.001, 0, 0
    size = Abs(Statistic("mean", Metric("log_ratio"), None))
    for run in range(runs):
        values = generator.normal(size=40)
        found = bootstrap.clustered_ratio(values, sizes, seed=run)
        alone += _above(found.low, tau) or _above(None if found.high is None else -found.high, tau)
        units = (SamplingUnit(str(i), 1, {"log_ratio": values[i : i + 1]}) for i in range(40))
        data = SliceData("all", tuple(units))
        halved += _above(evaluate(size, data, "upper", Settings(run, ONE_LOOK))[0].low, tau)
    return alone / runs, halved / runs


def _above(limit: float | Fraction | None, tau: float) -> bool:
    return limit is not None and limit > tau


def _reached(p: Sequence[Fraction]) -> Callable[[int, Fraction], bool]:
    return lambda i, level: p[i] <= level


def token_counts(correlation: float, runs: int) -> tuple[float, float]:
    """Return how often 200 requests of 100 tokens pass with the rate at its limit: counted by
    token, and by request (beyond the threshold if any token is)."""
    generator = np.random.default_rng(round(correlation * 1000))
    rate, requests, tokens = Fraction(1, 20), 200, 100
    spread = (1 - correlation) / correlation
    p = generator.beta(0.05 * spread, 0.95 * spread, size=(runs, requests))
    beyond = generator.binomial(tokens, p)
    every = most_exceedances(requests * tokens, rate, ONE_LOOK)
    assert every is not None
    by_token = float((beyond.sum(axis=1) <= every).mean())
    any_beyond = beyond > 0
    share = Fraction(int(any_beyond.mean() * 10**6), 10**6)
    allowed = most_exceedances(requests, share, ONE_LOOK)
    assert allowed is not None
    return by_token, float((any_beyond.sum(axis=1) <= allowed).mean())


def thresholds(runs: int) -> tuple[float, float]:
    """Return how often more than 5 % exceed a threshold derived from 500 units: the empirical 95 %
    quantile, and the order statistic with a guarantee."""
    rate, n = Fraction(1, 20), 500
    drawn = np.sort(np.random.default_rng(3).exponential(size=(runs, n)), axis=1)
    true = -math.log(float(rate))
    allowed = most_exceedances(n, rate, ONE_LOOK)
    assert allowed is not None
    naive = drawn[:, rates.quantile_rank(n, 1 - rate) - 1]
    return float((naive < true).mean()), float((drawn[:, n - allowed - 1] < true).mean())


def band_misses(level: Level, earlier: int, runs: int) -> float:
    """Return how often the next value of a distribution is outside the band of earlier ones."""
    generator = np.random.default_rng(earlier)
    outside = 0
    for _ in range(runs):
        *known, value = level(generator, earlier + 1).tolist()
        low, high = prediction(known, float(ONE_LOOK.error))
        outside += not low <= value <= high
    return outside / runs


def figures(runs: int = 1000) -> list[Figure]:
    """Return every figure, from `runs` runs of the slow simulations."""
    error = float(ONE_LOOK.error)
    found: list[Figure] = []

    def add(name: str, value: float, limit: float | None, conditions: str) -> None:
        found.append(Figure(name, value, Better.LOWER, limit, conditions))

    for rate, n in ((Fraction(1, 100), 1000), (Fraction(1, 20), 200)):
        k = CLOPPER_PEARSON.most_exceedances(n, rate, ONE_LOOK.error)
        assert k is not None
        chance = float(stats.binom.cdf(k, n, float(rate)))
        add(f"false pass: rate of {rate}", chance, error, f"exact, {n} units")
    for q, n in ((Fraction(9, 10), 120), (Fraction(99, 100), 500)):
        miss = percentile_misses(n, q, 20_000, ONE_LOOK)
        add(f"false pass: p{q * 100}", miss, error + 0.005, f"{n} requests, 20000 runs")
    for name, level in LEVELS.items():
        for n in (8, 20, 50):
            limit = error + 0.01 if name == "normal" else None
            missed = band_misses(level, n, 10 * runs)
            add(f"outside its band: {name}, {n} runs", missed, limit, f"{10 * runs} bands")
    two_sided = Confidence(Fraction(1, 40))
    for name, n in (("normal", 40), ("normal", 100), ("exponential", 100)):
        low, high = mean_misses(LEVELS[name], n, runs, two_sided)
        off = abs(1 - low - high - 0.95)
        add(f"coverage of a mean, off 95 %: {name}, {n}", off, 0.02, f"two-sided, {runs} runs")
    for name, level in LEVELS.items():
        for n in (20, 50, 100, 200):
            below, above = mean_misses(level, n, runs, ONE_LOOK)
            add(f"false pass: mean, {name}, {n}", above, None, f"{runs} runs")
            add(f"false violation: mean, {name}, {n}", below, 0.075, f"{runs} runs")
        for n in (20, 50, 200):
            held = shares_held(level, n, runs // 2)
            about = f"{runs // 2} runs"
            add(f"shares do not hold together: {name}, {n}", 1 - held.together, None, about)
            add(f"share shown with the wrong sign: {name}, {n}", held.wrong, 0.075, about)
    for n in (20, 200):
        for name in ("normal", "lognormal 1.5"):
            held = shares_held(LEVELS[name], n, runs // 5, "p50")
            miss, about = 1 - held.together, f"{runs // 5} runs"
            add(f"shares of p50 do not hold together: {name}, {n}", miss, error, about)
    for p in (0.010, 0.0101, 0.015, 0.02, 0.005, 0.002):
        rates = looks(p, 4000, rate=Fraction(1, 100), units=20_000, every=100)
        for rule, value in rates.items():
            wrong = (rule == "e-process certifies" and p >= 0.01) or (
                rule == "e-process alarms" and p <= 0.01
            )
            limit = error if wrong else None
            add(f"{rule}: true {p}", value, limit, "budget 0.01, 200 looks, 4000 runs")
    for family in (5, 20, 100):
        alone, holm = false_alarms(family, 4000)
        add(f"false violation of any of {family}: alone", alone, None, "4000 runs")
        add(f"false violation of any of {family}: Holm", holm, error + 0.01, "4000 runs")
    alone, halved = magnitudes(runs)
    add("false violation of |mean|: each limit at 95 %", alone, None, f"40 requests, {runs} runs")
    add("false violation of |mean|", halved, error + 0.02, f"40 requests, {runs} runs")
    for correlation in (0.01, 0.05, 0.2):
        tokens, requests = token_counts(correlation, 4000)
        about = f"correlation {correlation}, 200 requests of 100 tokens, 4000 runs"
        add(f"false pass counted by token: {correlation}", tokens, None, about)
        add(f"false pass counted by request: {correlation}", requests, error + 0.01, about)
    for unit, each in (("run", RUNS), ("request", 1)):
        limit = error + 0.02 if unit == "request" else None
        about = f"{REQUESTS} requests, {RUNS} runs each, all alike"
        passed, violated = errors_of_shares(each)
        add(f"false pass of p90 of times, by {unit}", passed, limit, f"exact, {about}")
        add(f"false violation of p90 of times, by {unit}", violated, limit, f"exact, {about}")
        passed, violated = errors_of_means(each, runs)
        add(f"false pass of a mean of times, by {unit}", passed, limit, f"{runs} runs, {about}")
        add(f"false violation of a mean of times, by {unit}", violated, limit, f"{runs} runs")
    naive, ordered = thresholds(20_000)
    add("threshold exceeded too often: quantile", naive, None, "500 units, 20000 runs")
    add("threshold exceeded too often: rank", ordered, error + 0.005, "500 units, 20000 runs")
    return found


if __name__ == "__main__":
    sys.exit(report("coverage", figures()))
