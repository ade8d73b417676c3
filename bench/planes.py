"""Planes on the difference graph compared with the interval and the affine domain, on balls.

MiniLM blocks with published weights on one sentence of 6 tokens, hidden states in a ball; the
training kernel is float32 torch eager. `feed` consists of the feed-forward parts of the first two
layers in sequence, with ReLU instead of gelu. Every case has the largest elementwise bound of each
domain and the drift of the strongest run found. `met` is the intersection of all three boxes.

    make bench-planes
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, report
from bench.minilm import problem_factory

if TYPE_CHECKING:
    from kcdsl.model.graph import BlockGraph, Node

SENTENCE = "A cat sleeps."
_FLOAT32 = {"preset": "torch-sdpa-flash", "compute": "float32"}
_FLOAT8 = {**_FLOAT32, "weights": {"format": "fp8_e4m3", "scale": "per_channel"}}
_BFLOAT16 = {"preset": "torch-sdpa-flash", "compute": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    block: str
    numerics: dict[str, Any] = field(hash=False)
    radius: float


FEED = "feed"
CASES = (
    Case("feed, float32, ball 1e-2", FEED, _FLOAT32, 1e-2),
    Case("feed, float32, ball 1e-1", FEED, _FLOAT32, 1e-1),
    Case("feed, bfloat16, ball 1e-2", FEED, _BFLOAT16, 1e-2),
    Case("feed, bfloat16, ball 1e-1", FEED, _BFLOAT16, 1e-1),
    Case("feed, float8 weights, ball 1e-1", FEED, _FLOAT8, 1e-1),
    Case("attn_0, float32, ball 1e-3", "attn_0", _FLOAT32, 1e-3),
    Case("attn_0, float32, ball 1e-2", "attn_0", _FLOAT32, 1e-2),
    Case("attn_0, float8 weights, ball 1e-3", "attn_0", _FLOAT8, 1e-3),
    Case("attn_0, float8 weights, ball 1e-2", "attn_0", _FLOAT8, 1e-2),
    Case("attn_0, bfloat16, ball 1e-3", "attn_0", _BFLOAT16, 1e-3),
    Case("mlp_0, float32, ball 1e-2", "mlp_0", _FLOAT32, 1e-2),
    Case("mlp_0, float8 weights, ball 1e-2", "mlp_0", _FLOAT8, 1e-2),
    Case("layer_0, float32, ball 1e-3", "layer_0", _FLOAT32, 1e-3),
)


def main() -> int:
    """Measure every case and report."""
    figures: list[Figure] = []
    for case in CASES:
        figures += measure(case)
    return report("planes", figures)


def feed_forward(*graphs: BlockGraph) -> BlockGraph:
    """Return a sequence of the first two linears of each block with ReLU between them."""
    from kcdsl.model.graph import BlockGraph

    nodes: list[Node] = []
    last = ""
    for number, graph in enumerate(graphs):
        linears = [node for node in graph.nodes if node.op == "linear"][:2]
        named = {node.name: node for node in graph.nodes}
        if not last:
            nodes.append(named[linears[0].inputs[0]])
            last = nodes[0].name
        for part, node in enumerate(linears):
            own = [replace(named[name], name=f"{number}:{name}") for name in node.inputs[1:]]
            name = f"{number}:{node.name}"
            inputs = (last, *(parameter.name for parameter in own))
            nodes += [*own, replace(node, name=name, inputs=inputs)]
            last = name
            if part == 0:
                last = f"{number}:relu"
                nodes.append(replace(node, name=last, op="relu", inputs=(name,)))
    return BlockGraph(FEED, tuple(nodes), last, {}, graphs[0].input_shape)


def measure(case: Case) -> list[Figure]:
    """Bound one case by every domain, and attack it."""
    import torch

    from kcdsl_backends.attack import attack
    from kcdsl_backends.drift.boxes import Box, NoBound
    from kcdsl_backends.drift.linear_bounds import linear_bounds as drift

    factory = problem_factory(case.numerics)
    tokens = tuple(factory.model.tokenizer.encode(SENTENCE))
    block = "mlp_0" if case.block == FEED else case.block
    problem, centre = factory.problem(block, tokens), factory.centre(block, tokens)
    if case.block == FEED:
        after = factory.problem("mlp_1", tokens)
        problem = factory.problem_of_graph(feed_forward(problem.graph, after.graph))
    radius = torch.full((1, 1), case.radius, dtype=torch.float64)

    def timed(work: Callable[[], Box]) -> tuple[Box | None, float]:
        started = time.perf_counter()
        try:
            box = work()
        except NoBound as no:
            print(case.name, no, file=sys.stderr)
            return None, time.perf_counter() - started
        return box, time.perf_counter() - started

    found = {
        "interval": timed(lambda: problem.bound(centre, radius).output.drift),
        "affine": timed(lambda: problem.forms(centre, radius).box()),
        "planes": timed(lambda: drift(problem.graph, problem.kernels(), centre, radius).box),
    }
    boxes = {name: box for name, (box, _) in found.items() if box is not None}
    met: Box | None = None
    for box in boxes.values():
        met = box if met is None else met.meet(box)
    if met is None or not bool((met.lo <= met.hi).all()):
        raise SystemExit(f"{case.name}: the domains exclude each other")
    places = met.mag().flatten().topk(3).indices.tolist()
    run = attack(
        *problem.simulators(), "inf", centre, radius, candidates=1, rounds=3, places=places
    )
    sizes = {name: float(box.mag().amax()) for name, box in boxes.items()}
    sizes["met"] = float(met.mag().amax())
    if any(run.value > size for size in sizes.values()):
        raise SystemExit(f"{case.name}: a run of drift {run.value} exceeds a bound: {sizes}")
    won = float((boxes["planes"].mag() <= met.mag()).double().mean()) if "planes" in boxes else 0.0
    times = ", ".join(f"{name} {t:.1f} s" for name, (_, t) in found.items())
    print(case.name, sizes, run.value, times, file=sys.stderr, flush=True)
    where = f"{len(tokens)} tokens; " + "; ".join(
        f"{name} {sizes.get(name, math.inf):.3g}" for name in ("interval", "affine", "planes")
    )
    others = min(sizes.get(name, math.inf) for name in ("interval", "affine"))
    gain = others / sizes["planes"] if "planes" in sizes else 0.0
    return [
        Figure(
            f"{case.name}: met / attack",
            sizes["met"] / run.value,
            Better.LOWER,
            None,
            f"{where}; attack {run.value:.3g}",
        ),
        Figure(
            f"{case.name}: better of the others / planes",
            gain,
            Better.HIGHER,
            None,
            f"planes are the least in {won:.0%} of the elements; {times}",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
