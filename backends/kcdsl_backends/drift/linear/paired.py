"""Linear bounds of two ReLU networks and of their difference, for many boxes at a time.

Section 9 of docs/proofs/difference-planes.md: both networks have the same layers; the drift of
every hidden element has planes of its own. A single network has no drift. Tensors may live on any
device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl_backends.drift.boxes import EPS, SAFE, NoBound, gamma, up

LARGEST = 2.0**100
"""Larger numbers are refused: products of them with tiny ones could underflow."""
TINIEST = 2.0**-800
"""Bounds the sum of all underflow errors of one bound."""
ROUNDINGS = 256
"""Roundings of a number besides those of two dot products: planes, and sums over the layers."""
MOST_LAYERS, MOST_WIDTH = 32, 4096
"""The largest networks for which the counts of roundings hold."""


@dataclass(frozen=True, slots=True)
class PairedLayer:
    """z = W h + b + r in the first network; D = V d + (V - W) h + c + s of their difference.

    Args:
        weight, bias: W [out, in] and b [out], float64.
        other: V; None: there is no second network.
        change: V - W, rounded.
        shift: c, float64.
        loose, apart: |r| and |s| are at most these [out].
    """

    weight: Tensor
    bias: Tensor
    other: Tensor | None
    change: Tensor
    shift: Tensor
    loose: Tensor
    apart: Tensor

    @staticmethod
    def of(
        first: tuple[Tensor, Tensor],
        second: tuple[Tensor, Tensor] | None = None,
        roundings: tuple[Tensor, Tensor] | None = None,
    ) -> PairedLayer:
        """Return a layer from weights and biases, in real arithmetic without `roundings`."""
        weight, bias = (x.double() for x in first)
        zero = torch.zeros_like(bias)
        loose, apart = roundings or (zero, zero)
        if second is None:
            return PairedLayer(weight, bias, None, torch.zeros_like(weight), zero, loose, apart)
        other, shifted = (x.double() for x in second)
        return PairedLayer(weight, bias, other, other - weight, shifted - bias, loose, apart)


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Functionals p·x + P·f + Q·(g - f) of input x and outputs f, g: [M, inputs], [M, outputs]."""

    inputs: Tensor
    first: Tensor
    drift: Tensor


Hidden = tuple[Tensor, ...]
"""Boxes of the hidden elements, by layer: least z, largest z, least D, largest D [B, 4, n]."""


