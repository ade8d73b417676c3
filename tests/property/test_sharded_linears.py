"""Linears sharded along their inputs: parts stored and added in the compute format."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.numerics.specification import parse_kernel

POINT = torch.zeros(1, 1, dtype=torch.float64)
WIDTH, OUTPUTS = 48, 10


def reduced(parts: list[Tensor], order: str, seed: int) -> Tensor:
    """Return the sum of the parts, with every addition rounded to their format."""
    places = list(np.random.default_rng(seed).permutation(len(parts)))
    left = [parts[k] for k in places]
    while len(left) > 1:
        if order == "ring":
            left = [left[0] + left[1], *left[2:]]
        else:
            pairs = [left[k] + left[k + 1] for k in range(0, len(left) - 1, 2)]
            left = pairs + left[len(left) - len(left) % 2 :]
    return left[0]


def problem(tensors: dict[str, Tensor], rows: int, numerics: Mapping[str, object]) -> BlockProblem:
    """Return one linear, with a bias if there is one, against float64."""
    names = tuple(n for n in ("w", "b") if n in tensors)
    nodes = (
        *(Node(n, "param", (), tuple(tensors[n].shape), {"key": n}) for n in names),
        Node("x", "input", (), (rows, WIDTH)),
        Node("y", "linear", ("x", *names), (rows, OUTPUTS)),
    )
    graph = BlockGraph("mlp_0", nodes, "y", {}, (rows, WIDTH))
    specs = resolve({"preset": "torch-eager", "compute": "float64"}), resolve(numerics)
    place = torch.device("cpu")
    return BlockProblem(graph, *(StoredParameters(tensors, {}, s, place) for s in specs))


@pytest.mark.sample(12)
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_sums_of_parts_are_within_the_boxes(
    compute: str, shards: int, bias: bool, casts: str
) -> None:
    form = getattr(torch, compute)
    generator = torch.Generator().manual_seed(shards)
    left = False
    for kind in range(2):
        w = torch.randn(OUTPUTS, WIDTH, generator=generator)
        x = torch.randn(5, WIDTH, generator=generator)
        if kind:  # large parts that cancel have the largest error
            w[:, WIDTH // 2 :] = -w[:, : WIDTH // 2]
            x[:, WIDTH // 2 :] = x[:, : WIDTH // 2] * (1 + 2.0**-6)
        tensors = {"w": w, **({"b": torch.randn(OUTPUTS, generator=generator)} if bias else {})}
        held = {name: t.to(form) for name, t in tensors.items()}
        size = WIDTH // shards
        parts = [
            (x.to(form)[:, k : k + size].float() @ held["w"][:, k : k + size].float().T).to(form)
            for k in range(0, WIDTH, size)
        ]
        exact = x.double() @ w.double().T
        numerics = {"preset": "torch-eager", "compute": compute, "casts": casts}
        own, plain = (problem(tensors, 5, {**numerics, "shards": n}) for n in (shards, 1))
        boxes: list[Box] = [
            own.bound(x.double(), POINT).output.drift,
            own.forms(x.double(), POINT).box(),
            planes(own.graph, own.kernels(), x.double(), POINT).box,
        ]
        narrow = plain.bound(x.double(), POINT).output.drift
        for seed, order in ((0, "ring"), (1, "ring"), (2, "tree")):
            total = reduced(parts, order, seed)
            total = total + held["b"] if bias else total
            drift = total.double() - exact - (tensors["b"].double() if bias else 0.0)
            for box in boxes:
                assert bool((box.lo <= drift).all() & (drift <= box.hi).all())
            left = left or bool(((drift < narrow.lo) | (drift > narrow.hi)).any())
    # with free casts, the rounding of the input alone is as large
    assert left or casts == "any", "no run leaves the bound of one device"


def test_parts_may_overflow_though_their_sum_does_not() -> None:
    w = torch.cat([torch.ones(OUTPUTS, WIDTH // 2), -torch.ones(OUTPUTS, WIDTH // 2)], 1)
    x = torch.full((2, WIDTH), 3000.0)
    numerics = {"preset": "torch-eager", "compute": "float16", "casts": "nearest"}
    whole = problem({"w": w}, 2, numerics).bound(x.double(), POINT).output.drift
    assert bool(torch.isfinite(whole.hi).all())
    with pytest.raises(NoBound):
        problem({"w": w}, 2, {**numerics, "shards": 2}).bound(x.double(), POINT)


def test_shards_must_be_a_number() -> None:
    for wrong in (0, 1025, 1.5, "two"):
        with pytest.raises(Refusal, match="shards"):
            resolve({"preset": "torch-eager", "shards": wrong})
    assert "shards" not in resolve({"preset": "torch-eager", "shards": 1}).to_json()
    record = resolve({"preset": "torch-eager", "shards": 2}).to_json()
    assert parse_kernel(record, "kernel").shards == 2
    for other in (1, -1, "2", 2.5):
        with pytest.raises(Rejected):
            parse_kernel(record | {"shards": other}, "kernel")
