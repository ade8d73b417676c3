"""Planted mistakes are diagnosed exactly; correct kernels have no diagnosis."""

from __future__ import annotations

import pytest

from tests.support.planted_bugs import CLEAN, PLANTED, clean_run, named, planted_run, prompts


@pytest.mark.sample(2)
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_mistake_is_the_only_diagnosis(bug: str) -> None:
    planted = PLANTED[bug]
    found = planted_run(bug)
    assert named(found) == (planted.diagnosis,)
    check = next(c for c in found if c.name == planted.diagnosis)
    assert planted.words in check.detail


@pytest.mark.sample(2)
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_mistake_is_diagnosed_on_other_prompts(bug: str) -> None:
    assert named(planted_run(bug, prompts()[20:30])) == (PLANTED[bug].diagnosis,)


@pytest.mark.sample(1)
@pytest.mark.parametrize("run", range(len(CLEAN)))
def test_correct_run_has_no_diagnosis(run: int) -> None:
    assert named(clean_run(run)) == ()


def test_fifty_correct_runs_are_tested() -> None:
    assert len(CLEAN) == 50
