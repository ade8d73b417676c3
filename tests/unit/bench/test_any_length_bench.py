"""The figures and the picture of bench/any_length.py, and the page that shows them."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

from bench.any_length import LENGTHS, RADII, figures, table
from bench.any_length_picture import Curve, draw
from bench.common import shown_in

CURVES = [
    Curve(model, region, 0.4, dict.fromkeys(LENGTHS, 0.5), dict.fromkeys(LENGTHS, 0.1))
    for model in ("one", "a < b")
    for region in ("ball 1", "hull")
]


def test_picture_has_a_line_and_markers_per_region() -> None:
    drawn = ET.fromstring(draw(CURVES))
    space = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{space}polyline")) == len(CURVES)
    rings = drawn.findall(f"{space}circle")
    assert len(rings) == len(CURVES) * len(LENGTHS)
    assert all(ring.get("fill") == "none" for ring in rings)
    sizes = {ring.get("r"): ring.get("stroke") for ring in rings}
    assert len(sizes) == len(set(sizes.values())) == len({curve.region for curve in CURVES})
    assert {t.text for t in drawn.findall(f"{space}text")} >= {"one", "a < b", "hull", "256"}


def test_figures_compare_with_the_longest_length_and_best_domain() -> None:
    bound, longest, run = figures(CURVES[0])
    assert (bound.value, longest.value, run.value) == (0.4, 0.8, 0.4 / 0.1)
    assert longest.within
    worse = Curve("m", "r", 0.8, CURVES[0].exact, CURVES[0].attacked)
    assert not list(figures(worse))[1].within


def test_table_has_a_row_per_region() -> None:
    assert "| a < b, hull | 0.4 | 0.5 / 0.5 / 0.5 / 0.5 | 0.1 / 0.1 / 0.1 / 0.1 | 4 |" in table(
        CURVES
    )


def test_page_contains_the_recorded_results() -> None:
    shown = shown_in("proofs/any-length.md", "any_length")
    rows = re.findall(r"^\| (MiniLM|tiny LM), ([^|]+) \|(.+)\|$", shown, re.MULTILINE)
    assert len(rows) == 2 * (len(RADII) + 1)
    for _, _, numbers in rows:
        bound, exact, attacked, ratio = numbers.split("|")
        runs = [float(n) for n in attacked.split("/")]
        assert len(exact.split("/")) == len(runs) == len(LENGTHS)
        assert max(runs) < float(bound)
        assert math.isclose(float(ratio), float(bound) / max(runs), rel_tol=0.02)
