"""Prompts as sampling units of rollouts, and their scores by the training kernel.

Rollouts of one prompt, as in groups of GRPO, are not independent, so they are one unit. A slice
that selects some of them has a unit of those alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl_backends.empirical.metrics.measures import MAGNITUDES
from kcdsl_backends.empirical.sources.kernels import Kernel
from kcdsl_backends.empirical.sources.rollouts.kept import kept_of, restricted_logits
from kcdsl_backends.empirical.sources.rollouts.measures import measure_rollout, served
from kcdsl_backends.empirical.sources.rollouts.record import (
    Policy,
    Rollout,
    Semantics,
    Side,
    TopLogs,
)
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from kcdsl_backends.empirical.table.evidence import Array, RequestRun, SamplingUnit
from kcdsl_backends.requests import Request

_OF_PROMPTS = frozenset(MAGNITUDES) - {"adv_weighted_bias"}
"""Paired differences, of which a prompt has one value: the mean of its rollouts."""


@dataclass(frozen=True, slots=True)
class PromptRollouts:
    """The rollouts of one prompt that a slice selects, with the request that stands for them."""

    request: Request
    members: tuple[Rollout, ...]


def groups_of(
    file: str, rollouts: Sequence[Rollout], chosen: Sequence[Rollout]
) -> tuple[PromptRollouts, ...]:
    """Return the units of the chosen rollouts, in the order in which they come first.

    The name of a unit has its file and its prompt or group and, if the slice does not select all of
    its rollouts, a digest of the selected ones.
    """
    whole: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        whole.setdefault(rollout.unit, []).append(rollout)
    inside: dict[str, list[Rollout]] = {}
    for rollout in chosen:
        inside.setdefault(rollout.unit, []).append(rollout)
    return tuple(_group(file, members, whole[name]) for name, members in inside.items())


def _group(file: str, members: Sequence[Rollout], whole: Sequence[Rollout]) -> PromptRollouts:
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
    request = Request(f"{file}:{name}", name, tokens, shared, first.row)
    return PromptRollouts(request, tuple(members))


def run_of(group: PromptRollouts, metrics: Collection[str], seed: int) -> RequestRun:
    """Return the values of the metrics of a unit: the concatenated arrays of its rollouts.

    A metric that one of its rollouts lacks, such as one of lists that a server left out, has none.
    """
    key, tokens = group.request.key, sum(m.counted for m in group.members)
    digests = _digests(group)
    deltas = [d for m in group.members if (d := m.delta()) is not None]
    nonfinite = sum(int(np.count_nonzero(~np.isfinite(d))) for d in deltas)
    if nonfinite:
        failure = f"{nonfinite} of its ln-ratios are not finite"
        return RequestRun(SamplingUnit(key, tokens, failure=failure), seed, digests, nonfinite)
    try:
        parts = [measure_rollout(m, metrics) for m in group.members]
    except NotMeasurable as error:
        return RequestRun(SamplingUnit(key, tokens, failure=str(error)), seed, digests, 0)
    names = dict.fromkeys(name for part in parts for name in part)
    problems = {
        name: f"its rollout of {member.place or member.key} has no value"
        for member, part in zip(group.members, parts, strict=True)
        for name in names
        if member.counted and name not in part
    }
    values = {
        name: _joined(name, [p[name] for p in parts if name in p])
        for name in names
        if name not in problems
    }
    unit = SamplingUnit(key, tokens, values, problems=problems)
    return RequestRun(unit, seed, digests, 0)


def _joined(name: str, parts: Sequence[Array]) -> Array:
    every = np.concatenate(parts)
    return np.array([every.mean()]) if name in _OF_PROMPTS else every


def timed(group: PromptRollouts) -> list[SamplingUnit]:
    """Return one timed run for each rollout with stamps.

    Raises NotMeasurable for stamps that do not ascend.
    """
    return [
        SamplingUnit(group.request.key, m.counted, served(m))
        for m in group.members
        if "arrived" in m.numbers and "stamps" in m.arrays and m.counted
    ]


def _digests(group: PromptRollouts) -> dict[str, str]:
    """Return the sha256 of the arrays on which verdicts depend, to compare replays with them."""
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


# --- scoring -------------------------------------------------------------------------------------


_KEPT = 2**22
"""Number of logits that are kept for diagnoses, over all rollouts."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Rollouts with both sides, and whole policies of some positions for diagnoses."""

    rollouts: tuple[Rollout, ...]
    policies: tuple[Policy, ...]


