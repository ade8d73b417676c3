"""Drift of real kernels against their certified bounds, on the published MiniLM and the tiny LM.

Every kernel of the matrix runs blocks of both models on hundreds of inputs
(bench/kernels_inputs.py); the training kernel is PyTorch's eager float32. For every element of
every run the measured drift is divided by the certified bound (of the interval domain, or the
smaller of both domains if the affine one is used): no quotient may exceed 1. The table is in
docs/explanation/real-kernels.md, with a picture of all quotients.

    make bench-kernels
    python -m bench.kernels --share 0.25      a quarter of the texts and random sequences
    python -m bench.kernels --resume          continue a run that was stopped

The results of each kernel are written to build/bench-kernels at once, with a digest of all code
that they depend on; `--resume` reuses results with the same digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, report, show_in
from bench.kernels_inputs import BLOCKS, MODELS, inputs, loaded
from bench.kernels_picture import draw

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.ir.terms import KernelRef
    from kcdsl.model.architecture import Model
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "real-kernels.svg"
PARTS = ROOT / "build" / "bench-kernels"
AFFINE = {"MiniLM": 24, "tiny LM": 6}
"""One input in this many of each block is bounded by the affine domain."""
LAYERS = ("torch-sdpa-flash", "onnxruntime-float32")
"""Presets for which the affine domain bounds the MiniLM layer, which has no interval bound."""
LONGEST_AFFINE = {"MiniLM": 10, "tiny LM": 40}
"""Longest input for the affine domain."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel: the adapter, and its numerics fields besides the preset."""

    run: str
    numerics: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Return the adapter and these fields as text."""
        words = [self.run]
        for key, value in self.numerics.items():
            words += value.values() if isinstance(value, dict) else [value] * (key != "preset")
        if "preset" in self.numerics:
            words.append(self.numerics["preset"])
        return " ".join(words)

    def ref(self) -> KernelRef:
        """Return the kernel as in a contract."""
        from kcdsl.ir.terms import KernelRef

        return KernelRef(self.run, _pairs(self.numerics))


def _pairs(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return tuple(sorted((key, _pairs(inner)) for key, inner in value.items()))


def _byte_sums() -> tuple[dict[str, Any], ...]:
    """Return the numerics of sums in ONNX Runtime's byte kernels on this processor."""
    from importlib.util import find_spec

    pairs = {"byte_sums": "int16_pairs"}
    if find_spec("onnxruntime") is None:
        return ({}, pairs)
    from kcdsl_backends.empirical.sources.kernels.onnx_runtime import saturates

    return (pairs,) if saturates() else ({}, pairs)


def _signed_bytes() -> tuple[Case, ...]:
    """Return torchao's dynamic byte kernel if this processor multiplies bytes exactly."""
    from importlib.util import find_spec

    case = Case("torchao.int8_dynamic")
    if find_spec("torchao") is None:
        return (case,)
    from kcdsl_backends.empirical.sources.kernels.engines import exact_bytes

    return (case,) if exact_bytes("cpu") else ()


