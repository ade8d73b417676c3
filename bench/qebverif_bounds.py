"""Bounds of a ReLU network and its copy in fixed point, with optimised slopes.

"Fixed point" in section 9 of docs/proofs/difference-planes.md. The second network rounds its
hidden values to multiples of a step. A result is a proof only if the checker re-derives it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.qebverif_checker import SlopeProof
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
        return Points(first, second, first.clamp_min(0), *levels)


def _distinct(values: Tensor) -> Tensor:
    """Sort along the first dimension, without numbers that every column has more than once."""
    values = values.sort(0).values
    new = torch.ones_like(values, dtype=torch.bool)
    new[1:] = values[1:] > values[:-1]
    order = (~new).byte().argsort(dim=0, stable=True)
    return values.gather(0, order[: int(new.sum(0).max())])


@dataclass(frozen=True, slots=True)
class Points:
    """Points [C, M or 1, n]: z, z + D, relu(z), and the largest and least rounded z + D."""

    first: Tensor
    second: Tensor
    value: Tensor
    high: Tensor
    low: Tensor

    def most(self, p: Tensor, q: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the largest p relu(z) + q g - a z - b (z + D) of each element, [M, n] each."""
        parts = (self.first, self.second, self.value, self.high, self.low)
        with torch.no_grad():
            heights = p * self.value - a * self.first - b * self.second
            heights += q.clamp_min(0) * self.high + q.clamp_max(0) * self.low
            place = heights.argmax(0, keepdim=True)
        first, second, value, high, low = (
            part.expand(len(part), *p.shape).gather(0, place)[0] for part in parts
        )
        return p * value + q * torch.where(q > 0, high, low) - a * first - b * second


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
        one = torch.eye(len(self.networks[0][number][1]), dtype=torch.float64)
        none = torch.zeros_like(one)
        p = torch.cat([one, -one, -one, one, none, none])
        q = torch.cat([none, none, one, -one, one, -one])
        count, changes = len(one), slice(2 * len(one), 4 * len(one))
        parts = [
            self._optimised(number, Functionals(p[part], q[part]), steps)
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
        self.hidden.append(packed(slopes, len(p)))
        if not bool(torch.isfinite(found).all()):
            raise NoBound(f"layer {number}", "a hidden element has no bound")
        high, low, d_high, d_low, upper, lower = (
            sign * part for sign, part in zip((1, -1) * 3, found.chunk(6), strict=True)
        )
        lower, upper = torch.maximum(lower, low + d_low), torch.minimum(upper, high + d_high)
        d_low, d_high = torch.maximum(d_low, lower - high), torch.minimum(d_high, upper - low)
        self.ranges.append(Ranges((low, high), (d_low, d_high), (lower, upper)))
        levels = (
            torch.zeros(1, count).double(),
            torch.full((1, count), float(self.grid.most)).double(),
        )
        self.points.append(self.ranges[-1].points(self.grid, *levels))

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
            (weight, bias), (other, shift) = (network[k] for network in self.networks)
            total = total + p @ bias + q @ shift
            p, q = p @ weight, q @ other
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


def _better(best: Tensor, kept: Slopes, found: Tensor, slopes: Slopes) -> tuple[Tensor, Slopes]:
    """Return the lower bound of each functional, and its slopes."""
    lower = found < best
    chosen = [
        (torch.where(lower[:, None], a.detach(), c), torch.where(lower[:, None], b.detach(), d))
        for (a, b), (c, d) in zip(slopes, kept, strict=True)
    ]
    return torch.minimum(best, found), chosen


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
