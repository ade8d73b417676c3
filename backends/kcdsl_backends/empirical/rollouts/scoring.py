"""The training kernel scores recorded tokens: ln-probabilities of what the other side sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl_backends.empirical.rollouts.record import Rollout, Semantics, Side, TopLogs
from kcdsl_backends.empirical.run import Kernel

_KEPT = 2**22
"""Numbers of policies that are kept for diagnoses, over all rollouts."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The logits [n, V], float64, of the training kernel at counted positions of one rollout, with
    the sampled tokens [n] and what the inference kernel says of them [n]."""

    key: str
    logits: Tensor
    tokens: Tensor
    infer_logs: Tensor


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
) -> Scored:
    """Run the training kernel on prompt and sampled tokens, and read its policy at temperature T.

    Where the inference side lists its likeliest tokens, those of the training kernel and its
    ln-probabilities of the other side's are read too. Raises Refusal for a rollout without a
    prompt: nothing precedes its first token, so no policy gives it.
    """
    found: list[Rollout] = []
    policies: list[Policy] = []
    kept = 0
    for done, rollout in enumerate(rollouts, 1):
        logits = _logits(rollout, kernel)
        logs = torch.log_softmax(logits / temperature, dim=-1)
        tokens = torch.tensor(rollout.tokens, dtype=torch.int64)
        own = logs.gather(-1, tokens[:, None])[:, 0].numpy()
        top = _top(logs, rollout)
        side = Side(own, Semantics("processed", temperature), top)
        found.append(replace(rollout, train=side))
        if kept < _KEPT and rollout.infer is not None:
            rows = np.flatnonzero(rollout.mask)[: max(1, (_KEPT - kept) // logits.shape[1])]
            at = torch.from_numpy(rows)
            told = torch.from_numpy(rollout.infer.logs[rows])
            policies.append(Policy(rollout.key, logits[at], tokens[at], told))
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
    """Return the likeliest tokens of the training kernel, and after them those that only the other
    side lists."""
    if rollout.infer is None or rollout.infer.top is None or not rollout.tokens:
        return None
    theirs = torch.from_numpy(rollout.infer.top.ids)
    depth = theirs.shape[1]
    order = torch.sort(logs, dim=-1, descending=True, stable=True).indices
    own = order[:, :depth]
    # the other side's tokens, in our order, are read from a prefix of ours long enough for all
    place = torch.empty_like(order)
    place.scatter_(-1, order, torch.arange(order.shape[1]).expand_as(order))
    reach = int(place.gather(-1, theirs).max()) + 1
    if reach <= depth:
        ids = own
    else:
        wanted = torch.zeros_like(order, dtype=torch.bool)
        wanted.scatter_(-1, own, True)
        wanted.scatter_(-1, theirs, True)
        ranked = torch.where(wanted, place, order.shape[1])
        count = int(wanted.sum(-1).max())
        ids = ranked.argsort(dim=-1, stable=True)[:, :count]  # shorter lists: other tokens follow
    return TopLogs(ids.numpy(), logs.gather(-1, ids).numpy(), depth)
