"""Verdicts and evidence: their types, and their names in documents, exit codes and tables.

Empty, NaN, misaligned or missing evidence is never `Held`. Every table, page and build server uses
the names defined here, so that no other verdict is shown as held.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kcdsl.exits import Exit
from kcdsl.ir.terms import EvidenceKind

HELD = "held"
WORST_FIRST = ("violated", "invalid_evidence", "inconclusive", HELD)
"""Verdicts from worst to best."""
EXITS = {
    "violated": Exit.VIOLATED,
    "invalid_evidence": Exit.COULD_NOT_RUN,
    "inconclusive": Exit.INCONCLUSIVE,
    HELD: Exit.HELD,
}
SIGNS = {HELD: "✓", "violated": "✗", "inconclusive": "?", "invalid_evidence": "!"}
"""A sign for each verdict, readable without colours."""
SHOWN = {
    HELD: ("✓ held", "green"),
    "violated": ("✗ violated", "bold red"),
    "inconclusive": ("? inconclusive", "yellow"),
    "invalid_evidence": ("! invalid", "magenta"),
}
"""Sign with word, and colour, of each verdict on a terminal."""


def worst(names: Collection[str]) -> str:
    """Return the worst of several verdicts; invalid evidence for an empty sequence.

    Raises ValueError for an unknown name.
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
    """The requirement is violated; `counterexample` is the violating run (plain JSON data)."""

    counterexample: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inconclusive:
    """The requirement is neither shown nor refuted."""

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
    """The kind of evidence of a verdict."""

    kind: EvidenceKind
    n: int | None = None
    confidence: float | None = None
    assumptions: tuple[str, ...] = ()
