"""Networks in the fixed point of QEBVerif, and a search for images with a large difference.

Weights have one integer bit, biases and hidden values two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIXELS = 3
"""Every pixel may change by so much."""
CLIMB_STEPS = 60
LAST_SOFTNESS = 0.02
"""Width of the softened jumps at the end, in levels."""
PIXEL_STEP = 0.3
MANY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
"""Numbers of pixels that a search step changes at once."""


Layers = list[tuple[Tensor, Tensor]]


def quantised(layers: Layers, bits: int) -> Layers:
    """Quantise weights with one integer bit and biases with two; return float64."""
    return [(_nearest(w, bits, bits - 1), _nearest(b, bits, bits - 2)) for w, b in layers]


def _nearest(values: Tensor, bits: int, after: int) -> Tensor:
    """Round values to a fixed-point format, halves away from zero."""
    scaled = values.double() * 2.0**after
    whole = torch.sign(scaled) * (scaled.abs() + 0.5).floor()
    return whole.clamp(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) / 2.0**after


def hidden_format(bits: int) -> tuple[float, float]:
    """Return step and largest number of hidden values, which have two integer bits."""
    return 2.0 ** -(bits - 2), (2.0**bits - 1) * 2.0 ** -(bits - 2)


def quantised_run(layers: Layers, bits: int, pixels: Tensor) -> Tensor:
    """Return outputs [B, 10] of quantised layers for integer pixels [B, 784], exact in float64."""
    h = pixels / 256
    for number, (weight, bias) in enumerate(layers):
        h = h @ weight.T + bias
        if number < len(layers) - 1:
            h = hidden_values(h, bits)
    return h


def hidden_values(sums: Tensor, bits: int) -> Tensor:
    """Round sums to the hidden format, and clip them to it."""
    step, most = hidden_format(bits)
    return ((sums / step + 0.5).floor() * step).clamp(0, most)


def softened(sums: Tensor, bits: int, softness: float) -> Tensor:
    """Return continuous values near those of `hidden_values`, the nearer the smaller softness."""
    step, most = hidden_format(bits)
    shifted = sums / step + 0.5
    level = shifted.floor().detach()
    above = shifted - level
    rise = torch.sigmoid((above - 1) / softness) - torch.sigmoid(-above / softness)
    return ((level + rise) * step).clamp(0, most)


@dataclass(frozen=True, slots=True)
class Effort:
    """Starts of each sign, gradient steps, and how many images are then changed pixel by pixel.

    Args:
        softness: width of the softened jumps at the beginning, in levels.
    """

    starts: int
    steps: int
    climbs: int
    softness: float = 0.5


SHORT, LONG = Effort(12, 150, 2), Effort(40, 800, 6)
OTHERS = (
    *(Effort(60, 500, 6, softness) for softness in (0.25, 0.12, 0.18)),
    Effort(80, 500, 10, 0.08),
)


@dataclass(frozen=True, slots=True)
class Search:
    """A search over integer pixels of a box for the largest |difference| of an output.

    Gradient steps on real pixels begin at random images. A *softened* rounding, a sigmoid at each
    jump, becomes the rounding during the steps. Then changes of one or many pixels increase the
    difference of the rounded network.
    """

    layers: Layers
    served: Layers
    bits: int
    label: int
    ends: tuple[Tensor, Tensor]
    effort: Effort
    generator: torch.Generator

    @staticmethod
    def of(layers: Layers, bits: int, image: list[int], label: int, effort: Effort) -> Search:
        """Return the search around an image, always with the same random numbers."""
        low, high = (torch.tensor(v).double() for v in whole_ends(image))
        generator = torch.Generator().manual_seed(0)
        served = quantised(layers, bits)
        plain = [(weight.double(), bias.double()) for weight, bias in layers]
        return Search(plain, served, bits, label, (low, high), effort, generator)

    def attacked(self, signs: Sequence[float], enough: float) -> tuple[float, list[int], float]:
        """Return the largest difference, its pixels and its sign; end when it is enough."""
        every = torch.tensor(signs, dtype=torch.float64).repeat(self.effort.starts)
        images = self._annealed(every)
        size = every * difference(self.layers, self.served, self.bits, images)[:, self.label]
        place = int(size.argmax())
        best, pixels, sign = float(size[place]), images[place], float(every[place])
        for place in size.argsort(descending=True)[: self.effort.climbs].tolist():
            if best >= enough:
                break
            top, reached = self.from_image(images[place], float(every[place]))
            if top > best:
                best, pixels, sign = top, reached, float(every[place])
        return best, [int(v) for v in pixels.tolist()], sign

    def _annealed(self, signs: Tensor) -> Tensor:
        """Return images [M, 784] that gradient steps reach from random images, for M signs."""
        low, high = (end.float() for end in self.ends)
        sides = [[(w.float(), b.float()) for w, b in side] for side in (self.layers, self.served)]
        x = low + torch.rand(len(signs), len(low), generator=self.generator) * (high - low)
        mean, square = torch.zeros_like(x), torch.zeros_like(x[:, :1])
        for step in range(self.effort.steps):
            part = step / self.effort.steps
            softness = self.effort.softness * (LAST_SOFTNESS / self.effort.softness) ** part
            x.requires_grad_(True)
            z, served = x / 255, x / 256
            for number, ((weight, bias), (other, shift)) in enumerate(zip(*sides, strict=True)):
                if number:
                    z, served = z.clamp_min(0), softened(served, self.bits, softness)
                z, served = z @ weight.T + bias, served @ other.T + shift
            value = (signs.float() * (served - z)[:, self.label]).sum()
            (slope,) = torch.autograd.grad(value, x)
            mean = 0.8 * mean + 0.2 * slope
            square = 0.95 * square + 0.05 * slope.square().mean(1, keepdim=True)
            change = PIXEL_STEP * (1 - 0.9 * part) * mean / (square.sqrt() + 1e-12)
            x = (x.detach() + change).clamp(low, high)
        return x.double().round()

    def from_image(self, x: Tensor, sign: float) -> tuple[float, Tensor]:
        """Return the largest difference found from a start image, and its image."""
        (weight, bias), (other, shift) = self.layers[0], self.served[0]
        weight, other = weight / 255, other / 256
        low, high = self.ends
        best = float(self._differences(sign, x @ weight.T + bias, x @ other.T + shift))
        for step in range(CLIMB_STEPS):
            share = torch.rand(len(x), generator=self.generator).double()
            share = share.round() if step % 2 == 0 else share
            change = (low + share * (high - low)).round() - x
            places = torch.nonzero(change).flatten()
            each = change[places].unsqueeze(1)
            z, served = x @ weight.T + bias, x @ other.T + shift
            found = self._differences(
                sign, z + each * weight.T[places], served + each * other.T[places]
            )
            order = places[found.argsort(descending=True)]
            rising = int((found > best).sum())
            many = [k for k in MANY if k <= rising]
            if not many:
                continue
            tried = x.repeat(len(many), 1)
            for row, count in zip(tried, many, strict=True):
                row[order[:count]] += change[order[:count]]
            found = self._differences(sign, tried @ weight.T + bias, tried @ other.T + shift)
            if float(found.max()) > best:
                best, x = float(found.max()), tried[int(found.argmax())]
        found = difference(self.layers, self.served, self.bits, x.unsqueeze(0))[0, self.label]
        return float(found) * sign, x

    def _differences(self, sign: float, z: Tensor, served: Tensor) -> Tensor:
        """Return signed differences, given sums of the first layer [..., n] of both networks."""
        for (weight, bias), (other, shift) in zip(self.layers[1:], self.served[1:], strict=True):
            z = z.clamp_min(0) @ weight.T + bias
            served = hidden_values(served, self.bits) @ other.T + shift
        return sign * (served - z)[..., self.label]


def difference(layers: Layers, served: Layers, bits: int, pixels: Tensor) -> Tensor:
    h = pixels / 255
    for number, (weight, bias) in enumerate(layers):
        h = h @ weight.double().T + bias.double()
        h = h if number == len(layers) - 1 else h.clamp_min(0)
    return quantised_run(served, bits, pixels) - h


def whole_ends(image: list[int]) -> tuple[list[int], list[int]]:
    return [max(v - PIXELS, 0) for v in image], [min(v + PIXELS, 255) for v in image]
