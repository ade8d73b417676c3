"""The table and the picture of bench/kernels.py, and the page with the results."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import kernels, kernels_inputs
from bench.common import shown_in
from bench.kernels import CASES, Comparison, figures, table
from bench.kernels_inputs import MODELS
from bench.kernels_picture import draw

FIRST = CASES[0].name


def run(ratio: float, bound: float = 1.0, block: str = "attn_0") -> Comparison:
    return Comparison(FIRST, "MiniLM", block, 7, ratio, ratio * bound, bound)


def test_table_shows_the_largest_ratio_per_kind_of_block() -> None:
    text = table([run(0.25), run(0.5), run(0.75, block="layer_0"), run(0.0, math.inf, "mlp_0")])
    assert f"| {FIRST} | MiniLM | 4, 3 | 0.5 | – | 0.75 | – |" in text
    assert "4 runs, 3 of them" in text
    assert "the largest quotient is 0.7500" in text


def test_run_outside_its_bound_fails_and_is_shown() -> None:
    (figure,) = figures([run(0.5), run(1.5)])
    assert figure.value == 1.5
    assert not figure.within
    (beyond,) = figures([run(math.inf)])
    assert not beyond.within
    assert "| 1, 1 | inf |" in table([run(math.inf)])


def test_picture_is_well_formed_and_positions_runs_by_ratio() -> None:
    root = ElementTree.fromstring(draw([("a < b", "MiniLM", q) for q in (0.0, 1e-3, 1.0, 50.0)]))
    places = [
        float(c.attrib["cx"])
        for c in root.iter("{http://www.w3.org/2000/svg}circle")
        if c.attrib["r"] == "3"
    ]
    assert places == sorted(places)
    assert len(set(places)) == 4
    labels = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert labels.count("≤ 10") == 1  # smaller ratios are drawn at the left edge, too
    limit = next(
        line
        for line in root.iter("{http://www.w3.org/2000/svg}line")
        if line.attrib["stroke-width"] == "2"
    )
    assert float(limit.attrib["x1"]) == places[2]


def test_kernels_page_contains_the_recorded_results() -> None:
    shown = shown_in("explanation/real-kernels.md", "kernels")
    for case in CASES:
        for model in MODELS:
            # claims about sums of bytes depend on the processor
            kernel = case.name.removesuffix(" int16_pairs")
            assert f"| {kernel} | {model} |" in shown
    (worst,) = re.findall(r"the largest quotient is (\d\.\d{4})", shown)
    assert 0 < float(worst) <= 1


def test_interrupted_run_resumes_only_with_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(kernels, "compare", lambda case, share: iter([run(0.5), run(math.inf)]))
    assert kernels._kept(CASES[0], "key") is None
    assert kernels._measure(0, 1.0, "key") == [run(0.5), run(math.inf)]
    assert kernels._kept(CASES[0], "key") == [run(0.5), run(math.inf)]
    assert kernels._kept(CASES[0], "another") is None
    assert kernels._kept(CASES[1], "key") is None
    assert kernels._key(1.0) != kernels._key(0.5)


def test_inputs_are_many_and_of_many_lengths() -> None:
    found = kernels_inputs.inputs("tiny LM")
    assert len(found) > 400
    assert {block for block, _ in found} == set(kernels_inputs.BLOCKS["tiny LM"])
    assert len({len(x) for _, x in found}) > 40
    assert min(len(x) for _, x in found) == 1
