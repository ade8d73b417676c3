"""Models of transformers exported by torch.onnx: read, run as by ONNX Runtime, proved."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from kcdsl.ir.terms import ONNX, ModelRef
from kcdsl.model.loader import load_model
from kcdsl_backends.process import quietly
from tests.support.commands import run_here
from tests.support.static_files import quantised

MODELS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "max_position_embeddings": 16},
    "gpt2": {"n_embd": 16, "n_inner": 24, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16},
}  # fmt: skip
FORMS = {"eager, opset 18, 5 tokens": ("eager", 18, False), "sdpa, opset 23": ("sdpa", 23, True)}
OTHERS = {"eager, opset 20, 5 tokens": ("eager", 20, False)}
"""Opsets: GELU is one operator from version 20 on; before, quantisers would separate its parts."""


class OfIds(nn.Module):
    """A model with token ids as its only input and its first result as its only output."""

    def __init__(self, kind: str, attention: str) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, vocab_size=40, **MODELS[kind])
        config._attn_implementation = attention
        encoder = kind == "bert"
        maker: Any = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
        self.model = maker.from_config(config).eval()
        self.more = {} if encoder else {"use_cache": False}

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=input_ids, **self.more)[0]
        return found


def export(path: Path, kind: str, form: str) -> bool:
    """Write a model of transformers as an ONNX file; return whether it supports any length."""
    attention, opset, free = {**FORMS, **OTHERS}[form]
    with quietly(logging.ERROR):
        program = torch.onnx.export(
            OfIds(kind, attention),
            (torch.zeros(1, 5, dtype=torch.long),),
            dynamo=True,
            verbose=False,
            input_names=["input_ids"],
            output_names=["out"],
            opset_version=opset,
            dynamic_shapes=({1: torch.export.Dim.DYNAMIC},) if free else None,
        )
    assert program is not None
    program.save(path)
    return free


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", MODELS)
def test_exported_model_is_drafted_run_and_proved(tmp_path: Path, kind: str, form: str) -> None:
    path = tmp_path / "model.onnx"
    free = export(path, kind, form)
    model = load_model(ModelRef(path.name, ONNX), tmp_path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    drawn = np.random.default_rng(3)
    for length in (2, 5, 9) if free else (5,):
        tokens = drawn.integers(0, 40, length)
        wanted = session.run(None, {"input_ids": tokens[None]})[0][0]
        found = model.module(model.ids(tokens.tolist())).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert run_here("init", "model.onnx", "--for", "release", cwd=tmp_path).code == 0
    ran = run_here("verify", "--format", "json", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    goals = {goal["clause"]: goal for goal in json.loads(ran.stdout)["goals"]}
    assert set(goals) == {"N-ATTN-0", "N-MLP-0", "N-ATTN-0-BALL"}
    assert all(0 < goal["attack"] <= goal["bound"] for goal in goals.values())


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
def test_dynamically_quantised_model_is_drafted_measured_and_proved(
    tmp_path: Path, kind: str
) -> None:
    """The result of `quantize_dynamic` runs by its numerics, within the bound."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    export(tmp_path / "plain.onnx", kind, "eager, opset 18, 5 tokens")
    with quietly(logging.ERROR):
        quantize_dynamic(
            tmp_path / "plain.onnx", tmp_path / "model.onnx", weight_type=QuantType.QInt8
        )
    assert run_here("init", "model.onnx", cwd=tmp_path).code == 0
    ran = run_here("evaluate", "--format", "json", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    outcomes = {check["name"]: check["outcome"] for check in found["prechecks"]}
    assert outcomes["stale_weights"] == outcomes["coarser_layer"] == "passed", found["prechecks"]
    (crossed,) = found["crosschecks"]
    assert 0 < crossed["measured"] <= crossed["certified"]
    ran = run_here("verify", "--format", "json", cwd=tmp_path)
    (goal,) = json.loads(ran.stdout)["goals"]
    assert 0 < goal["attack"] <= goal["bound"]
    assert goal["evidence"]["confirmed"]


STATIC = {"bert": None, "gpt2": ["MatMul", "Gemm"], "llama": ["MatMul", "Gemm"]}
"""The quantised operators: a mask on scores would distort the range of their sum."""


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
def test_statically_quantised_model_is_drafted_measured_and_proved(
    tmp_path: Path, kind: str
) -> None:
    export(tmp_path / "plain.onnx", kind, "eager, opset 20, 5 tokens")
    model = onnx.load(tmp_path / "plain.onnx")
    quantised(tmp_path, model, vocabulary=40, op_types_to_quantize=STATIC[kind])
    ran = run_here("init", "model.onnx", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    ran = run_here("evaluate", "--format", "json", cwd=tmp_path)
    found = json.loads(ran.stdout)
    outcomes = {check["name"]: check["outcome"] for check in found["prechecks"]}
    assert outcomes["stale_weights"] == outcomes["coarser_layer"] == "passed", found["prechecks"]
    (crossed,) = found["crosschecks"]
    assert 0 < crossed["measured"] <= crossed["certified"]
    ran = run_here("verify", "--format", "json", cwd=tmp_path)
    (goal,) = json.loads(ran.stdout)["goals"]
    assert 0 < goal["attack"] <= goal["bound"] < 0.1
    assert goal["evidence"]["confirmed"]


@pytest.mark.full
def test_calibrated_range_of_a_mask_is_refused_with_help(tmp_path: Path) -> None:
    export(tmp_path / "plain.onnx", "gpt2", "eager, opset 20, 5 tokens")
    quantised(tmp_path, onnx.load(tmp_path / "plain.onnx"), vocabulary=40)
    ran = run_here("init", "model.onnx", cwd=tmp_path)
    assert ran.code == 2
    assert "KC461" in ran.stderr
    assert "nodes_to_exclude" in ran.stderr
