"""Exact units, and arithmetic of dimensions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kcdsl.units import (
    BYTES,
    NAMED,
    NATS,
    ONE,
    RATIO,
    THROUGHPUT,
    TIME,
    UNITS,
    Dimension,
    describe,
    example,
    takes_bare_numbers,
)


@pytest.mark.parametrize(
    ("name", "factor", "dimension"),
    [
        ("us", Fraction(1, 1_000_000), "s"),
        ("ms", Fraction(1, 1000), "s"),
        ("min", Fraction(60), "s"),
        ("h", Fraction(3600), "s"),
        ("KB", Fraction(1000), "B"),
        ("KiB", Fraction(1024), "B"),
        ("GB", Fraction(10**9), "B"),
        ("GiB", Fraction(2**30), "B"),
        ("tok/s", Fraction(1), "tok/s"),
        ("nats", Fraction(1), "nat"),
        ("%", Fraction(1, 100), "ratio"),
        ("1", Fraction(1), "1"),
    ],
)
def test_units_convert_exactly(name: str, factor: Fraction, dimension: str) -> None:
    assert UNITS[name].factor == factor
    assert str(UNITS[name].dimension) == dimension


def test_names_of_units_in_the_ir() -> None:
    assert set(NAMED) == {"1", "ratio", "s", "B", "nat", "tok", "tok/s"}


@pytest.mark.parametrize(
    ("left", "right", "sign", "result"),
    [
        (TIME, TIME, -1, RATIO),
        (ONE, TIME, 1, TIME),
        (RATIO, TIME, 1, TIME),
        (RATIO, ONE, 1, RATIO),
        (ONE, ONE, 1, ONE),
        (THROUGHPUT, TIME, 1, Dimension((("tok", 1),))),
        (BYTES, TIME, -1, Dimension((("B", 1), ("s", -1)))),
        (ONE, TIME, -1, Dimension((("s", -1),))),
    ],
)
def test_dimensions_of_products(
    left: Dimension, right: Dimension, sign: int, result: Dimension
) -> None:
    assert left.times(right, sign) == result


def test_words_are_not_units() -> None:
    assert describe(TIME) == "a time"
    assert describe(BYTES.times(TIME, -1)) == "a quantity in B/s"
    assert str(TIME.times(TIME)) == "s^2"
    assert str(ONE.times(TIME, -1)) == "1/s"
    assert example(TIME) == "250 ms"
    assert example(RATIO) is None
    assert [takes_bare_numbers(d) for d in (ONE, RATIO, NATS, TIME, BYTES, THROUGHPUT)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
