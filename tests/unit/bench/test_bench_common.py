"""The benchmark convention: missed or meaningless figures fail; result files are written whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.common import Better, Figure, report, seconds


@pytest.mark.parametrize(
    ("value", "better", "limit", "within"),
    [
        (1.0, Better.LOWER, None, True),
        (1.0, Better.LOWER, 1.0, True),
        (1.1, Better.LOWER, 1.0, False),
        (1.0, Better.HIGHER, 1.0, True),
        (0.9, Better.HIGHER, 1.0, False),
        (math.nan, Better.LOWER, None, False),
        (math.nan, Better.LOWER, 1.0, False),
        (math.inf, Better.HIGHER, 1.0, False),
    ],
)
def test_figure_is_within_its_limit(
    value: float, better: Better, limit: float | None, within: bool
) -> None:
    assert Figure("f", value, better, limit).within is within


def test_report_writes_the_document_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], follows: Callable[..., None]
) -> None:
    figures = (
        Figure("forward", 0.5, Better.LOWER, 1.0, "17 tokens"),
        Figure("ratio", 3.0, Better.LOWER, 2.0),
        Figure("bound", math.inf, Better.LOWER),
    )
    assert report("sample", figures, tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["sample.json"]
    document = json.loads((tmp_path / "sample.json").read_text(encoding="utf-8"))
    assert document["schema"] == "kcdsl.bench/1"
    assert document["machine"]["cores"] >= 1
    assert document["figures"] == [
        {
            "name": "forward",
            "value": 0.5,
            "better": "lower",
            "limit": 1.0,
            "conditions": "17 tokens",
        },
        {"name": "ratio", "value": 3.0, "better": "lower", "limit": 2.0, "conditions": ""},
        {"name": "bound", "value": None, "better": "lower", "limit": None, "conditions": ""},
    ]
    follows(document)
    text = capsys.readouterr().out
    assert text.count("MISSED") == 2
    assert "<= 1" in text


def test_figures_within_their_limits_give_zero(tmp_path: Path) -> None:
    assert report("good", [Figure("a", 1.0, Better.HIGHER, 0.5)], tmp_path) == 0


def test_empty_and_duplicate_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measured nothing"):
        report("empty", [], tmp_path)
    twice = [Figure("a", 1.0, Better.LOWER)] * 2
    with pytest.raises(ValueError, match="same name"):
        report("twice", twice, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_seconds_calls_warm_up_and_repeats() -> None:
    calls: list[None] = []
    assert seconds(lambda: calls.append(None), repeat=3, warmup=2) >= 0.0
    assert len(calls) == 5
    with pytest.raises(ValueError, match="at least 1"):
        seconds(lambda: None, repeat=0)
