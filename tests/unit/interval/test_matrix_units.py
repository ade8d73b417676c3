"""Tensor core bounds compared with exact simulations of their instructions, in any order."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.model.numerics import MatrixUnit
from kcdsl.model.numerics.preset_table import TENSOR_CORES
from kcdsl.model.presets import resolve
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.sums import Sums, accumulation_error
from kcdsl_certs.recheck.interval import sums as second
from kcdsl_certs.recheck.numerics.specification import parse_kernel

FP8 = {"format": "fp8_e4m3", "scale": "none"}
UNITS = ["hopper_fp8", "hopper_fp8_promoted", "ada_fp8", "blackwell_fp8"]
LEAST = -6
"""Exponent of the smallest normal number of fp8_e4m3, and of all subnormal ones."""


def exponent(value: Fraction) -> int:
    """Return floor(log2 |value|)."""
    value = abs(value)
    found = value.numerator.bit_length() - value.denominator.bit_length()
    return found if Fraction(2) ** found <= value else found - 1


def truncated(value: Fraction, quantum: Fraction) -> Fraction:
    """Truncate toward zero to a multiple of `quantum`."""
    whole = abs(value) // quantum * quantum
    return whole if value >= 0 else -whole


def instruction(unit: MatrixUnit, c: Fraction, pairs: list[tuple[Fraction, Fraction]]) -> Fraction:
    """Add the products of one instruction to c, as published: exact integers after alignment."""
    terms = [(a * b, max(exponent(a), LEAST) + max(exponent(b), LEAST)) for a, b in pairs if a * b]
    if c:
        terms.append((c, exponent(c)))
    if not terms:
        return c
    quantum = Fraction(2) ** (max(e for _, e in terms) - unit.fraction_bits)
    total = sum((truncated(value, quantum) for value, _ in terms), Fraction(0))
    if not total:
        return total
    return truncated(total, Fraction(2) ** (exponent(total) - unit.result_bits))


def single(value: Fraction) -> Fraction:
    """Round to float32."""
    return Fraction(float(np.float32(float(value))))


def summed(unit: MatrixUnit, pairs: list[tuple[Fraction, Fraction]]) -> Fraction:
    """Return the sum of products by one chain after another."""
    outer, c, since = Fraction(0), Fraction(0), 0
    for start in range(0, len(pairs), unit.chunk):
        c = instruction(unit, c, pairs[start : start + unit.chunk])
        since += unit.chunk
        if unit.promote and since >= unit.promote:
            outer, c, since = single(outer + c), Fraction(0), 0
    return single(outer + c) if unit.promote else c


def bounds(name: str, a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return the error bounds of prover and checker for the sum of a·b."""
    spec = resolve(
        {
            "preset": "torch-eager",
            "compute": "bfloat16",
            "weights": FP8,
            "activations": FP8,
            "tensor_core": name,
        }
    )
    left, right = np.abs(a)[None], np.abs(b)[:, None]
    total, result = left @ right * (1 + 2.0**-40), np.abs(a @ b)[None, None] * (1 + 2.0**-40)
    a_size, b_size, terms, value = (
        torch.from_numpy(np.atleast_2d(v)) for v in (left, right, total, result)
    )
    first = Sums(a_size, b_size, terms, value, Rounding(spec), quantised=True).error()
    kernel = parse_kernel(spec.to_json(), "infer")
    other = second.rounding_of_sums(kernel, (left, right), (total, result), dynamic=True)
    return float(first.max()), float(other.max())


