"""The picture of the demo, drawn by docs/site/report_picture.py, equals its evaluation report."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from docs.site.report_picture import draw
from tests.support.pages import agrees

if TYPE_CHECKING:
    from tests.conftest import Cli

PICTURE = "docs/images/evaluate-minilm.svg"
_CELL = re.compile(r'<text[^>]* y="([\d.]+)"[^>]*>(.*?)</text>')


def lines(picture: str) -> str:
    """Return the lines of a picture, without times and the overall verdict.

    Both depend on the load of the machine.
    """
    rows: dict[float, list[str]] = {}
    for height, cell in _CELL.findall(picture):
        rows.setdefault(float(height), []).append(html.unescape(cell).replace("\xa0", " ").strip())
    text = [" ".join(row) for _, row in sorted(rows.items())]
    return "\n".join(row for row in text if "R-LATENCY" not in row and " health " not in row)


def test_picture_contains_the_compared_lines(repository: Path) -> None:
    text = lines((repository / PICTURE).read_text(encoding="utf-8"))
    assert "N-HIDDEN L2 all p99(hidden_l2) <= 3 1.22 – census 0/24 ✓ held" in text
    assert "attn_0 12 0.0642 0.125 1.57" in text
    page = repository / "docs" / "tutorials" / "demo.md"
    assert Path(PICTURE).name in page.read_text(encoding="utf-8")
    assert not agrees(text, text.replace("0.125", "0.525"), roughly=True)


def test_overview_contains_what_its_label_names(repository: Path) -> None:
    picture = (repository / "docs" / "images" / "overview.svg").read_text(encoding="utf-8")
    label = re.findall(r'aria-label="([^"]*)"', picture)[0].lower()
    titles = re.findall(r'class="t">([^<]*)<', picture)
    for word in ("contract", "data", "certificate", "gate", "checkpoint"):
        assert word in label
        assert word in titles


@pytest.mark.slow
def test_picture_equals_that_of_the_report(repository: Path, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "minilm"
    shutil.copytree(
        repository / "examples" / "minilm", folder, ignore=shutil.ignore_patterns("out")
    )
    ran = cli("evaluate", cwd=folder)
    assert ran.code in {0, 1}, ran.stderr
    shown = lines((repository / PICTURE).read_text(encoding="utf-8"))
    drawn = lines(draw(json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))))
    assert agrees(shown, drawn, roughly=True)
