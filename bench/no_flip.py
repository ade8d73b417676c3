"""Share of held-out positions of the tiny LM where no kernel can change the first choice.

Block `model` on prefixes of the held-out prompts of examples/tiny_lm, between torch eager float32
and an inference kernel, casts and orders of sums free in both. A position counts if its margin (the
largest logit minus the second, without roundings) exceeds twice the drift that an attack finds for
this difference. It is proved if affine forms show that its first choice is the same in all runs of
both kernels. Coarser formats are reported too.

    make bench-no-flip
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure, report

if TYPE_CHECKING:
    from kcdsl_backends.attack.simulation import Simulator
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny_lm"
LONGEST = 24
"""Largest number of tokens of a prompt."""
ROUNDS = 4
"""Sign iterations in one direction."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An inference kernel, the number of prompts, and the demanded share."""

    name: str
    numerics: dict[str, Any]
    prompts: int
    limit: float | None = None


KERNELS = (
    Kernel("float32", {"preset": "torch-sdpa-flash", "compute": "float32"}, 48, 0.99),
    Kernel("float16", {"preset": "torch-sdpa-flash", "compute": "float16"}, 6),
    Kernel("bfloat16", {"preset": "torch-sdpa-flash", "compute": "bfloat16"}, 6),
)


@dataclass(frozen=True, slots=True)
class Position:
    """One position: its margin, the margin drift of an attack, and whether it is proved."""

    margin: float
    attack: float
    proved: bool

    @property
    def counts(self) -> bool:
        """Return whether the margin exceeds twice the attack."""
        return self.margin > 2 * self.attack


def main() -> int:
    """Measure every kernel and report."""
    figures: list[Figure] = []
    for kernel in KERNELS:
        found: list[Position] = []
        factory = problem_factory(kernel.numerics)
        for tokens in prompts(kernel.prompts):
            found += positions(factory, tokens)
            some = sum(p.proved for p in found)
            print(kernel.name, f"{some} of {len(found)} proved", file=sys.stderr, flush=True)
        figures += _figures(kernel, found)
    return report("no_flip", figures)


def _figures(kernel: Kernel, found: Sequence[Position]) -> list[Figure]:
    counted = [p for p in found if p.counts]
    proved = sum(p.proved for p in counted)
    name = f"{kernel.name}, any order and any cast"
    where = f"{proved} of {len(counted)} positions of {kernel.prompts} prompts"
    everywhere = sum(p.proved for p in found) / len(found)
    return [
        Figure(
            f"{name}: proved where the margin exceeds twice the attack",
            proved / len(counted) if counted else math.nan,
            Better.HIGHER,
            kernel.limit,
            where,
        ),
        Figure(f"{name}: proved", everywhere, Better.HIGHER, None, f"of all {len(found)}"),
    ]


def problem_factory(infer: dict[str, Any]) -> ProblemFactory:
    """Return the model between float32 torch eager and a kernel of these numerics."""
    import torch

    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.loader import load_model
    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

    files = ModelRef("model.safetensors", architecture="llama", config="config.json")
    train = resolve({"preset": "torch-eager", "compute": "float32"})
    return ProblemFactory(load_model(files, EXAMPLE), train, resolve(infer), torch.device("cpu"))


def prompts(count: int) -> list[tuple[int, ...]]:
    """Return evenly spread prefixes of held-out prompts as tokens."""
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    chosen = texts[:: max(1, len(texts) // count)][:count]
    return [tuple(text.encode("utf-8")[:LONGEST]) for text in chosen]


def positions(factory: ProblemFactory, tokens: tuple[int, ...]) -> list[Position]:
    """Return every position of a prompt."""
    import torch

    from kcdsl_backends.certifier.statements.problems import claim_margin
    from kcdsl_backends.drift.boxes import NoBound
    from kcdsl_backends.drift.functionals import order_margins as margins

    problem = factory.problem("model", tokens)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    try:
        shown = margins(
            problem.forms(None, zero), 1, None, claim_margin(factory.train, factory.infer)
        )
    except NoBound:
        shown = torch.full((len(tokens),), -math.inf, dtype=torch.float64)
    kernels = problem.simulators()
    plain = [kernel.run(None, {}) for kernel in kernels]
    found = []
    for row in range(len(tokens)):
        value, (first, second) = plain[0][row], plain[0][row].topk(2).indices.tolist()
        moves = [
            [extreme(kernel, row, (first, second), sign) for sign in (1.0, -1.0)]
            for kernel in kernels
        ]
        attack = max(moves[1][0] - moves[0][1], moves[0][0] - moves[1][1])
        proved = bool(shown[row] > 0)
        flips = min(low for _, low in moves) <= 0
        if proved and flips:
            raise SystemExit(f"a run changes the first choice at {row}, which was excluded")
        found.append(Position(float(value[first] - value[second]), attack, proved))
    return found


def extreme(kernel: Simulator, row: int, columns: tuple[int, int], sign: float) -> float:
    """Maximise (sign 1) or minimise the difference of two logits of a row over roundings."""
    import torch

    from kcdsl_backends.attack.simulation import Overflowed

    symbols = {
        name: torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in kernel.symbol_shapes().items()
    }
    best: float | None = None
    for _ in range(ROUNDS):
        try:
            output = kernel.run(None, symbols)
        except Overflowed:
            break
        difference = output[row, columns[0]] - output[row, columns[1]]
        value = float(difference.detach())
        if best is not None and sign * value <= sign * best:
            break
        best = value
        slopes = torch.autograd.grad(
            sign * difference, list(symbols.values()), allow_unused=True, materialize_grads=True
        )
        symbols = {
            name: slope.sign().requires_grad_(True)
            for name, slope in zip(symbols, slopes, strict=True)
        }
    if best is None:
        raise SystemExit("a run without roundings overflows")
    return best


if __name__ == "__main__":
    sys.exit(main())
