"""Product code is used by product code, and not by tests alone."""

from __future__ import annotations

from pathlib import Path

from bench.house_code import read, unused


def test_no_definition_of_the_product_is_unused(repository: Path) -> None:
    nothing, tests_only = unused(read(repository))
    assert [str(found) for found in nothing] == []
    assert [str(found) for found in tests_only] == []
