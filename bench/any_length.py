"""One bound for every length against the bound of each length, and against an attack there.

Attention of the published MiniLM and of the tiny LM, float32 torch eager against float32 flash
attention. Every row of the sequence lies in one box: a ball around the state of one token, or the
hull of all states of a sentence. The any-length bound covers 1 to 256 rows. It is compared with the
bound of the interval domain at each single length and with the strongest run found there.

    make bench-any-length    # also the table and the picture of docs/proofs/any-length.md
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.any_length_picture import Curve, draw
from bench.common import Better, Figure, report, seconds, show_in
from bench.minilm import problem_factory

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl_backends.certifier.statements.problems import ProblemFactory

LENGTHS = (6, 17, 64, 256)
LONGEST = LENGTHS[-1]
EFFORT = {6: (3, 8), 17: (3, 8), 64: (1, 3), 256: (1, 1)}
"""By number of rows: output elements and steps of an attack."""
RADII = (1e-4, 1e-3, 1e-2)
BLOCK = "attn_0"
SENTENCE = "The quick brown fox jumps over the lazy dog near the big river bank."
ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny_lm"
PICTURE = ROOT / "docs" / "images" / "any-length.svg"
INFER = {"preset": "torch-sdpa-flash", "compute": "float32"}
TOKEN = 3
"""Index of the token whose state is the centre of the balls."""


@dataclass(frozen=True, slots=True)
class Region:
    """The box of one row: centre and radius [1, D]."""

    name: str
    centre: Tensor
    radius: Tensor


def models() -> dict[str, tuple[ProblemFactory, list[int]]]:
    """Return both models with the tokens of the sentence."""
    import torch

    from kcdsl.ir.terms import ModelRef
    from kcdsl.model.loader import load_model
    from kcdsl.model.presets import resolve
    from kcdsl_backends.certifier.statements.problems import ProblemFactory

    mini = problem_factory(INFER)
    assert mini.model.tokenizer_source is not None
    ref = ModelRef("model.safetensors", architecture="llama", config="config.json")
    loaded = load_model(ref, TINY)
    train, infer = resolve({"preset": "torch-eager"}), resolve(INFER)
    tiny = ProblemFactory(loaded, train, infer, torch.device("cpu"))
    return {
        "MiniLM": (mini, list(mini.model.tokenizer_source.encode(SENTENCE))),
        "tiny LM": (tiny, list(SENTENCE.encode())),
    }


def regions(factory: ProblemFactory, ids: list[int]) -> Iterator[Region]:
    """Yield the balls around one state, and the hull of all states of the sentence."""
    import torch

    states = factory.centre(BLOCK, tuple(ids))
    assert states is not None
    one = states[TOKEN : TOKEN + 1]
    for radius in RADII:
        yield Region(f"ball {radius:g}", one, torch.full_like(one, radius))
    low, high = states.amin(0, keepdim=True), states.amax(0, keepdim=True)
    middle = (low + high) / 2
    yield Region("hull of a sentence", middle, torch.maximum(high - middle, middle - low))


def measure(model: str, factory: ProblemFactory, region: Region) -> Curve:
    """Bound and attack one region at every length.

    Raises:
        AssertionError: a run leaves a bound.
    """
    whole = worst(factory.sequences(BLOCK, LONGEST).bound(region.centre, region.radius))
    exact, attacked = {}, {}
    for rows in LENGTHS:
        problem = factory.problem(BLOCK, tuple(range(rows)))
        shape = (rows, region.centre.shape[-1])
        centre = region.centre.expand(shape).contiguous()
        radius = region.radius.expand(shape).contiguous()
        exact[rows] = worst(problem.bound(centre, radius))
        attacked[rows] = strongest(problem, centre, radius)
        assert attacked[rows] <= min(whole, exact[rows]), (model, region.name, rows)
    return Curve(model, region.name, whole, exact, attacked)


def worst(bounds: Any) -> float:
    """Return the largest element of the bound of a drift."""
    return float(bounds.output.drift.mag().amax())


def strongest(problem: Any, centre: Tensor, radius: Tensor) -> float:
    """Return the largest drift of an attack, which tries fewer output elements at many rows."""
    from kcdsl_backends.attack import attack

    candidates, rounds = EFFORT[centre.shape[0]]
    train, infer = problem.simulators()
    found = attack(train, infer, "inf", centre, radius, candidates=candidates, rounds=rounds)
    return float(found.value)


def figures(found: Curve) -> Iterator[Figure]:
    """Yield the figures of one region."""
    name = f"{found.model}, {found.region}"
    listed = ", ".join(f"{rows} rows {value:.3g}" for rows, value in found.exact.items())
    runs = ", ".join(f"{rows} rows {value:.3g}" for rows, value in found.attacked.items())
    yield Figure(f"{name}: bound of 1 to {LONGEST} rows", found.any_length, Better.LOWER)
    yield Figure(
        f"{name}: / bound of {LONGEST} rows",
        found.any_length / found.exact[LONGEST],
        Better.LOWER,
        1.5,
        f"interval domain at each length: {listed}",
    )
    yield Figure(
        f"{name}: / strongest run",
        found.any_length / max(found.attacked.values()),
        Better.LOWER,
        None,
        f"found: {runs}",
    )


def table(found: Sequence[Curve]) -> str:
    """Return the table of the page."""
    rows = " / ".join(map(str, LENGTHS))
    lines = [
        f"| model, box of a row | bound of 1 to {LONGEST} rows | interval domain at {rows} rows |"
        f" strongest run found at {rows} rows | bound / strongest run |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        exact, attacked = (
            " / ".join(f"{values[n]:.3g}" for n in LENGTHS) for values in (one.exact, one.attacked)
        )
        ratio = one.any_length / max(one.attacked.values())
        lines.append(
            f"| {one.model}, {one.region} | {one.any_length:.3g} | {exact} | {attacked} |"
            f" {ratio:.3g} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure everything, print the table and write the results."""
    known = models()
    rows: list[Figure] = []
    measured = []
    for name, (factory, ids) in known.items():
        for region in regions(factory, ids):
            measured.append(measure(name, factory, region))
            rows += figures(measured[-1])
            print(f"{name}, {region.name}: done", file=sys.stderr, flush=True)
        problem, box = factory.sequences(BLOCK, LONGEST), next(regions(factory, ids))
        taken = seconds(partial(problem.bound, box.centre, box.radius), repeat=3)
        rows.append(Figure(f"{name}: seconds of a bound", taken, Better.LOWER, 2.0))
    assert all(math.isfinite(one.any_length) for one in measured)
    PICTURE.write_text(draw(measured), encoding="utf-8")
    show_in("proofs/any-length.md", "any_length", table(measured))
    return report("any_length", rows)


if __name__ == "__main__":
    raise SystemExit(main())
