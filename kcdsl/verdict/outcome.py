"""The answer of a formal backend to a goal, what it proves, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kcdsl.ir.obligations import Comparison
from kcdsl.ir.terms import EvidenceKind, Program, RegionKind
from kcdsl.route.goals import Goal
from kcdsl.verdict.model import Evidence, Held, Verdict


@dataclass(frozen=True, slots=True)
class LinkOutcome:
    """One link of a chain: the largest drift of its output that is proved, and the largest that a
    run of the chain's block has there (None where none was tried); the last link has the
    functional of the goal. `cached` says that an earlier run had found the bound."""

    name: str
    bound: float
    attack: float | None = None
    cached: bool = False


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """One input region of a goal, such as one prompt of the slice.

    `bound` is infinite where no finite bound exists (then `reason` says why); `attack` is the
    functional that a concrete admissible run attains, None where none was searched.
    """

    name: str
    length: int
    bound: float
    attack: float | None = None
    reason: str | None = None
    stable: bool | None = None
    """For no_flip: whether every row is shown to be stable."""
    margin: float | None = None
    """For no_flip: how far the lowest top column stays above the highest other one, in the
    worst row and kernel; positive where `stable`."""
    links: tuple[LinkOutcome, ...] = ()
    """Where the bound is that of a chain: its links in order."""
    alpha: str | None = None
    """With what probability independent roundings may exceed the bound, as an exact real; None: it
    is of the worst case."""


@dataclass(frozen=True, slots=True)
class GoalOutcome:
    """The verdict on a goal, with the proof document where there is one."""

    goal: Goal
    verdict: Verdict
    evidence: Evidence
    backend: str
    cases: tuple[CaseOutcome, ...]
    seconds: float
    peak_bytes: int
    proof: bytes | None = None
    counterexample: bytes | None = None
    """The document of a run that breaks the goal (kcdsl.verdict.counterexample)."""
    confirmed: bool = False
    """Whether a second implementation re-derived the proof."""
    notes: tuple[str, ...] = ()
    """What people should know beside the verdict, such as numerics that no adapter here keeps."""
    cached: int = 0
    """How many cases have their bound from an earlier run."""

    @property
    def bound(self) -> float:
        """Return the largest bound of all cases (infinite where there is none)."""
        return max((case.bound for case in self.cases), default=math.inf)

    @property
    def margin(self) -> float | None:
        """Return the smallest margin of all cases of a no_flip goal, None if one is unknown."""
        margins = [case.margin for case in self.cases]
        known = [margin for margin in margins if margin is not None]
        return min(known) if known and len(known) == len(margins) else None

    @property
    def attack(self) -> float | None:
        """Return the largest functional that a concrete run attained."""
        tried = [case.attack for case in self.cases if case.attack is not None]
        return max(tried) if tried else None

    @property
    def tightness(self) -> float | None:
        """Return bound / attack on the cases where both are known (the largest-bound one). An
        attack chooses roundings, so it says nothing of bounds that leave these to chance."""
        ratios = [
            (case.bound, case.bound / case.attack)
            for case in self.cases
            if case.attack is not None and case.attack > 0 and math.isfinite(case.bound)
            if case.alpha is None
        ]
        return max(ratios)[1] if ratios else None

    def numbers(self) -> dict[str, Any]:
        """Return bound, attack and tightness as JSON numbers; null where there is none."""
        bound = self.bound
        return {
            "bound": bound if math.isfinite(bound) else None,
            "attack": self.attack,
            "tightness": self.tightness,
        }


# --- implied clauses ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProvedDrift:
    """A proved statement: for all x in region(slice): norm(drift(block, x)) <= bound.

    `norm` is "inf", "2" or "span", of each row; `bound` is the certified number, which may be far
    below the clause's threshold. `temperature` is that of the contract.
    """

    clause_id: str
    block: str
    slice: str
    region: RegionKind
    norm: str
    bound: float
    temperature: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class ImpliedBound:
    """One comparison of an implied clause, and the bound that decides it.

    For <= and < `bound` is an upper bound of the quantity, for >= and > a lower one. `metric` is
    the metric inside the quantity, None where it is compound.
    """

    comparison: Comparison
    bound: float
    metric: str | None

    @property
    def quantity(self) -> str:
        """Return the quantity as the language writes it."""
        return self.comparison.text

    @property
    def decides(self) -> bool:
        """Say whether the bound settles the comparison (one alternative of an `or` may not)."""
        return self.comparison.op != "==" and self.comparison.admits(Fraction(self.bound))


@dataclass(frozen=True, slots=True)
class Implied:
    """A clause that holds on a slice because a drift was proved.

    `span` bounds max dz - min dz of the logits (before the division by the temperature), rounded
    up: with the temperature and the contract's constants it is all a checker needs to recompute
    every number. `steps` is the chain for people, `assumptions` what it rests on beside the proof.
    """

    clause_id: str
    slice: str
    by: str
    proof_slice: str
    norm: str
    norm_bound: float
    span: float
    temperature: Fraction
    bounds: tuple[ImpliedBound, ...]
    steps: tuple[str, ...]
    assumptions: tuple[str, ...]


# --- premises -------------------------------------------------------------------------------------


def proved_drifts(program: Program, outcomes: Sequence[GoalOutcome]) -> tuple[ProvedDrift, ...]:
    """Return what the held drift goals prove, each with its certified number (not its limit).

    What holds but for a share of all runs is no premise.
    """
    return tuple(
        ProvedDrift(
            clause_id=outcome.goal.clause.id,
            block=outcome.goal.block,
            slice=outcome.goal.region.slice,
            region=outcome.goal.region.kind,
            norm=outcome.goal.functional,
            bound=outcome.bound,
            temperature=program.constants.temperature,
        )
        for outcome in outcomes
        if isinstance(outcome.verdict, Held)
        and outcome.proof is not None
        and outcome.evidence.kind is EvidenceKind.PROOF
        and outcome.goal.functional != "no_flip"
        and math.isfinite(outcome.bound)
    )
