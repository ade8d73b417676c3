"""ALiBi: a distance bias on the scores of every head, with a causal mask beside it or inside."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import KernelRef
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory, claim_margin
from kcdsl_backends.certifier.statements.proof import Proof, ProofBuilder, box_region
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel
from kcdsl_certs.recheck import recheck
from tests.support.random_modules import model_of

ROWS, SIZE = 7, 4
BLOCK = "part", tuple(range(ROWS))
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CAUSAL = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()


def slopes(heads: int) -> Tensor:
    """Return the slopes of the heads; those of six heads are not representable in any format."""
    return torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])


def biases(slope: Tensor, far: int) -> Tensor:
    places = far * torch.arange(ROWS)
    return slope[:, None, None] * (places[None, :] - places[:, None])


def written_out(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(SIZE) + biases(s.slopes, s.far).to(q.dtype)
    return torch.softmax(scores.masked_fill(~CAUSAL, float("-inf")), -1) @ v


def one_table(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = biases(slopes(s.heads), s.far).masked_fill(~CAUSAL, float("-inf")).to(q.dtype)
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(SIZE) + table, -1) @ v


def two_tables(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.zeros(ROWS, ROWS).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    table = biases(slopes(s.heads), s.far).to(q.dtype) + hidden.to(q.dtype)
    return torch.softmax(table + q @ k.transpose(-1, -2) / math.sqrt(SIZE), -1) @ v


def in_float32(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2) / math.sqrt(SIZE)).float() + biases(slopes(s.heads), s.far)
    return torch.softmax(scores.masked_fill(~CAUSAL, float("-inf")), -1).to(q.dtype) @ v


def fused(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = biases(slopes(s.heads), s.far).masked_fill(~CAUSAL, float("-inf")).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=table)


def fused_without_mask(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=biases(s.slopes, s.far).to(q.dtype))


Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, Attend] = {
    "written out": written_out,
    "one table": one_table,
    "two tables": two_tables,
    "in float32": in_float32,
    "fused": fused,
    "fused without a mask": fused_without_mask,
}


class Alibi(nn.Module):
    """Attention with a distance bias; `far` is the distance of neighbours."""

    def __init__(self, attend: Attend, heads: int, far: int) -> None:
        super().__init__()
        torch.manual_seed(heads)
        width = heads * SIZE
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.register_buffer("slopes", slopes(heads), persistent=False)
        self.attend, self.heads, self.far = attend, heads, far

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != ROWS:
            return x
        parts = (part(x) for part in (self.q, self.k, self.v))
        q, k, v = (part.reshape(ROWS, self.heads, SIZE).transpose(0, 1) for part in parts)
        found = self.attend(self, q, k, v).transpose(0, 1)
        return self.o(found.reshape(ROWS, self.heads * SIZE))


def shop_of(part: Alibi, numerics: dict[str, str], folder: Path | None = None) -> ProblemFactory:
    model = model_of(part, part.heads * SIZE)
    if folder is not None:
        path = folder / "model.safetensors"
        save_file({name: t.clone() for name, t in model.checkpoint.tensors.items()}, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        model = replace(model, checkpoint=replace(model.checkpoint, path=path, sha256=digest))
    sides = resolve({"preset": "torch-eager"}), resolve(numerics)
    return ProblemFactory(model, *sides, torch.device("cpu"))


POINT = torch.zeros(1, 1, dtype=torch.float64)


@pytest.mark.full
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_module_with_biases_is_within_its_bounds(way: str, format: str) -> None:
    for heads, far in ((4, 1), (6, 1), (6, 300)):
        part = Alibi(WAYS[way], heads, far).eval().requires_grad_(False)
        x = torch.randn(ROWS, heads * SIZE, generator=torch.Generator().manual_seed(far))
        narrow: nn.Module = copy.deepcopy(part).to(FORMATS[format])
        rounds = way in ("written out", "fused without a mask") and format != "float32"
        if rounds and heads == 6:  # biases computed from rounded values
            with pytest.raises(Refusal, match="a table whose values depend on the format"):
                shop_of(part, {"preset": "torch-eager", "compute": format}).problem(*BLOCK)
            continue
        for preset in ("torch-eager", "torch-sdpa-math"):
            numerics = {"preset": preset, "compute": format}
            factory = shop_of(part, numerics)
            problem = factory.problem(*BLOCK)
            real = (part(x).double() - narrow(x.to(FORMATS[format])).double()).abs()
            margin = claim_margin(factory.train, factory.infer)
            assert bool(
                (real <= problem.bound(x.double(), POINT).output.drift.mag() * margin).all()
            )
            assert bool((real <= problem.forms(x.double(), POINT).box().mag() * margin).all())


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_biases_and_masks_keep_roles_of_attention(way: str) -> None:
    part = Alibi(WAYS[way], 4, 1).eval().requires_grad_(False)
    graph = shop_of(part, {"preset": "torch-eager"}).problem(*BLOCK).graph
    assert "add" in [node.op for node in graph.nodes if node.role == "scores"]
    softmax = next(node for node in graph.nodes if node.op == "softmax")
    assert softmax.role == "probabilities"
    assert len(softmax.inputs) == (1 if way == "fused without a mask" else 2)
    for name, value in graph.constants.items():
        assert value.dtype == bool or (abs(value) < 1e4).all(), name


def learned(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=s.v.weight[:ROWS, :ROWS])


def by_distance(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(ROWS)
    rows = F.embedding(places[:, None] - places[None, :] + ROWS, s.q.weight)
    table = rows.permute(2, 0, 1)[: s.heads]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=table * 0.7)


def of_the_input(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=q @ v.mT)


COMPUTED: dict[str, Attend] = {
    "learned": learned, "by distance": by_distance, "of the input": of_the_input,
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("way", COMPUTED)
def test_computed_biases_are_added_to_unstored_scores(way: str, format: str) -> None:
    part = Alibi(COMPUTED[way], 4, 1).eval().requires_grad_(False)
    model = model_of(part, 4 * SIZE)
    claims = {"compute": format, "casts": "nearest"}
    names = [("torch.eager", {}), ("torch.sdpa.math", claims)]
    refs = [KernelRef(run, tuple(sorted(said.items()))) for run, said in names]
    train, infer = (load_kernel(ref, model, "cpu") for ref in refs)
    factory = ProblemFactory(model, train.numerics, infer.numerics, torch.device("cpu"))
    problem = factory.problem(*BLOCK)
    roles = [(node.op, node.role) for node in problem.graph.nodes if node.role]
    assert roles == [
        ("matmul", "scores"), ("scale", "scores"), ("add", "scores"),
        ("softmax", "probabilities"), ("matmul", "context"),
    ]  # fmt: skip
    for seed in range(8):
        x = torch.randn(ROWS, 4 * SIZE, generator=torch.Generator().manual_seed(seed))
        real = (infer.block("part", x) - train.block("part", x)).abs()
        bound = problem.bound(x.double(), POINT).output.drift.mag()
        assert bool((real <= bound * claim_margin(factory.train, factory.infer)).all()), seed


@pytest.mark.sample(1)
@pytest.mark.parametrize("radius", [0.0, 1e-3])
@pytest.mark.parametrize("way", WAYS | COMPUTED)
def test_checker_confirms_biases(way: str, radius: float, tmp_path: Path) -> None:
    part = Alibi((WAYS | COMPUTED)[way], 4, 1).eval().requires_grad_(False)
    preset = "torch-sdpa-math" if way in COMPUTED else "torch-eager"
    factory = shop_of(part, {"preset": preset, "compute": "bfloat16"}, tmp_path)
    problem = factory.problem(*BLOCK)
    x = torch.randn(ROWS, 4 * SIZE, generator=torch.Generator().manual_seed(2)).double()
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    bounds = problem.bound(x, spread)
    claim = drift_bound(bounds.output.drift, "inf") * claim_margin(factory.train, factory.infer)
    builder = ProofBuilder(factory.model, "part", factory.train, factory.infer, "inf", 1)
    region = box_region("ball" if radius else "points", x, spread)
    builder.add("a", problem.graph, region, claim, Proof(bounds.witness))
    outcome = recheck(builder.document(), factory.model.checkpoint.path)
    assert outcome.ok, (outcome.reason, outcome.detail)
    builder = ProofBuilder(factory.model, "part", factory.train, factory.infer, "inf", 1)
    builder.add("a", problem.graph, region, claim / 2, Proof(bounds.witness))
    assert recheck(builder.document(), factory.model.checkpoint.path).reason == "claim/too-small"
