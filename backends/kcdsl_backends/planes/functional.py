"""Linear functionals of both unknowns of a node: its deviation and its drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kcdsl_backends.affine.adjoint import Adjoint


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
            total(self.deviation, other.deviation),
            total(self.drift, other.drift),
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


def total(a: Adjoint | None, b: Adjoint | None) -> Adjoint | None:
    """Return a + b, where None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a.plus(b)


def only(unknown: Literal["deviation", "drift"], adjoint: Adjoint) -> Functional:
    """Return functionals of one unknown."""
    if unknown == "deviation":
        return Functional(adjoint, None)
    return Functional(None, adjoint)
