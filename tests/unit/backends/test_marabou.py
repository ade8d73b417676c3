"""Marabou agrees with z3 on its queries, and its bounds are above runs."""

from __future__ import annotations

import math

import pytest

from kcdsl_backends.conformance.campaign import answered, campaign, judged
from kcdsl_backends.conformance.goals import known_goals
from kcdsl_backends.smt.drift.backend import DriftGoal
from kcdsl_backends.smt.drift.forms import Constraint, Inequality
from kcdsl_backends.smt.drift.marabou import BACKEND, MarabouQuestion
from kcdsl_backends.smt.drift.search import DriftElement, DriftQuestion, Search
from kcdsl_backends.smt.solver import Outcome
from tests.unit.backends.test_z3_drift import KERNELS, Rectified, attained, problem_of, radius_of

GOALS = {goal.name: goal for goal in known_goals()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernel", ["bfloat16 any", "fp8 weights", "fp8"])
@pytest.mark.parametrize("size", [0.05, pytest.param(0.5, marks=pytest.mark.full)])
@pytest.mark.parametrize("maximum", [False, True])
def test_answers_agree_with_z3(kernel: str, size: float, maximum: bool) -> None:
    problem, centre = problem_of(Rectified(3, 4, maximum=maximum), 3, KERNELS[kernel])
    posed = DriftGoal.of(problem, centre, radius_of(size))
    decided = 0
    for target in posed.targets[:4]:
        for share in (0.3, 0.6, 0.9, 1.01):
            threshold = share * target.high
            says = DriftQuestion(target).reaches(threshold, 20.0)
            if says is not Outcome.UNKNOWN:
                assert MarabouQuestion(target).reaches(threshold, 20.0) is says
                decided += 1
    assert decided


@pytest.mark.parametrize("scale", [1.0, 2.0**-200, 2.0**200])
def test_case_split_bounds_hold_at_every_scale(scale: float) -> None:
    """x + y <= 1 or x <= -1: x + y/2 is at most 1.5, or 1 if the first case is missing."""
    either = Constraint(
        (
            (Inequality((0, 1), (scale, scale), -scale),),
            (Inequality((0,), (scale,), scale),),
        )
    )
    aim = Inequality((0, 1), (scale, scale / 2), 0.0)
    element = DriftElement(0, 1, aim, 0.0, (either,), high=1.5 * scale)
    assert MarabouQuestion(element).reaches(0.999 * scale, 20.0) is Outcome.SAT
    assert MarabouQuestion(element).reaches(1.001 * scale, 20.0) is Outcome.UNSAT
    free = DriftElement(0, 1, aim, 0.0, (Constraint(either.cases[1:]),), high=1.5 * scale)
    assert MarabouQuestion(free).reaches(-0.499 * scale, 20.0) is Outcome.UNSAT


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_non_finite_numbers_are_refused(number: float) -> None:
    """Marabou accepts them and solves another query."""
    aim = Inequality((0,), (1.0,), 0.0)
    for row in (Inequality((0,), (number,), 0.0), Inequality((0,), (1.0,), number)):
        element = DriftElement(0, 1, aim, 0.0, (Constraint(((row,),)),), high=1.0)
        assert MarabouQuestion(element).reaches(2.0, 20.0) is Outcome.UNKNOWN


@pytest.mark.full
def test_bounds_of_a_block_are_above_runs() -> None:
    problem, centre = problem_of(Rectified(2, 4), 2, KERNELS["fp8 weights"])
    posed = DriftGoal.of(problem, centre, radius_of(1.0))
    Search(posed.targets, 20.0, MarabouQuestion).tighten()
    bound, run = float(posed.box().mag().amax()), attained(problem, centre, 1.0)
    assert run <= bound <= 1.05 * run


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", GOALS)
def test_known_goals_are_answered_correctly(name: str) -> None:
    goal = GOALS[name]
    assert not judged(goal, answered(BACKEND, goal, "proof-real")).wrong


@pytest.mark.full
@pytest.mark.parametrize("first", [1, 11, 21])
def test_bounds_of_random_blocks_are_above_runs(first: int) -> None:
    for one in campaign({"marabou": BACKEND}, 10, first):
        assert not one.wrong, one
