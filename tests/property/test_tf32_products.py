"""TF32 products with float32 results: truncated by bit masks or rounded, inside every domain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.numerics.specification import parse_kernel

POINT = torch.zeros(1, 1, dtype=torch.float64)
TF32 = {"preset": "torch-eager", "products": "tfloat32"}


def cut(x: Tensor) -> Tensor:
    """Return float32 numbers without the last 13 bits of their significands."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """Return float32 numbers rounded to nearest, halves away from zero, as cvt.rna does."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def problem(weight: Tensor, x: Tensor, numerics: dict[str, str]) -> BlockProblem:
    """Return (x Wᵀ)(x Wᵀ)ᵀ, a linear and a product of computed matrices, against float64."""
    rows, outputs = x.shape[0], weight.shape[0]
    nodes = (
        Node("w", "param", (), tuple(weight.shape), {"key": "w"}),
        Node("x", "input", (), tuple(x.shape)),
        Node("y", "linear", ("x", "w"), (rows, outputs)),
        Node("t", "view", ("y",), (outputs, rows), {"split": [rows, outputs], "order": [1, 0]}),
        Node("z", "matmul", ("y", "t"), (rows, rows)),
    )
    graph = BlockGraph("mlp_0", nodes, "z", {}, tuple(x.shape))
    specs = resolve({"preset": "torch-eager", "compute": "float64"}), resolve(numerics)
    place = torch.device("cpu")
    return BlockProblem(graph, *(StoredParameters({"w": weight}, {}, s, place) for s in specs))


def boxes(made: BlockProblem, x: Tensor) -> list[Box]:
    return [
        made.bound(x.double(), POINT).output.drift,
        made.forms(x.double(), POINT).box(),
        planes(made.graph, made.kernels(), x.double(), POINT).box,
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("short", [cut, rounded])
@pytest.mark.parametrize("size", [1e-19, 1.0, 1e9])
def test_tf32_products_are_within_the_boxes(size: float, short: object, casts: str) -> None:
    assert callable(short)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(16, 40, generator=generator) * size
    for kind in range(3):
        x = torch.randn(6, 40, generator=generator)
        if kind == 1:  # numbers slightly below a representable one have the largest error
            x = torch.sign(x) * (2 - 2.0**-23)
        if kind == 2:
            x = x.abs()
            weight = weight.abs()
        y = short(x) @ short(weight).T
        found = (short(y) @ short(y).T).double()
        exact = x.double() @ weight.double().T
        drift = found - exact @ exact.T
        for box in boxes(problem(weight, x, {**TF32, "casts": casts}), x):
            assert bool((box.lo <= drift).all() & (drift <= box.hi).all())
        plain = {"preset": "torch-eager", "casts": casts}
        if size == 1.0 and kind:
            outside = boxes(problem(weight, x, plain), x)[0]
            assert bool((drift < outside.lo).any() | (drift > outside.hi).any())


def test_tf32_products_require_float32() -> None:
    for wrong in ({"compute": "bfloat16"}, {"compute": "float64"}, {"accumulate": "float64"}):
        with pytest.raises(Refusal, match="it is for float32"):
            resolve({**TF32, **wrong})
        record = resolve({"preset": "torch-eager", **wrong}).to_json() | {"products": "tfloat32"}
        with pytest.raises(Rejected, match="tfloat32"):
            parse_kernel(record, "kernel")
