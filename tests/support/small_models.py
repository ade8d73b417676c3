"""A small random decoder with prompts and a contract, for commands that need real files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from kcdsl.check.compile import load_contract
from kcdsl.ir.terms import Program
from kcdsl.model.llama import build

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


def write_model(folder: Path, layers: int = 1, prompts: Sequence[str] = PROMPTS) -> None:
    """Write weights, configuration and prompts p0, p1, …; the same every time."""
    config = {
        "model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    state = {
        name: torch.randn(p.shape, generator=generator) * 0.2 + ("norm" in name)
        for name, p in build(config).named_parameters()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
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
