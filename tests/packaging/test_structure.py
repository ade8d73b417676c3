"""The structure of the product satisfies the limits of `make bench-house`, except for its size."""

from __future__ import annotations

from pathlib import Path

from bench.house import LIMITS, structure
from bench.house_code import read


def test_structure_is_within_its_limits(repository: Path) -> None:
    """Limits on folders, cycles, import depth, names, and code that only tests use."""
    found = structure(read(repository))
    limits = {name: limit for name, limit in LIMITS.items() if name not in ("files", "lines")}
    limits |= {"definitions that nothing uses": 0, "definitions that only tests use": 0}
    beyond = [name for name, most in limits.items() if found.values[name] > most]
    assert beyond == [], "\n".join(found.listed)
