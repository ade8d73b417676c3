"""Requests with the same tokens as one sampling unit, since copies of a request are dependent.

A census is about all rows of a file, copies included. A sample is about their population, and its
limits count independent units: a prompt counts once, with all values of its rows, and with one of
its timed runs. Runs of one prompt take about the same time, so that single runs are not
independent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData

_EMPTY: tuple[object, ...] = (None, "", [], {})
"""The values of a trace record that count as missing (`judgement.has_fields`)."""


def repeated(prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return the positions of each prompt, in the order of their first positions."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, tokens in enumerate(prompts):
        places.setdefault(tokens, []).append(place)
    return list(places.values())


def by_prompt(data: SliceData, prompts: Sequence[tuple[int, ...]]) -> SliceData:
    """Return the data of a slice with a unit for each prompt; `prompts` are those of its requests.

    A unit of several requests has their concatenated values and their timed runs. It failed if one
    of them did, and lacks a value that one of them lacks.
    """
    groups = repeated(prompts)
    if len(groups) == len(data.requests):
        return with_drawn_runs(data)
    keys = [[data.requests[i].key for i in own] for own in groups]
    unit_of = {key: min(own) for own in keys for key in own}
    return replace(
        with_drawn_runs(
            replace(data, runs=tuple(replace(run, key=unit_of[run.key]) for run in data.runs))
        ),
        requests=tuple(_unit([data.requests[i] for i in own]) for own in groups),
        records=tuple(_record([data.records[i] for i in own]) for own in groups)
        if data.records
        else (),
    )


def with_drawn_runs(data: SliceData) -> SliceData:
    """Return the data of a slice with one timed run of each unit, chosen by a hash of its key.

    A drawn run is beyond a threshold with the probability that a run of a random request is, and
    units are independent, so their number beyond is binomial. The drawn run lacks a metric that one
    run of the unit lacks or has no finite value of.
    """
    if data.drawn is not None or not data.runs:
        return data
    return replace(data, drawn=tuple(_drawn(members) for members in by_request(data.runs)))


def by_request(runs: Sequence[SamplingUnit]) -> tuple[tuple[SamplingUnit, ...], ...]:
    """Return the timed runs of each request, in the order of the first runs."""
    own: dict[str, list[SamplingUnit]] = {}
    for run in runs:
        own.setdefault(run.key, []).append(run)
    return tuple(map(tuple, own.values()))


def _drawn(members: Sequence[SamplingUnit]) -> SamplingUnit:
    number = int.from_bytes(hashlib.sha256(members[0].key.encode()).digest()[:8], "big")
    chosen = members[number % len(members)]

    def value(name: str) -> NDArray[np.float64]:
        every = [m.values.get(name) for m in members]
        whole = all(one is not None and bool(np.isfinite(one).all()) for one in every)
        return chosen.values[name] if whole else np.array([math.nan])

    return replace(
        chosen,
        values={name: value(name) for name in chosen.values},
        failure=next((m.failure for m in members if m.failure is not None), None),
        problems={name: why for m in members for name, why in m.problems.items()},
    )


def _unit(members: Sequence[SamplingUnit]) -> SamplingUnit:
    first = members[0]
    if len(members) == 1:
        return first
    shared = [name for name in first.values if all(name in m.values for m in members)]
    return SamplingUnit(
        min(m.key for m in members),  # independent of the order of the file
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
