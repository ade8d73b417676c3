"""The cases of a grid that belong to the first tier."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests.support.grids import by_turns

AXES: dict[str, Any] = {
    "rule": "abcde",
    "pair": [(1, 2), (3, 4), (5, 6)],
    "alpha": [None, 0.5],
    "radius": range(3),
}


def test_first_tier_covers_every_pair_of_values() -> None:
    names, cases = by_turns(**AXES).args
    assert list(names) == list(AXES)
    assert [case.values for case in cases] == list(product(*AXES.values()))
    assert len({case.id for case in cases}) == len(cases)
    fast = [case.values for case in cases if not case.marks]
    assert len(fast) * 3 == len(cases)
    for one, other in combinations(range(len(AXES)), 2):
        every = product(*(list(AXES.values())[place] for place in (one, other)))
        assert {(values[one], values[other]) for values in fast} == set(every)


def test_first_tier_with_one_of_covers_every_value() -> None:
    _, cases = by_turns(one_of=2, rule="abc", pair="xyz").args
    fast = ["".join(case.values) for case in cases if not case.marks]
    assert fast == ["ax", "az", "by", "cx", "cz"]
    _, cases = by_turns(one_of=2, whole="b", rule="abc", pair="xyz").args
    fast = ["".join(case.values) for case in cases if not case.marks]
    assert fast == ["ax", "az", "bx", "by", "bz", "cx", "cz"]
    with pytest.raises(AssertionError, match="never be there"):
        by_turns(one_of=2, rule="abc", pair="x")


def test_grid_that_misses_pairs_is_refused() -> None:
    with pytest.raises(AssertionError, match="never meet"):
        by_turns(name="ab", radius=range(2))
