"""Sampling units of rollouts: those that share a prompt depend on each other and are one unit.

Groups of GRPO share a prompt: eight samples after one prompt say less than eight prompts. A slice
that selects some rollouts of a prompt has a unit of those alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kcdsl_backends.empirical.measured import Array, Run, Unit
from kcdsl_backends.empirical.metrics.columns import Unmeasured
from kcdsl_backends.empirical.metrics.measures import MAGNITUDES
from kcdsl_backends.empirical.rollouts.measuring import measure_rollout, served
from kcdsl_backends.empirical.rollouts.record import Rollout
from kcdsl_backends.requests import Request

_OF_PROMPTS = frozenset(MAGNITUDES) - {"adv_weighted_bias"}
"""Paired differences: a prompt has one value, the mean of its rollouts."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one prompt that a slice selects: a request as the evaluator knows them."""

    request: Request
    members: tuple[Rollout, ...]


def groups_of(
    file: str, rollouts: Sequence[Rollout], chosen: Sequence[Rollout]
) -> tuple[Group, ...]:
    """Return the units of the chosen rollouts, in the order in which they come first.

    A unit is called by its file and its prompt or group; one that lacks rollouts of the file is
    called by those that it has.
    """
    whole: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        whole.setdefault(rollout.unit, []).append(rollout)
    inside: dict[str, list[Rollout]] = {}
    for rollout in chosen:
        inside.setdefault(rollout.unit, []).append(rollout)
    return tuple(_group(file, members, whole[name]) for name, members in inside.items())


def _group(file: str, members: Sequence[Rollout], whole: Sequence[Rollout]) -> Group:
    first = members[0]
    name = f"group {first.group}" if first.group is not None else first.key
    if len(members) != len(whole):
        keys = hashlib.sha256("\n".join(m.key for m in members).encode()).hexdigest()[:12]
        name = f"{name} ({len(members)} of {len(whole)}: {keys})"
    tokens = first.prompt + tuple(t for m in members for t in m.tokens)
    shared = {
        key: value
        for key, value in first.fields.items()
        if not key.startswith("role:") and all(m.fields.get(key) == value for m in members)
    }
    shared["rollouts"] = Fraction(len(members))
    line = int(first.place.rsplit(" ", 1)[-1]) if first.place else 0
    return Group(Request(f"{file}:{name}", name, tokens, shared, line), tuple(members))


def run_of(group: Group, metrics: Collection[str], seed: int) -> Run:
    """Return what a unit gives of the metrics: the arrays of its rollouts, one after the other."""
    key, tokens = group.request.key, sum(m.counted for m in group.members)
    digests = _digests(group)
    deltas = [d for m in group.members if (d := m.delta()) is not None]
    nonfinite = sum(int(np.count_nonzero(~np.isfinite(d))) for d in deltas)
    if nonfinite:
        failure = f"{nonfinite} of its ln-ratios are not finite"
        return Run(Unit(key, tokens, failure=failure), seed, digests, nonfinite)
    try:
        parts = [measure_rollout(m, metrics) for m in group.members]
    except Unmeasured as error:
        return Run(Unit(key, tokens, failure=str(error)), seed, digests, 0)
    names = dict.fromkeys(name for part in parts for name in part)
    values = {name: _joined(name, [p[name] for p in parts if name in p]) for name in names}
    return Run(Unit(key, tokens, values), seed, digests, 0)


def _joined(name: str, parts: Sequence[Array]) -> Array:
    every = np.concatenate(parts)
    return np.array([every.mean()]) if name in _OF_PROMPTS else every


def timed(group: Group) -> list[Unit]:
    """Return one timed run for each rollout with stamps.

    Raises Unmeasured for stamps that do not ascend.
    """
    return [
        Unit(group.request.key, len(m.tokens), served(m))
        for m in group.members
        if "arrived" in m.numbers and "stamps" in m.arrays and m.tokens
    ]


def _digests(group: Group) -> dict[str, str]:
    """Return the sha256 of what the verdicts rest on, so that a replay can be held against it."""
    found: dict[str, str] = {}
    logs: Mapping[str, list[bytes]] = {
        "train.logs": [m.train.logs.tobytes() for m in group.members if m.train is not None],
        "infer.logs": [m.infer.logs.tobytes() for m in group.members if m.infer is not None],
        "tokens": [np.array(m.tokens, dtype=np.int64).tobytes() for m in group.members],
        "mask": [m.mask.tobytes() for m in group.members],
    }
    for name, parts in logs.items():
        if parts:
            found[name] = hashlib.sha256(b"".join(parts)).hexdigest()
    return found
