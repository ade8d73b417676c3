"""Cached graphs equal newly traced ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements import problems
from tests.support.graphs import cache_graphs
from tests.support.random_models import random_model

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16,
    "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip
NUMERICS = resolve({"preset": "torch-eager"})


def graph(folder: Path, block: str, tokens: tuple[int, ...], seed: int = 1, **changed: Any) -> Any:
    """Return the graph as the certifier gets it."""
    model = random_model(CONFIG | changed, folder, seed)
    factory = problems.ProblemFactory(model, NUMERICS, NUMERICS, torch.device("cpu"))
    return factory.problem(block, tokens).graph


@pytest.mark.full
def test_equal_models_are_traced_once(tmp_path: Path) -> None:
    cache_graphs()
    (tmp_path / "elsewhere").mkdir()
    assert graph(tmp_path, "layer_0", (1, 2)) is graph(tmp_path / "elsewhere", "layer_0", (3, 4))


@pytest.mark.full
def test_changed_inputs_trace_a_new_graph(tmp_path: Path) -> None:
    cache_graphs()
    first = graph(tmp_path, "model", (1, 2))
    others = [
        graph(tmp_path, "model", (1, 3)),
        graph(tmp_path, "model", (1, 2, 3)),
        graph(tmp_path, "layer_0", (1, 2)),
        graph(tmp_path, "model", (1, 2), seed=2),
        graph(tmp_path, "model", (1, 2), rope_theta=77.0),
        graph(tmp_path, "model", (1, 2), rms_norm_eps=0.25),
    ]
    assert len({id(one) for one in (first, *others)}) == 7
    assert first.digest != others[4].digest
    assert first.digest != others[5].digest


@pytest.mark.full
def test_cached_graph_equals_a_new_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kcdsl.model.lowering import block_graph

    cache_graphs()
    for tokens in ((1, 2), (5, 6, 7), (1, 2)):
        remembered = graph(tmp_path, "model", tokens)
        with monkeypatch.context() as patch:
            patch.setattr(problems, "block_graph", block_graph)
            assert graph(tmp_path, "model", tokens).digest == remembered.digest
