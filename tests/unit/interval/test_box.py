"""Boxes round outward: compared with exact rational arithmetic."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl_backends.drift.boxes import (
    Box,
    exclusive_max,
    exclusive_sums,
    gamma,
    magnitude_product,
    matmul,
)

finite = st.floats(-1e12, 1e12, allow_nan=False).filter(lambda v: v == 0 or abs(v) > 1e-12)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Box, torch.Tensor]:
    """Draw a box and a tensor inside it."""
    count = 1
    for n in shape:
        count *= n
    ends = [sorted((draw(finite), draw(finite))) for _ in range(count)]
    picks = [draw(st.sampled_from([0, 1])) for _ in range(count)]
    lo = torch.tensor([e[0] for e in ends], dtype=torch.float64).reshape(shape)
    hi = torch.tensor([e[1] for e in ends], dtype=torch.float64).reshape(shape)
    inside = torch.tensor([e[p] for e, p in zip(ends, picks, strict=True)], dtype=torch.float64)
    return Box(lo, hi), inside.reshape(shape)


def holds(box: Box, exact: list[Fraction]) -> bool:
    lo, hi = box.lo.flatten().tolist(), box.hi.flatten().tolist()
    return all(Fraction(a) <= e <= Fraction(b) for a, e, b in zip(lo, exact, hi, strict=True))


def fractions(x: torch.Tensor) -> list[Fraction]:
    return [Fraction(v) for v in x.flatten().tolist()]


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(boxes((4,)), boxes((4,)))
def test_elementary_operations_enclose_the_exact_result(
    first: tuple[Box, torch.Tensor], second: tuple[Box, torch.Tensor]
) -> None:
    (a, x), (b, y) = first, second
    xs, ys = fractions(x), fractions(y)
    assert holds(a + b, [p + q for p, q in zip(xs, ys, strict=True)])
    assert holds(a - b, [p - q for p, q in zip(xs, ys, strict=True)])
    assert holds(a * b, [p * q for p, q in zip(xs, ys, strict=True)])
    assert holds(a.square(), [p * p for p in xs])
    assert holds(a.scaled(-0.1), [p * Fraction(-0.1) for p in xs])
    assert holds(a.half(), [p / 2 for p in xs])
    assert holds(a.total(), [sum(xs, Fraction(0))])
    assert holds(a.mean(), [sum(xs, Fraction(0)) / 4])


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(boxes((2, 3)), boxes((3, 2)))
def test_matrix_product_encloses_the_exact_result(
    first: tuple[Box, torch.Tensor], second: tuple[Box, torch.Tensor]
) -> None:
    (a, x), (b, y) = first, second
    exact = [
        sum((Fraction(float(x[i, k])) * Fraction(float(y[k, j])) for k in range(3)), Fraction(0))
        for i in range(2)
        for j in range(2)
    ]
    assert holds(matmul(a, b), exact)
    bound = magnitude_product(a.mag(), b.mag()).flatten().tolist()
    assert all(abs(e) <= Fraction(m) for e, m in zip(exact, bound, strict=True))


def test_subtraction_is_rounded_outward() -> None:
    """The float64 result alone is no enclosure: 1 + 2^-80 needs the outward ulp."""
    box = Box.point(torch.tensor([1.0], dtype=torch.float64)) + Box.point(
        torch.tensor([2.0**-80], dtype=torch.float64)
    )
    assert box.lo.item() <= 1.0 < box.hi.item()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_exclusive_sums_leave_out_one_term(values: list[float]) -> None:
    terms = torch.tensor(values, dtype=torch.float64)
    for i, got in enumerate(exclusive_sums(terms).tolist()):
        exact = sum((Fraction(v) for j, v in enumerate(values) if j != i), Fraction(0))
        assert abs(Fraction(got) - exact) <= Fraction(gamma(len(values) + 2)) * exact


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_exclusive_max_leaves_out_one_term(values: list[float]) -> None:
    got = exclusive_max(torch.tensor(values, dtype=torch.float64)).tolist()
    for i, value in enumerate(got):
        rest = [v for j, v in enumerate(values) if j != i]
        assert value == (max(rest) if rest else float("-inf"))


def test_nan_gives_an_unbounded_box() -> None:
    from kcdsl_backends.drift.boxes import NoBound
    from kcdsl_backends.drift.boxes.state import settle

    nan = torch.tensor([float("nan")], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(NoBound):
        settle("n", Box(zero, zero), Box(nan, nan), Box(zero, zero))
    with pytest.raises(NoBound):
        settle("n", Box(zero, zero), Box(zero, zero), Box(zero, zero + torch.inf))
