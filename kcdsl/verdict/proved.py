"""From outcomes of goals to the premises of the bound chain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kcdsl.ir.terms import EvidenceKind, Program
from kcdsl.verdict.implied import ProvedDrift
from kcdsl.verdict.model import Held
from kcdsl.verdict.outcome import GoalOutcome


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
