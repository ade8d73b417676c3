"""Kernels with truncating casts through the commands: proved, violated, replayed."""

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
    numerics: {{preset: torch-eager, compute: bfloat16, casts: {casts}{more}}}
data: prompts.jsonl
slices: {{all: {{}}}}
clauses:
  LOOSE: {{require: "forall x in points(all): norm_inf(drift({block}, x)) <= 10", level: L2}}
  TIGHT: {{require: "forall x in points(all): norm_inf(drift({block}, x)) <= 1e-4", level: L2}}
"""
CUT = ", weights: {format: bfloat16, rounding: toward_zero}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, prompts=("hey",))
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize(
    ("casts", "block", "more"),
    [
        ("toward_zero", "attn_0", ""),
        ("toward_zero", "mlp_0", CUT),
        ("any_toward_zero", "mlp_0", CUT),
        ("any_direction", "attn_0", ", results: {context: float16}, sigmoid: absolute"),
    ],
)
def test_truncating_kernel_is_proved_violated_and_replayed(
    folder: Path, follows: Any, casts: str, block: str, more: str
) -> None:
    """The checker accepts the proof, and the counterexample replays exactly."""
    (folder / "contract.yaml").write_text(CONTRACT.format(casts=casts, block=block, more=more))
    ran = run_here("verify", "--format", "json", "--cache", "off", cwd=folder)
    assert ran.code == 1, ran.stderr
    document = json.loads(ran.stdout)
    follows(document)
    goals = {goal["clause"]: goal for goal in document["goals"]}
    assert goals["LOOSE"]["verdict"] == "held"
    assert goals["TIGHT"]["verdict"] == "violated"
    record = goals["LOOSE"]["numerics"]["infer"]
    assert record["casts"] == casts
    assert record["weights"].get("rounding") == ("toward_zero" if more == CUT else None)
    file = goals["TIGHT"]["counterexample"]["file"]
    follows(json.loads((folder / file).read_text()))
    again = run_here("replay", file, "--format", "json", cwd=folder)
    assert again.code == 1, again.stderr
    found = json.loads(again.stdout)
    assert found["exact"]
    assert found["violated"]


def test_quantiser_with_truncating_casts_is_refused_at_its_position(folder: Path) -> None:
    more = ", activations: {format: int8, scale: per_token}"
    (folder / "contract.yaml").write_text(
        CONTRACT.format(casts="toward_zero", block="mlp_0", more=more)
    )
    ran = run_here("verify", "--format", "json", "--cache", "off", cwd=folder)
    assert ran.code == 2
    assert "KC463" in ran.stderr
    assert "quantised to int8" in ran.stderr


def test_no_adapter_claims_truncating_casts(folder: Path) -> None:
    (folder / "contract.yaml").write_text(
        CONTRACT.format(casts="toward_zero", block="mlp_0", more="").replace(
            "drift(mlp_0, x)", "measured_drift(mlp_0, x)"
        )
    )
    ran = run_here("evaluate", cwd=folder)
    assert ran.code == 2
    assert "it rounds to nearest, so its casts are not `toward_zero`" in ran.stderr
