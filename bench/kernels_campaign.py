"""Drift of real kernels on random modules against certified bounds.

Every module is generated from a seed: operations and idioms of user code (hand-written norms,
activations, tables, views by every alias; tests/support/random_modules.py), or a small built-in
decoder or encoder with odd widths and epsilons for adapters that support only those. It runs on
inputs of 1e-40 to 1e8 under every adapter of one format; the training kernel is PyTorch's eager
float32. For every element the measured drift is divided by the certified bound: no quotient may
exceed 1. The results of each module are stored at once, so that a run can be continued.

    python -m bench.kernels_campaign --modules 20000
    python -m bench.kernels_campaign --modules 500 --first 20000      other modules
    python -m bench.kernels_campaign --only 4711                      one module in detail
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, report, show_in
from bench.kernels import Case, quotients

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.model.architecture import Model

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "build" / "bench-kernels" / "campaign.jsonl"
SIZES = (1e-40, 1e-30, 1e-12, 1e-5, 1e-3, 1.0, 30.0, 1e3, 1e8)
"""Scales of inputs, which are normal; some rows are zeros."""
INPUTS = 3
AFFINE = 10
"""One module in this many is bounded by affine forms, on small inputs."""
FEW = 256
COMPILED = 100
"""One user module in this many is compiled."""
BUILT_IN = 100
"""One module in this many is built-in."""
_NEAREST = {"casts": "nearest"}
_ATTENTION = ("torch.sdpa.math", "torch.sdpa.flash")


@dataclass(frozen=True, slots=True)
class Run:
    """One kernel on one module: the largest drift / bound, the numbers of bounded and of all
    inputs, or the reason why there was no run."""

    module: int
    case: str
    ratio: float = 0.0
    bounded: int = 0
    inputs: int = 0
    refused: str = ""


def cases_of(seed: int) -> list[Case]:
    """Return the kernels of a module: every adapter that supports it, in one format."""
    compute = ("bfloat16", "float16", "float32", "float64")[seed % 4]
    if seed % BUILT_IN == 0:
        compute = ("bfloat16", "float16", "float32", "float64")[seed // BUILT_IN % 4]
        return [
            Case("torch.eager", {"compute": compute, **_NEAREST}),
            Case("torch.sdpa.flash", {"compute": "bfloat16", **_NEAREST}),
            Case("torch.eager", {"preset": "fp8-weights", **_NEAREST}),
            Case("torch.scaled_mm"),
            Case("torchao.float8_weight_only"),
            Case("torchao.int8_weight_only"),
            Case("torchao.int8_dynamic"),
            Case("onnxruntime.float32"),
            Case("onnxruntime.dynamic_int8"),
        ]
    if seed % COMPILED == 1:
        kind = ("float32", "bfloat16", "float16")[seed // COMPILED % 3]
        return [Case("torch.compile", {"compute": kind})]
    plain = {} if compute == "float64" else _NEAREST
    adapters = ["torch.eager", *(() if compute == "float64" else _ATTENTION)]
    found = [Case(run, {"compute": compute, **plain}) for run in adapters]
    return [c for c in found if (c.run, compute) != ("torch.eager", "float32")]


def module_of(seed: int) -> tuple[Model, str, int, int]:
    """Return a model with the block, its width and its number of rows."""
    if seed % BUILT_IN:
        from tests.support.random_modules import random_module

        variant = random_module(seed)
        model = variant.model()
        _only_at(variant.rows, model.module)
        return model, "part", variant.width, variant.rows
    return _built_in(seed)


def _only_at(rows: int, whole: Any) -> None:
    """Make a model skip its block on other numbers of rows, which its views may not support."""

    class Some(type(whole)):  # type: ignore[misc]
        def forward(self, ids: Tensor) -> Tensor:
            x: Tensor = self.table(ids)
            return self.part(x) if ids.shape[-1] == rows else x

    whole.__class__ = Some


def _built_in(seed: int) -> tuple[Model, str, int, int]:
    import random

    import torch

    from kcdsl.model.architecture import Model
    from kcdsl.model.architectures import bert, llama
    from tests.support.random_modules import model_of

    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, size = draw.choice(((1, 2), (2, 2), (3, 4), (2, 8), (4, 8), (2, 32)))
    kind, eps = draw.choice((llama, bert)), draw.choice((1e-12, 1e-8, 1e-6, 1e-5, 1e-3))
    epsilon = "rms_norm_eps" if kind is llama else "layer_norm_eps"
    config = {
        "model_type": kind.__name__.rpartition(".")[2], "hidden_size": heads * size,
        "intermediate_size": draw.choice((3, 5, 16, 33)), "num_hidden_layers": 1,
        "num_attention_heads": heads, "vocab_size": 8, "max_position_embeddings": 320,
        epsilon: eps,
    }  # fmt: skip
    module = kind.build(config).eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        scale = draw.choice((0.05, 0.3, 1.0))
        drawn = torch.randn(parameter.shape, generator=generator) * scale
        parameter.copy_(drawn + (1.0 if "norm" in name.lower() and "bias" not in name else 0.0))
    named = dict(module.named_parameters())
    empty = model_of(torch.nn.Identity(), 1).checkpoint
    object.__setattr__(empty, "tensors", named)
    model = Model(module, empty, config, {n: n for n in named}, None, True)
    block = draw.choice(("attn_0", "mlp_0", "layer_0"))
    return model, block, heads * size, draw.choice((1, 2, 3, 5, 17, 64))


def inputs(seed: int, rows: int, width: int) -> Iterator[Tensor]:
    """Yield inputs of several sizes; in some of them one row is zero."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    for k in range(INPUTS):
        x = torch.randn(rows, width, generator=drawn)
        if (seed + k) % 5 == 0:
            x[(seed + k) % rows] = 0.0
        yield x * SIZES[(3 * seed + 4 * k) % len(SIZES)]


