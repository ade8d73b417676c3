"""bench/compare.py: two trees in one run, and what counts as a loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.common import Better
from bench.compare import Values, compared, losses

PROGRAM = """
import json, pathlib
place = pathlib.Path(__file__).parent / "results" / "small.json"
place.parent.mkdir(exist_ok=True)
count = pathlib.Path(__file__).with_name("count")
runs = int(count.read_text()) if count.exists() else 0
count.write_text(str(runs + 1))
value = VALUES[runs]
place.write_text(json.dumps({"figures": [{"name": "seconds", "value": value, "better": "lower"}]}))
"""


def tree(folder: Path, values: list[float | None]) -> Path:
    bench = folder / "bench"
    bench.mkdir(parents=True)
    (bench / "__init__.py").write_text("")
    text = PROGRAM.replace("VALUES", repr(values))
    (bench / "small.py").write_text(text)
    return folder


def values(**figures: float) -> Values:
    return {name: (value, Better.LOWER) for name, value in figures.items()}


def test_one_round_where_nothing_is_lost(tmp_path: Path) -> None:
    before, now = tree(tmp_path / "a", [2.0]), tree(tmp_path / "b", [2.0])
    seconds, missing = compared("small", before, now)
    assert (seconds.name, seconds.value, seconds.within) == ("small: seconds", 1.0, True)
    assert missing.value == 0
    assert json.loads((before / "bench" / "count").read_text()) == 1


def test_a_loss_calls_for_more_rounds_and_medians_decide(tmp_path: Path) -> None:
    before, now = tree(tmp_path / "a", [2.0, 2.0, 2.0]), tree(tmp_path / "b", [9.0, 2.0, 2.0])
    seconds, _ = compared("small", before, now)
    assert (seconds.value, seconds.within) == (1.0, True)


def test_a_lasting_loss_is_reported(tmp_path: Path) -> None:
    before, now = tree(tmp_path / "a", [2.0] * 3), tree(tmp_path / "b", [3.0] * 3)
    seconds, _ = compared("small", before, now)
    assert (seconds.value, seconds.within) == (1.5, False)


def test_a_figure_that_is_no_number_is_a_loss(tmp_path: Path) -> None:
    before, now = tree(tmp_path / "a", [2.0] * 3), tree(tmp_path / "b", [None] * 3)
    seconds, _ = compared("small", before, now)
    assert math.isnan(seconds.value)
    assert not seconds.within


def test_where_more_is_better_and_where_figures_are_missing() -> None:
    higher: tuple[Values, Values] = ({"rate": (4.0, Better.HIGHER)}, {"rate": (2.0, Better.HIGHER)})
    assert losses("x", [higher])[0].value == 2.0
    *_, missing = losses("x", [(values(a=1.0, b=1.0), values(a=0.5))])
    assert (missing.value, missing.conditions, missing.within) == (1, "b", False)
    assert losses("x", [(values(a=0.0), values(a=0.0))])[0].value == 1.0
    assert losses("x", [(values(a=0.0), values(a=1.0))])[0].value == math.inf


def test_a_benchmark_without_results_ends_the_run(tmp_path: Path) -> None:
    before = tree(tmp_path / "a", [])
    with pytest.raises(SystemExit, match="wrote no results"):
        compared("small", before, tree(tmp_path / "b", [1.0]))
