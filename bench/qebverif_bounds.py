"""Bounds of a ReLU network and its copy in fixed point, with optimised slopes.

"Fixed point" in section 9 of docs/proofs/difference-planes.md. The second network rounds its
hidden values to multiples of a step. A result is a proof only if the checker re-derives it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.qebverif_checker import Round, SlopeProof
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.linear.constraints import Layers
from kcdsl_backends.drift.linear.paired import chord, nearest
from kcdsl_certs.recheck.linear_bounds.constraints import Grid


@dataclass(frozen=True, slots=True)
class Steps:
    """Gradient steps on slopes: their number, the size of the first, its ratio to the last."""

    count: int
    size: float = 0.03
    ratio: float = 0.01


QUICK = Steps(100, 0.1, 0.05), Steps(0)
"""Steps for outputs, and for the differences of hidden elements."""
THOROUGH = Steps(500), Steps(20, 0.006, 0.3)

PROGRESS = 0.001
"""Rounds end where one lowers the bound by a smaller part of the limit."""
STEPS, RATE = 60, 0.03
_ROWS = 100

Slopes = list[tuple[Tensor, Tensor]]
"""Slopes in z and in z + D [M, n] of each hidden layer."""


@dataclass(frozen=True, slots=True)
class Functionals:
    """P·f + Q·g of a layer's results in both networks, [M, n] each."""

    first: Tensor
    second: Tensor


@dataclass(frozen=True, slots=True)
class Ranges:
    """Boxes [n] of z, D and z + D in a layer."""

    z: tuple[Tensor, Tensor]
    d: tuple[Tensor, Tensor]
    other: tuple[Tensor, Tensor]

    @staticmethod
    def of(found: Tensor) -> Ranges:
        """Return the boxes from bounds [6 n] of the functionals of `_each`."""
        high, low, d_high, d_low, upper, lower = (
            sign * part for sign, part in zip((1, -1) * 3, found.chunk(6), strict=True)
        )
        lower, upper = torch.maximum(lower, low + d_low), torch.minimum(upper, high + d_high)
        d_low, d_high = torch.maximum(d_low, lower - high), torch.minimum(d_high, upper - low)
        return Ranges((low, high), (d_low, d_high), (lower, upper))

    @property
    def empty(self) -> bool:
        """Return whether no value meets all boxes of some element."""
        return any(bool((low > high).any()) for low, high in (self.z, self.d, self.other))

    def bounds(self) -> Tensor:
        """Return the bounds [6 n] that `of` takes."""
        return torch.cat(
            [
                sign * end
                for box in (self.z, self.d, self.other)
                for sign, end in zip((1, -1), box[::-1], strict=True)
            ]
        )

    def all_points(self, grid: Grid) -> Points:
        """Return the points where z + D is rounded to any level."""
        least = torch.zeros(1, len(self.z[0]), dtype=torch.float64)
        return self.points(grid, least, torch.full_like(least, float(grid.most)))

    def points(self, grid: Grid, least: Tensor, largest: Tensor) -> Points:
        """Return the points of section 9 where z + D is rounded to levels [M, n] in a range."""
        (z_low, z_high), (d_low, d_high), step = self.z, self.d, grid.step
        low = torch.where(least > 0, (least - 0.5) * step, self.other[0])
        low = torch.maximum(low, self.other[0])
        high = torch.where(largest < grid.most, (largest + 0.5) * step, self.other[1])
        high = torch.maximum(low, torch.minimum(high, self.other[1]))
        ends = (low, high, d_low, d_high, *(a + b for a in self.z for b in self.d))
        bends = torch.stack([end.expand(low.shape) for end in ends])
        bends = torch.minimum(torch.maximum(bends, low), high)
        jumps = torch.cat([(bends / step + 0.5).floor() - 0.5, (bends / step - 0.5).ceil() + 0.5])
        jumps = step * torch.minimum(torch.maximum(jumps, least + 0.5), largest - 0.5)
        second = torch.cat([bends, torch.where((jumps >= low) & (jumps <= high), jumps, low)])
        second = _distinct(second)
        z_least = torch.maximum(z_low, second - d_high)
        z_most = torch.maximum(z_least, torch.minimum(z_high, second - d_low))
        zero = torch.minimum(torch.maximum(torch.zeros_like(z_least), z_least), z_most)
        first, second = torch.cat([z_least, z_most, zero]), torch.cat([second] * 3)
        levels = (
            step * torch.minimum(torch.maximum(level, least), largest)
            for level in ((second / step + 0.5).floor(), (second / step - 0.5).ceil())
        )
        return Points(torch.stack([first.clamp_min(0), *levels, first, second]))


