"""Boxes of one row's logits and drifts, class by class: sound, sharp, fail closed."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import fields

import pytest

from kcdsl.chain import (
    CertifiedRow,
    ChainDomainError,
    certified_row,
    exact_row,
    sharpest,
    specific_row,
)
from kcdsl.chain.row import measured_beyond_certified
from kcdsl.verdict.model import InvalidEvidence

Interval = tuple[float, float]
QUANTITIES = ("tv", "kl", "jeffreys", "chi2", "js", "hellinger2", "abs_log_ratio", "w_log_w")


def boxes(rng: random.Random, classes: int) -> tuple[list[Interval], list[Interval]]:
    """Return boxes of logits and of drifts, from points to wide ones."""
    spread, wide = rng.choice([0.1, 1.0, 5.0, 40.0]), rng.choice([0.0, 1e-9, 1e-3, 0.3])
    size = rng.choice([1e-6, 1e-3, 0.05, 0.5, 3.0])
    logits, drifts = [], []
    for _ in range(classes):
        z, d = rng.gauss(0, spread), rng.gauss(0, size) * rng.choice([0, 1])
        logits.append((z - wide * rng.random(), z + wide * rng.random()))
        drifts.append((d - size * rng.random(), d + size * rng.random()))
    return logits, drifts


def corner(rng: random.Random, box: list[Interval]) -> list[float]:
    share = rng.random()
    return [high if rng.random() < share else low for low, high in box]


@pytest.mark.parametrize("temperature", [1, 0.5, 2.5])
def test_no_pair_of_rows_in_the_boxes_is_beyond(temperature: float) -> None:
    rng = random.Random(int(temperature * 10))
    for _ in range(400):
        logits, drifts = boxes(rng, rng.choice([2, 3, 6, 20]))
        found = specific_row(logits, drifts, temperature)
        for _ in range(6):
            z, d = corner(rng, logits), corner(rng, drifts)
            row = exact_row(z, [a + b for a, b in zip(z, d, strict=True)], temperature)
            for name in QUANTITIES:
                assert getattr(row, name) <= getattr(found, name) * (1 + 1e-7) + 1e-13, name
            assert row.kl_reverse <= found.jeffreys * (1 + 1e-7) + 1e-13
            assert row.ess >= found.ess * (1 - 1e-7)


def ratios(z: list[float], drifts: list[float]) -> list[float]:
    """Return ln(q/p) of every class."""
    moved = [a + b for a, b in zip(z, drifts, strict=True)]
    p, q = ([math.exp(v - max(row)) for v in row] for row in (z, moved))
    return [math.log(b / sum(q)) - math.log(a / sum(p)) for a, b in zip(p, q, strict=True)]


def test_ratios_of_a_known_row_are_those_of_the_vertices() -> None:
    rng = random.Random(3)
    for _ in range(60):
        z = [rng.gauss(0, 2) for _ in range(5)]
        drifts = [(-rng.random(), rng.random()) for _ in z]
        found = specific_row([(v, v) for v in z], drifts).log_ratio
        every = [ratios(z, list(vertex)) for vertex in itertools.product(*drifts)]
        for k, (low, high) in enumerate(found):
            assert low == pytest.approx(min(row[k] for row in every), rel=1e-9)
            assert high == pytest.approx(max(row[k] for row in every), rel=1e-9)


def test_a_confident_row_is_far_below_the_generic_bound() -> None:
    logits, intervals = [10.0, 0.0, 0.0, -1.0], [(-0.05, 0.05)] * 4
    row, generic = (
        certified_row(intervals=intervals, **more)  # type: ignore[arg-type]
        for more in ({"logits": logits}, {})
    )
    assert isinstance(row, CertifiedRow)
    assert isinstance(generic, CertifiedRow)
    assert (row.tv_rule, row.kl_rule) == ("classes", "classes")
    assert row.tv < generic.tv / 100
    assert row.kl < generic.kl / 100
    assert row.ess > generic.ess
    assert row.top1_stable is True
    bounded = {f.name for f in fields(CertifiedRow)} & {*QUANTITIES}
    assert all(getattr(row, name) <= getattr(generic, name) for name in bounded)


def test_a_span_serves_as_a_box() -> None:
    z = [4.0, 0.0, 1.0]
    by_span, by_box = (
        certified_row(logits=z, temperature=2, **more)
        for more in ({"s": 0.1}, {"intervals": [(-0.1, 0.1)] * 3})
    )
    assert isinstance(by_span, CertifiedRow)
    assert isinstance(by_box, CertifiedRow)
    assert by_span.tv == pytest.approx(by_box.tv, rel=1e-9)
    for shift in (-0.1, 0.1):
        moved = exact_row(z, [z[0] + shift, z[1] - shift, z[2]], 2)
        assert measured_beyond_certified(by_span, moved) == ()


def test_a_shift_of_all_drifts_changes_nothing() -> None:
    z, drifts = [2.0, 0.0, 1.0], [(-0.1, 0.2), (0.0, 0.1), (-0.3, 0.0)]
    one = specific_row([(v, v) for v in z], drifts)
    two = specific_row([(v + 8, v + 8) for v in z], [(a + 64, b + 64) for a, b in drifts])
    for name in QUANTITIES:
        assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-9), name


def test_wider_boxes_never_give_less() -> None:
    rng = random.Random(9)
    for _ in range(100):
        logits, drifts = boxes(rng, 4)
        wider = [(a - 0.1 * rng.random(), b + 0.1 * rng.random()) for a, b in drifts]
        one, two = specific_row(logits, drifts), specific_row(logits, wider)
        assert all(getattr(one, n) <= getattr(two, n) * (1 + 1e-9) + 1e-15 for n in QUANTITIES)


@pytest.mark.parametrize("scale", [1e3, 1e8, 1e300])
def test_huge_numbers_give_bounds_that_are_none(scale: float) -> None:
    rows = [(0.0, 0.0), (scale, scale), (-scale, scale)]
    found = specific_row(rows, [(-scale, scale)] * 3)
    assert found.tv == 1.0
    assert found.kl > 100
    assert 0.0 <= found.ess < 1e-100
    assert not any(math.isnan(getattr(found, name)) for name in QUANTITIES)


@pytest.mark.parametrize(
    ("logits", "drifts", "temperature"),
    [
        ([], [], 1),
        ([(0.0, 0.0)], [(0.0, 0.0)], 1),
        ([(0.0, 0.0)] * 2, [(0.0, 0.0)] * 3, 1),
        ([(math.nan, 0.0), (0.0, 0.0)], [(0.0, 0.0)] * 2, 1),
        ([(0.0, math.inf), (0.0, 0.0)], [(0.0, 0.0)] * 2, 1),
        ([(0.0, 0.0)] * 2, [(0.0, math.nan), (0.0, 0.0)], 1),
        ([(0.0, 0.0)] * 2, [(1.0, 0.0), (0.0, 0.0)], 1),
        ([(1.0, 0.0), (0.0, 0.0)], [(0.0, 0.0)] * 2, 1),
        ([(0.0, 0.0)] * 2, [(0.0, 0.0)] * 2, 0),
        ([(0.0, 0.0)] * 2, [(0.0, 0.0)] * 2, -1),
        ([(0.0, 0.0)] * 2, [(0.0, 0.0)] * 2, math.nan),
        ([(1e300, 1e300), (0.0, 0.0)], [(0.0, 0.0)] * 2, 1e-100),
    ],
)
def test_nothing_follows_from_what_is_no_box(
    logits: list[Interval], drifts: list[Interval], temperature: float
) -> None:
    with pytest.raises(ChainDomainError):
        specific_row(logits, drifts, temperature)
    found = certified_row(intervals=drifts, logit_intervals=logits, temperature=temperature)
    assert isinstance(found, InvalidEvidence)


def test_either_logits_or_boxes_of_them() -> None:
    found = certified_row(s=0.1, logits=[1.0, 0.0], logit_intervals=[(1.0, 1.0), (0.0, 0.0)])
    assert isinstance(found, InvalidEvidence)


@pytest.mark.parametrize(
    ("low", "stable"), [(0.21, True), (0.2, False), (0.0, False), (-1.0, False)]
)
def test_the_first_choice_of_boxes(low: float, stable: bool) -> None:
    """The drifts may take 0.2 of the distance; a tie of the training kernel is no order."""
    row = certified_row(intervals=[(-0.1, 0.1)] * 2, logit_intervals=[(1.0 + low, 2.0), (0.0, 1.0)])
    assert isinstance(row, CertifiedRow)
    assert row.top1_stable is stable


def test_a_tie_that_the_drift_resolves_is_no_order() -> None:
    row = certified_row(intervals=[(1.0, 1.0), (0.0, 0.0)], logits=[0.5, 0.5])
    assert isinstance(row, CertifiedRow)
    assert row.top1_stable is False


def test_the_sharpest_of_several_rows() -> None:
    z = [3.0, 0.0, 1.0]
    boxed = certified_row(intervals=[(-0.1, 0.1)] * 3, logits=z, osc=1.0)
    spanned = certified_row(s=0.15, osc=1.0)
    assert isinstance(boxed, CertifiedRow)
    assert isinstance(spanned, CertifiedRow)
    best = sharpest([boxed, spanned])
    assert best.s == 0.15
    assert best.tv == min(boxed.tv, spanned.tv)
    assert best.reward == min(boxed.reward or 1.0, spanned.reward or 1.0)
    assert best.ess == max(boxed.ess, spanned.ess)
    assert best.log_ratio == boxed.log_ratio
    other = certified_row(s=0.15, temperature=2)
    assert isinstance(other, CertifiedRow)
    for rows in ([], [boxed, other]):
        with pytest.raises(ChainDomainError):
            sharpest(rows)
