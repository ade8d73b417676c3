"""Contracts whose inference kernel reads a quantised checkpoint: proved, measured, checked."""

from __future__ import annotations

import json
import shutil
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
from kcdsl_backends.empirical.collection.loading import prepare
from kcdsl_backends.empirical.collection.resume import decisive
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
CONFIG = {**DECODER, "hidden_size": 32, "intermediate_size": 48, "tie_word_embeddings": False}


def prepared(folder: Path, name: str, numerics: str = "") -> Path:
    """Write a model, its quantised form and a contract of the two."""
    write_model(folder, config=CONFIG, rows=[{"id": "p", "text": "hello", "category": "chat"}])
    quantise(folder, folder / "quantised", name)
    (folder / "contract.yaml").write_text(CONTRACT % numerics)
    return folder


def proved(cli: Any, folder: Path, *more: str) -> dict[str, Any]:
    ran = cli("verify", "--block", "attn_0", "--json", *more, cwd=folder)
    assert ran.code == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)["goals"][0]
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        ("gptq", ""),
        pytest.param("torchao", "", marks=pytest.mark.full),
        pytest.param("fp8 channel", CODES, marks=pytest.mark.full),
    ],
)
def test_a_pair_of_checkpoints_is_proved_measured_and_checked(
    cli: Any, tmp_path: Path, name: str, numerics: str
) -> None:
    folder = prepared(tmp_path, name, numerics)
    assert cli("keygen", "-o", "k.key", cwd=folder).code == 0
    goal = proved(cli, folder, "--sign", "k.key")
    assert goal["attack"] <= goal["bound"]
    names = ["out/verify-attn_0.cert.json"]
    if not numerics:  # no kernel of a processor quantises its activations to float8
        evaluated = cli("evaluate", "--sign", "k.key", cwd=folder)
        assert evaluated.code == 0, evaluated.stderr + evaluated.stdout
        names.append("out/evaluate.cert.json")
    check = ("check", *names, "--key", "k.key.pub", "--recheck")
    checked = cli(*check, cwd=folder)
    assert checked.code == 0, checked.stdout + checked.stderr
    # the checkpoint that is deployed may lie elsewhere
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
    # another bound than that of the weights that the kernel would quantise, or not, by itself
    text = (folder / "contract.yaml").read_text()
    (folder / "contract.yaml").write_text(text.replace("    checkpoint: quantised\n", ""))
    assert proved(cli, folder, "--attack", "off")["bound"] != goal["bound"]
    (folder / "contract.yaml").write_text(text)


def test_a_checkpoint_of_a_kernel_that_does_not_read_it_is_reported(
    cli: Any, tmp_path: Path
) -> None:
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
    (folder / "quantised").rename(
        folder / "later"
    )  # weights that are not there yet are no error of a contract
    assert cli("compile", cwd=folder).code == 0


def test_gpt2_has_no_second_checkpoint(cli: Any, tmp_path: Path) -> None:
    config = {"vocab_size": 256, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 16}
    module = registry.load("gpt2").build(config)
    turned, state = transposed_names(module), module.state_dict()
    weights = {n: (t.T if n in turned else t).contiguous() for n, t in state.items()}
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    (tmp_path / "quantised").mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.copy(tmp_path / name, tmp_path / "quantised")
    (tmp_path / "contract.yaml").write_text((CONTRACT % "").replace("llama", "gpt2"))
    (tmp_path / "prompts.jsonl").write_text('{"id": "p", "text": "hello"}\n')
    ran = cli("compile", cwd=tmp_path)
    assert ran.code == 2
    assert "KC456" in ran.stderr


def test_a_norm_that_the_quantiser_changed_is_that_of_the_inference_kernel(
    cli: Any, tmp_path: Path
) -> None:
    folder = prepared(tmp_path, "gptq")
    before = proved(cli, folder, "--attack", "off")["bound"]
    place = folder / "quantised" / "model.safetensors"
    held = load_file(place)
    scales = "model.layers.0.self_attn.o_proj.scales"
    save_file({**held, scales: held[scales] * 2}, place)
    assert proved(cli, folder, "--attack", "off")["bound"] > 1.5 * before


def test_what_was_measured_is_not_taken_over_to_another_checkpoint(tmp_path: Path) -> None:
    folder = prepared(tmp_path, "gptq")
    program = load_program(folder / "contract.yaml")
    plan: Any = SimpleNamespace(
        user=(), metrics=(), norms=(), context=(), temperature=1.0, seed=0, crosscheck=False
    )

    def parts() -> dict[str, str]:
        context = prepare(program, folder, crosscheck=False)
        assert isinstance(context, KernelContext)
        return decisive(context, plan, ())

    before = parts()
    assert parts() == before
    place = folder / "quantised" / "model.safetensors"
    held = load_file(place)
    scales = "model.layers.0.self_attn.o_proj.scales"
    save_file({**held, scales: held[scales] * 2}, place)
    after = parts()
    assert {name for name in before if before[name] != after[name]} == {"model"}