def score(
    rollouts: Sequence[Rollout],
    kernel: Kernel,
    temperature: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    law: Semantics | None = None,
) -> Scored:
    """Run the training kernel on prompt and sampled tokens, and read its policy at temperature T.

    If the inference side lists its likeliest tokens, the training kernel's likeliest tokens and its
    ln-probabilities of the listed ones are read too. With a truncating `law`, the policy is
    restricted to the tokens that the sampler kept. Raises Refusal for a rollout without a prompt,
    whose first token has no policy.
    """
    found: list[Rollout] = []
    policies: list[Policy] = []
    kept = 0
    for done, rollout in enumerate(rollouts, 1):
        logits = _logits(rollout, kernel)
        sets = None if law is None else kept_of(rollout)
        if sets is not None:
            logits = restricted_logits(logits, sets)
        logs = torch.log_softmax(logits / temperature, dim=-1)
        tokens = torch.tensor(rollout.tokens, dtype=torch.int64)
        own = logs.gather(-1, tokens[:, None])[:, 0].numpy()
        top = _top(logs, rollout)
        side = Side(own, law or Semantics("processed", temperature), top)
        found.append(replace(rollout, train=side))
        if kept < _KEPT and rollout.infer is not None:
            rows = np.flatnonzero(rollout.mask)[: max(1, (_KEPT - kept) // logits.shape[1])]
            at = torch.from_numpy(rows)
            infer_logs = torch.from_numpy(rollout.infer.logs[rows])
            policies.append(Policy(rollout.key, logits[at], tokens[at], infer_logs))
            kept += policies[-1].logits.numel()
        progress(done, len(rollouts))
    return Scored(tuple(found), tuple(policies))


def _logits(rollout: Rollout, kernel: Kernel) -> Tensor:
    """Return the logits [L, V], float64, that the sampled tokens were drawn from."""
    before, length = len(rollout.prompt), len(rollout.tokens)
    if before == 0:
        raise refuse(
            codes.MALFORMED_ROLLOUT,
            f"{rollout.place}: without a prompt nothing precedes the first sampled token, so the "
            "training kernel cannot score it",
            help="record the prompt; where there is none, the token that begins every text",
        )
    with torch.no_grad():
        whole = kernel.logits(rollout.prompt + rollout.tokens)
    return whole[before - 1 : before - 1 + length].to("cpu", torch.float64)


def _top(logs: Tensor, rollout: Rollout) -> TopLogs | None:
    """Return the likeliest tokens of the training kernel, followed by those that only the inference
    side lists."""
    if rollout.infer is None or rollout.infer.top is None or not rollout.tokens:
        return None
    infer_ids = torch.from_numpy(rollout.infer.top.ids)
    depth = infer_ids.shape[1]
    order = torch.sort(logs, dim=-1, descending=True, stable=True).indices
    own = order[:, :depth]
    # a prefix of our order that holds all tokens of the other side
    place = torch.empty_like(order)
    place.scatter_(-1, order, torch.arange(order.shape[1]).expand_as(order))
    prefix = int(place.gather(-1, infer_ids).max()) + 1
    if prefix <= depth:
        ids = own
    else:
        wanted = torch.zeros_like(order, dtype=torch.bool)
        wanted.scatter_(-1, own, True)
        wanted.scatter_(-1, infer_ids, True)
        ranked = torch.where(wanted, place, order.shape[1])
        count = int(wanted.sum(-1).max())
        ids = ranked.argsort(dim=-1, stable=True)[:, :count]  # shorter lists: other tokens follow
    return TopLogs(ids.numpy(), logs.gather(-1, ids).numpy(), depth)
