"""What a formal backend says about a goal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kcdsl.route.goals import Goal
from kcdsl.verdict.model import Evidence, Verdict


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
