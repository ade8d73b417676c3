"""Small random models of the built-in architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.bert import build as build_bert
from kcdsl.model.architectures.llama import build as build_llama
from kcdsl.model.loader import load_model


def random_model(config: dict[str, Any], folder: Path, seed: int) -> Model:
    """Write weights and configuration to a folder; return the model. Norms' gains are near 1."""
    torch.manual_seed(seed)
    kind = config["model_type"]
    module = (build_llama if kind == "llama" else build_bert)(config)
    state = {
        name: torch.randn_like(p) * 0.3 + (1.0 if "orm" in name and name.endswith("weight") else 0)
        for name, p in module.named_parameters()
    }
    save_file(state, folder / f"{kind}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(ModelRef(f"{kind}.safetensors", architecture=kind, tokenizer="bytes"), folder)
