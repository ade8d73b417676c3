"""Concrete summation orders: their results, and the symbol of a sum that covers them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kcdsl.model.numerics.formats import FORMATS
from kcdsl_backends.attack.operations import ORDERS, ordered_product, sum_error

RNG = np.random.default_rng(11)
A = RNG.standard_normal((5, 23)).astype(np.float32)
B = (RNG.standard_normal((23, 4)) * np.exp(RNG.standard_normal((23, 1)))).astype(np.float32)
C = RNG.standard_normal(4).astype(np.float32)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).double()


def in_order(terms: list[float], order: str) -> np.float32:
    """Add float64 terms in float32, in sequence."""
    match order:
        case "backward":
            terms = terms[::-1]
        case "growing":
            terms = sorted(terms, key=abs)
        case "falling":
            terms = sorted(terms, key=lambda t: -abs(t))
        case "positive first":
            terms = sorted(terms, key=lambda t: t <= 0)
        case "negative first":
            terms = sorted(terms, key=lambda t: t >= 0)
        case "pairwise":
            level = [np.float32(t) for t in terms]
            while len(level) > 1:
                pairs = [a + b for a, b in zip(level[::2], level[1::2], strict=False)]
                level = [*pairs, *(level[-1:] if len(level) % 2 else [])]
            return level[0]
    total = np.float32(terms[0])
    for term in terms[1:]:
        total = np.float32(np.float64(total) + term)
    return total


@pytest.mark.parametrize("order", ORDERS)
def test_result_follows_the_chosen_order(order: str) -> None:
    found = ordered_product(tensor(A), tensor(B), tensor(C), "float32", order)
    for i in range(5):
        for j in range(4):
            terms = [float(a) * float(b) for a, b in zip(A[i], B[:, j], strict=True)]
            assert float(found[i, j]) == float(in_order(terms, order) + C[j])


def test_different_orders_give_different_sums() -> None:
    results = [ordered_product(tensor(A), tensor(B), None, "float32", order) for order in ORDERS]
    assert len({tuple(r.flatten().tolist()) for r in results}) == len(ORDERS)


def test_large_product_is_equal_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ordered_product(tensor(A), tensor(B), None, "bfloat16", "growing")
    monkeypatch.setattr("kcdsl_backends.attack.operations._ELEMENTS", 100)
    parts = ordered_product(tensor(A), tensor(B), None, "bfloat16", "growing")
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("accumulator", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
def test_error_of_every_order_is_within_the_symbol(accumulator: str, order: str) -> None:
    for scale in (1.0, 1e-3, 30.0):
        left, right = tensor(A * np.float32(scale)), tensor(B)
        exact = left @ right + tensor(C)
        total = left.abs() @ right.abs() + tensor(C).abs()
        allowed = sum_error(total, exact, FORMATS[accumulator], 23)
        off = (ordered_product(left, right, tensor(C), accumulator, order) - exact).abs()
        assert bool((off <= allowed).all())
        assert float((off / allowed).max()) > 1e-3


def test_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="sideways"):
        ordered_product(tensor(A), tensor(B), None, "float32", "sideways")
