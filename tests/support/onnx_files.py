"""ONNX files for tests: a decoder as exporters write it, with its operations written out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, HEADS, INNER = 12, 8, 2, 16

DECODER = """
<ir_version: 9, opset_import: ["" : 18]>
decoder (int64[1,T] input_ids) => (float[1,T,12] logits)
{
  embedded = Gather <axis = 0> (embedding, input_ids)
  square = Pow (embedded, two)
  mean = ReduceMean <keepdims = 1> (square, last)
  shifted = Add (mean, eps)
  root = Sqrt (shifted)
  inverse = Reciprocal (root)
  normed = Mul (embedded, inverse)
  weighted = Mul (norm_weight, normed)
  sizes = Shape (input_ids)
  length = Gather <axis = 0> (sizes, one)
  column = Unsqueeze (length, zero_axis)
  apart = Concat <axis = 0> (ones_axis, column, heads_axis, head_axis)
  together = Concat <axis = 0> (ones_axis, column, width_axis)
  positions = Range (zero, length, one)
  floats = Cast <to = 1> (positions)
  rows = Unsqueeze (floats, one_axis)
  angles = Mul (rows, frequencies)
  double = Concat <axis = -1> (angles, angles)
  cosine = Cos (double)
  sine = Sin (double)
  q = MatMul (weighted, wq)
  q_apart = Reshape (q, apart)
  q_heads = Transpose <perm = [0, 2, 1, 3]> (q_apart)
  q_first = Slice (q_heads, zero_axis, half_axis, last)
  q_second = Slice (q_heads, half_axis, far_axis, last)
  q_negative = Neg (q_second)
  q_turned = Concat <axis = -1> (q_negative, q_first)
  q_straight = Mul (q_heads, cosine)
  q_across = Mul (q_turned, sine)
  q_placed = Add (q_straight, q_across)
  k = MatMul (weighted, wk)
  k_apart = Reshape (k, apart)
  k_heads = Transpose <perm = [0, 2, 1, 3]> (k_apart)
  k_first = Slice (k_heads, zero_axis, half_axis, last)
  k_second = Slice (k_heads, half_axis, far_axis, last)
  k_negative = Neg (k_second)
  k_turned = Concat <axis = -1> (k_negative, k_first)
  k_straight = Mul (k_heads, cosine)
  k_across = Mul (k_turned, sine)
  k_placed = Add (k_straight, k_across)
  v = MatMul (weighted, wv)
  v_apart = Reshape (v, apart)
  v_heads = Transpose <perm = [0, 2, 1, 3]> (v_apart)
  square_axes = Concat <axis = 0> (column, column)
  full = ConstantOfShape <value = float[1] {1.0}> (square_axes)
  lower = Trilu <upper = 0> (full)
  keep = Cast <to = 9> (lower)
  bias = Where (keep, nothing, hidden)
  k_columns = Transpose <perm = [0, 1, 3, 2]> (k_placed)
  scores = MatMul (q_placed, k_columns)
  scaled = Mul (scores, half)
  masked = Add (scaled, bias)
  shares = Softmax <axis = -1> (masked)
  no_number = IsNaN (shares)
  guarded = Where (no_number, nothing, shares)
  context = MatMul (guarded, v_heads)
  context_rows = Transpose <perm = [0, 2, 1, 3]> (context)
  joined = Reshape (context_rows, together)
  attention = MatMul (joined, wo)
  attended = Add (embedded, attention)
  second = LayerNormalization <axis = -1, epsilon = 0.00001> (attended, gain, offset)
  wide = MatMul (second, up)
  biased = Add (wide, up_bias)
  over_root = Div (biased, root_of_two)
  error = Erf (over_root)
  share = Add (error, single)
  doubled = Mul (biased, share)
  active = Mul (half, doubled)
  feed = MatMul (active, down)
  layer = Add (attended, feed)
  logits = MatMul (layer, head)
}
"""
BLOCKS = {
    "norm_0": ("embedded", "weighted"),
    "attn_0": ("weighted", "attention"),
    "mlp_0": ("second", "feed"),
    "layer_0": ("embedded", "layer"),
}


def weights() -> dict[str, NDArray[Any]]:
    """Return the tensors of the decoder."""
    drawn = np.random.default_rng(7)

    def matrix(*shape: int) -> NDArray[Any]:
        return (drawn.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    def vector(size: int) -> NDArray[Any]:
        return (1 + 0.1 * drawn.standard_normal(size)).astype(np.float32)

    numbers = {
        "two": 2.0, "eps": 1e-5, "half": 0.5, "nothing": 0.0, "hidden": -np.inf, "single": 1.0,
        "root_of_two": np.sqrt(2.0),
    }  # fmt: skip
    axes = {
        "zero_axis": 0, "one_axis": 1, "ones_axis": 1, "heads_axis": HEADS, "half_axis": 2,
        "head_axis": WIDTH // HEADS, "width_axis": WIDTH, "last": -1, "far_axis": 2**31,
    }  # fmt: skip
    held = {name: np.asarray(value, dtype=np.float32) for name, value in numbers.items()}
    held |= {name: np.asarray([value], dtype=np.int64) for name, value in axes.items()}
    held |= {"zero": np.asarray(0, dtype=np.int64), "one": np.asarray(1, dtype=np.int64)}
    held |= {name: matrix(WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")}
    held |= {"up": matrix(WIDTH, INNER), "down": matrix(INNER, WIDTH), "up_bias": vector(INNER)}
    held |= {name: vector(WIDTH) for name in ("norm_weight", "gain", "offset")}
    held |= {"embedding": matrix(VOCABULARY, WIDTH), "head": matrix(WIDTH, VOCABULARY)}
    return held | {"frequencies": np.asarray([1.0, 0.1], dtype=np.float32)}


def model_of(text: str, tensors: Mapping[str, NDArray[Any]]) -> onnx.ModelProto:
    """Return a model of the text of its graph and its tensors."""
    model = onnx.parser.parse_model(text)
    for name, value in tensors.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def save_decoder(folder: Path, name: str = "model.onnx", *, beside: bool = False) -> Path:
    """Write the decoder; `beside` stores its matrices as external data.

    Shapes and axes stay in the file, because ONNX Runtime reads them there alone.
    """
    path = folder / name
    model = model_of(DECODER, weights())
    onnx.checker.check_model(model)
    onnx.save(
        model, str(path), save_as_external_data=beside, location=f"{name}.data", size_threshold=100
    )
    return path


MLP = """
<ir_version: 10, opset_import: ["" : 21]>
mlp (int64[1,T] input_ids) => (float[1,T,12] logits)
{{
  embedded = Gather <axis = 0> (embedding, input_ids)
  {first}
  wide = MatMul ({entering}, {up})
  biased = Add (wide, up_bias)
  active = Relu (biased)
  {second}
  feed = MatMul ({inner}, {down})
  layer = Add (embedded, feed)
  logits = MatMul (layer, head)
}}
"""
QUANTISERS = {
    "uint8": (TensorProto.UINT8, 128), "int8": (TensorProto.INT8, 0),
    "int8 zero point": (TensorProto.INT8, -37), "e4m3": (TensorProto.FLOAT8E4M3FN, 0),
    "e5m2": (TensorProto.FLOAT8E5M2, 0), "dynamic": (TensorProto.UINT8, 0),
}  # fmt: skip
"""Types of codes and zero points of inputs."""


def quantised_mlp(form: str, *, stored: str = "codes") -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a perceptron with quantisers, and its program without them.

    Weights are `stored` as "codes" with a scale per channel, or as "numbers" that are quantised at
    run time.
    """
    held = {n: weights()[n] for n in ("embedding", "up", "down", "up_bias", "head")}
    held["embedding"] = np.clip(held["embedding"], -2, 2)
    kind, zero = QUANTISERS[form]
    fp8 = kind in (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    around = {n: np.asarray(s, dtype=np.float32) for n, s in (("s1", 0.03), ("s2", 0.05))}
    around |= {n: np.asarray(zero).astype(dtype) for n in ("z1", "z2")}
    if form == "dynamic":
        parts = [
            f"c{i}, s{i}, z{i} = DynamicQuantizeLinear ({x})"
            f" q{i} = DequantizeLinear (c{i}, s{i}, z{i})"
            for i, x in ((1, "embedded"), (2, "active"))
        ]
        around = {}
    else:
        parts = [
            f"c{i} = QuantizeLinear ({x}, s{i}, z{i}) q{i} = DequantizeLinear (c{i}, s{i}, z{i})"
            for i, x in ((1, "embedded"), (2, "active"))
        ]
    plain = dict(held)
    code = dtype if fp8 else np.dtype(np.int8)
    top = 127.0 if not fp8 else {TensorProto.FLOAT8E4M3FN: 448.0}.get(kind, 57344.0)
    names = {}
    for name in ("up", "down"):
        scale = (np.abs(held[name]).max(axis=0) / np.float32(top)).astype(np.float32)
        ratio = held[name] / scale
        codes = (ratio if fp8 else np.rint(ratio)).astype(code)
        names[name] = f"{name}_read"
        around |= {f"{name}_scale": scale, f"{name}_zero": np.zeros_like(scale).astype(code)}
        if stored == "codes":
            plain[f"{name}_read"] = codes.astype(np.float32) * scale
            around[f"{name}_codes"] = codes
            del held[name], plain[name]
        ends = f"({name}_codes, {name}_scale, {name}_zero)"
        made = f"{name}_read = DequantizeLinear <axis = 1> {ends}"
        if stored == "numbers":
            parts_of = f"{name}, {name}_scale, {name}_zero"
            made = f"{name}_codes = QuantizeLinear <axis = 1> ({parts_of}) {made}"
        parts.append(made)
    one, two, *rest = parts
    text = MLP.format(first=" ".join((one, *rest)), entering="q1", second=two, inner="q2", **names)
    own = {n: n if stored == "numbers" else names[n] for n in names}
    program = MLP.format(first="", entering="embedded", second="", inner="active", **own)
    return model_of(text, held | around), model_of(program, plain)


INTEGERS = """
<ir_version: 10, opset_import: ["" : 21]>
mlp (int64[1,T] input_ids) => (float[1,T,12] logits)
{{
  embedded = Gather <axis = 0> (embedding, input_ids)
  {first}
  wide_sum = MatMulInteger (c1, up_codes, z1, up_zero)
  wide_float = Cast <to = 1> (wide_sum)
  wide_scale = Mul (s1, up_scale)
  wide = Mul (wide_float, wide_scale)
  biased = Add (wide, up_bias)
  active = Relu (biased)
  {second}
  feed_sum = MatMulInteger (c2, down_codes, z2, down_zero)
  feed_float = Cast <to = 1> (feed_sum)
  feed_part = Mul (down_scale, feed_float)
  feed = Mul (feed_part, s2)
  layer = Add (embedded, feed)
  logits = MatMul (layer, head)
}}
"""


def integer_mlp(form: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a perceptron with products of codes, as `quantised_mlp`, and its program.

    Codes of weights have 7 bits: then sums of pairs in 16 bits are exact on any processor.
    """
    given = quantised_mlp(form)[0]
    held = {t.name: np.array(numpy_helper.to_array(t)) for t in given.graph.initializer}
    plain = {n: held[n] for n in ("embedding", "up_bias", "head")}
    for name in ("up", "down"):
        held[f"{name}_scale"] *= np.float32(2)
        held[f"{name}_codes"] = held[f"{name}_codes"] // 2
        held[f"{name}_zero"][::3] = 1
        zero, scale = (held[f"{name}_{part}"] for part in ("zero", "scale"))
        plain[f"{name}_read"] = (held[f"{name}_codes"].astype(np.float32) - zero) * scale
    codes = [
        f"c{i}, s{i}, z{i} = DynamicQuantizeLinear ({x})"
        if form == "dynamic"
        else f"c{i} = QuantizeLinear ({x}, s{i}, z{i})"
        for i, x in ((1, "embedded"), (2, "active"))
    ]
    program = MLP.format(
        first="", entering="embedded", second="", inner="active", up="up_read", down="down_read"
    )
    text = INTEGERS.format(first=codes[0], second=codes[1])
    return model_of(text, held), model_of(program, plain)


def unoptimised(model: onnx.ModelProto, tensor: str, tokens: list[int]) -> Any:
    """Return a tensor of a model as ONNX Runtime computes it without optimisations."""
    kept = onnx.ModelProto.FromString(model.SerializeToString())
    if tensor not in {output.name for output in kept.graph.output}:
        kept.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        kept.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run([tensor], {"input_ids": np.asarray([tokens])})[0][0]
