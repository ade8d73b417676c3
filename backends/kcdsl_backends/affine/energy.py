"""The Euclidean norm of many functionals of one entry, taken together (section 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl_backends.affine.adjoint import Adjoint, at, by_rows, meet
from kcdsl_backends.affine.ellipsoids import around_sum, image
from kcdsl_backends.affine.spectra import largest_eigenvalue
from kcdsl_backends.affine.tape import INPUT, SAFE, Entry, Tape

ROUNDED = 2.0**-36
"""More than the relative error of a product of adjoints in a reverse pass."""
FACTORED = 2.0**-24
"""More than √n times the relative error of the columns of a QR factorisation."""


@dataclass(slots=True)
class _Gram:
    """What a reverse pass of B functionals says of their norm.

    With columns b_j of the symbols, |Σ b_j ξ_j|² <= (Σ d_j) λ for any d > 0, where λ is the largest
    eigenvalue of Σ b_j b_jᵀ/d_j; d_j = |b_j| here. `middle` [B] is added to the functionals,
    `loose` [B] bounds further parts one by one, `further` the norm of others; ellipsoids of the
    functionals of others stand in `parts`.
    """

    products: Tensor
    middle: Tensor
    loose: Tensor
    trace: float = 0.0
    further: float = 0.0
    parts: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(values: Tensor) -> _Gram:
        count = values.shape[0]
        zero = values.new_zeros(count)
        return _Gram(values.new_zeros(count, count), zero, zero.clone())

    def add(self, functional: Adjoint, radius: Tensor) -> None:
        """Take in a symbol for every element."""
        part = radius.expand(functional.shape)[at(functional.window)].flatten()
        columns = functional.values.flatten(1) * part
        sizes = columns.norm(dim=0)
        self.products += (columns / sizes.clamp_min(2.0**-900)) @ columns.T
        self.trace += float(sizes.sum())

    def symbols(self, functional: Adjoint, entry: Entry) -> None:
        """Take in what is known of an entry element by element."""
        if entry.apart is not None:
            self.add(functional, entry.apart.radius)
            self.further += entry.apart.rest.together(functional)
        elif entry.radius is not None:
            self.add(functional, entry.radius)

    def beside(self, functional: Adjoint, entry: Entry) -> None:
        """Take in what an entry adds, without its radius."""
        if entry.centre is not None:
            self.middle = self.middle + functional.against(entry.centre)
            self.loose += 2.0**-30 * functional.magnitude(entry.centre.abs())
        if entry.curved is not None:
            self.further += entry.curved.together(functional)
        self.loose += ROUNDED * functional.magnitude(entry.widest)

    def merge(self, below: _Gram, factor: float) -> None:
        """Take in the functionals below an entry that amplifies them by up to 1 + factor."""
        self.further += factor * below.norm() + below.further
        self.products += below.products
        self.trace += below.trace
        self.middle = self.middle + below.middle
        self.loose += below.loose

    def floor(self, functional: Adjoint, entry: Entry) -> None:
        """Take in the error of an entry at which a pass stops: row by row."""
        self.loose += ROUNDED * functional.magnitude(entry.widest)
        for row, part in by_rows(functional):
            columns = slice(*part.window[-1])
            if row not in entry.ellipsoids:
                self.add(part, entry.reach)
                continue
            matrix = entry.ellipsoids[row][columns, columns]
            self.parts.append(image(matrix, part.values.flatten(1)))

    @property
    def rest(self) -> float:
        """Return the norm of what is no symbol."""
        return float(self.middle.norm() + self.loose.norm()) + self.further

    def norm(self) -> float:
        """Return a bound of the norm."""
        together = math.sqrt(self.trace * largest_eigenvalue(self.products, self.trace))
        return (together + self.rest) * (1 + 2.0**-30)

    def ellipsoid(self) -> Tensor:
        """Return an ellipsoid [B, B] around the functionals."""
        unit = torch.eye(len(self.middle), dtype=self.middle.dtype, device=self.middle.device)
        own = self.trace * self.products
        return around_sum([*self.parts, own, self.rest**2 * unit])


def norm(tape: Tape, index: int, functionals: Adjoint) -> float:
    """Bound the Euclidean norm of functionals of the error of one entry."""
    return _pass(tape, {index: functionals}, functionals.values).norm()


def ellipsoid(tape: Tape, index: int, functionals: Adjoint, floor: int) -> Tensor:
    """Return an ellipsoid [B, B] around functionals of the error of one entry.

    Args:
        floor: what arrives there or before is bounded by ellipsoids and reaches there.
    """
    return _surrounded(tape, {index: functionals}, functionals.values, floor).ellipsoid()


def _surrounded(tape: Tape, pending: dict[int, Adjoint], values: Tensor, floor: int) -> _Gram:
    gram = _Gram.of(values)
    while pending:
        index = max(pending)
        functional = pending.pop(index)
        if index == INPUT:
            gram.add(functional, tape.radius)
            break
        entry = tape.entries[index]
        if index <= floor:
            gram.floor(functional, entry)
            continue
        gram.beside(functional, entry)
        gram.symbols(functional, entry)
        pulled = entry.pull(functional)
        if entry.amplified is not None:
            if not pending and len(pulled) == 1 and functional.single_row:
                factor = float(entry.amplified.factor.expand(entry.shape)[functional.first])
                below = _surrounded(tape, dict(pulled), values, floor).ellipsoid()
                gram.parts.append(below * (1 + factor) ** 2 * (1 + 2.0**-40))
                break
            gram.loose += functional.magnitude(entry.amplified.loose) * SAFE
        meet(pending, pulled)
    return gram


def _pass(tape: Tape, pending: dict[int, Adjoint], values: Tensor) -> _Gram:
    gram = _Gram.of(values)
    while pending:
        index = max(pending)
        functional = pending.pop(index)
        if index == INPUT:
            gram.add(functional, tape.radius)
            break
        entry = tape.entries[index]
        pulled = entry.pull(functional)
        gram.beside(functional, entry)
        alone = not pending and len(pulled) == 1
        if alone and pulled[0][1].values[0].numel() < values.shape[0]:
            if entry.radius is not None:
                gram.loose += functional.magnitude(entry.radius) * SAFE
            source, part = pulled[0]
            inexact = FACTORED * part.magnitude(tape.entries[source].reach).norm()
            gram.further += (norm(tape, source, _compressed(part)) + float(inexact)) * SAFE
            if entry.amplified is not None:
                gram.loose += functional.magnitude(entry.amplified.loose) * SAFE
            break
        gram.symbols(functional, entry)
        if entry.amplified is not None:
            if alone and functional.single_row:
                factor = entry.amplified.factor.expand(entry.shape)[functional.first]
                gram.merge(_pass(tape, dict(pulled), values), float(factor))
                break
            gram.loose += functional.magnitude(entry.amplified.loose) * SAFE
        meet(pending, pulled)
    return gram


def _compressed(functionals: Adjoint) -> Adjoint:
    """Return as many functionals as the window has elements, with the same norm: R of A = QR."""
    count = functionals.values.shape[0]
    triangular = torch.linalg.qr(functionals.values.reshape(count, -1), mode="r").R
    shape = (triangular.shape[0], *functionals.values.shape[1:])
    return Adjoint(triangular.reshape(shape), functionals.window, functionals.shape)
