"""Grids of cases of which the first tier takes some, by a rule that leaves no kind of case out."""

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

    Of these combinations, in their order along every axis, one of `one_of` belongs to the first
    tier; the others come later. Without `one_of` these are as many as the last axis has values: all
    of the other axes are crossed whole, and the values of the last one take turns. Then each value
    of an axis meets each value of every other one, provided that two of the axes before the last
    are no shorter than it. With `one_of`, each value meets one of so many of every other axis.
    Where the value of the first axis is one of `whole`, all belong to the first tier.
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
