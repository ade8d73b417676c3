"""Charts of recorded rollouts: every token counted once, no unsupported positions or texts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Cli

CONTRACT = """kcdsl: 1
contract: rollouts
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels:
  train: {run: recorded, logprobs: {values: raw}}
  infer: {run: recorded, logprobs: {values: raw}}
data: rollouts.jsonl
slices: {math: {where: 'task == "math"'}, all: {}}
clauses:
  N-R: {require: max(abs(log_ratio)) <= 10, budget: 5% of requests, slices: [all, math], level: L2}
"""
Evaluate = Callable[[int], dict[str, Any]]


@pytest.fixture
def evaluated(cli: Cli, tmp_path: Path) -> Evaluate:
    """Return a function that evaluates 24 rollouts, `of_each` per prompt."""

    def run(of_each: int) -> dict[str, Any]:
        draw = random.Random(3)
        rows = []
        for i in range(24):
            infer = [-0.1 - draw.expovariate(1.2) for _ in range(2 + i)]
            row = {
                "id": f"r{i}",
                "task": "code" if i % 3 else "math",
                "prompt": [5, i // of_each],
                "tokens": [draw.randrange(50) for _ in infer],
                "mask": [1] * len(infer),
                "infer_logs": infer,
                "train_logs": [log + draw.uniform(-0.05, 0.05) for log in infer],
            }
            rows.append(json.dumps(row))
        (tmp_path / "rollouts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        (tmp_path / "contract.yaml").write_text(CONTRACT, encoding="utf-8")
        ran = cli(
            "evaluate", tmp_path / "contract.yaml", "--format", "json", "-o", tmp_path / "out"
        )
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    return run


TOKENS = sum(2 + i for i in range(24))


@pytest.mark.parametrize("of_each", [1, 2, 4])
def test_tokens_in_two_slices_are_counted_once(evaluated: Evaluate, of_each: int) -> None:
    report = evaluated(of_each)
    charts = report["charts"]
    assert (charts["pooled"], charts["tokens"]) == ("all", TOKENS)
    assert charts["requests"] == 24 // of_each
    assert {row["n"] for row in charts["what_if"]} == {TOKENS}
    assert any(f"24 rollouts of {24 // of_each} prompts" in note for note in report["notes"])
    assert report["environment"]["unit"] == "prompt"


def test_units_of_one_text_have_positions(evaluated: Evaluate) -> None:
    charts = evaluated(1)["charts"]
    assert {(c["by"], c["metric"], c["unit"]) for c in charts["drift_by"]} == {
        ("position", "k3", "nat"),
        ("length", "k3", "nat"),
    }
    (by_position,) = (c for c in charts["drift_by"] if c["by"] == "position")
    assert sum(point["n"] for point in by_position["points"]) == TOKENS
    assert "veto" in {row["does"] for row in charts["what_if"]}


def test_units_of_several_texts_have_no_positions(evaluated: Evaluate) -> None:
    charts = evaluated(2)["charts"]
    assert charts["drift_by"] == []
    assert {row["does"] for row in charts["what_if"]} == {"truncate", "mask"}


def test_report_page_counts_prompts(evaluated: Evaluate, tmp_path: Path) -> None:
    evaluated(4)
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    cells = text[text.index('class="heat"') : text.index('id="context"')]
    assert "6 prompts" in cells
    assert "requests" not in cells.replace("abs(log_ratio)) <= 10, up to 5% of requests", "")
    assert "was not read" in text
