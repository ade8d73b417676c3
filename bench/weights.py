"""Growth of bounds with the radius ρ of a weight ball.

The largest elementwise bound at one sentence (hidden states at a point), by the interval domain and
by its intersection with affine forms, for all weights within ρ of those of the checkpoint. The
training kernel is torch eager, in float32 unless the case says otherwise. The drift of a run at the
checkpoint itself is given too. The figures are bound(ρ) / bound(0).

    make bench-weights
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from bench.common import Better, Figure, report
from bench.minilm import problem_factory as minilm

RHOS = ("1e-6", "1e-5", "1e-4", "1e-3")
SENTENCE = "The quick brown fox jumps over the lazy dog near the big river bank."
PROMPT = "the cat sat on"
TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny_lm"
_EAGER = {"preset": "torch-eager"}
_HALF = {"preset": "torch-eager", "compute": "float16"}
_HALF_FUSED = {"preset": "torch-sdpa-flash", "compute": "float16"}
_NEAREST = {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"}
_FLOAT8 = {"preset": "fp8-weights", "casts": "nearest"}
_FLOAT32 = {"preset": "torch-sdpa-flash", "compute": "float32"}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    block: str
    numerics: dict[str, Any] = field(hash=False)
    tiny: bool
    train: dict[str, Any] = field(hash=False, default_factory=lambda: _EAGER)


CASES = (
    Case("tiny LM attn_0, float32 fused", "attn_0", _FLOAT32, True),
    Case("tiny LM layer_0, float32 fused", "layer_0", _FLOAT32, True),
    Case("tiny LM attn_0, float16 fused against float16", "attn_0", _HALF_FUSED, True, _HALF),
    Case("tiny LM attn_0, bfloat16", "attn_0", _NEAREST, True),
    Case("tiny LM attn_0, fp8 weights", "attn_0", _FLOAT8, True),
    Case("tiny LM mlp_0, bfloat16", "mlp_0", _NEAREST, True),
    Case("tiny LM mlp_0, fp8 weights", "mlp_0", _FLOAT8, True),
    Case("MiniLM attn_0, float32 fused", "attn_0", _FLOAT32, False),
    Case("MiniLM attn_0, float16 fused against float16", "attn_0", _HALF_FUSED, False, _HALF),
    Case("MiniLM attn_0, bfloat16", "attn_0", _NEAREST, False),
    Case("MiniLM attn_0, fp8 weights", "attn_0", _FLOAT8, False),
)


def main() -> int:
    """Measure every case and report."""
    figures: list[Figure] = []
    for case in CASES:
        figures += measure(case)
    return report("weights", figures)


def tiny_lm(infer: dict[str, Any], train: dict[str, Any]) -> Any:
    """Return the trained example between a training and an inference kernel."""
    import torch

    from kcdsl.check.compile import load_program
    from kcdsl.model.loader import load_model
    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

    program = load_program(TINY / "contract.yaml")
    model = load_model(program.model, TINY)
    return ProblemFactory(model, resolve(train), resolve(infer), torch.device("cpu"))


def measure(case: Case) -> list[Figure]:
    """Bound one case for every ρ, and attack it at the checkpoint."""
    import torch

    from kcdsl_backends.attack import attack

    make = tiny_lm if case.tiny else minilm
    factory = make(case.numerics, case.train)
    tokens = tuple(factory.model.tokenizer.encode(PROMPT if case.tiny else SENTENCE))
    problem, centre = factory.problem(case.block, tokens), factory.centre(case.block, tokens)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    known, alone, output = bounds(problem, centre, zero)
    places = output.mag().flatten().topk(3).indices.tolist()
    train, infer = problem.simulators()
    run = attack(train, infer, "inf", centre, zero, candidates=1, rounds=2, places=places)
    figures = []
    for rho in RHOS:
        near = replace(problem, weight_ball=factory.weight_ball(case.block, Fraction(rho)))
        started = time.perf_counter()
        bound, interval, _ = bounds(near, centre, zero)
        took = time.perf_counter() - started
        if run.value > bound:
            raise SystemExit(f"{case.name}: {bound} at {rho}, {known} at 0, a run of {run.value}")
        where = (
            f"{len(tokens)} tokens; bound {bound:.3g}, by intervals {interval:.3g};"
            f" at 0 {known:.3g}, by intervals {alone:.3g}; run {run.value:.3g}"
        )
        what = f"{case.name}, ρ {rho}: bound / that at 0"
        figures.append(Figure(what, bound / known, Better.LOWER, None, f"{where}; {took:.2f} s"))
        print(what, bound / known, where, file=sys.stderr, flush=True)
    return figures


def bounds(problem: Any, centre: Any, radius: Any) -> tuple[float, float, Any]:
    """Return the largest bound of both domains together and of intervals alone, and the box."""
    from kcdsl_backends.drift.boxes import NoBound

    box = problem.bound(centre, radius).output.drift
    alone = float(box.mag().amax())
    try:
        box = box.meet(problem.forms(centre, radius).box())
    except NoBound as no:
        print(no, file=sys.stderr)
    return float(box.mag().amax()), alone, box


if __name__ == "__main__":
    sys.exit(main())
