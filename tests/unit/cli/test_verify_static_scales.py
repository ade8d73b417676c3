"""Static scales through the commands: proved, violated and replayed; overflow is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_here
from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {{checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}}
kernels:
  train: {{run: torch.eager, numerics: {{preset: torch-eager}}}}
  infer:
    run: torch.eager
    numerics:
      preset: torch-eager
      casts: {casts}
      activations: {{format: {format}, scale: static, {scales}}}
data: prompts.jsonl
slices: {{all: {{}}}}
clauses:
  LOOSE: {{require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 10", level: L2}}
  TIGHT: {{require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 1e-9", level: L2}}
"""
WITHIN = "input_scale: {'*': 0.05, model.layers.0.mlp.down_proj: 0.02}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, prompts=("hey",))
    return tmp_path


def verified(folder: Path, code: int = 1, **parts: str) -> dict[str, Any]:
    """Return the result of `verify` for each clause."""
    (folder / "contract.yaml").write_text(CONTRACT.format(**parts))
    ran = run_here("verify", "--format", "json", "--cache", "off", cwd=folder)
    assert ran.code == code, ran.stderr
    return {goal["clause"]: goal for goal in json.loads(ran.stdout)["goals"]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("format", "casts", "more"),
    [
        ("int8", "nearest", ""),
        ("int8_full", "any", ""),
        ("fp8_e4m3", "nearest", ""),
        ("uint8", "any", ", input_zero_point: 128"),
        ("uint8", "nearest", ", input_zero_point: {'*': 128}"),
    ],
)
def test_values_within_the_scales_are_decided(
    folder: Path, follows: Any, format: str, casts: str, more: str
) -> None:
    goals = verified(folder, format=format, casts=casts, scales=WITHIN + more)
    assert goals["LOOSE"]["verdict"] == "held"
    assert goals["TIGHT"]["verdict"] == "violated"
    record = goals["LOOSE"]["numerics"]["infer"]["activations"]
    assert set(record["input_scale"]) == {"*", "model.layers.0.mlp.down_proj"}
    file = goals["TIGHT"]["counterexample"]["file"]
    follows(json.loads((folder / file).read_text()))
    ran = run_here("replay", file, "--format", "json", cwd=folder)
    assert ran.code == 1, ran.stderr
    found = json.loads(ran.stdout)
    assert found["exact"]
    assert found["violated"]


def test_values_beyond_a_scale_are_named(folder: Path) -> None:
    goals = verified(folder, 3, format="int8", casts="nearest", scales="input_scale: 0.0001")
    for goal in goals.values():
        assert goal["verdict"] == "inconclusive"
        assert "overflow reachable: element [" in json.dumps(goal)
        assert "int8 with its static scale" in json.dumps(goal)


def test_linear_without_a_scale_is_named(folder: Path) -> None:
    scales = "input_scale: {model.layers.0.mlp.up_proj: 0.05}"
    for goal in verified(folder, 3, format="int8", casts="any", scales=scales).values():
        assert goal["verdict"] == "inconclusive"
        assert "no static scale is given for the input of model.layers.0.mlp" in json.dumps(goal)
