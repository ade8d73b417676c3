"""Forward time, verification time, memory, bound and attack of one real attention block.

MiniLM `attn_0` (D = 384, 12 heads, published weights) on one sentence of 17 tokens, at the point,
with float32 torch eager as training kernel and an inference kernel in float32, in bfloat16 and with
float8 weights; the coarse ones also with casts to nearest. Each is measured in a separate process.

    make bench-foundation
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench.common import Better, Figure, forget_peak, peak_bytes, report, seconds
from bench.minilm import problem_factory

SENTENCE = "The quick brown fox jumps over the lazy dog near the big river bank."
TOKENS = 17
NUMERICS: dict[str, dict[str, Any]] = {
    "float32": {"preset": "torch-sdpa-flash", "compute": "float32"},
    "bfloat16": {"preset": "torch-sdpa-flash", "compute": "bfloat16"},
    "fp8-weights": {
        "preset": "torch-sdpa-flash",
        "compute": "float32",
        "weights": {"format": "fp8_e4m3", "scale": "per_channel"},
    },
    "bfloat16 nearest": {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"},
    "fp8-weights bfloat16 nearest": {"preset": "fp8-weights", "casts": "nearest"},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one process."""

    forward: float
    verify: float
    attack_seconds: float
    ratio: float
    base_bytes: int
    peak_bytes: int
    bound: float
    attack: float


def main() -> int:
    """Measure every numerics and report."""
    import torch

    torch.set_num_threads(1)
    figures: list[Figure] = []
    for name in NUMERICS:
        # A fresh process each: peak memory cannot be reset.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found = pool.submit(measure, name).result()
        figures += _figures(name, found)
    return report("foundation", figures)


def _figures(name: str, found: Measured) -> list[Figure]:
    where = f"MiniLM attn_0, {TOKENS} tokens, point, 1 thread"
    lower, mib = Better.LOWER, 2.0**20
    return [
        Figure(f"{name}: forward seconds", found.forward, lower, None, where),
        Figure(f"{name}: verify seconds", found.verify, lower, None, where),
        Figure(f"{name}: verify / forward", found.ratio, lower, None, "medians of one run"),
        Figure(f"{name}: attack seconds", found.attack_seconds, lower, None, where),
        Figure(
            f"{name}: peak MiB of verifying",
            (found.peak_bytes - found.base_bytes) / mib,
            lower,
            None,
            f"above {found.base_bytes / mib:.0f} MiB of the process with its model",
        ),
        Figure(f"{name}: bound", found.bound, lower, None, "norm_inf of the drift"),
        Figure(f"{name}: attack", found.attack, Better.HIGHER, None, "a simulated admitted run"),
        Figure(f"{name}: tightness", found.bound / found.attack, lower, None, "bound / attack"),
    ]


def measure(name: str) -> Measured:
    """Measure one numerics in this process."""
    import torch

    from kcdsl_backends.attack import Attack, attack
    from kcdsl_backends.drift.functionals import drift_bound

    torch.set_num_threads(1)
    factory = problem_factory(NUMERICS[name])
    model = factory.model
    tokens = tuple(model.tokenizer.encode(SENTENCE))
    if len(tokens) != TOKENS:
        raise SystemExit(f"the sentence has {len(tokens)} tokens, not {TOKENS}")
    problem, centre = factory.problem("attn_0", tokens), factory.centre("attn_0", tokens)
    assert centre is not None
    x, block = centre.float(), model.block("attn_0")
    zero = torch.zeros(1, 1, dtype=torch.float64)
    with torch.no_grad():
        forward = seconds(lambda: block(x), repeat=50, warmup=10)
    base = forget_peak()
    verify = seconds(lambda: problem.bound(centre, zero), repeat=20, warmup=2)
    peak = peak_bytes()
    bound = drift_bound(problem.bound(centre, zero).output.drift, "inf")
    found: list[Attack] = []
    train, infer = problem.simulators()
    attacked = seconds(
        lambda: found.append(attack(train, infer, "inf", centre, zero)), repeat=1, warmup=0
    )
    strongest = max(a.value for a in found)
    return Measured(forward, verify, attacked, verify / forward, base, peak, bound, strongest)


if __name__ == "__main__":
    sys.exit(main())
