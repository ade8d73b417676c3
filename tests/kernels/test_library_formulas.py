"""Formulas of libraries, as docs/reference/numerics.md states them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from kcdsl.model.numerics.weights import linear_weight
from kcdsl.model.presets import resolve
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.sums import pair_loss
from kcdsl_backends.drift.ops.quantised.inputs import activation_error
from kcdsl_backends.empirical.sources.kernels.engines import ScaledLinear, quantise, quantise_linear
from kcdsl_backends.empirical.sources.kernels.onnx_runtime import saturates

Singles = NDArray[np.float32]
SIZES = st.sampled_from([1e-44, 1e-40, 3e-38, 1e-30, 1e-9, 2.0**-23, 1e-5, 1.0, 300.0, 1e30])
KINDS = st.sampled_from(["plain", "positive", "one large", "zeros", "constant", "mixed sizes"])


def rows(kind: str, size: float, seed: int, shape: tuple[int, int] = (5, 24)) -> Tensor:
    """Return a matrix of a kind of distribution."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * size
    match kind:
        case "positive":
            return x.abs() + size
        case "one large":
            x[2, 3] = 1e4 * size
        case "zeros":
            return x * 0
        case "constant":
            return torch.full_like(x, -size)
        case "mixed sizes":
            return x * torch.exp2(torch.randint(-20, 1, x.shape, generator=generator).float())
    return x


def error_bound(preset: str, x: Tensor, **more: Any) -> Tensor:
    """Return the error bound Q of a preset at x."""
    kernel = Rounding(resolve({"preset": preset, **more}))
    found = activation_error(Box.point(x.double()), kernel, "x")
    assert found is not None
    return found


# --- ONNX Runtime --------------------------------------------------------------------------------


def dynamic_quantize_linear(x: Singles) -> tuple[NDArray[np.uint8], Singles, NDArray[np.uint8]]:
    """Return codes, scale and zero point as ONNX Runtime gives them."""
    import onnxruntime
    from onnx import TensorProto, helper

    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
        [
            helper.make_tensor_value_info("y", TensorProto.UINT8, list(x.shape)),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("z", TensorProto.UINT8, []),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: tuple[Any, Any, Any] = tuple(session.run(None, {"x": x}))
    return found


@pytest.mark.full
@given(kind=KINDS, size=SIZES, seed=st.integers(0, 99))
@settings(max_examples=120)
def test_onnx_runtime_quantises_tensors_to_unsigned_bytes(
    kind: str, size: float, seed: int
) -> None:
    x = rows(kind, size, seed).numpy()
    codes, scale, zero = dynamic_quantize_linear(x)
    value = (codes.astype(np.float64) - float(zero)) * float(scale)
    error = np.abs(value - x.astype(np.float64))
    assert (error <= error_bound("onnxruntime-int8", torch.from_numpy(x)).numpy()).all()
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    step = (high - low) / np.float32(255)
    if step >= 2.0**-126:  # below, the range vanishes in the last bits
        assert scale == step
        assert zero == np.clip(np.rint((np.float32(0) - low) / step), 0, 255)
        expected = np.clip(np.rint(x / step) + np.float32(zero), 0, 255)
        assert np.array_equal(codes, expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [2, 5, 64, 130])
def test_byte_products_on_this_processor_follow_the_adapter(size: int, sign: int) -> None:
    """Sums are exact, or within the loss of pair sums in 16 bits; tested with extreme codes."""
    generator = np.random.default_rng(size)
    left = generator.integers(200, 256, (3, size)).astype(np.uint8)
    right = (sign * generator.integers(90, 128, (size, 8))).astype(np.int8)
    found = matmul_integer(left, right).astype(np.float64)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    if not saturates():
        assert np.array_equal(found, exact)
        return
    weight = torch.from_numpy(right.astype(np.float64)).T / 127
    lost = pair_loss(weight, resolve({"preset": "onnxruntime-int8-pairs"})).numpy() * 127
    assert (np.abs(found - exact) <= lost).all()
    assert np.any(found != exact)


def matmul_integer(left: NDArray[np.uint8], right: NDArray[np.int8]) -> NDArray[np.int32]:
    """Return MatMulInteger of ONNX Runtime for codes with zero points of 0."""
    import onnxruntime
    from onnx import TensorProto, helper

    out = [len(left), right.shape[1]]
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.UINT8, list(left.shape)),
            helper.make_tensor_value_info("w", TensorProto.INT8, list(right.shape)),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT32, out)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: NDArray[np.int32] = session.run(None, {"x": left, "w": right})[0]
    return found


