"""Goals: the statements that formal backends decide, one per clause."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kcdsl.diagnostics.spans import Span
from kcdsl.ir.obligations import Obligation, obligations_of, regions_of
from kcdsl.ir.terms import Clause, EvidenceKind, NoFlip, Norm, Program, Region


@dataclass(frozen=True, slots=True)
class Goal:
    """An obligation that a formal backend can decide.

    forall x in region: functional(drift(block, x)) `op` threshold, or: the top k never change.
    `functional` is "inf", "2", "span" or "no_flip"; `threshold` is None for "no_flip". With
    `weights` ρ the goal is for every θ' with |θ' - θ| <= ρ|θ|, element by element (clauses have
    ρ = 0, and the user may request more: docs/proofs/weights-region.md), and with `states` for
    every state within this distance of one in the region, in every feature. `domains` are the
    allowed proof domains; None leaves the choice to the backend. With `alpha`, independent random
    roundings may break the goal with at most that probability.
    """

    obligation: Obligation
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
    def clause(self) -> Clause:
        """Return the clause of the obligation."""
        return self.obligation.clause

    @property
    def span(self) -> Span:
        """Return the span of the drift, or of `no_flip`, in the contract."""
        comparison = self.obligation.comparison
        match comparison.quantity if comparison is not None else None:
            case Norm(of=drift):
                return drift.span
            case NoFlip(span=span):
                return span
            case _:
                return self.clause.require.span

    def admits(self, bound: float) -> bool:
        """Return whether a finite upper bound of the functional proves the goal."""
        return self._compared(bound) is True

    def refuted_by(self, value: float) -> bool:
        """Return whether an attained value of the functional refutes the goal."""
        return self._compared(value) is False

    def _compared(self, value: float) -> bool | None:
        """Return whether a value satisfies the threshold; None without threshold or finite
        value."""
        if self.threshold is None or not 0 <= value < float("inf"):
            return None
        exact = Fraction(value)
        return exact < self.threshold if self.op == "<" else exact <= self.threshold


ALPHA = Fraction(1, 10**9)
"""The probability with which roundings may break a clause that admits probabilistic evidence."""


def goal_of(clause: Clause) -> Goal | None:
    """Return the goal of a clause, or None unless it is a universal statement about one drift."""
    regions = regions_of(clause.require)
    if len(regions) != 1:
        return None
    obligation, *others = obligations_of(clause, regions[0].slice)
    if others or obligation.drift is None:
        return None
    quantified, comparison = obligation.drift
    alpha = ALPHA if clause.evidence is EvidenceKind.PROBABILISTIC else None
    match comparison.quantity:
        case NoFlip(block=block, k=k):
            return Goal(obligation, block, quantified.region, "no_flip", "<=", None, k, alpha=alpha)
        case Norm(kind=kind, of=of):
            limit, op = comparison.threshold, comparison.op
            return Goal(obligation, of.block, quantified.region, kind, op, limit, alpha=alpha)
        case _:
            return None


def goals(program: Program) -> tuple[Goal, ...]:
    """Return the goals of every clause that has one, in the order of the contract."""
    found = (goal_of(clause) for clause in program.clauses)
    return tuple(goal for goal in found if goal is not None)
