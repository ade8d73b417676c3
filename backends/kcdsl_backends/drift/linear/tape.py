"""Deviations and drifts of both kernels as one linear recurrence, and its functionals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint, at
from kcdsl_backends.drift.boxes import EPS, Box, gamma, up

LINEAR_PASS = 16
"""Roundings of an adjoint besides those of the products: sums of adjoints, and the noise."""


@dataclass(frozen=True, slots=True)
class Functional:
    """B functionals Σ a·e + Σ b·D of a node with deviation e and drift D.

    `deviation` holds a, `drift` holds b; None is zero. Not both are None.
    """

    deviation: Adjoint | None
    drift: Adjoint | None

    @property
    def count(self) -> int:
        return self.parts[0].values.shape[0]

    @property
    def parts(self) -> tuple[Adjoint, ...]:
        """Return the parts that are not zero."""
        return tuple(part for part in (self.deviation, self.drift) if part is not None)

    @property
    def terms(self) -> int:
        """Return the number of coefficients of each functional."""
        return sum(part.values[0].numel() for part in self.parts)

    def each(self, change: Callable[[Adjoint], Adjoint]) -> Functional:
        """Apply the same linear map to both parts."""
        return Functional(
            None if self.deviation is None else change(self.deviation),
            None if self.drift is None else change(self.drift),
        )

    def negative(self) -> Functional:
        return self.each(lambda part: part.times(-1.0))

    def plus(self, other: Functional) -> Functional:
        return Functional(
            added_adjoints(self.deviation, other.deviation), added_adjoints(self.drift, other.drift)
        )

    def against(self, deviation: Tensor, drift: Tensor) -> Tensor:
        """Return Σ a·deviation + Σ b·drift [B]."""
        found = self.parts[0].values.new_zeros(self.count)
        if self.deviation is not None:
            found = found + self.deviation.against(deviation)
        return found if self.drift is None else found + self.drift.against(drift)

    def magnitude(self, deviation: Tensor, drift: Tensor) -> Tensor:
        """Return Σ |a|·deviation + Σ |b|·drift [B]: the largest value on a box around zero."""
        found = self.parts[0].values.new_zeros(self.count)
        if self.deviation is not None:
            found = found + self.deviation.magnitude(deviation)
        return found if self.drift is None else found + self.drift.magnitude(drift)


def added_adjoints(a: Adjoint | None, b: Adjoint | None) -> Adjoint | None:
    """Return a + b, where None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a.plus(b)


def only_deviation(unknown: Literal["deviation", "drift"], adjoint: Adjoint) -> Functional:
    """Return functionals of one unknown."""
    if unknown == "deviation":
        return Functional(adjoint, None)
    return Functional(None, adjoint)


Source = tuple[int, Functional]
LinearVJP = Callable[[Functional], Sequence[Source]]


@dataclass(frozen=True, slots=True)
class Noise:
    """The result of a node minus its linear part: centres (None: zero) and radii of both unknowns.

    `nonlinear` bounds the nonlinear part, functional by functional [B].
    """

    deviation: Tensor
    drift: Tensor
    deviation_centre: Tensor | None = None
    drift_centre: Tensor | None = None
    nonlinear: Callable[[Functional], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Above:
    """Functionals of operands and constants [B] that together bound a functional from above."""

    sources: Sequence[Source]
    constant: Tensor


@dataclass(frozen=True, slots=True)
class LinearEntry:
    """One node: the boxes of its unknowns and its linear bounds; a ReLU has `planes` in place of
    `noise`. Functionals of (e, D) equal those of earlier entries that `vjp` returns, up to `noise`.
    """

    name: str
    reference: Tensor
    deviation: Box
    drift: Box
    vjp: LinearVJP
    noise: Noise | None = None
    planes: ReluPlanes | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reference.shape)


Slopes = dict[int, tuple[Tensor, ...]]
"""Slopes of the planes of some entries, which replace the initial ones."""