def codes(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return codes of any size, or of one binade, or mostly subnormal ones."""
    match rng.integers(3):
        case 0:
            raw = rng.integers(0, 256, n).astype(np.uint8)
            values = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            return np.where(np.isfinite(values), values, 1.0)
        case 1:
            return rng.choice([-1, 1], n) * (1 + rng.integers(0, 8, n) / 8)
        case _:
            return rng.integers(-7, 8, n) * 2.0**-9 * np.where(rng.random(n) < 0.05, 2.0**12, 1)


@pytest.mark.full
@pytest.mark.parametrize("name", UNITS)
def test_simulated_sums_are_within_the_bound(name: str) -> None:
    unit = TENSOR_CORES[name].linears
    rng = np.random.default_rng(0)
    nearest = 0.0
    for n in (1, 5, 32, 33, 64, 128, 200, 256):
        for _ in range(12):
            a, b = codes(rng, n), codes(rng, n)
            first, other = bounds(name, a, b)
            exact = sum((Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)), Fraction(0))
            size = np.abs(a * b)
            for order in (np.argsort(-size), np.argsort(a * b), rng.permutation(n)):
                pairs = [(Fraction(a[i]), Fraction(b[i])) for i in order]
                error = float(abs(summed(unit, pairs) - exact))
                assert error <= first
                assert error <= other
                nearest = max(nearest, error / first)
            assert other == pytest.approx(first, rel=1e-3)
    assert nearest > 0.05


@pytest.mark.parametrize("many", [1, 4, 12])
def test_lost_small_terms_are_covered_by_the_bound(many: int) -> None:
    """The worst case: one large product and 31 that are aligned away, in every instruction."""
    unit = TENSOR_CORES["hopper_fp8"].linears
    a = np.tile(np.concatenate([[256.0], np.full(31, 3.75)]), many)
    b = np.tile(np.concatenate([[256.0], np.full(31, 1.875)]), many)
    pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)]
    exact = sum((x * y for x, y in pairs), Fraction(0))
    error = float(abs(summed(unit, pairs) - exact))
    assert error >= many * 31 * 3.75 * 1.875
    first, other = bounds("hopper_fp8", a, b)
    assert error <= first
    assert error <= other
    assert error > 0.04 * first


def test_gamma_with_14_bits_does_not_bound_the_unit() -> None:
    """A counterexample to γ_n with u = 2^-14: one product 2^16 and 31 products 0.879·2^3."""
    unit = TENSOR_CORES["hopper_fp8"].linears
    pairs = [(Fraction(256), Fraction(256))] + [(Fraction(15, 4), Fraction(15, 8))] * 31
    exact = sum((x * y for x, y in pairs), Fraction(0))
    error = abs(summed(unit, pairs) - exact)
    claimed = 32 * Fraction(1, 2**14) * exact / (1 - 32 * Fraction(1, 2**14))
    assert error > Fraction(3, 2) * claimed


def test_promotion_and_finer_units_tighten_the_bound() -> None:
    rng = np.random.default_rng(1)
    a, b = codes(rng, 4096), codes(rng, 4096)
    found = {name: bounds(name, a, b)[0] for name in UNITS}
    assert found["hopper_fp8_promoted"] < found["hopper_fp8"] / 4
    total = torch.from_numpy(np.atleast_2d(np.abs(a * b).sum()))
    plain = Rounding(resolve({"preset": "torch-eager", "compute": "bfloat16"}))
    usual = float(accumulation_error(total, total, 4096, plain))
    assert found["blackwell_fp8"] < 2 * usual


def test_float16_unit_bound_holds() -> None:
    """The tensor core of attention products: F = 25, 16 products, toward zero."""
    unit = TENSOR_CORES["hopper_16"].others
    spec = resolve({"preset": "torch-eager", "compute": "float16", "tensor_core": "hopper_16"})
    rng = np.random.default_rng(2)
    for n in (7, 32, 100):
        a, b = (rng.standard_normal(n).astype(np.float16).astype(np.float64) for _ in range(2))
        left, right = np.abs(a)[None], np.abs(b)[:, None]
        total, result = left @ right, np.abs(a @ b)[None, None]
        sizes = (left, right, *(np.atleast_2d(v * (1 + 2.0**-40)) for v in (total, result)))
        a_size, b_size, terms, value = (torch.from_numpy(size) for size in sizes)
        first = float(Sums(a_size, b_size, terms, value, Rounding(spec)).error())
        pairs = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)]
        exact = sum((x * y for x, y in pairs), Fraction(0))
        assert float(abs(summed(unit, pairs) - exact)) <= first
