"""Softmax as one operation (section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint, at
from kcdsl_backends.interval.box import Box, gamma
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.state import SoftmaxState
from kcdsl_backends.planes.functional import Functional
from kcdsl_backends.planes.refine import deviations
from kcdsl_backends.planes.rules.linear import PASS
from kcdsl_backends.planes.run import Part, Run
from kcdsl_backends.planes.tape import SAFE, Entry, Noise, Source

FARTHEST = 30.0
"""Beyond this change of a score nothing linear is known of a softmax."""
_LOST = 2.0**-900


def softmax(run: Run, node: Node) -> None:
    """Append the masked softmax over the last dimension: its numerator, and the projection.

    The drift is ∫ J(p_τ) Δs dτ over the way from one kernel's scores to the other's, with
    J(p) d = p∘(d - p·d), and ΣΔp = 0.
    """
    scores, state = run.operand(node, 0), run.known[node.name]
    if not isinstance(state, SoftmaxState):
        raise AssertionError("the interval domain keeps a softmax and its rounding apart")
    shape = scores.reference.shape
    mask = torch.ones(shape, dtype=torch.bool, device=scores.reference.device)
    mask = mask if state.mask is None else state.mask.expand(shape)
    step, _ = scores.drift.midpoint()
    p, trust = _softmax(scores.reference, mask)
    q, _ = _softmax(scores.reference + step / 2, mask)
    e = _within(deviations(run.tape, scores.index, p, "deviation"), mask)
    d = _within(deviations(run.tape, scores.index, q, "drift"), mask)
    # the scores go from those of q by e - step/2 to e + Δ - step/2, centred by q as all is
    e_for_q = _within(deviations(run.tape, scores.index, q, "deviation"), mask)
    half = torch.where(mask, step / 2, 0.0)
    half = torch.where(mask, half - (q * half).sum(-1, keepdim=True), 0.0)
    lost = 2.0**-48 * (half.abs() + step.abs().amax(-1, keepdim=True)) * shape[-1]
    around = (e_for_q.mag() + _on_the_way(d, half) + lost) * SAFE
    for reach in (e.mag(), around):
        if not bool((reach < FARTHEST).all()):
            raise NoBound(node.name, f"a score may change by more than {FARTHEST:g}")
    e_centre, e_radius = _from_point(p, e, trust)
    d_radius = _from_box(q, d.mag(), around, trust)
    inexact = gamma(PASS)
    first = run.tape.add(
        Entry(
            f"{node.name}/numerator",
            torch.zeros_like(p),
            Box.around((p * e.mag() + e_centre.abs() + e_radius) * SAFE),
            Box.around((q * d.mag() + d_radius) * SAFE),
            lambda f: [(scores.index, _scaled(f, p, q))],
            Noise(
                (e_radius + (inexact + 4 * trust) * _largest_of(scores.deviation)) * SAFE,
                (d_radius + (inexact + 4 * trust) * _largest_of(scores.drift)) * SAFE,
                e_centre,
                None,
            ),
        )
    )
    numerator = run.tape.entries[first]
    columns = shape[-1]

    def project(part: Adjoint | None, weights: Tensor) -> Adjoint | None:
        if part is None:
            return None
        window = (*part.window[:-1], (0, columns))
        values, along = part.on(window), weights[at(window)]
        return Adjoint(values - (values * along).sum(-1, keepdim=True), window, part.shape)

    def pull(f: Functional) -> list[Source]:
        return [(first, Functional(project(f.deviation, p), project(f.drift, q)))]

    def own(box: Box, weights: Tensor) -> Tensor:
        gathered = box.mag() + weights * box.mag().sum(-1, keepdim=True)
        return ((4 * trust + gamma(columns + PASS)) * gathered + _LOST) * SAFE

    zero = torch.zeros_like(p)
    rounding_train = (state.rounding_train + 4 * trust * p).expand(shape)
    rounding = (state.rounding_train + state.rounding_infer).expand(shape)
    run.append(
        node,
        p,
        pull,
        Part(zero, (own(numerator.deviation, p) + rounding_train) * SAFE),
        Part(zero, (own(numerator.drift, q) + rounding) * SAFE),
    )


def _on_the_way(d: Box, half: Tensor) -> Tensor:
    """Bound |τ·δ - half| for δ in a box and τ from 0 to 1: it is largest at one of the ends."""
    farthest = torch.maximum((d.hi - half).abs(), (d.lo - half).abs())
    return torch.maximum(half.abs(), farthest)


def _largest_of(box: Box) -> Tensor:
    """Return the largest magnitude of every row: what a sum of probabilities beside 1 may cost."""
    return box.mag().amax(-1, keepdim=True).expand(box.shape)


def _scaled(f: Functional, p: Tensor, q: Tensor) -> Functional:
    return Functional(
        None if f.deviation is None else f.deviation.times(p),
        None if f.drift is None else f.drift.times(q),
    )


def _within(box: Box, mask: Tensor) -> Box:
    zero = torch.zeros_like(box.lo)
    return Box(torch.where(mask, box.lo, zero), torch.where(mask, box.hi, zero))


def _softmax(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax in float64 and its relative error [..., 1]."""
    allowed = scores.masked_fill(~mask, -torch.inf)
    top = allowed.amax(-1, keepdim=True)
    spread = torch.where(mask, top - allowed, 0.0).amax(-1, keepdim=True).clamp_max(800)
    return allowed.softmax(-1), 2.0**-52 * (scores.shape[-1] + 16 + 4 * spread)


def _rise(c: Tensor) -> Tensor:
    """Return e^c - 1 - c, rounded up."""
    return (torch.expm1(c) * (1 + 2.0**-48) - c).clamp_min(0) + 2.0**-47 * c


def _largest(p: Tensor, c: Tensor, trust: Tensor) -> tuple[Tensor, Tensor]:
    """Return Z̄ >= Σ p e^t for |t| <= c with Σ p t = 0, and how far that sum may be from 0."""
    off = 4 * (trust * p * c).sum(-1, keepdim=True) * SAFE
    return 1 + (p * _rise(c)).sum(-1, keepdim=True) * SAFE + off, off


def _from_point(p: Tensor, t: Box, trust: Tensor) -> tuple[Tensor, Tensor]:
    """Bound p_i(e^t_i/Z - 1 - t_i): centre and radius. Σ p t = 0 up to the error of p."""
    c = t.mag()
    rise = _rise(c)
    largest, off = _largest(p, c, trust)
    kappa = torch.maximum(1 - 1 / largest, off / (1 - off)) * SAFE + 2.0**-52
    grown = c + rise
    return p * rise / 2, (p * (rise / 2 + (kappa + 4 * trust) * (grown + 1)) + _LOST) * SAFE


def _from_box(q: Tensor, moved: Tensor, around: Tensor, trust: Tensor) -> Tensor:
    """Bound p(d_i - p·d) - q(d_i - q·d) for p = q e^w/Z, |w| <= around, |d - q·d| <= moved."""
    largest, off = _largest(q, around, trust)
    least = torch.exp(-around) / largest * (1 - 2.0**-45) * (1 - off)
    away = q * torch.maximum(torch.expm1(around) * (1 + 4 * off), 1 - least) * SAFE + _LOST
    high = torch.minimum(q * torch.exp(around) * (1 + 4 * off) * SAFE + _LOST, torch.ones_like(q))
    away = torch.minimum(away, torch.ones_like(q)) + 4 * trust * q
    return (away * moved + high * (away * moved).sum(-1, keepdim=True)) * SAFE