_NEAREST = {"casts": "nearest"}
BYTE_SUMS = _byte_sums()
SIGNED_BYTES = _signed_bytes()
_INT8 = {"format": "int8", "scale": "per_tensor"}
_MX = {"format": "fp8_e4m3", "scale": "mx"}
TRAIN = Case("torch.eager", _NEAREST)
CASES = (
    Case("torch.eager", {"compute": "float64"}),
    *(
        Case(run, {"compute": compute, **_NEAREST})
        for run in ("torch.eager", "torch.sdpa.math", "torch.sdpa.flash")
        for compute in ("float32", "bfloat16", "float16")
        if (run, compute) != (TRAIN.run, "float32")
    ),
    Case("torch.eager", {"preset": "fp8-weights", **_NEAREST}),
    Case("torch.eager", {"compute": "bfloat16", **_NEAREST, "weights": _INT8}),
    Case("torch.sdpa.flash", {"compute": "bfloat16", **_NEAREST, "weights": _MX}),
    Case("torch.scaled_mm"),
    Case("torch.scaled_mm", {"preset": "fp8-w8a8-per-channel"}),
    Case("torch.scaled_mm", {"preset": "fp8-w8a8-per-tensor"}),
    Case("torchao.float8_weight_only"),
    Case("torchao.float8_weight_only", {"compute": "float32"}),
    Case("torchao.int8_weight_only"),
    *SIGNED_BYTES,
    Case("onnxruntime.float32"),
    *(Case("onnxruntime.dynamic_int8", claim) for claim in BYTE_SUMS),
    Case(
        "onnxruntime.dynamic_int8",
        {"weights": {"format": "int8", "scale": "per_channel"}, **BYTE_SUMS[0]},
    ),
    *(Case("torch.compile", {"compute": c}) for c in ("float32", "bfloat16", "float16")),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run of one block: the largest drift / bound of its elements, and its subject."""

    case: str
    model: str
    block: str
    tokens: int
    ratio: float
    drift: float
    bound: float


def main() -> int:
    """Measure every case, draw the picture and report."""
    chosen = _parser().parse_args()
    cases = [case for case in CASES if chosen.only in case.name]
    found: list[Comparison] = []
    for part in _measured(cases, chosen.share, chosen.jobs, chosen.resume):
        found += part
    found.sort(key=lambda c: [case.name for case in CASES].index(c.case))
    if not chosen.only:
        known = [c for c in found if math.isfinite(c.bound) or c.ratio > 1]
        PICTURE.write_text(draw([(c.case, c.model, c.ratio) for c in known]), encoding="utf-8")
        show_in("explanation/real-kernels.md", "kernels", table(found))
    return report("kernels" + chosen.only, figures(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--share", type=float, default=1.0, help="share of the texts")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--resume", action="store_true", help="take what a stopped run has found")
    return parser


def _measured(
    cases: Sequence[Case], share: float, jobs: int, resume: bool
) -> Iterator[list[Comparison]]:
    """Yield the runs of each case as processes finish; or those of an earlier run."""
    from kcdsl_backends.executors import Processes

    started, key = time.perf_counter(), _key(share)
    waiting = {}
    with Processes(jobs, 1) as pool:
        for number, case in enumerate(cases):
            kept = _kept(case, key) if resume else None
            if kept is not None:
                yield kept
            else:
                waiting[pool.submit(_measure, CASES.index(case), share, key)] = number
        for done in as_completed(waiting):
            part = done.result()
            worst = max(part, key=lambda c: c.ratio)
            elapsed = time.perf_counter() - started
            print(f"{elapsed:6.0f} s  {worst}", file=sys.stderr, flush=True)
            yield part


def _measure(number: int, share: float, key: str) -> list[Comparison]:
    """Measure one case and write its results."""
    case = CASES[number]
    found = list(compare(case, share=share))
    path = _part(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(
        json.dumps({"key": key, "runs": [asdict(c) for c in found]})
    )
    os.replace(path.with_suffix(".tmp"), path)
    return found


def _kept(case: Case, key: str) -> list[Comparison] | None:
    """Return the results of an earlier run of a case with the same code, or None."""
    try:
        kept = json.loads(_part(case).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return [Comparison(**run) for run in kept["runs"]] if kept["key"] == key else None


def _part(case: Case) -> Path:
    return PARTS / f"{case.name.replace(' ', '-')}.json"


def _key(share: float) -> str:
    """Return the digest of everything that results depend on."""
    from kcdsl_backends.certifier.cache import rules_version

    sources = [path.read_bytes() for path in sorted(ROOT.glob("bench/kernels*.py"))]
    return hashlib.sha256(b"|".join([rules_version().encode(), *sources])).hexdigest() + f" {share}"


def figures(found: Sequence[Comparison]) -> Iterator[Figure]:
    """Return the largest quotient of each kernel on each model."""
    for case in CASES:
        for model in MODELS:
            runs = [c for c in found if (c.case, c.model) == (case.name, model)]
            told = [c for c in runs if math.isfinite(c.bound)]
            if not told:
                continue
            worst = max(runs, key=lambda c: c.ratio)
            blocks = ", ".join(
                f"{b} {max(c.ratio for c in told if c.block == b):.2g}"
                for b in BLOCKS[model]
                if any(c.block == b for c in told)
            )
            left = f"{1 - worst.ratio:.3g} of the bound left" if worst.ratio < 1 else "nothing left"
            yield Figure(
                f"{case.name}, {model}",
                worst.ratio,
                Better.LOWER,
                1.0,
                f"{len(told)} of {len(runs)} runs have a bound; {left}; {blocks}",
            )


def table(found: Sequence[Comparison]) -> str:
    """Return the table of the page: for each kernel and model the number of runs and the largest
    quotient of each kind of block."""
    lines = [
        "| kernel | model | runs, with a bound | attention | feed-forward | layer | head |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        for model in MODELS:
            runs = [c for c in found if (c.case, c.model) == (case.name, model)]
            told = [c for c in runs if math.isfinite(c.bound) or c.ratio > 1]
            cells = [
                _cell([c.ratio for c in told if c.block.startswith(kind)])
                for kind in ("attn", "mlp", "layer", "head")
            ]
            numbers = f"{len(runs)}, {len(told)}"
            lines.append(f"| {case.name} | {model} | {numbers} | {' | '.join(cells)} |")
    count = sum(math.isfinite(c.bound) for c in found)
    worst = max(found, key=lambda c: c.ratio)
    summary = (
        f"{len(found)} runs, {count} of them with a bound for every element; the largest quotient"
        f" is {worst.ratio:.4f} ({worst.case}, {worst.block} of {worst.model}, {worst.tokens}"
        " tokens)."
    )
    return "\n".join([*lines, "", summary, ""])


def _cell(ratios: list[float]) -> str:
    return f"{max(ratios):.3g}" if ratios else "–"


def compare(case: Case, models: Iterable[str] = MODELS, share: float = 1.0) -> Iterator[Comparison]:
    """Run a kernel on the inputs of the models and compare every run with its bounds."""
    from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

    for name in models:
        model = loaded(name)
        running, started = load_kernel(case.ref(), model, "cpu"), eager(name)
        factory = problem_factory(model, case)
        places: Counter[str] = Counter()
        for block, x in inputs(name, share):
            drift = (running.block(block, x) - started.block(block, x)).abs()
            asked = _worth_while(name, places[block], block, x, factory)
            places[block] += 1
            yield _compared(case.name, name, block, drift, bound(factory, block, x, asked))


def _worth_while(name: str, place: int, block: str, x: Tensor, factory: ProblemFactory) -> bool:
    """Return whether the input at this index among those of a block gets an affine bound.

    This takes seconds for MiniLM, and more for its layers.
    """
    if len(x) > LONGEST_AFFINE[name]:
        return False
    if name == "MiniLM" and block == "layer_0":
        return place < 2 and factory.infer.preset in LAYERS
    if name == "MiniLM" and factory.infer.activations.format != "none":
        return False
    return place % AFFINE[name] == 0


def bound(factory: ProblemFactory, block: str, x: Tensor, affine: bool) -> Tensor:
    """Return the certified bound of every element: the smaller of both domains'."""
    import torch

    from kcdsl_backends.certifier.statements.problems import certified_block_drift
    from kcdsl_backends.drift.boxes import NoBound

    found = certified_block_drift(factory.model, block, x, factory.train, factory.infer, factory)
    interval = torch.from_numpy(found.drift_bound)
    if not affine:
        return interval
    problem = factory.problem(block, tuple(range(len(x))))
    try:
        box = problem.forms(x.double(), torch.zeros(1, 1, dtype=torch.float64)).box()
    except NoBound:
        return interval
    return torch.minimum(interval, box.mag())


def quotients(drift: Tensor, bounds: Tensor) -> Tensor:
    """Return drift / bound: 0 for an infinite bound or no drift, infinity for a drift with bound 0
    or for a NaN drift with any finite bound."""
    import torch

    told = torch.isfinite(bounds)
    share = torch.where(drift == 0, 0.0, drift / bounds)
    share = torch.where(torch.isnan(share), torch.inf, share)
    return torch.where(told, share, torch.zeros_like(share))


def _compared(case: str, model: str, block: str, drift: Tensor, bounds: Tensor) -> Comparison:
    share = quotients(drift, bounds)
    return Comparison(
        case,
        model,
        block,
        drift.shape[-2],
        float(share.max()),
        float(drift.max()),
        float(bounds.max()),
    )


def problem_factory(model: Model, case: Case) -> ProblemFactory:
    """Return the problem factory of a model between eager float32 and a kernel."""
    import torch

    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

    return ProblemFactory(model, resolve(TRAIN.ref()), resolve(case.ref()), torch.device("cpu"))


@cache
def eager(name: str) -> Any:
    """Return the training kernel of a model."""
    from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

    return load_kernel(TRAIN.ref(), loaded(name), "cpu")


if __name__ == "__main__":
    sys.exit(main())
