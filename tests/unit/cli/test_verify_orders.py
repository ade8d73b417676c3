"""`kcdsl verify` on orders and norms that the boxes of both domains do not decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.model.architectures.llama import build
from kcdsl_certs.recheck import recheck

CONFIG = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-2,
}  # fmt: skip
CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: %s}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-0: {require: "%s", evidence: proof, level: L2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with weights and a prompt, without a contract."""
    torch.manual_seed(5)
    state = {
        name: torch.randn_like(p) * 0.3 + ("norm" in name)
        for name, p in build(CONFIG).named_parameters()
    }
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "text": "hello", "category": "chat"}\n')
    return tmp_path


def verified(cli: Any, folder: Path, require: str, compute: str = "float32") -> Any:
    """Return the goal of a contract of one clause."""
    (folder / "contract.yaml").write_text(CONTRACT % (compute, require))
    ran = cli("verify", "--attack", "off", "--format", "json", cwd=folder)
    (goal,) = json.loads(ran.stdout)["goals"]
    assert ran.code == {"held": 0, "inconclusive": 3}[goal["verdict"]]
    return goal


def proof_of(folder: Path) -> tuple[bytes, Any]:
    """Return the one proof that was written."""
    (path,) = folder.rglob("*.proof.json")
    return path.read_bytes(), json.loads(path.read_bytes())


@pytest.mark.full
@pytest.mark.parametrize(("k", "compute"), [(16, "float32"), (1, "float16")])
def test_order_with_overlapping_boxes_is_proved(
    cli: Any, folder: Path, k: int, compute: str
) -> None:
    goal = verified(cli, folder, f"forall x in points(all): no_flip(model, x, {k})", compute)
    assert goal["verdict"] == "held"
    assert goal["evidence"]["confirmed"] is True
    assert [case["stable"] for case in goal["cases"]] == [True]
    data, document = proof_of(folder)
    assert document["functional"] == {"kind": "no_flip", "k": k}
    assert document["claim"] == "held"
    assert [case["domain"] for case in document["cases"]] == ["affine"]
    assert recheck(data, folder / "model.safetensors").ok


@pytest.mark.full
@pytest.mark.parametrize(
    ("require", "compute"),
    [
        ("forall x in points(all): no_flip(model, x, 8)", "float16"),
        ("forall x in points(all): no_flip(model, x, 128)", "float32"),
        ("forall x in points(all): no_flip(model, x, 500)", "float32"),
    ],
)
def test_order_that_may_change_is_not_proved(
    cli: Any, folder: Path, require: str, compute: str
) -> None:
    goal = verified(cli, folder, require, compute)
    assert goal["verdict"] == "inconclusive"
    assert "a flip is not excluded for 1 of 1" in goal["reason"]


@pytest.mark.full
@pytest.mark.parametrize("functional", ["norm_2", "span"])
def test_threshold_below_the_box_is_proved(cli: Any, folder: Path, functional: str) -> None:
    require = "forall x in points(all): {}(drift(model, x)) {} {:.9f}"
    loose = verified(cli, folder, require.format(functional, "<=", 1e-9))["bound"]
    goal = verified(cli, folder, require.format(functional, "<=", loose * 1.0001))
    assert goal["verdict"] == "held"
    assert goal["evidence"]["confirmed"] is True
    wide = verified(cli, folder, require.format("norm_inf", "<=", 1e-9))["bound"]
    assert loose < 0.97 * wide * {"norm_2": 128**0.5, "span": 2.0}[functional]