def examine(seed: int) -> list[Run]:
    """Run every kernel of a module and compare it with its bounds."""
    import torch

    from kcdsl.diagnostics import Refusal
    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory
    from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    model, block, width, rows = module_of(seed)
    train = Case("torch.eager", _NEAREST)
    graphs: dict[Any, Any] = {}
    found: list[Run] = []
    try:
        started = load_kernel(train.ref(), model, "cpu")
        given = [(x, started.block(block, x)) for x in inputs(seed, rows, width)]
    except Refusal as refusal:
        return [Run(seed, case.name, refused=_reason(refusal)) for case in cases_of(seed)]
    for case in cases_of(seed):
        numerics = resolve(train.ref()), resolve(case.ref())
        factory = ProblemFactory(model, *numerics, torch.device("cpu"), graphs)
        try:
            factory.problem(block, tuple(range(rows)))
            running = load_kernel(case.ref(), model, "cpu")
            found.append(_compared(seed, case, running, factory, block, given))
        except Refusal as refusal:
            found.append(Run(seed, case.name, refused=_reason(refusal)))
    return found


def _reason(refusal: Any) -> str:
    diagnostic = refusal.diagnostics[0] if hasattr(refusal, "diagnostics") else refusal
    return f"{getattr(diagnostic, 'code', '')} {str(refusal)[:160]}".strip()


def _compared(seed: int, case: Case, running: Any, factory: Any, block: str, given: Any) -> Run:
    import torch

    from bench.kernels import bound

    worst, bounded, watch = 0.0, 0, running.interception
    for x, wanted in given:
        affine = seed % AFFINE == 3 and x.numel() <= FEW
        bounds = bound(factory, block, x, affine)
        if not bool(torch.isfinite(bounds).any()):
            continue
        drift = (running.block(block, x) - wanted).abs()
        if watch is not None and watch.softmax_calls and case.run != "torch.eager":
            return Run(seed, case.name, refused="the module composes its attention itself")
        bounded += 1
        worst = max(worst, float(quotients(drift, bounds).max()))
    return Run(seed, case.name, worst, bounded, len(given))


