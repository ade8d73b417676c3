"""Short cuts of both programs in long rows say no less than what they are short for.

Windows lose what is zero at their ends.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine import adjoint as prover
from kcdsl_certs.recheck.affine import adjoint as reader


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_windows_without_zeros_read_the_same(axis: int) -> None:
    values = np.random.default_rng(2).standard_normal((4, 3, 5, 6))
    where = [slice(None)] * 4
    for ends in (slice(0, 1), slice(2, None) if axis == 0 else slice(-2, None)):
        where[axis + 1] = ends
        values[tuple(where)] = 0.0
    window = ((2, 5), (1, 6), (3, 9))
    whole = prover.Adjoint(torch.from_numpy(values), window, (7, 8, 9))
    short = whole.narrowed(axis)
    assert short.window[axis][1] - short.window[axis][0] < values.shape[axis + 1]
    assert torch.equal(short.dense().values, whole.dense().values)
    assert torch.equal(whole.narrowed(axis - 3).values, short.values)
    wide = reader.Adjoint(values, (2, 1, 3))
    less = reader.shortened(wide, axis)
    assert less.extent == tuple(short.values.shape[1:])
    again = reader.embedded(less, wide.start, wide.extent)
    np.testing.assert_array_equal(again.values, values)
    for nothing in (whole.times(0.0), whole.times(0.0).narrowed(axis)):
        assert nothing.values.shape == whole.values.shape
