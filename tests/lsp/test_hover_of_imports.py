"""Hovers on libraries and their contents, and on positions without a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.lsp.features.hover import hover
from tests.support.editor import HEAD
from tests.support.snapshots import snapshot

LIBRARY = """\
kcdsl: 1
library: fleet
version: 1.0.0
data: p.jsonl
slices: {tail: {where: length > 8 and lang == "en"}, whole: {}}
kernels: {fp8: {run: torch.sdpa, numerics: {compute: bfloat16, weights: {format: fp8_e4m3}}}}
tables:
  limit: {unit: ms, rows: [{where: length > 9, value: 250}], otherwise: 1 s}
"""
TEXT = HEAD.replace("  infer: {run: torch.sdpa, numerics: {preset: torch-sdpa-flash}}\n", "")
TEXT = TEXT.replace(
    "data: p",
    "imports:\n"
    "  - file: fleet.kc.yaml\n"
    "    slices: [tail, whole]\n"
    "    tables: {slow: limit}\n"
    "    kernels: {infer: fp8}\n"
    "data: p",
)
TEXT += (
    "clauses:\n"
    "  R:\n"
    "    {require: p95(latency) <= table(slow), slices: [tail], budget: 5% of windows, level: L1}\n"
    "  O: {require: [rng_seed, rack], level: L2}\n"
)


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ("tail, whole", ['`length > 8 and lang == "en"` of `p.jsonl`', "of the library fleet"]),
        ("whole]", ["every request of `p.jsonl`"]),
        ("slow: limit", ["- `length > 9`: 0.25 s", "- otherwise: 1 s", "from `fleet.kc.yaml`"]),
        ("limit}", ["- `length > 9`: 0.25 s", "of the library fleet"]),
        ("infer: fp8", ["- run: `torch.sdpa`", "- weights.format: `fp8_e4m3`", "imported from"]),
        ("fp8}", ["- compute: `bfloat16`", "of the library fleet"]),
        ("tail], budget", ['`length > 8 and lang == "en"`', "imported from `fleet.kc.yaml`"]),
        ("slow), slices", ["- `length > 9`: 0.25 s"]),
        ("5% of", ["The share that may break the requirement."]),
        ("rng_seed", ["a field of a trace record, one of the well-known ones"]),
        ("rack", ["a field of a trace record"]),
    ],
)
def test_hover_on_the_contents_of_a_library(tmp_path: Path, piece: str, words: list[str]) -> None:
    (tmp_path / "fleet.kc.yaml").write_text(LIBRARY, encoding="utf-8")
    found = hover(snapshot(TEXT, tmp_path), TEXT.index(piece))
    assert found is not None
    for text in words:
        assert text in found.text


def test_hover_on_a_name_that_the_library_lacks(tmp_path: Path) -> None:
    (tmp_path / "fleet.kc.yaml").write_text(LIBRARY, encoding="utf-8")
    text = TEXT.replace("[tail, whole]", "[tail, hole]")
    found = hover(snapshot(text, tmp_path), text.index("hole]"))
    assert found is not None
    assert found.text == "**hole**: not in the library fleet"


def test_hover_on_a_missing_library(tmp_path: Path) -> None:
    assert hover(snapshot(TEXT, tmp_path), TEXT.index("fp8}")) is None