@dataclass(frozen=True, slots=True)
class _Slopes:
    """An upper and a lower slope [B, 1, n]: a coefficient a becomes a·middle + |a|·half."""

    middle: Tensor
    half: Tensor
    size: Tensor
    """The larger magnitude of both [B, n]."""

    @staticmethod
    def of(above: Tensor, below: Tensor) -> _Slopes:
        size = torch.maximum(above.abs(), below.abs())
        middle, half = (above + below) / 2, (above - below) / 2
        return _Slopes(middle.unsqueeze(1), half.unsqueeze(1), size)

    def through(self, a: Tensor, size: Tensor) -> Tensor:
        return torch.addcmul(a * self.middle, size, self.half)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A linear and the ReLU after it: slopes, and the constants per a and per |a| [B, n, 1]."""

    h: _Slopes
    h_known: tuple[Tensor, Tensor]
    by_z: _Slopes
    """Slopes of the change of the ReLU in z."""
    by_d: _Slopes
    d_known: tuple[Tensor, Tensor]
    h_size: Tensor
    """The largest relu(z) [B, n]."""
    d_size: Tensor


@dataclass(frozen=True, slots=True)
class PairedNetwork:
    """Layers with ReLU between them.

    Raises:
        NoBound: a parameter is not finite or too large, or the network is.
    """

    layers: tuple[PairedLayer, ...]

    def __post_init__(self) -> None:
        widest = max(max(layer.weight.shape) for layer in self.layers)
        if len(self.layers) > MOST_LAYERS or widest > MOST_WIDTH:
            size = f"{MOST_LAYERS} layers of {MOST_WIDTH} elements"
            raise NoBound("network", f"it has more than {size}")
        for number, layer in enumerate(self.layers):
            held = (layer.weight, layer.bias, layer.change, layer.shift, layer.loose, layer.apart)
            if not all(bool((x.abs() <= LARGEST).all()) for x in held):
                raise NoBound(f"layer {number}", "a parameter is not finite, or above 2^100")

    @property
    def paired(self) -> bool:
        return self.layers[0].other is not None

    def above(
        self, low: Tensor, high: Tensor, rows: OutputRows, known: Hidden | None = None
    ) -> tuple[Tensor, Tensor, Hidden]:
        """Bound functionals from above on every box.

        Return the bounds [B, M], slopes in x [B, M, inputs] by which inputs to split are chosen,
        and the boxes of the hidden elements. A NaN bound is returned as infinity.

        Args:
            low, high: corners of B boxes [B, inputs], float64.
            rows: the functionals.
            known: boxes that hold the hidden elements; elements with one sign in every box keep
                theirs.
        """
        walk = _Walk(low, high, torch.maximum(low.abs(), high.abs()), [])
        found = []
        for number, layer in enumerate(self.layers[:-1]):
            radii = walk.radii(layer)
            ends = _hidden(walk, layer, radii, None if known is None else known[number])
            found.append(ends)
            walk.units.append(_unit(layer, radii, *ends.unbind(1)))
            walk.layers.append(layer)
        last = self.layers[-1]
        drift = rows.drift if self.paired else None
        bounds, slopes = walk.above(last, walk.radii(last), rows.first, drift, rows.inputs)
        return bounds, slopes, tuple(found)


@dataclass(slots=True)
class _Walk:
    """Boxes [B, inputs] and the layers bounded so far, with the ReLU after each."""

    low: Tensor
    high: Tensor
    size: Tensor
    units: list[_Unit]
    layers: list[PairedLayer] = field(default_factory=list)

    def radii(self, layer: PairedLayer) -> tuple[Tensor, Tensor]:
        """Return the radii [B, n] of z and D of the next layer: float64 and kernel roundings."""
        spare = gamma(2 * max(layer.weight.shape) + ROUNDINGS)
        own = self.units[-1].h_size if self.units else self.size
        grown = own @ layer.weight.abs().T + layer.bias.abs()
        if layer.other is None:
            return SAFE * (layer.loose + spare * grown), torch.zeros_like(grown)
        across = own @ layer.change.abs().T + layer.shift.abs()
        if self.units:
            across = across + self.units[-1].d_size @ layer.other.abs().T
        return SAFE * (layer.loose + spare * grown), SAFE * (layer.apart + spare * across)

    def above(
        self,
        layer: PairedLayer,
        radii: tuple[Tensor, Tensor],
        a: Tensor,
        b: Tensor | None,
        direct: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Bound a·z + b·D of the next layer, [R, n] each, from above; return slopes in x too."""
        total = a @ layer.bias + radii[0] @ a.abs().T
        back = (a @ layer.weight).unsqueeze(0)
        moved = None
        if b is not None and layer.other is not None:
            total = total + b @ layer.shift + radii[1] @ b.abs().T
            back = back + b @ layer.change
            moved = (b @ layer.other).unsqueeze(0)
        for unit, before in zip(reversed(self.units), reversed(self.layers), strict=True):
            size = back.abs()
            total = total + (back @ unit.h_known[0] + size @ unit.h_known[1]).squeeze(-1)
            on_z, on_d = unit.h.through(back, size), None
            if moved is not None:
                size = moved.abs()
                total = total + (moved @ unit.d_known[0] + size @ unit.d_known[1]).squeeze(-1)
                on_z = on_z + unit.by_z.through(moved, size)
                on_d = unit.by_d.through(moved, size)
            back, moved = on_z @ before.weight, None
            if on_d is not None and before.other is not None:
                back = back + on_d @ before.change
                moved = on_d @ before.other
        if direct is not None:
            back = back + direct
        spare = gamma(2 * back.shape[-1] + ROUNDINGS)
        middle, half = (self.low + self.high) / 2, up((self.high - self.low) / 2, 2)
        found = (back @ middle.unsqueeze(-1)).squeeze(-1)
        half = half + spare * self.size
        total = total + found
        lost = ROUNDINGS * EPS * (total.abs() + found.abs()) + TINIEST
        wide = SAFE * (back.abs() @ half.unsqueeze(-1)).squeeze(-1)
        total = up(total + (wide + lost), 2)
        slopes = back.expand(len(self.low), -1, -1)  # without units they are those of all boxes
        return total.masked_fill(~(total.abs() <= LARGEST), torch.inf), slopes


def _hidden(
    walk: _Walk, layer: PairedLayer, radii: tuple[Tensor, Tensor], known: Tensor | None
) -> Tensor:
    """Return least and largest z and D of the next layer [B, 4, n]."""
    eye = torch.eye(len(layer.bias), dtype=torch.float64, device=walk.low.device)
    if known is not None:
        now = _open(known).any(0)
        if not bool(now.any()):
            return known
        eye = eye[now]
    both = torch.cat([eye, -eye])
    ends = [*_ends(walk.above(layer, radii, both, None)[0])]
    if layer.other is None:
        ends += [torch.zeros_like(ends[0])] * 2
    else:
        ends += _ends(walk.above(layer, radii, torch.zeros_like(both), both)[0])
    made = torch.stack(ends, 1)
    if known is None:
        return made
    met = known.clone()
    met[:, 0::2, now] = torch.maximum(known[:, 0::2, now], made[:, 0::2])
    met[:, 1::2, now] = torch.minimum(known[:, 1::2, now], made[:, 1::2])
    return met


