"""Several backends for one contract: the cheapest first, others for clauses that remain open."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import BACKENDS_DISAGREE, NO_BACKEND
from kcdsl.ir.terms import EvidenceKind
from kcdsl.route.catalogue import BackendSpec, Fragment, is_foreign
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated, verdict_name

if TYPE_CHECKING:
    from kcdsl.api.backends import FormalBackend
    from kcdsl.route.goals import Goal
    from kcdsl.verdict.outcome import GoalOutcome

AUTO = "auto"
"""The name that selects all backends."""

Load = Callable[[float | None], "FormalBackend"]
"""Loads a backend with a time limit in seconds for all its answers, None for the default."""
Ask = Callable[["FormalBackend", Sequence["Goal"], float | None], Sequence["GoalOutcome"]]
"""Asks a backend about goals with a time limit in seconds, None for no limit."""


@dataclass(slots=True)
class _Asked:
    """The answers about a goal so far, and why some backends were not asked or failed."""

    goal: Goal
    answers: list[tuple[BackendSpec, GoalOutcome]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """Return whether no other backend needs to be asked."""
        return any(
            isinstance(outcome.verdict, Held | Violated | InvalidEvidence)
            for _, outcome in self.answers
        )

    def outcome(self) -> GoalOutcome:
        """Return the deciding answer, or else the one with the smallest bound, with notes on all
        others."""
        decisive = [o for _, o in self.answers if not isinstance(o.verdict, Inconclusive)]
        _, least = min(self.answers, key=lambda one: (_is_unproved(*one), one[1].bound))
        best = decisive[0] if decisive else least
        told = [_told(outcome) for _, outcome in self.answers if outcome is not best]
        by = f"decided by {best.backend}" if decisive else "decided by no backend"
        name = self.goal.clause.id
        note = "; ".join([f"{name}: {by}", *told, *self.left_out])
        return replace(best, notes=(*best.notes, note))


def decide_together(
    offers: Sequence[tuple[BackendSpec, Load]],
    goals: Sequence[Goal],
    ask: Ask,
    seconds: float | None,
) -> tuple[GoalOutcome, ...]:
    """Decide each goal by the first backend that can; outcomes come in the order of the goals.

    If a backend of another distribution gives no usable answer, the next one is asked.

    Args:
        offers: backends in the order in which they are asked, with their loaders; not empty.
        goals: the goals to decide.
        ask: asks one backend.
        seconds: time limit of all backends and searches.

    Raises:
        Refusal: KC479 where two backends contradict each other, KC402 for a goal that none decides.
    """
    begun, asked = time.monotonic(), [_Asked(goal) for goal in goals]
    for number, (spec, load) in enumerate(offers):
        taken = [each for each in asked if _takes(spec, each)]
        left = None if seconds is None else seconds - (time.monotonic() - begun)
        if number and left is not None and left <= 0:
            for each in taken:
                each.left_out.append(f"{spec.name}: not tried, the time limit had passed")
            continue
        if not taken:
            continue
        try:
            outcomes = ask(load(left), [each.goal for each in taken], left)
        except Refusal as refusal:
            (first, *_) = refusal.diagnostics
            if first.code != NO_BACKEND or not is_foreign(spec):
                raise
            for each in taken:
                each.left_out.append(f"{spec.name}: failed, {first.message}")
            continue
        answered = {outcome.goal.obligation.id: outcome for outcome in outcomes}
        for each in taken:
            each.answers.append((spec, answered[each.goal.obligation.id]))
            _refuse_contradiction(each)
    for each in asked:
        if not each.answers:
            raise refuse(
                NO_BACKEND,
                f"no installed backend decides {each.goal.clause.id}",
                notes=tuple(each.left_out),
                help="`kcdsl explain CLAUSE` says which backend could",
            )
    return tuple(each.outcome() for each in asked)


def _takes(spec: BackendSpec, asked: _Asked) -> bool:
    """Return whether a backend is asked about a goal; record the reason if not."""
    goal = asked.goal
    if asked.settled:
        return False
    reason = ""
    if goal.functional == "no_flip" and Fragment.UNIVERSAL_FLIP not in spec.fragments:
        reason = "does not decide the order of logits"
    elif (goal.weights or goal.states) and not spec.around_weights:
        reason = "decides for the weights of the checkpoint alone"
    elif spec.real_arithmetic and goal.clause.evidence is not EvidenceKind.PROOF_REAL:
        reason = "the clause does not admit `evidence: proof-real`"
    if reason:
        asked.left_out.append(f"{spec.name}: not tried, {reason}")
    return not reason


def _is_unproved(spec: BackendSpec, outcome: GoalOutcome) -> bool:
    """Return whether a bound is an unproved claim of another distribution."""
    return is_foreign(spec) and not outcome.confirmed


def proved(outcome: GoalOutcome) -> float:
    """Return the proved bound of an outcome for all runs; infinite without one."""
    likely = any(case.alpha is not None for case in outcome.cases)
    return math.inf if likely or outcome.goal.functional == "no_flip" else outcome.bound


def _refuse_contradiction(asked: _Asked) -> None:
    """Raise KC479 where a backend proves a goal or a bound, and another one has a run that
    contradicts it."""
    for (one, holds), (other, breaks) in permutations(asked.answers, 2):
        told = ""
        if isinstance(holds.verdict, Held) and isinstance(breaks.verdict, Violated):
            told = f"{one.name} shows that it holds, and {other.name} has a run that breaks it"
        elif _is_unproved(one, holds) or is_foreign(other) or breaks.attack is None:
            continue
        elif breaks.attack > proved(holds):
            told = (
                f"{one.name} bounds the drift by {proved(holds):.6g}, and {other.name} has a run "
                f"with {breaks.attack:.6g}"
            )
        if told:
            raise refuse(
                BACKENDS_DISAGREE,
                f"backends contradict each other about {asked.goal.clause.id}: {told}",
                span=asked.goal.span,
                help="one of them is wrong; decide with a single one by --backend, and report it",
            )


def _told(outcome: GoalOutcome) -> str:
    """Return the result of a backend in a few words."""
    match outcome.verdict:
        case Inconclusive(reason) | InvalidEvidence(reason):
            return f"{outcome.backend}: {verdict_name(outcome.verdict)}, {reason}"
        case verdict:
            return f"{outcome.backend}: {verdict_name(verdict)}"
