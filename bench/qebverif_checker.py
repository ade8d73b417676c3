"""Re-derivation that no input of a box meets constraints on a network and its fixed-point copy.

"Fixed point" in section 9 of docs/proofs/difference-planes.md. The slopes of a proof may be any
numbers; the offsets are derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.box import Floats, above
from kcdsl_certs.recheck.linear_bounds.constraints import LARGEST, Grid, Halfspace, Layer, Query
from kcdsl_certs.recheck.linear_bounds.splits import Linear, paired

_ROUNDOFF = 2.0**-53
_FAINT = 2.0**-800
_ROWS = 64
"""Functionals in a batch."""


@dataclass(frozen=True, slots=True)
class SlopeProof:
    """Slopes of all functionals in z and z + D of the hidden elements before them.

    Args:
        hidden: for each hidden layer of n elements after N earlier hidden elements, [6 n, N, 2], of
            z, -z, D, -D, z + D, -(z + D).
        outputs: of the constraints [constraints, hidden elements, 2].
    """

    hidden: Sequence[NDArray[np.floating]]
    outputs: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Boxes [n] of z, of D and of z + D in a layer."""

    z: tuple[Floats, Floats]
    d: tuple[Floats, Floats]
    other: tuple[Floats, Floats]

    @property
    def size(self) -> Floats:
        """Return a bound of |z| + |D| + |z + D|."""
        ends = (self.z, self.d, self.other)
        found: Floats = np.sum([np.maximum(np.abs(lo), np.abs(hi)) for lo, hi in ends], axis=0)
        return found


