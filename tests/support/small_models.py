"""A small random decoder with prompts and a contract, for commands that need real files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kcdsl.check.compile import load_contract
from kcdsl.ir.terms import Program
from kcdsl.model.architectures import bert, llama
from tests.support.configurations import DECODER as DECODER

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash, compute: %s}}
data: prompts.jsonl
slices: {all: {}}
clauses:
%s
"""
PROMPTS = ("hello", "a b", "some", "x")
ENCODER = {
    "model_type": "bert", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip


def write_model(
    folder: Path,
    layers: int = 1,
    prompts: Sequence[str] = PROMPTS,
    *,
    config: Mapping[str, Any] = DECODER,
    rows: Sequence[Mapping[str, Any]] | None = None,
    scale: float = 0.2,
) -> None:
    """Write weights, configuration and prompts p0, p1, …, or these rows; deterministic.

    Weights are normal with deviation `scale`, those of norms around 1.
    """
    stated = {**config, "num_hidden_layers": layers}
    module = (llama if config["model_type"] == "llama" else bert).build(stated)
    generator = torch.Generator().manual_seed(5)
    state = {
        name: torch.randn(p.shape, generator=generator) * scale
        + float("norm" in name.lower() and name.endswith("weight"))
        for name, p in module.named_parameters()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(stated))
    if rows is None:
        rows = [{"id": f"p{i}", "text": text} for i, text in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_contract(
    folder: Path, *requirements: str, compute: str = "float32", evidence: str = ""
) -> Program:
    """Write contract.yaml with clauses N-0, N-1, … beside the model; return it compiled."""
    more = f", evidence: {evidence}" if evidence else ""
    clauses = "\n".join(
        f"  N-{i}: {{require: {json.dumps(text)}, level: L2{more}}}"
        for i, text in enumerate(requirements)
    )
    path = folder / "contract.yaml"
    path.write_text(CONTRACT % (compute, clauses))
    program, _ = load_contract(path)
    return program


def save_llama(folder: Path) -> Path:
    """Save a random Llama of 35,000 parameters as transformers does, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        max_position_embeddings=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