def main() -> int:
    """Examine the modules that have no results yet, and report all."""
    chosen = _parser().parse_args()
    if chosen.only is not None:
        for run in examine(chosen.only):
            print(run)
        return 0
    wanted = range(chosen.first, chosen.first + chosen.modules)
    known = set(_known())
    _examine([seed for seed in wanted if seed not in known], chosen.jobs, chosen.seconds)
    runs = [Run(**run) for seed, part in _known().items() if seed in wanted for run in part]
    text = table(runs)
    if chosen.write:
        show_in("explanation/real-kernels.md", "kernels_campaign", text)
    print(text)
    return report("kernels_campaign", list(figures(runs)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", type=int, default=20_000, help="how many modules")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first module")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--only", type=int, help="the seed of one module")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    return parser


def _known() -> dict[int, list[dict[str, Any]]]:
    if not FOUND.is_file():
        return {}
    lines = FOUND.read_text(encoding="utf-8").splitlines()
    return {line["seed"]: line["runs"] for line in map(json.loads, lines)}


def _examine(seeds: Sequence[int], jobs: int, seconds: float) -> None:
    """Examine modules in processes; write the results of each at once."""
    from kcdsl_backends.executors import Processes

    started, waiting, left = time.perf_counter(), {}, iter(seeds)
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    with Processes(jobs, 1) as pool, FOUND.open("a", encoding="utf-8") as file:

        def more() -> None:
            seed = next(left, None)
            if seed is not None and time.perf_counter() - started < seconds:
                waiting[pool.submit(examine, seed)] = seed

        for _ in range(2 * jobs):
            more()
        while waiting:
            done = next(as_completed(waiting))
            seed = waiting.pop(done)
            runs = [asdict(run) for run in done.result()]
            file.write(json.dumps({"seed": seed, "runs": runs}) + "\n")
            file.flush()
            for run in runs:
                if run["ratio"] > 1:
                    print(run, file=sys.stderr, flush=True)
            more()


def figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Return the numbers of modules that ran and that exceeded a bound."""
    ran = [run for run in runs if not run.refused]
    beyond = {run.module for run in ran if run.ratio > 1}
    where = f"{sum(run.bounded for run in ran)} of {sum(run.inputs for run in ran)} runs bounded"
    modules = len({run.module for run in ran})
    yield Figure("modules that ran", modules, Better.HIGHER, None, where)
    yield Figure("modules above a bound", len(beyond), Better.LOWER, 0, str(sorted(beyond)[:20]))


def table(runs: Sequence[Run]) -> str:
    """Return the table of the page: for each kernel modules, runs and the largest quotient."""
    lines = [
        "| kernel | modules | refused | runs, with a bound | largest quotient | above its bound |",
        "|---|---|---|---|---|---|",
    ]
    names = Counter(run.case for run in runs)
    for name in sorted(names):
        own = [run for run in runs if run.case == name]
        ran = [run for run in own if not run.refused]
        worst = max((run.ratio for run in ran), default=0.0)
        beyond = sum(run.ratio > 1 for run in ran)
        counts = f"{sum(r.inputs for r in ran)}, {sum(r.bounded for r in ran)}"
        lines.append(
            f"| {name} | {len(own)} | {len(own) - len(ran)} | {counts} | {worst:.3g} | {beyond} |"
        )
    modules, told = len({r.module for r in runs}), len({r.module for r in runs if not r.refused})
    above = len({run.module for run in runs if run.ratio > 1})
    summary = f"{modules} modules, of which {told} ran under some kernel; {above} above a bound."
    return "\n".join([*lines, "", summary, ""])


if __name__ == "__main__":
    sys.exit(main())
