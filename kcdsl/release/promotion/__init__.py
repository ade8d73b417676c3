"""Promotion in four stages: what each stage demands, and what evidence makes of a candidate.

Pure functions of values; the clock is given. `kcdsl.api.promotion` reads the evidence and keeps the
state in a register.
"""

from kcdsl.release.promotion.candidate import Candidate, NotHere, State, enter
from kcdsl.release.promotion.evidence import Document, DocumentKind, Period, Result
from kcdsl.release.promotion.look import NOT_DUE, OPEN, SHOWN, VIOLATED, Row
from kcdsl.release.promotion.machine import ERROR, Limits, Outcome, Step, step
from kcdsl.release.promotion.stages import (
    CANARY,
    FULL,
    OFFLINE,
    SHADOW,
    Demand,
    LookRules,
    Reaction,
    demands_of,
    reaction,
)

__all__ = [
    "CANARY", "ERROR", "FULL", "NOT_DUE", "OFFLINE", "OPEN", "SHADOW", "SHOWN", "VIOLATED",
    "Candidate", "Demand", "Document", "DocumentKind", "Limits", "LookRules", "NotHere", "Outcome",
    "Period", "Reaction", "Result", "Row", "State", "Step", "demands_of", "enter", "reaction",
    "step",
]  # fmt: skip
