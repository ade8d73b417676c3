"""Backends of this distribution pass the conformance kit, and wrong ones fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import EvidenceKind
from kcdsl.route.goals import Goal
from kcdsl.verdict.model import Evidence, Held, Inconclusive, Verdict, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_backends.certifier.backend import BACKEND as CERTIFIER
from kcdsl_backends.conformance.__main__ import main
from kcdsl_backends.conformance.campaign import RandomGoal, answered, campaign, judged, monotone
from kcdsl_backends.conformance.goals import KnownAnswer, KnownGoal, known_goals
from kcdsl_backends.lirpa.backend import BACKEND as LIRPA
from kcdsl_backends.smt.drift.backend import BACKEND as Z3

GOALS = {goal.name: goal for goal in known_goals()}
TRUE = GOALS["ordinary numbers: a rounding is at most a little more"]
FALSE = GOALS["ordinary numbers: a rounding is not below a little less"]


class Says:
    """A backend that gives one answer to every goal."""

    name = "says"

    def __init__(self, verdict: Verdict | Callable[[Goal], Verdict], bound: float = 1.0) -> None:
        self.verdict, self.bound = verdict, bound

    def decide(
        self, program: Any, base: Any, goals: Sequence[Goal], **_: Any
    ) -> tuple[GoalOutcome, ...]:
        """Return the answer for every goal."""
        said = self.verdict
        return tuple(
            GoalOutcome(
                goal,
                said(goal) if callable(said) else said,
                Evidence(EvidenceKind.PROOF),
                self.name,
                (CaseOutcome("a", 2, self.bound),),
                0.0,
                0,
            )
            for goal in goals
        )


class Raises(Says):
    """A backend that refuses, or raises an internal error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def decide(self, *_: Any, **__: Any) -> tuple[GoalOutcome, ...]:
        """Raise."""
        raise self.error


@pytest.mark.parametrize(
    ("backend", "goal", "told"),
    [
        (Says(Held()), FALSE, "the answer is violated"),
        (Says(Held()), GOALS["an empty region"], "the answer is open"),
        (Says(Held()), GOALS["a weight is NaN"], "the answer is open"),
        (Says(Violated()), TRUE, "the answer is held"),
        (Says(Held(), bound=math.inf), TRUE, "without a finite bound"),
        (Says(Held(), bound=1e-9), TRUE, "which a run attains"),
        (Says(Inconclusive("too hard"), bound=1e-9), TRUE, "which a run attains"),
        (Says(Inconclusive(" ")), TRUE, "without a reason"),
        (Raises(ZeroDivisionError("division")), TRUE, "ZeroDivisionError"),
        (Says(Held()), TRUE, ""),
        (Says(Violated()), FALSE, ""),
        (Says(Inconclusive("too hard")), TRUE, ""),
        (Raises(refuse(codes.NO_BACKEND, "not here", help="elsewhere")), TRUE, ""),
    ],
)
def test_only_wrong_answers_are_reported(backend: Any, goal: KnownGoal, told: str) -> None:
    found = judged(goal, answered(backend, goal))
    assert told in found.wrong
    assert bool(told) is bool(found.wrong)


def test_contradictory_limits_are_reported() -> None:
    """Small limits hold and large ones do not: each answer alone may be right."""

    def upside_down(goal: Goal) -> Verdict:
        return Held() if goal.admits(0.01) is False else Violated()

    assert "holds and" in monotone(Says(upside_down)).wrong
    assert not monotone(Says(lambda goal: Held() if goal.admits(0.01) else Violated())).wrong


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", GOALS)
def test_certifier_passes_the_kit(name: str) -> None:
    goal = GOALS[name]
    found = judged(goal, answered(CERTIFIER, goal))
    assert not found.wrong
    exact = name in ("no drift is at most 0", "ordinary numbers: a rounding is at most itself")
    if goal.answer is KnownAnswer.TRUE and not exact:  # bounds are rounded up
        assert found.verdict == "held"


@pytest.mark.full
@pytest.mark.parametrize("name", GOALS)
@pytest.mark.parametrize("backend", [LIRPA, Z3], ids=["lirpa", "z3"])
def test_real_arithmetic_backends_pass_the_kit(backend: Any, name: str) -> None:
    goal = GOALS[name]
    assert not judged(goal, answered(backend, goal, "proof-real")).wrong


def test_bounds_below_a_run_or_above_a_coarser_one_are_reported() -> None:
    def found(**bounds: float) -> str:
        both = {"interval": 2.0, "interval alone": 3.0}
        return RandomGoal(1, ("relu",), 0.0, 1.5, {**both, **bounds}).wrong

    assert not found(mine=1.5)
    assert "below the run" in found(mine=1.4)
    assert "intervals alone" in found(interval=3.1)


@pytest.mark.full
def test_bounds_of_random_blocks_are_above_runs() -> None:
    """The certifier draws the run; a backend that always returns 0 is contradicted."""
    (one,) = campaign({"lirpa": LIRPA, "says": Says(Held(), bound=0.0)}, 1, 2)
    assert one.attack > 0
    assert "says: the bound 0.0 is below the run" in one.wrong
    assert one.bounds["lirpa"] >= one.attack


@pytest.mark.full
@pytest.mark.parametrize("first", [1, 11, 21, 31, 41, 51])
def test_bounds_of_many_random_blocks_are_above_runs(first: int) -> None:
    for one in campaign({"lirpa": LIRPA, "z3": Z3}, 10, first):
        assert not one.wrong, one


def test_unknown_backend_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nobody"]) == 2
    assert "there is no backend 'nobody'" in capsys.readouterr().err
