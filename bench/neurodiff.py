"""Proved width of the difference of a published pair of networks, compared with NeuroDiff.

Two ReLU networks on MNIST with float32 and with float16 weights, 20 images, every pixel ± 3 of 255;
the sum over the outputs of the widths of [least, largest] difference, without splitting the box. It
is compared with the published widths of NeuroDiff's first pass on the same queries, with those of
the interval domain, and with the widths that concrete inputs reach (sign steps), which are lower
bounds. The same is measured for float8 weights, for which no result is published.

    KCDSL_NEURODIFF=FOLDER make bench-neurodiff

The networks and figures belong to other people and are not in this repository: FOLDER holds
`mnist_3_100_p3.json` and the two `.nnet` files that it names, from the artifact of NeuroDiff (ASE
2020, github.com/pauls658/NeuroDiff-ASE2020-Artifact).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, report

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.model.graph import BlockGraph
    from kcdsl_backends.certifier.statements.problems import BlockProblem

FOLDER = "KCDSL_NEURODIFF"
QUERIES = "mnist_3_100_p3.json"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "neurodiff.svg"
EXACT = {"preset": "torch-eager", "compute": "float64", "accumulate": "float64"}
"""Real arithmetic up to 2^-53: the widths are about 10^12 times larger."""
FLOAT8 = {**EXACT, "weights": {"format": "fp8_e4m3", "scale": "per_channel"}}


@dataclass(frozen=True, slots=True)
class Network:
    """A fully connected ReLU network: its layer sizes and its tensors, `0.weight` and so on."""

    sizes: tuple[int, ...]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Measured:
    """Widths summed over the outputs of one image."""

    image: str
    planes: float
    first: float
    interval: float
    reached: float
    published: float
    seconds: float


def main() -> int:
    """Measure every image and report; return 2 without the data."""
    named = os.environ.get(FOLDER)
    if not named or not (Path(named) / QUERIES).is_file():
        print(
            f"bench neurodiff: set {FOLDER} to a folder that holds {QUERIES} and the networks"
            " that it names; they are not in this repository (see bench/neurodiff.py)",
            file=sys.stderr,
        )
        return 2
    folder = Path(named)
    queries = json.loads((folder / QUERIES).read_text(encoding="utf-8"))
    train, infer = (read_nnet(folder / name) for name in queries["networks"])
    halved = [
        measure(problem(train, infer), image, case, queries["perturbation"])
        for image, case in queries["cases"].items()
    ]
    coarse = [
        measure(problem(train, train, FLOAT8), image, {**case, "published": None}, 3)
        for image, case in list(queries["cases"].items())[:5]
    ]
    status = report("neurodiff", [*_figures(halved), *_float8(coarse)])
    draw(halved)
    return status


def read_nnet(path: Path) -> Network:
    """Read a network in the `.nnet` text format: seven header lines, then weights and biases."""
    import torch

    lines = [
        [float(v) for v in line.strip().rstrip(",").split(",")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.startswith("//")
    ]
    sizes, rows = tuple(int(v) for v in lines[1]), lines[7:]
    tensors, start = {}, 0
    for layer, count in enumerate(sizes[1:]):
        for name in ("weight", "bias"):
            values = torch.tensor(rows[start : start + count], dtype=torch.float32)
            tensors[f"{layer}.{name}"] = values if name == "weight" else values.flatten()
            start += count
    return Network(sizes, tensors)


def graph_of(sizes: tuple[int, ...]) -> BlockGraph:
    """Return the block graph of a network on one row: linear layers with ReLU between them."""
    from kcdsl.model.graph import BlockGraph, Node

    nodes, last = [Node("input", "input", (), (1, sizes[0]))], "input"
    layers = len(sizes) - 1
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        weight, bias = f"{layer}.weight", f"{layer}.bias"
        nodes.append(Node(weight, "param", (), (outputs, inputs), {"key": weight}))
        nodes.append(Node(bias, "param", (), (outputs,), {"key": bias}))
        nodes.append(Node(f"linear:{layer}", "linear", (last, weight, bias), (1, outputs)))
        last = f"linear:{layer}"
        if layer < layers - 1:
            nodes.append(Node(f"relu:{layer}", "relu", (last,), (1, outputs)))
            last = f"relu:{layer}"
    return BlockGraph("network", tuple(nodes), last, {}, (1, sizes[0]))


def problem(train: Network, infer: Network, numerics: dict[str, Any] | None = None) -> BlockProblem:
    """Return both networks as one block problem: one graph with the weights of each kernel."""
    import torch

    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import BlockProblem
    from kcdsl_backends.drift.boxes.state import StoredParameters

    if train.sizes != infer.sizes:
        raise SystemExit("the networks have different layers")
    cpu = torch.device("cpu")
    return BlockProblem(
        graph_of(train.sizes),
        StoredParameters(train.tensors, {}, resolve(EXACT), cpu),
        StoredParameters(infer.tensors, {}, resolve(numerics or EXACT), cpu),
    )


def region(image: list[int], perturbation: int) -> tuple[Tensor, Tensor]:
    """Return (centre, radius) of a box around clip((pixel ± perturbation) / 255, 0, 1)."""
    import torch

    pixels = torch.tensor(image, dtype=torch.float64).unsqueeze(0)
    low, high = (((pixels + step) / 255).clamp(0, 1) for step in (-perturbation, perturbation))
    centre = ((low + high) / 2).float().double()
    return centre, torch.maximum(high - centre, centre - low) * (1 + 2.0**-50)


def measure(pair: BlockProblem, image: str, case: dict[str, Any], perturbation: int) -> Measured:
    """Bound the difference on the box of one image, and search for large differences."""
    from kcdsl_backends.drift.linear_bounds import SlopeEffort
    from kcdsl_backends.drift.linear_bounds import linear_bounds as drift

    centre, radius = region(case["image"], perturbation)
    kernels = pair.kernels()
    plain = drift(pair.graph, kernels, centre, radius, SlopeEffort(steps=0)).box
    started = time.perf_counter()
    box = drift(pair.graph, kernels, centre, radius).box
    seconds = time.perf_counter() - started
    apart = pair.bound(centre, radius).output.drift
    low, high = reached(pair, centre, radius)
    if bool((low < box.lo).any()) or bool((high > box.hi).any()):
        raise SystemExit(f"image {image}: an input leaves the bounds")
    published = case["published"]
    theirs = (
        math.nan
        if published is None
        else sum(b - a for a, b in zip(published["lower"], published["upper"], strict=True))
    )
    found = Measured(
        image,
        float((box.hi - box.lo).sum()),
        float((plain.hi - plain.lo).sum()),
        float((apart.hi - apart.lo).sum()),
        float((high - low).sum()),
        theirs,
        seconds,
    )
    print(found, file=sys.stderr, flush=True)
    return found


def reached(pair: BlockProblem, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and largest difference of every output [1, n] that sign steps find."""
    import torch

    generator = torch.Generator().manual_seed(0)
    outputs = pair.graph.node(pair.graph.output).shape[-1]
    signs = torch.cat([torch.eye(outputs), -torch.eye(outputs)]).double()
    low = torch.full((1, outputs), torch.inf, dtype=torch.float64)
    high = -low
    for _ in range(8):
        start = torch.rand(2 * outputs, centre.shape[-1], generator=generator).double()
        x = centre + radius * (2 * start - 1)
        for step in range(12):
            x = x.detach().requires_grad_(True)
            drift = _run(pair, x, "infer") - _run(pair, x, "train")
            with torch.no_grad():
                low = torch.minimum(low, drift.amin(0, keepdim=True))
                high = torch.maximum(high, drift.amax(0, keepdim=True))
            (gradient,) = torch.autograd.grad((drift * signs).sum(), x)
            share = 2.0 if step < 4 else 1.0 / step
            moved = x.detach() + share * radius * torch.sign(gradient)
            x = torch.minimum(torch.maximum(moved, centre - radius), centre + radius)
    return low, high


