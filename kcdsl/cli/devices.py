"""The option --device."""

from __future__ import annotations

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_DEVICE

CHOICES = ("auto", "cpu", "cuda")


def choose_device(wanted: str) -> str:
    """Return "cuda" or "cpu": `auto` takes CUDA where there is one. Raises Refusal without CUDA."""
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise refuse(NO_DEVICE, "torch sees no CUDA device", help="use --device cpu")
    return "cuda" if available and wanted != "cpu" else "cpu"
