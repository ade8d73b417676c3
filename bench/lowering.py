"""Comparison of block graphs with the modules from which they are traced, on random modules with
all kinds of views, casts, numbers, buffers, norms, activations and attention.

    make bench-lowering
    python -m bench.lowering --count 1000 --seed 0

A graph is wrong if its result differs from that of the converted module by more than rounding of
every result and reordering of sums explain, has another type, or overflows elsewhere. `block_graph`
makes a less strict comparison on other inputs; a difference that it finds is a defect too.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from bench.common import Better, Figure, report
from kcdsl.diagnostics import Refusal, codes
from kcdsl.model.graph import BlockGraph
from kcdsl.model.lowering import block_graph, converted
from kcdsl.model.lowering.agreement import ComposedAttention, result_type
from kcdsl.model.lowering.evaluate import TYPES, graph_output, round_to
from kcdsl.model.numerics.formats import FORMATS
from tests.support.random_modules import Variant, random_module

FORMATS_OF_KERNELS = (
    (),
    ("bfloat16",),
    ("float16",),
    ("bfloat16", "float16"),
    ("float64",),
    ("bfloat16", "float16", "float64"),
)
"""Formats for which modules are lowered, besides float32."""
SCALES = (1.0, 2.0**-70, 1e-3, 40.0)
"""Scales of the inputs; with the last, squares nearly overflow float16."""
LARGEST_RATIO = 16.0
"""Largest admitted distance of module and graph, in units of the effect of roundings."""
LEAST_TRACED = 0.8


@dataclass(slots=True)
class Campaign:
    """The results of the modules of a campaign."""

    count: int = 0
    traced: int = 0
    differ: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0

    def take(self, seed: int) -> None:
        """Lower one module and compare it with its graph."""
        self.count += 1
        variant = random_module(seed, longest=17 if seed % 8 else 300)
        formats = FORMATS_OF_KERNELS[seed % len(FORMATS_OF_KERNELS)]
        try:
            graph = block_graph(variant.model(), "part", variant.rows, formats=formats)
        except Refusal as refusal:
            (found,) = refusal.diagnostics
            self.refused[_reason(found.message)] += 1
            if found.code is codes.GRAPH_DIFFERS:
                self.differ.append(seed)
            return
        except Exception as error:  # the campaign counts every kind of crash
            self.crashed.append(f"{seed}: {type(error).__name__}: {error}")
            return
        self.traced += 1
        ratio = apart(variant, graph, ("float32", *formats))
        self.worst = max(self.worst, ratio)
        if ratio > LARGEST_RATIO:
            self.wrong.append(seed)

    def figures(self) -> list[Figure]:
        """Return the figures of the campaign."""
        text = f"{self.count} random modules, float32 and {len(FORMATS_OF_KERNELS)} sets of formats"
        return [
            Figure("graphs that are not their module", len(self.wrong), Better.LOWER, 0, text),
            Figure("found when lowering", len(self.differ), Better.LOWER, 0, text),
            Figure("crashes", len(self.crashed), Better.LOWER, 0, text),
            Figure("share lowered", self.traced / self.count, Better.HIGHER, LEAST_TRACED, text),
            Figure("worst ratio to a rounding", self.worst, Better.LOWER, LARGEST_RATIO, text),
        ]


def apart(variant: Variant, graph: BlockGraph, formats: Iterable[str]) -> float:
    """Return the largest distance of a module from its graph over formats and inputs, in units of
    the effect of a rounding of the input and of every result; infinite for other types and
    overflows."""
    model = variant.model()
    params = {k: t.numpy() for k, t in model.checkpoint.tensors.items()}
    drawn = np.random.default_rng(variant.seed)
    worst = 0.0
    for format in dict.fromkeys(formats):
        part = replace(model, module=converted(model, format)).block("part")
        for scale in SCALES:
            normal = scale * drawn.standard_normal((variant.rows, variant.width))
            x = round_to(normal, format)

            def run(x: NDArray[np.float64], part: torch.nn.Module = part) -> torch.Tensor:
                entering = torch.from_numpy(x).to(TYPES[format])  # noqa: B023
                with torch.no_grad(), ComposedAttention():
                    found: torch.Tensor = part(entering)
                return found

            result = run(x)
            if result.dtype != result_type(graph, graph.output, format):
                return float("inf")
            found = result.to(torch.float64).numpy()
            expected = graph_output(graph, params, x, format)
            pinned = [FORMATS[node.format].unit_roundoff for node in graph.nodes if node.format]
            unit = max(FORMATS[format].unit_roundoff, *pinned, 0.0)
            least = FORMATS[format].smallest_subnormal

            def changed(
                value: NDArray[np.float64], unit: float = unit, least: float = least
            ) -> NDArray[np.float64]:
                by, more = drawn.uniform(-1, 1, (2, *value.shape))
                moved: NDArray[np.float64] = value * (1 + unit * by) + least * more
                return moved

            inputs = [x * (1 + 4 * unit * drawn.uniform(-1, 1, x.shape)) for _ in range(4)]
            noise = [run(round_to(near, format)).to(torch.float64).numpy() for near in inputs]
            others = [graph_output(graph, params, x, format, changed) for _ in range(3)]
            near = [found, *noise]
            if not any(_same_kinds(expected, other) for other in near):
                return float("inf")
            finite = np.logical_and.reduce([np.isfinite(v) for v in (*near, *others, expected)])
            if not finite.any():
                continue
            gaps = [np.abs(v - found) for v in noise] + [np.abs(v - expected) for v in others]
            moved = max(float(gap[finite].max()) for gap in gaps)
            size = float(np.abs(found[finite]).max())
            sums = max(variant.rows, variant.width) * min(unit, 2.0**-24) / LARGEST_RATIO
            allowed = moved + (unit + sums) * size + 8 * least
            worst = max(worst, float(np.abs(found - expected)[finite].max()) / allowed)
    return worst


def _same_kinds(one: NDArray[np.float64], two: NDArray[np.float64]) -> bool:
    return one.shape == two.shape and np.array_equal(np.isfinite(one), np.isfinite(two))


def _reason(message: str) -> str:
    inside = re.search(r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)$", message)
    return re.sub(r"[-\d.e]*\d[-\d.e]*", "N", inside.group(1) if inside else message)


def main(words: list[str]) -> int:
    """Run the campaign; return 0 if every limit is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    campaign = Campaign()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(given.seed, given.seed + given.count):
            campaign.take(seed)
    for reason, count in campaign.refused.most_common():
        print(f"{count:5}  refused: {reason}")
    for name, seeds in (("wrong", campaign.wrong), ("differ", campaign.differ)):
        print(f"{name}: {seeds}")
    for crash in campaign.crashed:
        print(crash)
    return report("lowering", campaign.figures())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
