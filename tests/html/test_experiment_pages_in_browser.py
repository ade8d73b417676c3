"""The pages of E1 and E2 in a real browser: light and dark, wide and narrow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kcdsl.verdict.html.experiment import experiment_page, maps
from kcdsl.verdict.model import WORST_FIRST
from tests.support.browser import Browser

pytestmark = pytest.mark.programs

CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
MANIFEST = {
    "contract": {"name": "demo", "version": "1.0.0", "digest": "sha256:" + "b" * 64},
    "files": {"model.safetensors": "sha256:" + "c" * 64},
    "seed": 0,
    "versions": {"kcdsl": "0.1.0"},
}


def row(verdict: str, rate: float | None, clause: str = "N-KL") -> dict[str, Any]:
    """Return a row of a cell."""
    return {
        "clause": clause, "slice": "all", "requirement": "p99(kl) <= 1e-4 nats",
        "metric": "p99(kl)", "op": "<=", "value": 2e-4, "threshold": 1e-4, "unit": "nat",
        "verdict": verdict, "reason": None, "n": 100,
        "passed": None if rate is None else round(100 * rate), "rate": rate,
        "low": None if rate is None else rate / 2, "high": rate,
        "narrow": ["few units"] if rate == 1.0 else [],
    }  # fmt: skip


def e1() -> dict[str, Any]:
    """Return an experiment E1 with every verdict, and a variant that did not run."""
    cells: list[dict[str, Any]] = [
        {
            "name": f"variant-{verdict}", "factor": "precision", "change": "computes otherwise",
            "status": "ran", "reason": None, "failed_checks": [], "deferred": {},
            "rows": [row(verdict, rate, f"N-{rate}") for rate in (None, 0.0, 0.5, 1.0)],
        }
        for verdict in WORST_FIRST
    ]  # fmt: skip
    cells[1]["failed_checks"] = [{"name": "finite", "detail": "3 numbers are not"}]
    cells.append({"name": "lost", "status": "not_run", "reason": "KC465: it runs on cuda"})
    return {"experiment": "e1", "manifest": MANIFEST, "cells": cells}


def e2() -> dict[str, Any]:
    """Return an experiment E2 with every verdict at rates from 0 to 1."""
    batches = list(range(1, 12))
    axes = {"device": ["cpu", "cuda"], "length": list(range(4)), "batch": batches}
    cells: list[dict[str, Any]] = []
    for length, verdict in enumerate(WORST_FIRST):
        for batch in batches:
            place = {"length": length, "batch": batch, "concurrency": 1}
            rows = [row(verdict, (batch - 1) / 10)]
            cells.append({**place, "device": "cpu", "status": "ran", "reason": None, "rows": rows})
            cells.append(
                {**place, "device": "cuda", "status": "not_run", "reason": "KC472: no device"}
            )
    axes["concurrency"] = [1]
    return {
        "experiment": "e2", "manifest": MANIFEST, "axes": axes, "cells": cells,
        "deferred": {"R-1": "speaks of times"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (400, False), (400, True)]
)
@pytest.mark.parametrize("kind", ["e1", "e2"])
def test_experiment_page_loads_nothing_and_has_contrast(
    chromium: Browser, tmp_path: Path, kind: str, width: int, dark: bool
) -> None:
    file = tmp_path / f"{kind}.html"
    file.write_text(experiment_page({"e1": e1, "e2": e2}[kind]()), encoding="utf-8")
    page = chromium.open(file, width=width, dark=dark)
    assert page.complaints == []
    assert [url for url in page.requested if not url.startswith(("file:", "data:"))] == []
    wide, there = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= there
    assert page.evaluate("document.scripts.length") == 0
    contrasts = page.evaluate(CONTRAST)
    if kind == "e2":  # texts on coloured cells are tested below
        contrasts = [found for found in contrasts if found[1] != "text"]
    assert len(contrasts) > 10
    assert [found for found in contrasts if found[0] < 4.5] == []
    unreachable = "[...document.querySelectorAll('.scroll')].filter(e => e.tabIndex < 0).length"
    assert page.evaluate(unreachable) == 0


def test_heat_maps_stay_inside_their_frames(chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "e2.html"
    file.write_text(experiment_page(e2()), encoding="utf-8")
    page = chromium.open(file, width=1280)
    cut = page.evaluate(
        """[...document.querySelectorAll("svg.chart")].flatMap((svg) => {
          const frame = svg.viewBox.baseVal;
          return [...svg.querySelectorAll("text, rect")].filter((e) => {
            const box = e.getBBox();
            const beyond = box.x + box.width > frame.width + 1;
            return box.x < -1 || box.y < -1 || beyond || box.y + box.height > frame.height + 1;
          }).map((e) => e.textContent || e.outerHTML);
        })"""
    )
    assert cut == []


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_cell_texts_have_contrast_at_any_rate() -> None:
    found = 0
    for one in maps(e2()):
        for colour, ink in re.findall(
            r'<rect fill="#(\w{6})"[^>]*/><text[^>]*fill:#(\w{6})', one.svg
        ):
            low, high = sorted((_luminance(colour), _luminance(ink)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (colour, ink)
            found += 1
    assert found == 44
