"""Configurations and modules that could crash, hang or end the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import MODEL_CONFIG, MODEL_FACTORY
from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.architectures import llama
from kcdsl.model.configuration import check_config, read_config
from kcdsl.model.loader import load_model
from kcdsl.model.registry import declared
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

CONFIG: dict[str, Any] = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 1, "high_freq_factor": "x"}}, "high_freq"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 1, "high_freq_factor": 1}}, "less than"),
        ({"rope_parameters": {"rope_theta": "abc"}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "of type 'yarn'"),
    ],
)
def test_implausible_numbers_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(Refusal) as refusal:
        llama.read(CONFIG | change)
    (diagnostic,) = refusal.value.diagnostics
    assert diagnostic.code == MODEL_CONFIG
    assert word in diagnostic.message


@pytest.mark.parametrize("key", ["model_type", "architectures"])
@pytest.mark.parametrize("value", [5, [[]], {"a": 1}])
def test_invalid_names_are_refused(key: str, value: Any) -> None:
    with pytest.raises(Refusal) as refusal:
        check_config("llama", CONFIG | {key: value})
    (diagnostic,) = refusal.value.diagnostics
    assert diagnostic.code == MODEL_CONFIG
    assert key in diagnostic.message


def test_a_base_of_rotations_that_is_stated_twice_is_refused() -> None:
    family = declared("gemma").families["gemma3_text"]
    by_layer = {"full_attention": {"rope_type": "default"}}
    raw = {"model_type": "gemma3_text", "rope_theta": 1e4, "rope_parameters": by_layer}
    with pytest.raises(Refusal, match="'rope_theta' is stated twice, by layer and for all"):
        check_config("gemma", dict.fromkeys(family.needed, 1) | raw)


def test_deeply_nested_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(Refusal) as refusal:
        read_config(tmp_path / "config.json")
    assert refusal.value.diagnostics[0].code == MODEL_CONFIG


SOURCE = """
import torch
class Net(torch.nn.Module):
    encoder_only = True
    def forward(self, ids):
        {forward}
        return torch.zeros(len(ids), 4)
    def blocks(self):
        {blocks}
        return {{"attn_0": self}}
def build(config):
    {build}
    return Net()
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("statement", ["raise SystemExit(0)", "raise ValueError('no')", "1 / 0"])
@pytest.mark.parametrize("place", ["forward", "blocks", "build"])
def test_module_can_neither_end_nor_crash_the_process(
    place: str, statement: str, tmp_path: Path
) -> None:
    body = {"forward": "", "blocks": "", "build": ""} | {place: statement}
    (tmp_path / "hostile.py").write_text(SOURCE.format(**body))
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    ref = ModelRef("model.safetensors", module="hostile:build", tokenizer="bytes")
    with pytest.raises(Refusal) as refusal:
        use(ref, tmp_path)
    assert refusal.value.diagnostics[0].code == MODEL_FACTORY


def use(ref: ModelRef, folder: Path) -> None:
    """Use a model as every command does."""
    model = load_model(ref, folder)
    model.block_names()
    load_kernel(KernelRef("torch.eager", (("preset", "torch-eager"),)), model, "cpu")
