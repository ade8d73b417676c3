"""Cost of one layer of a 7B-class decoder: width 4096, 32 heads, inner width 11008.

Random weights of the usual initial size. `attn_0`, all outputs, at a point, by affine forms,
float32 torch eager against float32 flash attention in any order; each number of tokens in a new
process. The exponent of time is that between the last two. Operations are those of float64 matrix
products, counted by PyTorch; all others are limited by memory.

    make bench-large-layer
    python -m bench.large_layer --device cuda --tokens 128    # only this, not recorded
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, forget_peak, peak_bytes, report

if TYPE_CHECKING:
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 1, "num_attention_heads": 32, "vocab_size": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
BLOCKS = ("attn_0", "mlp_0")
TOKENS = (1, 2, 4)
_TRAIN = {"preset": "torch-eager", "compute": "float32"}
_INFER = {"preset": "torch-sdpa-flash", "compute": "float32"}


def main(arguments: list[str]) -> int:
    """Measure and report all; or measure and print the options' selection."""
    parser = argparse.ArgumentParser(prog="bench.large_layer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--block", choices=BLOCKS, action="append")
    chosen = parser.parse_args(arguments)
    figures = [
        figure
        for block in chosen.block or BLOCKS[:1]
        for figure in _figures(block, chosen.tokens or TOKENS, chosen.device)
    ]
    if not arguments:
        return report("large_layer", figures)
    for figure in figures:
        print(f"{figure.name}: {figure.value:.4g} ({figure.conditions})")
    return 0


def _figures(block: str, lengths: tuple[int, ...] | list[int], device: str) -> list[Figure]:
    times, peaks, counts = [], [], []
    for tokens in lengths:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            cost = pool.submit(_cost, block, tokens, device).result()
        print(f"  {block}, {tokens} tokens: {cost}", file=sys.stderr, flush=True)
        times.append(cost.seconds)
        peaks.append(cost.peak)
        counts.append(cost.operations)
    where = f"{device}, {os.cpu_count()} cores" if device == "cpu" else device
    found = []
    for tokens, taken, peak, count in zip(lengths, times, peaks, counts, strict=True):
        name = f"{block}, {tokens} tokens"
        found += [
            Figure(f"{name}: seconds", taken, Better.LOWER, None, where),
            Figure(f"{name}: peak GB", peak / 1e9, Better.LOWER, None, where),
            Figure(f"{name}: 10^12 operations", count / 1e12, Better.LOWER, None, "float64"),
        ]
    if len(lengths) > 1:
        slope = math.log(times[-1] / times[-2]) / math.log(lengths[-1] / lengths[-2])
        name = f"{block}: growth with tokens, exponent"
        found.append(Figure(name, slope, Better.LOWER, None, where))
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, peak bytes beyond those held before, operations, and the largest bound."""

    seconds: float
    peak: float
    operations: float
    largest: float

    def __str__(self) -> str:
        memory, count = (
            f"{self.peak / 1e9:.2f} GB",
            f"{self.operations / 1e12:.3g}·10^12 operations",
        )
        return f"{self.seconds:.1f} s, {memory}, {count}, bound {self.largest:.3g}"


def _cost(block: str, tokens: int, device: str) -> Cost:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from kcdsl_backends.drift.affine_forms import affine_forms

    with tempfile.TemporaryDirectory() as folder:
        factory = layer(Path(folder), device, CONFIG)
        problem = factory.problem(block, tuple(range(tokens)))
        generator = torch.Generator().manual_seed(7)
        centre = torch.randn(tokens, CONFIG["hidden_size"], generator=generator).double()
        zero = torch.zeros(1, 1, dtype=torch.float64, device=device)
        before = _forget(device)
        started = time.perf_counter()
        with FlopCounterMode(display=False) as counter:
            sizes = affine_forms(
                problem.graph, problem.train, problem.infer, centre.to(device), zero
            ).box()
        largest = float(sizes.mag().max())
        taken = time.perf_counter() - started
        peak = _peak(device) - before
    if not math.isfinite(largest):
        raise SystemExit(f"{block}, {tokens} tokens: no bound")
    return Cost(taken, float(peak), float(counter.get_total_flops()), largest)


def _forget(device: str) -> int:
    import torch

    if device == "cpu":
        return forget_peak()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    import torch

    return peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()


def layer(folder: Path, device: str, config: Mapping[str, Any] = CONFIG) -> ProblemFactory:
    """Write a layer with random weights to `folder`; return it under both numerics."""
    import torch
    from safetensors.torch import save_file

    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.architectures.llama import build
    from kcdsl.model.loader import load_model
    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

    generator = torch.Generator().manual_seed(7)
    with torch.device("meta"):
        parameters = dict(build(dict(config)).named_parameters())
    state = {}
    for name, p in parameters.items():
        drawn = torch.randn(p.shape, generator=generator)
        state[name] = drawn / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.1 * drawn
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    files = ModelRef("model.safetensors", architecture="llama", config="config.json")
    return ProblemFactory(
        load_model(files, folder), resolve(_TRAIN), resolve(_INFER), torch.device(device)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
