"""The problems of a model and a kernel pair: which graphs are cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements import problems
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from tests.support.attributions import ref, small_model


def test_latest_graphs_of_a_whole_model_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[tuple[str, Sequence[int] | None]] = []
    trace: Any = getattr(problems, "block_graph")  # noqa: B009

    def counted(model: Any, block: str, length: int, tokens: Any, *rest: Any, **more: Any) -> Any:
        traced.append((block, tokens))
        return trace(model, block, length, tokens, *rest, **more)

    monkeypatch.setattr(problems, "block_graph", counted)
    monkeypatch.setattr(problems, "_MODELS_KEPT", 2)
    numerics = resolve(ref(compute="bfloat16"))
    factory = ProblemFactory(small_model(), numerics, numerics, torch.device("cpu"))
    first, second, third = (1, 2), (1, 3), (1, 4)
    for tokens in (first, second, first, second, third, second, first):
        factory.problem("model", tokens)
    factory.problem("attn_0", first)
    assert traced == [
        *(("model", tokens) for tokens in (first, second, third, first)),
        ("attn_0", None),
    ]
