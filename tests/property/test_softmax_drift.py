"""Both implementations enclose the exact softmax and its drift, at any spread and any drift."""

from __future__ import annotations

import mpmath
import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.ops import softmax
from kcdsl_certs.recheck.interval import box as second
from kcdsl_certs.recheck.ops.attention import probabilities

SIZES = (0.0, 1e-12, 1e-3, 1.0, 40.0, 280.0, 900.0)
numbers = st.builds(lambda size, share: size * share, st.sampled_from(SIZES), st.floats(-1, 1))
widths = st.builds(lambda size, share: size * share, st.sampled_from(SIZES[:5]), st.floats(0, 1))
# a score, half the width of its box, a drift, half the width of its box
columns = st.lists(st.tuples(numbers, widths, numbers, widths), min_size=1, max_size=5)
corners = st.lists(st.sampled_from((-1.0, 0.0, 1.0)), min_size=10, max_size=10)


# A drift may be as small as 1e-324 beside a score of 1: with fewer digits than this the
# reference would lose it.
DIGITS = 400


def softmax_of(scores: list[mpmath.mpf]) -> list[mpmath.mpf]:
    """Return the softmax with enough digits for any float64 drift, and any exponent."""
    with mpmath.workdps(DIGITS):
        powers = [mpmath.exp(s - max(scores)) for s in scores]
        total = mpmath.fsum(powers)
        return [p / total for p in powers]


@given(columns, corners)
@example([(878.7, 0.0, 0.0, 0.0), (467.6, 0.0, 411.0, 0.0)], [0.0] * 10)
@example([(300.0, 0.0, -0.5, 0.0), (0.0, 0.0, 280.0, 30.0)], [0.0] * 4 + [1.0] * 6)
@example([(0.0, 0.0, 0.0, 0.0), (-740.0, 0.0, 3.0, 0.0)], [0.0] * 10)
@example([(0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 6.318943408260767e-178, 0.0)], [0.0] * 10)
@example([(1.0, 0.0, 5e-324, 0.0), (-700.0, 0.0, 0.0, 0.0)], [0.0] * 10)
def test_exact_softmax_is_within_its_boxes(
    rows: list[tuple[float, float, float, float]], at: list[float]
) -> None:
    middle, half, drift, spread = (np.array([v]) for v in zip(*rows, strict=True))
    scores, moves = (middle - half, middle + half), (drift - spread, drift + spread)
    count = len(rows)
    start = [scores[0][0, i] if at[i] < 0 else scores[1][0, i] for i in range(count)]
    step = [moves[0][0, i] if at[-1 - i] < 0 else moves[1][0, i] for i in range(count)]
    before = softmax_of([mpmath.mpf(s) for s in start])
    with mpmath.workdps(DIGITS):
        after = softmax_of(
            [mpmath.mpf(s) + mpmath.mpf(d) for s, d in zip(start, step, strict=True)]
        )

    first = softmax.probabilities(Box(*map(torch.from_numpy, scores)), None)
    found = softmax._drift(first, Box(*map(torch.from_numpy, moves)), None)
    allowed = np.ones((1, count), dtype=np.bool_)
    other = probabilities.probabilities(second.Box(*scores), allowed)
    other_found = probabilities.probability_drift(other, second.Box(*moves), allowed)
    for i in range(count):
        with mpmath.workdps(DIGITS):
            moved = after[i] - before[i]
        for p, d in ((first, found), (other, other_found)):
            assert float(p.lo[0, i]) <= before[i] <= float(p.hi[0, i])
            assert float(d.lo[0, i]) <= moved <= float(d.hi[0, i])
