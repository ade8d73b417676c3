"""Numerics of kernels with directed casts: toward zero, or in either direction."""

from __future__ import annotations

from typing import Any

DIRECTED: dict[str, dict[str, Any]] = {
    "bfloat16 toward zero": {
        "preset": "torch-eager",
        "compute": "bfloat16",
        "casts": "toward_zero",
        "weights": {"format": "bfloat16", "rounding": "toward_zero"},
    },
    "bfloat16 any toward zero": {
        "preset": "torch-eager",
        "compute": "bfloat16",
        "casts": "any_toward_zero",
    },
    "float16 any direction": {
        "preset": "torch-sdpa-flash",
        "compute": "float16",
        "casts": "any_direction",
    },
}
"""Nearest casts with truncated weights; free casts toward zero; free casts in both directions."""
