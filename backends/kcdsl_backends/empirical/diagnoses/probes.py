"""Probes: both kernels and the reference on some requests, run twice and in batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl.diagnostics.model import Refusal
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import (
    BEYOND,
    FAILURES,
    POSITIONS,
    PROBES,
    SIDES,
    Forward,
    Probe,
    RoundingNoise,
    not_applicable,
    outcome,
    size,
)
from kcdsl_backends.empirical.diagnoses.reference import Reference
from kcdsl_backends.empirical.sources.kernels import Kernel, tensor_digest
from kcdsl_backends.requests import Request


def chosen(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests to probe: the first of at least 16 tokens, else the longest."""
    return tuple(sorted(requests, key=lambda r: min(r.length, 16), reverse=True)[:PROBES])


def forwards(train: Kernel, infer: Kernel, encoder: bool) -> tuple[Forward, Forward]:
    """Return the function of each kernel that is probed: `hidden` of encoders, else `logits`."""
    return (train.hidden, infer.hidden) if encoder else (train.logits, infer.logits)


def probe(
    request: Request,
    train: Kernel,
    infer: Kernel,
    encoder: bool,
    reference: Reference | None = None,
) -> Probe | None:
    """Run both kernels twice on a request; None if one of them fails."""
    outputs, equal, wobble = [], [], []
    for forward in forwards(train, infer, encoder):
        try:
            with torch.no_grad():
                first, second = forward(request.tokens), forward(request.tokens)
        except (RuntimeError, ValueError, Refusal):
            return None
        one, two = (o[:POSITIONS].to("cpu", torch.float64, copy=True) for o in (first, second))
        same = tensor_digest(first) == tensor_digest(second)
        outputs.append(one)
        equal.append(same)
        wobble.append(0.0 if same or one.shape != two.shape else size(one, two, states=encoder))
    known = None if reference is None else _reference(request, reference)
    gold, claimed = (None, None) if known is None else (known[0], (known[1], known[2]))
    if gold is not None and gold.shape != outputs[0].shape:
        gold, claimed = None, None
    return Probe(
        request,
        outputs[0],
        outputs[1],
        (equal[0], equal[1]),
        (wobble[0], wobble[1]),
        gold,
        claimed,
    )


def _reference(request: Request, reference: Reference) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the outputs without roundings and as each side claims; None if one cannot run."""
    try:
        gold, train, infer = (
            reference.run(claim, request.tokens)
            for claim in (None, reference.train, reference.infer)
        )
    except (Exception, SystemExit):  # a user's module may raise anything in another format
        return None
    return gold, train, infer


# --- the same bits again -------------------------------------------------------------------------


def self_determinism(probes: Sequence[Probe]) -> Precheck:
    """Check that two runs of a kernel give the same bits; else its noise is part of every drift."""
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
"""Without a reference: largest allowed change by batching, relative to the outputs."""


def batch_invariance(
    pair: tuple[Request, Request] | None,
    kernels: tuple[Forward, Forward],
    noise: RoundingNoise | None,
    *,
    encoder: bool,
    padding: bool = True,
) -> Precheck:
    """Run a request alone, in a batch, in the other order and with padding after it.

    Differing bits are counted; the check fails if a regrouping changes an output by more than
    `BEYOND` times the noise of the kernel's claim, which no order of additions does. `padding`
    False leaves out tokens after the request, which a wrong mask or a shift would make visible.
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
    """Return the distance of two outputs, infinite if it is not finite."""
    found = size(alone, rows, states=encoder)
    return found if math.isfinite(found) else math.inf


def regrouped(
    pair: tuple[Request, Request], kernel: Forward, padding: bool
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return the output of the request alone, and its rows in each grouping."""
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
