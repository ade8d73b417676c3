"""The option --device."""

from __future__ import annotations

import os

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_DEVICE

_VISIBLE = "CUDA_VISIBLE_DEVICES"
CHOICES = ("auto", "cpu", "cuda")


def choose_device(wanted: str) -> str:
    """Return "cuda" or "cpu": `auto` takes CUDA where there is one. Raises Refusal without CUDA."""
    if wanted == "cuda" and os.environ.get(_VISIBLE, "all") in ("", "-1"):
        raise refuse(
            NO_DEVICE, f"{_VISIBLE} hides every CUDA device", help="unset it, or use --device cpu"
        )
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise refuse(NO_DEVICE, "torch sees no CUDA device", help="use --device cpu")
    return "cuda" if available and wanted != "cpu" else "cpu"
