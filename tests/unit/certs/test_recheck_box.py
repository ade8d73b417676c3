"""Interval arithmetic on doubles compared with rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval import box
from tests.support.rationals import cells

NUMBERS = st.one_of(
    st.floats(-1e3, 1e3),
    st.floats(-1e-300, 1e-300),
    st.sampled_from([0.0, 1.0, 2.0**-1074, -(2.0**-1022), 1 + 2.0**-52, 1e150]),
)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...] = (3,)) -> box.Box:
    a = draw(hnp.arrays(np.float64, shape, elements=NUMBERS))
    if draw(st.booleans()):
        return box.exact(a)
    b = draw(hnp.arrays(np.float64, shape, elements=NUMBERS))
    return box.Box(np.minimum(a, b), np.maximum(a, b))


def exactly(a: box.Box) -> cells.Cells:
    pairs = zip(a.lo.ravel(), a.hi.ravel(), strict=True)
    return cells.Cells(
        a.shape, tuple((Fraction(float(lo)), Fraction(float(hi))) for lo, hi in pairs)
    )


def encloses(outer: box.Box, inner: cells.Cells) -> bool:
    return outer.shape == inner.shape and all(
        lo <= pair[0] and pair[1] <= hi
        for (lo, hi), pair in zip(exactly(outer).pairs, inner.pairs, strict=True)
    )


@given(boxes(), boxes())
def test_elementwise_operations_enclose_the_exact_result(a: box.Box, b: box.Box) -> None:
    x, y = exactly(a), exactly(b)
    assert encloses(box.add(a, b), cells.both(x, y, cells.add))
    assert encloses(box.sub(a, b), cells.both(x, y, cells.sub))
    assert encloses(box.mul(a, b), cells.both(x, y, cells.mul))
    assert encloses(box.half(a), x.each(lambda p: (p[0] / 2, p[1] / 2)))
    assert encloses(box.neg(a), x.each(lambda p: (-p[1], -p[0])))


def test_difference_of_points_is_a_point_if_it_is_exact() -> None:
    one, two = box.exact(np.array([1.0, 3.0])), box.exact(np.array([0.75, 2.0**-60]))
    assert box.sub(one, box.exact(two.lo * 2.0**30)).point
    assert not box.sub(one, two).point


@given(boxes((2, 5)), boxes((5, 3)))
def test_matrix_product_encloses_the_exact_result(a: box.Box, b: box.Box) -> None:
    # the exact range of each element; midpoint and radius may only be wider
    x, y = exactly(a), exactly(b)
    product = box.matmul(a, b)
    ranges = []
    for i in range(2):
        for j in range(3):
            terms = [cells.mul(x.pairs[i * 5 + k], y.pairs[k * 3 + j]) for k in range(5)]
            ranges.append((sum(t[0] for t in terms), sum(t[1] for t in terms)))
    found = exactly(product)
    for got, want in zip(found.pairs, ranges, strict=True):
        assert got[0] <= want[0]
        assert want[1] <= got[1]


def test_sums_of_doubles_stay_exact() -> None:
    a, b = box.exact(np.array([1.0, 0.5, -3.0])), box.exact(np.array([2.0, -0.5, 2.0**-60]))
    found = box.add(a, b)
    np.testing.assert_array_equal(found.lo[:2], [3.0, 0.0])
    np.testing.assert_array_equal(found.hi[:2], [3.0, 0.0])
    assert found.lo[2] == -3.0 < found.hi[2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_ends_are_refused(bad: float) -> None:
    good, wrong = np.zeros(2), np.array([0.0, bad])
    for a in (box.exact(wrong), box.Box(good, wrong), box.Box(wrong, good)):
        with pytest.raises(Rejected) as found:
            box.checked(a, "x")
        assert found.value.reason == "bound/not-finite"


def test_crossed_ends_are_refused() -> None:
    with pytest.raises(Rejected) as found:
        box.checked(box.Box(np.ones(1), np.zeros(1)), "x")
    assert found.value.reason == "bound/empty"


def test_upper_bounds_of_zero_stay_zero() -> None:
    values = box.up(2.0**-53 * box.lifted(np.array([0.0, 2.0**-1074, 1.0])))
    assert values[0] == 0.0
    assert (values[1:] > [2.0**-1074, 2.0**-53]).all()
