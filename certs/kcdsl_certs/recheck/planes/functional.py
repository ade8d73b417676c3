"""Functionals Σ a·e + Σ b·D of a node: of its deviation and of its drift (section 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, merged
from kcdsl_certs.recheck.box import Bools, Floats


@dataclass(frozen=True, slots=True)
class Functional:
    """A batch of functionals; `e` holds a and `d` holds b, None where they are zero."""

    e: Adjoint | None
    d: Adjoint | None

    @property
    def parts(self) -> tuple[Adjoint, ...]:
        """Return the parts that are not zero."""
        return tuple(part for part in (self.e, self.d) if part is not None)

    @property
    def batch(self) -> int:
        """Return how many functionals these are."""
        return self.parts[0].batch

    @property
    def terms(self) -> int:
        """Return how many numbers one of them has."""
        return sum(part.values[0].size for part in self.parts)

    def map(self, change: Callable[[Adjoint], Adjoint]) -> Functional:
        """Return both parts changed in the same way."""
        return Functional(
            None if self.e is None else change(self.e),
            None if self.d is None else change(self.d),
        )

    def times(self, factor: float) -> Functional:
        """Return the functionals multiplied by a number."""
        return self.map(lambda a: Adjoint(a.values * factor, a.start))

    def masked(self, kept: tuple[Bools | None, Bools | None]) -> Functional:
        """Return the functionals with nothing where an element is not kept."""
        e, d = (
            part if part is None or mask is None else part.times(mask)
            for part, mask in zip((self.e, self.d), kept, strict=True)
        )
        return Functional(e, d)

    def sums(self, weights: tuple[Floats, Floats]) -> Floats:
        """Return Σ a·weights_e + Σ b·weights_d [B]."""
        found = np.zeros(self.batch)
        for part, weight in zip((self.e, self.d), weights, strict=True):
            if part is not None:
                found = found + part.sums(weight)
        return found

    def sizes(self, weights: tuple[Floats, Floats]) -> Floats:
        """Return Σ |a|·weights_e + Σ |b|·weights_d [B]."""
        found = np.zeros(self.batch)
        for part, weight in zip((self.e, self.d), weights, strict=True):
            if part is not None:
                found = found + part.sizes(weight)
        return found


def joined(one: Adjoint | None, two: Adjoint | None) -> Adjoint | None:
    """Return a sum in which None is zero."""
    if one is None or two is None:
        return two if one is None else one
    return merged(one, two)


def together(one: Functional, two: Functional) -> Functional:
    """Return the sum of functionals of one node."""
    return Functional(joined(one.e, two.e), joined(one.d, two.d))
