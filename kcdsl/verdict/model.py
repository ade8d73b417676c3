"""Verdicts and evidence: their types, and their names in documents, exit codes and tables.

Empty, NaN, misaligned or missing evidence is never `Held`, and nothing but `held` looks held
anywhere: every table, page and build server reads the names here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kcdsl.exits import Exit
from kcdsl.ir.terms import EvidenceKind

HELD = "held"
WORST_FIRST = ("violated", "invalid_evidence", "inconclusive", HELD)
"""What is known to be wrong stands before what cannot be trusted, and that before what is open."""
EXITS = {
    "violated": Exit.VIOLATED,
    "invalid_evidence": Exit.COULD_NOT_RUN,
    "inconclusive": Exit.INCONCLUSIVE,
    HELD: Exit.HELD,
}
SIGNS = {HELD: "✓", "violated": "✗", "inconclusive": "?", "invalid_evidence": "!"}
"""A sign for each verdict, so that no colour is needed to tell them apart."""
SHOWN = {
    HELD: ("✓ held", "green"),
    "violated": ("✗ violated", "bold red"),
    "inconclusive": ("? inconclusive", "yellow"),
    "invalid_evidence": ("! invalid", "magenta"),
}
"""Sign with word, and colour, of each verdict at a terminal."""


def worst(names: Collection[str]) -> str:
    """Return the worst of some verdicts; of none, invalid evidence: nothing decided is no pass.

    Raises ValueError for a name that is no verdict.
    """
    unknown = set(names) - set(WORST_FIRST)
    if unknown:
        raise ValueError(f"no verdict: {', '.join(sorted(unknown))}")
    return next((name for name in WORST_FIRST if name in names), "invalid_evidence")


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
