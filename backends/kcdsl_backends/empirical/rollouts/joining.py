"""Groups of rollouts, joined where their rows have one prompt.

A prompt that was drawn once says once how far the kernels are apart after it, whatever rows of it
are called: a name for each row must not make a unit of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kcdsl_backends.empirical.rollouts.record import Rollout


def joined(rollouts: Sequence[Rollout]) -> tuple[tuple[Rollout, ...], int]:
    """Return the rollouts with groups that share no prompt, and how many groups went into another.

    Those that are joined, also by way of a third, take the name of one of them. Rollouts without a
    group, and those without a prompt, stay as they are.
    """
    into: dict[str, str] = {}

    def first(name: str) -> str:
        while into.setdefault(name, name) != name:
            into[name] = name = into[into[name]]
        return name

    seen: dict[tuple[int, ...], str] = {}
    for rollout in rollouts:
        if rollout.group is None:
            continue
        own = first(rollout.group)
        if rollout.prompt:
            into[own] = first(seen.setdefault(rollout.prompt, own))
    found = tuple(r if r.group is None else replace(r, group=first(r.group)) for r in rollouts)
    return found, sum(name != first(name) for name in list(into))
