"""Statistics of a slice from per-request sums equal those from all tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from bench import coverage_ratios
from kcdsl.ir.terms import Metric
from kcdsl.metrics import METRICS
from kcdsl_backends.empirical.decision.estimates import Settings, slice_metric
from kcdsl_backends.empirical.metrics.measures import AGGREGATES, RECORDED_AGGREGATES
from kcdsl_backends.empirical.metrics.sums import REDRAWN, SHARES, SUMS
from kcdsl_backends.empirical.statistics import bootstrap
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK, Estimate, rounded_sum
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData

Array = NDArray[np.float64]
NAMES = sorted({*SUMS, *REDRAWN})


def _parts(name: str, n: int, spread: float) -> list[list[Array]]:
    generator = np.random.default_rng(5)
    found: list[list[Array]] = []
    for _ in range(n):
        infer = -generator.exponential(0.6, size=generator.integers(30, 90))
        delta = spread * generator.normal(size=infer.size)
        train = infer + delta
        match name:
            case "router_agreement":
                shares = generator.integers(0, 3, size=3 * infer.size) / 2
                found.append([shares, np.array([3.0])])
            case "ess_seq":
                found.append([np.array([delta[:10].sum(), delta[10:].sum()])])
            case "icc" | "length_scaling":
                found.append([delta, np.array([10.0, infer.size - 10.0])])
            case "pearson_p" | "pearson_logp":
                found.append([train, infer])
            case _:
                found.append([delta])
    return found


@pytest.mark.parametrize("spread", [1e-4, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_resamples_from_sums_equal_those_of_all_tokens(name: str, spread: float) -> None:
    parts = _parts(name, 40, spread)
    metric = AGGREGATES.get(name) or RECORDED_AGGREGATES[name]
    drawn = next(bootstrap.resamples(40, 0, 12))
    counts = next(bootstrap.multiplicities(40, 0, 12))
    if name in SUMS:
        sums = SUMS[name]
        found = [sums.back(float(x)) for x in sums.value(counts @ sums.of(parts))]
    else:
        found = REDRAWN[name](parts)(counts).tolist()
    wanted = [metric.of([parts[i] for i in row]) for row in drawn]
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def _limits(name: str, parts: Sequence[Sequence[Array]]) -> Estimate:
    metric = AGGREGATES.get(name) or RECORDED_AGGREGATES[name]
    units = [
        SamplingUnit(str(i), 1, dict(zip(metric.inputs, arrays, strict=True)))
        for i, arrays in enumerate(parts)
    ]
    data = SliceData("all", tuple(units), measures=METRICS)
    found = slice_metric(Metric(name), data, Settings(0, ONE_LOOK))
    assert found is not None
    return found


def test_limits_enclose_the_value_and_narrow_with_more_requests() -> None:
    for name in ("ess_frac", "pearson_p", "pearson_logp", "icc"):
        few, many = (_limits(name, _parts(name, n, 0.05)) for n in (40, 400))
        for one in (few, many):
            assert one.low is not None
            assert one.high is not None
            assert one.low < one.value < one.high
        assert many.high - many.low < few.high - few.low  # type: ignore[operator]


def test_unobserved_tail_is_not_excluded() -> None:
    """For 50 requests whose sequences are all inside, the share beyond may be 6 %."""
    assert set(SHARES) <= set(RECORDED_AGGREGATES)
    found = _limits("tail_mass_seq", [[np.zeros(1)]] * 50)
    assert found.value == 0
    assert found.high == pytest.approx(1 - 0.05 ** (1 / 50))


def test_ratios_without_a_second_moment_have_no_lower_limit() -> None:
    generator = np.random.default_rng(0)
    heavy = [[generator.exponential(size=200) / 1.2] for _ in range(60)]
    assert _limits("ess_frac", heavy).low is None
    assert _limits("ess_frac", [[np.zeros(9)]] * 30).low is None  # equal ratios have no spread
    assert _limits("ess_frac", [[np.array([0.0, 400.0])]] * 30).low is None


def test_sums_of_many_values_are_correctly_rounded() -> None:
    generator = np.random.default_rng(0)
    for power in (0, 1, 20, 200, 600):
        values = generator.normal(size=300) * np.exp(generator.uniform(-1, 1, size=300) * power)
        every = np.concatenate([values, -values[::-1] * (1 + 1e-15), [1e-300]])
        assert rounded_sum(every) == math.fsum(every)
    assert rounded_sum(np.full(100, 5e-324)) == 100 * 5e-324
    assert rounded_sum(np.full(100, 1e308)) == math.inf
    assert rounded_sum(np.tile([1e308, -1e308], 50)) == 0
    assert math.isnan(rounded_sum(np.full(100, math.nan)))


@pytest.mark.full
def test_limits_of_heavy_ratios_err_less_than_percentile_intervals() -> None:
    law = coverage_ratios.LAWS["ess_frac, Pareto tail 4"]
    found, percentiles = coverage_ratios.misses(law, 100, 150)
    assert found.below <= 0.05
    assert percentiles.below > 0.05


@pytest.mark.full
def test_limits_of_correlations_keep_their_error_rate() -> None:
    law = coverage_ratios.LAWS["pearson_p, ln w of Student's t, 3"]
    found, _ = coverage_ratios.misses(law, 100, 150)
    assert max(found.below, found.above) <= 0.1
