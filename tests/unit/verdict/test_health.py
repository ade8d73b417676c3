"""Health score and severity: families x levels, tau = 0, NaN, many clauses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.ir.escalation import ACTIONS, FAMILY_DEFAULTS, build_escalation, severity
from kcdsl.ir.terms import Family, Level
from kcdsl.verdict.health import Health, assess, deviation, over_budget, recommend
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.result import ClauseResult

POLICY = build_escalation({}, {})
FINE = assess([], POLICY)


def row(
    level: Level | str = "L2",
    verdict: Verdict | None = None,
    *,
    deviates: float = 0.5,
    action: str | None = None,
    clause: str = "N-1",
    slice: str = "all",
    budget: str | None = None,
) -> ClauseResult:
    """Return a result, by default violated."""
    return ClauseResult(
        clause=clause,
        family="numerical",
        level=str(level),
        slice=slice,
        requirement="p99(kl) <= 1",
        metric="p99(kl)",
        unit="nat",
        op="<=",
        value=1.5,
        low=None,
        high=None,
        n=10,
        counted="requests",
        threshold=1.0,
        verdict=Violated() if verdict is None else verdict,
        evidence="sample",
        confidence=None,
        budget=budget,
        action=action,
        deviation=deviates,
    )


@pytest.mark.parametrize(("family", "level"), list(itertools.product(Family, Level)))
def test_every_family_and_level_gives_its_documented_action(family: Family, level: Level) -> None:
    action = POLICY.action(family, level)
    assert action == FAMILY_DEFAULTS[family, level]
    one = [row(level, action=action)]
    assert recommend(one, FINE) == action
    assert severity(recommend(one, assess(one, POLICY))) >= severity(action)


@pytest.mark.parametrize(
    ("first", "second"),
    list(itertools.combinations(list(itertools.product(Family, Level)), 2)),
)
def test_most_severe_violation_decides(
    first: tuple[Family, Level], second: tuple[Family, Level]
) -> None:
    called = [(level, POLICY.action(family, level)) for family, level in (first, second)]
    rows = [row(level, action=action) for level, action in called]
    chosen = recommend(rows, FINE)
    top = max(level for level, _ in called)
    assert chosen in [action for level, action in called if level == top]
    assert severity(chosen) == max(severity(a) for level, a in called if level == top)
    assert recommend(rows[::-1], FINE) == chosen


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("score", ["log", "guard", "fallback"])
def test_paper_defect_6_score_can_only_raise_an_action(action: str, score: str) -> None:
    chosen = recommend([row("L2", action=action)], Health(0.0, score, 1.0, 3.0))
    assert severity(chosen) == max(severity(action), severity(score))


@pytest.mark.parametrize("deviates", [0.0, 0.5, 74.0, 1e300, math.inf, math.nan])
@pytest.mark.parametrize("verdict", [Violated(), InvalidEvidence("no values")])
@pytest.mark.parametrize("count", [1, 2, 50])
def test_score_reaches_the_threshold_of_each_level(
    deviates: float, verdict: Verdict, count: int
) -> None:
    for level, asked in ((Level.L1, "log"), (Level.L2, "guard"), (Level.L3, "fallback")):
        rows = [row(level, verdict, deviates=deviates, clause=f"C-{i}") for i in range(count)]
        health = assess(rows, POLICY)
        assert health.action == asked
        assert health.deviation > 0
        assert health.score < 1
        assert (health.deviation >= 1, health.deviation >= 3) == (level >= "L2", level == "L3")


def test_single_violated_l1_clause_is_logged() -> None:
    rows = [row("L1", deviates=math.inf, action="log")]
    assert recommend(rows, assess(rows, POLICY)) == "log"


def test_soft_l2_clause_far_over_budget_is_not_a_fallback() -> None:
    v = over_budget(0.75, 0.01)
    assert 0 < v < 1
    rows = [row("L2", deviates=v, action="other_decoding", budget="1% of requests")]
    assert recommend(rows, assess(rows, POLICY)) == "guard"


@pytest.mark.parametrize(("level", "action"), [("L1", "log"), ("L2", "guard"), ("L3", "freeze")])
def test_undecided_hard_clause_reduces_health(level: str, action: str) -> None:
    rows = [row(level, Inconclusive("too few"), deviates=0.0, action=action)]
    health = assess(rows, POLICY)
    assert 0.5 < health.score < 1
    assert health.action == "log"
    assert recommend(rows, health) == action
    soft = [replace(rows[0], budget="1% of requests", action=None)]
    assert assess(soft, POLICY) == FINE


def test_undecided_l3_clause_does_not_hide_a_violated_l2_clause() -> None:
    rows = [
        row("L2", action="rollback"),
        row("L3", Inconclusive("too few"), action="freeze", clause="N-2"),
    ]
    assert recommend(rows, assess(rows, POLICY)) == "rollback"


def test_contract_sets_the_thresholds() -> None:
    policy = replace(POLICY, guard_from=Fraction(1, 10), fallback_from=Fraction(20))
    mild, bad, worst = (assess([row(level)], policy) for level in Level)
    assert mild.deviation < 0.1 <= bad.deviation < 20 <= worst.deviation
    assert bad.to_json()["guard_from"] == 0.1
    assert bad.to_json()["fallback_from"] == 20.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Level)),
            st.floats(min_value=0) | st.just(math.nan),
            st.sampled_from([Held(), Violated(), Inconclusive("x"), InvalidEvidence("x")]),
        ),
        max_size=12,
    )
)
def test_more_events_never_improve_health(
    events: list[tuple[Level, float, Verdict]],
) -> None:
    rows = [
        row(level, verdict, deviates=v, clause=f"C-{i}")
        for i, (level, v, verdict) in enumerate(events)
    ]
    before = 0.0
    for count in range(len(rows) + 1):
        health = assess(rows[:count], POLICY)
        assert health.deviation >= before
        before = health.deviation
    assert assess(rows[::-1], POLICY).deviation == pytest.approx(before)


def test_no_event_needs_no_action_and_the_worst_slice_counts() -> None:
    assert (FINE.deviation, FINE.score, FINE.action) == (0.0, 1.0, "log")
    assert recommend([], FINE) == "log"
    assert assess([row("L3", Held())], POLICY) == FINE
    slices = [row("L2", deviates=0.2), row("L2", deviates=0.5, slice="long")]
    assert assess(slices, POLICY) == assess(slices[1:], POLICY)
    assert Health(math.inf, "fallback", 1.0, 3.0).to_json()["deviation"] is None


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


@pytest.mark.parametrize(
    ("rate", "budget", "wanted"),
    [(0.0, 0.01, 0.0), (0.01, 0.01, 0.0), (1.0, 0.01, 1.0), (0.505, 0.01, 0.5), (0.5, 0.0, 0.5)],
)
def test_deviation_of_a_budget_is_relative_to_the_remaining_share(
    rate: float, budget: float, wanted: float
) -> None:
    assert over_budget(rate, budget) == pytest.approx(wanted)


def test_paper_defect_9_zero_threshold_is_defined_and_nan_fails() -> None:
    assert deviation(0.0, 0.0, "lower") == 0
    assert deviation(1e-300, 0.0, "lower") == math.inf
    for value, threshold in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)):
        assert deviation(value, threshold, "lower") == math.inf
    for rate, budget in ((math.nan, 0.1), (0.5, math.nan), (0.5, 1.0), (-0.1, 0.5), (1.1, 0.5)):
        assert over_budget(rate, budget) == math.inf
    for v in (math.nan, -1.0, math.inf):
        lost = assess([row("L3", deviates=v)], POLICY)
        assert (lost.deviation, lost.score, lost.action) == (math.inf, 0.0, "fallback")
