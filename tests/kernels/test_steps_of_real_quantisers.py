"""Real quantisers follow the step functions of `casts: nearest`: codes, values, linears on codes.

At points every code of ONNX Runtime, torchao and PyTorch's float8 casts equals that of the
numerics, in regions it is among the derived ones; results of linears on codes lie in the boxes of
both domains.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.quantisers import codes, quantiser
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.empirical.sources.kernels.engines import exact_bytes, quantise_linear

KINDS = ("plain", "positive", "one large", "mixed sizes", "bfloat16")
WIDE = (0.0, 1e-6, 1e-3)


def numbers(kind: str, shape: tuple[int, int] = (7, 48)) -> Tensor:
    """Return a float32 matrix of a kind of distribution."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    x = torch.randn(shape, generator=generator)
    match kind:
        case "positive":
            return x.abs() + 0.1
        case "one large":
            x[2, 3] = 50.0
        case "mixed sizes":
            return x * torch.exp2(torch.randint(-20, 1, x.shape, generator=generator).float())
        case "bfloat16":
            return x.bfloat16().float()
    return x


def onnx_codes(op: str, x: Tensor, *more: np.ndarray) -> tuple[Tensor, float]:
    """Return the codes of an operation of ONNX Runtime, minus the zero point, and the scale."""
    import onnxruntime
    from onnx import TensorProto, helper

    types = {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.int8): TensorProto.INT8}
    made = op == "DynamicQuantizeLinear"
    code = TensorProto.UINT8 if made else types[more[1].dtype]
    names = ["x", *("s", "z")[: len(more)]]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))]
    if not made:
        given.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, []))
        given.append(helper.make_tensor_value_info("z", code, []))
    outputs = [helper.make_tensor_value_info("y", code, list(x.shape))]
    if made:
        outputs.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, []))
        outputs.append(helper.make_tensor_value_info("u", TensorProto.UINT8, []))
    node = helper.make_node(op, names, [o.name for o in outputs])
    graph = helper.make_graph([node], "g", given, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: Any = session.run(None, dict(zip(names, (x.numpy(), *more), strict=True)))
    scale, zero = (found[1], found[2]) if made else more
    return torch.from_numpy(found[0].astype(np.float64)) - float(zero), float(scale)


def within(x: Tensor, found: Tensor, spec: Any, wide: float) -> None:
    """Assert that the codes of x are in the derived region, and equal at a point."""
    centre = x.double()
    spread = wide * centre.abs().amax()
    by = quantiser(Box(centre - spread, centre + spread), spec, "w.weight", "n")
    expected = codes(Box(centre - spread, centre + spread), by)
    assert bool((expected.low <= found).all() & (found <= expected.high).all())
    if not wide and spec.scale != "static":
        assert torch.equal(expected.low, expected.high)
    if not wide:
        straddling = expected.low != expected.high
        assert float(straddling.double().mean()) < 0.01


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_runtime_codes_with_dynamic_scales(kind: str, wide: float) -> None:
    x = numbers(kind)
    found, _ = onnx_codes("DynamicQuantizeLinear", x)
    within(x, found, resolve({"preset": "onnxruntime-int8"}).activations, wide)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("format", ["uint8", "int8_full"])
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_runtime_codes_with_static_scales(kind: str, format: str, wide: float) -> None:
    x = numbers(kind)
    zero = np.array(131, np.uint8) if format == "uint8" else np.array(0, np.int8)
    scale = np.array(float(x.abs().amax()) * 1.01 / 120, np.float32)
    found, _ = onnx_codes("QuantizeLinear", x, scale, zero)
    more = {"input_zero_point": 131} if format == "uint8" else {}
    static = {"format": format, "scale": "static", "input_scale": float(scale), **more}
    spec = resolve({"preset": "torch-eager", "activations": static}).activations
    within(x, found, spec, wide)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float8_codes_with_static_scales(kind: str, times: bool, wide: float) -> None:
    """For kernels that divide, and for those that multiply by the reciprocal, as vLLM's do."""
    x = numbers(kind)
    scale = (x.abs().amax() * 1.01 / 448).float()
    ratio = x * (1.0 / scale) if times else x / scale
    found = ratio.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    static = {"format": "fp8_e4m3", "scale": "static", "input_scale": float(scale)}
    spec = resolve({"preset": "torch-eager", "activations": static}).activations
    within(x, found, spec, wide)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_torchao_codes_with_row_scales(kind: str, wide: float) -> None:
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    x = numbers(kind)
    found = Int8Tensor.from_hp(x, granularity=PerRow()).qdata.double()
    within(x, found, resolve({"preset": "torchao-int8-dynamic"}).activations, wide)


def bounds(weight: Tensor, x: Tensor, numerics: dict[str, Any]) -> tuple[Box, Box]:
    """Return where the drift of a linear lies by the interval and by the affine domain."""
    nodes = (
        Node("w", "param", (), tuple(weight.shape), {"key": "w.weight"}),
        Node("x", "input", (), tuple(x.shape)),
        Node("y", "linear", ("x", "w"), (x.shape[0], weight.shape[0])),
    )
    graph = BlockGraph("mlp_0", nodes, "y", {}, tuple(x.shape))
    exact = resolve({"preset": "torch-eager", "compute": "float64"})
    specs = exact, resolve(numerics)
    place = torch.device("cpu")
    train, infer = (StoredParameters({"w.weight": weight}, {}, s, place) for s in specs)
    point = torch.zeros(1, 1, dtype=torch.float64)
    problem = BlockProblem(graph, train, infer)
    interval = problem.bound(x.double(), point).output.drift
    return interval, problem.forms(x.double(), point).box()


@pytest.mark.parametrize("casts", ["nearest", "any"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchao_linear_on_codes_lies_in_both_boxes(kind: str, casts: str) -> None:
    """Its drift from the float64 product; with nearest casts the box is hardly wider."""
    weight, x = numbers("plain", (32, 48)) / 7, numbers(kind)
    numerics = {"preset": "torchao-int8-dynamic", "casts": casts}
    layer = nn.Linear(48, 32, bias=False)
    quantise_linear(layer, weight, resolve(numerics))
    with torch.no_grad():
        product = layer(x) if exact_bytes("cpu") else by_codes(layer, x)
        found = product.double() - x.double() @ weight.double().T
    for box in bounds(weight, x, numerics):
        assert bool((box.lo <= found).all() & (found <= box.hi).all())
        wide = float((box.hi - box.lo).amax())
        assert (wide <= 1e-2 * float(found.abs().amax())) is (casts == "nearest")


def by_codes(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return torchao's linear where the processor multiplies bytes inexactly."""
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    held: Any = layer.weight
    made = Int8Tensor.from_hp(x, granularity=PerRow())
    sums = (made.qdata.double() @ held.qdata.double().T).float()
    found: Tensor = sums * made.scale.reshape(-1, 1) * held.scale.reshape(1, -1)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_runtime_linear_on_codes_lies_in_both_boxes(kind: str) -> None:
    """DynamicQuantizeLinear, an exact product of codes, and a product with both scales."""
    weight, x = numbers("plain", (32, 48)) / 7, numbers(kind)
    numerics = {"preset": "onnxruntime-int8", "casts": "nearest"}
    activations, step = onnx_codes("DynamicQuantizeLinear", x)
    own = float(np.float32(2 * float(weight.abs().amax()) / 254))
    stored = torch.round(weight / own).clamp(-127, 127).double()
    both = float(np.float32(step) * np.float32(own))
    product = (activations @ stored.T).float() * both
    found = product.double() - x.double() @ weight.double().T
    for box in bounds(weight, x, numerics):
        assert bool((box.lo <= found).all() & (found <= box.hi).all())
        assert float((box.hi - box.lo).amax()) <= 1e-2 * float(found.abs().amax())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_scaled_products_with_static_scales_lie_in_both_boxes(kind: str, compute: str) -> None:
    """`torch._scaled_mm` on the codes that a static scale gives."""
    weight, x = numbers("plain", (32, 48)) / 7, numbers(kind)
    form = torch.float32 if compute == "float32" else torch.bfloat16
    scale = (x.abs().amax() * 1.05 / 448).float()
    own = (weight.abs().amax() / 448).float()
    numerics = {
        "preset": "torch-scaled-mm",
        "compute": compute,
        "casts": "nearest",
        "weights": {"format": "fp8_e4m3", "scale": "per_tensor"},
        "activations": {"format": "fp8_e4m3", "scale": "static", "input_scale": float(scale)},
    }
    held = x.to(form).float()
    left = (held * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    right = (weight / own).clamp(-448, 448).to(torch.float8_e4m3fn)
    product = torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=own, out_dtype=form)
    found = product.double() - x.double() @ weight.double().T
    for box in bounds(weight, x, numerics):
        assert bool((box.lo <= found).all() & (found <= box.hi).all())
