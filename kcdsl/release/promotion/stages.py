"""The four stages of a promotion: the clauses that each demands, and its reaction to a violation.

| stage | traffic | demanded |
|---|---|---|
| offline-ci | pinned rows | every hard clause; deterministic clauses of the families N, S, O |
| shadow | mirrored | clauses about traffic: families S and O, and N if soft or sampled |
| canary | a small live share | every clause, R included |
| full | all of it | every clause, repeatedly |

Source: section 7.1 of the paper. A violated clause counts at every stage, demanded or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Protocol

from kcdsl.ir.escalation import kind
from kcdsl.ir.obligations import obligations_of, slices_of
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Clause, Family, Level, Program
from kcdsl_certs.statement import STAGES

OFFLINE, SHADOW, CANARY, FULL = STAGES


class Reaction(StrEnum):
    """The reaction to a violated clause, mildest first."""

    BLOCK = "block"
    """The candidate does not advance."""
    FREEZE = "freeze"
    """The candidate keeps its stage, and no evidence advances it."""
    ROLL_BACK = "roll-back"
    """The candidate is withdrawn: the incumbent becomes live again."""


_ORDER = tuple(Reaction)
_BY_LEVEL = {Level.L1: Reaction.BLOCK, Level.L2: Reaction.FREEZE, Level.L3: Reaction.ROLL_BACK}
_BY_ACTION = {
    kind("freeze"): Reaction.FREEZE,
    kind("fallback"): Reaction.ROLL_BACK,
    kind("rollback"): Reaction.ROLL_BACK,
}


def reaction(stage: str, level: Level, action: str, live: bool = False) -> Reaction:
    """Return the reaction of a stage to a violated clause of a level with this action.

    The level decides, in every family: L1 blocks, L2 freezes, L3 rolls back. The action of the
    clause can only make the reaction more severe. Offline, the candidate is blocked; one that is
    `live`, because it restarted, can be rolled back.
    """
    found = worst_reaction((_BY_LEVEL[level], _BY_ACTION.get(kind(action), Reaction.BLOCK)))
    if stage == OFFLINE and not (live and found is Reaction.ROLL_BACK):
        return Reaction.BLOCK
    return found


def worst_reaction(reactions: tuple[Reaction, ...]) -> Reaction:
    """Return the most severe of several reactions."""
    return max(reactions, key=_ORDER.index)


def following(stage: str) -> str:
    """Return the stage after this one; `full` is the last and follows itself."""
    return STAGES[min(STAGES.index(stage) + 1, len(STAGES) - 1)]


# --- demands --------------------------------------------------------------------------------------


class LookRules(Protocol):
    """Sequential tests of a measuring backend on counts that grow from look to look.

    A backend of the catalogue provides them (`BackendSpec.looks`), because the statistics need
    packages that are not imported here.
    """

    def allowed_rate(self, clause: Clause) -> Fraction | None:
        """Return the share of units that may be beyond: 0 if all units must pass, None if the
        clause is not about units."""

    def varies(self, clause: Clause, program: Program) -> bool:
        """Return whether repeated runs of the same requests give different values."""

    def shows_below(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool:
        """Return whether k of n show a rate of at most `rate`, valid at all looks."""

    def shows_above(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool:
        """Return whether k of n show a rate above `rate`, valid at all looks."""


@dataclass(frozen=True, slots=True)
class DemandedObligation:
    """One obligation of the contract, with its properties for promotion.

    `allowed` is the share of units that may be beyond: 0 if all units must pass, None if the
    obligation is not about units, such as a mean. `repeatable`: the same requests give the same
    values again, and the clause demands no sample.
    """

    obligation: str
    clause: str
    slice: str | None
    family: Family
    level: Level
    action: str
    hard: bool
    repeatable: bool
    allowed: Fraction | None
    requirement: str

    def is_due(self, stage: str) -> bool:
        """Return whether a stage demands it."""
        if stage == OFFLINE:
            return self.hard or (self.repeatable and self.family is not Family.RUNTIME)
        if stage == SHADOW:
            about_traffic = not (self.hard and self.repeatable)
            return self.family in (Family.STATISTICAL, Family.OBSERVABILITY) or (
                self.family is Family.NUMERICAL and about_traffic
            )
        return True

    @property
    def is_rate(self) -> bool:
        """Return whether counts of units decide it."""
        return self.allowed is not None and 0 < self.allowed < 1

    def reaction(self, stage: str, live: bool = False) -> Reaction:
        """Return the reaction of a stage to its violation."""
        return reaction(stage, self.level, self.action, live)


def demanded_obligations(program: Program, rules: LookRules) -> tuple[DemandedObligation, ...]:
    """Return every obligation of a contract, in its order, with tables expanded."""
    expanded = expand_tables(program)
    return tuple(
        DemandedObligation(
            obligation=one.id,
            clause=clause.id,
            slice=name,
            family=clause.family,
            level=clause.level,
            action=clause.action or program.escalation.action(clause.family, clause.level),
            hard=clause.budget is None,
            repeatable=not rules.varies(clause, expanded),
            allowed=rules.allowed_rate(one.part),
            requirement=clause.text or clause.id,
        )
        for clause in expanded.clauses
        for name in slices_of(clause)
        for one in obligations_of(clause, name)
    )
