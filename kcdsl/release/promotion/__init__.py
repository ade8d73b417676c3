"""Promotion in four stages: the demands of each stage, and transitions of a candidate by evidence.

All functions are pure; the time is an argument. `kcdsl.api.promotion` reads the evidence and stores
the state in a register.
"""

from kcdsl.release.promotion.candidate import (
    CandidateState,
    StagedCandidate,
    UnusableEvidence,
    enter,
    gathered,
)
from kcdsl.release.promotion.evidence import (
    DocumentKind,
    EvidenceDocument,
    ObligationResult,
    Period,
)
from kcdsl.release.promotion.look import NOT_DUE, OPEN, SHOWN, VIOLATED, LookRow
from kcdsl.release.promotion.machine import (
    ERROR,
    PromotionLimits,
    PromotionOutcome,
    PromotionStep,
    begun,
    step,
    without,
)
from kcdsl.release.promotion.stages import (
    CANARY,
    FULL,
    OFFLINE,
    SHADOW,
    DemandedObligation,
    LookRules,
    Reaction,
    demanded_obligations,
    reaction,
)

__all__ = [
    "CANARY",
    "ERROR",
    "FULL",
    "NOT_DUE",
    "OFFLINE",
    "OPEN",
    "SHADOW",
    "SHOWN",
    "VIOLATED",
    "CandidateState",
    "DemandedObligation",
    "DocumentKind",
    "EvidenceDocument",
    "LookRow",
    "LookRules",
    "ObligationResult",
    "Period",
    "PromotionLimits",
    "PromotionOutcome",
    "PromotionStep",
    "Reaction",
    "StagedCandidate",
    "UnusableEvidence",
    "begun",
    "demanded_obligations",
    "enter",
    "gathered",
    "reaction",
    "step",
    "without",
]  # fmt: skip
