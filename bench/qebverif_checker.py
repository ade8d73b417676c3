"""Re-derivation that no input of a box meets constraints on a network and its fixed-point copy.

"Fixed point" in section 9 of docs/proofs/difference-planes.md. The slopes of a proof may be any
numbers; the offsets are derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
class Round:
    """Bounds of all hidden elements where a constraint holds.

    Args:
        outputs: slopes [hidden elements, 2] of the constraint.
        shares: multipliers [6 n] of the constraint, for each hidden layer.
        hidden: slopes as in `SlopeProof`, for each hidden layer.
    """

    outputs: NDArray[np.floating]
    shares: Sequence[NDArray[np.floating]]
    hidden: Sequence[NDArray[np.floating]]


@dataclass(frozen=True, slots=True)
class SlopeProof:
    """Slopes of all functionals in z and z + D of the hidden elements before them.

    Args:
        hidden: for each hidden layer of n elements after N earlier hidden elements, [6 n, N, 2], of
            z, -z, D, -D, z + D, -(z + D).
        outputs: of the leaves of the constraints' trees [leaves, hidden elements, 2].
        cuts: the trees in preorder, integers [nodes, 2]: the hidden element that is split and the
            largest level of the first part, or `LEAF`. None: every constraint has one leaf.
        rounds: of each constraint, before its tree. None: no constraint has any.
    """

    hidden: Sequence[NDArray[np.floating]]
    outputs: NDArray[np.floating]
    cuts: NDArray[np.integer] | None = None
    rounds: Sequence[Sequence[Round]] | None = None


LEAF = [-1, -1]


@dataclass(frozen=True, slots=True)
class Leaves:
    """The constraint [M] of each leaf, and its least and largest levels [M, hidden elements]."""

    places: NDArray[np.int64]
    low: Floats
    high: Floats

    @staticmethod
    def of(cuts: NDArray[np.integer] | None, constraints: int, elements: int, most: int) -> Leaves:
        """Read the trees of all constraints. Raises Rejected "document/splits"."""
        places, found = list[int](), list[tuple[Floats, Floats]]()
        nodes = np.array([LEAF] * constraints) if cuts is None else cuts
        if nodes.ndim != 2 or nodes.shape[1] != 2 or not np.issubdtype(nodes.dtype, np.integer):
            raise Rejected("document/splits", f"splits of {nodes.dtype}, shape {nodes.shape}")
        given = iter(nodes.tolist())
        for place in range(constraints):
            parts = [(np.zeros(elements), np.full(elements, float(most)))]
            while parts:
                low, high = parts.pop()
                node = next(given, [elements, 0])
                if node == LEAF:
                    places.append(place)
                    found.append((low, high))
                    continue
                element, level = node
                if not (0 <= element < elements and low[element] <= level < high[element]):
                    raise Rejected("document/splits", f"no split of {element} at {level}")
                first, second = high.copy(), low.copy()
                first[element], second[element] = level, level + 1
                parts += [(second, high), (low, first)]
        if next(given, None) is not None:
            raise Rejected("document/splits", "trees of more constraints")
        low, high = (np.stack(part) for part in zip(*found, strict=True))
        return Leaves(np.array(places), low, high)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Boxes [n] of z, of D and of z + D in a layer."""

    z: tuple[Floats, Floats]
    d: tuple[Floats, Floats]
    other: tuple[Floats, Floats]

    @staticmethod
    def of(found: Floats) -> Ranges:
        """Return the boxes from bounds [6 n] of the functionals of `_each`."""
        parts = np.split(found, 6)
        z, d, other = ((-parts[k + 1], parts[k]) for k in (0, 2, 4))
        other = (
            np.maximum(other[0], -above(-(z[0] + d[0]))),
            np.minimum(other[1], above(z[1] + d[1])),
        )
        d = np.maximum(d[0], -above(z[1] - other[0])), np.minimum(d[1], above(other[1] - z[0]))
        return Ranges(z, d, other)

    def bounds(self) -> Floats:
        """Return the bounds [6 n] that `of` takes."""
        return np.concatenate(
            [part for low, high in (self.z, self.d, self.other) for part in (high, -low)]
        )

    @property
    def size(self) -> Floats:
        """Return a bound of |z| + |D| + |z + D|."""
        ends = (self.z, self.d, self.other)
        found: Floats = np.sum([np.maximum(np.abs(lo), np.abs(hi)) for lo, hi in ends], axis=0)
        return found


