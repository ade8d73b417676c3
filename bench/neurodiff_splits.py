"""Proofs, with splitting and confirmed by the checker, that differences of NeuroDiff's pair are
small.

The networks and images of bench/neurodiff.py. Two questions for each image, in real arithmetic:

- is |g - f| < ε for every output, where ε is the largest end of the intervals published for
  NeuroDiff's first pass, which decides this without splitting?
- the same for half of that ε, which its first pass does not decide.

An answer counts if the checker re-derives the tree of boxes or replays the counterexample in exact
arithmetic.

    KCDSL_NEURODIFF=FOLDER python -m bench.peers --only neurodiff
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import Better, Figure
from bench.neurodiff import QUERIES, read_nnet

if TYPE_CHECKING:
    from kcdsl_backends.drift.linear.constraints import LinearConstraint

SECONDS = 5
"""Processor time of a question."""


def figures(folder: Path) -> list[Figure]:
    """Decide both questions for every image and return a row for each question."""
    import torch

    torch.set_num_threads(1)
    queries = json.loads((folder / QUERIES).read_text(encoding="utf-8"))
    networks = [read_nnet(folder / name) for name in queries["networks"]]
    layers = [
        [(one.tensors[f"{k}.weight"], one.tensors[f"{k}.bias"]) for k in range(len(one.sizes) - 1)]
        for one in networks
    ]
    rows = []
    for share, told in ((Fraction(1), "NeuroDiff's first pass"), (Fraction(1, 2), "half of it")):
        counts, boxes, started = Counter[str](), 0, time.process_time()
        for image, case in queries["cases"].items():
            verdict, bounded = decided(layers, case, queries["perturbation"], share)
            counts[verdict] += 1
            boxes += bounded
            print(f"image {image}, {told}: {verdict}, {bounded} boxes", file=sys.stderr, flush=True)
        spent = time.process_time() - started
        number = counts["proved"] + counts["counterexample"]
        how = f"{counts['proved']} proved, {counts['counterexample']} not, of {counts.total()}"
        how += f"; {boxes} boxes; {spent:.0f} s of processor, the checker's too; {SECONDS} s each"
        name = f"NeuroDiff's images, |g - f| below {told}: decided"
        rows.append(Figure(name, number, Better.HIGHER, None, how))
    return rows


def decided(
    layers: list[Any], case: dict[str, Any], perturbation: int, share: Fraction
) -> tuple[str, int]:
    """Return the verdict whether all outputs differ by less than a share of the published size."""
    from kcdsl_backends.drift.linear.splitting import decide

    ends = [*case["published"]["lower"], *case["published"]["upper"]]
    limit = share * max(abs(Fraction(str(value))) for value in ends)
    low, high = ends_of(case["image"], perturbation)
    unsafe = differences(len(case["published"]["lower"]), len(low), limit)
    found = decide(layers, low, high, unsafe, SECONDS, clock=time.process_time)
    return found.verdict, found.boxes


def ends_of(image: list[int], perturbation: int) -> tuple[list[Fraction], list[Fraction]]:
    """Return the ends of clip((pixel ± perturbation) / 255, 0, 1)."""
    low = [Fraction(max(pixel - perturbation, 0), 255) for pixel in image]
    high = [Fraction(min(pixel + perturbation, 255), 255) for pixel in image]
    return low, high


def differences(
    outputs: int, inputs: int, limit: Fraction, only: int | None = None
) -> list[list[LinearConstraint]]:
    """Return the constraints that some output differs by at least a limit, for either sign.

    Args:
        only: one output; all if it is None.
    """
    from kcdsl_backends.drift.linear.constraints import LinearConstraint

    found = []
    for output in range(outputs) if only is None else (only,):
        for sign in (1.0, -1.0):
            own = tuple(sign * (k == output) for k in range(outputs))
            found.append([LinearConstraint((0.0,) * inputs, own, tuple(-v for v in own), -limit)])
    return found
