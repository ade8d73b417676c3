"""Every format of codes with every layout of scales: three implementations and other libraries."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.model.numerics import Activations
from kcdsl.model.numerics.formats import CODE_FORMATS, LAYOUTS
from kcdsl.model.numerics.weights import linear_weight
from kcdsl.model.presets import ACTIVATION_SCALES, WEIGHT_SCALES, resolve
from kcdsl_backends.attack.quantised_inputs import Exceeded, to_nearest
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.quantisers import quantiser_steps
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops.quantised.inputs import activation_error
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import array_digest
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.quantisers import _ladder, quantised
from kcdsl_certs.recheck.interval.tensors import Tensor as Stored
from kcdsl_certs.recheck.numerics.formats import CODES
from kcdsl_certs.recheck.numerics.formats import nearest as rounded
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from kcdsl_certs.recheck.ops.linear.quantised_inputs import quantisation
from tests.support.rationals.cells import Cells
from tests.support.rationals.linear import _quantisation
from tests.support.rationals.weights import RationalParameters

OTHERS: dict[str, Any] = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


def fitting(format: str) -> list[str]:
    """Return the layouts of scales that a format of codes admits."""
    return [name for name, layout in LAYOUTS.items() if layout.fits(CODE_FORMATS[format])]


STORED = [
    (format, scale)
    for format in CODE_FORMATS
    if format != "uint8"
    for scale in fitting(format)
    if scale in WEIGHT_SCALES
]
ENTERING: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (format, scale, {"batch_amax": 300.0} if scale == "per_batch" else {})
        for format in CODE_FORMATS
        if format not in ("int4_full", "uint4")
        for scale in fitting(format)
        if scale in ACTIVATION_SCALES and (format, scale) != ("uint8", "per_batch")
    ),
    *(
        (format, scale, limits)
        for format in ("fp8_e4m3", "fp8_e4m3fnuz", "int8", "int8_full")
        for scale in ("per_token", "per_tensor", "group_64")
        for limits in (
            {"least_scale": 1 / (448 * 512)},
            {"least_scale": 0.02},
            {"amax_limit": 1.5},
            {"amax_limit": 2.0, "least_scale": 0.01},
        )
    ),
]


def codes_of(format: str) -> NDArray[np.float64]:
    """Return the positive finite numbers of a format of another library, in order."""
    bits = {"fp8": 8, "fp6": 6, "fp4": 4}[format[:3]]
    every = np.arange(2**bits, dtype=np.uint8).view(OTHERS[format]).astype(np.float64)
    return np.unique(every[np.isfinite(every) & (every >= 0)])


@pytest.mark.parametrize("format", OTHERS)
def test_grids_equal_those_of_another_library(format: str) -> None:
    """Every code, and the rounding of every float16 number within the last code."""
    form, theirs = CODE_FORMATS[format], CODES[format].form
    grid = codes_of(format)
    assert grid[-1] == form.grid.largest == theirs.largest
    assert (form.grid.precision, form.grid.min_exponent) == (theirs.precision, theirs.least)
    inside = grid[grid <= form.above]
    assert np.array_equal(_ladder(format).codes, inside)
    x = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) <= form.above)]
    found = form.grid.nearest(torch.from_numpy(x).double()).numpy()
    assert np.array_equal(found, x.astype(OTHERS[format]).astype(np.float64))
    assert np.array_equal(found, rounded(x.astype(np.float64), theirs))


def weight(seed: int, rows: int = 130, columns: int = 160) -> Tensor:
    """Return rows of very different sizes: one of zeros, one of one sign, one with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator)
    w = w * torch.exp(3 * torch.randn(rows, 1, generator=generator))
    w[min(3, rows - 1)] = 0
    w[0] = w[0].abs() + 0.1
    w[-1, 5] = 4000.0
    return w


