"""Hulls of quantised activations, compared with every code and with float32 quantisers."""

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.model.numerics import Activations, Attention, Numerics, Weights
from kcdsl.model.numerics.formats import CODE_FORMATS
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.quantisers import (
    codes,
    known_steps,
    quantised_hull,
    quantiser_steps,
    scale_range,
)
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops.quantised.inputs import activation_error

DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
FORMATS = ["fp8_e4m3", "fp8_e5m2", "int8"]


def grid(format: str) -> np.ndarray:
    """Return every non-negative code."""
    if format == "int8":
        return np.arange(128.0)
    patterns = np.arange(128, dtype=np.uint8).view(DTYPES[format]).astype(np.float64)
    return np.sort(patterns[np.isfinite(patterns)])


def coded(ratio: np.ndarray, format: str) -> np.ndarray:
    """Return the codes of float32 ratios, saturating."""
    limited = np.clip(ratio, -CODE_FORMATS[format].grid.largest, CODE_FORMATS[format].grid.largest)
    if format == "int8":
        return np.rint(limited).astype(np.float32)
    return limited.astype(DTYPES[format]).astype(np.float32)


def oracle(
    v: np.ndarray, low: np.ndarray, high: np.ndarray, format: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the greatest s·q(v/s), v >= 0, code by code."""
    every = grid(format)
    below = np.concatenate([[0.0], (every[1:] + every[:-1]) / 2])
    above = np.concatenate([below[1:], [np.inf]])
    least, most = np.full(v.shape, np.inf), np.full(v.shape, -np.inf)
    for code, first, last in zip(every, below, above, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            from_, to = np.maximum(low, v / last), np.minimum(high, v / first)
        to = np.where(first == 0, high, to)
        met = from_ <= to
        least = np.where(met, np.minimum(least, code * from_), least)
        most = np.where(met, np.maximum(most, code * to), most)
    return least, most


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spread", [0.0, 2.0**-9, 2.0**-5, 0.3, 2.0])
def test_hull_equals_that_of_all_codes(format: str, spread: float) -> None:
    """At points of every binade, and at the ends of all steps: exact up to the slack."""
    rng = np.random.default_rng(0)
    every = grid(format)
    ends = np.concatenate([every, (every[1:] + every[:-1]) / 2, rng.uniform(0, every[-1], 500)])
    scale = rng.uniform(0.01, 10, ends.shape)
    low, high = (s.astype(np.float32).astype(np.float64) for s in (scale, scale * (1 + spread)))
    v = ends * scale * (1 + spread * rng.uniform(0, 1, ends.shape))
    v = np.minimum(v, high * every[-1])
    _least, _most = oracle(v, low, high, format)
    point, around = Box.point(torch.from_numpy(v)), Box(*map(torch.from_numpy, (low, high)))
    box = quantised_hull(point, known_steps(CODE_FORMATS[format], point, around))
    lo, hi = box.lo.numpy(), box.hi.numpy()
    # The oracle does not round: a product may differ by a rounding, and a ratio within one of a
    # tie gets either code, where the hull may be a step wider or narrower than the oracle.
    nudged = [oracle(v * (1 + s), low, high, format) for s in (-3e-7, 3e-7)]
    widest = np.maximum(nudged[0][1], nudged[1][1]), np.minimum(nudged[0][0], nudged[1][0])
    narrowest = np.minimum(nudged[0][1], nudged[1][1]), np.maximum(nudged[0][0], nudged[1][0])
    assert (hi >= narrowest[0] * (1 - 1e-6)).all()
    assert (lo <= narrowest[1] * (1 + 1e-6)).all()
    assert (hi <= widest[0] * (1 + 1e-6) + 1e-300).all()
    assert (lo >= widest[1] * (1 - 1e-6)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_codes_with_a_known_scale_are_exact(format: str) -> None:
    """Inside each step the hull is one number, up to the slack."""
    every = grid(format)
    inside = every[1:] * (1 + 2.0**-10 * np.where(np.arange(len(every) - 1) % 2, 1, -1))
    scale = Box.point(torch.tensor([0.037], dtype=torch.float64).expand(len(inside)).contiguous())
    v = Box.point(torch.from_numpy(inside * 0.037))
    by = known_steps(CODE_FORMATS[format], v, scale)
    hull = quantised_hull(v, by)
    expected = torch.from_numpy(every[1:] * 0.037)
    assert bool(((hull.lo - expected).abs() <= 1e-6 * expected).all())
    assert bool(((hull.hi - expected).abs() <= 1e-6 * expected).all())
    found = codes(v, by)
    assert torch.equal(found.low, torch.from_numpy(every[1:]))
    assert torch.equal(found.high, torch.from_numpy(every[1:]))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", ["per_token", "per_tensor"])
def test_float32_quantisers_are_inside_the_hull(format: str, scale: str) -> None:
    """Random rows within a region, quantised in float32 with their own maximum."""
    rng = np.random.default_rng(1)
    top = np.float32(CODE_FORMATS[format].grid.largest)
    for wide in (0.0, 1e-4, 1e-2, 0.3):
        centre = rng.standard_normal((8, 64)) * np.exp(rng.uniform(-12, 2, (8, 64)))
        centre = centre.astype(np.float32).astype(np.float64)
        x = Box(torch.from_numpy(centre - wide), torch.from_numpy(centre + wide))
        around = scale_range(x, Activations(format, scale))
        assert bool((around.lo > 0).all())
        by = known_steps(CODE_FORMATS[format], x, around)
        hull, found = quantised_hull(x, by), codes(x, by)
        for _ in range(40):
            v = centre + wide * rng.choice([-0.99, 0.99, 0.3, -0.7], centre.shape)
            held = v.astype(np.float32)
            amax = (
                np.abs(held).max(-1, keepdims=True) if scale == "per_token" else np.abs(held).max()
            )
            s = (amax / top).astype(np.float32)
            code = coded(held / s, format)
            value = (code * s).astype(np.float64)
            assert (hull.lo.numpy() <= value).all()
            assert (value <= hull.hi.numpy()).all()
            assert (found.low.numpy() <= code).all()
            assert (code <= found.high.numpy()).all()
            if not wide:
                assert (hull.lo.numpy() == value).all()
                assert (hull.hi.numpy() == value).all()


def test_ties_at_points_are_decided() -> None:
    """bfloat16 rows contain midpoints of codes exactly; float32 arithmetic decides each of them."""
    rng = np.random.default_rng(4)
    held = rng.standard_normal((64, 256)).astype(ml_dtypes.bfloat16).astype(np.float32)
    held[:, 0] = 7.0
    s = (np.abs(held).max(-1, keepdims=True) / np.float32(448)).astype(np.float32)
    ratio = (held / s).astype(np.float64)
    every = grid("fp8_e4m3")
    ties = np.isin(np.abs(ratio), (every[1:] + every[:-1]) / 2)
    assert ties.sum() > 100
    x = Box.point(torch.from_numpy(held.astype(np.float64)))
    around = scale_range(x, Activations("fp8_e4m3", "per_token"))
    hull = quantised_hull(x, known_steps(CODE_FORMATS["fp8_e4m3"], x, around))
    value = coded(held / s, "fp8_e4m3") * s
    assert (hull.lo.numpy() == value).all()
    assert (hull.hi.numpy() == value).all()


def kernel(format: str, scale: str, casts: str = "nearest") -> Rounding:
    return Rounding(
        Numerics(
            "test",
            "bfloat16",
            "float32",
            casts,
            Weights("bfloat16"),
            Activations(format, scale),
            Attention("composed", "bfloat16", "bfloat16", 128, 4),
        )
    )


def test_step_hull_is_never_wider_than_the_error_box() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 128, generator=generator, dtype=torch.float64)
    for scale in ("per_token", "per_tensor", "mx", "none"):
        rounding = kernel("fp8_e4m3", scale)
        for wide in (0.0, 1e-5, 1e-2, 1.0):
            box = Box(x - wide, x + wide)
            error = activation_error(box, rounding, "n")
            assert error is not None
            stored = quantiser_steps(box, error, rounding)
            assert stored is not None
            widest = box.widen(error)
            assert bool((stored.value.lo >= widest.lo).all() & (stored.value.hi <= widest.hi).all())
            assert bool((stored.error.mag() <= error * (1 + 1e-9)).all())
            if not wide:
                narrow = (stored.value.hi - stored.value.lo) / 2
                assert float((narrow / error.clamp_min(1e-300)).median()) < 1e-4


@pytest.mark.full
def test_saturated_mx_codes_are_inside_the_hull() -> None:
    """Values from 512·s on saturate at 448·s, for any power of two s."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        x = torch.randn(1, 32, generator=generator, dtype=torch.float64) * 4
        box = Box(x * 0.999, x * 1.001)
        box = Box(torch.minimum(box.lo, box.hi), torch.maximum(box.lo, box.hi))
        around = scale_range(box, Activations("fp8_e4m3", "mx"))
        hull = quantised_hull(box, known_steps(CODE_FORMATS["fp8_e4m3"], box, around))
        for factor in (0.999, 0.9995, 1.0, 1.0004, 1.001):
            v = (x * factor).numpy().astype(np.float32)
            s = np.float32(2.0 ** (np.floor(np.log2(np.abs(v).max())) - 8))
            value = (coded(v / s, "fp8_e4m3") * s).astype(np.float64)
            assert (hull.lo.numpy() <= value).all()
            assert (value <= hull.hi.numpy()).all()


def test_free_casts_have_no_step_function() -> None:
    x = Box.point(torch.ones(1, 4, dtype=torch.float64))
    for rounding in (kernel("fp8_e4m3", "per_token", "any"), kernel("uint8", "per_tensor", "any")):
        error = activation_error(x, rounding, "n")
        assert error is not None
        assert quantiser_steps(x, error, rounding) is None


@pytest.mark.parametrize("format", FORMATS)
def test_subnormal_products_are_inside_the_hull(format: str) -> None:
    """Rows so small that scales, and products of scales with codes, lose bits to underflow."""
    rng = np.random.default_rng(3)
    top = np.float32(CODE_FORMATS[format].grid.largest)
    rounding = kernel(format, "per_token")
    for exponent in range(-140, -90, 5):
        size = 2.0**exponent
        # one element of each row decides its scale, the others are at their ends
        centre = (rng.uniform(0, 2, (64, 32)) * size).astype(np.float32).astype(np.float64)
        centre[:, 0] = 4 * size
        wide = np.where(np.arange(32) == 0, size, 0.0) + np.zeros(centre.shape)
        x = Box(torch.from_numpy(centre - wide), torch.from_numpy(centre + wide))
        error = activation_error(x, rounding, "n")
        assert error is not None
        stored = quantiser_steps(x, error, rounding)
        assert stored is not None
        for _ in range(40):
            held = (centre + wide * rng.uniform(-1, 1, centre.shape)).astype(np.float32)
            with np.errstate(all="ignore"):
                s = (np.abs(held).max(-1, keepdims=True) / top).astype(np.float32)
                ratio = np.where(s > 0, held / np.where(s > 0, s, 1), 0).astype(np.float32)
            value = (coded(np.clip(ratio, -top, top), format) * s).astype(np.float64)
            assert (stored.value.lo.numpy() <= value).all(), exponent
            assert (value <= stored.value.hi.numpy()).all(), exponent


def test_possibly_zero_group_keeps_the_error_bound() -> None:
    zero = torch.zeros(2, 4, dtype=torch.float64)
    rounding = kernel("fp8_e4m3", "per_token")
    box = Box(zero - 1e-3, zero + 1e-3)
    error = activation_error(box, rounding, "n")
    assert error is not None
    stored = quantiser_steps(box, error, rounding)
    assert stored is not None
    assert bool(torch.isfinite(stored.value.lo).all())
    assert torch.equal(stored.value.hi, box.widen(error).hi)
