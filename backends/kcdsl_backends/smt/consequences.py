"""What follows from the violation of a clause, and which consequences cover which.

A clause can be dropped for the sake of others only if nothing is lost: whenever it is violated, one
of the others is, and each of them has the level, the action and the demand of evidence that the
dropped one has, or more. A looser bound of a higher level says something of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kcdsl.ir.escalation import kind
from kcdsl.ir.terms import Clause, EvidenceKind, Level, Program

LEVELS = tuple(Level)
_STRONGEST_FIRST = tuple(EvidenceKind)


def action_of(program: Program, clause: Clause) -> str | None:
    """Return the action that a violation leads to; None where the program has no policy."""
    if clause.action is not None:
        return clause.action
    try:
        return program.escalation.action(clause.family, clause.level)
    except KeyError:
        return None


def evidence_rank(demanded: EvidenceKind | None) -> int:
    """Return how much a demand of evidence excludes: 0 for none."""
    if demanded is None:
        return 0
    return len(_STRONGEST_FIRST) - _STRONGEST_FIRST.index(demanded)


def covers(program: Program) -> Callable[[Clause, Clause], bool]:
    """Return covers(a, b): a violation of `a` has every consequence that one of `b` has.

    A held-out clause does not stand for one that training is to see.
    """
    return _covers(program, program, lambda a, b: b.holdout or not a.holdout)


def covers_between(first: Program, second: Program) -> Callable[[Clause, Clause], bool]:
    """Return covers(a, b) for a clause `a` of the first program and `b` of the second.

    What was held out is not shown to training for the sake of another clause either.
    """
    return _covers(first, second, lambda a, b: a.holdout is b.holdout)


def _covers(
    first: Program, second: Program, may_stand: Callable[[Clause, Clause], bool]
) -> Callable[[Clause, Clause], bool]:
    known: dict[tuple[bool, str], _Consequences] = {}
    answers: dict[tuple[_Consequences, _Consequences], bool] = {}

    def consequences(clause: Clause, own: bool) -> _Consequences:
        key = own, clause.id
        if key not in known:
            level, evidence = LEVELS.index(clause.level), evidence_rank(clause.evidence)
            action = action_of(first if own else second, clause)
            known[key] = _Consequences(level, action, evidence)
        return known[key]

    def compare(a: Clause, b: Clause) -> bool:
        pair = consequences(a, True), consequences(b, False)
        if pair not in answers:
            answers[pair] = pair[0].cover(pair[1])
        return answers[pair] and may_stand(a, b)

    return compare


@dataclass(frozen=True, slots=True)
class _Consequences:
    level: int
    action: str | None
    evidence: int

    def cover(self, other: _Consequences) -> bool:
        return (
            self.level >= other.level
            and acts_as_severely(self.action, other.action)
            and self.evidence >= other.evidence
        )


def acts_as_severely(first: str | None, second: str | None) -> bool:
    """Say whether one action is the same as another, or of a more severe kind."""
    if first is None or second is None or first == second:
        return first == second or second is None
    return kind(first) > kind(second)
