"""Casts toward zero compared with the formats: every code, every neighbour, all implementations."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.model.numerics.formats import FORMATS
from kcdsl.model.numerics.weights import cut_to as cut_weight
from kcdsl_backends.attack.operations import straight_through
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval import box as other_box
from kcdsl_certs.recheck.interval import state as other
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.numerics.formats import FORMATS as OTHER
from kcdsl_certs.recheck.numerics.formats import cut
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import kernels, proofs
from tests.support.prover import block, numerics, parameters
from tests.support.rationals import cells
from tests.support.rationals import state as rational

Floats = np.ndarray
FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
DIRECTED = ("toward_zero", "any_toward_zero", "any_direction")
MASKS = {"bfloat16": 0xFFFF0000, "tfloat32": 0xFFFFE000}


def all_ways(form: str) -> dict[str, Callable[[Floats], Floats]]:
    """Return every implementation of a cast toward zero, on float64 numbers."""

    def rationals(x: Floats) -> Floats:
        found = [float(cells.cut(Fraction(v), OTHER[form])) for v in x.tolist()]
        return np.copysign(np.array(found), x)

    def torch_of(function: Callable[[Tensor], Tensor]) -> Callable[[Floats], Floats]:
        return lambda x: function(torch.from_numpy(x)).double().numpy()

    return {
        "prover": torch_of(FORMATS[form].toward_zero),
        "attack": lambda x: np.copysign(
            torch_of(lambda y: straight_through(y, FORMATS[form].toward_zero))(x), x
        ),
        "weights": torch_of(lambda x: cut_weight(x, form)),
        "checker": lambda x: cut(x, OTHER[form]),
        "rationals": rationals,
        "test kernels": lambda x: kernels.cut(x, form),
    }


def same(first: Floats, second: Floats) -> bool:
    """Return whether numbers are equal, including signs of zeros."""
    return np.array_equal(first, second) and np.array_equal(np.signbit(first), np.signbit(second))


def halves() -> Floats:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
    return every[np.isfinite(every)]


def by_codes(x: Floats, form: str) -> Floats:
    """Return the greatest code that is at most |x|, with the sign of x, by searching the codes."""
    codes = np.arange(128, dtype=np.uint8).view(FP8[form]).astype(np.float64)
    codes = np.sort(codes[np.isfinite(codes)])
    return np.copysign(codes[np.searchsorted(codes, np.abs(x), side="right") - 1], x)


@pytest.mark.full
@pytest.mark.parametrize("form", FP8)
def test_every_float16_number_is_truncated_to_the_code_below(form: str) -> None:
    x = halves()
    x = x[np.abs(x) <= FORMATS[form].largest]
    expected = by_codes(x, form)
    for name, way in all_ways(form).items():
        assert same(way(x), expected), name
        assert same(way(expected), expected), name  # the cast is idempotent


@pytest.mark.parametrize("form", FP8)
def test_error_is_below_two_roundoffs_or_one_subnormal(form: str) -> None:
    """Below max(2u/(1 + 2u)·|x|, 2η), both nearly attained: u or η alone would be too small."""
    x, spec = halves(), FORMATS[form]
    x = x[np.abs(x) <= spec.largest]
    found = spec.toward_zero(torch.from_numpy(x)).numpy()
    error, normal = np.abs(x - found), np.abs(x) >= 2.0**spec.min_exponent
    assert (np.abs(found) <= np.abs(x)).all()
    most = 2 * spec.unit_roundoff / (1 + 2 * spec.unit_roundoff)
    assert (error[normal] < most * np.abs(x[normal])).all()
    assert (error[~normal] < 2 * spec.underflow).all()
    assert (error[normal] / np.abs(x[normal])).max() > 0.95 * most > 1.5 * spec.unit_roundoff
    assert error[~normal].max() > 1.7 * spec.underflow


@pytest.mark.parametrize("form", MASKS)
def test_float32_truncation_equals_a_bit_mask(form: str) -> None:
    """Float32 neighbours of every bfloat16 number, 2^20 random ones, and the largest.

    None of them becomes infinite: a cast toward zero does not overflow.
    """
    at = (np.arange(2**16, dtype=np.int64) << 16)[:, None] + np.array([-1, 0, 1, 0x7FFF, 0x8001])
    drawn = np.random.default_rng(5).integers(0, 2**32, 2**20, dtype=np.int64)
    bits = np.concatenate([at.ravel() % 2**32, drawn, [0x7F7FFFFF, 0xFF7FFFFF]]).astype(np.uint32)
    bits = bits[np.isfinite(bits.view(np.float32))]
    expected = (bits & np.uint32(MASKS[form])).view(np.float32).astype(np.float64)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() == FORMATS[form].largest
    x = bits.view(np.float32).astype(np.float64)
    for name, way in all_ways(form).items():
        some = slice(None, None, 97) if name == "rationals" else slice(None)
        assert same(way(x[some]), expected[some]), name


def test_truncation_is_one_step_below_nearest_if_that_rounds_up() -> None:
    x = np.random.default_rng(6).standard_normal(200_000)
    x = (x * 2.0 ** np.random.default_rng(7).integers(-30, 14, x.shape)).clip(-65504, 65504)
    x = x.astype(np.float32).astype(np.float64)
    near = x.astype(np.float16)
    inward = np.where(
        np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float16(0)), near
    )
    expected = np.copysign(inward.astype(np.float64), x)
    assert (np.abs(expected) < np.abs(near.astype(np.float64))).mean() > 0.3
    for name, way in all_ways("float16").items():
        some = slice(None, None, 97) if name == "rationals" else slice(None)
        assert same(way(x[some]), expected[some]), name


def test_truncation_is_undefined_beyond_the_next_grid_point() -> None:
    """Below that point the result is the largest number; above, nothing is claimed."""
    inside, beyond = np.array([65504.0, 65519.9, 65535.9]), np.array([65536.0])
    form, half = FORMATS["float16"], OTHER["float16"]
    assert (form.toward_zero(torch.from_numpy(inside)) == 65504).all()
    assert (cut(inside, half) == 65504).all()
    assert float(cut_weight(torch.tensor([65535.0]), "float16")) == 65504
    assert float(form.toward_zero(torch.from_numpy(beyond))) > form.largest
    assert np.isinf(cut(beyond, half)).all()
    with pytest.raises(Refusal, match="does not fit float16"):
        cut_weight(torch.from_numpy(beyond), "float16")
    with pytest.raises(Rejected, match="overflow"):
        cells.cut(Fraction(65536), half)


@pytest.mark.parametrize(("casts", "held"), [("toward_zero", True), ("nearest", False)])
def test_values_that_nearest_overflows_are_truncated_to_the_largest(casts: str, held: bool) -> None:
    """v between the largest bfloat16 and 2^128 overflows with nearest, not toward zero."""
    v = np.full(1, 3.4e38)
    record = proofs.numerics("bfloat16", casts)
    kernel, checked = Rounding(numerics(record)), parse_kernel(record, "k")
    exact, zero = Box.point(torch.from_numpy(v)), torch.zeros(1, dtype=torch.float64)
    largest = FORMATS["bfloat16"].largest
    if held:
        assert float(kernel.store(exact, zero, kernel.compute, "n", kernel.inner(False)).value.hi)
        value, _ = other.stored(
            checked, checked.compute, other_box.exact(v), np.zeros(1), checked.inner
        )
        assert value.lo == value.hi == largest
        return
    with pytest.raises(NoBound, match="overflow reachable"):
        kernel.store(exact, zero, kernel.compute, "n", kernel.inner(False))
    with np.errstate(all="ignore"), pytest.raises(Rejected, match="overflow"):
        other.stored(checked, checked.compute, other_box.exact(v), np.zeros(1), checked.inner)


def test_overflow_before_the_truncation_has_no_bound(tmp_path: Path) -> None:
    """Above the largest float32 number and below 2^128: the overflow occurs before the cast."""
    v = np.full((1, 1), float.fromhex("0x1.fffffe8p+127"))
    record = proofs.numerics("bfloat16", "toward_zero")
    kernel, checked = Rounding(numerics(record)), parse_kernel(record, "k")
    exact, zero = Box.point(torch.from_numpy(v)), torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(NoBound, match="overflow reachable"):
        kernel.store(exact, zero, kernel.compute, "n", kernel.inner(False))
    with pytest.raises(Rejected, match="overflow"):
        other.stored(checked, checked.compute, other_box.exact(v), 0 * v, checked.inner)
    cell = cells.Cells((1,), ((Fraction(v.item()),) * 2,))
    with pytest.raises(Rejected, match="overflow"):
        rational.stored(checked, checked.compute, cell, [Fraction(0)], checked.inner)
    graph = proofs.Graph((1, 1))
    x = graph.add("input", [], (1, 1))
    graph.add("scale", [x], (1, 1), factor=2.0)
    path, half = tmp_path / "model.safetensors", np.full((1, 1), 2.0**127 * (1 - 2.0**-8))
    # Twice the farthest x and its three roundings are between both limits.
    most = 2.0**127 * (2.0**-8 - 3.75 * 2.0**-24)
    record["results"] = {"input": "float32"}
    sha256 = proofs.write_safetensors(path, graph.tensors)
    wide = parameters(graph, record)
    for radius, held in ((most / 2, True), (most, False)):
        spread = torch.full((1, 1), radius, dtype=torch.float64)
        document = proofs.document(graph, record, record, sha256, half, radius)
        scene = Derivation(parse(proofs.dump(document)), read(path).tensors)
        case = parse(proofs.dump(document)).cases[0]
        if held:
            affine_run(block(graph), wide, torch.from_numpy(half), spread, 0.0)
            with np.errstate(all="ignore"):
                walk(scene.problem(case), parse_kernel(record, "k"))
            continue
        with pytest.raises(NoBound, match="float32"):
            affine_run(block(graph), wide, torch.from_numpy(half), spread, 0.0)
        with np.errstate(all="ignore"), pytest.raises(Rejected, match="float32"):
            walk(scene.problem(case), parse_kernel(record, "k"))


def test_grid_point_is_unchanged() -> None:
    """It is at the edge of a step: a box one ulp wider would contain the number below it too."""
    grid = np.array([1.0, -2.5, 0.0, 2.0**-133, -3 * 2.0**-133, 2.0**100])
    record = proofs.numerics("bfloat16", "toward_zero")
    kernel, checked = Rounding(numerics(record)), parse_kernel(record, "k")
    exact, zero = Box.point(torch.from_numpy(grid)), torch.zeros(6, dtype=torch.float64)
    stored = kernel.store(exact, zero, kernel.compute, "n", kernel.inner(False))
    assert torch.equal(stored.value.lo, exact.lo)
    assert torch.equal(stored.value.hi, exact.hi)
    assert float(stored.error.mag().max()) <= 2.0**-1000
    value, wrong = other.stored(
        checked, checked.compute, other_box.exact(grid), np.zeros(6), checked.inner
    )
    assert np.array_equal(value.lo, grid)
    assert np.array_equal(value.hi, grid)
    assert box_size(wrong) <= 2.0**-1000


def box_size(found: other_box.Box) -> float:
    return float(np.maximum(np.abs(found.lo), np.abs(found.hi)).max())


def admitted(v: Floats, casts: str, compute: str, rng: np.random.Generator) -> list[Floats]:
    """Return admitted results of a cast: the farthest, and those of real conversions."""
    form = FORMATS[compute]
    below = kernels.cut(v, compute)
    if casts == "toward_zero":
        return [below]
    u, eta = 2 * form.unit_roundoff * (1 - 2.0**-20), 2 * form.underflow * (1 - 2.0**-20)
    share = rng.uniform(0, 1, v.shape)
    inward = [np.sign(v) * np.maximum(np.abs(v) * (1 - s * u) - s * eta, 0) for s in (0, 1, share)]
    if casts == "any_toward_zero":
        return [below, *inward]
    up = np.where(below == v, v, below + np.sign(v) * _step(v, form.precision, form.min_exponent))
    return [below, *inward, up, v * (1 + u) + eta, v * (1 + share * u) - share * eta]


def _step(v: Floats, precision: int, least: int) -> Floats:
    return np.ldexp(1.0, np.maximum(np.frexp(v)[1] - 1, least) - precision + 1)


@pytest.mark.sample(12)
@pytest.mark.parametrize("size", [1.0, 2.0**-13, 2.0**-24, 2.0**-132])
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("casts", DIRECTED)
def test_storing_encloses_admitted_numbers_in_all_implementations(
    casts: str, compute: str, size: float
) -> None:
    rng = np.random.default_rng(8)
    record = proofs.numerics(compute, casts)
    kernel, checked = Rounding(numerics(record)), parse_kernel(record, "k")
    n = 400
    centre = rng.standard_normal(n) * 3 * size
    centre[: n // 4] *= 2.0**-9  # boxes around zero
    radius = rng.uniform(0, 2.0**-7, n) * size * (rng.uniform(0, 1, n) < 0.7)
    internal = rng.uniform(0, 2.0**-20, n) * size
    low, high = centre - radius, centre + radius
    first = kernel.store(
        Box(torch.from_numpy(low), torch.from_numpy(high)),
        torch.from_numpy(internal),
        kernel.compute,
        "n",
        kernel.inner(False),
    )
    value, wrong = other.stored(
        checked, checked.compute, other_box.Box(low, high), internal, checked.inner
    )
    pairs = tuple((Fraction(a), Fraction(b)) for a, b in zip(low, high, strict=True))
    exact = rational.stored(
        checked,
        checked.compute,
        cells.Cells((n,), pairs),
        [Fraction(e) for e in internal],
        checked.inner,
    )
    boxes = [
        (first.value.lo.numpy(), first.value.hi.numpy()),
        (first.error.lo.numpy(), first.error.hi.numpy()),
        (value.lo, value.hi),
        (wrong.lo, wrong.hi),
        *(tuple(np.array([float(p[i]) for p in part.pairs]) for i in (0, 1)) for part in exact),
    ]
    slack = 2.0**-50 * np.abs(centre) + 2.0**-1060  # rounding of exact fractions to floats
    for lean in (-1.0, 0.0, 1.0, rng.uniform(-1, 1, n)):
        f = centre + radius * lean
        v = f + internal * rng.uniform(-1, 1, n)
        for stored in admitted(v, casts, compute, rng):
            for kind, (lo, hi) in enumerate(boxes):
                shown = stored if kind % 2 == 0 else stored - f
                assert (lo - slack <= shown).all(), (kind, lean)
                assert (shown <= hi + slack).all(), (kind, lean)
    # The implementations agree; no box is wider than the definition admits.
    for kind in (0, 1):
        for end in (0, 1):
            np.testing.assert_allclose(
                boxes[kind][end], boxes[kind + 2][end], rtol=1e-12, atol=1e-12 * size
            )
            np.testing.assert_allclose(
                boxes[kind][end], boxes[kind + 4][end], rtol=1e-12, atol=1e-12 * size
            )


def test_free_casts_toward_zero_have_errors_of_one_sign() -> None:
    """No positive number grows, or becomes negative; the error opposes the sign."""
    record = proofs.numerics("bfloat16", "any_toward_zero")
    kernel = Rounding(numerics(record))
    box = Box(
        *(
            torch.tensor(end, dtype=torch.float64)
            for end in ([1.0, -3.0, 1e-40], [2.0, -2.0, 2e-40])
        )
    )
    zero = torch.zeros(3, dtype=torch.float64)
    found = kernel.store(box, zero, kernel.compute, "n", kernel.inner(False))
    assert found.value.hi[0] == 2.0
    assert found.value.lo[1] == -3.0
    assert 0.99 < float(found.value.lo[0]) < 1.0
    assert float(found.value.lo[2]) >= 0.0
    assert float(found.error.hi[0]) <= 2.0**-1000
    assert float(found.error.lo[1]) >= -(2.0**-1000)
