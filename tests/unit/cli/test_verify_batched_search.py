"""A clause that only a batched attack violates: verified, written, and replayed bitwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.model.architectures.llama import build
from tests.support.commands import run_here

CONFIG = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: fp8-w8a8-per-channel, casts: nearest}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  BALL: {require: "forall x in ball(all, 1e-2): norm_inf(drift(attn_0, x)) <= LIMIT", level: L2}
"""


def verified(folder: Path, limit: float) -> dict[str, Any]:
    """Return the result of `verify`."""
    (folder / "contract.yaml").write_text(CONTRACT.replace("LIMIT", repr(limit)))
    ran = run_here("verify", "--format", "json", "--cache", "off", cwd=folder)
    assert ran.code in (0, 1, 3), ran.stderr
    (goal,) = json.loads(ran.stdout)["goals"]
    found: dict[str, Any] = goal
    return found


@pytest.mark.full
def test_batched_attack_violates_a_clause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    state = {
        name: torch.randn_like(p) * 0.2 + ("norm" in name)
        for name, p in build(CONFIG).named_parameters()
    }
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "p0", "text": "hey"}) + "\n")
    found = verified(tmp_path, 10.0)
    with monkeypatch.context() as without:
        without.setattr("kcdsl_backends.attack.batched_ascent", lambda *_: None)
        alone = verified(tmp_path, 10.0)["attack"]
        assert alone < found["attack"] <= found["bound"]
        limit = (alone + found["attack"]) / 2
        assert verified(tmp_path, limit)["verdict"] == "inconclusive"
    goal = verified(tmp_path, limit)
    assert goal["verdict"] == "violated"
    ran = run_here("replay", goal["counterexample"]["file"], "--format", "json", cwd=tmp_path)
    assert ran.code == 1, ran.stderr
    replayed = json.loads(ran.stdout)
    assert replayed["exact"]
    assert limit < replayed["value"] <= found["attack"]
