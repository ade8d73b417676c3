"""Constant folding by the operator version that a file states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.diagnostics import Refusal
from kcdsl.model.onnx.files import OnnxNode
from kcdsl.model.onnx.folding import folded


def node(kind: str, count: int, **attributes: Any) -> OnnxNode:
    """Return a node with `count` operands and one result."""
    return OnnxNode("", kind, tuple(f"x{i}" for i in range(count)), ("y",), attributes)


@pytest.mark.parametrize(
    ("kind", "attributes", "shape"),
    [
        ("Squeeze", {"axes": [0]}, (1, 3)),  # the newest version takes axes from an operand
        ("Unsqueeze", {"axes": [2, 0]}, (1, 1, 1, 1, 3)),
        ("ReduceMax", {"axes": [2]}, (1, 1, 1)),
    ],
)
def test_axes_are_attributes_in_old_versions(
    kind: str, attributes: dict[str, Any], shape: tuple[int, ...]
) -> None:
    (found,) = folded(node(kind, 1, **attributes), [np.ones((1, 1, 3), np.float32)], 11)
    assert found.shape == shape


def test_unsorted_axes_refer_to_the_result() -> None:
    (found,) = folded(node("Unsqueeze", 1, axes=[2, 0]), [np.ones((2, 3), np.float32)], 11)
    assert found.shape == (1, 2, 1, 3)


@pytest.mark.parametrize(
    ("kind", "operands"),
    [
        ("Squeeze", [[]]),  # ONNX Runtime squeezes all dimensions
        ("Slice", [[-3], [-9], [0], [-1]]),  # ONNX Runtime returns the first element
        ("Slice", [[0], [2**63 - 1], [0], [-1]]),  # ONNX Runtime goes to the beginning
        ("Slice", [[0], [2**31 - 1], [0], [-1]]),
    ],
)
def test_operands_on_which_runtimes_differ_are_refused_in_folding(
    kind: str, operands: list[list[int]]
) -> None:
    x = np.ones(1, np.float32)
    more = [np.asarray(one, dtype=np.int64) for one in operands]
    with pytest.raises(Refusal, match="not supported"):
        folded(node(kind, 1 + len(more)), [x, *more], 18)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements_along_long_axes(axis: int) -> None:
    """Equal to `torch.gather`; the reference implementation stops at 32 choices."""
    drawn = np.random.default_rng(0)
    data = drawn.standard_normal((70, 80)).astype(np.float32)
    indices = drawn.integers(0, 70, (5, 3))
    (found,) = folded(node("GatherElements", 2, axis=axis), [data, indices], 18)
    wanted = torch.gather(torch.from_numpy(data), axis, torch.from_numpy(indices)).numpy()
    np.testing.assert_array_equal(found, wanted)
    (back,) = folded(node("GatherElements", 2, axis=axis), [data, indices - data.shape[axis]], 18)
    np.testing.assert_array_equal(back, wanted)
