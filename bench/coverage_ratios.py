"""Errors of confidence limits of statistics of importance ratios, by simulation.

    python -m bench.coverage_ratios [RUNS]

Requests have 40 tokens and a random level. Ratios w have a normal ln w, or are 1 except for a share
of tokens with a Pareto tail, P(w > x) = x^-a: E w^2 exists for a > 2, and its estimate has a
variance for a > 4. `studentised` are the limits of reports; `percentiles` are percentile limits
from the same resamples. Every simulation is seeded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench.common import Better, Figure, report
from kcdsl.ir.terms import Metric
from kcdsl_backends.empirical.decision.estimates import Settings, slice_metric
from kcdsl_backends.empirical.metrics.measures import AGGREGATES
from kcdsl_backends.empirical.metrics.sums import SUMS
from kcdsl_backends.empirical.statistics import bootstrap
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData

Array = NDArray[np.float64]
TOKENS, RUNS = 40, 500
_LARGE = 200_000


@dataclass(frozen=True, slots=True)
class RatioLaw:
    """Sampler of both log-probabilities [n, 40] of n requests, and the true value if known."""

    metric: str
    draw: Callable[[np.random.Generator, int], tuple[Array, Array]]
    truth: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Misses:
    """Shares of runs with the true value below or above the limits, or without a limit."""

    below: float
    above: float
    no_low: float
    no_high: float


def pareto(a: float, share: float) -> RatioLaw:
    """Return ratios of 1, except for about `share` of the tokens with a tail of index a."""

    def draw(generator: np.random.Generator, n: int) -> tuple[Array, Array]:
        level = np.minimum(generator.gamma(0.5, 2.0, size=(n, 1)) * share, 1.0)
        far = generator.random((n, TOKENS)) < level
        delta = np.where(far, generator.exponential(size=(n, TOKENS)) / a, 0.0)
        infer = np.full_like(delta, -50.0)
        return infer + delta, infer

    def truth() -> float:
        first, second = 1 + share * (a / (a - 1) - 1), 1 + share * (a / (a - 2) - 1)
        return first**2 / second

    return RatioLaw("ess_frac", draw, truth)


def noise(metric: str, freedom: float | None, spread: float) -> RatioLaw:
    """Return ln w with noise scaled by request: normal, or Student's t with `freedom`."""

    def draw(generator: np.random.Generator, n: int) -> tuple[Array, Array]:
        infer = -generator.exponential(0.6, size=(n, TOKENS))
        level = spread * np.exp(generator.normal(size=(n, 1)) / 2)
        size = (n, TOKENS)
        error = (
            generator.normal(size=size)
            if freedom is None
            else (generator.standard_t(freedom, size=size))
        )
        return np.minimum(infer + np.clip(level * error, -5, 5), 0.0), infer

    @cache
    def truth() -> float:
        generator = np.random.default_rng(10**6)
        train, infer = draw(generator, _LARGE)
        return AGGREGATES[metric].of([_arrays(metric, train.ravel(), infer.ravel())])

    return RatioLaw(metric, draw, truth)


LAWS = {
    "ess_frac, normal ln w": noise("ess_frac", None, 0.1),
    "ess_frac, ln w of Student's t, 4": noise("ess_frac", 4, 0.02),
    "ess_frac, Pareto tail 6": pareto(6, 0.05),
    "ess_frac, Pareto tail 4": pareto(4, 0.05),
    "ess_frac, Pareto tail 2.5": pareto(2.5, 0.02),
    "pearson_p, normal ln w": noise("pearson_p", None, 0.02),
    "pearson_p, ln w of Student's t, 3": noise("pearson_p", 3, 0.02),
    "pearson_logp, ln w of Student's t, 4": noise("pearson_logp", 4, 0.02),
}


def _arrays(metric: str, train: Array, infer: Array) -> list[Array]:
    return [train - infer] if metric == "ess_frac" else [train, infer]


def misses(law: RatioLaw, n: int, runs: int) -> tuple[Misses, Misses]:
    """Return how often studentised and percentile limits miss the true value."""
    generator, truth = np.random.default_rng(n), law.truth()
    found: tuple[list[tuple[float | None, float | None]], ...] = ([], [])
    for run in range(runs):
        train, infer = law.draw(generator, n)
        parts = [_arrays(law.metric, p, q) for p, q in zip(train, infer, strict=True)]
        names = AGGREGATES[law.metric].inputs
        units = tuple(
            SamplingUnit(str(i), TOKENS, dict(zip(names, arrays, strict=True)))
            for i, arrays in enumerate(parts)
        )
        one = slice_metric(Metric(law.metric), SliceData("all", units), Settings(run, ONE_LOOK))
        assert one is not None
        found[0].append((one.low, one.high))
        found[1].append(_percentiles(law.metric, one.value, parts, run))
    return _counted(found[0], truth), _counted(found[1], truth)


def _percentiles(
    metric: str, value: float, parts: Sequence[Sequence[Array]], seed: int
) -> tuple[float, float]:
    sums = SUMS[metric]
    rows = sums.of(parts)

    def of(counts: Array) -> Array:
        return np.array([sums.back(float(x)) for x in sums.value(counts @ rows)])

    one = bootstrap.clustered_redrawn(value, of, len(rows), seed=seed, confidence=ONE_LOOK)
    assert one.low is not None
    assert one.high is not None
    return one.low, one.high


def _counted(limits: Sequence[tuple[float | None, float | None]], truth: float) -> Misses:
    def share(of: Callable[[float | None, float | None], bool]) -> float:
        return sum(of(low, high) for low, high in limits) / len(limits)

    return Misses(
        share(lambda low, high: low is not None and low > truth),
        share(lambda low, high: high is not None and high < truth),
        share(lambda low, high: low is None),
        share(lambda low, high: high is None),
    )


def ratio_figures(runs: int = RUNS) -> list[Figure]:
    """Return how often the true value of each distribution is outside each limit."""
    figures = []
    for name, law in LAWS.items():
        for n in (50, 200, 512):
            for method, found in zip(
                ("studentised", "percentiles"), misses(law, n, runs), strict=True
            ):
                said = (
                    f"{runs} runs of {n} requests; above the truth {100 * found.above:.1f} %, "
                    f"no lower limit {100 * found.no_low:.1f} %"
                )
                figures.append(
                    Figure(f"false passes %, {name}, {n}, {method}", 100 * found.below,
                           Better.LOWER, None, said)
                )  # fmt: skip
                print(figures[-1].name, figures[-1].value, said, flush=True)
    return figures


def main() -> int:
    """Simulate and report."""
    return report("coverage_ratios", ratio_figures(*(int(a) for a in sys.argv[1:2])))


if __name__ == "__main__":
    sys.exit(main())
