"""Numbers with an exact or float64 value out of range are refused."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kcdsl.source.numbers import exact


@pytest.mark.parametrize("text", ["1e400", "1e-400", "1e101", "1e-101", "9" * 61, "1e99999999999"])
def test_implausible_numbers_are_refused_in_contracts(text: str) -> None:
    assert exact(text) is None
    assert exact("-" + text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Fraction(0)),
        ("0.000", Fraction(0)),
        ("1e100", Fraction(10) ** 100),
        ("-1e-100", -Fraction(1, 10**100)),
        (".5", Fraction(1, 2)),
    ],
)
def test_plausible_numbers_are_exact(text: str, value: Fraction) -> None:
    assert exact(text) == value