def _open(known: Tensor) -> Tensor:
    """Return where the sign of z or of z + D is open [B, n]."""
    z_low, z_high, d_low, d_high = known.unbind(1)
    alone = (z_low < 0) & (z_high > 0)
    return alone | ((z_low + d_low <= 0) & (z_high + d_high >= 0))


def _ends(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return [low, high] of elements, from bounds above of them and of their negatives."""
    high, low = found.chunk(2, -1)
    return -low, high


def _unit(
    layer: PairedLayer,
    radii: tuple[Tensor, Tensor],
    z_low: Tensor,
    z_high: Tensor,
    d_low: Tensor,
    d_high: Tensor,
) -> _Unit:
    """Return planes of relu(z) and of relu(z + D) - relu(z) on boxes of z and D [B, n]."""
    own = torch.maximum(z_low.abs(), z_high.abs())
    moved = torch.maximum(d_low.abs(), d_high.abs())
    size = gamma(2 * own.shape[-1] + ROUNDINGS) * (own + moved)
    # the ends of z + D are rounded: they are moved outward by more than the error
    other_low, other_high = z_low + d_low - size, z_high + d_high + size
    steep, const = chord(z_low, z_high)
    h = _Slopes.of(steep, (z_low + z_high > 0).double())
    other, other_const = chord(other_low, other_high)
    rising, rising_const = chord(d_low, d_high)
    falling, falling_const = chord(-d_high, -d_low)
    zero = torch.zeros_like(steep)
    alone, both = (z_high > 0).double(), (other_high > 0).double()
    middle = (z_low + z_high) / 2, (d_low + d_high) / 2
    above = nearest(
        middle,
        1.0,
        (zero, rising, rising_const),
        (other, other, other_const),
        (other - alone, other, other_const),
    )
    below = nearest(
        middle,
        -1.0,
        (zero, falling, -falling_const),
        (-steep, zero, -const),
        (both - steep, both, -const),
    )
    by_z, by_d = _Slopes.of(above[0], below[0]), _Slopes.of(above[1], below[1])
    lost_h = SAFE * (size + h.size * radii[0])
    lost_d = SAFE * (2 * size + by_z.size * radii[0] + by_d.size * radii[1])
    bias, shift = layer.bias, layer.shift

    def known(middle: Tensor, half: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
        return middle.unsqueeze(-1), (half + lost).unsqueeze(-1)

    return _Unit(
        h,
        known(const / 2 + h.middle[:, 0] * bias, const / 2 + h.half[:, 0] * bias, lost_h),
        by_z,
        by_d,
        known(
            (above[2] + below[2]) / 2 + by_z.middle[:, 0] * bias + by_d.middle[:, 0] * shift,
            (above[2] - below[2]) / 2 + by_z.half[:, 0] * bias + by_d.half[:, 0] * shift,
            lost_d,
        ),
        z_high.clamp_min(0),
        torch.minimum(moved, torch.maximum(z_high, other_high).clamp_min(0)),
    )


def chord(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, c) with relu(t) <= s t + c for low <= t <= high, up to the rounding of c."""
    width = high - low
    slope = (high / torch.where(width > 0, width, torch.ones_like(width))).clamp(0, 1)
    slope = torch.where(low >= 0, 1.0, torch.where(high <= 0, 0.0, slope))
    const = torch.maximum(low.clamp_min(0) - slope * low, high.clamp_min(0) - slope * high)
    return slope, const


Plane = tuple[Tensor, Tensor, Tensor]
"""Slope in z, slope in D, constant [B, n]."""


def nearest(middle: tuple[Tensor, Tensor], sign: float, *planes: Plane) -> Plane:
    """Return, element by element, the plane that is lowest at the midpoint (sign -1: highest)."""
    best, least = planes[0], torch.full_like(middle[0], torch.inf)
    for plane in planes:
        height = sign * (plane[0] * middle[0] + plane[1] * middle[1] + plane[2])
        nearer = height < least
        least = torch.where(nearer, height, least)
        a, b, c = (torch.where(nearer, x, y) for x, y in zip(plane, best, strict=True))
        best = a, b, c
    return best
