"""The answer of a formal backend to a goal: its outcome, proved statements and implied clauses."""

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
    """One link of a chain: the proved bound on the drift of its output, and the largest drift that
    a run of the chain's block attains there (None where none was tried); the last link has the
    functional of the goal. `cached`: the bound comes from an earlier run."""

    name: str
    bound: float
    attack: float | None = None
    cached: bool = False


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """One input region of a goal, such as one prompt of the slice.

    `bound` is infinite where there is no finite bound, for the `reason`; `attack` is the functional
    that a concrete admissible run attains, None where none was searched.
    """

    name: str
    length: int
    bound: float
    attack: float | None = None
    reason: str | None = None
    stable: bool | None = None
    """For no_flip: whether every row is shown to be stable."""
    margin: float | None = None
    """For no_flip: the least difference of a top column and any other column, over rows and
    kernels; positive where `stable`."""
    links: tuple[LinkOutcome, ...] = ()
    """The links of a chain in order; empty for a bound of one block."""
    alpha: str | None = None
    """The probability that independent roundings exceed the bound, as an exact real; None: it
    holds in the worst case."""


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
    """Whether the independent checker derived the proof again."""
    notes: tuple[str, ...] = ()
    """Remarks for users, such as numerics that no adapter implements."""
    cached: int = 0
    """The number of cases whose bound comes from an earlier run."""

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
        """Return bound / attack of the case with the largest bound among those where both are
        known. Bounds for random roundings have none, because an attack chooses its roundings."""
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

    `norm` is "inf", "2" or "span" of each row; `bound` is the certified number, which may be much
    smaller than the clause's threshold. `temperature` is that of the contract.
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
        """Return whether the bound settles the comparison (one alternative of an `or` may not)."""
        return self.comparison.op != "==" and self.comparison.admits(Fraction(self.bound))


@dataclass(frozen=True, slots=True)
class Implied:
    """A clause that holds on a slice because a drift was proved.

    `span` bounds max dz - min dz of the logits (before the division by the temperature), rounded
    up: a checker recomputes every number from it, the temperature and the contract's constants.
    `steps` is the derivation in words, `assumptions` its assumptions besides the proof.
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
    """Return the drifts proved by held goals, each with its certified number (not its threshold).

    A bound that a share of all runs may exceed is not included.
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
