"""Goals: what a formal backend is asked to decide, one per clause."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl.diagnostics.spans import Span
from kcdsl.ir.terms import (
    Clause,
    Compare,
    EvidenceKind,
    NoFlip,
    Norm,
    Number,
    Program,
    Quantified,
    Region,
)


@dataclass(frozen=True, slots=True)
class Goal:
    """forall x in region: functional(drift(block, x)) `op` threshold, or: the top k never change.

    `functional` is "inf", "2", "span" or "no_flip"; `threshold` is None for "no_flip". With
    `weights` ρ it is asked for every θ' with |θ' - θ| <= ρ|θ|, element by element (a clause speaks
    of ρ = 0, and whoever verifies it may ask for more: docs/weights-region.md), and with `states`
    for every state within that of those of the region, in every feature. `domains` are those that a
    backend may bound it in; None leaves the choice to the backend. With `alpha` it is enough that
    the roundings of a run, taken as independent, break it with at most that probability.
    """

    clause: Clause
    block: str
    region: Region
    functional: str
    op: str
    threshold: Fraction | None
    k: int = 1
    weights: Fraction = Fraction(0)
    states: Fraction = Fraction(0)
    domains: tuple[str, ...] | None = None
    alpha: Fraction | None = None

    @property
    def span(self) -> Span:
        """Return the place of the drift, or of `no_flip`, in the contract."""
        match self.clause.require:
            case Quantified(body=Compare(left=Norm(of=drift))):
                return drift.span
            case formula:
                return formula.body.span if isinstance(formula, Quantified) else formula.span

    def admits(self, bound: float) -> bool:
        """Say whether a finite upper bound of the functional settles the goal."""
        if self.threshold is None or not 0 <= bound < float("inf"):
            return False
        exact = Fraction(bound)
        return exact < self.threshold if self.op == "<" else exact <= self.threshold

    def refuted_by(self, value: float) -> bool:
        """Say whether a functional value that a concrete run attains breaks the goal."""
        if self.threshold is None or not 0 <= value < float("inf"):
            return False
        exact = Fraction(value)
        return exact >= self.threshold if self.op == "<" else exact > self.threshold


ALPHA = Fraction(1, 10**9)
"""With what probability roundings may break a clause that admits probabilistic evidence."""


def goal_of(clause: Clause) -> Goal | None:
    """Return the goal of a clause, or None if it is not a universal statement about one drift."""
    goal = _stated(clause)
    if goal is None or clause.evidence is not EvidenceKind.PROBABILISTIC:
        return goal
    return replace(goal, alpha=ALPHA)


def _stated(clause: Clause) -> Goal | None:
    formula = clause.require
    if not isinstance(formula, Quantified) or formula.quantifier != "forall":
        return None
    match formula.body:
        case NoFlip(block=block, variable=variable, k=k) if variable == formula.variable:
            return Goal(clause, block, formula.region, "no_flip", "<=", None, k)
        case Compare(op="<=" | "<" as op, left=Norm() as norm, right=Number() as limit):
            return _drift_goal(clause, formula, op, norm, limit)
        case _:
            return None


def _drift_goal(
    clause: Clause, formula: Quantified, op: str, norm: Norm, limit: Number
) -> Goal | None:
    if norm.of.measured or norm.of.variable != formula.variable:
        return None
    return Goal(clause, norm.of.block, formula.region, norm.kind, op, limit.value)


def goals(program: Program) -> tuple[Goal, ...]:
    """Return the goals of every clause that has one, in the order of the contract."""
    found = (goal_of(clause) for clause in program.clauses)
    return tuple(goal for goal in found if goal is not None)
