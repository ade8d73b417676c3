"""Rounding to a format compared with ml_dtypes, exact rounding with numpy, and stated formats."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.quantisers import given as given_scales
from kcdsl_certs.recheck.numerics.formats import FORMATS, nearest
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs
from tests.support.rationals import cells

DTYPES: dict[str, Any] = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}
WIDTHS: dict[str, Any] = {
    "fp8_e4m3": np.uint8,
    "fp8_e5m2": np.uint8,
    "float16": np.uint16,
    "bfloat16": np.uint16,
}


def every_number(name: str) -> np.ndarray:
    """Return every finite number of a format, ascending."""
    width = WIDTHS[name]
    values = np.arange(np.iinfo(width).max + 1).astype(width).view(DTYPES[name])
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    return np.unique(wide[np.isfinite(wide)])


@pytest.mark.parametrize("name", WIDTHS)
def test_rounding_of_numbers_midpoints_and_neighbours(name: str) -> None:
    numbers = every_number(name)
    form = FORMATS[name]
    assert numbers.max() == form.largest
    assert numbers[numbers > 0].min() == 2 * form.eta
    np.testing.assert_array_equal(nearest(numbers, form), numbers)
    middle = (numbers[:-1] + numbers[1:]) / 2  # exact: one bit more
    below, above = np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)
    np.testing.assert_array_equal(nearest(below, form), numbers[:-1])
    np.testing.assert_array_equal(nearest(above, form), numbers[1:])
    ties = middle.astype(np.float32)
    inside = ties.astype(np.float64) == middle
    expected = ties.astype(DTYPES[name]).astype(np.float64)
    assert inside.mean() > 0.5
    np.testing.assert_array_equal(nearest(middle, form)[inside], expected[inside])


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_of_random_float32_numbers(name: str) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(DTYPES[name]).astype(np.float64)
        found = nearest(values.astype(np.float64), FORMATS[name])
    finite = np.abs(found) <= FORMATS[name].largest
    np.testing.assert_array_equal(found[finite], expected[finite])
    if name != "fp8_e4m3":  # a format without infinity
        np.testing.assert_array_equal(found[~finite], expected[~finite])


def test_rounding_beyond_the_largest_number() -> None:
    form = FORMATS["fp8_e4m3"]
    values = np.array([463.9, 464.0, 464.1, -500.0])
    np.testing.assert_array_equal(nearest(values, form), [448, 448, np.inf, -np.inf])
    clipped = np.clip(nearest(values, form), -form.largest, form.largest)
    np.testing.assert_array_equal(clipped, [448, 448, 448, -448])


def test_rounding_keeps_nan() -> None:
    assert np.isnan(nearest(np.array([np.nan]), FORMATS["bfloat16"]))[0]


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(sorted(FORMATS)))
def test_exact_rounding_agrees_with_numpy(value: float, name: str) -> None:
    form = FORMATS[name]
    with np.errstate(over="ignore"):
        found = nearest(np.array([value]), form)[0]
    exact = cells.rounded(Fraction(value), form)
    if abs(exact) > Fraction(form.largest):
        assert np.isinf(found)
    else:
        assert Fraction(float(found)) == exact


# --- the formats that a record of numerics states -------------------------------------------------


def limits(scale: str, kind: Any = "int8", **stated: float) -> Any:
    """Return numerics with limits of dynamic scales."""
    numbers = {name: value.hex() for name, value in stated.items()}
    return proofs.numerics(activations={"format": kind, "scale": scale, **numbers})


def scaled(kind: str, scale: str, form: str = "float16") -> Any:
    """Return numerics whose scales of weights are stored in a format."""
    stated = {"format": kind, "scale": scale, "scale_format": form}
    return proofs.numerics() | {"weights": stated}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (proofs.numerics(quantisers={}), "quantisers of no tensor"),
        (scaled("float32", "none"), "'none' scales have no 'scale_format'"),
        (scaled("fp8_e4m3", "none"), "'none' scales have no 'scale_format'"),
        (scaled("fp8_e4m3", "mx"), "'mx' scales have no 'scale_format'"),
        (scaled("fp8_e4m3", "block_128_e8m0"), "'block_128_e8m0' scales have no 'scale_format'"),
        (scaled("fp4_e2m1", "nvfp4"), "'nvfp4' scales have no 'scale_format'"),
        (limits("per_batch"), "a limit of dynamic scales where it has no meaning"),
        (limits("per_batch", least_scale=1.0, amax_limit=2.0), "a limit of dynamic scales where"),
        (limits("per_token", batch_amax=1.0), "a limit of dynamic scales where"),
        (limits("mx", "fp8_e4m3", amax_limit=1.0), "a limit of dynamic scales where"),
        (limits("none", "fp8_e4m3", amax_limit=1.0), "a limit of dynamic scales where"),
        (limits("none", "none", amax_limit=1.0), "a limit of dynamic scales where"),
        (limits("per_token", "uint8", least_scale=1.0), "a limit of dynamic scales where"),
        *(
            (limits("per_batch", **{"batch_amax": 1.0, name: value}), "a limit of dynamic scales")
            for name in ("least_scale", "amax_limit", "batch_amax")
            for value in (0.0, -1.0, 0.1, 2.0**-101, 2.0**25, float("inf"), float("nan"))
        ),
    ],
)
def test_numerics_without_a_meaning_are_rejected(record: Any, message: str) -> None:
    with pytest.raises(Rejected, match=message) as rejected:
        parse_kernel(record, "numerics")
    assert rejected.value.reason == "document/numerics"


def test_limits_of_dynamic_scales_are_parsed() -> None:
    kernel = parse_kernel(limits("per_batch", batch_amax=4.0, least_scale=0.5), "numerics")
    assert (kernel.least_scale, kernel.amax_limit, kernel.batch_amax) == (0.5, np.inf, 4.0)
    assert parse_kernel(scaled("int8", "per_channel"), "numerics").scale_format.name == "float16"


def test_static_scales_that_are_not_there_are_refused() -> None:
    kernel = parse_kernel(proofs.numerics(activations=("int8", "per_token")), "numerics")
    with pytest.raises(Rejected, match="there are no static scales"):
        given_scales(kernel, "w.weight", (2, 4))
