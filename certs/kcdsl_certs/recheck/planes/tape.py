"""The tape: boxes of both unknowns of every node, and how functionals are pulled back (section 2).

An entry says of functionals f of its node that f = pull(f) + what is added, the latter in
centre ± radius element by element and within `curved` functional by functional; or, at a ReLU,
that f is at most another functional and a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.box import Bools, Box, Floats
from kcdsl_certs.recheck.planes.functional import Functional, together
from kcdsl_certs.recheck.planes.relu import Relu, Slopes
from kcdsl_certs.rejected import Rejected

UNIT = 2.0**-53
FAINT = 2.0**-900  # more than an operation may lose to float64 underflow

Pull = Callable[[Functional], Sequence[tuple[int, Functional]]]
Pair = tuple[Floats, Floats]
"""What belongs to the deviation, and what belongs to the drift."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One node: reference, boxes of e and D, and its linear bounds.

    Where `kept` is False an element has neither a linear nor a curved part: centre ± radius is its
    box. A ReLU has planes instead of all that.
    """

    reference: Floats
    e: Box
    d: Box
    pull: Pull
    centre: Pair
    radius: Pair
    kept: tuple[Bools | None, Bools | None] = (None, None)
    curved: Callable[[Functional], Floats] | None = None
    relu: Relu | None = None

    @property
    def sizes(self) -> Pair:
        """Return the largest magnitudes of e and D."""
        return box.magnitude(self.e), box.magnitude(self.d)


@dataclass(slots=True)
class Tape:
    """Entries in the order of the graph; `bent` are the places of ReLUs."""

    entries: list[Entry] = field(default_factory=list)
    bent: list[int] = field(default_factory=list)
    _still: list[bool] = field(default_factory=list)
    _total: float = 1.0

    def add(self, entry: Entry) -> int:
        """Append an entry and return its place.

        Raises:
            Rejected: "bound/not-finite".
        """
        parts = (*entry.sizes, *entry.centre, *entry.radius, entry.reference)
        if not all(bool(np.isfinite(part).all()) for part in parts):
            raise Rejected("bound/not-finite", "deviation or drift has no finite bound")
        self.entries.append(entry)
        place = len(self.entries) - 1
        if entry.relu is not None:
            self.bent.append(place)
        self._still.append(not any(part.any() for part in entry.sizes))
        self._total += sum(float(part.sum()) for part in entry.sizes)
        return place

    def sharpen(self, place: int, e: Box, d: Box) -> None:
        """Meet the boxes of an entry with others that hold the same."""
        entry = self.entries[place]
        self.entries[place] = replace(entry, e=box.meet(entry.e, e), d=box.meet(entry.d, d))

    def between(
        self, place: int, functional: Functional, slopes: Mapping[int, Slopes] | None = None
    ) -> tuple[Floats, Floats]:
        """Return bounds [B] of functionals of one entry from below and above."""
        middle, wide = self.walk(place, functional, slopes or {})
        high = box.above(middle + wide)
        if not any(at <= place for at in self.bent):
            return box.down(middle - wide), high
        middle, wide = self.walk(place, functional.times(-1.0), slopes or {})
        return -box.above(middle + wide), high

    def walk(
        self, place: int, functional: Functional, slopes: Mapping[int, Slopes]
    ) -> tuple[Floats, Floats]:
        """Return m and s ≥ 0 [B]: functionals are at most m + s, and without ReLUs at least m - s.

        `slopes` are taken at the ReLUs that they name, in place of those that an entry has.
        """
        count = functional.batch
        middle, wide, known = np.zeros(count), np.zeros(count), np.zeros(count)
        pending, terms = {place: functional}, 64
        while pending:
            at = max(pending)
            current, entry = pending.pop(at), self.entries[at]
            if self._still[at]:
                continue
            terms += current.terms
            if entry.relu is not None:
                planes = entry.relu.above(current, slopes.get(at))
                middle, wide = middle + planes.constant, wide + planes.inexact
                known = known + planes.size
                below: Sequence[tuple[int, Functional]] = [(entry.relu.source, planes.functional)]
            else:
                middle, known = middle + current.sums(entry.centre), known + _known(current, entry)
                wide = wide + current.sizes(entry.radius)
                kept = current.masked(entry.kept)
                if entry.curved is not None:
                    wide = wide + entry.curved(kept)
                below = entry.pull(kept)
            for source, part in below:
                if source in pending:
                    part = together(pending[source], part)
                    wide = wide + 2 * UNIT * part.sizes(self.entries[source].sizes)
                pending[source] = part
        slack = 4 * terms * UNIT
        wide = wide * (1 + slack) + known * slack + 2.0**-800 * self._total
        finite = np.isfinite(middle) & np.isfinite(wide)
        return np.where(finite, middle, 0.0), np.where(finite, wide, np.inf)


def _known(functional: Functional, entry: Entry) -> Floats:
    """Return the magnitudes of the terms of what is known."""
    centre = np.abs(entry.centre[0]), np.abs(entry.centre[1])
    return functional.sizes(centre)
