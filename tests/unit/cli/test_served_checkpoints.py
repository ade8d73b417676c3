"""Inference kernels with a quantised checkpoint: proved, measured, checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.check.compile import load_program
from kcdsl.model import registry
from kcdsl.model.checkpoint.headers import metadata_of
from kcdsl.model.checkpoint.modules import transposed_names
from kcdsl_backends.empirical.collection.context import KernelContext
from kcdsl_backends.empirical.collection.inputs import prepare
from kcdsl_backends.empirical.collection.resume import input_digests
from tests.support.quantised import quantise
from tests.support.small_models import DECODER, write_model

CONTRACT = """\
kcdsl: 1
contract: served
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager, compute: float32}}
  infer:
    run: torch.eager
    checkpoint: quantised
    numerics: {preset: torch-eager, compute: float32%s}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 1000", level: L2}
  M: {require: "max(kl) <= 1000 nats", slices: [all], level: L2}
"""
CODES = """,
               weights: {format: fp8_e4m3, scale: per_channel},
               activations: {format: fp8_e4m3, scale: per_token},
               overrides: {lm_head: {weights: {format: float32}, activations: {format: none}}}"""
STATIC = CODES.replace("per_channel", "per_tensor").replace(
    "scale: per_token", "scale: static, input_scale: 0.03125"
)
LIMITED = CODES.replace("scale: per_token", "scale: per_token, amax_limit: 1200")
CONFIG = {**DECODER, "hidden_size": 32, "intermediate_size": 48, "tie_word_embeddings": False}


def prepared(folder: Path, name: str, numerics: str = "") -> Path:
    """Write a model, its quantised form and a contract for both."""
    write_model(folder, config=CONFIG, rows=[{"id": "p", "text": "hello", "category": "chat"}])
    quantise(folder, folder / "quantised", name)
    (folder / "contract.yaml").write_text(CONTRACT % numerics)
    return folder


def proved(cli: Any, folder: Path, *more: str) -> dict[str, Any]:
    ran = cli("verify", "--block", "attn_0", "--format", "json", *more, cwd=folder)
    assert ran.code == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)["goals"][0]
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        ("gptq", ""),
        pytest.param("torchao", "", marks=pytest.mark.full),
        pytest.param("torchao int4", "", marks=pytest.mark.full),
        pytest.param("fp8 channel", CODES, marks=pytest.mark.full),
        pytest.param("fp8 of one scale", STATIC, marks=pytest.mark.full),
        pytest.param("fbgemm", LIMITED, marks=pytest.mark.full),
    ],
)
def test_pair_of_checkpoints_is_proved_measured_and_checked(
    cli: Any, tmp_path: Path, name: str, numerics: str
) -> None:
    folder = prepared(tmp_path, name, numerics)
    assert cli("keygen", "-o", "k.key", cwd=folder).code == 0
    goal = proved(cli, folder, "--sign", "k.key")
    assert goal["attack"] <= goal["bound"]
    names = ["out/verify-attn_0.cert.json"]
    if not numerics:  # no CPU kernel quantises its activations to float8
        evaluated = cli("evaluate", "--sign", "k.key", cwd=folder)
        assert evaluated.code == 0, evaluated.stderr + evaluated.stdout
        names.append("out/evaluate.cert.json")
    check = ("check", *names, "--key", "k.key.pub", "--recheck")
    checked = cli(*check, cwd=folder)
    assert checked.code == 0, checked.stdout + checked.stderr
    # the deployed checkpoint may be elsewhere
    moved = (folder / "quantised").rename(folder / "elsewhere")
    assert cli(*check, cwd=folder).code != 0
    assert cli(*check, "--infer-checkpoint", "elsewhere", cwd=folder).code == 0
    moved.rename(folder / "quantised")
    # both checkpoints and the configuration of the second are bound
    config = folder / "quantised" / "config.json"
    for path in (folder / "quantised" / "model.safetensors", config):
        before = path.read_bytes()
        damaged = before.replace(b": 8", b": 16") if path == config else before
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]) if damaged == before else damaged)
        assert cli(*check, cwd=folder).code == 4
        path.write_bytes(before)
    # the bound differs from that of weights quantised by the kernel, or does not, by itself; with
    # float32 scales of the largest magnitudes these are the stored ones
    text = (folder / "contract.yaml").read_text()
    (folder / "contract.yaml").write_text(text.replace("    checkpoint: quantised\n", ""))
    alike = name in ("fp8 of one scale", "fbgemm")
    assert (proved(cli, folder, "--attack", "off")["bound"] == goal["bound"]) == alike
    (folder / "contract.yaml").write_text(text)


def test_unused_second_checkpoint_is_reported(cli: Any, tmp_path: Path) -> None:
    folder = prepared(tmp_path, "gptq")
    path = folder / "contract.yaml"
    text = path.read_text()
    path.write_text(text.replace("    run: torch.eager\n", "    run: torchao.int8_weight_only\n"))
    ran = cli("compile", cwd=folder)
    assert ran.code == 2
    assert "does not take the field `checkpoint`" in ran.stderr
    path.write_text(
        text.replace(
            "train: {run: torch.eager,", "train: {run: torch.eager, checkpoint: quantised,"
        )
    )
    ran = cli("compile", cwd=folder)
    assert ran.code == 2
    assert "which is for `infer`" in ran.stderr


@pytest.mark.parametrize(
    ("name", "changed", "word"),
    [
        ("gptq", {"qweight": torch.zeros(5, 32, dtype=torch.int32)}, "shape"),
        ("torchao", {"_weight_qdata": torch.zeros(32, 31, dtype=torch.int8)}, "shape"),
        ("awq", {"qweight": None}, "qzeros"),
        ("gptq", {"weight": torch.zeros(32, 32)}, "twice"),
    ],
)
def test_compile_reads_the_headers_of_the_second_checkpoint(
    cli: Any, tmp_path: Path, name: str, changed: dict[str, torch.Tensor | None], word: str
) -> None:
    folder = prepared(tmp_path, name)
    assert cli("compile", cwd=folder).code == 0
    place = folder / "quantised" / "model.safetensors"
    parts = {f"model.layers.0.self_attn.q_proj.{part}": new for part, new in changed.items()}
    held: dict[str, Any] = {**load_file(place), **parts}
    metadata = metadata_of(place.read_bytes())
    save_file({key: one for key, one in held.items() if one is not None}, place, metadata)
    ran = cli("compile", cwd=folder)
    assert ran.code == 2
    assert word in ran.stderr
    (folder / "quantised").rename(folder / "later")
    ran = cli("compile", cwd=folder)
    assert ran.code == 2
    assert "error[KC601]: there is no file quantised" in ran.stderr


def gpt2(folder: Path) -> dict[str, torch.Tensor]:
    """Write a small GPT-2, a folder `quantised` for its second checkpoint, and a contract.

    Return the tensors, whose matrices are [in, out].
    """
    config = {"vocab_size": 256, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 16}
    module = registry.load("gpt2").build(config)
    turned, drawn = transposed_names(module), torch.Generator().manual_seed(3)
    state = {n: torch.randn(t.shape, generator=drawn) for n, t in module.state_dict().items()}
    weights = {n: (t.T if n in turned else t).contiguous() for n, t in state.items()}
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    (folder / "quantised").mkdir()
    shutil.copy(folder / "config.json", folder / "quantised")
    (folder / "contract.yaml").write_text((CONTRACT % "").replace("llama", "gpt2"))
    (folder / "prompts.jsonl").write_text('{"id": "p", "text": "hello"}\n')
    return weights


@pytest.mark.full
def test_gpt2_supports_a_second_checkpoint(cli: Any, tmp_path: Path) -> None:
    """Its matrices are [in, out] there too; equal numbers give the drift of one checkpoint."""
    weights = gpt2(tmp_path)
    place = tmp_path / "quantised" / "model.safetensors"
    save_file(weights, place)
    assert cli("keygen", "-o", "k.key", cwd=tmp_path).code == 0
    same = proved(cli, tmp_path)
    check = ("check", "out/verify-attn_0.cert.json", "--key", "k.key.pub", "--recheck")
    save_file({n: t.to(torch.bfloat16) for n, t in weights.items()}, place)
    goal = proved(cli, tmp_path, "--sign", "k.key")
    assert goal["attack"] <= goal["bound"]
    assert goal["bound"] > 10 * same["bound"]
    assert goal["attack"] > same["bound"]
    checked = cli(*check, cwd=tmp_path)
    assert checked.code == 0, checked.stdout + checked.stderr
    place.write_bytes(place.read_bytes()[:-1] + b"\x00")
    assert cli(*check, cwd=tmp_path).code == 4
    text = (tmp_path / "contract.yaml").read_text()
    (tmp_path / "contract.yaml").write_text(text.replace("    checkpoint: quantised\n", ""))
    assert proved(cli, tmp_path)["bound"] == same["bound"]


@pytest.mark.full
def test_gpt2_is_measured_with_its_second_checkpoint(cli: Any, tmp_path: Path) -> None:
    weights = gpt2(tmp_path)
    place = tmp_path / "quantised" / "model.safetensors"
    path = tmp_path / "contract.yaml"
    path.write_text(path.read_text().replace("max(kl) <= 1000", "max(kl) <= 1e-9"))
    held = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    for second, code in ((weights, 0), (held, 1)):
        save_file(second, place)
        ran = cli("evaluate", cwd=tmp_path)
        assert ran.code == code, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.T.contiguous(), "expected that of (4, 12)"),
        (lambda t: t.to(torch.float8_e4m3fn), "[in, out]"),
    ],
)
def test_gpt2_refuses_quantised_storage_of_its_matrices(
    cli: Any, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], word: str
) -> None:
    weights = gpt2(tmp_path)
    key = "transformer.h.0.attn.c_attn"
    other = {f"{key}.weight": change(weights[f"{key}.weight"])}
    if other[f"{key}.weight"].dtype == torch.float8_e4m3fn:
        other[f"{key}.weight_scale"] = torch.ones(1)
        path = tmp_path / "quantised" / "config.json"
        method = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
        path.write_text(json.dumps({**json.loads(path.read_text()), **method}))
    save_file({**weights, **other}, tmp_path / "quantised" / "model.safetensors")
    ran = cli("compile", cwd=tmp_path)
    assert ran.code == 2
    assert word in ran.stderr


@pytest.mark.full
def test_changed_norm_is_used_by_the_inference_kernel(cli: Any, tmp_path: Path) -> None:
    folder = prepared(tmp_path, "gptq")
    before = proved(cli, folder, "--attack", "off")["bound"]
    place = folder / "quantised" / "model.safetensors"
    held = load_file(place)
    scales = "model.layers.0.self_attn.o_proj.scales"
    save_file({**held, scales: held[scales] * 2}, place)
    assert proved(cli, folder, "--attack", "off")["bound"] > 1.5 * before


def test_measurements_are_not_reused_for_another_checkpoint(tmp_path: Path) -> None:
    folder = prepared(tmp_path, "gptq")
    program = load_program(folder / "contract.yaml")
    plan: Any = SimpleNamespace(
        user=(), metrics=(), norms=(), context=(), temperature=1.0, seed=0, crosscheck=False
    )

    def parts() -> dict[str, str]:
        context = prepare(program, folder, crosscheck=False)
        assert isinstance(context, KernelContext)
        return input_digests(context, plan, ())

    before = parts()
    assert parts() == before
    place = folder / "quantised" / "model.safetensors"
    held = load_file(place)
    scales = "model.layers.0.self_attn.o_proj.scales"
    save_file({**held, scales: held[scales] * 2}, place)
    after = parts()
    assert {name for name in before if before[name] != after[name]} == {"model"}
