"""A class whose probability float64 takes for zero, or nearly so, may still become the largest."""

from __future__ import annotations

import math

import pytest

from kcdsl.chain import CertifiedRow, certified_row


def policy(logits: list[float]) -> list[float]:
    """Return the softmax, in floats."""
    parts = [math.exp(v - max(logits)) for v in logits]
    return [part / sum(parts) for part in parts]


def stable(p: list[float], s: float) -> bool | None:
    row = certified_row(s=s, p=p)
    assert isinstance(row, CertifiedRow)
    return row.top1_stable


@pytest.mark.parametrize("gap", [600.0, 708.5, 744.4, 745.0, 800.0, 5000.0])
def test_no_span_beyond_the_gap_keeps_the_largest(gap: float) -> None:
    """The gap of the logits is a drift that makes two classes equal, whatever p can say of it."""
    p = policy([gap, 0.0, -gap])
    assert not stable(p, gap)
    assert not stable(p, 30.0 * gap)
    assert stable(p, min(gap, 690.0) - 1.0)


def test_what_is_known_of_the_logits_says_more() -> None:
    row = certified_row(s=4999.0, logits=[5000.0, 0.0, -5000.0])
    assert isinstance(row, CertifiedRow)
    assert row.top1_stable