@dataclass(frozen=True, slots=True)
class Corners:
    """Points [C, M or 1, n] that contain the maximum of a functional of an element: z, z + D,
    relu(z), and the largest and least value to which z + D is rounded there."""

    first: Floats
    second: Floats
    value: Floats
    high: Floats
    low: Floats

    @staticmethod
    def of_all(ranges: Ranges, grid: Grid) -> Corners:
        """Return the points where z + D is rounded to any level."""
        none = np.zeros((1, len(ranges.z[0])))
        return Corners.of(ranges, grid, none, none + float(grid.most))

    @staticmethod
    def of(ranges: Ranges, grid: Grid, low: Floats, high: Floats) -> Corners:
        """Return the points of section 9 where z + D is rounded to levels [M, n] in a range."""
        (z_low, z_high), (d_low, d_high) = ranges.z, ranges.d
        least = np.where(low > 0, (low - 0.5) * grid.step, -np.inf)
        largest = np.where(high < grid.most, (high + 0.5) * grid.step, np.inf)
        least = np.maximum(ranges.other[0], least)
        largest = np.maximum(least, np.minimum(ranges.other[1], largest))
        ends = [least, largest, d_low, d_high]
        ends += [z_low + d_low, z_low + d_high, z_high + d_low, z_high + d_high]
        bends = np.clip(np.stack(np.broadcast_arrays(*ends)), least, largest)
        near = np.floor(bends / grid.step + 0.5)
        jumps = np.concatenate([np.clip(near + k, low + 1, high) for k in (-1, 0, 1, 2)])
        jumps = (jumps - 0.5) * grid.step
        inside = (jumps >= least) & (jumps <= largest)
        second = np.concatenate([bends, np.where(inside, jumps, least)])
        first_least = np.maximum(z_low, second - d_high)
        most = np.maximum(first_least, np.minimum(z_high, second - d_low))
        first = np.concatenate([first_least, most, np.clip(0.0, first_least, most)])
        second = np.concatenate([second] * 3)
        levels = np.floor(second / grid.step + 0.5), np.ceil(second / grid.step - 0.5)
        above, below = (np.clip(part, low, high) * grid.step for part in levels)
        return Corners(first, second, np.maximum(first, 0.0), above, below)

    def most(self, p: Floats, q: Floats, a: Floats, b: Floats) -> Floats:
        """Return the largest p relu(z) + q g - a z - b (z + D), all [M, n], of each element."""
        values = p * self.value + np.maximum(q, 0.0) * self.high + np.minimum(q, 0.0) * self.low
        found: Floats = (values - a * self.first - b * self.second).max(0)
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
        levels: tuple[Floats, Floats] | None = None,
        added: tuple[int, Floats, Floats] | None = None,
    ) -> Floats:
        """Bound P·z + Q·(z + D) of a layer, and direct·x, from above: [M, n] each -> [M].

        Args:
            levels: the least and largest levels [M, hidden elements before]; without, all.
            added: a hidden layer, and the P and Q [M, n] of it that are added.

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
            corners = self.corners
            if levels is not None:
                ends = [np.split(end[part], np.cumsum(behind)[:-1], axis=1) for end in levels]
                corners = [
                    Corners.of(ranges, self.grid, *own_levels)
                    for ranges, *own_levels in zip(self.ranges, *ends, strict=True)
                ]
            more = None if added is None else (added[0], added[1][part], added[2][part])
            values = slopes[part].astype(np.float64)
            found.append(self._most(number, (p, q), values, own, corners, more))
        return np.concatenate(found)

    def _most(
        self,
        number: int,
        rows: tuple[Floats, Floats],
        slopes: Floats,
        direct: Floats | None,
        all_corners: Sequence[Corners],
        added: tuple[int, Floats, Floats] | None,
    ) -> Floats:
        p, q = rows
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
            ranges, corners = self.ranges[k - 1], all_corners[k - 1]
            place -= len(ranges.z[0])
            part = slopes[:, place : place + len(ranges.z[0])]
            a, b = part[..., 0], part[..., 1]
            known = known + corners.most(p, q, a, b).sum(1)
            size = ranges.size + coded
            reach = np.abs(p) + np.abs(q) + np.abs(a) + np.abs(b)
            lost = lost + 4 * self.layers[k - 1].spare * (reach @ size)
            p, q = a, b
            if added is not None and k - 1 == added[0]:
                p, q = p + added[1], q + added[2]
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
        found = self.most(number, _each(len(self.layers[number].bias)), slopes)
        if not bool(np.isfinite(found).all()):
            raise Rejected("bound/not-finite", f"hidden layer {number} has no bound")
        self.ranges.append(Ranges.of(found))
        self.corners.append(Corners.of_all(self.ranges[-1], self.grid))

    def narrowed(
        self, rounds: Sequence[Round], row: tuple[Floats, Floats, Floats], limit: float
    ) -> Bounds | None:
        """Return the bounds where P·f + Q·g + direct·x of a row [1, n] each is at least a limit.

        None: no input meets that. Raises Rejected "document/splits": a round does not fit.
        """
        bounds = replace(self, ranges=list(self.ranges), corners=list(self.corners))
        sizes = [len(one.z[0]) for one in self.ranges]
        for one in rounds:
            if not len(one.shares) == len(one.hidden) <= len(sizes):
                raise Rejected("document/splits", f"a round of {len(one.hidden)} hidden layers")
            for k, (shares, slopes) in enumerate(zip(one.shares, one.hidden, strict=True)):
                if not bounds._narrow(k, one.outputs, shares, slopes, row, limit):
                    return None
        return bounds

    def _narrow(
        self,
        number: int,
        outputs: NDArray[np.floating],
        shares: NDArray[np.floating],
        slopes: NDArray[np.floating],
        row: tuple[Floats, Floats, Floats],
        limit: float,
    ) -> bool:
        """Bound a hidden layer again with multiples of a constraint; return whether any is left."""
        sizes = [len(one.z[0]) for one in self.ranges]
        before, rows = sum(sizes[:number]), 6 * sizes[number]
        if outputs.shape != (sum(sizes), 2) or shares.shape != (rows,):
            raise Rejected("document/splits", f"a round of shapes {outputs.shape}, {shares.shape}")
        if slopes.shape != (rows, before, 2):
            raise Rejected("document/splits", f"slopes of shape {slopes.shape}")
        share = shares.astype(np.float64)
        if not bool((np.isfinite(share) & (share >= 0)).all()):
            raise Rejected("bound/not-finite", "a multiplier is negative or no number")
        behind = share[:, None, None] * outputs[None, before:].astype(np.float64)
        p, q, direct = (share[:, None] * part for part in row)
        found = self.most(
            len(self.layers) - 1,
            (p, q),
            np.concatenate([slopes.astype(np.float64), behind], axis=1),
            direct,
            None,
            (number, *_each(sizes[number])),
        )
        least = share * limit
        found = above(found - least + 4 * _ROUNDOFF * (np.abs(found) + np.abs(least)) + _FAINT)
        ranges = Ranges.of(
            np.minimum(np.where(np.isfinite(found), found, np.inf), self.ranges[number].bounds())
        )
        self.ranges[number] = ranges
        self.corners[number] = Corners.of_all(ranges, self.grid)
        return all(bool((low <= high).all()) for low, high in (ranges.z, ranges.d, ranges.other))


def _each(count: int) -> tuple[Floats, Floats]:
    """Return P and Q of z, -z, D, -D, z + D, -(z + D) of all elements of a layer."""
    one, none = np.eye(count), np.zeros((count, count))
    return (
        np.concatenate([one, -one, -one, one, none, none]),
        np.concatenate([none, none, one, -one, one, -one]),
    )


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
    elements = sum(len(ranges.z[0]) for ranges in bounds.ranges)
    leaves = Leaves.of(proof.cuts, len(query.first), elements, grid.most)
    rounds = [()] * len(query.first) if proof.rounds is None else proof.rounds
    if len(rounds) != len(query.first) or len(proof.outputs) != len(leaves.places):
        raise Rejected("document/splits", "rounds or slopes of other constraints")
    most = np.full(len(query.first), -np.inf)
    for place, own in enumerate(rounds):
        one = slice(place, place + 1)
        row = -query.first[one], -query.second[one], -query.direct[one]
        narrowed = bounds.narrowed(own, row, query.limits[place])
        if narrowed is None:
            continue
        leaf = leaves.places == place
        levels = None if proof.cuts is None else (leaves.low[leaf], leaves.high[leaf])
        p, q, direct = (np.repeat(part, int(leaf.sum()), axis=0) for part in row)
        found = narrowed.most(len(layers) - 1, (p, q), proof.outputs[leaf], direct, levels)
        most[place] = found.max()
    if not bool(query.cannot(most[None]).all()):
        raise Rejected("claim/too-small", "the bounds do not show the claim")
