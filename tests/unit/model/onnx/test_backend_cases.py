"""Operators of ONNX files compared with the backend test cases of the onnx package."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from kcdsl.diagnostics import Refusal
from kcdsl.model.onnx.files import KINDS, OnnxNode
from kcdsl.model.onnx.operators import OPERATORS, OperatorCall

PLAIN = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
FIXED = {"Where": (0,), "Slice": (1, 2, 3, 4), "Reshape": (1,), "Expand": (1,), "Split": (1,),
         "Squeeze": (1,), "Unsqueeze": (1,), "ReduceMean": (1,), "Gather": (1,), "Pow": (1,),
         "RotaryEmbedding": (1, 2, 3), "Dropout": (1, 2)}  # fmt: skip
"""Operands that are constants in the programs of exporters."""
AGREED = {
    "Add": 2, "Attention": 25, "Cast": 2, "Concat": 12, "Conv": 3, "Div": 2, "Dropout": 2,
    "Erf": 1, "Expand": 2, "Flatten": 9, "Gather": 4, "Gelu": 4, "Gemm": 4, "Identity": 1,
    "LayerNormalization": 2, "MatMul": 3, "Mul": 3, "Neg": 2, "Pow": 1, "RMSNormalization": 2,
    "Reciprocal": 2, "ReduceMean": 4, "Relu": 1, "Reshape": 8, "RotaryEmbedding": 3, "Sigmoid": 2,
    "Slice": 5, "Softmax": 5, "Split": 6, "Sqrt": 2, "Squeeze": 2, "Sub": 3, "Swish": 1, "Tanh": 2,
    "Transpose": 7, "Unsqueeze": 5, "Where": 1,
}  # fmt: skip
"""The least number of agreeing cases per operator; others are refused."""


@lru_cache(maxsize=1)
def cases() -> dict[str, list[Any]]:
    """Return the cases with one node of a supported operator."""
    from onnx.backend.test.case.node import collect_testcases

    found: dict[str, list[Any]] = {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for case in collect_testcases(None):
            nodes: list[Any] = list(case.model.graph.node) if case.model is not None else []
            if len(nodes) == 1 and nodes[0].domain == "" and nodes[0].op_type in OPERATORS:
                found.setdefault(nodes[0].op_type, []).append(case)
    return found


def _run(case: Any, inputs: list[Any]) -> list[Any]:
    proto = case.model.graph.node[0]
    attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
    plain = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
    node = OnnxNode(proto.name, proto.op_type, tuple(proto.input), tuple(proto.output), plain)
    given = iter(inputs)
    operands: list[Any] = []
    own = TensorProto.FLOAT
    for place, name in enumerate(proto.input):
        value = next(given) if name else None
        value = numpy_helper.to_array(value) if isinstance(value, TensorProto) else value
        fixed = place in FIXED.get(proto.op_type, ())
        if isinstance(value, np.ndarray) and not fixed:
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            if kind in KINDS:
                own = kind
            if kind in KINDS or value.dtype in (bool, np.float64, np.int32, np.int64):
                value = torch.from_numpy(np.array(value, dtype=np.float32 if kind == 16 else None))
        operands.append(value)
    dtype = {1: torch.float32, 10: torch.float16, 16: torch.bfloat16}[own]
    call = OperatorCall(node, tuple(operands), own, dtype, case.model.opset_import[0].version)
    return call.run()


@pytest.mark.full
@pytest.mark.parametrize("operator", sorted(AGREED))
def test_backend_cases_agree_or_are_refused(operator: str) -> None:
    agreed, refused = Counter[str](), []
    for case in cases().get(operator, []):
        for inputs, outputs in case.data_sets:
            if any(isinstance(value, list) for value in inputs):
                continue
            try:
                found = _run(case, list(inputs))
            except Refusal as refusal:
                refused.append((case.name, refusal.diagnostics[0].message))
                continue
            for mine, theirs in zip(found, outputs, strict=False):
                wanted = (
                    numpy_helper.to_array(theirs) if isinstance(theirs, TensorProto) else theirs
                )
                wanted = np.asarray(wanted)
                got = mine.to(torch.float64).numpy()
                assert got.shape == wanted.shape, case.name
                tolerance = 2e-2 if wanted.dtype.itemsize == 2 else max(case.rtol, 1e-5)
                np.testing.assert_allclose(
                    got,
                    wanted.astype(np.float64),
                    rtol=tolerance,
                    atol=tolerance,
                    err_msg=case.name,
                )
            agreed[operator] += 1
    assert agreed[operator] >= AGREED[operator], (agreed, refused)


def test_table_has_every_supported_operator() -> None:
    assert set(AGREED) == set(OPERATORS)


@pytest.mark.parametrize(
    ("kind", "attributes", "second"),
    [
        ("Conv", {"auto_pad": "VALID", "pads": [1, 1]}, torch.ones(1, 1, 2)),
        ("Squeeze", {}, np.zeros(0, dtype=np.int64)),  # ONNX Runtime squeezes all dimensions
    ],
)
def test_operators_on_which_runtimes_differ_are_refused(
    kind: str, attributes: dict[str, Any], second: Any
) -> None:
    node = OnnxNode("", kind, ("x", "w"), ("y",), attributes)
    call = OperatorCall(node, (torch.ones(1, 1, 3), second), TensorProto.FLOAT, torch.float32, 18)
    with pytest.raises(Refusal, match=kind):
        call.run()