def by_tiles(w: NDArray[np.float32], format: str, scale: str, kept: Any) -> NDArray[np.float32]:
    """Quantise tile by tile, with one float32 numpy operation per step."""
    form, layout = CODE_FORMATS[format], LAYOUTS[scale]
    height, width = layout.rows or w.shape[0], layout.columns or w.shape[1]
    found, one = np.empty_like(w), np.float32(1)
    whole = np.abs(w).max() / np.float32(6 * 448)
    for i in range(0, w.shape[0], height):
        for j in range(0, w.shape[1], width):
            tile = w[i : i + height, j : j + width]
            amax = np.abs(tile).max()
            if format == "uint4":
                span = max(tile.max() - tile.min(), np.float32(1e-5))
                s = (span / np.float32(15)).astype(kept).astype(np.float32)
                zero = np.clip(-np.rint(tile.min() / s), 0, 15)
                codes = np.clip(np.rint(tile / s) + zero, 0, 15) - zero
            elif scale == "nvfp4":
                share = np.clip(amax / np.float32(6) / whole, np.float32(2**-6), np.float32(448))
                multiple = share.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
                ratio = np.clip(tile * ((one / whole) / multiple), -6, 6)
                codes, s = ratio.astype(OTHERS[format]).astype(np.float32), multiple * whole
            else:
                s = scale_of(amax, form, layout.rule).astype(kept).astype(np.float32)
                by = s or one
                ratio = tile * (one / by) if form.reciprocal else tile / by
                codes = np.clip(ratio, -form.below, form.above)
                codes = np.rint(ratio) if form.integer else codes.astype(OTHERS[format])
                codes = np.clip(codes.astype(np.float32), -form.below, form.above)
            found[i : i + height, j : j + width] = codes * s
    return found


def scale_of(amax: np.float32, form: Any, rule: str) -> np.float32:
    """Return a float32 scale by its definition."""
    if amax == 0:
        return np.float32(1)
    if rule == "floor":
        emax = {"fp8_e4m3": 8, "fp8_e5m2": 15, "fp6_e2m3": 2, "fp6_e3m2": 4, "fp4_e2m1": 2}
        return np.float32(2.0 ** (np.floor(np.log2(np.float64(amax))) - emax[form.name]))
    found = np.float32(amax / np.float32(form.divisor))
    if rule == "ceil":
        return np.float32(2.0 ** np.ceil(np.log2(np.float64(found))))
    return max(found, np.float32(form.least_scale))


def held(w: Tensor, numerics: dict[str, Any], tier: Any = Parameters) -> Any:
    """Return the checker's stored weights."""
    value = w.numpy()
    digest = array_digest("float32", value.shape, value.tobytes())
    stored = Stored("F32", value.shape, memoryview(value.tobytes()))
    kernel = parse_kernel(resolve(numerics).to_json(), "kernel")
    return tier({"w": stored}, {"w": digest}).linear("w", kernel)


@pytest.mark.sample(24)
@pytest.mark.parametrize("kept", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("format", "scale"), STORED)
def test_stored_weights_equal_the_definition(format: str, scale: str, kept: str) -> None:
    if kept != "float32" and LAYOUTS[scale].rule != "amax":
        return
    stored = {"format": format, "scale": scale, "scale_format": kept}
    numerics = {"preset": "torch-eager", "weights": stored}
    w = weight(1)
    found = linear_weight(w, resolve(numerics))
    types = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    assert np.array_equal(found.numpy(), by_tiles(w.numpy(), format, scale, types[kept]))
    assert np.array_equal(found.double().numpy(), held(w, numerics))
    assert not torch.equal(found, w)
    small = weight(2, 4, 40)
    exact = held(small, numerics, RationalParameters)
    doubles = linear_weight(small, resolve(numerics)).double().flatten().tolist()
    assert [Fraction(v) for v in doubles] == [lo for lo, _ in exact.pairs]


def test_scales_that_overflow_their_format_are_refused() -> None:
    stored = {"format": "int8", "scale": "per_channel", "scale_format": "float16"}
    numerics = {"preset": "torch-eager", "weights": stored}
    w = torch.full((2, 4), 1e8)
    with pytest.raises(Refusal, match="the scale of"):
        linear_weight(w, resolve(numerics))
    for tier in (Parameters, RationalParameters):
        with pytest.raises(Rejected, match="scale outside"):
            held(w, numerics, tier)


@pytest.mark.parametrize(
    ("format", "scale"),
    [("int8_full", "per_channel"), ("uint4", "group_32"), ("fp8_e4m3", "block_128_e8m0")],
)
def test_dequantised_weights_beyond_float32_are_refused(format: str, scale: str) -> None:
    """A code times its scale, or the range of a group, may exceed the largest number."""
    numerics = {"preset": "torch-eager", "weights": {"format": format, "scale": scale}}
    w = torch.tensor([[3.4e38, -3.4e38, 1.0, 0.0]])
    with pytest.raises(Refusal, match="does not fit float32"):
        linear_weight(w, resolve(numerics))
    with pytest.raises(Rejected, match=r"overflow|scale"):
        held(w, numerics)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_mx_weights_equal_those_of_torchao(format: str, size: float) -> None:
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) * size
    kinds: dict[str, Any] = {
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp6_e2m3": DTYPE_FP6_E2M3,
        "fp6_e3m2": DTYPE_FP6_E3M2,
        "fp4_e2m1": torch.float4_e2m1fn_x2,
    }
    theirs = MXTensor.to_mx(w, kinds[format], 32).dequantize(torch.float32)
    stored = {"format": format, "scale": "mx"}
    assert torch.equal(theirs, linear_weight(w, resolve({"preset": "mxfp8", "weights": stored,
        "compute": "float32", "activations": {"format": "none"}})))  # fmt: skip


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e4])
def test_nvfp4_weights_equal_those_of_torchao(size: float) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)) * size
    w[2] *= 1e-6
    w[3, 16:32] = 0
    whole = per_tensor_amax_to_scale(w.abs().amax())
    theirs = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=whole).dequantize(torch.float32)
    stored = {"format": "fp4_e2m1", "scale": "nvfp4"}
    found = linear_weight(w, resolve({"preset": "torch-eager", "weights": stored}))
    assert torch.equal(theirs, found)