@dataclass(slots=True)
class LinearTape:
    """Entries in the order of the graph."""

    entries: list[LinearEntry] = field(default_factory=list)

    def add(self, entry: LinearEntry) -> int:
        self.entries.append(entry)
        return len(self.entries) - 1

    def tighten(self, index: int, deviation: Box, drift: Box) -> None:
        """Intersect the boxes of an entry with other boxes of the same unknowns."""
        entry = self.entries[index]
        self.entries[index] = replace(
            entry, deviation=entry.deviation.meet(deviation), drift=entry.drift.meet(drift)
        )

    def split(self, index: int) -> tuple[int, ...]:
        """Return the entries up to this one that have planes."""
        return tuple(i for i in range(index + 1) if self.entries[i].planes is not None)

    def bound(
        self, index: int, functional: Functional, slopes: Slopes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Bound functionals of one entry from below and above: two tensors [B]."""
        if not self.split(index):
            middle, spread = self.walk(index, functional, {})
            return middle - spread, middle + spread
        chosen = slopes or {}
        low = -sum_up(*self.walk(index, functional.negative(), chosen))
        return low, sum_up(*self.walk(index, functional, chosen))

    def walk(self, index: int, functional: Functional, slopes: Slopes) -> tuple[Tensor, Tensor]:
        """Return (m, s) [B]: functionals are at most m + s, and at least m - s without planes."""
        pending: dict[int, Functional] = {index: functional}
        count = functional.count
        middle = functional.parts[0].values.new_zeros(count)
        spread, size, terms = torch.zeros_like(middle), torch.zeros_like(middle), 8
        while pending:
            position = max(pending)
            current, entry = pending.pop(position), self.entries[position]
            terms += current.terms
            if entry.planes is not None:
                found = entry.planes.above(current, slopes.get(position, entry.planes.slopes()))
                middle, size = middle + found.constant, size + found.constant.abs()
                sources = found.sources
            else:
                if entry.noise is not None:
                    moved, wide, known = _noise(current, entry.noise)
                    middle, spread, size = middle + moved, spread + wide, size + known
                sources = entry.vjp(current)
            for source, part in sources:
                before = pending.get(source)
                if before is None:
                    pending[source] = part
                    continue
                total = pending[source] = before.plus(part)
                below = self.entries[source]  # for the rounding of the sum
                rounding = total.magnitude(below.deviation.mag(), below.drift.mag())
                spread = spread + 2 * EPS * rounding
        spread = spread * (1 + 2 * gamma(terms)) + size * (2 * gamma(terms))
        return middle, spread + 8 * EPS * middle.abs()


def _noise(functional: Functional, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
    """Return functionals of the noise: midpoint, radius, and the magnitudes of the midpoint."""
    spread = functional.magnitude(noise.deviation, noise.drift)
    if noise.nonlinear is not None:
        spread = spread + noise.nonlinear(functional)
    middle, size = torch.zeros_like(spread), torch.zeros_like(spread)
    for part, centre in (
        (functional.deviation, noise.deviation_centre),
        (functional.drift, noise.drift_centre),
    ):
        if part is not None and centre is not None:
            middle = middle + part.against(centre)
            size = size + part.magnitude(centre.abs())
    return middle, spread, size


def sum_up(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b rounded up."""
    return up(a + b)


@dataclass(frozen=True, slots=True)
class ReluChange:
    """The domain of relu(n + D) - relu(n): n in `base`, D in `moved`, n + D in `result`."""

    base: Box
    moved: Box
    result: Box

    def corners(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return n, D and the change at points [..., 27] that contain the extremes of every plane.

        The change is linear on the pieces into which n = 0 and n + D = 0 cut the polygon; their
        corners are among these points. Points outside of the polygon only loosen bounds.
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
    own: ReluChange
    """How the deviation changes: base h̃, moved e."""
    pair: ReluChange
    """How the drift changes: base h̃ + e, moved D."""
    start: tuple[Tensor, ...]

    @property
    def bent(self) -> Tensor:
        """Return the mask of elements whose sign is open in a kernel: only their slopes matter."""
        return _straddles(self.own.result) | _straddles(self.pair.result)

    def slopes(self) -> tuple[Tensor, ...]:
        """Return the initial slopes."""
        return self.start

    def scales(self) -> tuple[Tensor, ...]:
        """Return the step size of each slope for the search; 0 where the change is linear."""
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
    change: ReluChange,
    low: tuple[Tensor, Tensor],
    high: tuple[Tensor, Tensor],
    reference: Tensor,
) -> tuple[Adjoint, Adjoint, Tensor]:
    """Return the functionals of n and of the moved unknown that bound a part, and constants [B]."""
    window = (slice(None), *at(part.window))

    def on(tensor: Tensor) -> Tensor:
        return tensor.expand(tensor.shape[0], *part.shape)[window]

    def widened(box: Box) -> Box:
        inner = at(part.window)
        return Box(box.lo[inner], box.hi[inner])

    local = ReluChange(widened(change.base), widened(change.moved), widened(change.result))
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
    """Return the nearest float32 numbers, the format of slopes in a proof."""
    return slopes.float().double()


def plain_slopes(own: ReluChange, pair: ReluChange) -> tuple[Tensor, ...]:
    """Return the slopes of the sign that takes more of the box, the default in a proof."""
    on = (own.result.lo + own.result.hi > 0).double()
    sides = pair.base.lo + pair.base.hi + pair.result.lo + pair.result.hi
    both, zero = (sides > 0).double(), torch.zeros_like(on)
    return tuple(slope.unsqueeze(0) for slope in (on, on, zero, both, zero, both))


def first_slopes(own: ReluChange, pair: ReluChange) -> tuple[Tensor, ...]:
    """Return initial slopes, independent of the functionals.

    For every element they are those of the planes nearest to the change at the midpoint of the box,
    in float32; where the sign is known in both kernels, the exact slopes.
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
    change: ReluChange, candidates: Sequence[tuple[Tensor, Tensor]], sign: float
) -> tuple[Tensor, Tensor]:
    """Return, element by element, the slopes whose plane is nearest at the midpoint of the box."""
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
