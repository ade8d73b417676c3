"""bench/compare.py: two trees compared in one run, and the criterion of a regression."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.common import Better
from bench.compare import Values, compared, differences, losses, measured, part, parts

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


def test_one_round_suffices_without_a_regression(tmp_path: Path) -> None:
    before, now = tree(tmp_path / "a", [2.0]), tree(tmp_path / "b", [2.0])
    seconds, missing = compared("small", before, now)
    assert (seconds.name, seconds.value, seconds.within) == ("small: seconds", 1.0, True)
    assert missing.value == 0
    assert json.loads((before / "bench" / "count").read_text()) == 1


def test_regression_triggers_more_rounds_and_the_best_values_decide(tmp_path: Path) -> None:
    before, now = tree(tmp_path / "a", [2.0, 4.0, 8.0]), tree(tmp_path / "b", [9.0, 3.0, 2.0])
    seconds, _ = compared("small", before, now)
    assert (seconds.value, seconds.within) == (1.0, True)
    assert json.loads((now / "bench" / "count").read_text()) == 3


def test_lasting_regression_is_reported(tmp_path: Path) -> None:
    before, now = tree(tmp_path / "a", [2.0] * 5), tree(tmp_path / "b", [3.0] * 5)
    seconds, _ = compared("small", before, now)
    assert (seconds.value, seconds.within) == (1.5, False)


def test_nan_figure_is_a_regression(tmp_path: Path) -> None:
    before, now = tree(tmp_path / "a", [2.0] * 5), tree(tmp_path / "b", [None] * 5)
    seconds, _ = compared("small", before, now)
    assert math.isnan(seconds.value)
    assert not seconds.within


def test_higher_is_better_figures_and_missing_figures() -> None:
    higher: tuple[Values, Values] = ({"rate": (4.0, Better.HIGHER)}, {"rate": (2.0, Better.HIGHER)})
    assert losses("x", [higher])[0].value == 2.0
    *_, missing = losses("x", [(values(a=1.0, b=1.0), values(a=0.5))])
    assert (missing.value, missing.conditions, missing.within) == (1, "b", False)
    assert losses("x", [(values(a=0.0), values(a=0.0))])[0].value == 1.0
    assert losses("x", [(values(a=0.0), values(a=1.0))])[0].value == math.inf
    rates = [({"rate": (old, Better.HIGHER)}, {"rate": (2.0, Better.HIGHER)}) for old in (3.0, 4.0)]
    assert losses("x", rates)[0].value == 2.0
    once = [(values(a=1.0), values(a=new)) for new in (math.nan, 1.0)]
    assert math.isnan(losses("x", once)[0].value)


def test_benchmark_without_results_ends_the_run(tmp_path: Path) -> None:
    before = tree(tmp_path / "a", [])
    with pytest.raises(SystemExit, match="wrote no results"):
        compared("small", before, tree(tmp_path / "b", [1.0]))


LINES = """\
a case, float32 Measured(tokens=6, bound=0.25, interval=inf, attack=0.125, seconds=2.0)
a case, float32 Measured(tokens=17, bound=0.5, interval=1.0, attack=0.125, seconds=4.0)
another case, a case, float32 Measured(tokens=6, bound=1.0, interval=1, attack=1, seconds=1.0)
"""


def test_bounds_and_seconds_are_compared_per_sentence() -> None:
    before = measured("a case, float32", LINES)
    assert before[6] == {"bound": 0.25, "interval": math.inf, "attack": 0.125, "seconds": 2.0}
    assert list(before) == [6, 17]
    assert all(figure.value == 1.0 for figure in differences("a", before, before))
    looser = {6: {**before[6], "bound": 0.2503, "seconds": 2.05}}
    bound, interval, seconds, *absent = differences("a", before, looser)
    assert (bound.name, bound.within) == ("a, 6 tokens: bound", False)
    assert bound.value == pytest.approx(1.0012)
    assert (interval.value, interval.within) == (1.0, True)
    assert (seconds.value, seconds.within) == (1.025, True)
    assert len(absent) == 3
    assert not any(figure.within for figure in absent)
    lost = {6: {**before[6], "bound": math.inf}, 17: before[17]}
    assert not differences("a", before, lost)[0].within


CERTIFIER = """
import sys, time
spent, slept = time.perf_counter(), time.sleep(0.5)
few = time.perf_counter() - spent < 0.25
values = f"bound=1.0, interval=1.0, attack=1.0, seconds={float(few)}"
print(sys.argv[1], f"Measured(tokens=6, {values})", file=sys.stderr)
"""


def test_part_runs_the_certifier_of_its_tree(tmp_path: Path) -> None:
    bench = tree(tmp_path, []) / "bench"
    (bench / "certifier.py").write_text(CERTIFIER)
    assert part("mlp_0", tmp_path)[6]["seconds"] == 1.0
    (bench / "certifier.py").write_text("print('nothing')")
    with pytest.raises(SystemExit, match="measured nothing of mlp_0"):
        part("mlp_0", tmp_path)
    with pytest.raises(SystemExit, match=r"no case of bench\.certifier"):
        parts("no such case", tmp_path, tmp_path)
