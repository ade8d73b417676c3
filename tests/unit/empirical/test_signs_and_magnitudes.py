"""Reversed tails and magnitudes: equivalent forms of a bound agree, and keep their error level."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcdsl.ir.terms import Abs, Arith, Compare, Connective, EvidenceKind, Metric, Number, Term
from kcdsl.metrics import MEASURES, RECORDED
from kcdsl.verdict.model import verdict_name
from kcdsl_backends.empirical.decision.estimates import Settings, slice_metric
from kcdsl_backends.empirical.decision.results import decide_clause
from kcdsl_backends.empirical.statistics import bootstrap
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData

FIXED = {name: replace(measure, noisy=False) for name, measure in MEASURES.items()}
"""Metrics for which a pinned file is a census, so that every clause is decided."""
MINUS = Number(Fraction(-1))
TAU = Fraction(1, 4)


def verdict(lab: Any, formula: Any, data: SliceData, sample: bool = False, seed: int = 0) -> str:
    clause = lab.clause(formula, evidence=EvidenceKind.SAMPLE if sample else None)
    row = decide_clause(clause, lab.program(clause), data, seed=seed, confidence=ONE_LOOK)
    return verdict_name(row.verdict)


def spellings(of: Term) -> list[Compare]:
    """Return ways to state that a positive number is at most 1/4."""
    tau, nothing = Number(TAU), Number(Fraction(0))
    return [
        Compare("<=", of, tau),
        Compare(">=", tau, of),
        Compare(">=", Arith("*", MINUS, of), Number(-TAU)),
        Compare(">=", Arith("*", of, MINUS), Number(-TAU)),
        Compare(">=", Arith("/", of, MINUS), Number(-TAU)),
        Compare("<=", Number(-TAU), Arith("/", of, MINUS)),
        Compare(">=", Arith("-", nothing, of), Number(-TAU)),
        Compare(">=", Arith("-", tau, of), nothing),
        Compare("<=", Arith("*", MINUS, Arith("*", MINUS, of)), tau),
        Compare(">=", Arith("/", Number(Fraction(1)), of), Number(1 / TAU)),
        Compare("<=", Arith("/", MINUS, of), Number(-1 / TAU)),
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", ["quantile", "max", "aggregate"])
def test_equivalent_forms_of_a_bound_agree(lab: Any, kind: str, sample: bool) -> None:
    """Each request has one token below and one beyond: the smallest token decides nothing."""
    of = lab.statistic(kind, "kl", "9/10" if kind == "quantile" else None)
    harmless = lab.slice_data({"kl": [[0.125, 0.0625]] * 60})
    harmful = lab.slice_data({"kl": [[0.125, 0.5]] * 60})
    for formula in spellings(of):
        assert verdict(lab, formula, harmful, sample) == "violated", formula
        wanted = "inconclusive" if sample and kind != "quantile" else "held"
        assert verdict(lab, formula, harmless, sample) == wanted, formula


@pytest.mark.parametrize("kind", ["quantile", "max"])
def test_reciprocal_of_a_reciprocal_is_the_number(lab: Any, kind: str) -> None:
    of = lab.statistic(kind, "kl", "9/10" if kind == "quantile" else None)
    twice = Compare("<=", Arith("/", MINUS, Arith("/", MINUS, of)), Number(TAU))
    assert verdict(lab, twice, lab.slice_data({"kl": [[0.125, 0.5]] * 60})) == "violated"
    assert verdict(lab, twice, lab.slice_data({"kl": [[0.125, 0.0625]] * 60})) == "held"


_SIGNED = st.lists(
    st.lists(st.sampled_from([-2.0, -0.5, -0.25, -0.125, 0.0, 0.125, 0.25, 0.5, 2.0]), min_size=1),
    min_size=1,
    max_size=12,
)


def _slice(values: list[list[float]]) -> SliceData:
    units = [
        SamplingUnit(f"r{i}", len(v), {"log_ratio": np.array(v), "kl": np.abs(np.array(v))})
        for i, v in enumerate(values)
    ]
    return SliceData("all", tuple(units), measures=FIXED)


@pytest.mark.full
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_SIGNED, st.sampled_from(["1/2", "9/10"]))
def test_magnitude_of_a_percentile_needs_both_sides(
    lab: Any, values: list[list[float]], q: str
) -> None:
    of = lab.statistic("quantile", "log_ratio", q)
    data = _slice(values)
    both = Connective("and", (Compare("<=", of, Number(TAU)), Compare(">=", of, Number(-TAU))))
    assert verdict(lab, Compare("<=", Abs(of), Number(TAU)), data) == verdict(lab, both, data)


def test_magnitude_with_sides_of_opposite_signs_includes_zero(
    lab: Any,
) -> None:
    of = Abs(lab.statistic("quantile", "log_ratio", "1/2"))
    far = Compare(">=", of, Number(TAU))
    for rows, wanted in (
        ([1.0, 2.0], "held"),
        ([-2.0, -1.0], "held"),
        ([-2.0, 2.0], "violated"),
        ([0.125, 2.0], "violated"),
    ):
        assert verdict(lab, far, _slice([rows] * 5)) == wanted, rows


@pytest.mark.full
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_SIGNED, st.sampled_from("*/"), st.sampled_from(["<=", ">="]))
def test_product_uses_the_worst_tails_of_its_factors(
    lab: Any, values: list[list[float]], op: str, side: str
) -> None:
    """By definition, the worst result over all choices of a tail for either factor."""
    signed, size = (lab.statistic("quantile", name, "1/2") for name in ("log_ratio", "kl"))
    rank = math.ceil(len(values) / 2)

    def tails(rows: list[list[float]]) -> list[Fraction]:
        return [Fraction(sorted(map(worst, rows))[rank - 1]) for worst in (min, max)]

    factors = tails(values), tails([[abs(v) for v in row] for row in values])
    data = _slice(values)
    if op == "/" and 0 in factors[1]:
        return
    made = [a * b if op == "*" else a / b for a in factors[0] for b in factors[1]]
    worst = max(made) if side == "<=" else min(made)
    for tau in {*made, Fraction(1, 3)}:
        wanted = "held" if (worst <= tau if side == "<=" else worst >= tau) else "violated"
        assert verdict(lab, Compare(side, Arith(op, signed, size), Number(tau)), data) == wanted


# --- either side errs -----------------------------------------------------------------------------


def _alarms(lab: Any, formula: Compare, runs: int) -> float:
    """Return how often a mean of zero is reported as a violation."""
    generator, found = np.random.default_rng(3), 0
    for run in range(runs):
        noise = generator.normal(size=(40, 1)).tolist()
        units = [SamplingUnit(str(i), 1, {"log_ratio": np.array(v)}) for i, v in enumerate(noise)]
        data = SliceData("all", tuple(units))
        found += verdict(lab, formula, data, sample=True, seed=run) == "violated"
    return found / runs


@pytest.mark.full
def test_two_sided_magnitudes_keep_their_false_alarm_rate(
    lab: Any,
) -> None:
    """|mean| <= τ for τ far below the noise, and mean == 0, are violated by chance at most in 5 %.

    The level is not spent once for each side.
    """
    runs, mean = 400, lab.statistic("mean", "log_ratio")
    limit = 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert _alarms(lab, Compare("<=", Abs(mean), Number(Fraction(1, 1000))), runs) <= limit
    assert _alarms(lab, Compare("==", mean, Number(Fraction(0))), runs) <= limit


def test_far_side_of_a_magnitude_keeps_its_level(lab: Any) -> None:
    """Two one-sided tests need no correction: the limit away from 0 is that of the mean."""
    rng = np.random.default_rng(4)
    values = (rng.normal(size=50) + 2).tolist()
    data = SliceData(
        "all",
        tuple(SamplingUnit(str(i), 1, {"log_ratio": np.array([v])}) for i, v in enumerate(values)),
    )
    mean = lab.statistic("mean", "log_ratio")
    clause = lab.clause(Abs(mean), limit="5", evidence=EvidenceKind.SAMPLE)
    row = decide_clause(clause, lab.program(clause), data, seed=0, confidence=ONE_LOOK)
    plain = bootstrap.clustered_ratio(values, np.ones(50), seed=0)
    halved = bootstrap.clustered_ratio(values, np.ones(50), seed=0, confidence=ONE_LOOK.divided(2))
    assert (row.low, row.high) == (halved.low, plain.high)
    assert halved.low is not None
    assert plain.low is not None
    assert 0 < halved.low < plain.low


@pytest.mark.full
def test_magnitude_of_a_paired_difference_keeps_its_error_rate(lab: Any) -> None:
    """`reward_delta` and similar metrics are magnitudes of means, decided alike."""
    generator, runs, found = np.random.default_rng(5), 400, 0
    for run in range(runs):
        rows = generator.normal(size=40)
        units = tuple(
            SamplingUnit(str(i), 1, {"reward_delta": np.array([v])}) for i, v in enumerate(rows)
        )
        data = SliceData("all", units, measures={**MEASURES, **RECORDED})
        estimate = slice_metric(Metric("reward_delta"), data, Settings(run, ONE_LOOK))
        assert estimate is not None
        assert estimate.low is not None
        found += estimate.low > 0.001
    assert found / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


@pytest.mark.parametrize(
    ("values", "found"),
    [([1.0, 0.0], "violated"), ([0.0, 0.5], "violated"), ([1.0, 1.0], "held")],
)
@pytest.mark.parametrize("evidence", [EvidenceKind.CENSUS, EvidenceKind.SAMPLE])
@pytest.mark.parametrize("budget", [None, ("1/20", "requests")])
def test_equality_of_a_percentile_uses_both_tails(
    lab: Any,
    values: list[float],
    found: str,
    evidence: EvidenceKind,
    budget: tuple[str, str] | None,
) -> None:
    """Tokens with another top choice differ from 100 %, although the best token has it."""
    clause = lab.clause(
        lab.statistic("quantile", "top1_overlap", "1/2"),
        "==",
        "1",
        evidence=evidence,
        budget=budget,
    )
    data = lab.slice_data({"top1_overlap": [values] * 100})
    row = decide_clause(clause, lab.program(clause), data, seed=0)
    assert verdict_name(row.verdict) == found
    assert row.exceedance is not None
    assert row.exceedance.k == (100 if found == "violated" else 0)
    assert row.value == min(values)
