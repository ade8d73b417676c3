"""Every summation order is within A_k,j: both implementations compared with random trees."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.model.presets import resolve
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.sums import accumulation_error
from kcdsl_certs.recheck.interval import sums
from kcdsl_certs.recheck.numerics.specification import parse_kernel

SPEC = resolve({"preset": "torch-eager", "compute": "float16", "accumulate": "float16"})
KERNEL = parse_kernel(SPEC.to_json(), "train")
terms = st.lists(st.floats(-256, 256, width=16), min_size=1, max_size=24)


def add_up(numbers: list[np.float16], choices: st.DataObject) -> np.float16:
    """Add float16 numbers in an order of the test's choosing, each sum rounded to float16."""
    while len(numbers) > 1:
        i = choices.draw(st.integers(0, len(numbers) - 1))
        first = numbers.pop(i)
        j = choices.draw(st.integers(0, len(numbers) - 1))
        numbers[j] = np.float16(first + numbers[j])
    return numbers[0]


@given(terms, terms, st.data())
def test_random_summation_orders_are_within_the_bound(
    a: list[float], b: list[float], data: st.DataObject
) -> None:
    pairs = list(zip(a, b, strict=False))
    products = [np.float16(np.float16(x / 16) * np.float16(y / 16)) for x, y in pairs]
    exact = [
        Fraction(float(np.float16(x / 16))) * Fraction(float(np.float16(y / 16))) for x, y in pairs
    ]
    total, result = float(sum(map(abs, exact))), float(abs(sum(exact)))
    found = abs(Fraction(float(add_up(list(products), data))) - sum(exact))
    up = 1 + 2.0**-50
    first = accumulation_error(
        torch.tensor([total * up], dtype=torch.float64),
        torch.tensor([result * up], dtype=torch.float64),
        len(pairs) - 1,
        Rounding(SPEC),
        1,
    )
    second = sums.accumulated(
        KERNEL, np.array([total * up]), np.array([result * up]), len(pairs) - 1, 1
    )
    assert found <= Fraction(float(first[0]))
    assert found <= Fraction(float(second[0]))
