"""Planes over the change of a ReLU, with slopes that may be any numbers (section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint, at
from kcdsl_backends.drift.boxes.box import EPS, Box
from kcdsl_backends.drift.linear.tape import Above, Functional


@dataclass(frozen=True, slots=True)
class Change:
    """Everywhere relu(n + D) - relu(n) can be: n in `base`, D in `moved`, n + D in `result`."""

    base: Box
    moved: Box
    result: Box

    def corners(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return n, D and the change at points [..., 27] among which every plane is extreme.

        The change is linear on the pieces into which n = 0 and n + D = 0 cut the polygon; their
        corners are among these points. Points beside the polygon do no harm.
        """
        (low, high), (least, most) = _ends(self.base), _ends(self.moved)
        first, last = _ends(self.result)
        zero = torch.zeros_like(low)
        places = [low, high, zero, -least, -most]
        places += [end - step for end in (first, last) for step in (least, most)]
        n = torch.stack(places, -1).clamp(low.unsqueeze(-1), high.unsqueeze(-1))
        bottom = torch.maximum(least.unsqueeze(-1), first.unsqueeze(-1) - n)
        top = torch.minimum(most.unsqueeze(-1), last.unsqueeze(-1) - n)
        kink = torch.maximum(torch.minimum(-n, top), bottom)
        moved = torch.cat([bottom, top, kink], -1)
        n = torch.cat([n, n, n], -1)
        return n, moved, (n + moved).clamp_min(0) - n.clamp_min(0)

    def heights(self, a: Tensor, b: Tensor, sign: float) -> tuple[Tensor, Tensor]:
        """Return c with change <= a·n + b·D + c everywhere (sign 1; -1: >=), and its float64 error.

        Args:
            a, b: slopes, broadcastable to [B, ...shape].
        """
        n, moved, change = self.corners()
        rest = sign * (change - a.unsqueeze(-1) * n - b.unsqueeze(-1) * moved)
        error_bound = n.abs().amax(-1) + moved.abs().amax(-1) + self.result.mag()
        error = 16 * EPS * (1 + a.abs() + b.abs()) * error_bound
        return sign * rest.amax(-1), error


def _ends(box: Box) -> tuple[Tensor, Tensor]:
    return box.lo, box.hi


@dataclass(frozen=True, slots=True)
class ReluPlanes:
    """Planes for both unknowns of a ReLU.

    Slopes: the lower and upper slope in e of the new deviation; then, for the lower plane of the
    new drift and for the upper one, slopes in e and D. Six tensors broadcastable to [B, ...shape].
    """

    source: int
    reference: Tensor
    own: Change
    """How the deviation changes: base h̃, moved e."""
    pair: Change
    """How the drift changes: base h̃ + e, moved D."""
    start: tuple[Tensor, ...]

    @property
    def bent(self) -> Tensor:
        """Say of which elements the sign is open in a kernel: slopes matter there alone."""
        return _straddles(self.own.result) | _straddles(self.pair.result)

    def slopes(self) -> tuple[Tensor, ...]:
        """Return the slopes to start with."""
        return self.start

    def scales(self) -> tuple[Tensor, ...]:
        """Return how large a step of each slope is worth trying; 0 where the change is linear."""
        crossing = _straddles(self.own.result)
        bent = self.bent
        flat = torch.zeros_like(self.reference)
        one = torch.where(bent, 1.0, flat)
        width = self.pair.base.hi - self.pair.base.lo
        share = (self.pair.moved.hi - self.pair.moved.lo) / torch.where(width > 0, width, 1.0)
        small = torch.where(bent & (width > 0), share.clamp_max(1.0), flat)
        alone = torch.where(crossing, 1.0, flat)
        return tuple(x.unsqueeze(0) for x in (alone, alone, small, one, small, one))

    def above(self, functional: Functional, slopes: Sequence[Tensor]) -> Above:
        """Bound the functionals from above by the planes with these slopes."""
        e_low, e_high, a_low, b_low, a_high, b_high = slopes
        constant = functional.parts[0].values.new_zeros(functional.count)
        on_deviation: Adjoint | None = None
        on_drift: Adjoint | None = None
        if functional.deviation is not None:
            part = functional.deviation
            flat = torch.zeros_like(e_low)
            _, on_deviation, known = _above(
                part, self.own, (flat, e_low), (flat, e_high), self.reference
            )
            constant = constant + known
        if functional.drift is not None:
            part = functional.drift
            through, on_drift, known = _above(
                part, self.pair, (a_low, b_low), (a_high, b_high), self.reference
            )
            on_deviation = through if on_deviation is None else on_deviation.plus(through)
            constant = constant + known
        return Above([(self.source, Functional(on_deviation, on_drift))], constant)


