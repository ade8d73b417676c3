"""Linear bounds of the change of a ReLU: sound for any slopes, as tight as the published tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.linear.tape import Functional, ReluChange, ReluPlanes, first_slopes

COUNT = 64


def polygons(rng: np.random.Generator, kind: str) -> tuple[ReluChange, Tensor, Tensor]:
    """Return random polygons with points (n, D) inside each: [points, COUNT]."""
    n = rng.standard_normal((400, COUNT)) * rng.choice([0.1, 1.0, 3.0], COUNT)
    moved = rng.standard_normal((400, COUNT)) * rng.choice([1e-6, 0.1, 2.0], COUNT)
    shift = rng.standard_normal(COUNT)
    n = n + shift
    match kind:
        case "drift of one sign":
            moved = np.abs(moved)
        case "point":
            n[:] = n[0]
        case "no drift":
            moved[:] = 0.0
        case "on":
            n = np.abs(n) + np.abs(moved).max()
        case "off":
            n = -np.abs(n) - np.abs(moved).max()
        case _:
            pass

    def box(values: np.ndarray) -> Box:
        return Box(*(torch.from_numpy(v(values, axis=0)[None]) for v in (np.min, np.max)))

    change = ReluChange(box(n), box(moved), box(n + moved))
    return change, torch.from_numpy(n), torch.from_numpy(moved)


KINDS = ("any", "drift of one sign", "point", "no drift", "on", "off")


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_with_any_slopes_are_sound(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    change, n, moved = polygons(rng, kind)
    true = (n + moved).clamp_min(0) - n.clamp_min(0)
    for _ in range(30):
        a, b = (torch.from_numpy(rng.standard_normal((1, 1, COUNT)) * 2) for _ in range(2))
        for sign in (1.0, -1.0):
            c, error = change.heights(a, b, sign)
            gap = sign * (a[0] * n + b[0] * moved + c[0] - true)
            assert bool((gap >= -error[0] * 2).all())


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_touch_the_change(kind: str) -> None:
    """Each bound is attained somewhere in the polygon."""
    rng = np.random.default_rng(7)
    change, _, _ = polygons(rng, kind)
    a, b = (torch.from_numpy(rng.standard_normal((1, 1, COUNT))) for _ in range(2))
    low, high = change.base.lo[0], change.base.hi[0]
    n = low + (high - low) * torch.linspace(0, 1, 401, dtype=torch.float64)[:, None]
    bottom = torch.maximum(change.moved.lo[0], change.result.lo[0] - n)
    top = torch.minimum(change.moved.hi[0], change.result.hi[0] - n)
    inside = bottom <= top
    for sign in (1.0, -1.0):
        c, _ = change.heights(a, b, sign)
        nearest = torch.full((COUNT,), torch.inf, dtype=torch.float64)
        for moved in (bottom, top, torch.maximum(torch.minimum(-n, top), bottom)):
            true = (n + moved).clamp_min(0) - n.clamp_min(0)
            gap = sign * (a[0] * n + b[0] * moved + c[0] - true)
            nearest = torch.minimum(nearest, torch.where(inside, gap, torch.inf).amin(0))
        step = (high - low) / 400
        assert bool((nearest <= 4 * step + 1e-9).all())


def table(change: ReluChange) -> tuple[Tensor, Tensor]:
    """Return the interval of the change by the case tables of ReluDiff and NeuroDiff."""
    low_n, high_n, dl, du = change.base.lo, change.base.hi, change.moved.lo, change.moved.hi
    first, last = change.result.lo, change.result.hi
    zero = torch.zeros_like(low_n)
    low, high = torch.minimum(dl, zero), torch.maximum(du, zero)
    low = torch.where(
        high_n <= 0, torch.maximum(first, zero), torch.maximum(low, -high_n.clamp_min(0))
    )
    high = torch.where(high_n <= 0, last.clamp_min(0), high)
    high = torch.where((low_n >= 0) & (high_n > 0), torch.maximum(du, -low_n), high)
    on = (low_n >= 0) & (first >= 0)
    return torch.where(on, dl, low), torch.where(on, du, high)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_bounds_are_as_tight_as_the_case_tables(kind: str) -> None:
    change, _, _ = polygons(np.random.default_rng(3), kind)
    flat = torch.zeros(1, 1, COUNT, dtype=torch.float64)
    low, high = table(change)
    assert bool((change.heights(flat, flat, 1.0)[0][0] <= high + 1e-12).all())
    assert bool((change.heights(flat, flat, -1.0)[0][0] >= low - 1e-12).all())


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chosen", ["first", "random"])
def test_functionals_of_value_and_change_are_bounded(kind: str, chosen: str) -> None:
    rng = np.random.default_rng(11)
    pair, n, moved = polygons(rng, kind)
    reference = n[:1]
    e = n - reference
    own = ReluChange(
        Box.point(reference), Box(e.amin(0, keepdim=True), e.amax(0, keepdim=True)), pair.base
    )
    planes = ReluPlanes(0, reference, own, pair, first_slopes(own, pair))
    slopes = planes.slopes()
    if chosen == "random":
        slopes = tuple(torch.from_numpy(rng.standard_normal((5, 1, COUNT))) for _ in slopes)
    values = (Adjoint.full(torch.from_numpy(rng.standard_normal((5, 1, COUNT)))) for _ in range(2))
    functional = Functional(*values)
    found = planes.above(functional, slopes)
    ((source, pulled),) = found.sources
    assert source == 0
    worst = -np.inf
    for k in range(n.shape[0]):
        after = n[k : k + 1].clamp_min(0)
        new_e = after - reference.clamp_min(0)
        new_d = (n[k : k + 1] + moved[k : k + 1]).clamp_min(0) - after
        gap = functional.against(new_e, new_d) - found.constant
        gap = gap - pulled.against(e[k : k + 1], moved[k : k + 1])
        worst = max(worst, float(gap.max()))
    assert worst <= 1e-12


def test_bounds_are_exact_where_the_change_is_linear() -> None:
    for kind in ("on", "off"):
        change, _, _ = polygons(np.random.default_rng(5), kind)
        e_low, e_high, *rest = first_slopes(change, change)
        slope = 1.0 if kind == "on" else 0.0
        assert bool((e_low == slope).all())
        assert bool((e_high == slope).all())
        for a, b, sign in ((rest[0], rest[1], -1.0), (rest[2], rest[3], 1.0)):
            assert bool((a == 0).all())
            assert bool((b == slope).all())
            assert float(change.heights(a, b, sign)[0].abs().max()) <= 1e-12
