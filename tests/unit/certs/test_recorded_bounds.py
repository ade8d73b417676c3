"""The checker derives the recorded bounds of small proofs, at every node.

A rule without one of its terms gives a lower bound, which a proof with valid claims does not
reveal. Differences between processors are in the last bits, of float32 where sums over rows are
formed in it. Relative to bounds of coarse kernels they are far below the tolerance; bounds of
float64 kernels consist of a few thousand last bits. Where a bound is a few last bits of the value
of its node, a difference of one is not a missing term.
"""

from __future__ import annotations

import math

import pytest

from tests.support.recorded_bounds import PROOFS, derived, recorded

TOLERANCE = {"coarse": 1e-7, "fine": 1e-3}


PARTS = ("coarse", "faint", "fine")
"""Proofs of coarse kernels, of float64 kernels at tiny inputs, and of these at other inputs."""


@pytest.mark.parametrize("part", PARTS)
def test_derived_bounds_equal_the_recorded_ones(part: str) -> None:
    kind = "coarse" if part == "coarse" else "fine"
    expected = {
        name: cases
        for name, cases in recorded(kind).items()
        if part == "coarse" or name.endswith("faint") == (part == "faint")
    }
    assert expected
    assert recorded(kind).keys() == PROOFS[kind].keys()
    found = derived(kind, expected)
    for name, cases in found.items():
        assert cases.keys() == expected[name].keys(), name
        for case, numbers in cases.items():
            claim, *sizes = expected[name][case]
            last_bits = [0.0, *(bit for v in sizes[::2] for bit in (0.0, math.ulp(v)))]
            wanted = [
                pytest.approx(number, rel=TOLERANCE[kind], abs=bit)
                for number, bit in zip((claim, *sizes), last_bits, strict=True)
            ]
            assert numbers == wanted, f"{name}, {case}"
