"""Recordings whose rows are not what they seem: cloned, copied from the other side, or stale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import not_applicable, outcome
from kcdsl_backends.empirical.sources.rollouts.record import Rollout

_BY_CHANCE = -20.0
"""ln of the probability above which equal samples after one prompt may be chance."""
_FEWEST = 16
"""Tokens from which on equal bits on both sides are no chance."""


def cloned(rollouts: Sequence[Rollout]) -> Precheck:
    """Samples after one prompt must differ where their probability is small.

    Equal ones come of a seed that was given to every member of a group, or of rows that were
    written twice; they are no samples, and counting them overstates what is known.
    """
    name = "cloned_rollouts"
    drawn = [r for r in rollouts if r.tokens]
    if not drawn:
        return not_applicable(name, "the recording holds no sampled tokens")
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], Rollout] = {}
    clones: list[tuple[Rollout, Rollout]] = []
    for r in drawn:
        first = seen.setdefault((r.prompt, r.tokens), r)
        if first is not r and _chance(r) < _BY_CHANCE:
            clones.append((first, r))
    if not clones:
        return outcome(name, True, f"{len(drawn)} rollouts, none written twice", 0.0)
    one, two = clones[0]
    same = one.unit == two.unit
    where = "of one group" if same else "of different groups"
    detail = (
        f"{len(clones)} of {len(drawn)} rollouts equal an earlier one, which chance does not do: "
        f"{two.place} ({two.key}) is {one.place} ({one.key}), {where}"
    )
    return outcome(name, False, detail, len(clones) / len(drawn), blocking=True)


def _chance(rollout: Rollout) -> float:
    """Return ln of the probability of sampling these tokens; 0 where it is not known."""
    if rollout.infer is None:
        return 0.0 if len(rollout.tokens) < _FEWEST else -math.inf
    logs = rollout.infer.logs
    return float(logs[np.isfinite(logs)].sum())


def copied(rollouts: Sequence[Rollout], recomputed: bool) -> Precheck:
    """Recorded sides must not be one array written twice, as trainers do that skip recomputing: not
    in every rollout, and not in most of them.

    `recomputed` says that the contract states otherwise: then equal bits are a result.
    """
    name = "copied_side"
    both = [r for r in rollouts if r.train is not None and r.infer is not None and r.counted]
    tokens = sum(r.counted for r in both)
    if tokens < _FEWEST:
        return not_applicable(name, "too few tokens with ln-probabilities of both sides")
    alike = [r for r in both if not bool(np.any(r.delta()))]
    equal = sum(r.counted for r in alike)
    if len(alike) < len(both) and (2 * equal < tokens or equal < _FEWEST):
        detail = f"{tokens} tokens, both sides differ in {len(both) - len(alike)} rollouts"
        return outcome(name, True, detail, equal / tokens)
    shown = f"all {tokens}" if equal == tokens else f"{equal} of {tokens}"
    if recomputed:
        detail = f"{shown} tokens are in rollouts with equal bits, stated as recomputed"
        return outcome(name, True, detail, equal / tokens)
    detail = (
        f"{shown} tokens are in rollouts with equal bits on both sides: a trainer that skips"
        " recomputing copies one column (verl: bypass_mode); state `recomputed: true` if the"
        " training kernel ran"
    )
    return outcome(name, False, detail, equal / tokens, blocking=True)


def certain(rollouts: Sequence[Rollout]) -> str | None:
    """Return why tokens that all have the probability 1 were not drawn: greedy decoding gives such
    values. None where some token could have been another one."""
    logs = [r.infer.logs[r.mask] for r in rollouts if r.infer is not None]
    tokens = sum(part.size for part in logs)
    if tokens < _FEWEST or any(bool(np.any(part)) for part in logs):
        return None
    return (
        f"the inference kernel gives each of {tokens} tokens the probability 1, as greedy decoding"
        " does: nothing was drawn, and no other law is seen"
    )


def stale(rollouts: Sequence[Rollout]) -> Precheck:
    """Both sides must be of one version of the policy, the same for all tokens of a rollout."""
    name = "stale_policy"
    known = [r for r in rollouts if "role:infer_version" in r.fields]
    if not known:
        return not_applicable(name, "no column names the version of the policy")
    late, torn = [], []
    for r in known:
        sampled = _version(r.fields["role:infer_version"])
        trained = _version(r.fields.get("role:train_version", sampled))
        last = _version(r.fields.get("role:infer_version_last", sampled))
        if trained != sampled:
            late.append((r, f"sampled by {sampled}, scored by {trained}"))
        elif last != sampled:
            torn.append((r, f"sampled by {sampled} to {last}"))
    found = late + torn
    if not found:
        return outcome(name, True, f"{len(known)} rollouts of one version each", 0.0)
    rollout, what = found[0]
    detail = f"{len(found)} of {len(known)} rollouts: {rollout.place} ({rollout.key}) was {what}"
    return outcome(name, False, detail, len(found) / len(known), blocking=True)


def _version(value: object) -> str:
    """Return a version as text; 3, 3.0 and "3" are one."""
    text = str(value)
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:g}" if math.isfinite(number) and abs(number) < 1e15 else text
