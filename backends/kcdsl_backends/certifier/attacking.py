"""Attack the cases of a goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.attack.search import Attack, attack
from kcdsl_backends.certifier.bounding import Bounded
from kcdsl_backends.certifier.cases import Case
from kcdsl_backends.certifier.workshop import BlockProblem, Workshop
from kcdsl_backends.threads import threads_for


def attack_cases(
    shop: Workshop,
    goal: Goal,
    cases: Sequence[Case],
    bounded: Sequence[Bounded],
    wanted: bool,
) -> tuple[list[CaseOutcome], Attack | None]:
    """Attack the case with the largest bound, and every case that its bound leaves open."""
    results = [found.outcome for found in bounded]
    if not wanted or goal.functional == "no_flip":
        return results, None
    widest = max(range(len(results)), key=lambda i: results[i].bound)
    open_cases = [i for i, case in enumerate(results) if not goal.admits(case.bound)]
    strongest: Attack | None = None
    for index in dict.fromkeys([widest, *open_cases]):
        problem: BlockProblem = shop.problem(goal.block, cases[index].tokens)
        train, infer = problem.simulators()
        with threads_for(problem.size):
            found = attack(
                train,
                infer,
                goal.functional,
                cases[index].centre,
                cases[index].radius,
                seed=index,
                places=bounded[index].places,
            )
        results[index] = replace(results[index], attack=found.value)
        if strongest is None or found.value > strongest.value:
            strongest = found
        if goal.refuted_by(found.value):
            break
    return results, strongest
