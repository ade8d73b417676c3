"""Grids of test cases with a rule that assigns some of them to the first tier."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import product
from typing import Any

import pytest

LATER = pytest.mark.full
"""Mark of a case that the first tier leaves out."""


def by_turns(
    *,
    one_of: int = 0,
    whole: Container[Any] = (),
    indirect: Sequence[str] = (),
    **axes: Iterable[Any],
) -> pytest.MarkDecorator:
    """Parametrise a test by every combination of some axes, those of `indirect` as fixtures.

    One of every `one_of` combinations, in order along every axis, belongs to the first tier; the
    others belong to the second. By default `one_of` is the number of values of the last axis: the
    other axes are crossed completely, and the values of the last one alternate. Each value of an
    axis then meets each value of every other axis, provided that two of the axes before the last
    are no shorter than it. With `one_of`, each value meets every `one_of`-th value of the other
    axes. Where the value of the first axis is one of `whole`, all combinations belong to the first
    tier.
    """
    names, values = list(axes), [list(axis) for axis in axes.values()]
    turns = one_of or len(values[-1])
    if one_of:
        assert all(len(axis) >= turns for axis in values), "some values would never be there"
    else:
        assert sum(len(axis) >= turns for axis in values[:-1]) >= 2, "some values would never meet"
    cases = [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=()
            if (sum(places[:-1]) - places[-1]) % turns == 0 or values[0][places[0]] in whole
            else LATER,
            id="-".join(_name(axis[place]) for axis, place in zip(values, places, strict=True)),
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(names, cases, indirect=indirect)


def _name(value: object) -> str:
    return "/".join(map(_name, value)) if isinstance(value, tuple) else str(value)
