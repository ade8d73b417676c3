"""Numerics: formats, specifications of kernels and their presets, and stored weights."""

from kcdsl.model.numerics.specification import (
    UNROUNDED,
    Activations,
    Attention,
    KvCache,
    MatrixUnit,
    Numerics,
    Override,
    StaticQuantiser,
    TensorCore,
    Weights,
    held_formats,
    linear_name,
    narrower,
    plain_weights,
    sums_of_bytes,
)

__all__ = [
    "UNROUNDED",
    "Activations",
    "Attention",
    "KvCache",
    "MatrixUnit",
    "Numerics",
    "Override",
    "StaticQuantiser",
    "TensorCore",
    "Weights",
    "held_formats",
    "linear_name",
    "narrower",
    "plain_weights",
    "sums_of_bytes",
]
