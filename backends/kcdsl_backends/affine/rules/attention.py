"""Softmax, and its product with the values (section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint, at
from kcdsl_backends.affine.cases import SCORES, Cases, choices, of_product, split
from kcdsl_backends.affine.kernel import KernelRun, Operand, Private
from kcdsl_backends.affine.reaches import deviations
from kcdsl_backends.affine.rules.heads import Heads, heads
from kcdsl_backends.affine.rules.linear import product
from kcdsl_backends.affine.rules.one_row import of_values, through
from kcdsl_backends.affine.storing import Result, store, stored_format
from kcdsl_backends.affine.tape import PASS, SAFE, Curved, Entry, Pulled
from kcdsl_backends.interval.box import Box, gamma, up
from kcdsl_backends.interval.errors import NoBound, refuse_overflow
from kcdsl_backends.interval.readings import Apart
from kcdsl_backends.interval.rules import softmax as interval

FARTHEST = 30.0
"""Beyond this score drift nothing is known of a softmax but that it lies between 0 and 1."""
_LOST = 2.0**-900
"""More than what becomes, after the largest drift, of a probability that float64 lost."""


def softmax(run: KernelRun, node: Node) -> None:
    """Append the masked softmax of the scores over the last dimension: numerator, projection.

    Raises:
        NoBound: a row without columns, or a score drift beyond `FARTHEST`.
    """
    index, scores = run.entry(node, 0)
    mask = _mask(run, node, scores)
    allowed = scores.reference.masked_fill(~mask, -torch.inf)
    p, columns = allowed.softmax(-1), allowed.shape[-1]
    trust = _relative_error(allowed, mask)
    c = (scores.reach + (p * scores.reach).sum(-1, keepdim=True)) * SAFE
    several = mask & (mask.sum(-1, keepdim=True) > 1)  # one column alone has the probability 1
    for floor in run.tape.floors:
        c = torch.where(several, c, 0.0)
        needed = ~(c.amax(-1, keepdim=True) <= math.sqrt(run.negligible))
        if run.passing(node, index, "deviations", needed, floor):
            c = torch.minimum(c, deviations(run.tape, index, p, needed, floor))
    c = torch.where(several, c, 0.0)
    if not bool((c < FARTHEST).all()):
        raise NoBound(node.name, f"a score may drift by more than {FARTHEST:g}")
    rise = (torch.expm1(c) * (1 + 2.0**-48) - c).clamp_min(0) + 2.0**-47 * c
    # Σ p t is 0 up to the error of p.
    off = 4 * (trust * p * c).sum(-1, keepdim=True) * SAFE
    largest = 1 + (p * rise).sum(-1, keepdim=True) * SAFE + off
    kappa = torch.maximum(1 - 1 / largest, off / (1 - off)) * SAFE + 2.0**-52
    numerator = p * (c + rise)
    radius = p * rise / 2 + (kappa + 4 * trust) * numerator + gamma(PASS) * p * scores.reach
    read = _columns(mask)
    first = run.tape.add(
        Entry(
            f"{node.name}/numerator",
            torch.zeros_like(p),
            (numerator + radius) * SAFE,
            lambda a: [(index, read(a.times(p)))],
            p * rise / 2,
            radius * SAFE,
        )
    )
    least = (torch.exp(-c) / largest) * (1 - 2.0**-45) * (1 - off)
    moved = p * torch.maximum(torch.expm1(c) * (1 + 4 * off), 1 - least) * SAFE
    moved = torch.minimum(moved + _LOST, torch.ones_like(p))
    gathered = numerator + p * numerator.sum(-1, keepdim=True)
    lost = 2 * trust * run.tape.entries[first].reach.sum(-1, keepdim=True)
    own = 4 * trust * (p + gathered) + gamma(columns + PASS) * gathered + _LOST

    def project(a: Adjoint) -> Pulled:
        window = (*a.window[:-1], (0, columns))
        values, weights = a.on(window), p[at(window)]
        mean = (values * weights).sum(-1, keepdim=True)
        return [(first, Adjoint(values - mean, window, a.shape))]

    high = torch.minimum(((p + moved) * SAFE), torch.ones_like(p))
    again = run.again(node, 0)
    wide = scores.reach if again is None else (scores.reach + again) * SAFE
    box = Box(scores.reference - wide, scores.reference + wide)
    if not run.rounding.numerics.attention.fused:
        theta = _theta(run, box, mask, again)
        inside = torch.where(mask, theta * high + 2.0**-120, 0.0)
        place = store(run, node, Result(p, project, moved, (own + inside) * SAFE))
        _forbid(run, place, mask)
        _balance(run, place, lost)
        _choose(run, place, scores, mask, inside)
        return
    total = Box(torch.zeros_like(high), high)
    rounding = (interval._rounding(box, total, mask, run.rounding, again) + own) * SAFE
    entry = Entry(node.name, p, (moved + rounding) * SAFE, project, None, rounding)
    refuse_overflow(node.name, entry.size, stored_format(run, node))
    if node.name in run.several:
        run.keep(node, rounding)
        entry = replace(entry, radius=torch.zeros_like(rounding))
    run.computed[node.name] = run.tape.add(entry)
    _forbid(run, run.computed[node.name], mask)
    _balance(run, run.computed[node.name], lost)


def _forbid(run: KernelRun, place: int, mask: Tensor) -> None:
    """Note that the probabilities of columns which the mask forbids are zero, however stored."""
    entry, parts = run.tape.entries[place], run.tape.entries[place].roundings
    assert entry.radius is not None
    nothing = torch.zeros_like(entry.radius)
    run.tape.entries[place] = replace(
        entry,
        reach=torch.where(mask, entry.reach, nothing),
        radius=torch.where(mask, entry.radius, nothing),
        roundings=None if parts is None else parts.where(mask, nothing),
    )
    private = run.private.get(entry.name)
    if private is not None:
        run.private[entry.name] = Private(torch.where(mask, private.reach, nothing))


def _balance(run: KernelRun, place: int, lost: Tensor) -> None:
    """Note how far the sum of a row of probabilities may move: by what is rounded, and by `lost`,
    as the numbers of the projection sum up to 1 but nearly."""
    entry = run.tape.entries[place]
    if entry.name in run.private:
        return
    if entry.kept and entry.centre is None and entry.radius is not None:
        balance = (entry.radius.sum(-1, keepdim=True) + lost) * SAFE
        run.tape.entries[place] = replace(entry, balance=balance)


def _mask(run: KernelRun, node: Node, scores: Entry) -> Tensor:
    if len(node.inputs) < 2:
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.reference.device)
    mask = run.parameters.mask(run.source(node, 1)).expand(scores.shape)
    if not bool(mask.any(-1).all()):
        raise NoBound(node.name, "a row of the attention mask admits no column")
    return mask


def _columns(mask: Tensor) -> Callable[[Adjoint], Adjoint]:
    """Return a function that leaves out of functionals of one row the columns before the first and
    behind the last that the mask admits in any head, where they are zero."""
    admitted = mask.reshape(-1, *mask.shape[-2:]).any(0)
    places = torch.arange(mask.shape[-1], device=mask.device)
    starts = torch.where(admitted, places, mask.shape[-1]).amin(-1).tolist()
    stops = (torch.where(admitted, places, -1).amax(-1) + 1).tolist()

    def read(a: Adjoint) -> Adjoint:
        if not a.one_row:
            return a
        row, (start, stop) = a.window[-2][0], a.window[-1]
        least = min(max(start, starts[row]), stop)
        most = max(least, min(stop, stops[row]))
        values = a.values[..., least - start : most - start]
        return Adjoint(values, (*a.window[:-1], (least, most)), a.shape)

    return read


def _relative_error(allowed: Tensor, mask: Tensor) -> Tensor:
    """Bound the relative error of a softmax in float64: exp to 4 ulp, of a rounded argument."""
    top = allowed.amax(-1, keepdim=True)
    spread = torch.where(mask, top - allowed, 0.0).amax(-1, keepdim=True).clamp_max(800)
    return 2.0**-52 * (allowed.shape[-1] + 16 + 4 * spread)


def _theta(run: KernelRun, scores: Box, mask: Tensor, again: Apart) -> Tensor:
    """Return Θ of a composed softmax: how far a computed probability may be off, relatively.

    That of a score may be read by itself, and so may those of the sum of its row: `again`.
    """
    high = torch.where(mask, scores.hi, -torch.inf).amax(-1, keepdim=True)
    low = torch.where(mask, scores.lo, torch.inf).amin(-1, keepdim=True)
    log = interval.log_error(scores.shape[-1], up(high - low), run.rounding)
    if again is not None:
        most = torch.where(mask, again, 0.0).amax(-1, keepdim=True)
        log = (log + again + most) * SAFE
    return torch.expm1(log) * SAFE


def context(run: KernelRun, node: Node) -> None:
    """Append probabilities @ values."""
    p, v = run.operand(node, 0), run.operand(node, 1)
    keys = p.reference.shape[-1]
    steps = keys + 2 * run.rounding.numerics.attention.tiles(keys) + 4
    result = product(run, p, v, steps, 2)
    second = p.reach @ v.reach * SAFE
    cases = _in_cases(run, p, v, result.internal)
    tight = bool((run.tape.radius > 0).any())
    values = heads(run, node, 1)
    matters = second.sum() > run.negligible * result.reference.abs().sum()
    rows = torch.ones_like(v.reach[..., :1], dtype=torch.bool) & matters
    curved = None
    if values is not None and v.index is not None and run.passing(node, v.index, "product", rows):
        curved = _second_order(p.reach, values)
    internal, parts = result.internal, result.roundings
    if curved is None:
        internal = (internal + second) * SAFE
        parts = None if parts is None else parts.beside(second)
    one_row = None
    if values is not None:
        one_row = of_values(run, p, values, v.reference, second_order=curved is not None)
    formed = Result(
        result.reference,
        result.pull,
        result.linear,
        internal,
        curved=curved,
        extra=None if curved is None else second,
        cases=cases,
        roundings=parts,
        one_row=one_row,
    )
    store(run, node, formed, accumulates=True, tight=tight)


def _in_cases(run: KernelRun, p: Operand, v: Operand, error: Tensor) -> Cases | None:
    """Return the product in cases of its probabilities, where these are steps."""
    ends = None if p.index is None else run.tape.entries[p.index].choices
    if ends is None:
        return None
    around = Box(v.reference - v.reach * SAFE, v.reference + v.reach * SAFE)
    room = choices(error.shape) - int(math.log2(ends.low.shape[0]))
    worth = v.reference.abs().sum(-1)[..., None, :]
    return of_product(split(ends, worth, room), around, error)


def _choose(run: KernelRun, place: int, scores: Entry, mask: Tensor, error: Tensor) -> None:
    """Note which probabilities there are in each case of the scores, where these are steps."""
    entry = run.tape.entries[place]
    if entry.ends is None:
        return
    low, high = scores.reference - scores.reach * SAFE, scores.reference + scores.reach * SAFE
    box = Box(low[None], high[None])
    if scores.ends is not None:
        steps = replace(scores.ends, low=scores.ends.low[None], high=scores.ends.high[None])
        steps = split(steps, entry.reference, min(SCORES, choices(entry.shape)))
        box = Box(steps.low, steps.high)
    formed = interval._range(box, mask).widen(error)
    run.tape.entries[place] = replace(entry, choices=entry.ends.within(formed))


def _second_order(moved: Tensor, values: Heads) -> Curved:
    """Bound Σ_j moved[h, t, j]·|a·e_v[h, j]| with e_v[h, j] = W_h e_x[j] + o[h, j]."""
    beyond = through(values)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, last), (row, end), (start, stop) = a.window
        total = a.values.new_zeros(a.values.shape[0])
        for h in range(first, last):
            size = a.values[:, h - first].abs() @ values.own[h, :, start:stop].T
            size = size + beyond(a, h)  # [B, rows, keys]
            total = total + (size * moved[h, row:end]).flatten(1).sum(-1)
        total = total * SAFE
        return -total, total

    return Curved(between)
