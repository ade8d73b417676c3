"""A PyTorch kernel that truncates float32 results to bfloat16 with a bit mask, as real ones do.

All arithmetic is PyTorch's float32 on the processor. After every operation that stores a result the
lower 16 bits of the float32 numbers are set to zero, which is a cast to bfloat16 toward zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.attack.operations import MOVES, moved
from kcdsl_backends.attack.simulation import STORED

UPPER_HALF = -0x10000
"""0xffff0000 as a signed number."""


def cut_off(x: Tensor) -> Tensor:
    """Return float32 numbers with the lower half of their bits set to zero."""
    return (x.contiguous().view(torch.int32) & UPPER_HALF).view(torch.float32)


def run(graph: BlockGraph, tensors: Mapping[str, Tensor], x: Tensor, *, weights: bool) -> Tensor:
    """Return the block output for the input x [T, D].

    `weights` states whether parameters are truncated too, or rounded to nearest by PyTorch.
    """
    values: dict[str, Tensor] = {}
    nodes = {node.name: node for node in graph.nodes}

    def held(w: Tensor) -> Tensor:
        return cut_off(w.float()) if weights else w.to(torch.bfloat16).float()

    for node in graph.nodes:
        operands = [values[name] for name in node.inputs]
        match node.op:
            case "input":
                value = cut_off(x.float())
            case "param":
                value = held(tensors[node.attrs["key"]])
            case "constant":
                array = torch.from_numpy(graph.constants[node.attrs["key"]])
                value = array if array.dtype == torch.bool else held(array)
            case op if op in MOVES:
                value = moved(node, operands, [nodes[name] for name in node.inputs])
            case _:
                value = _OPERATIONS[node.op](node, *operands)
        values[node.name] = cut_off(value) if node.op in STORED else value
    return values[graph.output]


def _softmax(node: Node, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    shown = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return shown.softmax(-1)


def _rope(node: Node, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return cut_off(x * cos) + cut_off(turned * sin)


def _rms_norm(node: Node, x: Tensor, gain: Tensor) -> Tensor:
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(node.attrs["eps"]))
    return cut_off(normal) * gain


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "linear": lambda node, x, w, b=None: F.linear(x, w, b),
    "matmul": lambda node, a, b: a @ b,
    "add": lambda node, a, b: a + b,
    "mul": lambda node, a, b: a * b,
    "scale": lambda node, x: x * float(node.attrs["factor"]),
    "divide": lambda node, x: x / float(node.attrs["divisor"]),
    "gelu": lambda node, x: F.gelu(x, approximate=node.attrs.get("approximate", "none")),
    "silu": lambda node, x: F.silu(x),
    "neg": lambda node, x: -x,
    "softmax": _softmax,
    "rope": _rope,
    "rms_norm": _rms_norm,
}
