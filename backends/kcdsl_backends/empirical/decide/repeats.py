"""Requests with the same tokens as one sampling unit: a copy of a request shows nothing more.

A census is about the rows of a file, whatever they repeat. A sample is about what they were drawn
from, and its limits count independent units: a prompt counts once, with all values of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData

_EMPTY: tuple[object, ...] = (None, "", [], {})
"""What a trace record has where a field is missing (`judgement.has_fields`)."""


def repeated(prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return the places of each prompt, in the order in which the prompts come first."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, tokens in enumerate(prompts):
        places.setdefault(tokens, []).append(place)
    return list(places.values())


def by_prompt(data: SliceData, prompts: Sequence[tuple[int, ...]]) -> SliceData:
    """Return the data of a slice with a unit for each prompt; `prompts` are those of its requests.

    A unit of several requests has the values of all, one after the other. It failed where one of
    them did, and lacks what one of them lacks.
    """
    groups = repeated(prompts)
    if len(groups) == len(data.requests):
        return data
    return replace(
        data,
        requests=tuple(_unit([data.requests[i] for i in own]) for own in groups),
        records=tuple(_record([data.records[i] for i in own]) for own in groups)
        if data.records
        else (),
    )


def _unit(members: Sequence[SamplingUnit]) -> SamplingUnit:
    first = members[0]
    if len(members) == 1:
        return first
    shared = [name for name in first.values if all(name in m.values for m in members)]
    return SamplingUnit(
        min(m.key for m in members),  # the same in every order of the file
        sum(m.tokens for m in members),
        {name: np.concatenate([m.values[name] for m in members]) for name in shared},
        next((m.failure for m in members if m.failure is not None), None),
        {name: why for m in members for name, why in m.problems.items()},
    )


def _record(members: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    first = members[0]
    return {
        name: value if all(m.get(name) not in _EMPTY for m in members) else None
        for name, value in first.items()
    }
