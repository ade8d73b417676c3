"""Probabilistic and worst-case bounds: drift of MiniLM with independent roundings.

Every case has the worst-case bound, the bound that fails in at most one of 10^9 runs, and the
largest drift of runs whose roundings have random signs.

    make bench-likely
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch

from bench.certifier import MIDDLE, SHORT
from bench.common import Better, Figure, report, show_in
from bench.minilm import problem_factory
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import NoBound

ALPHA = Fraction(1, 10**9)
RUNS = 64
TERMS = 64
"""Random signs in the rounding of a sum: fewer than its terms, which makes drift larger."""
_BFLOAT16 = {"preset": "torch-sdpa-flash", "compute": "bfloat16"}
_FLOAT32 = {"preset": "torch-sdpa-flash", "compute": "float32"}
_W8A8 = {"preset": "fp8-w8a8-per-channel", "casts": "any"}


@dataclass(frozen=True, slots=True)
class Line:
    """One case: bounds of the largest drift, and the drift of random runs."""

    name: str
    tokens: int
    worst: float
    likely: float
    drawn: float

    @property
    def gain(self) -> float:
        """Return the ratio of the worst-case bound to the probabilistic one."""
        return self.worst / self.likely


def _cases() -> Iterator[tuple[str, str, dict[str, str], tuple[str, ...]]]:
    short = (SHORT, MIDDLE)
    yield "attn_0, float32, any order", "attn_0", _FLOAT32, short
    yield "attn_0, bfloat16, casts any", "attn_0", _BFLOAT16, short
    yield "attn_0, fp8 W8A8 per token, casts any", "attn_0", _W8A8, short
    yield "mlp_0, bfloat16, casts any", "mlp_0", _BFLOAT16, short
    yield "layer_0, float32, any order", "layer_0", _FLOAT32, short
    yield "layer_0, bfloat16, casts any", "layer_0", _BFLOAT16, short


def _line(name: str, block: str, numerics: dict[str, str], sentence: str) -> Line:
    factory = problem_factory(numerics)
    tokens = tuple(factory.model.tokenizer.encode(sentence))
    problem, centre = factory.problem(block, tokens), factory.centre(block, tokens)
    assert centre is not None
    worst, likely = (_bound(problem, centre, alpha) for alpha in (None, ALPHA))
    generator = torch.Generator().manual_seed(0)
    drawn = max(_drawn(problem.simulators(), centre, generator) for _ in range(RUNS))
    if drawn > likely:
        raise SystemExit(f"{name}: a random run drifts by {drawn}, beyond the likely {likely}")
    return Line(name, len(tokens), worst, likely, drawn)


def _bound(problem: BlockProblem, centre: torch.Tensor, alpha: Fraction | None) -> float:
    """Return the bound of the largest drift; infinity if there is none."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    try:
        return float(problem.forms(centre, zero, alpha).box().mag().amax())
    except NoBound:
        return math.inf


def _drawn(
    sides: tuple[Simulator, Simulator], centre: torch.Tensor, generator: torch.Generator
) -> float:
    """Return the drift of one pair of runs with random signs."""
    ends = []
    for side in sides:
        symbols = {}
        for name, shape in side.symbol_shapes().items():
            signs = torch.randint(0, 2, (TERMS, *shape), generator=generator).double() * 2 - 1
            symbols[name] = signs.mean(0) if name.startswith("sum") else signs[0]
        ends.append(side.run(centre, symbols))
    return float((ends[1] - ends[0]).abs().amax())


def _table(lines: list[Line]) -> str:
    """Return the table of the page."""
    columns = ("case", "tokens", "worst case", "likely", "worst / likely", "random runs")
    rows = [
        (x.name, x.tokens, *(_number(v) for v in (x.worst, x.likely, x.gain, x.drawn)))
        for x in lines
    ]
    ruled = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in ruled)


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "none"


def main() -> int:
    """Measure, write the table into the page, and report the gains."""
    lines = []
    for name, block, numerics, sentences in _cases():
        for sentence in sentences:
            lines.append(_line(name, block, numerics, sentence))
            print(lines[-1], flush=True)
    show_in("reference/verify.md", "likely", _table(lines))
    where = f"alpha {float(ALPHA):g}, {RUNS} random runs"
    return report(
        "likely",
        [
            Figure(f"{x.name}, {x.tokens} tokens: {what}", value, better, None, where)
            for x in lines
            for what, value, better in (
                ("worst case / likely", x.gain, Better.HIGHER),
                ("likely / random runs", x.likely / x.drawn, Better.LOWER),
            )
            if math.isfinite(value)
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