def _run(pair: BlockProblem, x: Tensor, side: str) -> Tensor:
    stored = pair.train if side == "train" else pair.infer
    nodes = {node.name: node for node in pair.graph.nodes}
    values = {"input": x}
    for node in pair.graph.nodes:
        if node.op == "linear":
            source, weight, bias = node.inputs
            product = values[source] @ stored.linear(nodes[weight]).T
            values[node.name] = product + stored.plain(nodes[bias])
        elif node.op == "relu":
            values[node.name] = values[node.inputs[0]].clamp_min(0)
    return values[pair.graph.output]


def _figures(found: list[Measured]) -> list[Figure]:
    lower = Better.LOWER
    shares = [m.planes / m.published for m in found]
    figures = [
        Figure(
            f"image {m.image}: width / NeuroDiff's",
            m.planes / m.published,
            lower,
            1.0,
            f"{m.planes:.5f} / {m.published:.5f}, reached {m.reached:.5f}, {m.seconds:.1f} s",
        )
        for m in found
    ]
    count = f"{len(found)} images, pixels ± 3, no splitting"
    return [
        *figures,
        Figure("worst image: width / NeuroDiff's", max(shares), lower, 1.0, count),
        Figure("mean: width / NeuroDiff's", sum(shares) / len(shares), lower, 1.0, count),
        Figure(
            "mean: width / width reached",
            sum(m.planes / m.reached for m in found) / len(found),
            lower,
            None,
            "concrete inputs; NeuroDiff's first pass: "
            f"{sum(m.published / m.reached for m in found) / len(found):.3g}",
        ),
        Figure(
            "mean: without a search for slopes, width / NeuroDiff's",
            sum(m.first / m.published for m in found) / len(found),
            lower,
            None,
            "the planes to start with",
        ),
        Figure(
            "mean: interval domain / NeuroDiff's",
            sum(m.interval / m.published for m in found) / len(found),
            lower,
            None,
            "for comparison",
        ),
        Figure(
            "seconds, mean of the images",
            sum(m.seconds for m in found) / len(found),
            lower,
            None,
            "all outputs, slopes searched for each",
        ),
    ]