# --- activations ---------------------------------------------------------------------------------


def numbers(seed: int) -> Tensor:
    """Return rows of different sizes, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 160, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 3, (5, 1), generator=generator).float())
    x[3] = 0
    x[4, 7] = 40.0
    return x


def run(x: NDArray[np.float32], spec: Activations) -> NDArray[np.float64]:
    """Quantise by the definition, every step rounded to float32, with codes of another library."""
    if spec.scale == "nvfp4":
        return by_tiles(x, spec.format, "nvfp4", None).astype(np.float64)
    form, layout = CODE_FORMATS[spec.format], LAYOUTS[spec.scale]
    width, found = layout.columns or x.shape[1], np.empty(x.shape)
    rows = 1 if layout.rows == 1 else len(x)
    for i in range(0, len(x), rows):
        for j in range(0, x.shape[1], width):
            tile = x[i : i + rows, j : j + width]
            amax = np.abs(tile).max()
            if layout.rule == "batch":
                amax = max(amax, np.float32(spec.batch_amax))
            limit = np.float32(spec.amax_limit)
            if form.zero_point:
                low, high = min(tile.min(), np.float32(0)), max(tile.max(), np.float32(0))
                s = np.float32((high - low) / np.float32(255)) or np.float32(1)
                zero = np.clip(np.rint(-low / s), 0, 255)
                codes = np.clip(np.rint(tile / s) + zero, 0, 255) - zero
            else:
                s = scale_of(min(amax, limit), form, layout.rule)
                s = (
                    s
                    if amax == 0 and not spec.least_scale
                    else max(s, np.float32(spec.least_scale))
                )
                if amax == 0 and spec.least_scale:
                    s = np.float32(spec.least_scale)
                ratio = tile * (np.float32(1) / s) if form.reciprocal else tile / s
                codes = np.clip(ratio, -form.below, form.above)
                codes = np.rint(ratio) if form.integer else codes.astype(OTHERS[spec.format])
                codes = np.clip(codes.astype(np.float32), -form.below, form.above)
            found[i : i + rows, j : j + width] = (codes * s).astype(np.float32)
    return found


@pytest.mark.sample(13)
@pytest.mark.parametrize("wide", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize(
    ("format", "scale", "limits"), ENTERING, ids=lambda v: str(v).replace(" ", "")
)
def test_quantised_inputs_are_within_the_boxes_of_both_programs(
    format: str, scale: str, limits: dict[str, Any], wide: float
) -> None:
    """Random numbers of a box, by the definition, lie within Q and within the hull of steps.

    Both programs have nearly equal bounds, and the simulated kernel equals the definition.
    """
    given = {"format": format, "scale": scale, **limits}
    for casts in ("any", "nearest"):
        numerics = resolve({"preset": "torch-eager", "casts": casts, "activations": given})
        spec, kernel = numerics.activations, parse_kernel(numerics.to_json(), "kernel")
        rounding = Rounding(numerics)
        for seed in range(3):
            x = numbers(seed)
            around = Box(x.double() - wide * x.abs().double(), x.double() + wide * x.abs().double())
            error = activation_error(around, rounding, "n")
            assert error is not None
            theirs = box.Box(around.lo.numpy(), around.hi.numpy())
            granted = quantisation(kernel, theirs)
            np.testing.assert_allclose(error.numpy(), granted, rtol=2.0**-10, atol=2.0**-120)
            value, off = quantised(kernel, theirs, granted)
            ours = quantiser_steps(around, error, rounding)
            for pick in range(4):
                share = torch.rand(x.shape, generator=torch.Generator().manual_seed(pick))
                met = (around.lo + (around.hi - around.lo) * share).float()
                met = torch.maximum(torch.minimum(met.double(), around.hi), around.lo).float()
                inside = (met.double() >= around.lo) & (met.double() <= around.hi)
                met = torch.where(inside, met, x)
                done = run(met.numpy(), spec)
                assert (np.abs(done - met.double().numpy()) <= granted).all()
                assert (value.lo <= done).all()
                assert (done <= value.hi).all()
                away = done - met.double().numpy()
                assert (off.lo <= away).all()
                assert (away <= off.hi).all()
                if ours is not None:
                    assert bool((ours.value.lo.numpy() <= done).all())
                    assert bool((done <= ours.value.hi.numpy()).all())
                simulated = to_nearest(met.double(), numerics, "a.weight").numpy()
                if scale != "per_batch":
                    np.testing.assert_array_equal(simulated, done)


def by_reciprocals(
    x: NDArray[np.float32], whole: np.float32, least: float, ulps: int
) -> NDArray[np.float64]:
    """Quantise to NVFP4 as vLLM's and TensorRT-LLM's kernels do, by hardware reciprocals.

    These have an error of up to an ulp, with multiples that are subnormal numbers of FP8 or 0.
    """

    def reciprocal(value: np.float32) -> np.float32:
        found = np.float32(1) / value
        for _ in range(abs(ulps)):
            found = np.nextafter(found, np.float32(np.inf if ulps > 0 else 0))
        return found

    given, found = reciprocal(whole), np.zeros(x.shape)
    for row, into in zip(x, found, strict=True):
        for j in range(0, len(row), 16):
            tile = row[j : j + 16]
            share = given * (np.abs(tile).max() * reciprocal(np.float32(6)))
            share = np.clip(share, np.float32(least), np.float32(448))
            multiple = share.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            if multiple:
                ratio = np.clip(tile * reciprocal(multiple * reciprocal(given)), -6, 6)
                codes = ratio.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
                into[j : j + 16] = codes * (multiple * whole)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("wide", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("static", [0.0, 1e-4, 0.01, 3.0])
def test_nested_scales_of_every_kernel_are_within_the_boxes(static: float, wide: float) -> None:
    """Dynamic or calibrated, too small or too large; multiples with and without a minimum."""
    given = {"format": "fp4_e2m1", "scale": "nvfp4"} | ({"input_scale": static} if static else {})
    for casts in ("any", "nearest"):
        numerics = resolve({"preset": "torch-eager", "casts": casts, "activations": given})
        kernel, spread = parse_kernel(numerics.to_json(), "kernel"), 0.0
        for seed in range(6):
            x = numbers(seed)
            x[2] *= 1e-5
            x[1, :16] = x[1, :16].sign() * torch.linspace(1.0, 1.07, 16)  # saturated
            low, high = (x.double() + side * wide * x.abs().double() for side in (-1, 1))
            granted = quantisation(kernel, box.Box(low.numpy(), high.numpy()), "a.weight")
            error = activation_error(Box(low, high), Rounding(numerics), "n", "a.weight")
            assert error is not None
            np.testing.assert_allclose(error.numpy(), granted, rtol=2.0**-10)
            for pick in range(3):
                share = torch.rand(x.shape, generator=torch.Generator().manual_seed(pick))
                met = (low + (high - low) * share).float()
                met = torch.where((met >= low) & (met <= high), met, x)
                whole = np.float32(static or np.float32(met.abs().max()) / np.float32(2688))
                for least, ulps in ((0.0, 1), (0.0, -1), (2.0**-6, 0)):
                    done = by_reciprocals(met.numpy(), whole, least, ulps)
                    away = np.abs(done - met.double().numpy())
                    assert (away <= granted).all()
                    spread = max(spread, float(np.max(away / granted)))
                simulated = to_nearest(met.double(), numerics, "a.weight").numpy()
                assert (np.abs(simulated - met.double().numpy()) <= granted).all()
        assert spread > 0.75


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("size", [1e-30, 3e-34, 1e-35, 1e-36, 1e-37])
def test_scales_with_infinite_reciprocals_are_within_the_boxes(size: float) -> None:
    """torchao multiplies by 1/s: where that is infinite, a zero becomes the largest code."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    numerics = resolve({"preset": "nvfp4"})
    kernel = parse_kernel(numerics.to_json(), "kernel")
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)) * size
    x[0], x[1, ::2], x[2, 16:32] = 0, 0, x[2, 16:32] * 1e-3
    scale = per_tensor_amax_to_scale(x.abs().amax())
    done = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    away = (done.double() - x.double()).abs().numpy()
    exact = x.double()
    error = activation_error(Box.point(exact), Rounding(numerics), "n", "a.weight")
    assert error is not None
    pairs = tuple((Fraction(v),) * 2 for v in exact.flatten().tolist())
    exactly = _quantisation(kernel, Cells(tuple(x.shape), pairs), "a.weight")
    granted = quantisation(kernel, box.Box(exact.numpy(), exact.numpy()), "a.weight")
    for each in (error.numpy(), granted, np.array([float(q) for q in exactly]).reshape(x.shape)):
        assert (away <= each).all()


