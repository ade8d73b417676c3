"""Chain proofs of small random models, and simulated runs through their links."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kcdsl.ir.terms import ModelRef, Program
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.bert import build as build_bert
from kcdsl.model.architectures.llama import build as build_llama
from kcdsl.model.graph import BlockGraph
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal, goals
from kcdsl_backends.certifier.composition import CompositionTask, StagePlan
from kcdsl_backends.certifier.stages import partitions, prefix, stages_of
from kcdsl_backends.certifier.statements.cases import Case
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.certifier.tasks import BoundedCase
from kcdsl_backends.certifier.worker import RunSettings, WorkerContext
from tests.support.small_models import write_contract, write_model

EAGER: dict[str, Any] = {"preset": "torch-eager"}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "identical": (EAGER, EAGER),
    "float32 fused": (EAGER, {"preset": "torch-sdpa-flash"}),
    "float32 nearest": ({**EAGER, "casts": "nearest"}, {**EAGER, "casts": "nearest"}),
    "float16 any": (EAGER, {"preset": "torch-sdpa-flash", "compute": "float16"}),
    "bfloat16 nearest": (EAGER, {**EAGER, "compute": "bfloat16", "casts": "nearest"}),
    "bfloat16 twice": (
        {**EAGER, "compute": "bfloat16", "casts": "nearest", "results": {"add": "float32"}},
        {**EAGER, "compute": "bfloat16", "casts": "nearest", "results": {"add": "float32"}},
    ),
    "fp8 weights": (EAGER, {"preset": "fp8-weights", "compute": "float16"}),
    "float64": (
        {**EAGER, "compute": "float64", "accumulate": "float64"},
        {"preset": "torch-sdpa-flash", "compute": "float64", "accumulate": "float64"},
    ),
}
_SIZES = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 16, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True}
    | _SIZES,
    "bert": {"model_type": "bert"} | _SIZES,
}
PLAIN = """
import torch
from torch import nn


class Network(nn.Module):
    limits = (16, 32)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 3)
        for name in ("one", "two", "three", "four"):
            self.add_module(name, nn.Linear(3, 3, bias=False))
        self.head = nn.Linear(3, 5, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.two(torch.relu(self.one(x)))
        x = x + self.four(torch.relu(self.three(x)))
        return self.head(x)


def build(config):
    return Network()
"""
CLAUSES = (
    "forall x in points(all): norm_inf(drift(model, x)) <= 0.000000001",
    "forall x in ball(all, 0.001): norm_2(drift(layer_1, x)) <= 0.000000001",
    "forall x in points(all): no_flip(model, x, 1)",
    "forall x in points(all): norm_inf(drift(layer_0, x)) <= 0.000000001",
)


@dataclass(frozen=True, slots=True)
class Chained:
    """A case of a goal, the graphs of its block and links, and the result of the prover."""

    context: WorkerContext
    goal: Goal
    case: Case
    whole: BlockGraph
    links: tuple[BlockGraph, ...]
    found: BoundedCase

    @property
    def document(self) -> bytes:
        """Return the proof."""
        builder = self.context.builder(self.goal)
        assert self.found.contents is not None
        builder.absorb(self.found.contents)
        return builder.document()

    @property
    def checkpoint(self) -> Path:
        """Return the file of the weights."""
        return self.context.factory.model.checkpoint.path

    def runs(self, count: int, seed: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield admitted runs: the values of both kernels behind every link."""
        generator = torch.Generator().manual_seed(seed)
        problem = self.context.factory.problem_of_graph(self.whole)
        sides = problem.simulators()
        ends = [prefix(self.whole, link.output) for link in self.links]
        ready = [self.context.factory.problem_of_graph(end).simulators() for end in ends]
        for trial in range(count):
            x = _input(self.case, trial, generator)
            symbols = [
                {n: _symbol(shape, trial, generator) for n, shape in s.symbol_shapes().items()}
                for s in sides
            ]
            yield [(t.run(x, symbols[0]), i.run(x, symbols[1])) for t, i in ready]


def chained(
    folder: Path,
    kind: str = "llama",
    pair: str = "float32 fused",
    clause: int = 0,
    tokens: tuple[int, ...] = (1, 5, 2),
    cache: Path | None = None,
    seed: int = 17,
    count: int | None = None,
    *,
    ellipsoids: bool = False,
) -> Chained:
    """Prove a case of a clause of `CLAUSES` by a chain, on a random model of two layers.

    `count` limits the number of links; by default the block is cut into as many as possible.
    """
    model, program = small(folder, kind, seed)
    train, infer = (resolve(numerics) for numerics in PAIRS[pair])
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    setting = RunSettings(program, folder, "cpu", 1, model.checkpoint.sha256, "test", cache)
    context, goal = WorkerContext(setting, factory), goals(program)[clause]
    centre = factory.centre(goal.block, tokens)
    radius = torch.full((1, 1), float(goal.region.radius), dtype=torch.float64)
    case = Case("case", tokens, centre, radius)
    whole = factory.problem(goal.block, tokens).graph
    links = stages_of(model, whole)
    if count is not None:
        links = next(some for some in partitions(whole, links) if len(some) == count)
    plan = StagePlan(len(links), ellipsoids) if len(links) > 1 else None
    found, _ = CompositionTask(goal, case, plan).run(context)
    return Chained(context, goal, case, whole, links, found)


def small(folder: Path, kind: str, seed: int = 17) -> tuple[Model, Program]:
    """Write and load a random model of two layers; return it with a program of all clauses.

    The kind "plain" has linear maps, relu and sums alone, which the exact tier supports.
    """
    own = folder / f"{kind}-{seed}"
    if not own.is_dir():
        own.mkdir(parents=True)
        write_model(own)
        torch.manual_seed(seed)
        state = {
            name: torch.randn(shape) * 0.3
            + (1.0 if "orm" in name and name.endswith("weight") else 0)
            for name, shape in _shapes(kind).items()
        }
        save_file(state, own / "own.safetensors")
        (own / "own.json").write_text(json.dumps(CONFIGS.get(kind, {})))
        (own / "plain_network.py").write_text(PLAIN)
    if kind == "plain":
        files = ModelRef("own.safetensors", module="plain_network:build", config="own.json")
    else:
        files = ModelRef("own.safetensors", architecture=kind, config="own.json")
    return load_model(files, own), write_contract(own, *CLAUSES)


def _shapes(kind: str) -> dict[str, tuple[int, ...]]:
    if kind == "plain":
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (16, 3), "head.weight": (5, 3)}
        for name in ("one", "two", "three", "four"):
            shapes[f"{name}.weight"] = (3, 3)
        return shapes
    module = (build_llama if kind == "llama" else build_bert)(CONFIGS[kind])
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def _input(case: Case, trial: int, generator: torch.Generator) -> Tensor | None:
    if case.centre is None:
        return None
    sign = torch.rand(case.centre.shape, generator=generator, dtype=torch.float64) * 2 - 1
    wide = sign.sign() if trial % 2 else sign
    near = (case.centre + wide * case.radius).to(torch.float32).to(torch.float64)
    inside = (near - case.centre).abs() <= case.radius
    return torch.where(inside, near, case.centre)


def _symbol(shape: tuple[int, ...], trial: int, generator: torch.Generator) -> Tensor:
    found = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (torch.ones_like(found), found, found.sign(), -torch.ones_like(found))[trial % 4]