def _each(count: int) -> Functionals:
    """Return the functionals z, -z, D, -D, z + D, -(z + D) of all elements of a layer."""
    one = torch.eye(count, dtype=torch.float64)
    none = torch.zeros_like(one)
    return Functionals(
        torch.cat([one, -one, -one, one, none, none]), torch.cat([none, none, one, -one, one, -one])
    )


def _distinct(values: Tensor) -> Tensor:
    """Sort along the first dimension, without numbers that every column has more than once."""
    values = values.sort(0).values
    new = torch.ones_like(values, dtype=torch.bool)
    new[1:] = values[1:] > values[:-1]
    order = (~new).byte().argsort(dim=0, stable=True)
    return values.gather(0, order[: int(new.sum(0).max())])


@dataclass(frozen=True, slots=True)
class Points:
    """Points [5, C, M or 1, n]: relu(z), the largest and least rounded z + D, z, z + D."""

    table: Tensor

    def most(self, p: Tensor, q: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the largest p relu(z) + q g - a z - b (z + D) of each element, [M, n] each."""
        value, high, low, first, second = self.table
        with torch.no_grad():
            level = torch.where(q > 0, high, low)
            heights = p * value + q * level - a * first - b * second
            share = (heights == heights.amax(0)).to(p.dtype)
            share /= share.sum(0)
            value, level, first, second = (
                (share * part).sum(0) for part in (value, level, first, second)
            )
        found: Tensor = p * value + q * level - a * first - b * second
        return found


@dataclass(slots=True)
class Assumed:
    """Slopes and a bound of a functional where it is at least a limit, and the rounds for it."""

    slopes: Slopes
    bound: float
    rounds: list[Round]


@dataclass(frozen=True, slots=True)
class Goal:
    """const + first·z + second·(z + D) of a hidden layer, [1], [1, n] and [1, n]."""

    const: Tensor
    first: Tensor
    second: Tensor


@dataclass(slots=True)
class FixedPointPair:
    """A network f and its copy g, whose hidden values are rounded to a grid, on a box.

    Raises:
        NoBound: a hidden element has no bound.
    """

    networks: tuple[Layers, Layers]
    grid: Grid
    low: Sequence[Fraction]
    high: Sequence[Fraction]
    steps: tuple[Steps, Steps] = QUICK
    box: Tensor = field(init=False)
    ranges: list[Ranges] = field(init=False, default_factory=list)
    points: list[Points] = field(init=False, default_factory=list)
    hidden: list[NDArray[np.float32]] = field(init=False, default_factory=list)
    """The slopes of the proofs of the ranges."""

    def __post_init__(self) -> None:
        first, second = (
            [(weight.double(), bias.double()) for weight, bias in network]
            for network in self.networks
        )
        self.networks = first, second
        ends = [
            [math.nextafter(float(v), side * math.inf) for v in values]
            for side, values in ((-1, self.low), (1, self.high))
        ]
        self.box = torch.tensor(ends, dtype=torch.float64)
        for number in range(len(first) - 1):
            self._grow(number)

    def _grow(self, number: int) -> None:
        rows = _each(len(self.networks[0][number][1]))
        count, changes = (
            len(rows.first) // 6,
            slice(2 * len(rows.first) // 6, 4 * len(rows.first) // 6),
        )
        parts = [
            self._optimised(number, Functionals(rows.first[part], rows.second[part]), steps)
            for part, steps in (
                (slice(2 * count), Steps(0)),
                (changes, self.steps[1]),
                (slice(4 * count, None), Steps(0)),
            )
        ]
        found = torch.cat([bounds for bounds, _ in parts])
        slopes = [
            (torch.cat([a for a, _ in both]), torch.cat([b for _, b in both]))
            for both in zip(*(slopes for _, slopes in parts), strict=True)
        ]
        self.hidden.append(packed(slopes, len(rows.first)))
        if not bool(torch.isfinite(found).all()):
            raise NoBound(f"layer {number}", "a hidden element has no bound")
        self.ranges.append(Ranges.of(found))
        self.points.append(self.ranges[-1].all_points(self.grid))

    def bounded(self, rows: Functionals) -> tuple[Tensor, Slopes]:
        """Return upper bounds [M] of functionals of the outputs, and their slopes.

        The slopes are optimised by gradient steps on the bounds.
        """
        return self._optimised(len(self.networks[0]) - 1, rows, self.steps[0])

    def _optimised(self, number: int, rows: Functionals, steps: Steps) -> tuple[Tensor, Slopes]:
        best, kept = self._started(number, rows)
        own = [(a.clone(), b.clone()) for a, b in kept]
        flat = [part.requires_grad_() for both in own for part in both]
        if not flat or not steps.count:
            return best, kept
        optimiser = torch.optim.Adam(flat, lr=steps.size)
        for step in range(steps.count):
            optimiser.param_groups[0]["lr"] = steps.size * steps.ratio ** (step / steps.count)
            found, _ = self._above(number, rows, own)
            best, kept = _better(best, kept, found.detach(), own)
            optimiser.zero_grad()
            torch.autograd.backward(found.sum())
            optimiser.step()
        return best, kept

    def _started(self, number: int, rows: Functionals) -> tuple[Tensor, Slopes]:
        """Bound functionals of a layer with the better of two kinds of planes."""
        first = self._above(number, rows, together=True)
        return _better(*first, *self._above(number, rows, together=False))

    def proof(self, slopes: Slopes) -> SlopeProof:
        """Return the proof for the checker, with these slopes of the constraints."""
        return SlopeProof(self.hidden, packed(slopes, 0))

    def _above(
        self, number: int, rows: Functionals, slopes: Slopes | None = None, together: bool = True
    ) -> tuple[Tensor, Slopes]:
        """Bound functionals with given slopes, or with initial slopes from planes.

        Args:
            together: planes of the change of ReLU; otherwise planes of either network.
        """
        used: Slopes = []
        p, q, total = rows.first, rows.second, torch.zeros_like(rows.first[:, 0])
        for k in range(number, -1, -1):
            total, p, q = self._through(k, total, p, q)
            if not k:
                break
            if slopes is not None:
                a, b = slopes[k - 1]
            elif together:
                a, b = _of_the_change(self.ranges[k - 1], p, q)
            else:
                a, b = _of_either(self.ranges[k - 1], self.grid, p, q)
            used.append((a, b))
            total = total + self.points[k - 1].most(p, q, a, b).sum(-1)
            p, q = a, b
        back = p + q
        total = total + back.clamp_min(0) @ self.box[1] + back.clamp_max(0) @ self.box[0]
        return total, used[::-1]

    def _through(self, k: int, total: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        (weight, bias), (other, shift) = (network[k] for network in self.networks)
        return total + p @ bias + q @ shift, p @ weight, q @ other

    def _before(self, rows: Functionals, slopes: Slopes) -> list[tuple[Tensor, ...]]:
        """Return k [M], a, b [M, n] of an upper bound k + a z + b (z + D) by hidden layer."""
        p, q, total = rows.first, rows.second, torch.zeros_like(rows.first[:, 0])
        found = list[tuple[Tensor, ...]]()
        for k in range(len(slopes), 0, -1):
            total, p, q = self._through(k, total, p, q)
            a, b = slopes[k - 1]
            total, p, q = total + self.points[k - 1].most(p, q, a, b).sum(-1), a, b
            found.append((total, p, q))
        return found[::-1]

    def single(self) -> FixedPointPair:
        """Return a copy in float32, for gradients."""
        pair = copy.copy(self)
        first, second = ([(w.float(), b.float()) for w, b in one] for one in self.networks)
        pair.networks, pair.box = (first, second), self.box.float()
        pair.points = [Points(points.table.float()) for points in self.points]
        return pair

    def assume(self, row: Functionals, found: Assumed, limit: float, most: int) -> None:
        """Bound a functional [1, outputs] in rounds, where it is at least a limit.

        Every round bounds the hidden elements where the bound by the last slopes reaches the limit.
        The ranges of this pair become theirs.
        """
        starts: list[Slopes | None] = [None] * len(self.ranges)
        shares = [torch.full((6 * len(r.z[0]),), 0.1).double() for r in self.ranges]
        for _ in range(most if found.bound >= limit else 0):
            slopes = _rounded(found.slopes)
            multipliers, hidden = [], []
            for k, (const, a, b) in enumerate(self._before(row, slopes)):
                goal = Goal(const - limit, a, b)
                bounds, own, shares[k] = self._where(k, goal, starts[k], shares[k], slopes)
                starts[k] = own
                multipliers.append(shares[k].clamp_min(0).float().numpy())
                hidden.append(packed(own, len(bounds)))
                self.ranges[k] = Ranges.of(torch.minimum(bounds, self.ranges[k].bounds()))
                self.points[k] = self.ranges[k].all_points(self.grid)
                if self.ranges[k].empty:
                    break
            found.rounds.append(Round(packed(slopes, 0)[0], multipliers, hidden))
            last = found.bound
            if self.ranges[k].empty:
                found.bound = -math.inf
                break
            found.bound, found.slopes = self._improved(row, found.slopes)
            if found.bound < limit or found.bound > last - PROGRESS * limit:
                break

    def _where(
        self, number: int, goal: Goal, slopes: Slopes | None, shares: Tensor, of_goal: Slopes
    ) -> tuple[Tensor, Slopes, Tensor]:
        """Bound all elements [6 n] of a hidden layer where a goal is not negative."""
        rows, single = _each(len(goal.first[0])), self.single()
        if slopes is None:
            slopes = [
                (a + shares[:, None] * c, b + shares[:, None] * d)
                for (a, b), (c, d) in zip(self._started(number, rows)[1], of_goal, strict=False)
            ]
        parts = list[tuple[Tensor, ...]]()
        for start in range(0, len(shares), _ROWS):
            part = slice(start, start + _ROWS)
            flat = [side[part].float() for both in slopes for side in both]
            flat = [*flat, shares[part].float()]

            def bound(*own: Tensor, part: slice = part) -> Tensor:
                return single._goal(number, rows, goal, part, own)

            parts.append(tuple(_descended(flat, bound, STEPS)))
        *flat, shares = (torch.cat(each).double() for each in zip(*parts, strict=True))
        slopes = list(zip(flat[::2], flat[1::2], strict=True))
        return self._goal(number, rows, goal, slice(None), (*flat, shares)), slopes, shares

    def _goal(
        self, number: int, rows: Functionals, goal: Goal, part: slice, own: Sequence[Tensor]
    ) -> Tensor:
        *flat, shares = own
        share, kind = shares.clamp_min(0).unsqueeze(1), shares.dtype
        p, q = rows.first[part].to(kind), rows.second[part].to(kind)
        moved = Functionals(p + share * goal.first.to(kind), q + share * goal.second.to(kind))
        slopes = list(zip(flat[::2], flat[1::2], strict=True))
        return self._above(number, moved, slopes)[0] + share[:, 0] * goal.const.to(kind)

    def copied(self) -> FixedPointPair:
        """Return a copy whose ranges can be changed."""
        pair = copy.copy(self)
        pair.ranges, pair.points = list(self.ranges), list(self.points)
        return pair

    def _improved(self, row: Functionals, slopes: Slopes) -> tuple[float, Slopes]:
        """Improve slopes of a functional of the outputs, in float32; bound it in float64."""
        single, number = self.single(), len(self.networks[0]) - 1
        own = Functionals(row.first.float(), row.second.float())

        def bound(*flat: Tensor) -> Tensor:
            return single._above(number, own, list(zip(flat[::2], flat[1::2], strict=True)))[0]

        flat = _descended([side.float() for both in slopes for side in both], bound, 2 * STEPS)
        flat = [side.double() for side in flat]
        slopes = list(zip(flat[::2], flat[1::2], strict=True))
        return float(self._above(number, row, slopes)[0]), slopes


def _descended(start: list[Tensor], bounds: Callable[..., Tensor], count: int) -> list[Tensor]:
    """Return the numbers [M, ...] at which each of M bounds was least in some gradient steps."""
    own = [part.clone().requires_grad_() for part in start]
    kept, best = start, torch.full((len(start[0]),), math.inf)
    optimiser = torch.optim.Adam(own, lr=RATE)
    for step in range(count + 1):
        found = bounds(*own)
        lower = found.detach() < best
        best = torch.minimum(best, found.detach())
        kept = [
            torch.where(lower.reshape(-1, *[1] * (a.dim() - 1)), a.detach(), b)
            for a, b in zip(own, kept, strict=True)
        ]
        if step == count:
            break
        optimiser.param_groups[0]["lr"] = RATE * 0.05 ** (step / count)
        optimiser.zero_grad()
        torch.autograd.backward(found.sum())
        optimiser.step()
    return kept


def _better(best: Tensor, kept: Slopes, found: Tensor, slopes: Slopes) -> tuple[Tensor, Slopes]:
    """Return the lower bound of each functional, and its slopes."""
    lower = found < best
    chosen = [
        (torch.where(lower[:, None], a.detach(), c), torch.where(lower[:, None], b.detach(), d))
        for (a, b), (c, d) in zip(slopes, kept, strict=True)
    ]
    return torch.minimum(best, found), chosen


def _rounded(slopes: Slopes) -> Slopes:
    return [(a.float().double(), b.float().double()) for a, b in slopes]


def packed(slopes: Slopes, count: int) -> NDArray[np.float32]:
    """Return slopes in the checker's format [M, hidden elements, 2]; M = `count` if empty."""
    if not slopes:
        return np.zeros((count, 0, 2), dtype=np.float32)
    both = [torch.stack(part, -1) for part in slopes]
    return np.asarray(torch.cat(both, 1).detach().float().numpy(), dtype=np.float32)


def _of_either(ranges: Ranges, grid: Grid, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return slopes of ReLU in z, and of the rounded and clipped value in z + D."""
    (z_low, z_high), (low, high) = ranges.z, ranges.other
    half, top = grid.step / 2, grid.step * grid.most
    width = (high - low).clamp_min(grid.step * 2.0**-30)
    clipped = ((top - low) / width).clamp(0, 1)
    upper = torch.where(high > top - half, clipped, 1.0)
    upper = torch.where(low < half, (high / width).clamp(0, 1), upper)
    upper = torch.where(high < half, 0.0, upper)
    lower = ((low + high > grid.step) & (high > half)).double()
    lower = torch.where((high > top - half) & (low > 0), clipped, lower)
    lower = torch.where(low >= top - half, 0.0, lower)
    in_z = p * torch.where(p > 0, chord(z_low, z_high)[0], (z_low + z_high > 0).double())
    return in_z, q * torch.where(q > 0, upper, lower)


def _of_the_change(ranges: Ranges, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slopes of Rule 9.3, ignoring roundings."""
    (z_low, z_high), (d_low, d_high) = ranges.z, ranges.d
    middle = (z_low + z_high) / 2, (d_low + d_high) / 2
    alone, served = chord(z_low, z_high), chord(*ranges.other)
    up, down = chord(d_low, d_high), chord(-d_high, -d_low)
    on, other_on = (z_high > 0).double(), (ranges.other[1] > 0).double()
    zero = torch.zeros_like(on)
    above = nearest(middle, 1.0, (zero, *up), (served[0], *served), (served[0] - on, *served))
    below = nearest(
        middle,
        -1.0,
        (zero, down[0], -down[1]),
        (-alone[0], zero, -alone[1]),
        (other_on - alone[0], other_on, -alone[1]),
    )
    own = p + q
    in_z = own * torch.where(own > 0, alone[0], (z_low + z_high > 0).double())
    in_z = in_z + q * torch.where(q > 0, above[0], below[0])
    in_d = q * torch.where(q > 0, above[1], below[1])
    return in_z - in_d, in_d
