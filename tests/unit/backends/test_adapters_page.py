"""docs/reference/adapters.md agrees with the code about each adapter."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from torch import nn

from kcdsl.ir.kernels import KernelRef
from kcdsl.model.adapters import ADAPTERS
from kcdsl.model.architecture import Model
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.backend import _unserved
from kcdsl_backends.empirical.diagnoses.drawn_law import LAWS


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "reference" / "adapters.md").read_text("utf-8")


@pytest.fixture(scope="module")
def rows(page: str) -> dict[str, list[str]]:
    """Return the cells of the table of adapters, by adapter."""
    lines = re.findall(r"^\| `([a-z_0-9.]+)` \| (.*) \|$", page, re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in lines if name != "run"}


def test_page_lists_the_adapters_of_the_code(
    rows: dict[str, list[str]],
) -> None:
    assert list(rows) == list(ADAPTERS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_rows_equal_the_declarations_of_adapters(rows: dict[str, list[str]], name: str) -> None:
    _, devices, formats, tier, extra, logs = rows[name]
    adapter = ADAPTERS[name]
    assert tier.startswith(adapter.tier)
    assert extra == (f"`{adapter.library[0]}`" if adapter.library else "–")
    assert ("whole logits" in logs) == (adapter.tier == "A")
    if adapter.tier == "A":
        assert devices == ", ".join(device.upper() for device in adapter.devices)
    if adapter.tier == "A" and formats != "the same":
        assert formats.split(";")[0].split(", ") == list(adapter.computes)
    if adapter.tier == "A":
        there = ", ".join(adapter.computes_on("cuda"))
        assert (f"; on CUDA {there}" in formats) == (adapter.on_cuda is not None)


def test_number_of_excluded_architectures_equals_the_page(page: str) -> None:
    assert "some thirty settings" in page
    assert 28 <= len(LAWS) <= 32


def test_proof_warns_about_numerics_not_enforced_by_a_kernel() -> None:
    claimed = (("preset", "torch-eager"),)
    model = cast(Model, SimpleNamespace(module=nn.Identity()))
    for name, adapter in ADAPTERS.items():
        if name == "torch.eager" or adapter.unproved is not None:
            reference = KernelRef(name, claimed)
            notes = _unserved(reference, resolve(reference), "inference", "cpu", model)
            assert bool(notes) == (adapter.unproved is not None)
            assert adapter.unproved is None or adapter.unproved in notes[0]
