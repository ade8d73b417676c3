"""Numerics specifications: which roundings a kernel may take (docs/relational-interval.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Weights:
    """How parameters are stored: `format` a float format, or "int8"; `scale` "none" (a plain cast),
    "per_tensor", "per_channel" (one per output row), "block_128" (128x128 tiles) or "mx" (32
    inputs, power of two). Dequantised values are rounded to float32, then to the compute format."""

    format: str
    scale: str = "none"


@dataclass(frozen=True, slots=True)
class Activations:
    """Dynamic quantisation of the input of every linear: `format` "none", "fp8_e4m3", "fp8_e5m2",
    "int8" (symmetric) or "uint8" (asymmetric); `scale` "none", "per_tensor", "per_token", "mx"."""

    format: str = "none"
    scale: str = "none"


@dataclass(frozen=True, slots=True)
class Attention:
    """How the ops with an attention role are computed.

    `style` "composed" (each op by itself) or "fused" (online softmax, tiles of `tile` keys).
    """

    style: str
    scores: str
    probabilities: str
    tile: int
    exp_ulps: int


@dataclass(frozen=True, slots=True)
class Numerics:
    """A resolved specification: nothing is left to defaults.

    `compute` is the format of parameters, constants and of every operation's result;
    `accumulate` that of dot products; inside softmax, norms, activations and elementwise maps the
    arithmetic is float32 (float64 where `compute` is).
    `casts` is "nearest" (one rounding to nearest at each result) or "any" (a free relative error of
    one unit roundoff there, wherever a fused kernel may put it).
    """

    preset: str
    compute: str
    accumulate: str
    casts: str
    weights: Weights
    activations: Activations
    attention: Attention

    def to_json(self) -> dict[str, Any]:
        """Return the record that proofs, certificates and kernel fingerprints carry."""
        return {
            "preset": self.preset,
            "compute": self.compute,
            "accumulate": self.accumulate,
            "casts": self.casts,
            "weights": {"format": self.weights.format, "scale": self.weights.scale},
            "activations": {"format": self.activations.format, "scale": self.activations.scale},
            "attention": {
                "style": self.attention.style,
                "scores": self.attention.scores,
                "probabilities": self.attention.probabilities,
                "tile": self.attention.tile,
                "exp_ulps": self.attention.exp_ulps,
            },
        }
