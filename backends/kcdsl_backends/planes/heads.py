"""Products of what comes straight from linears: remainders of second order through the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.view import View
from kcdsl_backends.affine.adjoint import Adjoint
from kcdsl_backends.interval.box import gamma
from kcdsl_backends.planes.functional import Functional
from kcdsl_backends.planes.run import Run
from kcdsl_backends.planes.tape import SAFE


@dataclass(frozen=True, slots=True)
class Form:
    """A part of an operand [heads, T, d]: u[h, t] = Σ_k M_k,h w_k[t] + o[h, t].

    `maps` are pairs of M [heads, d, D] and bounds of |w| [T, D]; `own` bounds |o|.
    """

    maps: tuple[tuple[Tensor, Tensor], ...]
    own: Tensor

    @property
    def carried(self) -> Tensor:
        """Return Σ |M| |w| [heads, T, d]."""
        found = torch.zeros_like(self.own)
        for matrix, reach in self.maps:
            found = found + reach @ matrix.abs().mT
        return found * SAFE

    def against(self, functionals: Tensor, head: int) -> Tensor:
        """Return bounds of |functional·u[h, t]| for functionals [..., d] -> [..., T]."""
        inexact = gamma(2 * self.own.shape[-1] + 16) * self.carried[head]
        found = functionals.abs() @ (self.own[head] + inexact).T
        for matrix, reach in self.maps:
            found = found + (functionals @ matrix[head]).abs() @ reach.T
        return found * SAFE


@dataclass(frozen=True, slots=True)
class Heads:
    """The forms of an operand: of e, of Δ and of h + Δ/2, all from the middles of their boxes."""

    deviation: Form
    drift: Form
    middle: Form


def heads(run: Run, node: Node, position: int, *, transposed: bool = False) -> Heads | None:
    """Return the forms of an operand, None where it does not come straight from a linear.

    Args:
        transposed: the operand is [heads, d, T].
    """
    moves, source = [], run.source(node, position)
    while source.op == "view":
        moves.append(source)
        source = run.source(source, 0)
    straight = run.straight.get(source.name)
    if straight is None:
        return None
    entry, x = run.tape.entries[straight.entry], run.tape.entries[straight.source]
    noise = entry.noise
    assert noise is not None
    tokens, features = entry.shape
    place = torch.arange(tokens * features, device=entry.reference.device).reshape(entry.shape)
    for move in reversed(moves):
        place = View.of(move).moved(place)
    if place.dim() != 3:
        return None
    place = place.mT if transposed else place
    outputs = place[:, :1] % features
    row = torch.arange(tokens, device=place.device)[:, None]
    if place.shape[1] != tokens or not bool((place == row * features + outputs).all()):
        return None
    operand = run.operand(node, position)
    chosen = outputs[:, 0]
    train, infer = straight.train[chosen], straight.infer[chosen]
    change = infer - train

    def gathered(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.zeros(place.shape, dtype=torch.float64, device=place.device)
        return tensor.expand(entry.shape).flatten()[place.flatten()].reshape(place.shape)

    def middle_of(box: Tensor) -> Tensor:
        return box.mT if transposed else box

    (e_mid, e_rad), (d_mid, d_rad) = x.deviation.midpoint(), x.drift.midpoint()
    ea, da = (middle_of(box.midpoint()[0]) for box in (operand.deviation, operand.drift))
    off_e = e_mid @ train.mT + gathered(noise.deviation_centre) - ea
    off_d = d_mid @ infer.mT + e_mid @ change.mT + gathered(noise.drift_centre) - da
    own_e, own_d = gathered(noise.deviation), gathered(noise.drift)
    width = train.shape[-1]
    lost = gamma(width + 16) * (
        e_mid.abs() @ (train.abs() + change.abs()).mT + d_mid.abs() @ infer.abs().mT
    ) + 2.0**-50 * (ea.abs() + da.abs() + gathered(noise.drift_centre).abs())
    moving = bool(d_rad.any())
    changed = bool(change.any())
    drift = (*(((infer, d_rad),) if moving else ()), *(((change, e_rad),) if changed else ()))
    middle = (
        ((train + infer) / 2 if changed else train, e_rad),
        *(((infer / 2, d_rad),) if moving else ()),
    )
    return Heads(
        Form(((train, e_rad),), (own_e + off_e.abs() + lost) * SAFE),
        Form(drift, (own_d + off_d.abs() + lost) * SAFE),
        Form(middle, (own_e + own_d / 2 + (off_e + off_d / 2).abs() + 2 * lost) * SAFE),
    )


@dataclass(frozen=True, slots=True)
class Second:
    """Bounds of the terms of second order of a product of matrices.

    `elements` of its deviation and of its drift, element by element; `curved` functional by
    functional.
    """

    elements: tuple[Tensor, Tensor]
    curved: Callable[[Functional], Tensor] | None = None


def second_of(run: Run, node: Node) -> Second | None:
    """Return what is known of the second order beyond products of radii."""
    if node.role == "context":
        values = heads(run, node, 1)
        return None if values is None else _of_context(run, node, values)
    first, second = heads(run, node, 0), heads(run, node, 1, transposed=True)
    if first is None or second is None:
        return None
    return Second(
        (
            _product(first.deviation, second.deviation),
            (_product(first.middle, second.drift) + _product(first.drift, second.middle)) * SAFE,
        )
    )


def _product(a: Form, b: Form) -> Tensor:
    """Bound |u[h, t]·w[h, s]| [heads, T, T]."""
    carried_a, carried_b = a.carried, b.carried
    found = a.own @ carried_b.mT + carried_a @ b.own.mT + a.own @ b.own.mT
    for p, reach_p in a.maps:
        for q, reach_q in b.maps:
            inner = (p.mT @ q).abs()
            inner = inner + gamma(p.shape[1] + 4) * (p.abs().mT @ q.abs())
            found = found + reach_p @ inner @ reach_q.T
    return found * SAFE


def _of_context(run: Run, node: Node, values: Heads) -> Second:
    """Bound Σ_j e_p,j α·e_v,j and the terms of the drift for every functional α."""
    p = run.operand(node, 0)
    r, s = p.deviation.midpoint()[1], p.drift.midpoint()[1]
    t = (r + s / 2) * SAFE

    def along(part: Adjoint, pairs: tuple[tuple[Tensor, Form], ...]) -> Tensor:
        (first, last), (start, stop), _ = part.window
        d = part.shape[-1]
        functional = part.on((*part.window[:-1], (0, d)))
        total = functional.new_zeros(functional.shape[0])
        for h in range(first, last):
            for size, form in pairs:
                bound = form.against(functional[:, h - first], h)  # [B, rows, keys]
                total = total + (bound * size[h, start:stop]).flatten(1).sum(-1)
        return total * SAFE

    def curved(f: Functional) -> Tensor:
        found = f.parts[0].values.new_zeros(f.count)
        if f.deviation is not None:
            found = found + along(f.deviation, ((r, values.deviation),))
        if f.drift is not None:
            found = found + along(f.drift, ((t, values.drift), (s, values.middle)))
        return found * SAFE

    nothing = torch.tensor(torch.inf, dtype=torch.float64, device=r.device)
    return Second((nothing, nothing), curved)
