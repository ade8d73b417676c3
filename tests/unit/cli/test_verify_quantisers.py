"""Quantised kernels through the commands: proved, attacked, signed, checked, replayed.

They cover formats of codes, layouts of scales and sums of bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kcdsl.model.presets import resolve
from kcdsl_certs.recheck import recheck
from tests.support.commands import run_here
from tests.support.small_models import write_model

MODEL = "model.safetensors"
CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: NUMERICS}
data: prompts.jsonl
slices: {all: {}}
clauses:
  LOOSE: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 10", level: L2}
"""
TIGHT = """\
  TIGHT: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 1e-9", level: L2}
"""
NUMERICS = {
    "vLLM": "{preset: vllm-fp8-per-token, casts: nearest}",
    "limited": "{preset: fp8-w8a8-per-channel, activations: {format: fp8_e4m3, scale: per_token,"
    " amax_limit: 1200, least_scale: 0.001}}",
    "AWQ": "{preset: awq-int4}",
    "NVFP4": "{preset: nvfp4-weights, casts: nearest}",
    "NVFP4 inputs": "{preset: nvfp4, activations: {format: fp4_e2m1, scale: nvfp4,"
    " input_scale: 0.01}}",
    "MXFP4": "{preset: mxfp4, casts: nearest}",
    "MXFP6": "{preset: mxfp8, weights: {format: fp6_e2m3, scale: mx},"
    " activations: {format: fp6_e3m2, scale: mx}}",
    "UE8M0": "{preset: fp8-w8a8-blocks-e8m0}",
    "fnuz": "{preset: fp8-w8a8-per-tensor, weights: {format: fp8_e4m3fnuz, scale: per_tensor},"
    " activations: {format: fp8_e4m3fnuz, scale: group_32}}",
    "batch": "{preset: fp8-w8a8-per-tensor,"
    " activations: {format: fp8_e4m3, scale: per_batch, batch_amax: 100}}",
    "shards": "{preset: torch-eager, compute: bfloat16, shards: 4}",
    "linears": "{preset: fp8-w8a8-per-channel, overrides: {model.embed_tokens:"
    " {weights: {format: bfloat16}, activations: {format: none}}, '*.down_proj':"
    " {weights: {format: int8, scale: per_channel}}}}",
    "TF32": "{preset: torch-eager, products: tfloat32}",
    "bytes": "{preset: onnxruntime-int8-pairs}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, prompts=("hey",))
    return tmp_path


def contract(folder: Path, name: str, more: str = "") -> None:
    text = CONTRACT.replace("NUMERICS", NUMERICS[name]) + more
    (folder / "contract.yaml").write_text(text, encoding="utf-8")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NUMERICS)
def test_signed_certificate_is_rechecked(folder: Path, follows: Any, name: str) -> None:
    contract(folder, name)
    assert run_here("keygen", cwd=folder).code == 0
    words = ("--format", "json", "--cache", "off", "--sign", "kcdsl.key")
    ran = run_here("verify", *words, cwd=folder)
    assert ran.code == 0, ran.stderr
    document = json.loads(ran.stdout)
    follows(document)
    (goal,) = document["goals"]
    assert goal["verdict"] == "held"
    assert 0 < goal["attack"] <= goal["bound"]
    record = goal["numerics"]["infer"]
    assert resolve(record).to_json() == record
    proof = json.loads((folder / "out" / "LOOSE.proof.json").read_bytes())
    follows(proof)
    assert proof["numerics"]["infer"] == record
    checking = ("check", "out/verify.cert.json", "--recheck", "--key", "kcdsl.key.pub")
    checked = run_here(*checking, cwd=folder)
    assert checked.code == 0, checked.stdout + checked.stderr


def test_override_without_a_linear_is_refused_at_its_position(folder: Path) -> None:
    text = CONTRACT.replace("NUMERICS", NUMERICS["linears"].replace("w8a8-per-channel", "weights"))
    text = text.replace("down_proj", "down_porj")
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    for command in ("verify", "evaluate"):
        ran = run_here(command, cwd=folder)
        assert ran.code == 2, ran.stdout
        assert "KC463" in ran.stderr
        assert "no linear of the model has the name '*.down_porj'" in ran.stderr
        assert "contract.yaml:7" in ran.stderr


