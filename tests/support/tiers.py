"""The two tiers of the test suite, and the choice of cases of a large test for the first one.

`@pytest.mark.full` moves a test to the second tier. `@pytest.mark.sample(n)` leaves about n cases
of a parametrised test in the first tier and moves the others. `make test` runs the first tier in
minutes, `make test-full` both; `make mutants` compares which defects they find.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

LATER = ("full", "slow", "gpu", "programs")
"""Marks of tests outside the first tier."""

Case = tuple[tuple[str, Any], ...]
"""The parameters of a case: names and values."""


def covering(cases: Sequence[Case], count: int) -> list[int]:
    """Return the indices of at most `count` cases that cover many values and pairs of values.

    Each step chooses the case with the most values that no chosen case has, then the most pairs of
    values, then the first. Values are compared by identity.
    """
    singles = [{(name, id(value)) for name, value in case} for case in cases]
    pairs = [set(combinations(sorted(each), 2)) for each in singles]
    left = list(range(len(cases)))
    seen: set[Any] = set()
    met: set[Any] = set()
    chosen: list[int] = []
    while left and len(chosen) < count:
        best = max(left, key=lambda k: (len(singles[k] - seen), len(pairs[k] - met), -k))
        left.remove(best)
        chosen.append(best)
        seen |= singles[best]
        met |= pairs[best]
    return sorted(chosen)


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that are not sampled with `full`."""
    sampled: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not any(map(item.get_closest_marker, LATER)):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for group in sampled.values():
        marker = group[0].get_closest_marker("sample")
        assert marker is not None
        (count,) = marker.args
        kept = covering([_case(item) for item in group], count)
        for place in set(range(len(group))) - set(kept):
            group[place].add_marker(pytest.mark.full)


def _case(item: pytest.Item) -> Case:
    params: dict[str, Any] = getattr(item, "callspec").params  # noqa: B009
    return tuple(params.items())
