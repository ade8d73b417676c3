"""Rank stability: no drift inside the premise flips a certified position; just below, one does."""

from __future__ import annotations

import math
import random

import pytest

from kcdsl.chain import ChainDomainError
from kcdsl.chain.rank import (
    certified_stable_fraction,
    margin,
    stable_under_intervals,
    stable_under_linf,
    stable_under_span,
)


def top_set(z: list[float], k: int) -> set[int]:
    return set(sorted(range(len(z)), key=lambda i: (-z[i], i))[:k])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_random_drifts_inside_the_intervals_never_flip_a_certified_position(k: int) -> None:
    rng, certified = random.Random(k), 0
    for _ in range(2_000):
        z = [rng.gauss(0, 1) for _ in range(5)]
        width = rng.choice([0.05, 0.3, 1.0])
        intervals = [(-rng.random() * width, rng.random() * width) for _ in z]
        if not stable_under_intervals(z, intervals, k):
            continue
        certified += 1
        for _ in range(5):
            y = [a + rng.choice([lo, hi]) for a, (lo, hi) in zip(z, intervals, strict=True)]
            assert top_set(y, k) == top_set(z, k)
    assert certified > 100


def test_just_below_the_margin_an_explicit_drift_flips() -> None:
    z = [2.0, 1.0, 0.0]
    assert stable_under_linf(z, 0.4999)
    assert not stable_under_linf(z, 0.5001)
    assert top_set([2.0 - 0.5001, 1.0 + 0.5001, 0.0], 1) == {1}
    assert stable_under_span(z, 0.9999)
    assert not stable_under_span(z, 1.0001)
    assert top_set([2.0 - 1.0001, 1.0, 0.0], 1) == {1}
    assert stable_under_intervals(z, [(-0.9, 0.0), (0.0, 0.0999), (0.0, 0.0)])
    assert not stable_under_intervals(z, [(-0.9, 0.0), (0.0, 0.1001), (0.0, 0.0)])
    assert top_set([2.0 - 0.9, 1.0 + 0.1001, 0.0], 1) == {1}


def test_equality_is_not_stable() -> None:
    z = [2.0, 1.0]
    assert not stable_under_span(z, 1.0)
    assert not stable_under_linf(z, 0.5)
    assert not stable_under_intervals(z, [(-1.0, 0.0), (0.0, 0.0)])
    assert not stable_under_span([1.0, 1.0, 0.0], 0.0)
    assert stable_under_span([1.0, 1.0, 0.0], 0.5, k=2)


def test_intervals_are_sharper_than_the_span_and_the_span_than_the_norm() -> None:
    z = [1.0, 0.0]
    common_shift = [(0.9, 0.95), (0.9, 0.95)]
    assert stable_under_intervals(z, common_shift)
    assert stable_under_span(z, 0.05)
    assert not stable_under_linf(z, 0.95)


def test_every_class_together_cannot_change() -> None:
    assert stable_under_span([1.0, 0.0], 1e9, k=2)
    assert stable_under_intervals([1.0, 0.0], [(-9.0, 9.0)] * 2, k=2)
    assert margin([1.0, 0.0], k=2) == math.inf


@pytest.mark.parametrize("z", [[], [1.0], [math.nan, 0.0], [math.inf, 0.0]])
def test_rows_that_are_no_evidence_are_refused(z: list[float]) -> None:
    with pytest.raises(ChainDomainError):
        stable_under_span(z, 0.1)
    with pytest.raises(ChainDomainError):
        stable_under_intervals(z, [(0.0, 0.0)] * len(z))


def test_misuse_is_refused() -> None:
    for k in (0, 3, -1, True):
        with pytest.raises(ChainDomainError):
            stable_under_span([1.0, 0.0], 0.1, k)
    with pytest.raises(ChainDomainError):
        stable_under_intervals([1.0, 0.0], [(0.0, 0.0)] * 3)
    with pytest.raises(ChainDomainError):
        stable_under_intervals([1.0, 0.0], [(0.0, 0.0), (0.1, -0.1)])
    with pytest.raises(ChainDomainError):
        stable_under_span([1.0, 0.0], math.nan)


def test_the_share_of_stable_positions() -> None:
    assert certified_stable_fraction([True, True]) == 1.0
    assert certified_stable_fraction([False]) == 0.0
    assert 0.0 < certified_stable_fraction([True, False, False]) <= 1 / 3
    with pytest.raises(ChainDomainError):
        certified_stable_fraction([])
