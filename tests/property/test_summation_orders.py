"""Adverse summation orders, rounded exactly as each format does, stay inside A_k,j."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from kcdsl.model.presets import resolve
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.sums import accumulation_error

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def chain(terms: np.ndarray) -> float:
    """Return the sum from left to right, rounded at every step."""
    total = terms[0]
    for term in terms[1:]:
        total = terms.dtype.type(total + term)
    return float(total)


def tree(terms: np.ndarray) -> float:
    """Return the sum by recursive halving."""
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        pairs = [terms.dtype.type(a + b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = np.concatenate([np.array(pairs, dtype=terms.dtype), odd])
    return float(terms[0])


def orders(terms: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield orders with large errors: positive terms first, large ones first, alternating."""
    wide = terms.astype(np.float64)
    signed, size = np.argsort(-wide, kind="stable"), np.argsort(-np.abs(wide), kind="stable")
    yield from (signed, signed[::-1], size, size[::-1])
    zigzag = np.empty_like(signed)
    zigzag[::2], zigzag[1::2] = signed[: (len(signed) + 1) // 2], signed[::-1][: len(signed) // 2]
    yield zigzag
    for _ in range(4):
        yield rng.permutation(len(terms))


def families(rng: np.random.Generator, n: int) -> Iterator[np.ndarray]:
    """Yield terms that are equal, of all sizes, nearly cancelling, or barely too small to count."""
    yield rng.uniform(0.5, 1, n)
    yield rng.standard_normal(n) * np.exp(rng.uniform(-8, 4, n))
    half = rng.uniform(0.5, 1, n)
    yield half * np.where(np.arange(n) % 2, 1, -1)
    small = np.full(n, 0.499)
    small[0] = 2.0**9
    yield small / 64


@pytest.mark.parametrize("name", DTYPES)
def test_every_order_is_within_the_model(name: str) -> None:
    spec = resolve({"preset": "torch-eager", "compute": name, "accumulate": name})
    kernel, dtype = Rounding(spec), DTYPES[name]
    rng = np.random.default_rng(0)
    closest = 0.0
    for n in (2, 3, 17, 64):
        for numbers in families(rng, n):
            terms = numbers.astype(dtype)
            exact = [Fraction(float(t)) for t in terms]
            total, result = (
                torch.tensor([float(v) * (1 + 2.0**-50)], dtype=torch.float64)
                for v in (sum(map(abs, exact)), abs(sum(exact)))
            )
            bound = float(accumulation_error(total, result, n - 1, kernel, 0))
            for order in orders(terms, rng):
                for add in (chain, tree):
                    error = abs(Fraction(add(terms[order])) - sum(exact))
                    assert error <= Fraction(bound)
                    closest = max(closest, float(error) / bound)
    assert closest > 0.2
