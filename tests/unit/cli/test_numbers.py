"""Numbers on the command line: invalid ones are refused by name, without a crash."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.cli.common.options import (
    LARGEST_SEED,
    count,
    fraction,
    not_negative,
    positive,
    seed,
    whole,
)


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (count, ("1", "70"), ("0", "-1", "1.5", "", "x", "nan")),
        (seed, ("0", str(LARGEST_SEED)), ("-1", str(LARGEST_SEED + 1), "1e3", "inf")),
        (whole(2, 4), ("2", "4"), ("1", "5", "two")),
        (positive, ("1e-9", "3"), ("0", "-1", "nan", "inf", "-inf", "1e999", "x")),
        (not_negative, ("0", "1e300"), ("-1e-9", "nan", "inf", "x")),
    ],
)
def test_valid_numbers_of_options(
    read: Callable[[str], Any], good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    for text in good:
        assert read(text) == float(text) or read(text) == int(text)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"not {text!r}"):
            read(text)


def test_exact_numbers_are_parsed() -> None:
    assert fraction("0.05") == Fraction(1, 20)
    assert fraction(" 1/3 ") == Fraction(1, 3)
    assert fraction("-2.5e-3") == Fraction(-1, 400)
    for text in ("", "x", "1/0", "1/", "1/2/3", "nan", "inf", "5%", "5 ms", "1e999999999"):
        assert fraction(text) is None


@pytest.mark.parametrize(
    "words",
    [
        ("aggregate", "t.parquet", "--limit", "kl <= 1/0"),
        ("aggregate", "t.parquet", "--limit", "kl <= 5 ms"),
        ("aggregate", "t.parquet", "--limit", "<= 5"),
        ("aggregate", "t.parquet", "--limit", "kl <= 1e999999999"),
        ("aggregate", "t.parquet", "--limit", "kl >= -1e309"),
        ("aggregate", "t.parquet", "--percentile", "1/0"),
        ("aggregate", "t.parquet", "--percentile", "1e-999999999"),
        ("aggregate", "t.parquet", "--seed", "-1"),
        ("aggregate", "t.parquet", "--memory", "much"),
        ("aggregate", "t.parquet", "--threads", "99999999999999999999"),
        ("attribute", "--batch", "0"),
        ("evaluate", "--seed", "99999999999999999999"),
        ("evaluate", "--looks", "often"),
        ("evaluate", "--jobs", "0"),
        ("experiment", "e1", "--seconds", "nan"),
        ("experiment", "e2", "--seed", "-3"),
        ("experiment", "e2", "--length", "0"),
        ("verify", "--threads", "1025"),
    ],
)
def test_error_states_the_valid_values_of_an_option(cli: Any, words: tuple[str, ...]) -> None:
    ran = cli(*words)
    assert ran.code == 2
    last = ran.stderr.splitlines()[-1]
    assert f"argument {words[-2]}: must be" in last
    assert "_" not in last.partition("must be")[2]
