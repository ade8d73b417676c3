"""docs/certificate-fields.md, read as the tests compare it."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "certificate-fields.md"
ROW = re.compile(r"\| `([^`]+)` \| ([a-z ,]+) \| (.+) \|\Z")


def stated(heading: str) -> dict[str, frozenset[str]]:
    """Return the accepted kinds of change by field, as a section of the page has them."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [found for line in text.splitlines() if (found := ROW.match(line))]
    fields = [row[1] for row in rows]
    assert len(set(fields)) == len(fields) > 0
    return {row[1]: frozenset(row[2].split(", ")) for row in rows}