def _float8(found: list[Measured]) -> list[Figure]:
    where = ", ".join(f"{m.planes:.3g} / {m.reached:.3g}" for m in found)
    ratio = sum(m.planes / m.reached for m in found) / len(found)
    gain = sum(m.interval / m.planes for m in found) / len(found)
    return [
        Figure("float8 weights: width / width reached", ratio, Better.LOWER, None, where),
        Figure("float8 weights: interval / planes", gain, Better.HIGHER, None, "nothing published"),
    ]


SERIES = (
    ("interval", "interval domain", "#a8a8a8"),
    ("published", "NeuroDiff, first pass (published)", "#d95f02"),
    ("planes", "planes on the difference graph", "#1b6ca8"),
    ("reached", "reached by concrete inputs", "#222222"),
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 74, 16, 54, 46


def draw(found: list[Measured], path: Path = PICTURE) -> None:
    """Draw the widths of every image on a logarithmic scale, as SVG."""
    numbers = [getattr(m, name) for m in found for name, _, _ in SERIES]
    first, last = math.floor(math.log10(min(numbers))), math.ceil(math.log10(max(numbers)))
    step = (WIDTH - LEFT - RIGHT) / len(found)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (last - math.log10(value)) / (last - first)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for power in range(first, last + 1):
        at = y(10.0**power)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "#e2e2e2", 1))
        parts.append(_text(LEFT - 8, at + 4, f"{10.0**power:g}", "end"))
    for place, m in enumerate(found):
        x = LEFT + step * (place + 0.5)
        parts.append(_line(x, y(m.reached), x, y(m.planes), "#1b6ca8", 1.5))
        for name, _, colour in SERIES:
            parts.append(_dot(x, y(getattr(m, name)), colour))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, m.image, "middle"))
    parts.append(_text(LEFT, HEIGHT - 8, "image", "start"))
    parts.append(_text(8, 20, "width of the difference, sum over the 10 outputs", "start"))
    x = float(LEFT)
    for _, label, colour in SERIES:
        parts.append(_dot(x, 38, colour))
        parts.append(_text(x + 9, 42, label, "start"))
        x += 30 + 6.3 * len(label)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12" fill="#333333">'
    )
    path.write_text("\n".join([head, *parts, "</svg>", ""]), encoding="utf-8")


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


if __name__ == "__main__":
    sys.exit(main())
