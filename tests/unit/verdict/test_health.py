"""Health score, severity and their combination: families x levels, tau = 0, NaN."""

from __future__ import annotations

import itertools
import math

import pytest

from kcdsl.check.escalation import ACTIONS, FAMILY_DEFAULTS, build_escalation, severity
from kcdsl.ir.terms import Family, Level
from kcdsl.verdict.health import (
    ETA_FALLBACK,
    ETA_GUARD,
    Health,
    assess,
    deviation,
    recommend,
    score_action,
)

FINE = Health(0.0, "log")


@pytest.mark.parametrize(("family", "level"), list(itertools.product(Family, Level)))
def test_every_family_and_level_gives_its_documented_action(family: Family, level: Level) -> None:
    action = build_escalation({}, {}).action(family, level)
    assert action == FAMILY_DEFAULTS[family, level]
    assert recommend([(level, action)], FINE) == action


@pytest.mark.parametrize(
    ("first", "second"),
    list(itertools.combinations(list(itertools.product(Family, Level)), 2)),
)
def test_the_most_severe_of_two_violations_decides(
    first: tuple[Family, Level], second: tuple[Family, Level]
) -> None:
    policy = build_escalation({}, {})
    called = [(level, policy.action(family, level)) for family, level in (first, second)]
    chosen = recommend(called, FINE)
    top = max(level for level, _ in called)
    assert chosen in [action for level, action in called if level == top]
    assert severity(chosen) == max(severity(a) for level, a in called if level == top)
    assert recommend(called[::-1], FINE) == chosen


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("total", [0.0, ETA_GUARD, ETA_FALLBACK, math.inf])
def test_paper_defect_6_the_score_raises_an_action_and_never_lowers_it(
    action: str, total: float
) -> None:
    health = Health(total, score_action(total))
    chosen = recommend([(Level.L2, action)], health)
    assert severity(chosen) == max(severity(action), severity(health.action))
    assert severity(chosen) >= severity(action)


def test_paper_defect_6_many_small_deviations_add_up_and_one_severe_one_does_not_vanish() -> None:
    many = assess({f"R-{i}": [0.5] for i in range(8)})
    assert many.action == "fallback"
    assert recommend([(Level.L1, "log")], many) == "fallback"
    tiny = assess({"S-1": [1e-9]})
    assert tiny.action == "log"
    assert recommend([(Level.L3, "rollback")], tiny) == "rollback"


def test_no_violation_and_no_deviation_ask_for_nothing() -> None:
    assert recommend([], FINE) == "log"
    assert assess({}) == FINE
    assert assess({"N-1": []}).deviation == 0


@pytest.mark.parametrize(
    ("value", "threshold", "better", "wanted"),
    [
        (0.5, 1.0, "lower", 0.0),
        (1.0, 1.0, "lower", 0.0),
        (3.0, 1.0, "lower", 2.0),
        (0.9, 1.0, "higher", 0.1),
        (1.5, 1.0, "higher", 0.0),
        (-1.0, -2.0, "lower", 0.5),
    ],
)
def test_deviation_is_relative_to_the_threshold(
    value: float, threshold: float, better: str, wanted: float
) -> None:
    assert deviation(value, threshold, better) == pytest.approx(wanted)


def test_paper_defect_9_a_threshold_of_zero_is_defined_and_nan_fails_closed() -> None:
    assert deviation(0.0, 0.0, "lower") == 0
    assert deviation(1e-300, 0.0, "lower") == math.inf
    for value, threshold in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)):
        assert deviation(value, threshold, "lower") == math.inf
    lost = assess({"N-1": [math.nan], "N-2": [0.0]})
    assert (lost.deviation, lost.score, lost.action) == (math.inf, 0.0, "fallback")
    assert assess({"N-1": [math.inf]}).score == 0
    assert assess({"N-1": [-1.0]}).action == "fallback"
    assert score_action(math.nan) == "fallback"


def test_the_score_is_exp_of_minus_the_sum_of_the_worst_slices() -> None:
    health = assess({"N-1": [0.2, 0.5], "S-1": [0.25]})
    assert health.deviation == 0.75
    assert health.score == pytest.approx(math.exp(-0.75))
    assert health.action == "log"
    assert Health(math.inf, "fallback").to_json()["deviation"] is None
