"""Lemmas about rounding, proved by z3's theory of floating-point numbers.

z3's sort (4, 4) is E4M3 up to 240, its largest number; the codes from 240 to 448 are covered
exhaustively in tests/unit/interval/test_formats_exhaustively.py.
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
    """Return whether the claim follows; unknown is no."""
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
def test_error_of_casts_from_float16_to_fp8(
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


def test_casts_to_e4m3_have_a_relative_error_of_at_most_1_17() -> None:
    """|fl8(x) - x|·17 <= |x| in the normal range, for float16 x: attained, so 18 is wrong."""
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "largest", "u", "eta"),
    [
        (HALF, 65504.0, 2.0**-11, 2.0**-25),
        (BFLOAT, float.fromhex("0x1.fep+127"), 2.0**-8, 2.0**-134),
    ],
    ids=["float16", "bfloat16"],
)
def test_error_of_casts_from_float32(
    target: z3.FPSortRef, largest: float, u: float, eta: float
) -> None:
    """|cast(x) - x| <= max(u|x|, eta), exactly, in float64."""
    x = z3.FP("x", SINGLE)
    size, error = cast_error(x, target, WIDE)
    inside = z3.And(z3.Not(z3.fpIsNaN(x)), z3.fpLEQ(size, value(largest, WIDE)))
    scaled = z3.fpMul(NEAREST, value(u, WIDE), size)
    claim = z3.Or(z3.fpLEQ(error, scaled), z3.fpLEQ(error, value(eta, WIDE)))
    assert proved(inside, claim=claim)


@pytest.mark.parametrize("target", [E4M3, E5M2, HALF, BFLOAT], ids=str)
def test_casts_are_monotone(target: z3.FPSortRef) -> None:
    """x <= y implies cast(x) <= cast(y): the cast of a box has the casts of its ends."""
    x, y = z3.FP("x", HALF), z3.FP("y", HALF)
    ordered = z3.fpLEQ(x, y)
    claim = z3.fpLEQ(z3.fpToFP(NEAREST, x, target), z3.fpToFP(NEAREST, y, target))
    assert proved(ordered, claim=claim)


INWARD = z3.RTZ()
TARGETS = [
    pytest.param(E4M3, HALF, SINGLE, 2.0**-4, 2.0**-10, 240.0, id="fp8_e4m3"),
    pytest.param(E5M2, HALF, SINGLE, 2.0**-3, 2.0**-17, 57344.0, id="fp8_e5m2"),
    pytest.param(HALF, SINGLE, WIDE, 2.0**-11, 2.0**-25, 65504.0, id="float16"),
    pytest.param(
        BFLOAT, SINGLE, WIDE, 2.0**-8, 2.0**-134, float.fromhex("0x1.fep+127"), id="bfloat16"
    ),
]


def cut_off(
    source: z3.FPSortRef, target: z3.FPSortRef, exact: z3.FPSortRef
) -> tuple[z3.FPRef, z3.FPRef, z3.FPRef]:
    """Return x, |x| and |x truncated toward zero|, the last two exactly."""
    x = z3.FP("x", source)
    left = z3.fpToFP(NEAREST, z3.fpToFP(INWARD, x, target), exact)
    return x, z3.fpAbs(z3.fpToFP(NEAREST, x, exact)), z3.fpAbs(left)


@pytest.mark.full
@pytest.mark.parametrize(("target", "source", "exact", "u", "eta", "largest"), TARGETS)
def test_casts_toward_zero_have_an_error_below_two_roundoffs(
    target: z3.FPSortRef,
    source: z3.FPSortRef,
    exact: z3.FPSortRef,
    u: float,
    eta: float,
    largest: float,
) -> None:
    """0 <= |x| - |cut(x)| < max(2u|x|, 2η): u or half a subnormal would be too small."""
    x, size, left = cut_off(source, target, exact)
    inside = z3.And(z3.Not(z3.fpIsNaN(x)), z3.fpLEQ(size, value(largest, exact)))
    lost = z3.fpSub(NEAREST, size, left)

    def within(roundoffs: float, subnormals: float) -> z3.BoolRef:
        scaled = z3.fpMul(NEAREST, value(roundoffs * u, exact), size)
        faint = value(subnormals * 2 * eta, exact)
        return z3.Or(z3.fpLEQ(lost, scaled), z3.fpLT(lost, faint))

    assert proved(inside, claim=z3.And(z3.fpLEQ(left, size), within(2, 1)))
    assert not proved(inside, claim=within(1, 1))
    assert not proved(inside, claim=within(2, 0.5))


@pytest.mark.parametrize(("target", "source", "exact", "u", "eta", "largest"), TARGETS)
def test_casts_toward_zero_keep_order_and_sign_and_never_overflow(
    target: z3.FPSortRef,
    source: z3.FPSortRef,
    exact: z3.FPSortRef,
    u: float,
    eta: float,
    largest: float,
) -> None:
    """Finite numbers stay finite: values beyond the largest number become the largest."""
    x, y = z3.FP("x", source), z3.FP("y", source)
    one, two = (z3.fpToFP(INWARD, v, target) for v in (x, y))
    finite = z3.Not(z3.Or(z3.fpIsNaN(x), z3.fpIsInf(x)))
    again = z3.fpToFP(INWARD, z3.fpToFP(NEAREST, one, source), target)
    fits = z3.fpLEQ(z3.fpAbs(one), value(largest, target))
    signs = z3.fpIsNegative(one) == z3.fpIsNegative(x)
    assert proved(finite, claim=z3.And(z3.Not(z3.fpIsInf(one)), fits, signs, again == one))
    if source == HALF:
        assert proved(z3.fpLEQ(x, y), claim=z3.fpLEQ(one, two))


def test_ratio_of_an_element_to_its_scale_fits_the_format() -> None:
    """|v| <= amax implies |v|/(amax/448) <= 464; with saturation above 448 no code is NaN.

    In the narrow sort (5, 8) the scale amax/448 is rounded as in float32, but more coarsely; 464 is
    the last number that rounds to 448.
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


