"""Lemmas of the rounding models, proved by z3's theory of floating-point numbers.

z3's sort (4, 4) is E4M3 up to 240, where its largest number lies; the codes from 240 to 448 are
covered exhaustively in tests/unit/interval/test_formats_exhaustively.py.
"""

from __future__ import annotations

import pytest
import z3

E4M3, E5M2 = z3.FPSort(4, 4), z3.FPSort(5, 3)
HALF, BFLOAT, SINGLE, WIDE = (
    z3.FPSort(5, 11),
    z3.FPSort(8, 8),
    z3.FPSort(8, 24),
    z3.FPSort(11, 53),
)
NEAREST = z3.RNE()
LIMIT_MS = 60_000


def proved(*assumptions: z3.BoolRef, claim: z3.BoolRef) -> bool:
    """Say whether the claim follows; unknown is no."""
    solver = z3.Solver()
    solver.set("timeout", LIMIT_MS)
    solver.add(*assumptions, z3.Not(claim))
    return solver.check() == z3.unsat


def value(number: float, sort: z3.FPSortRef) -> z3.FPRef:
    return z3.FPVal(number, sort)


def cast_error(x: z3.FPRef, target: z3.FPSortRef, exact: z3.FPSortRef) -> tuple[z3.FPRef, z3.FPRef]:
    """Return |x| and |cast(x) - x| in a sort in which both are exact."""
    rounded = z3.fpToFP(NEAREST, z3.fpToFP(NEAREST, x, target), exact)
    wide = z3.fpToFP(NEAREST, x, exact)
    return z3.fpAbs(wide), z3.fpAbs(z3.fpSub(NEAREST, rounded, wide))


@pytest.mark.parametrize(
    ("target", "largest", "u", "eta"),
    [(E4M3, 240.0, 2.0**-4, 2.0**-10), (E5M2, 57344.0, 2.0**-3, 2.0**-17)],
)
def test_casts_to_fp8_of_float16(
    target: z3.FPSortRef, largest: float, u: float, eta: float
) -> None:
    """|fl8(x) - x| <= max(u|x|, eta): x and its cast are exact in float32, and so is u|x|."""
    x = z3.FP("x", HALF)
    size, error = cast_error(x, target, SINGLE)
    inside = z3.And(z3.Not(z3.fpIsNaN(x)), z3.fpLEQ(size, value(largest, SINGLE)))
    scaled = z3.fpMul(NEAREST, value(u, SINGLE), size)
    claim = z3.Or(z3.fpLEQ(error, scaled), z3.fpLEQ(error, value(eta, SINGLE)))
    assert proved(inside, claim=claim)
    halved = z3.fpMul(NEAREST, value(u / 2, SINGLE), size)
    assert not proved(
        inside, claim=z3.Or(z3.fpLEQ(error, halved), z3.fpLEQ(error, value(eta, SINGLE)))
    )


def test_casts_to_e4m3_lose_at_most_a_seventeenth() -> None:
    """|fl8(x) - x|·17 <= |x| in the normal range, for x of float16: attained, so not 18."""
    x = z3.FP("x", HALF)
    size, error = cast_error(x, E4M3, SINGLE)
    normal = z3.And(
        z3.Not(z3.fpIsNaN(x)),
        z3.fpGEQ(size, value(2.0**-6, SINGLE)),
        z3.fpLEQ(size, value(240.0, SINGLE)),
    )
    for factor, holds in ((17.0, True), (18.0, False)):
        claim = z3.fpLEQ(z3.fpMul(NEAREST, value(factor, SINGLE), error), size)
        assert proved(normal, claim=claim) is holds


@pytest.mark.parametrize(
    ("target", "largest", "u", "eta"),
    [
        (HALF, 65504.0, 2.0**-11, 2.0**-25),
        (BFLOAT, float.fromhex("0x1.fep+127"), 2.0**-8, 2.0**-134),
    ],
    ids=["float16", "bfloat16"],
)
def test_casts_of_float32(target: z3.FPSortRef, largest: float, u: float, eta: float) -> None:
    """|cast(x) - x| <= max(u|x|, eta), exactly, in float64."""
    x = z3.FP("x", SINGLE)
    size, error = cast_error(x, target, WIDE)
    inside = z3.And(z3.Not(z3.fpIsNaN(x)), z3.fpLEQ(size, value(largest, WIDE)))
    scaled = z3.fpMul(NEAREST, value(u, WIDE), size)
    claim = z3.Or(z3.fpLEQ(error, scaled), z3.fpLEQ(error, value(eta, WIDE)))
    assert proved(inside, claim=claim)


@pytest.mark.parametrize("target", [E4M3, E5M2, HALF, BFLOAT], ids=str)
def test_casts_are_monotone(target: z3.FPSortRef) -> None:
    """x <= y gives cast(x) <= cast(y): a cast of a box is the box of the casts of its ends."""
    x, y = z3.FP("x", HALF), z3.FP("y", HALF)
    ordered = z3.fpLEQ(x, y)
    claim = z3.fpLEQ(z3.fpToFP(NEAREST, x, target), z3.fpToFP(NEAREST, y, target))
    assert proved(ordered, claim=claim)


def test_the_ratio_of_an_element_and_its_scale_stays_within_the_format() -> None:
    """|v| <= amax gives |v|/(amax/448) <= 464: with codes above 448 cut off, nothing is NaN.

    In the narrow sort (5, 8) the scale amax/448 is rounded as float32 rounds it, only coarser; 464
    is the last number that rounds to 448.
    """
    narrow = z3.FPSort(5, 8)
    v, amax = z3.FP("v", narrow), z3.FP("a", narrow)
    scale = z3.fpDiv(NEAREST, amax, value(448.0, narrow))
    inside = z3.And(
        z3.fpLEQ(z3.fpAbs(v), amax),
        z3.fpGEQ(scale, value(2.0**-14, narrow)),
        z3.fpLEQ(amax, value(65000.0, narrow)),
    )
    ratio = z3.fpDiv(NEAREST, z3.fpAbs(v), scale)
    assert proved(inside, claim=z3.fpLEQ(ratio, value(464.0, narrow)))
