"""Stored weights bit for bit: compared with ml_dtypes on every float8 code, and with numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import WEIGHT_OVERFLOW
from kcdsl.model.numerics import Numerics
from kcdsl.model.numerics.formats import FORMATS
from kcdsl.model.numerics.weights import linear_weight, plain_parameter, round_to
from kcdsl.model.presets import resolve

Array = NDArray[np.float32]
DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
FLOAT8 = ("fp8_e4m3", "fp8_e5m2")


def numerics(compute: str, format: str, scale: str) -> Numerics:
    weights = {"format": format, "scale": scale}
    return resolve({"preset": "torch-eager", "compute": compute, "weights": weights})


def codes(name: str) -> Array:
    """Return every finite number of a float8 format, sorted."""
    every = np.arange(256, dtype=np.uint8).view(DTYPES[name]).astype(np.float32)
    return np.unique(every[np.isfinite(every)])


@pytest.mark.parametrize("name", FLOAT8)
def test_every_code_and_every_tie_is_rounded_to_nearest_even(name: str) -> None:
    numbers = codes(name)
    assert numbers[-1] == FORMATS[name].largest
    between = (numbers[1:] + numbers[:-1]) / 2
    above, below = np.nextafter(between, np.inf), np.nextafter(between, -np.inf)
    values = np.concatenate([numbers, between, above, below]).astype(np.float32)
    expected = values.astype(DTYPES[name]).astype(np.float32)
    found = round_to(torch.from_numpy(values), name).numpy()
    assert np.array_equal(found, expected)
    assert np.array_equal(found[: len(numbers)], numbers)


@pytest.mark.parametrize("name", ["float16", "bfloat16", *FLOAT8])
@given(value=st.floats(-400, 400, width=32))
def test_any_value_is_rounded_as_by_ml_dtypes(name: str, value: float) -> None:
    expected = np.float32(value).astype(DTYPES[name]).astype(np.float32)
    assert float(round_to(torch.tensor(value, dtype=torch.float32), name)) == expected


@given(value=st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_tfloat32_keeps_eleven_bits(value: float) -> None:
    largest = FORMATS["tfloat32"].largest
    if abs(value) >= largest:
        return
    _, exponent = np.frexp(np.float64(value))
    least = FORMATS["tfloat32"].min_exponent - 10
    quantum = 2.0 ** max(int(exponent) - 11, least)
    expected = np.round(np.float64(value) / quantum) * quantum
    assert float(round_to(torch.tensor(value, dtype=torch.float32), "tfloat32")) == expected


@pytest.mark.parametrize(
    ("name", "fits", "overflows"),
    [
        ("fp8_e4m3", 464.0, 464.1),
        ("fp8_e5m2", 61439.0, 61440.0),
        ("float16", 65519.0, 65520.0),
        ("bfloat16", 3.3895e38, 3.4e38),
        ("tfloat32", 3.4011e38, 3.4027e38),
    ],
)
def test_plain_weight_beyond_its_format_is_refused(
    name: str, fits: float, overflows: float
) -> None:
    for sign in (1.0, -1.0):
        assert abs(float(round_to(torch.tensor([sign * fits]), name))) <= FORMATS[name].largest
        with pytest.RaisesExc(Refusal, check=lambda r: r.diagnostics[0].code is WEIGHT_OVERFLOW):
            round_to(torch.tensor([0.0, sign * overflows]), name)


# --- scaled weights, written a second time -------------------------------------------------------


def code_of(ratio: Array, format: str, qmax: float) -> Array:
    limited = np.clip(ratio, -qmax, qmax)
    if format == "int8":
        return np.rint(limited).astype(np.float32)
    return limited.astype(DTYPES[format]).astype(np.float32)


def stored(w: Array, format: str, scale: str) -> Array:
    """Quantise group by group in plain loops."""
    qmax = {
        "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int8_full": 127.5, "int4_full": 7.5,
    }[format]  # fmt: skip
    rows, columns = w.shape
    shape = {
        "per_tensor": (rows, columns),
        "per_channel": (1, columns),
        "block_128": (128, 128),
        "group_32": (1, 32),
        "group_64": (1, 64),
        "group_128": (1, 128),
        "mx": (1, 32),
    }[scale]
    out = np.empty_like(w)
    for i in range(0, rows, shape[0]):
        for j in range(0, columns, shape[1]):
            group = w[i : i + shape[0], j : j + shape[1]]
            amax = np.abs(group).max()
            if format in ("int8_full", "int4_full"):
                s = max(np.float32(amax) / np.float32(qmax), np.float32(2.0**-23))
                code = np.rint(group * (np.float32(1) / s)).clip(-qmax - 0.5, qmax - 0.5)
                out[i : i + shape[0], j : j + shape[1]] = code * s
                continue
            if amax == 0:
                s = np.float32(1)
            elif scale == "mx":
                largest = {"fp8_e4m3": 8, "fp8_e5m2": 15}[format]
                power = int(np.floor(np.log2(np.float64(amax)))) - largest
                s = np.float32(2.0 ** max(-127, min(127, power)))
            else:
                s = np.float32(amax) / np.float32(qmax)
                s = np.float32(1) if s == 0 else s
            with np.errstate(over="ignore"):
                ratio = (group / s).astype(np.float32)
            out[i : i + shape[0], j : j + shape[1]] = code_of(ratio, format, qmax) * s
    return out


LAYOUTS = ("per_tensor", "per_channel", "block_128", "group_32", "group_64", "group_128", "mx")
"""Layouts of the formats here; tests/property/test_quantiser_formats.py tries every layout."""
CASES = [
    (f, s)
    for f in ("fp8_e4m3", "fp8_e5m2", "int8", "int8_full", "int4_full")
    for s in LAYOUTS
    if not (f.startswith("int") and s == "mx")
]


@pytest.mark.parametrize(("format", "scale"), CASES)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_scaled_weights_equal_a_second_implementation(
    format: str, scale: str, compute: str
) -> None:
    random = np.random.default_rng(11)
    w = (random.standard_normal((150, 200)) * 10.0 ** random.uniform(-6, 3, (150, 1))).astype(
        np.float32
    )
    w[3] = 0.0
    w[5, 7] = -0.0
    w[9, :64] = 3.3e-41
    w[10] = 1e-44
    expected = stored(w, format, scale)
    if compute == "bfloat16":
        expected = expected.astype(ml_dtypes.bfloat16).astype(np.float32)
    found = linear_weight(torch.from_numpy(w), numerics(compute, format, scale)).numpy()
    assert np.array_equal(found, expected)
    assert np.isfinite(found).all()
    assert np.abs(found - w).max() > 0


def test_weights_of_code_products_are_not_rounded() -> None:
    """Scales are applied after the product, so code times scale is not rounded to `compute`."""
    w = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    by_codes = linear_weight(w, resolve({"preset": "fp8-w8a8-per-channel"}))
    assert torch.equal(by_codes, linear_weight(w, numerics("float32", "fp8_e4m3", "per_channel")))
    assert not torch.equal(by_codes, by_codes.bfloat16().float())


@pytest.mark.parametrize("format", FLOAT8)
def test_unscaled_format_is_rounded_twice(format: str) -> None:
    w = torch.linspace(-3, 3, 1000).reshape(20, 50)
    expected = w.numpy().astype(DTYPES[format]).astype(np.float32)
    assert np.array_equal(linear_weight(w, numerics("float32", format, "none")).numpy(), expected)


def test_other_parameters_are_only_rounded_to_compute() -> None:
    w = torch.randn(40, 40)
    spec = numerics("bfloat16", "int8", "per_channel")
    assert torch.equal(plain_parameter(w, spec), w.to(torch.bfloat16).float())
    assert torch.equal(plain_parameter(w, resolve({"preset": "torch-eager"})), w)


def test_largest_weight_of_a_group_is_exact() -> None:
    w = torch.tensor([[3.0, -1.0, 0.5], [1e-3, 2e-3, -4e-3]])
    kept = linear_weight(w, numerics("float32", "int8", "per_channel"))
    assert float(kept[0, 0]) == pytest.approx(3.0, rel=2**-22)
    assert float(kept[1, 2]) == pytest.approx(-4e-3, rel=2**-22)
    coarse = linear_weight(w, numerics("float32", "int8", "per_tensor"))
    assert torch.equal(coarse[1], torch.zeros(3))


def test_mx_block_may_saturate() -> None:
    w = torch.full((1, 32), 1.0)
    w[0, 0] = 1.99
    kept = linear_weight(w, numerics("float32", "fp8_e4m3", "mx"))
    assert float(kept[0, 0]) == 1.75
