"""Deviations and drifts of both kernels as one linear recurrence, and its functionals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.boxes.box import EPS, Box, gamma, up

LINEAR_PASS = 16
"""Roundings of an adjoint beside those of the products: sums of adjoints, and the noise."""


@dataclass(frozen=True, slots=True)
class Functional:
    """B functionals Σ a·e + Σ b·D of a node with deviation e and drift D.

    `deviation` holds a, `drift` holds b; None is zero. Not both are None.
    """

    deviation: Adjoint | None
    drift: Adjoint | None

    @property
    def count(self) -> int:
        """Return the number of functionals."""
        return self.parts[0].values.shape[0]

    @property
    def parts(self) -> tuple[Adjoint, ...]:
        """Return what is not zero."""
        return tuple(part for part in (self.deviation, self.drift) if part is not None)

    @property
    def terms(self) -> int:
        """Return how many numbers each functional has."""
        return sum(part.values[0].numel() for part in self.parts)

    def each(self, change: Callable[[Adjoint], Adjoint]) -> Functional:
        """Apply the same linear map to both parts."""
        return Functional(
            None if self.deviation is None else change(self.deviation),
            None if self.drift is None else change(self.drift),
        )

    def negative(self) -> Functional:
        """Return the functionals with the other sign."""
        return self.each(lambda part: part.times(-1.0))

    def plus(self, other: Functional) -> Functional:
        """Return the sums of functionals of the same node."""
        return Functional(
            added_adjoints(self.deviation, other.deviation),
            added_adjoints(self.drift, other.drift),
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
    """What a node adds to the linear part: centres (None: zero) and radii of both unknowns.

    `nonlinear` bounds, functional by functional [B], what is added beside that.
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


class LinearBounds(Protocol):
    """A pair of planes for either unknown, which of them depends on the sign of the functional."""

    def above(self, functional: Functional, slopes: Sequence[Tensor]) -> Above:
        """Bound the functionals from above by the planes with these slopes."""

    @property
    def bent(self) -> Tensor:
        """Say of which elements the slopes matter."""

    def slopes(self) -> tuple[Tensor, ...]:
        """Return the slopes to start with; any others are sound as well."""

    def scales(self) -> tuple[Tensor, ...]:
        """Return how far each slope may be worth moving; 0 where the start is the best."""


@dataclass(frozen=True, slots=True)
class LinearEntry:
    """One node: the boxes of its unknowns and its linear bounds; `planes` instead of vjp + noise.

    Functionals of (e, D) are those that `vjp` returns, of earlier entries, plus at most the noise.
    """

    name: str
    reference: Tensor
    deviation: Box
    drift: Box
    vjp: LinearVJP
    noise: Noise | None = None
    planes: LinearBounds | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the node."""
        return tuple(self.reference.shape)


Slopes = dict[int, tuple[Tensor, ...]]
"""Slopes of the planes of some entries, in place of those to start with."""


@dataclass(slots=True)
class LinearTape:
    """Entries in the order of the graph."""

    entries: list[LinearEntry] = field(default_factory=list)

    def add(self, entry: LinearEntry) -> int:
        """Append an entry and return its index."""
        self.entries.append(entry)
        return len(self.entries) - 1

    def tighten(self, index: int, deviation: Box, drift: Box) -> None:
        """Intersect the boxes of an entry with others that hold the same unknowns."""
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
                below = self.entries[source]  # the sum itself rounds
                rounding = total.magnitude(below.deviation.mag(), below.drift.mag())
                spread = spread + 2 * EPS * rounding
        spread = spread * (1 + 2 * gamma(terms)) + size * (2 * gamma(terms))
        return middle, spread + 8 * EPS * middle.abs()


def _noise(functional: Functional, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
    """Return what noise adds to functionals: middle, spread, and the magnitudes of the middle."""
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
    """Return a + b, rounded up."""
    return up(a + b)