CACHES = {
    "vLLM": "{preset: vllm-fp8-kv-cache}",
    "each head": "{preset: torch-eager, compute: bfloat16, casts: nearest,"
    " kv_cache: {format: int8, scale: per_head}}",
    "each token": "{preset: fp8-w8a8-per-channel,"
    " kv_cache: {format: fp8_e4m3, scale: per_token_head, least_scale: 1e-6}}",
    "static": "{preset: torch-eager, kv_cache: {format: fp8_e5m2, scale: static,"
    " key_scale: 0.25, value_scale: {'*': 0.5, model.layers.0.self_attn.v_proj: 0x1p-3}}}",
}


STRAYS = {
    "keys": CACHES["static"].replace("self_attn.v_proj", "self_attn.w_proj"),
    "inputs": "{preset: fp8-w8a8-per-channel, activations: {format: fp8_e4m3, scale: static,"
    " input_scale: {'*': 0.5, model.layers.0.self_attn.w_proj: 0.25}}}",
}


@pytest.mark.parametrize("name", STRAYS)
def test_static_scale_without_a_linear_is_refused(folder: Path, name: str) -> None:
    """The misspelt linear would otherwise use the default scale."""
    text = CONTRACT.replace("NUMERICS", STRAYS[name])
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    ran = run_here("verify", cwd=folder)
    assert ran.code == 2, ran.stdout
    named = "no linear of the model has the name 'model.layers.0.self_attn.w_proj'"
    assert "KC463" in ran.stderr
    assert named in ran.stderr.replace("\n", " ")


@pytest.mark.full
@pytest.mark.parametrize("name", CACHES)
def test_quantised_cache_is_proved_signed_and_replayed(
    folder: Path, follows: Any, name: str
) -> None:
    text = (CONTRACT + TIGHT).replace("mlp_0", "attn_0").replace("NUMERICS", CACHES[name])
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    assert run_here("lint", cwd=folder).code == 0
    ran = run_here("verify", "--format", "json", "--cache", "off", cwd=folder)
    assert ran.code == 1, ran.stderr
    document = json.loads(ran.stdout)
    follows(document)
    goals = {goal["clause"]: goal for goal in document["goals"]}
    assert goals["LOOSE"]["verdict"] == "held"
    assert 0 < goals["LOOSE"]["attack"] <= goals["LOOSE"]["bound"]
    proof = json.loads((folder / "out" / "LOOSE.proof.json").read_bytes())
    follows(proof)
    assert "kv_cache" in proof["numerics"]["infer"]
    assert recheck((folder / "out" / "LOOSE.proof.json").read_bytes(), folder / MODEL).ok
    assert goals["TIGHT"]["verdict"] == "violated"
    again = run_here(
        "replay", goals["TIGHT"]["counterexample"]["file"], "--format", "json", cwd=folder
    )
    assert again.code == 1, again.stderr
    found = json.loads(again.stdout)
    assert found["exact"]
    assert found["violated"]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{preset: torch-eager, kv_cache: fp8_e4m3}", "format: fp8_e4m3"),
        ("{preset: torch-eager, kv_cache: {format: fp8_e4m3, window: 4}}", "window"),
        ("{preset: torch-eager, kv_cache: {format: e4m3}}", "fp8_e4m3"),
        ("{preset: torch-eager, kv_cache: {format: int8, scale: static}}", "key_scale"),
    ],
)
def test_unsupported_cache_is_refused_at_its_position(
    folder: Path, written: str, words: str
) -> None:
    text = CONTRACT.replace("NUMERICS", written)
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    ran = run_here("check", "contract.yaml", cwd=folder)
    ran = run_here("lint", cwd=folder) if ran.code == 0 else ran
    assert ran.code != 0
    assert words in ran.stdout + ran.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", ["vLLM", "AWQ", "MXFP4", "linears"])
def test_counterexample_of_a_quantised_kernel_is_replayed(
    folder: Path, follows: Any, name: str
) -> None:
    contract(folder, name, TIGHT)
    ran = run_here("verify", "--format", "json", "--cache", "off", cwd=folder)
    assert ran.code == 1, ran.stderr
    goals = {goal["clause"]: goal for goal in json.loads(ran.stdout)["goals"]}
    assert goals["TIGHT"]["verdict"] == "violated"
    file = goals["TIGHT"]["counterexample"]["file"]
    follows(json.loads((folder / file).read_text()))
    again = run_here("replay", file, "--format", "json", cwd=folder)
    assert again.code == 1, again.stderr
    found = json.loads(again.stdout)
    assert found["exact"]
    assert found["violated"]