def test_tensor_scales_are_per_named_linear() -> None:
    given: dict[str, Any] = {"format": "fp4_e2m1", "scale": "nvfp4"}
    with pytest.raises(Refusal, match="one number for each linear"):
        resolve({"preset": "torch-eager", "activations": {**given, "input_scale": [0.1, 0.2]}})
    numerics = resolve({"preset": "nvfp4", "activations": {**given, "input_scale": {"a": 0.1}}})
    x = torch.ones(1, 32, dtype=torch.float64)
    with pytest.raises(NoBound, match="no static scale"):
        activation_error(Box.point(x), Rounding(numerics), "n", "b.weight")
    with pytest.raises(Exceeded, match="no static scale"):
        to_nearest(x, numerics, "b.weight")
    record = numerics.to_json()
    kernel = parse_kernel(record, "kernel")
    with pytest.raises(Rejected, match="no static scale"):
        quantisation(kernel, box.Box(x.numpy(), x.numpy()), "b.weight")
    record["activations"]["input_scale"]["a"] *= 2
    with pytest.raises(Rejected, match="more than one"):
        parse_kernel(record, "kernel")
    with pytest.raises(Refusal, match="no matrix unit"):
        resolve({"preset": "nvfp4", "tensor_core": "blackwell_fp8"})
    record = resolve({"preset": "nvfp4"}).to_json()
    unit = {"fraction_bits": 25, "chunk": 32, "result_bits": 23, "promote": 0}
    with pytest.raises(Rejected, match="matrix unit"):
        parse_kernel({**record, "tensor_core": {"linears": unit, "others": unit}}, "kernel")


