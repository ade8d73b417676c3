"""Growth of cost with the width of a block, and the gain of several cases at a time.

Width: the attention half of an encoder layer with random weights, 16 tokens, heads of 32, float32
in any order, all outputs, by affine forms; each width in a new process. The exponent of time is
taken between the second and the last width, where overheads are small; that of memory is of the
peak minus the bytes resident before. Cases: `kcdsl verify` without a cache on a clause of the tiny
language model, in one process and in one for each core; proofs must be equal.

    make bench-growth
    python -m bench.growth width    # only this part, not recorded
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, forget_peak, peak_bytes, report
from bench.no_flip import EXAMPLE
from kcdsl.verdict.quantities import quantity

if TYPE_CHECKING:
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

WIDTHS = (96, 192, 384, 768)
TOKENS = 16
HEAD = 32
_FLASH = {"preset": "torch-sdpa-flash", "compute": "float32"}
_CLAUSE = """\
kcdsl: 1
contract: growth
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager, compute: float32}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash, compute: float32}}
data: prompts.jsonl
slices: {some: {where: "length > 30 and length <= 36"}}
clauses:
  N: {require: "forall x in points(some): norm_inf(drift(layer_0, x)) <= 0.003", level: L2}
"""


def main() -> int:
    """Measure and report all parts; or measure and print one."""
    parts = {"width": width, "jobs": jobs}
    chosen = [parts[name] for name in sys.argv[1:]] or list(parts.values())
    figures = [figure for part in chosen for figure in part()]
    if not sys.argv[1:]:
        return report("growth", figures)
    for figure in figures:
        print(f"{figure.name}: {figure.value:.4g} ({figure.conditions})")
    return 0


def width() -> list[Figure]:
    """Return the exponents of time and memory as functions of the width."""
    found = []
    for size in WIDTHS:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found.append(pool.submit(_cost, size).result())
        taken, peak = found[-1]
        print(f"  width {size}: {taken:.2f} s, {peak / 1e6:.0f} MB", file=sys.stderr, flush=True)
    times, peaks = zip(*found, strict=True)
    cores = f"{TOKENS} tokens, {os.cpu_count()} cores"
    shown = ", ".join(f"{n}: {quantity(t, 's', 2)}" for n, t in zip(WIDTHS, times, strict=True))
    sizes = ", ".join(f"{n}: {p / 1e6:.0f} MB" for n, p in zip(WIDTHS, peaks, strict=True))
    return [
        _exponent("attention: growth with the width, exponent of time", times, f"{shown}; {cores}"),
        _exponent("attention: growth with the width, exponent of memory", peaks, sizes),
    ]


def _exponent(name: str, values: tuple[float, ...], where: str) -> Figure:
    slope = math.log(values[-1] / values[1]) / math.log(WIDTHS[-1] / WIDTHS[1])
    return Figure(name, slope, Better.LOWER, None, where)


def _cost(size: int) -> tuple[float, float]:
    """Return the seconds of a block of this width, and its peak memory in bytes."""
    import torch

    from kcdsl_backends.drift.affine_forms import affine_forms

    with tempfile.TemporaryDirectory() as folder:
        factory = _random(size, Path(folder))
        problem = factory.problem("attn_0", tuple(range(TOKENS)))
        generator = torch.Generator().manual_seed(size)
        centre = torch.randn(TOKENS, size, generator=generator).double()
        zero = torch.zeros(1, 1, dtype=torch.float64)
        before = forget_peak()
        started = time.perf_counter()
        box = affine_forms(problem.graph, problem.train, problem.infer, centre, zero).box()
        taken = time.perf_counter() - started
    if not bool(torch.isfinite(box.mag()).all()):
        raise SystemExit(f"width {size}: no bound")
    return taken, peak_bytes() - before


def _random(size: int, folder: Path) -> ProblemFactory:
    """Return an encoder of one layer with random weights of the usual initial size."""
    import torch
    from safetensors.torch import save_file

    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.architectures.bert import build
    from kcdsl.model.loader import load_model
    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

    config: dict[str, Any] = {
        "model_type": "bert", "hidden_size": size, "intermediate_size": 4 * size,
        "num_hidden_layers": 1, "num_attention_heads": size // HEAD, "vocab_size": 64,
        "max_position_embeddings": 64,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(size)
    state = {}
    for name, p in build(config).named_parameters():
        drawn = torch.randn(p.shape, generator=generator)
        state[name] = drawn / size**0.5 if p.dim() > 1 else 1 + 0.1 * drawn
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    files = ModelRef("model.safetensors", architecture="bert", config="config.json")
    train = resolve({"preset": "torch-eager", "compute": "float32"})
    return ProblemFactory(load_model(files, folder), train, resolve(_FLASH), torch.device("cpu"))


def jobs() -> list[Figure]:
    """Return the speed-up for a clause with many cases with one process per core."""
    count = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("model.safetensors", "config.json", "prompts.jsonl"):
            (folder / file).write_bytes((EXAMPLE / file).read_bytes())
        (folder / "contract.yaml").write_text(_CLAUSE)
        one, cases, proof = _decided(folder, 1)
        many, _, again = _decided(folder, count)
    if proof != again or not proof:
        raise SystemExit("the proof depends on the number of processes, or there is none")
    where = f"{cases} cases: {one:.1f} s with one job, {many:.1f} s with {count}"
    return [Figure(f"verify: speed-up by {count} jobs", one / many, Better.HIGHER, None, where)]


def _decided(folder: Path, count: int) -> tuple[float, int, bytes | None]:
    """Return the seconds of a verification, its cases and its proof."""
    from kcdsl.check.compile import load_contract
    from kcdsl.route.catalogue import Execution
    from kcdsl.route.goals import goals
    from kcdsl_backends.certifier.backend import BACKEND

    program, _ = load_contract(folder / "contract.yaml")
    started = time.perf_counter()
    execution = Execution(jobs=count, threads=1)
    (found,) = BACKEND.decide(program, folder, goals(program), execution=execution)
    taken = time.perf_counter() - started
    print(f"  {count} jobs: {taken:.1f} s, {found.verdict}", file=sys.stderr, flush=True)
    return taken, len(found.cases), found.proof


if __name__ == "__main__":
    sys.exit(main())
