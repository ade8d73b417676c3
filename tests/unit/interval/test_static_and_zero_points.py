"""Quantisers with a zero point, with the full range of int8, and with static scales.

Every code of every format, from both ends of its step, compared with float32 quantisers; reachable
codes are certain, and both programs agree.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.model.numerics import Activations, Attention, Numerics, Weights
from kcdsl_backends.attack.quantised_inputs import Exceeded, moved_by, to_nearest
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.quantisers import codes, quantised_hull, quantiser, quantiser_steps
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.sums import Sums
from kcdsl_backends.drift.ops.quantised.inputs import activation_error
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval import quantisers as checked
from kcdsl_certs.recheck.interval.box import Box as CheckedBox
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from kcdsl_certs.recheck.ops.linear.quantised_inputs import quantisation
from tests.support import proofs
from tests.support.prover import numerics

Floats = np.ndarray
DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
LAST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int8_full": 127.0}
STATIC = ("fp8_e4m3", "fp8_e5m2", "int8", "int8_full", "uint8")
ZERO = 93


def rounding(activations: Activations, casts: str = "nearest") -> Rounding:
    attention = Attention("composed", "float32", "float32", 128, 4)
    return Rounding(
        Numerics("test", "float32", "float32", casts, Weights("float32"), activations, attention)
    )


def static(format: str, *scales: float) -> Activations:
    zeros = (("*", ZERO),) if format == "uint8" else ()
    return Activations(format, "static", (("*", scales),), zeros)


def grid(format: str) -> Floats:
    """Return every code, of both signs; those of uint8 count from the zero point."""
    if format in DTYPES:
        patterns = np.arange(256, dtype=np.uint8).view(DTYPES[format]).astype(np.float64)
        return np.unique(patterns[np.isfinite(patterns)])
    ends = {"int8": (-127, 127), "int8_full": (-128, 127), "uint8": (-ZERO, 255 - ZERO)}[format]
    return np.arange(ends[0], ends[1] + 1.0)


def static_codes(v: Floats, s: np.float32, format: str, times: bool) -> Floats:
    """Return the codes of a kernel that divides by a scale, or multiplies by its reciprocal."""
    ratio = v.astype(np.float32) * (np.float32(1) / s) if times else v.astype(np.float32) / s
    every = grid(format)
    if format in DTYPES:
        limited = np.clip(ratio, np.float32(every[0]), np.float32(every[-1]))
        return limited.astype(DTYPES[format]).astype(np.float64)
    return np.clip(np.rint(ratio), every[0], every[-1]).astype(np.float64)


def checker_steps(activations: Any, x: Box, key: str = "w.weight") -> checked.QuantiserSteps:
    kernel = parse_kernel(proofs.numerics("float32", "nearest", activations=activations), "kernel")
    return checked.steps(kernel, CheckedBox(x.lo.numpy(), x.hi.numpy()), key)


def agree(x: Box, mine: Any, other: checked.QuantiserSteps) -> None:
    """Assert that both programs find equal scales, codes and hulls, to the last float32 bit."""
    seen = CheckedBox(x.lo.numpy(), x.hi.numpy())
    mine_codes, other_codes = codes(x, mine), checked.codes(other, seen)
    assert np.array_equal(mine_codes.low.numpy(), other_codes[0])
    assert np.array_equal(mine_codes.high.numpy(), other_codes[1])
    hull, theirs = quantised_hull(x, mine), checked.hull(other, seen)
    for one, two in ((hull.lo, theirs.lo), (hull.hi, theirs.hi)):
        assert np.allclose(one.numpy(), two, rtol=1e-12, atol=0)


@pytest.mark.parametrize("format", STATIC)
@pytest.mark.parametrize("scale", [0.0123, 2.0**-7, 3.0, 1e-20])
def test_codes_at_every_boundary_of_a_static_scale(format: str, scale: float) -> None:
    """Each number next to the end of a step gets one of the derived codes, for any division."""
    s = np.float32(scale)
    every = grid(format)
    ends = (every[1:] + every[:-1]) / 2
    at = (ends * float(s)).astype(np.float32)
    steps = [at]
    for side in (-np.inf, np.inf):
        near = at
        for _ in range(3):
            near = np.nextafter(near, np.float32(side))
            steps.append(near)
    inside = (every * float(s)).astype(np.float32)
    v = np.concatenate([*steps, inside]).astype(np.float64)
    x = Box.point(torch.from_numpy(v))
    spec = static(format, float(s))
    by = quantiser(x, spec, "w.weight", "n")
    found, hull = codes(x, by), quantised_hull(x, by)
    for times in (False, True):
        code = static_codes(v, s, format, times)
        value = (code.astype(np.float32) * s).astype(np.float64)
        assert (found.low.numpy() <= code).all()
        assert (code <= found.high.numpy()).all()
        assert (hull.lo.numpy() <= value).all()
        assert (value <= hull.hi.numpy()).all()
    known = (found.low == found.high).numpy()
    assert known[-len(inside) :].all()
    assert np.array_equal(found.low.numpy()[-len(inside) :], every)
    ranks = [np.searchsorted(every, end.numpy()) for end in (found.low, found.high)]
    assert (ranks[1] - ranks[0] <= 1).all()
    record = proofs.static(format, float(s), ZERO if format == "uint8" else None)
    agree(x, by, checker_steps(record, x))


@pytest.mark.parametrize("format", STATIC)
@pytest.mark.parametrize("casts", ["nearest", "any"])
def test_values_beyond_a_static_scale_have_no_bound(format: str, casts: str) -> None:
    """The element is named; the largest value inside has a bound, and its error is within Q."""
    s = float(np.float32(0.037))
    every, whole = grid(format), 0.0 if format in DTYPES else 0.5
    spec = static(format, s)
    kernel = rounding(spec, casts)
    record = proofs.static(format, s, ZERO if format == "uint8" else None)
    parsed = parse_kernel(proofs.numerics("float32", casts, activations=record), "kernel")
    for end in (every[-1] + whole, every[0] - whole):
        x = torch.zeros(3, 4, dtype=torch.float64)
        x[2, 1] = end * s
        error = activation_error(Box.point(x), kernel, "n", "w.weight")
        assert error is not None
        theirs = quantisation(parsed, CheckedBox(x.numpy(), x.numpy()), "w.weight")
        assert np.allclose(theirs, error.numpy(), rtol=1e-9, atol=2.0**-130)
        code = static_codes(x.numpy(), np.float32(s), format, times=True)
        assert (np.abs(code * s - x.numpy()) <= error.numpy()).all()
        x[2, 1] *= 1 + 1e-5
        with pytest.raises(NoBound, match=r"overflow reachable: element \[2, 1\] of the input"):
            activation_error(Box.point(x), kernel, "n", "w.weight")
        with pytest.raises(Rejected, match=r"element \[2, 1\] may exceed its static"):
            quantisation(parsed, CheckedBox(x.numpy(), x.numpy()), "w.weight")
        with pytest.raises(Exceeded, match="overflow reachable"):
            to_nearest(x, kernel.numerics, "w.weight")
        with pytest.raises(Exceeded, match="overflow reachable"):
            moved_by(x, kernel.numerics, "w.weight", torch.ones_like(x))


def test_box_that_partly_exceeds_the_scale_has_no_bound() -> None:
    x = torch.zeros(2, 2, dtype=torch.float64)
    high = x.clone()
    high[0, 1] = 128.0
    with pytest.raises(NoBound, match=r"element \[0, 1\]"):
        quantiser(Box(x, high), static("int8", 1.0), "w.weight", "n")
    high[0, 1] = torch.nan
    with pytest.raises(NoBound):
        quantiser(Box(x, high), static("int8", 1.0), "w.weight", "n")


def test_static_scales_are_selected_by_the_name_of_the_linear() -> None:
    x = Box.point(torch.full((2, 3), 2.0, dtype=torch.float64))
    spec = Activations("int8", "static", (("a", (0.5,)), ("b", (0.5, 0.25, 1.0))))
    assert bool((quantiser(x, spec, "a.weight", "n").scale.lo == 0.5).all())
    assert quantiser(x, spec, "b.weight", "n").scale.lo.tolist() == [[0.5, 0.25, 1.0]] * 2
    for weight in ("c.weight", ""):
        with pytest.raises(NoBound, match="no static scale"):
            quantiser(x, spec, weight, "n")
    wide = Box.point(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(NoBound, match="3 static scales are given for the 4 inputs"):
        quantiser(wide, spec, "b.weight", "n")
    # without the name of the linear there is no bound, whatever scales others have
    default = Activations("int8", "static", (("*", (0.5,)),))
    with pytest.raises(NoBound, match="no static scale"):
        activation_error(x, rounding(default, "any"), "n")
    parsed = parse_kernel(
        proofs.numerics("float32", activations=proofs.static("int8", 0.5)), "kernel"
    )
    with pytest.raises(Rejected, match="no static scale"):
        quantisation(parsed, CheckedBox(x.lo.numpy(), x.hi.numpy()))


def test_tensor_core_uses_the_static_scale_for_subnormal_codes() -> None:
    """The largest actual number does not matter for a static scale."""
    from kcdsl.model.numerics.preset_table import TENSOR_CORES

    core = TENSOR_CORES["hopper_fp8"].to_json()
    left = torch.full((1, 64), 2.0**-12, dtype=torch.float64)
    right = torch.full((64, 1), 2.0**-3, dtype=torch.float64)
    total = left @ right
    found = {}
    for s in (2.0**-8, 2.0**2):
        record = proofs.numerics(
            "bfloat16",
            weights=("fp8_e4m3", "per_channel"),
            activations=proofs.static("fp8_e4m3", s),
            tensor_core=core,
        )
        kernel = Rounding(numerics(record))
        error = Sums(left, right, total, total, kernel, quantised=True, weight="w").error()
        found[s] = float(error)
    # at s = 4 every code is subnormal: exponents start at 2^-6·4
    assert found[2.0**2] > 2 * found[2.0**-8]
    with pytest.raises(NoBound, match="no static scale"):
        Sums(left, right, total, total, kernel, quantised=True).error()


# --- zero points and the full range --------------------------------------------------------------


def asymmetric(held: np.ndarray, scale: str) -> tuple[Floats, Floats]:
    """Return codes minus zero points, and values, by ONNX Runtime's formulas."""
    rows = held if scale == "per_token" else held.reshape(1, -1)
    low = np.minimum(rows.min(-1, keepdims=True), np.float32(0))
    high = np.maximum(rows.max(-1, keepdims=True), np.float32(0))
    s = (high - low) / np.float32(255)
    zero = np.clip(np.rint(-low / s), 0, 255)
    code = np.clip(np.rint(rows / s) + zero, 0, 255) - zero
    value = (code.astype(np.float32) * s).astype(np.float64)
    return code.reshape(held.shape).astype(np.float64), value.reshape(held.shape)