def test_batch_limit_is_enforced() -> None:
    given = {"format": "fp8_e4m3", "scale": "per_batch", "batch_amax": 2.0}
    for casts in ("any", "nearest"):
        numerics = resolve({"preset": "torch-eager", "casts": casts, "activations": given})
        x = Box.point(torch.tensor([[1.0, 2.5]], dtype=torch.float64))
        with pytest.raises(NoBound, match="batch_amax"):
            activation_error(x, Rounding(numerics), "n")
        kernel = parse_kernel(numerics.to_json(), "kernel")
        with pytest.raises(Rejected, match="batch"):
            quantisation(kernel, box.Box(x.lo.numpy(), x.hi.numpy()))


def test_batch_may_contain_larger_numbers_than_the_sequence() -> None:
    """For any maximum of the batch up to the claimed one."""
    given = {"format": "int8", "scale": "per_batch", "batch_amax": 64.0}
    for casts in ("any", "nearest"):
        numerics = resolve({"preset": "torch-eager", "casts": casts, "activations": given})
        x = numbers(1)
        point, rounding = Box.point(x.double()), Rounding(numerics)
        error = activation_error(point, rounding, "n")
        assert error is not None
        for amax in (40.0, 41.3, 50.0, 64.0):
            s = np.float32(np.float32(amax) / np.float32(127))
            done = np.clip(np.rint(x.numpy() / s), -127, 127).astype(np.float32) * s
            away = done.astype(np.float64) - x.double().numpy()
            assert (np.abs(away) <= error.numpy()).all()
            steps = quantiser_steps(point, error, rounding)
            if steps is not None:
                assert bool((steps.value.lo.numpy() <= done).all())
                assert bool((done <= steps.value.hi.numpy()).all())


def test_minimum_scale_of_vllm_is_covered_by_its_preset_only() -> None:
    """For a token of small numbers, vLLM divides by 1/(448·512), which loses more than amax/448."""
    x = torch.full((1, 32), 2.0**-23) * torch.linspace(0.1, 1, 32)
    least = np.float32(1) / np.float32(448 * 512)
    scale = max(np.float32(x.abs().max() / 448), least)
    codes = (x.numpy() / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    off = np.abs((codes * scale).astype(np.float64) - x.double().numpy())
    for preset, covered in (("vllm-fp8-per-token", True), ("fp8-w8a8-per-channel", False)):
        numerics = resolve({"preset": preset})
        error = activation_error(Box.point(x.double()), Rounding(numerics), "n")
        assert error is not None
        assert bool((off <= error.numpy()).all()) is covered
