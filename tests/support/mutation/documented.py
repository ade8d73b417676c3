"""Parse docs/proofs/certificate-fields.md for comparison with the tests."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "proofs" / "certificate-fields.md"
ROW = re.compile(r"\| `([^`]+)` \| ([a-z ,]+) \| (.+) \|\Z")


def stated(heading: str) -> dict[str, frozenset[str]]:
    """Return the accepted kinds of change by field, from a section of the page."""
    return {row[1]: frozenset(row[2].split(", ")) for row in _rows(heading)}


def accepted_if_derived(heading: str) -> frozenset[str]:
    """Return the fields whose changes are accepted only if the claims still follow.

    Which kinds of change are accepted there depends on the numbers of the bases.
    """
    return frozenset(row[1] for row in _rows(heading) if "derived anew" in row[3])


def _rows(heading: str) -> list[re.Match[str]]:
    text = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [found for line in text.splitlines() if (found := ROW.match(line))]
    fields = [row[1] for row in rows]
    assert len(set(fields)) == len(fields) > 0
    return rows
