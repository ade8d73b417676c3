"""Derive that linear constraints on two ReLU networks cannot be met in a tree of boxes.

Section 9 of docs/proofs/difference-planes.md. The tree states only how the box is cut; its leaves
cover the box whatever it states, and every leaf is bounded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.box import Floats, above
from kcdsl_certs.recheck.linear_bounds.constraints import LARGEST, Halfspace, Layer, Query

_LEAF = 0xFFFF
_AT_ONCE = 32
_AROUND = 64
"""Most ancestors of a leaf that are bounded too, if the hull of its group is not enough."""
_DEEPER = 12
"""Most further halvings of a leaf that this program's rounding errors may need."""
_ROUNDOFF = 2.0**-53
_FAINT = 2.0**-800
_MOST_LAYERS, _MOST_WIDTH = 32, 4096


@dataclass(frozen=True, slots=True)
class Linear:
    """z = W h + b ± loose, and D = V d + (V - W) h + shift ± apart of the difference."""

    weight: Floats
    bias: Floats
    served: Floats | None
    shift: Floats
    loose: Floats
    apart: Floats

    @property
    def change(self) -> Floats:
        return np.zeros_like(self.weight) if self.served is None else self.served - self.weight

    @property
    def spare(self) -> float:
        """Return γ of all roundings of a number in this layer."""
        count = 2 * max(self.weight.shape) + 512
        return float(count * _ROUNDOFF * (1 + 2.0**-20))


@dataclass(frozen=True, slots=True)
class BoundedLayer:
    """Boxes of z and of D in a layer [B, n], and planes of the ReLU behind it."""

    z: tuple[Floats, Floats]
    d: tuple[Floats, Floats]
    h_rise: Floats
    h_lift: Floats
    h_fall: Floats
    rise: tuple[Floats, Floats, Floats]
    """Upper plane of the change: slope in z, slope in D, constant."""
    fall: tuple[Floats, Floats, Floats]

    @property
    def value(self) -> Floats:
        """Return the largest relu(z)."""
        return np.maximum(self.z[1], 0.0)

    @property
    def moved(self) -> Floats:
        """Return the largest magnitude of the change of the ReLU."""
        size = np.maximum(np.abs(self.d[0]), np.abs(self.d[1]))
        other = np.maximum(above(self.z[1] + self.d[1]), 0.0)
        return np.minimum(size, np.maximum(self.value, other))

    @property
    def size(self) -> Floats:
        """Return the largest |z| + |D|."""
        largest = [np.maximum(np.abs(lo), np.abs(hi)) for lo, hi in (self.z, self.d)]
        return largest[0] + largest[1]


def planes(z: tuple[Floats, Floats], d: tuple[Floats, Floats], spare: float) -> BoundedLayer:
    """Return the planes of Rule 9.3 on boxes of z and D."""
    size = np.maximum(np.abs(z[0]), np.abs(z[1])) + np.maximum(np.abs(d[0]), np.abs(d[1]))
    other = z[0] + d[0] - spare * size, z[1] + d[1] + spare * size
    slope, lift = _chord(*z)
    other_slope, other_lift = _chord(*other)
    up, up_lift = _chord(*d)
    down, down_lift = _chord(-d[1], -d[0])
    zero = np.zeros_like(slope)
    positive = (z[1] > 0).astype(np.float64)
    other_positive = (other[1] > 0).astype(np.float64)
    centre = (z[0] + z[1]) / 2, (d[0] + d[1]) / 2
    rise = _choose(
        centre,
        [
            (zero, up, up_lift),
            (other_slope, other_slope, other_lift),
            (other_slope - positive, other_slope, other_lift),
        ],
        lowest=True,
    )
    fall = _choose(
        centre,
        [
            (zero, down, -down_lift),
            (-slope, zero, -lift),
            (other_positive - slope, other_positive, -lift),
        ],
        lowest=False,
    )
    return BoundedLayer(z, d, slope, lift, (z[0] + z[1] > 0).astype(np.float64), rise, fall)


