"""Affine forms over symbols in [-1, 1], and the linear constraints and cases that tie the symbols.

All numbers are float64; `SymbolForm.error` includes the rounding errors of this arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.drift.boxes import EPS, SAFE, Box, down, gamma, up

_FAINT = 1e-300
"""Bound of the sum of all underflow errors."""


@dataclass(frozen=True, slots=True)
class SymbolForm:
    """Numbers centre + Σ coefs·ε + e with |e| <= error, of any symbols ε in [-1, 1].

    Args:
        centre, error: [*S].
        coefs: [*S, N]; later symbols have coefficient 0.
    """

    centre: Tensor
    coefs: Tensor
    error: Tensor

    @staticmethod
    def constant(value: Tensor, error: Tensor | None = None) -> SymbolForm:
        """Return known numbers."""
        return SymbolForm(
            value,
            value.new_zeros(*value.shape, 0),
            torch.zeros_like(value) if error is None else error,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the numbers."""
        return tuple(self.centre.shape)

    def size(self) -> Tensor:
        """Return |centre| + Σ|coefs|, rounded up."""
        return (self.centre.abs() + self.coefs.abs().sum(-1)) * SAFE

    def range(self) -> Box:
        """Return a box of the numbers, without use of constraints on symbols."""
        radius = up((self.coefs.abs().sum(-1) * SAFE + self.error) * SAFE)
        return Box(down(self.centre - radius), up(self.centre + radius))

    def mapped(self, place: Callable[[Tensor], Tensor]) -> SymbolForm:
        """Rearrange the elements by a function that selects and moves elements."""
        index = place(torch.arange(self.centre.numel()).reshape(self.shape))
        flat = self.coefs.reshape(self.centre.numel(), -1)
        return SymbolForm(self.centre.flatten()[index], flat[index], self.error.flatten()[index])

    def expand(self, shape: tuple[int, ...]) -> SymbolForm:
        """Return the form broadcast to a shape."""
        if self.shape == shape:
            return self
        return self.mapped(lambda index: index.expand(shape))

    def __add__(self, other: SymbolForm) -> SymbolForm:
        shape = tuple(np.broadcast_shapes(self.shape, other.shape))
        a, b = self.expand(shape), other.expand(shape)
        one, two = _alike(a.coefs, b.coefs)
        centre, coefs = a.centre + b.centre, one + two
        size = centre.abs() + coefs.abs().sum(-1)
        return SymbolForm(centre, coefs, (a.error + b.error + 2 * EPS * size) * SAFE)

    def __neg__(self) -> SymbolForm:
        return SymbolForm(-self.centre, -self.coefs, self.error)

    def __sub__(self, other: SymbolForm) -> SymbolForm:
        return self + -other

    def times(self, factor: Tensor, off: Tensor | float = 0.0) -> SymbolForm:
        """Return the product with numbers that are at most `off` from `factor`, elementwise."""
        shape = tuple(np.broadcast_shapes(self.shape, tuple(factor.shape)))
        a, by = self.expand(shape), factor.expand(shape)
        centre, coefs = a.centre * by, a.coefs * by[..., None]
        wrong = by.abs() * a.error + (a.size() + a.error) * off
        size = centre.abs() + coefs.abs().sum(-1)
        return SymbolForm(centre, coefs, (wrong + 4 * EPS * size) * SAFE + _FAINT)

    def plus(self, value: Tensor, error: Tensor | float = 0.0) -> SymbolForm:
        """Return the sum with numbers that are at most `error` from `value`."""
        shape = tuple(np.broadcast_shapes(self.shape, tuple(value.shape)))
        a = self.expand(shape)
        centre = a.centre + value
        return SymbolForm(centre, a.coefs, (a.error + error + EPS * centre.abs()) * SAFE)

    def before(self, right: Tensor, off: Tensor | None = None) -> SymbolForm:
        """Return self @ right for numbers [..., k, n] at most `off` from `right`."""
        shape = np.broadcast_shapes(self.shape[:-2], right.shape[:-2])
        a = self.expand((*shape, *self.shape[-2:]))
        centre, magnitude = a.centre @ right, right.abs()
        coefs = torch.einsum(
            "...ikN,...kj->...ijN", a.coefs, right.expand(*shape, *right.shape[-2:])
        )
        wrong = a.error @ magnitude + gamma(a.shape[-1] + 4) * (a.size() @ magnitude)
        if off is not None:
            wrong = wrong + (a.size() + a.error) @ off
        return SymbolForm(centre, coefs, wrong * SAFE + _FAINT)

    @property
    def turned(self) -> SymbolForm:
        """Return the form with its last two dimensions exchanged."""
        return self.mapped(lambda index: index.transpose(-1, -2))

    def total(self) -> SymbolForm:
        """Return the sum over the last dimension, which is kept."""
        centre, coefs = self.centre.sum(-1, keepdim=True), self.coefs.sum(-2, keepdim=True)
        wrong = self.error.sum(-1, keepdim=True)
        wrong = wrong + gamma(self.shape[-1] + 4) * self.size().sum(-1, keepdim=True)
        return SymbolForm(centre, coefs, wrong * SAFE)


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pad coefficients to the same number of symbols."""
    many = max(a.shape[-1], b.shape[-1])
    padded = [torch.nn.functional.pad(one, (0, many - one.shape[-1])) for one in (a, b)]
    return padded[0], padded[1]


@dataclass(frozen=True, slots=True)
class Inequality:
    """Σ coefs·ε + constant <= 0, with the symbols of each coefficient."""

    symbols: tuple[int, ...]
    coefs: tuple[float, ...]
    constant: float


@dataclass(frozen=True, slots=True)
class Constraint:
    """A disjunction: all rows of at least one of the cases hold."""

    cases: tuple[tuple[Inequality, ...], ...]

    @property
    def symbols(self) -> frozenset[int]:
        """Return all symbols of the constraint."""
        return frozenset(i for case in self.cases for row in case for i in row.symbols)


@dataclass(slots=True)
class System:
    """The symbols of a problem and their constraints.

    Args:
        places: of every symbol, the place of its element in the flattened numbers.
        facts: linear constraints (one case) and case splits.
        inputs: number of leading symbols that are elements of the input.
        integers: symbols ε for which m + rε is an integer, with m and r.
    """

    places: list[int] = field(default_factory=list)
    facts: list[Constraint] = field(default_factory=list)
    inputs: int = 0
    integers: dict[int, tuple[float, float]] = field(default_factory=dict)

    def fresh(self, box: Box, shape: tuple[int, ...] | None = None) -> SymbolForm:
        """Return numbers of a box with one new symbol each; points get none."""
        box = box if shape is None else box.expand(shape)
        middle, radius = box.midpoint()
        own = (radius > 0).flatten().nonzero().flatten()
        first = len(self.places)
        self.places += own.tolist()
        coefs = torch.zeros(radius.numel(), len(self.places), dtype=torch.float64)
        coefs[own, torch.arange(first, len(self.places))] = radius.flatten()[own]
        return SymbolForm(middle, coefs.reshape(*radius.shape, -1), torch.zeros_like(middle))

    def codes(self, x: SymbolForm, scale: Tensor) -> None:
        """Constrain numbers to integer multiples of a scale, up to a relative 2^-22."""
        box, by = x.range(), scale.expand(x.shape)
        low, high = (box.lo / by).floor() - 1, (box.hi / by).ceil() + 1
        first = len(self.places)
        code = self.fresh(Box(low, high))
        middle, radius = Box(low, high).midpoint()
        for symbol, (m, r) in enumerate(
            zip(middle.flatten(), radius.flatten(), strict=True), first
        ):
            self.integers[symbol] = float(m), float(r)
        off = 2.0**-22 * by * torch.maximum(low.abs(), high.abs())
        apart = (x - code.times(by)).plus(torch.zeros_like(off), off)
        for place in range(box.lo.numel()):
            self.facts.append(Constraint(((row(apart, place), row(-apart, place)),)))

    def relu(self, h: SymbolForm, d: SymbolForm, boxes: tuple[Box, Box], change: Box) -> ReluPair:
        """Return max(h, 0) and max(h + d, 0) - max(h, 0), with case splits for undecided signs.

        Args:
            h, d: value of one kernel, and the other kernel's minus it.
            boxes: of h and of h + d.
            change: box of d.
        """
        one, two = boxes
        on, off = (one.lo >= 0) & (two.lo >= 0), (one.hi <= 0) & (two.hi <= 0)
        open_, zero = ~on & ~off, torch.zeros_like(one.lo)
        keep = on.to(torch.float64)
        high = torch.where(open_, one.hi.clamp_min(0), zero)
        below, above = change.lo.clamp_max(0), change.hi.clamp_min(0)
        changed = Box(torch.where(open_, below, zero), torch.where(open_, above, zero))
        y = h.times(keep) + self.fresh(Box(zero, high))
        moved = d.times(keep) + self.fresh(changed)
        other = h + d
        for place in open_.flatten().nonzero().flatten().tolist():
            same, still = _equal(y, h, place), _equal(moved, d, place)
            none, flat = (row(y, place),), (row(moved, place), row(-moved, place))
            gone, new = _equal(moved, -h, place), _equal(moved, other, place)
            is_on, is_off = (row(-h, place),), (row(h, place),)
            then_on, then_off = (row(-other, place),), (row(other, place),)
            low, top = (float(box.flatten()[place]) for box in (one.lo, one.hi))
            after, last = (float(box.flatten()[place]) for box in (two.lo, two.hi))
            # a value that is 0 throughout is on
            may_on, then_may_on = top > 0 or low >= 0, last > 0 or after >= 0
            ways = [
                (may_on and then_may_on, (*is_on, *then_on, *same, *still)),
                (low < 0 and after < 0, (*is_off, *then_off, *none, *flat)),
                (may_on and after < 0, (*is_on, *then_off, *same, *gone)),
                (low < 0 and then_may_on, (*is_off, *then_on, *none, *new)),
            ]
            self.facts.append(Constraint(tuple(rows for may, rows in ways if may)))
            lines = [row(h - y, place), row(-y, place)]
            if low < 0 < top:
                lines.append(_below_chord(y, h, (low, top), place))
            least, most = float(below.flatten()[place]), float(above.flatten()[place])
            if least < 0 < most:
                lines.append(_below_chord(moved, d, (least, most), place))
                lines.append(_below_chord(-moved, -d, (-most, -least), place))
            self.facts.append(Constraint((tuple(lines),)))
        return ReluPair(y, moved)


@dataclass(frozen=True, slots=True)
class ReluPair:
    """A rectified value, and that of the other kernel minus it."""

    value: SymbolForm
    change: SymbolForm


def _equal(a: SymbolForm, b: SymbolForm, place: int) -> tuple[Inequality, Inequality]:
    return row(a - b, place), row(b - a, place)


def _below_chord(y: SymbolForm, x: SymbolForm, ends: tuple[float, float], place: int) -> Inequality:
    """Return y <= high (x - low) / (high - low) for low < 0 < high."""
    low, high = ends
    slope = torch.tensor(high / (high - low), dtype=torch.float64)
    return row((y - x.times(slope)).plus(slope * low, 8 * EPS * (high - low)), place)


_BITS = 24
"""Bits to which coefficients of a row are rounded; the error is added to the row."""
_LEAST = 2.0**-900
"""Coefficients up to this size become part of the error: they are too small for the grid."""


def row(form: SymbolForm, place: int) -> Inequality:
    """Return form <= 0 for one element, weakened by the error of the form and by rounding."""
    coefs = form.coefs.reshape(form.centre.numel(), -1)[place]
    largest = float(coefs.abs().amax()) if coefs.numel() else 0.0
    centre, slack = form.centre.flatten()[place], form.error.flatten()[place]
    symbols: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    if largest > _LEAST:
        grid = 2.0 ** (torch.tensor(largest, dtype=torch.float64).log2().floor() - _BITS)
        rounded = (coefs / grid).round() * grid
        slack = slack + (coefs - rounded).abs().sum() * SAFE
        kept = rounded.nonzero().flatten()
        symbols, values = tuple(kept.tolist()), tuple(rounded[kept].tolist())
        constant = down(centre - up(slack * SAFE))
        return Inequality(symbols, values, float((constant / grid).floor() * grid))
    slack = slack + coefs.abs().sum() * SAFE
    return Inequality((), (), float(down(centre - up(slack * SAFE))))
