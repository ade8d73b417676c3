"""Are the sides swapped: does the kernel called train compute as infer claims, and vice versa?"""

from __future__ import annotations

import math

from kcdsl_backends.empirical.diagnoses.model import Repair
from kcdsl_backends.empirical.diagnoses.noise import Noise

_APART = 8.0
"""How many times the noise of one claim must be that of the other, for the sides to be told apart.
"""
_MATCH = 4.0
"""How far, as a factor, the noise of a kernel may lie from what the other side claims."""


def swapped_sides(noise: Noise | None) -> Repair:
    """Compare the noise of each kernel with both claims; swapped sides turn w = p/q into 1/w.

    `left` is the misfit after the swap as a share of that before: a misfit is the sum over both
    sides of |ln(observed / expected)|.
    """
    name = "swapped_sides"
    if noise is None:
        return Repair(name, "no reference run", None)
    train, infer = noise.expected
    if max(train, infer) < _APART * min(train, infer):
        return Repair(name, "both kernels claim about the same noise", None)
    if min(noise.observed) == 0:
        return Repair(name, "a kernel makes no rounding error", None)
    now = [abs(math.log(o / e)) for o, e in zip(noise.observed, noise.expected, strict=True)]
    then = [abs(math.log(o / e)) for o, e in zip(noise.observed, (infer, train), strict=True)]
    shown = ", ".join(
        f"{side} errs by {o:.2g} and claims {e:.2g}"
        for side, o, e in zip(("train", "infer"), noise.observed, noise.expected, strict=True)
    )
    fits = max(then) < math.log(_MATCH) and min(now) > math.log(_MATCH)
    left = sum(then) / sum(now) if fits else 1.0
    return Repair(name, shown, left)
