"""Slopes through roundings to nearest.

A rounding to nearest is a staircase: its slope is 0 or infinite, and a search that takes it for 1
does not see that some values are at the edge of a step and others are not. What helps is its secant
over the width in which a value can move: 0 where no edge lies within, many times 1 where a value is
near the edge of a wide step, and 1 in the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl_backends.attack.simulate import Overflowed, Step

Widths = Mapping[str, Tensor]
"""For every rounding, by the names of `Through`: half of the width in which values move."""


@dataclass(slots=True)
class Reaches:
    """Carries values through roundings as they are, and keeps the least and the largest of each.

    The first run must stand alone, so that the shape of every value is known.
    """

    least: dict[str, Tensor] = field(default_factory=dict)
    most: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, step: Step, value: Tensor) -> Tensor:
        """Return the rounded value."""
        still = value.detach()
        if name not in self.least:
            self.least[name] = self.most[name] = still
        else:
            runs = still.reshape(-1, *self.least[name].shape)
            self.least[name] = torch.minimum(self.least[name], runs.amin(0))
            self.most[name] = torch.maximum(self.most[name], runs.amax(0))
        return step(value)

    def widths(self) -> Widths:
        """Return half of how far apart values were."""
        return {name: (self.most[name] - least) / 2 for name, least in self.least.items()}


@dataclass(frozen=True, slots=True)
class Secants:
    """Carries values through roundings; the gradient is the slope of secants.

    `factor`, a number for each of many runs or one for a run alone, multiplies all widths: wide
    secants see edges that are far away, narrow ones see which are near.
    """

    half: Widths
    factor: Tensor

    def __call__(self, name: str, step: Step, value: Tensor) -> Tensor:
        """Return the rounded value, with another gradient."""
        still = value.detach()
        rounded = step(still)
        half = self.half.get(name)
        if half is None:
            return rounded + (value - still)
        width = half * self.factor.reshape(*self.factor.shape, *[1] * half.dim())
        try:
            rise = step(still + width) - step(still - width)
        except Overflowed:
            return rounded + (value - still)
        slope = torch.where(width > 0, rise / (2 * width), torch.ones_like(rise))
        return rounded + torch.nan_to_num(slope, 1.0, 1.0, 1.0) * (value - still)
