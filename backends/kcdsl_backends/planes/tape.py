"""The tape: what is known of every node, and how functionals are pulled back through it.

Every node n has two unknowns: the deviation e = h - h̃ of the training kernel's value from a known
reference h̃, and the drift D = h' - h. An entry encloses both in boxes, and says how a functional of
(e, D) is bounded by functionals of its operands' (e, D): exactly, plus noise of its own, or from
above by planes (docs/difference-planes.md, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from kcdsl_backends.interval.box import EPS, Box, gamma, up
from kcdsl_backends.planes.functional import Functional

SAFE = 1.0 + 2.0**-40
"""Covers the float64 error of a sum of up to 4,000 non-negative numbers, with room to spare."""

Source = tuple[int, Functional]
Pull = Callable[[Functional], Sequence[Source]]


@dataclass(frozen=True, slots=True)
class Noise:
    """What a node adds to the linear part: centres (None: zero) and radii of both unknowns.

    `curved` bounds, functional by functional [B], what is added beside that.
    """

    deviation: Tensor
    drift: Tensor
    deviation_centre: Tensor | None = None
    drift_centre: Tensor | None = None
    curved: Callable[[Functional], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Above:
    """Functionals of operands and constants [B] that together bound a functional from above."""

    sources: Sequence[Source]
    constant: Tensor


class Planes(Protocol):
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
class Entry:
    """One node: the boxes of its unknowns and its linear bounds; `planes` instead of pull + noise.

    Functionals of (e, D) are those that `pull` returns, of earlier entries, plus at most the noise.
    """

    name: str
    reference: Tensor
    deviation: Box
    drift: Box
    pull: Pull
    noise: Noise | None = None
    planes: Planes | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the node."""
        return tuple(self.reference.shape)


Slopes = dict[int, tuple[Tensor, ...]]
"""Slopes of the planes of some entries, in place of those to start with."""


@dataclass(slots=True)
class Tape:
    """Entries in the order of the graph."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, entry: Entry) -> int:
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
                sources = entry.pull(current)
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
    if noise.curved is not None:
        spread = spread + noise.curved(functional)
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
