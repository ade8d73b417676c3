"""Adapters of other distributions: known by metadata, imported when a kernel runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.model import adapters
from kcdsl.model.adapters import Adapter, adapter_names, find_adapter, is_adapter, unproved

ADAPTER = Adapter("composed", ("torch-eager",), engine="nowhere:engine")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Return the list of installed entry points, initially empty."""
    points: list[EntryPoint] = []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    adapters.foreign_adapters.cache_clear()
    yield points
    adapters.foreign_adapters.cache_clear()


def test_foreign_adapter_is_found_with_unverified_numerics(
    installed: list[EntryPoint],
) -> None:
    installed.append(EntryPoint("mine.kernel", f"{__name__}:ADAPTER", adapters.GROUP))
    assert adapter_names()[-1] == "mine.kernel"
    found = find_adapter("mine.kernel")
    assert (found.engine, found.unproved) == (ADAPTER.engine, "it is of another distribution")


def test_name_of_an_adapter_needs_no_import(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("mine.kernel", "module_that_is_nowhere:ADAPTER", adapters.GROUP))
    assert is_adapter("mine.kernel")
    assert not is_adapter("mine")
    assert unproved("mine.kernel") == "it is of another distribution"
    assert "module_that_is_nowhere" not in sys.modules
    with pytest.raises(Refusal, match="cannot be imported"):
        find_adapter("mine.kernel")


def test_invalid_adapter_is_refused(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("mine.kernel", f"{__name__}:installed", adapters.GROUP))
    with pytest.raises(Refusal, match=r"is no kcdsl\.model\.adapters\.Adapter"):
        find_adapter("mine.kernel")


@pytest.mark.parametrize("name", ["torch.eager", "mine.kernel"])
def test_duplicate_adapter_name_is_an_error(installed: list[EntryPoint], name: str) -> None:
    installed += [
        EntryPoint(name, f"{module}:ADAPTER", adapters.GROUP) for module in ("one", "two")
    ]
    with pytest.raises(ValueError, match="offered by"):
        adapter_names()


def test_unknown_adapter_is_refused_with_the_known_names(
    installed: list[EntryPoint],
) -> None:
    installed.append(EntryPoint("mine.kernel", f"{__name__}:ADAPTER", adapters.GROUP))
    with pytest.raises(Refusal, match=r"known: torch\.eager.*mine\.kernel"):
        find_adapter("mine.kernal")
