"""Verdicts and evidence. Empty, NaN, misaligned or missing evidence is never `Held`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kcdsl.ir.terms import EvidenceKind


@dataclass(frozen=True, slots=True)
class Held:
    """The requirement holds."""


@dataclass(frozen=True, slots=True)
class Violated:
    """The requirement is violated; `counterexample` says by what (plain JSON data)."""

    counterexample: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inconclusive:
    """Neither shown nor refuted."""

    reason: str


@dataclass(frozen=True, slots=True)
class InvalidEvidence:
    """The evidence cannot support any verdict: empty, NaN, missing, misaligned."""

    reason: str


Verdict = Held | Violated | Inconclusive | InvalidEvidence


def verdict_name(verdict: Verdict) -> str:
    """Return the word used in JSON and tables."""
    match verdict:
        case Held():
            return "held"
        case Violated():
            return "violated"
        case Inconclusive():
            return "inconclusive"
        case InvalidEvidence():
            return "invalid_evidence"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on."""

    kind: EvidenceKind
    n: int | None = None
    confidence: float | None = None
    assumptions: tuple[str, ...] = ()
