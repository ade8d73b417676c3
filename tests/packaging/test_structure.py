"""The structure of the product: what `make bench-house` limits, but for its size."""

from __future__ import annotations

from pathlib import Path

from bench.house import LIMITS, structure
from bench.house_code import read


def test_the_structure_is_within_its_limits(repository: Path) -> None:
    """Folders, cycles, floors and names; product code is used by product code, not by tests."""
    found = structure(read(repository))
    limits = {name: limit for name, limit in LIMITS.items() if name not in ("files", "lines")}
    limits |= {"definitions that nothing uses": 0, "definitions that only tests use": 0}
    beyond = [name for name, most in limits.items() if found.values[name] > most]
    assert beyond == [], "\n".join(found.listed)
