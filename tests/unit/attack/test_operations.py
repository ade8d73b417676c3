"""Batched runs equal single runs, for every operation that moves data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, View
from kcdsl_backends.attack.operations import batchable, moved

SHAPE = (2, 3, 4)
CASES: dict[str, tuple[View, tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "reshape": (View.reshaped((6, 4)), SHAPE, lambda x: x.reshape(6, 4)),
    "permute": (View.permuted(SHAPE, (-1, 0, 1)), SHAPE, lambda x: x.permute(-1, 0, 1)),
    "expand": (View.expanded((1, 4), (2, 5, 4)), (1, 4), lambda x: x.expand(2, 5, 4)),
    "slice": (View.sliced(SHAPE, -1, 1, 4, 2), SHAPE, lambda x: x[..., 1:4:2]),
    "heads": (
        View((2, 3, 2, 2), ((0, 2, 1), (1, 3, 1), (0, 2, 1), (0, 2, 1)), (2, 0, 1, 3), (2, 2, 2, 2),
             (4, 4)),
        SHAPE,
        lambda x: x.reshape(2, 3, 2, 2)[:, 1:].permute(2, 0, 1, 3).reshape(4, 4),
    ),
}  # fmt: skip
"""A view, its input shape, and its attributes."""


@pytest.mark.parametrize("op", CASES)
def test_batched_data_movement_equals_single_runs(op: str) -> None:
    view, shape, expected = CASES[op]
    node = Node("y", "view", ("x",), view.shape, view.attrs)
    assert View.of(node) == view
    source = Node("x", "input", (), shape)
    many = torch.arange(5.0 * torch.Size(shape).numel()).reshape(5, *shape)
    together = moved(node, [many], [source])
    assert together.shape == (5, *node.shape)
    for run, found in zip(many, together, strict=True):
        assert torch.equal(found, expected(run))
        assert torch.equal(moved(node, [run], [source]), found)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_batched_parts_concatenate_with_shared_constants(dim: int) -> None:
    node = Node("y", "concat", ("a", "b"), (0,), {"dim": dim})
    sources = [Node(name, "input", (), (2, 2)) for name in "ab"]
    one, many = torch.arange(4.0).reshape(2, 2), torch.arange(12.0).reshape(3, 2, 2)
    for operands in ([one, many], [many, one]):
        together = moved(node, operands, sources)
        for index in range(3):
            parts = [x[index] if x.dim() == 3 else x for x in operands]
            assert torch.equal(together[index], torch.cat(parts, dim))
    assert torch.equal(moved(node, [one, one], sources), torch.cat([one, one], dim))


def graph(*nodes: Node) -> BlockGraph:
    return BlockGraph("b", nodes, nodes[-1].name, {}, (2, 3))


@pytest.mark.parametrize(
    ("node", "other", "stands"),
    [
        (("add", (2, 3)), ("input", (2, 3)), True),
        (("add", (2, 3)), ("param", (3,)), True),
        (("matmul", (4, 2, 2)), ("input", (3, 2)), False),
        (("mul", (4, 2, 3)), ("constant", (4, 2, 3)), False),
    ],
)
def test_batch_dimension_requires_operands_of_equal_rank(
    node: tuple[str, Any], other: tuple[str, Any], stands: bool
) -> None:
    first = Node("x", "input", (), (4, 2, 3) if node[0] == "matmul" else (2, 3))
    second = Node("b", other[0], (), other[1], {"key": "b"})
    assert batchable(graph(first, second, Node("y", node[0], ("x", "b"), node[1]))) is stands
