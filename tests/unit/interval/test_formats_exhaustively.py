"""FP8 casts of all float16 inputs: error bounds, saturation, and the casts of two libraries."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.model.numerics.formats import FORMATS
from kcdsl_certs.recheck.numerics.formats import FORMATS as OTHER
from kcdsl_certs.recheck.numerics.formats import nearest as other_nearest

DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
TORCH = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def halves() -> np.ndarray:
    """Return every finite float16 number."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
    return every[np.isfinite(every)]


@pytest.mark.parametrize("name", DTYPES)
def test_cast_errors_are_within_the_model(name: str) -> None:
    """max(u/(1+u)·|x|, η) over all float16 inputs, both attained; so u|x| + η is a bound."""
    form, x = FORMATS[name], halves()
    x = x[np.abs(x) <= form.largest]
    rounded = form.nearest(torch.from_numpy(x)).numpy()
    error, u = np.abs(rounded - x), form.unit_roundoff
    finest = np.maximum(u / (1 + u) * np.abs(x), form.underflow)
    assert (error <= finest * (1 + 2.0**-52)).all()
    normal = np.abs(x) >= 2.0**form.min_exponent
    assert np.isclose((error[normal] / np.abs(x[normal])).max(), u / (1 + u), rtol=1e-12)
    assert error[~normal].max() == form.underflow
    binade = 2.0 ** np.floor(np.log2(np.abs(x[normal])))
    assert (error[normal] <= u * binade).all()


@pytest.mark.parametrize("name", DTYPES)
def test_codes_are_fixed_points_and_ties_go_to_even(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8).view(DTYPES[name]).astype(np.float64)
    codes = np.unique(codes[np.isfinite(codes)])
    form = FORMATS[name]
    assert codes.max() == form.largest
    assert codes[codes > 0].min() == form.smallest_subnormal
    for values, expected in (
        (codes, codes),
        ((codes[1:] + codes[:-1]) / 2, None),
        (np.nextafter((codes[1:] + codes[:-1]) / 2, np.inf), codes[1:]),
        (np.nextafter((codes[1:] + codes[:-1]) / 2, -np.inf), codes[:-1]),
    ):
        first = form.nearest(torch.from_numpy(values)).numpy()
        assert np.array_equal(first, other_nearest(values, OTHER[name]))
        if expected is not None:
            assert np.array_equal(first, expected)
        else:
            assert np.array_equal(first, values.astype(DTYPES[name]).astype(np.float64))


def test_libraries_agree_on_e4m3_up_to_464() -> None:
    """torch saturates E4M3, ml_dtypes gives NaN: equal up to 464; clipped values equal torch's."""
    x = halves()
    one = torch.from_numpy(x.astype(np.float32)).to(torch.float8_e4m3fn).to(torch.float64).numpy()
    two = x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    inside = np.abs(x) <= 464
    assert np.array_equal(one[inside], two[inside])
    assert np.isnan(two[~inside]).all()
    assert (np.abs(one[~inside]) == 448).all()
    assert np.array_equal(np.clip(other_nearest(x, OTHER["fp8_e4m3"]), -448, 448), one)


def test_libraries_agree_on_e5m2() -> None:
    x = halves()
    one = torch.from_numpy(x.astype(np.float32)).to(torch.float8_e5m2).to(torch.float64).numpy()
    two = x.astype(np.float32).astype(ml_dtypes.float8_e5m2).astype(np.float64)
    assert np.array_equal(one, two)
    assert np.isinf(one[np.abs(x) >= 61440]).all()
    fits = np.abs(x) < 61440
    assert np.array_equal(other_nearest(x[fits], OTHER["fp8_e5m2"]), one[fits])


def test_libraries_round_float64_twice_and_this_code_once() -> None:
    """1.0625 + 1e-12 is nearer to 1.125; through float32 it becomes 1.0."""
    value = 1.0625 + 1e-12
    assert float(FORMATS["fp8_e4m3"].nearest(torch.tensor([value], dtype=torch.float64))) == 1.125
    assert float(np.float64(value).astype(ml_dtypes.float8_e4m3fn)) == 1.0