def full_range(held: np.ndarray, scale: str) -> tuple[Floats, Floats]:
    """Return codes and values by torchao's formulas."""
    rows = held if scale == "per_token" else held.reshape(1, -1)
    top = np.abs(rows).max(-1, keepdims=True)
    s = np.maximum(top / np.float32(127.5), np.float32(2.0**-23))
    code = np.clip(np.rint(rows * (np.float32(1) / s)), -128, 127)
    value = (code.astype(np.float32) * s).astype(np.float64)
    return code.reshape(held.shape).astype(np.float64), value.reshape(held.shape)


KERNELS = {"uint8": asymmetric, "int8_full": full_range}


@pytest.mark.sample(8)
@pytest.mark.parametrize("scale", ["per_token", "per_tensor"])
@pytest.mark.parametrize("format", KERNELS)
@pytest.mark.parametrize("shift", [-2.0, 0.0, 0.7, 4.0])
def test_float32_quantisers_with_zero_points_are_inside_the_hull(
    format: str, scale: str, shift: float
) -> None:
    """Rows on both sides of zero and on one; at points every code is exact."""
    rng = np.random.default_rng([int(10 * (shift + 2)), len(scale), len(format)])
    spec = Activations(format, scale)
    kernel = rounding(spec)
    for wide in (0.0, 1e-6, 1e-4, 1e-2, 0.3):
        size = np.exp(rng.uniform(-12, 2, (8, 1)))
        centre = ((rng.standard_normal((8, 64)) + shift) * size).astype(np.float32)
        centre = centre.astype(np.float64)
        x = Box(torch.from_numpy(centre - wide * size), torch.from_numpy(centre + wide * size))
        by = quantiser(x, spec, "", "n")
        assert bool((by.scale.lo > 0).all())
        hull, found = quantised_hull(x, by), codes(x, by)
        agree(x, by, checker_steps((format, scale), x))
        error = activation_error(x, kernel, "n")
        assert error is not None
        stored = quantiser_steps(x, error, kernel)
        assert stored is not None
        for trial in range(40):
            moves = wide * size * rng.choice([-0.99, 0.99, 0.3, -0.7], centre.shape)
            held = (centre + moves).astype(np.float32)
            inside = (x.lo.numpy() <= held) & (held <= x.hi.numpy())
            held = np.where(inside, held, centre.astype(np.float32))
            code, value = KERNELS[format](held, scale)
            assert (hull.lo.numpy() <= value).all()
            assert (value <= hull.hi.numpy()).all()
            assert (found.low.numpy() <= code).all()
            assert (code <= found.high.numpy()).all()
            moved = value - held
            assert (np.abs(moved) <= error.numpy()).all()
            assert (stored.error.lo.numpy() <= moved).all()
            assert (moved <= stored.error.hi.numpy()).all()
            if not wide:
                assert (hull.lo.numpy() == value).all()
                assert (hull.hi.numpy() == value).all()
                simulated = to_nearest(torch.from_numpy(centre), kernel.numerics, "w")
                assert np.array_equal(simulated.numpy(), value)
                assert trial == 0
                break


