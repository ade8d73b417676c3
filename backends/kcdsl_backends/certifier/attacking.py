"""Attack the cases of a goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.attack.recording import attained, record_run
from kcdsl_backends.attack.runs import Attack, attack_of
from kcdsl_backends.attack.search import attack, with_orders
from kcdsl_backends.attack.simulate import Overflowed
from kcdsl_backends.certifier.bounding import Bounded
from kcdsl_backends.certifier.cases import Case
from kcdsl_backends.certifier.workshop import BlockProblem, Workshop
from kcdsl_backends.threads import one_thread, threads_for


def worth_attacking(goal: Goal, outcomes: Sequence[CaseOutcome]) -> list[int]:
    """Return which cases to attack, in order: the one with the largest bound, and every case that
    its bound leaves open. The search ends at the first that refutes the goal."""
    if goal.functional == "no_flip":
        return []
    widest = max(range(len(outcomes)), key=lambda i: outcomes[i].bound)
    still_open = [i for i, case in enumerate(outcomes) if not goal.admits(case.bound)]
    return list(dict.fromkeys([widest, *still_open]))


def attack_case(shop: Workshop, goal: Goal, case: Case, bounded: Bounded) -> Attack:
    """Search for runs of one case with a large drift; the same case gives the same runs.

    The result is plain data. It has the record of its run only where it refutes the goal: then, if
    a run with concrete orders of all sums does so too, it is that one. Where no run stays inside of
    its formats it is 0, of no run. Of a region of any length those sequences are attacked that are
    as long as the tokens the region came from.
    """
    any_length, case = case.longest is not None, case.at_its_length
    problem: BlockProblem = shop.problem(goal.block, case.tokens)
    places = _in_last_row(problem, bounded.places) if any_length else bounded.places
    train, infer = problem.simulators()
    with threads_for(problem.size):
        try:
            found = attack(
                train,
                infer,
                goal.functional,
                case.centre,
                case.radius,
                seed=case.seed,
                places=places,
            )
        except Overflowed:  # whatever runs here leaves its formats, or exceeds a static scale
            row = (0,) * (len(problem.graph.node(problem.graph.output).shape) - 1)
            return Attack(0.0, row, 0, 0.0, 0.0)
        if found.run is None or not goal.refuted_by(found.value):
            return replace(found, run=None)
        run = found.run
        ordered = with_orders(run, train, infer, goal.functional)
        if ordered is not None and ordered.run is not None and goal.refuted_by(ordered.value):
            run = ordered.run
    with one_thread():
        again = attack_of(run, train, infer, goal.functional)
    if again is None or not goal.refuted_by(again.value):
        return replace(found, run=None)
    return replace(found, run=None, record={**record_run(run), "attained": attained(again)})


def _in_last_row(problem: BlockProblem, places: Sequence[int]) -> tuple[int, ...]:
    """Return the same columns of the last row, which under a causal mask reads the most others."""
    output = problem.graph.node(problem.graph.output).shape
    first = math.prod(output) - output[-1]
    return tuple(dict.fromkeys(first + place % output[-1] for place in places))
