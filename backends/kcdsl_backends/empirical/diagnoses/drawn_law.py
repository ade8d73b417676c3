"""Test whether tokens were drawn from the law that their ln-probabilities state.

Greedy decoding, an unstated filter, and a temperature on the draws alone do not change the stated
ln-probabilities; only the tokens show them.

For any law a_t that is known before token t is drawn, the product of a_t(y_t) / q_t(y_t) has the
mean 1 where y_t is drawn from q_t, however far the training kernel is from q: it is an e-value, and
beyond 1/α with a probability of at most α (Ville's inequality). Here a_t is the law of sampling
from the training kernel's logits under another setting, and the e-value is the mean over settings.
Without whole policies, filters and temperatures on a side's list of its likeliest tokens give such
laws; tokens outside the list keep their probabilities, or have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import not_applicable, outcome
from kcdsl_backends.empirical.sources.rollouts.record import Array, Law, Policy, Rollout, Side

FALSE_ALARMS = 1e-6
"""Largest probability that tokens of the stated law are rejected."""
MIXTURE = 1e-3
"""Share of the training kernel's own law in each other law, so that a token which rounding moves
out of a filter does not rule the filter out."""
_TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
LAWS = (
    *(Law(t) for t in _TEMPERATURES),
    *(Law(top_k=k) for k in (1, 2, 4, 8, 20, 40, 50, 100)),
    *(Law(top_p=p) for p in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)),
    *(Law(min_p=p) for p in (0.02, 0.05, 0.1)),
)
"""The other laws; their temperatures multiply the stated one."""


def drawn_law(name: str, policies: Sequence[Policy], stated: float) -> Precheck:
    """Test whether the tokens are samples of the whole law at temperature `stated`; the value is
    the estimated temperature of the draws."""
    tokens = sum(len(p.tokens) for p in policies)
    if tokens == 0:
        return not_applicable(name, "no token was drawn")
    gains = torch.zeros(len(LAWS), dtype=torch.float64)
    for policy in policies:
        gains += log_factors(policy, stated)
    return law_outcome(name, gains, tokens, stated)


def law_outcome(name: str, gains: Tensor, tokens: int, stated: float) -> Precheck:
    """Return whether `tokens` tokens are samples of the stated law; `gains` are the sums of ln a(y)
    - ln q(y) for each of `LAWS`."""
    evidence = float(gains.logsumexp(0)) - math.log(len(LAWS))
    best = int(gains.argmax())
    good = not evidence > -math.log(FALSE_ALARMS)
    law = LAWS[best]
    shown = f"greedy decoding or {law.filters}" if law.top_k == 1 else law.filters
    setting = shown or f"a temperature of {law.temperature * stated:.3g}"
    said = "as samples of the law that is stated" if good else f"by {setting}, not as stated"
    detail = f"{tokens} tokens were drawn {said} (ln e-value {evidence:+.3g})"
    return outcome(name, good, detail, stated if good else law.temperature * stated)


def log_factors(policy: Policy, stated: float) -> Tensor:
    """Return the sum of ln a(y) - ln q(y) for each of the other laws [laws], float64."""
    at = policy.tokens[:, None]
    logits = policy.logits / stated
    own = torch.log_softmax(logits, -1)
    ordered, places = own.sort(-1, descending=True)
    shares = ordered.exp()
    rank = (places == at).to(torch.int64).argmax(-1, keepdim=True)
    plain = own.gather(-1, at)[:, 0]
    found = []
    for law in LAWS:
        if law.temperature != 1:
            other = torch.log_softmax(logits / law.temperature, -1).gather(-1, at)[:, 0]
        else:
            other = _cut(law, ordered, shares, rank, plain)
        mixed = torch.logaddexp(other + math.log1p(-MIXTURE), plain + math.log(MIXTURE))
        found.append((mixed - policy.infer_logs).sum())
    return torch.stack(found)


def _cut(law: Law, ordered: Tensor, shares: Tensor, rank: Tensor, plain: Tensor) -> Tensor:
    """Return ln-probabilities [n] of the tokens under a filter; -inf for those that it cuts off."""
    if law.top_k:
        kept = torch.full_like(rank, law.top_k)
    elif law.top_p < 1:
        kept = (shares.cumsum(-1) - shares < law.top_p).sum(-1, keepdim=True)
    else:
        kept = (ordered >= ordered[:, :1] + math.log(law.min_p)).sum(-1, keepdim=True)
    kept = kept.clamp(max=shares.shape[1])
    mass = shares.cumsum(-1).gather(-1, kept - 1)[:, 0]
    inside = (rank < kept)[:, 0]
    return torch.where(inside, plain - mass.log(), torch.full_like(plain, -math.inf))


# --- lists of the likeliest tokens ----------------------------------------------------------------


def listed_law(name: str, rollouts: Sequence[Rollout], stated: float) -> Precheck:
    """Test whether tokens are samples of the law of the inference side's values, at temperature
    `stated`, on rollouts where that side lists its likeliest tokens."""
    gains, tokens = np.zeros(len(LAWS)), 0
    for rollout in rollouts:
        if rollout.infer is not None and rollout.infer.top is not None and rollout.counted:
            found = log_factors_of_list(rollout, rollout.infer)
            gains += found.sum(axis=1)
            tokens += found.shape[1]
    if tokens == 0:
        return not_applicable(name, "no side lists its likeliest tokens")
    return law_outcome(name, torch.from_numpy(gains), tokens, stated)


def log_factors_of_list(rollout: Rollout, side: Side) -> Array:
    """Return ln a(y) - ln q(y) [laws, n] of the counted tokens under each of the other laws."""
    assert side.top is not None
    depth = side.top.likeliest
    rows = rollout.mask & np.isfinite(side.logs)
    own = side.logs[rows]
    logs = side.top.logs[rows, :depth]
    here = side.top.ids[rows, :depth] == np.array(rollout.tokens, np.int64)[rows, None]
    rank = np.where(here.any(axis=1), here.argmax(axis=1), depth)
    found = []
    for law in LAWS:
        other = (
            _listed_tempered(law, logs, rank, own)
            if law.temperature != 1
            else _listed_cut(law, logs, rank)
        )
        mixed = np.logaddexp(other + math.log1p(-MIXTURE), own + math.log(MIXTURE))
        found.append(mixed - own)
    return np.array(found)


def _listed_tempered(law: Law, logs: Array, rank: Array, own: Array) -> Array:
    """Return ln-probabilities [n] with the mass of the list spread at a temperature."""
    scaled = logs / law.temperature
    mass = np.logaddexp.reduce(logs, axis=1) - np.logaddexp.reduce(scaled, axis=1)
    inside = rank < logs.shape[1]
    place = np.minimum(rank, logs.shape[1] - 1)[:, None]
    listed = np.take_along_axis(scaled, place, axis=1)[:, 0] + mass
    return np.where(inside, listed, own)


def _listed_cut(law: Law, logs: Array, rank: Array) -> Array:
    """Return ln-probabilities [n] under a filter of the list, -inf for tokens that it cuts off."""
    shares = np.exp(logs)
    before = np.cumsum(shares, axis=1) - shares
    if law.top_k:
        kept = np.broadcast_to(np.arange(logs.shape[1]) < law.top_k, logs.shape)
    elif law.top_p < 1:
        kept = before < law.top_p
    else:
        kept = logs >= logs[:, :1] + math.log(law.min_p)
    mass = np.log(np.where(kept, shares, 0.0).sum(axis=1))
    place = np.minimum(rank, logs.shape[1] - 1)[:, None]
    inside = (rank < logs.shape[1]) & np.take_along_axis(kept, place, axis=1)[:, 0]
    listed = np.take_along_axis(logs, place, axis=1)[:, 0]
    return np.where(inside, listed - mass, -np.inf)