def _chord(low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Return s and c with relu(t) <= st + c on [low, high]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        slope = np.where(high <= 0, 0.0, np.clip(high / (high - low), 0.0, 1.0))
    slope = np.where(low >= 0, 1.0, slope)
    ends = [np.maximum(end, 0.0) - slope * end for end in (low, high)]
    return slope, np.maximum(*ends)


_Plane = tuple[Floats, Floats, Floats]


def _choose(centre: tuple[Floats, Floats], list_of: Sequence[_Plane], *, lowest: bool) -> _Plane:
    heights = np.stack([a * centre[0] + b * centre[1] + c for a, b, c in list_of])
    heights = np.where(np.isnan(heights), np.inf if lowest else -np.inf, heights)
    at = (heights.argmin(0) if lowest else heights.argmax(0))[None]
    a, b, c = (
        np.take_along_axis(np.stack(parts), at, 0)[0] for parts in zip(*list_of, strict=True)
    )
    return a, b, c


@dataclass(frozen=True, slots=True)
class Leaves:
    """Boxes [B, inputs] in which layers are bounded one after the other."""

    layers: Sequence[Linear]
    low: Floats
    high: Floats
    bounded: list[BoundedLayer]

    @staticmethod
    def of(
        layers: Sequence[Linear], low: Floats, high: Floats, around: Leaves | None = None
    ) -> Leaves:
        """Bound all hidden layers; `around` is one box that contains these."""
        made = Leaves(layers, low, high, [])
        for number, layer in enumerate(layers[:-1]):
            made.bounded.append(made._layer(number, layer, around))
        return made

    def _layer(self, number: int, layer: Linear, around: Leaves | None) -> BoundedLayer:
        n, batch = len(layer.bias), len(self.low)
        z, d = [np.zeros((batch, n)) for _ in range(2)], [np.zeros((batch, n)) for _ in range(2)]
        chosen = np.ones(n, dtype=np.bool_)
        if around is not None:
            known = around.bounded[number]
            for mine, theirs in ((z, known.z), (d, known.d)):
                for end in (0, 1):
                    mine[end][...] = theirs[end]
            sums = known.z[0] + known.d[0], known.z[1] + known.d[1]
            mixed = (known.z[0] < 0) & (known.z[1] > 0) | (sums[0] <= 0) & (sums[1] >= 0)
            chosen = mixed[0]
        if chosen.any():
            one = np.eye(n)[chosen]
            none = np.zeros_like(one)
            self._meet(z, chosen, around, lambda sign: self.most(number, sign * one, None))
            if layer.served is not None:
                self._meet(d, chosen, around, lambda sign: self.most(number, none, sign * one))
        return planes((z[0], z[1]), (d[0], d[1]), layer.spare)

    def _meet(
        self,
        ends: list[Floats],
        chosen: NDArray[np.bool_],
        around: Leaves | None,
        most: Callable[[float], Floats],
    ) -> None:
        low, high = -most(-1.0), most(1.0)
        if around is not None:
            low = np.maximum(low, ends[0][:, chosen])
            high = np.minimum(high, ends[1][:, chosen])
        ends[0][:, chosen], ends[1][:, chosen] = low, high

    def most(
        self, number: int, a: Floats, b: Floats | None, direct: Floats | None = None
    ) -> Floats:
        """Bound a·z + b·D of a layer, and direct·x, from above: [R, n] -> [B, R]."""
        a = a[None]
        b = None if b is None else b[None]
        known: Floats = np.zeros((1, len(a[0])))
        lost: Floats = np.zeros((1, len(a[0])))
        for place in range(number, -1, -1):
            layer = self.layers[place]
            size = np.maximum(np.abs(self.low), np.abs(self.high))
            inside = self.bounded[place - 1] if place else None
            value = size if inside is None else inside.value
            known = known + a @ layer.bias
            grown = value @ np.abs(layer.weight).T + np.abs(layer.bias)
            lost = lost + _dot(np.abs(a), layer.loose + layer.spare * grown)
            back = a @ layer.weight
            if b is not None and layer.served is not None:
                known = known + b @ layer.shift
                across = value @ np.abs(layer.change).T + np.abs(layer.shift)
                if inside is not None:
                    across = across + inside.moved @ np.abs(layer.served).T
                lost = lost + _dot(np.abs(b), layer.apart + layer.spare * across)
                back = back + b @ layer.change
                b = b @ layer.served
            a = back
            if inside is not None:
                own = 2 * self.layers[place - 1].spare * inside.size
                a, b, more, wide = _behind_relu(inside, own, a, b)
                known, lost = known + more, lost + wide
        if direct is not None:
            a = a + direct[None]
        rise, fall = np.maximum(a, 0.0), np.minimum(a, 0.0)
        total = _dot(rise, self.high) + _dot(fall, self.low) + known
        error_bound = _dot(np.abs(a), np.maximum(np.abs(self.low), np.abs(self.high)))
        spare = (2 * a.shape[-1] + 512) * _ROUNDOFF
        lost = lost + spare * error_bound + 512 * _ROUNDOFF * (np.abs(total) + np.abs(known))
        found = above(above(total + lost * (1 + 2.0**-40) + _FAINT))
        return np.where(np.abs(found) <= LARGEST, found, np.inf)


def _dot(rows: Floats, vectors: Floats) -> Floats:
    """Return Σ rows [B or 1, R, n] · vectors [B, n] as [B, R]."""
    found: Floats = np.matmul(rows, vectors[:, :, None])[:, :, 0]
    return found


def _behind_relu(
    inside: BoundedLayer, own: Floats, a: Floats, b: Floats | None
) -> tuple[Floats, Floats | None, Floats, Floats]:
    """Return functionals of (z, D) before a ReLU, the constants, and the rounding error."""
    rise, fall = np.maximum(a, 0.0), np.minimum(a, 0.0)
    known, lost = _dot(rise, inside.h_lift), _dot(np.abs(a), own)
    back = rise * inside.h_rise[:, None] + fall * inside.h_fall[:, None]
    if b is None:
        return back, None, known, lost
    rise, fall = np.maximum(b, 0.0), np.minimum(b, 0.0)
    known = known + _dot(rise, inside.rise[2]) + _dot(fall, inside.fall[2])
    back = back + rise * inside.rise[0][:, None] + fall * inside.fall[0][:, None]
    moved = rise * inside.rise[1][:, None] + fall * inside.fall[1][:, None]
    return back, moved, known, lost + 2 * _dot(np.abs(b), own)


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A box of a tree [inputs], and the box that was cut to get it."""

    low: Floats
    high: Floats
    around: Part | None = None

    def halves(self, cut: int) -> tuple[Part, Part]:
        """Return both halves; their union is the box whatever the midpoint rounds to."""
        low, high = self.low, self.high
        middle = min(max(low[cut] + (high[cut] - low[cut]) / 2, low[cut]), high[cut])
        below, over = high.copy(), low.copy()
        below[cut], over[cut] = middle, middle
        return Part(low, below, self), Part(over, high, self)


def _nested(layers: Sequence[Linear], part: Part, known: dict[Part, Leaves]) -> Leaves:
    """Bound one box, met with the bounds of the boxes around it; `known` caches these."""
    path = [part]
    while path[-1].around is not None and len(path) < _AROUND:
        path.append(path[-1].around)
    kept = {one: known[one] for one in path if one in known}
    known.clear()
    known.update(kept)
    found: Leaves | None = None
    for one in reversed(path):
        if one not in known:
            known[one] = Leaves.of(layers, one.low[None], one.high[None], found)
        found = known[one]
    assert found is not None
    return found


def leaves_of(tree: bytes, low: Floats, high: Floats) -> Iterator[Part]:
    """Yield the leaves of a tree, whose union is the box [low, high] [inputs].

    Raises Rejected "document/splits" unless the bytes are a tree of this box.
    """
    if len(tree) % 2:
        raise Rejected("document/splits", "the tree has half a number")
    cuts = np.frombuffer(tree, "<u2").tolist()
    open_parts = [Part(low, high)]
    for number, cut in enumerate(cuts):
        if not open_parts:
            raise Rejected("document/splits", f"the tree ends before number {number}")
        part = open_parts.pop()
        if cut == _LEAF:
            yield part
            continue
        if cut >= len(low):
            raise Rejected("document/splits", f"there is no input {cut}")
        open_parts += reversed(part.halves(cut))
    if open_parts:
        raise Rejected("document/splits", "the tree is cut short")


def _together(layers: Sequence[Linear], parts: Sequence[Part]) -> Leaves:
    """Bound boxes, each met with the bounds of their hull."""
    low, high = np.stack([part.low for part in parts]), np.stack([part.high for part in parts])
    hull = Leaves.of(layers, low.min(0)[None], high.max(0)[None])
    return Leaves.of(layers, low, high, hull)


def recheck_split(
    networks: Sequence[Sequence[Layer]],
    low: Sequence[Fraction],
    high: Sequence[Fraction],
    unsafe: Sequence[Sequence[Halfspace]],
    tree: bytes,
    off: Sequence[tuple[Floats, Floats]] | None = None,
) -> int:
    """Derive that no input of a box meets a conjunction of constraints; return the leaf count.

    `off` has for each layer bounds [out] of the first network's error against W h + b, and of the
    difference of both networks' errors; None: networks in real arithmetic. Raises Rejected if sizes
    do not fit, the tree is malformed, or a leaf is not proved.
    """
    layers = paired(networks, off)
    inputs, outputs = layers[0].weight.shape[1], len(layers[-1].bias)
    pair = len(networks) == 2
    query = Query.of(inputs, (outputs, outputs if pair else 0), low, high, unsafe)

    def proved(leaves: Leaves) -> NDArray[np.bool_]:
        both, change = query.first, None
        if pair:
            both, change = query.first + query.second, -query.second
        return query.cannot(leaves.most(len(layers) - 1, -both, change, -query.direct))

    known: dict[Part, Leaves] = {}
    count, leaves = 0, leaves_of(tree, query.low, query.high)
    while parts := list(islice(leaves, _AT_ONCE)):
        count += len(parts)
        missed = np.flatnonzero(~proved(_together(layers, parts)))
        left = [(parts[k], 0) for k in missed]
        while left:
            part, depth = left.pop()
            if bool(proved(_nested(layers, part, known)).all()):
                continue
            if depth == _DEEPER:
                raise Rejected("claim/too-small", "a leaf of the tree does not follow")
            halves = part.halves(int((part.high - part.low).argmax()))
            left += [(half, depth + 1) for half in halves]
    return count


def paired(
    networks: Sequence[Sequence[Layer]], off: Sequence[tuple[Floats, Floats]] | None = None
) -> tuple[Linear, ...]:
    """Return the layers of one network or two; see `recheck_split`.

    Raises Rejected "document/splits" or "bound/not-finite".
    """
    shapes = [[(np.shape(w), np.shape(b)) for w, b in network] for network in networks]
    if not shapes or len(shapes) > 2 or shapes[0] != shapes[-1] or not shapes[0]:
        raise Rejected("document/splits", "one network, or two with the same layers")
    before = shapes[0][0][0][1:]
    for size, outputs in shapes[0]:
        if (len(size), outputs, before) != (2, size[:1], size[1:]) or 0 in size:
            raise Rejected("document/splits", "the layers do not fit one another")
        before = outputs
    found = []
    for number, layer in enumerate(networks[0]):
        weight, bias = (np.asarray(part, dtype=np.float64) for part in layer)
        served, shift = None, np.zeros_like(bias)
        if len(networks) == 2:
            served, other = (np.asarray(part, dtype=np.float64) for part in networks[1][number])
            shift = other - bias
        zero = np.zeros_like(bias)
        loose, apart = (zero, zero) if off is None else off[number]
        held = [weight, bias, shift, loose, apart] + ([] if served is None else [served])
        if not all(bool((np.abs(part) <= LARGEST / 2).all()) for part in held):
            raise Rejected("bound/not-finite", f"layer {number} has numbers that are too large")
        found.append(Linear(weight, bias, served, shift, loose, apart))
    if len(found) > _MOST_LAYERS or max(max(one.weight.shape) for one in found) > _MOST_WIDTH:
        raise Rejected("document/splits", "the networks are too large")
    return tuple(found)