@dataclass(frozen=True, slots=True)
class Corners:
    """Points [C, n] that contain the maximum of a functional of an element: z, z + D, relu(z), and
    the largest and least value to which z + D is rounded there."""

    first: Floats
    second: Floats
    value: Floats
    high: Floats
    low: Floats

    @staticmethod
    def of(ranges: Ranges, grid: Grid) -> Corners:
        """Return the points of section 9."""
        (z_low, z_high), (d_low, d_high) = ranges.z, ranges.d
        ends = [*ranges.other, d_low, d_high]
        ends += [z_low + d_low, z_low + d_high, z_high + d_low, z_high + d_high]
        bends = np.clip(np.stack(ends), *ranges.other)
        near = np.floor(bends / grid.step + 0.5)
        jumps = np.concatenate([np.clip(near + k, 1, grid.most) for k in (-1, 0, 1, 2)])
        jumps = (jumps - 0.5) * grid.step
        inside = (jumps >= ranges.other[0]) & (jumps <= ranges.other[1])
        second = np.concatenate([bends, np.where(inside, jumps, ranges.other[0])])
        least = np.maximum(z_low, second - d_high)
        most = np.maximum(least, np.minimum(z_high, second - d_low))
        first = np.concatenate([least, most, np.clip(0.0, least, most)])
        second = np.concatenate([second] * 3)
        levels = np.floor(second / grid.step + 0.5), np.ceil(second / grid.step - 0.5)
        high, low = (np.clip(part, 0.0, grid.most) * grid.step for part in levels)
        return Corners(first, second, np.maximum(first, 0.0), high, low)

    def most(self, p: Floats, q: Floats, a: Floats, b: Floats) -> Floats:
        """Return the largest p relu(z) + q g - a z - b (z + D), all [M, n], of each element."""
        rise, fall = np.maximum(q, 0.0)[:, None], np.minimum(q, 0.0)[:, None]
        values = p[:, None] * self.value + rise * self.high + fall * self.low
        found: Floats = (values - a[:, None] * self.first - b[:, None] * self.second).max(1)
        return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """A box of the input [inputs], and the bounds of the hidden layers so far."""

    layers: Sequence[Linear]
    grid: Grid
    low: Floats
    high: Floats
    ranges: list[Ranges]
    corners: list[Corners]

    def most(
        self,
        number: int,
        rows: tuple[Floats, Floats],
        slopes: NDArray[np.floating],
        direct: Floats | None = None,
    ) -> Floats:
        """Bound P·z + Q·(z + D) of a layer, and direct·x, from above: [M, n] each -> [M].

        Raises Rejected "document/splits": the slopes [M, hidden elements before, 2] do not fit.
        """
        behind = [len(one.z[0]) for one in self.ranges[:number]]
        if slopes.shape != (len(rows[0]), sum(behind), 2):
            raise Rejected("document/splits", f"slopes of shape {slopes.shape}")
        if not bool(np.isfinite(slopes).all()):
            raise Rejected("bound/not-finite", "a slope is no number")
        found = []
        for start in range(0, len(rows[0]), _ROWS):
            part = slice(start, start + _ROWS)
            own = None if direct is None else direct[part]
            p, q = (side[part] for side in rows)
            found.append(self._most(number, p, q, slopes[part].astype(np.float64), own))
        return np.concatenate(found)

    def _most(
        self, number: int, p: Floats, q: Floats, slopes: Floats, direct: Floats | None
    ) -> Floats:
        known, lost = np.zeros(len(p)), np.zeros(len(p))
        place = slopes.shape[1]
        for k in range(number, -1, -1):
            layer = self.layers[k]
            assert layer.served is not None
            other = layer.bias + layer.shift
            if k:
                value = np.maximum(self.ranges[k - 1].z[1], 0.0)
                coded = np.full(len(value), self.grid.most * self.grid.step)
            else:
                value = coded = np.maximum(np.abs(self.low), np.abs(self.high))
            sizes = [
                np.abs(weight) @ size + np.abs(bias)
                for weight, size, bias in (
                    (layer.weight, value, layer.bias),
                    (layer.served, coded, np.abs(layer.bias) + np.abs(layer.shift)),
                )
            ]
            known = known + p @ layer.bias + q @ other
            lost = lost + layer.spare * (np.abs(p) @ sizes[0] + np.abs(q) @ sizes[1])
            p, q = p @ layer.weight, q @ layer.served
            if not k:
                break
            ranges, corners = self.ranges[k - 1], self.corners[k - 1]
            place -= len(ranges.z[0])
            part = slopes[:, place : place + len(ranges.z[0])]
            a, b = part[..., 0], part[..., 1]
            known = known + corners.most(p, q, a, b).sum(1)
            size = ranges.size + coded
            reach = np.abs(p) + np.abs(q) + np.abs(a) + np.abs(b)
            lost = lost + 4 * self.layers[k - 1].spare * (reach @ size)
            p, q = a, b
        total = p + q if direct is None else p + q + direct
        reach = np.abs(p) + np.abs(q) + (0.0 if direct is None else np.abs(direct))
        lost = lost + self.layers[0].spare * (
            reach @ np.maximum(np.abs(self.low), np.abs(self.high))
        )
        ends = np.maximum(total, 0.0) @ self.high + np.minimum(total, 0.0) @ self.low
        lost = lost + 512 * _ROUNDOFF * (np.abs(ends) + np.abs(known))
        found = above(above(ends + known + lost * (1 + 2.0**-40) + _FAINT))
        return np.where(np.abs(found) <= LARGEST, found, np.inf)

    def grow(self, slopes: NDArray[np.floating]) -> None:
        """Bound the next hidden layer."""
        number = len(self.ranges)
        n = len(self.layers[number].bias)
        one, none = np.eye(n), np.zeros((n, n))
        p = np.concatenate([one, -one, -one, one, none, none])
        q = np.concatenate([none, none, one, -one, one, -one])
        found = self.most(number, (p, q), slopes).reshape(6, n)
        if not bool(np.isfinite(found).all()):
            raise Rejected("bound/not-finite", f"hidden layer {number} has no bound")
        z, d, other = ((-found[k + 1], found[k]) for k in (0, 2, 4))
        other = (
            np.maximum(other[0], -above(-(z[0] + d[0]))),
            np.minimum(other[1], above(z[1] + d[1])),
        )
        d = np.maximum(d[0], -above(z[1] - other[0])), np.minimum(d[1], above(other[1] - z[0]))
        self.ranges.append(Ranges(z, d, other))
        self.corners.append(Corners.of(self.ranges[-1], self.grid))


def recheck_fixed_point(
    networks: Sequence[Sequence[Layer]],
    grid: Grid,
    low: Sequence[Fraction],
    high: Sequence[Fraction],
    unsafe: Sequence[Sequence[Halfspace]],
    proof: SlopeProof,
) -> None:
    """Derive that no input of a box meets all constraints of a conjunction.

    The second network rounds its hidden values to a grid instead of ReLU. Raises Rejected if sizes
    do not fit, a slope is not finite, or the bounds do not suffice.
    """
    layers = paired(networks)
    if len(networks) != 2:
        raise Rejected("document/splits", "fixed point takes two networks")
    inputs, outputs = layers[0].weight.shape[1], len(layers[-1].bias)
    query = Query.of(inputs, (outputs, outputs), low, high, unsafe)
    bounds = Bounds(layers, grid, query.low, query.high, [], [])
    if len(proof.hidden) != len(layers) - 1:
        raise Rejected("document/splits", f"slopes of {len(proof.hidden)} hidden layers")
    for slopes in proof.hidden:
        bounds.grow(slopes)
    rows = -query.first, -query.second
    most = bounds.most(len(layers) - 1, rows, proof.outputs, -query.direct)
    if not bool(query.cannot(most[None]).all()):
        raise Rejected("claim/too-small", "the bounds do not show the claim")
