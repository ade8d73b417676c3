"""Drift of kernels of a CUDA device against certified bounds, on a small random decoder.

As in bench/kernels.py on the CPU, but both kernels run on the device; the bounds are computed on
the CPU, and no quotient of drift and bound may exceed 1. Half-precision and float8 products have
the published numerics of the tensor cores. The table is in docs/explanation/real-kernels.md.

    python -m bench.kernels_device
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import kernels, kernels_inputs
from bench.common import Better, Figure, report, show_in
from bench.kernels import Case

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.model.architecture import Model

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "head_dim": 32, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = (1, 2, 31, 32, 33, 65, 129, 300)
LONGEST_AFFINE = 33
"""Longest input for the affine domain."""
UNITS = {8: "ampere_16", 9: "hopper_16", 10: "hopper_16"}
"""Tensor core of half-precision products by the major compute capability."""
FP8_UNITS = {(8, 9): "ada_fp8", (9, 0): "hopper_fp8", (10, 0): "blackwell_fp8"}
FEWEST = {"torch.sdpa.cudnn": 2}
"""Shortest supported sequences, if longer than one token (sdp_utils.cpp in PyTorch)."""


def cases(capability: tuple[int, int]) -> Iterator[tuple[str, Case]]:
    """Yield the kernels of a device, each with the block that it runs.

    Half-precision products are those of its tensor cores; float8 products are left out if their
    accumulator is not published.
    """
    half: dict[str, Any] = {"tensor_core": UNITS.get(capability[0], "ampere_16")}
    yield "attn_0", Case("torch.eager", {"compute": "float32"})
    yield "attn_0", Case("torch.sdpa.efficient", {"compute": "float32"})
    for compute in ("float16", "bfloat16"):
        flash = {"preset": "flash-attention-2", "compute": compute, **half}
        yield "attn_0", Case("torch.eager", {"compute": compute, **half})
        yield "mlp_0", Case("torch.eager", {"compute": compute, **half})
        yield "attn_0", Case("torch.sdpa.math", {"compute": compute, **half})
        yield "attn_0", Case("torch.sdpa.efficient", {"compute": compute, **half})
        yield "attn_0", Case("torch.sdpa.flash", flash)
        yield "attn_0", Case("torch.sdpa.cudnn", {"compute": compute, **half})
        yield "attn_0", Case("torch.compile", {"compute": compute, **half})
    unit = FP8_UNITS.get(capability)
    for preset in ("fp8-w8a8-per-channel", "fp8-w8a8-per-tensor") if unit else ():
        for block in ("attn_0", "mlp_0"):
            yield block, Case("torch.scaled_mm", {"preset": preset, "tensor_core": unit})


def random_model(folder: Path) -> Model:
    """Write a small decoder with widths that every kernel supports to a folder; return it."""
    import torch
    from safetensors.torch import save_file

    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.architectures import llama
    from kcdsl.model.loader import load_model

    generator = torch.Generator().manual_seed(5)
    state = {
        n: torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1])
        for n, p in llama.build(CONFIG).named_parameters()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model(ModelRef("model.safetensors", architecture="llama"), folder)


def inputs(run: str) -> Iterator[Tensor]:
    """Yield hidden states of many lengths and sizes that a kernel supports."""
    import torch

    generator, width = torch.Generator().manual_seed(11), CONFIG["hidden_size"]
    every = []
    for length in LENGTHS:
        x = torch.randn(length, width, generator=generator)
        every += [x, x * torch.exp2(torch.randint(-12, 4, x.shape, generator=generator).float())]
    for x in [*every, *kernels_inputs.odd(width)]:
        if len(x) >= FEWEST.get(run, 1):
            yield x


@dataclass(frozen=True, slots=True)
class Measured:
    """A kernel on all inputs: the largest drift / bound, and the numbers of runs and of bounds."""

    case: str
    block: str
    ratio: float
    runs: int
    told: int


def measure(model: Model, case: Case, block: str) -> Measured:
    """Run a kernel of the device and compare every run with its bound."""
    from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

    running = load_kernel(case.ref(), model, "cuda")
    started = load_kernel(kernels.TRAIN.ref(), model, "cuda")
    factory, worst, runs, told = kernels.problem_factory(model, case), 0.0, 0, 0
    for x in inputs(case.run):
        drift = (running.block(block, x) - started.block(block, x)).abs()
        bounds = kernels.bound(factory, block, x, affine=len(x) <= LONGEST_AFFINE)
        worst = max(worst, float(kernels.quotients(drift, bounds).max()))
        told += math.isfinite(float(bounds.max()))
        runs += 1
    return Measured(case.name, block, worst, runs, told)


def table(device: str, found: list[Measured]) -> str:
    """Return the table of the page."""
    lines = [
        f"On {device}:",
        "",
        "| kernel | block | runs, with a bound | largest drift / bound |",
        "|---|---|---|---|",
        *(f"| {m.case} | {m.block} | {m.runs}, {m.told} | {m.ratio:.3g} |" for m in found),
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure every case, write the table and report; fail without a device."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 1
    device, found = torch.cuda.get_device_name(0), []
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder))
        for block, case in cases(torch.cuda.get_device_capability(0)):
            found.append(measure(model, case, block))
            print(f"  {found[-1]}", file=sys.stderr, flush=True)
    show_in("explanation/real-kernels.md", "kernels_device", table(device, found))
    return report(
        "kernels_device",
        [
            Figure(
                f"{m.case}, {m.block}",
                m.ratio if m.told else math.nan,
                Better.LOWER,
                1.0,
                f"{m.told} of {m.runs} runs have a bound, on {device}",
            )
            for m in found
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
