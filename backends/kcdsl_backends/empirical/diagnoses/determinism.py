"""Diagnoses of repetition: the same bits twice, in a batch, in another order, and padded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.alignment import FAILURES
from kcdsl_backends.empirical.diagnoses.model import (
    BEYOND,
    POSITIONS,
    SIDES,
    Forward,
    Probe,
    not_applicable,
    outcome,
    size,
)
from kcdsl_backends.empirical.diagnoses.probes import Noise
from kcdsl_backends.requests import Request


def self_determinism(probes: Sequence[Probe]) -> Precheck:
    """A kernel run twice should give the same bits; otherwise its noise is part of every drift."""
    name = "self_determinism"
    if not probes:
        return not_applicable(name, "no request could be run")
    sides = {side: sum(not p.equal[i] for p in probes) for i, side in enumerate(SIDES)}
    rate = sum(sides.values()) / (2 * len(probes))
    detail = ", ".join(f"{side} {n} of {len(probes)} differ" for side, n in sides.items())
    return outcome(name, rate == 0, detail, rate)


# --- batches --------------------------------------------------------------------------------------

BATCHES = "batch_invariance"
_TAIL = 3
_LOOSE = 1e-4
"""Without a reference: how far, relative to the outputs, batching may move them."""


def batch_invariance(
    pair: tuple[Request, Request] | None,
    kernels: tuple[Forward, Forward],
    noise: Noise | None,
    *,
    encoder: bool,
    padding: bool = True,
) -> Precheck:
    """Run a request alone, in a batch, in the other order and padded behind.

    Other bits are counted; the check fails where a regrouping moves an output further than
    `BEYOND` times what the kernel's claim explains, since that is no order of additions. `padding`
    False leaves out tokens behind the request, which a wrong mask or a shift lets it see.
    """
    if pair is None:
        return not_applicable(BATCHES, "no two requests of two tokens")
    found, worst, over = [], 0.0, []
    for side, kernel in enumerate(kernels):
        moved = regrouped(pair, kernel, padding and not encoder)
        if moved is None:
            continue
        alone, others = moved
        gaps = {how: _gap(alone, rows, encoder) for how, rows in others.items()}
        found += [not torch.equal(alone, rows) for rows in others.values()]
        scale = float(alone[torch.isfinite(alone)].square().mean().sqrt())
        limit = _LOOSE * scale if noise is None else BEYOND * noise.expected[side]
        how = max(gaps, key=lambda key: gaps[key])
        worst = max(worst, gaps[how])
        if not math.isfinite(gaps[how]):
            over.append(f"{SIDES[side]} gives other than numbers {how}")
        elif not gaps[how] <= limit:
            over.append(f"{SIDES[side]} moves by {gaps[how]:.2g} {how}")
    if not found:
        return not_applicable(BATCHES, "no kernel takes batches")
    rate = sum(found) / len(found)
    detail = f"other bits in {sum(found)} of {len(found)} regroupings, at most {worst:.2g}"
    return outcome(BATCHES, not over, "; ".join([*over, detail]), rate)


def _gap(alone: Tensor, rows: Tensor, encoder: bool) -> float:
    """Return how far two outputs lie apart; infinite where that is no number, so that the largest
    distance is this one."""
    found = size(alone, rows, states=encoder)
    return found if math.isfinite(found) else math.inf


def regrouped(
    pair: tuple[Request, Request], kernel: Forward, padding: bool
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return the output alone, and the same rows by how the request was grouped."""
    length = min(POSITIONS, *(r.length for r in pair))
    one, two = (list(r.tokens[:length]) for r in pair)
    try:
        with torch.no_grad():
            alone = kernel(one)
            batch, turned = kernel([one, two]), kernel([two, one])
            if alone.dim() != 2 or any(o.shape != (2, *alone.shape) for o in (batch, turned)):
                return None
            if bool((alone.isnan() | alone.isposinf()).any()):
                return None
            others = {"in a batch": batch[0], "in the other order": turned[1]}
    except FAILURES:
        return None
    try:
        with torch.no_grad():
            tails = [one + two[:_TAIL], two + one[:_TAIL]]
            padded = kernel(tails) if padding else None
    except FAILURES:
        padded = None
    if padded is not None:
        others["padded in a batch"] = padded[0, :length]
    exact = {how: rows.to("cpu", torch.float64) for how, rows in others.items()}
    return alone.to("cpu", torch.float64), exact
