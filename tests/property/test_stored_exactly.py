"""Free casts of boxes and errors compared with fractions, to the last bit of float64.

Errors are as large as the cast values or far larger, so that sums of both are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from kcdsl.model.numerics.formats import FORMATS
from kcdsl_backends.drift.boxes import Box as ProverBox
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.state import stored
from kcdsl_certs.recheck.numerics.formats import FLOAT32
from kcdsl_certs.recheck.numerics.formats import FORMATS as THEIRS
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs
from tests.support.prover import numerics

Floats = np.ndarray
Ends = tuple[Floats, Floats]
CASTS = {"any": 1, "any_direction": 2, "any_toward_zero": 2}
"""The largest error of one cast, in units of u and η."""
COUNT = 400


def prover(name: str, casts: str, box: Ends, error: Floats) -> tuple[Ends, Ends]:
    kernel, ends = Rounding(numerics(proofs.numerics(name, casts))), map(torch.from_numpy, box)
    exact, inner = ProverBox(*ends), FORMATS["float32"]
    found = kernel.store(exact, torch.from_numpy(error), FORMATS[name], "node", inner)
    value, wrong = found.value, found.error
    return (value.lo.numpy(), value.hi.numpy()), (wrong.lo.numpy(), wrong.hi.numpy())


def checker(name: str, casts: str, box: Ends, error: Floats) -> tuple[Ends, Ends]:
    kernel = parse_kernel(proofs.numerics(name, casts), "numerics")
    value, wrong = stored(kernel, THEIRS[name], Box(*box), error, FLOAT32)
    return (value.lo, value.hi), (wrong.lo, wrong.hi)


def made(rng: np.random.Generator) -> tuple[Ends, Floats]:
    """Return boxes and errors of many sizes with full significands; a third are points."""
    scale = 2.0 ** rng.integers(-12, 12, COUNT)
    low = rng.standard_normal(COUNT) * scale
    high = low + rng.uniform(0, 1, COUNT) * scale * rng.choice([0.0, 2.0**-20, 1.0], COUNT)
    return (low, high), rng.uniform(0, 1, COUNT) * 2.0 ** rng.integers(-20, 8, COUNT)


@pytest.mark.sample(9)
@pytest.mark.parametrize("program", [prover, checker])
@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_stored_bounds_are_sound_to_the_last_bit(
    name: str, casts: str, program: Callable[[str, str, Ends, Floats], tuple[Ends, Ends]]
) -> None:
    rng, form = np.random.default_rng([len(name), list(CASTS).index(casts)]), FORMATS[name]
    box, error = made(rng)
    value, wrong = program(name, casts, box, error)
    unit, faint = (Fraction(n) * CASTS[casts] for n in (form.unit_roundoff, form.underflow))
    rounded = 0
    for k in range(COUNT):
        e = Fraction(float(error[k]))
        for y in (Fraction(float(end[k])) for end in box):
            for v in (y - e, y + e):
                lost = unit * abs(v) + faint
                down, up = v - lost, v + lost
                if casts == "any_toward_zero":
                    down, up = (max(down, Fraction(0)), v) if v > 0 else (v, min(up, Fraction(0)))
                assert Fraction(float(value[0][k])) <= down
                assert up <= Fraction(float(value[1][k]))
                assert Fraction(float(wrong[0][k])) <= down - y
                assert up - y <= Fraction(float(wrong[1][k]))
                rounded += Fraction(float(error[k]) + float(lost)) < e + lost
    assert rounded > COUNT / 4
