"""The checker derives for small proofs what was recorded, at every node.

A rule that loses a term gives a lower bound, which no proof with honest claims shows. Differences
between processors are in the last bits, of float32 where sums over rows are formed in it: relative
to bounds of coarse kernels they are far below the tolerance; bounds of float64 kernels consist of
last bits, of a few thousand of them. Where a bound is a few last bits of the value of its node,
one more or less is no loss of a term.
"""

from __future__ import annotations

import math

import pytest

from tests.support.recorded_bounds import PROOFS, derived, recorded

TOLERANCE = {"coarse": 1e-7, "fine": 1e-3}


PARTS = ("coarse", "faint", "fine")
"""Proofs of coarse kernels, of float64 kernels at faint inputs, and of these elsewhere."""


@pytest.mark.parametrize("part", PARTS)
def test_derived_bounds_are_those_recorded(part: str) -> None:
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