def _above(
    part: Adjoint,
    change: Change,
    low: tuple[Tensor, Tensor],
    high: tuple[Tensor, Tensor],
    reference: Tensor,
) -> tuple[Adjoint, Adjoint, Tensor]:
    """Return what a part asks of (n or nothing, the moved unknown), and its constant [B]."""
    window = (slice(None), *at(part.window))

    def on(tensor: Tensor) -> Tensor:
        return tensor.expand(tensor.shape[0], *part.shape)[window]

    def widened(box: Box) -> Box:
        inner = at(part.window)
        return Box(box.lo[inner], box.hi[inner])

    local = Change(widened(change.base), widened(change.moved), widened(change.result))
    upper, lower = part.values.clamp_min(0), part.values.clamp_max(0)
    a_low, b_low, a_high, b_high = on(low[0]), on(low[1]), on(high[0]), on(high[1])
    c_low, error_low = local.heights(a_low, b_low, -1.0)
    c_high, error_high = local.heights(a_high, b_high, 1.0)
    centre = reference[at(part.window)]
    terms = upper * (c_high + a_high * centre) + lower * (c_low + a_low * centre)
    sizes = upper * (error_high + a_high.abs() * centre.abs() * 4 * EPS)
    sizes = sizes - lower * (error_low + a_low.abs() * centre.abs() * 4 * EPS)
    error_bound = change.moved.mag()[at(part.window)] + change.base.mag()[at(part.window)]
    lost = (
        upper * (a_high.abs() + b_high.abs()) - lower * (a_low.abs() + b_low.abs())
    ) * error_bound
    count = part.values[0].numel()
    spare = (count + 16) * 2 * EPS
    constant = terms.flatten(1).sum(-1) + (
        sizes.flatten(1).sum(-1)
        + spare * (terms.abs().flatten(1).sum(-1) + lost.flatten(1).sum(-1))
    )
    on_base = Adjoint(upper * a_high + lower * a_low, part.window, part.shape)
    on_moved = Adjoint(upper * b_high + lower * b_low, part.window, part.shape)
    return on_base, on_moved, constant


def _straddles(box: Box) -> Tensor:
    return (box.lo < 0) & (box.hi > 0)


def in_single(slopes: Tensor) -> Tensor:
    """Return the nearest float32 numbers: slopes as a proof holds them."""
    return slopes.float().double()


def plain_slopes(own: Change, pair: Change) -> tuple[Tensor, ...]:
    """Return the slopes of the sign that is more likely, which nobody has to name."""
    on = (own.result.lo + own.result.hi > 0).double()
    sides = pair.base.lo + pair.base.hi + pair.result.lo + pair.result.hi
    both, zero = (sides > 0).double(), torch.zeros_like(on)
    return tuple(slope.unsqueeze(0) for slope in (on, on, zero, both, zero, both))


def first_slopes(own: Change, pair: Change) -> tuple[Tensor, ...]:
    """Return slopes that are good where nothing is known of the functionals.

    For every element the planes that pass nearest to the change in the middle of the box, in
    float32; where the sign is known in both kernels, what the sign says.
    """
    zero = torch.zeros_like(own.moved.lo)
    one = torch.ones_like(zero)
    chord = _chord(own.result)
    e_low = _nearest(own, [(zero, s) for s in (zero, one)], -1.0)[1]
    e_high = _nearest(own, [(zero, s) for s in (zero, one, chord)], 1.0)[1]
    before, after, between = _chord(pair.base), _chord(pair.result), _chord(pair.moved)
    rising = [(zero, zero), (zero, one), (one, one), (-one, zero), (zero, between)]
    rising += [(after, after), (after - 1, after)]
    falling = [(zero, zero), (zero, one), (one, one), (-one, zero), (zero, 1 - between)]
    falling += [(-before, zero), (1 - before, one)]
    low, high = _nearest(pair, falling, -1.0), _nearest(pair, rising, 1.0)
    bent = _straddles(own.result) | _straddles(pair.result)
    return tuple(
        torch.where(bent, in_single(slope.unsqueeze(0)), plain)
        for slope, plain in zip((e_low, e_high, *low, *high), plain_slopes(own, pair), strict=True)
    )


def _chord(box: Box) -> Tensor:
    """Return hi / (hi - lo) between 0 and 1: the slope from (lo, 0) to (hi, hi)."""
    width = box.hi - box.lo
    slope = box.hi / torch.where(width > 0, width, torch.ones_like(width))
    return slope.clamp(0, 1)


def _nearest(
    change: Change, candidates: Sequence[tuple[Tensor, Tensor]], sign: float
) -> tuple[Tensor, Tensor]:
    """Return, element by element, the slopes whose plane is nearest in the middle of the box."""
    n = change.base.lo / 2 + change.base.hi / 2
    moved = change.moved.lo / 2 + change.moved.hi / 2
    best: Tensor | None = None
    chosen = candidates[0]
    for a, b in candidates:
        c, _ = change.heights(a, b, sign)
        height = sign * (c + a * n + b * moved)
        if best is None:
            best = height
            continue
        nearer = height < best
        best = torch.where(nearer, height, best)
        chosen = (torch.where(nearer, a, chosen[0]), torch.where(nearer, b, chosen[1]))
    return chosen