def nearest_code(x: z3.ArithRef, name: str, slack: float) -> tuple[z3.ArithRef, z3.BoolRef]:
    """Return an integer, and the condition that it is nearest to x up to `slack`."""
    code = z3.ToReal(z3.Int(name))
    return code, z3.And(code - x <= 0.5 + slack, x - code <= 0.5 + slack)


def cut(code: z3.ArithRef, low: z3.ArithRef, high: z3.ArithRef) -> z3.ArithRef:
    return z3.If(code < low, low, z3.If(code > high, high, code))


ROUNDINGS = 2.0**-14
"""The roundings of a scale and of a zero point, in steps (section 2)."""


@pytest.mark.parametrize(("centred", "holds"), [(True, True), (False, False)])
def test_zero_point_adds_at_most_half_a_step(centred: bool, holds: bool) -> None:
    """In steps: from -m to M with M + m = 255, the code of x saturates at -z and 255 - z.

    z is the nearest integer to m; rounding down would be wrong. Float32 makes M + m = 255 up to
    255·2^-23, and each ratio has an error of 255·2^-24.
    """
    x, low, high = z3.Real("x"), z3.Real("m"), z3.Real("M")
    code, near = nearest_code(x, "k", 255 * 2.0**-24)
    zero, middle = nearest_code(low, "z", 255 * 2.0**-24)
    down = z3.And(zero <= low, low - zero < 1)
    wide = z3.And(low + high <= 255 + 255 * 2.0**-23, low >= 0, high >= 0)
    inside = z3.And(x >= -low, x <= high)
    off = x - cut(code, -zero, 255 - zero)
    claim = z3.And(off <= 0.5 + ROUNDINGS, -off <= 0.5 + ROUNDINGS)
    assert proved(wide, inside, near, middle if centred else down, claim=claim) is holds


@pytest.mark.parametrize(("largest", "holds"), [(127.5, True), (128.0, False)])
def test_full_range_of_int8_adds_at_most_half_a_step(largest: float, holds: bool) -> None:
    """|x| <= 127.5 steps, saturated at -128 and 127: at most half a step from the nearest code."""
    x = z3.Real("x")
    code, near = nearest_code(x, "k", 128 * 2.0**-23)
    off = x - cut(code, z3.RealVal(-128), z3.RealVal(127))
    inside = z3.And(x <= largest * (1 + 2.0**-23), -x <= largest * (1 + 2.0**-23))
    claim = z3.And(off <= 0.5 + ROUNDINGS, -off <= 0.5 + ROUNDINGS)
    assert proved(inside, near, claim=claim) is holds


@pytest.mark.full
def test_division_and_reciprocal_agree_up_to_four_roundoffs() -> None:
    """fl(x/s) and fl(x·fl(1/s)) equal x/s up to 4u: |ratio·s - x| <= 4u|x|, in a wide sort."""
    narrow, wide = z3.FPSort(5, 4), z3.FPSort(8, 12)
    x, s = z3.FP("x", narrow), z3.FP("s", narrow)
    inside = z3.And(
        z3.fpGEQ(x, value(2.0**-3, narrow)),
        z3.fpLEQ(x, value(2.0**3, narrow)),
        z3.fpGEQ(s, value(2.0**-3, narrow)),
        z3.fpLEQ(s, value(2.0**3, narrow)),
    )
    one = value(1.0, narrow)
    quotient = z3.fpDiv(NEAREST, x, s)
    product = z3.fpMul(NEAREST, x, z3.fpDiv(NEAREST, one, s))
    size = z3.fpToFP(NEAREST, x, wide)
    for ratio, factor, holds in ((quotient, 1, True), (product, 4, True), (product, 1, False)):
        back = z3.fpMul(NEAREST, z3.fpToFP(NEAREST, ratio, wide), z3.fpToFP(NEAREST, s, wide))
        off = z3.fpAbs(z3.fpSub(NEAREST, back, size))
        most = z3.fpMul(NEAREST, value(factor * 2.0**-4 * (1 + 2.0**-4), wide), size)
        assert proved(inside, claim=z3.fpLEQ(off, most)) is holds
