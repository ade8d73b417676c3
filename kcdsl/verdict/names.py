"""The names of verdicts in documents: which is worst, their exit codes, and how they are shown.

Every table, page and build server reads them here, so that nothing but `held` looks held anywhere.
"""

from __future__ import annotations

from collections.abc import Collection

from kcdsl.exits import Exit

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
