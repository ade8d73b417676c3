"""ONNX files of a small encoder that `quantize_static` of ONNX Runtime quantised."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from kcdsl_backends.process import quietly

ENCODER = """
<ir_version: 10, opset_import: ["" : 20]>
encoder (int64[1,T] input_ids) => (float[1,T,8] last_hidden_state)
{
  embedded = Gather <axis = 0> (embedding, input_ids)
  queries = MatMul (embedded, query) q = Add (queries, query_bias)
  keys = MatMul (embedded, key) k = Add (keys, key_bias)
  v = MatMul (embedded, value)
  q4 = Reshape (q, heads) qh = Transpose <perm = [0, 2, 1, 3]> (q4)
  k4 = Reshape (k, heads) kh = Transpose <perm = [0, 2, 3, 1]> (k4)
  v4 = Reshape (v, heads) vh = Transpose <perm = [0, 2, 1, 3]> (v4)
  products = MatMul (qh, kh) scores = Mul (products, half)
  p = Softmax <axis = -1> (scores)
  c = MatMul (p, vh) ct = Transpose <perm = [0, 2, 1, 3]> (c) context = Reshape (ct, whole)
  mixed = MatMul (context, mix) attended = Add (embedded, mixed)
  normed = LayerNormalization <axis = -1, epsilon = 0.00001> (attended, gain, shift)
  wide = MatMul (normed, up) biased = Add (wide, up_bias)
  active = ACTIVATION (biased)
  narrow = MatMul (active, down) fed = Add (narrow, down_bias)
  summed = Add (normed, fed)
  last_hidden_state = LayerNormalization <axis = -1, epsilon = 0.00001>
    (summed, last_gain, last_shift)
}
"""
SIZES = {
    "embedding": (16, 8), "query": (8, 8), "query_bias": (8,), "key": (8, 8), "key_bias": (8,),
    "value": (8, 8), "mix": (8, 8), "up": (8, 12), "up_bias": (12,), "down": (12, 8),
    "down_bias": (8,), "gain": (8,), "shift": (8,),
    "last_gain": (8,), "last_shift": (8,),
}  # fmt: skip


def encoder(activation: str = "Relu", seed: int = 0) -> onnx.ModelProto:
    """Return an encoder of one layer with 2 heads, in float32."""
    model = parser.parse_model(ENCODER.replace("ACTIVATION", activation))
    rng = np.random.default_rng(seed)
    held: dict[str, Any] = {
        "heads": np.array([1, -1, 2, 4]), "whole": np.array([1, -1, 8]), "half": np.float32(0.5),
    }  # fmt: skip
    for name, shape in SIZES.items():
        held[name] = rng.standard_normal(shape).astype(np.float32) * np.float32(0.5)
    for name in ("gain", "last_gain"):
        held[name] = held[name] + np.float32(1)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()
    )
    return model


class Calibration:
    """Requests of token ids, from which ONNX Runtime calibrates the ranges of tensors."""

    def __init__(self, vocabulary: int, count: int = 8, length: int = 5) -> None:
        rng = np.random.default_rng(1)
        ids = (rng.integers(0, vocabulary, (1, length)) for _ in range(count))
        self._rows: Iterator[dict[str, Any]] = ({"input_ids": one} for one in ids)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._rows, None)


def quantised(folder: Path, model: onnx.ModelProto, vocabulary: int = 16, **more: Any) -> Path:
    """Write a model, quantised by `quantize_static` with these options; return its path."""
    from onnxruntime.quantization import quantize_static

    onnx.save(model, folder / "float.onnx")
    with quietly(logging.ERROR):
        quantize_static(
            folder / "float.onnx", folder / "model.onnx", Calibration(vocabulary), **more
        )
    return folder / "model.onnx"