@pytest.mark.parametrize("format", KERNELS)
def test_last_codes_have_at_most_half_a_step_of_error(format: str) -> None:
    """Ranges that put the zero point, or the largest number, halfway between two codes."""
    rng = np.random.default_rng(5)
    low = np.concatenate([np.arange(0, 256) + 0.5, rng.uniform(0, 255, 2000)])
    low = low[low <= 255]
    rows = np.stack([-low, 255 - low, rng.uniform(-low, 255 - low)], -1)
    rows = (rows * rng.uniform(1e-3, 1e3, (len(rows), 1))).astype(np.float32)
    if format == "int8_full":
        rows[:, 1] = np.abs(rows).max(-1)  # the code of the largest is 127.5
    x = Box.point(torch.from_numpy(rows.astype(np.float64)))
    error = activation_error(x, rounding(Activations(format, "per_token"), "any"), "n")
    assert error is not None
    _, value = KERNELS[format](rows, "per_token")
    off = np.abs(value - rows)
    assert (off <= error.numpy()).all()
    assert (off > 0.99 * error.numpy()).any()


def test_zero_group_keeps_the_error_bound() -> None:
    zero = torch.zeros(2, 4, dtype=torch.float64)
    for format in KERNELS:
        kernel = rounding(Activations(format, "per_token"))
        for box in (Box.point(zero), Box(zero - 1e-3, zero + 1e-3)):
            error = activation_error(box, kernel, "n")
            assert error is not None
            stored = quantiser_steps(box, error, kernel)
            assert stored is not None
            assert bool(
                torch.isfinite(stored.value.lo).all() & torch.isfinite(stored.value.hi).all()
            )
            assert bool((stored.value.lo <= 0).all() & (stored.value.hi >= 0).all())


@pytest.mark.parametrize("scale", ["per_token", "per_tensor"])
def test_one_sided_rows_use_all_steps_on_one_side(scale: str) -> None:
    """For positive numbers the zero point is 0, and Q half of 1/255 of the largest."""
    x = Box.point(torch.rand(4, 32, dtype=torch.float64).to(torch.float32).to(torch.float64) + 1)
    by = quantiser(x, Activations("uint8", scale), "", "n")
    assert bool((by.tops.below.hi == 0).all())
    assert bool((by.tops.above.lo == 255).all())
    error = activation_error(x, rounding(Activations("uint8", scale), "any"), "n")
    assert error is not None
    top = x.hi.amax(-1, keepdim=True) if scale == "per_token" else x.hi.amax()
    assert bool((error <= 0.51 * top / 255).all())
