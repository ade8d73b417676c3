"""The noise floor: how far the training kernel is from itself when a request is batched otherwise.

The same tokens run alone, in a batch, in the other order and padded behind. Their drift from the
run alone, by the metrics of the contract, is noise that no inference kernel can undercut: a
threshold below it asks the inference kernel to be nearer to the training kernel than that is to
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.empirical.diagnoses.batching import regrouped
from kcdsl_backends.empirical.measured import Unit
from kcdsl_backends.empirical.run import Kernel, Plan, compared
from kcdsl_backends.requests import Request

REQUESTS = 8
"""Requests that are regrouped, each with the next one: the longest."""
_OF_FORMATS = frozenset({"ulp_max"})
"""Metrics of the format of the logits, which are widened here."""


def noise_floor(
    train: Kernel,
    requests: Sequence[Request],
    plan: Plan,
    progress: Callable[[int, int], None],
) -> dict[str, Unit]:
    """Return the drift of the training kernel from itself, by request and metric.

    The values of a request are those of all its regroupings, one after the other. Requests that
    cannot be batched have none, and where none can the result is empty.
    """
    longest = sorted(requests, key=lambda r: (-r.length, r.key))[:REQUESTS]
    chosen = [request for request in longest if request.length >= 2]
    forward = train.hidden if plan.encoder else train.logits
    found: dict[str, Unit] = {}
    for done, request in enumerate(chosen if len(chosen) > 1 else (), 1):
        other = chosen[done % len(chosen)]
        moved = regrouped((request, other), forward, padding=not plan.encoder)
        if moved is not None:
            found[request.key] = _unit(request, *moved, plan)
        progress(done, len(chosen))
    return found


def _unit(request: Request, alone: Tensor, others: Mapping[str, Tensor], plan: Plan) -> Unit:
    part = replace(request, tokens=request.tokens[: alone.shape[0]])
    with torch.no_grad():
        parts = [compared(part, alone, rows, plan) for rows in others.values()]
    names = parts[0].keys() - _OF_FORMATS
    values = {name: np.concatenate([part[name] for part in parts]) for name in sorted(names)}
    return Unit(request.key, part.length, values)