# --- torchao -------------------------------------------------------------------------------------


def quantised(original: Tensor, preset: str, **more: Any) -> Any:
    """Return the weight as torchao quantises it."""
    linear = nn.Linear(original.shape[1], original.shape[0], bias=False)
    quantise_linear(linear, original, resolve({"preset": preset, **more}))
    return linear.weight


@pytest.mark.parametrize("scale", ["per_channel", "per_tensor"])
@pytest.mark.parametrize("preset", ["torchao-float8-weights", "torchao-int8-weights"])
@pytest.mark.parametrize("kind", ["plain", "positive", "one large", "mixed sizes"])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e4])
def test_torchao_weights_follow_the_numerics(
    preset: str, scale: str, kind: str, size: float
) -> None:
    w = rows(kind, size, 3, (20, 64))
    form = resolve({"preset": preset}).weights.format
    more = {"compute": "float32", "weights": {"format": form, "scale": scale}}
    found = quantised(w, preset, **more)
    expected = linear_weight(w, resolve({"preset": preset, **more}))
    assert torch.equal(found.dequantize().float(), expected)


def test_symmetric_int8_with_limit_127_is_another_format() -> None:
    w = rows("plain", 1.0, 4, (20, 64))
    narrow = linear_weight(w, resolve({"preset": "int8-weights", "compute": "float32"}))
    found = quantised(w, "torchao-int8-weights").dequantize()
    assert float((found - narrow).abs().max()) > 1e-4


@given(kind=KINDS, size=SIZES.filter(lambda s: s < 1e30), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_torchao_quantises_rows_to_signed_bytes(kind: str, size: float, seed: int) -> None:
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    x = rows(kind, size, seed)
    made = Int8Tensor.from_hp(x, granularity=PerRow())
    step = (x.abs().amax(1, keepdim=True) / 127.5).clamp_min(2.0**-23)
    assert torch.equal(made.scale, step)
    assert torch.equal(made.qdata.float(), (x * (1.0 / step)).round().clamp(-128, 127))
    error = (made.qdata.double() * made.scale.double() - x.double()).abs()
    assert bool((error <= error_bound("torchao-int8-dynamic", x)).all())
    if kind == "zeros":
        assert float(error.max()) == 0


# --- torch._scaled_mm ----------------------------------------------------------------------------


@given(kind=KINDS, size=SIZES, seed=st.integers(0, 99), by_row=st.booleans())
@settings(max_examples=100)
def test_float8_codes_are_within_their_error(
    kind: str, size: float, seed: int, by_row: bool
) -> None:
    x = rows(kind, size, seed)
    codes, scale = quantise(x, by_row=by_row)
    error = (codes.double() * scale.double() - x.double()).abs()
    preset = "fp8-w8a8-per-channel" if by_row else "fp8-w8a8-per-tensor"
    assert bool((error <= error_bound(preset, x)).all())


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["fp8-w8a8-per-channel", "fp8-w8a8-per-tensor"])
def test_scales_are_applied_after_the_product(preset: str, compute: torch.dtype) -> None:
    """The product of codes is scaled in float32 and rounded once."""
    w, x = rows("plain", 0.05, 1, (16, 32)), rows("plain", 1.0, 2, (7, 32))
    numerics = resolve({"preset": preset})
    layer = ScaledLinear(nn.Linear(32, 16, bias=False), w, numerics)
    assert torch.equal(layer.weight, linear_weight(w, numerics))
    codes, scale = quantise(x.to(compute).float(), by_row=numerics.activations.scale == "per_token")
    exact = (codes.double() * scale.double()) @ (layer.codes.double() * layer.scale.double()).T
    found = layer(x.to(compute)).double()
    summed = (codes.double() * scale.double()).abs() @ layer.weight.double().abs().T * 2.0**-20
    once = exact.abs() * 2.0**-8 if compute == torch.bfloat16 else 0.0
    assert bool(((found - exact).abs() <= once + summed).all())
