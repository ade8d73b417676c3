"""The picture of bench/any_length.py: bounds and attacks by the number of rows, for each model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1000, 420
LEFT, TOP, PANEL, GAP, BOTTOM = 74, 84, 400, 90, 352
COLOURS = ("#1f6feb", "#d9730d", "#2da44e", "#8250df")
"""Colours of the regions, in order of appearance."""
RADII = (2.5, 4.5, 6.5, 8.5)
"""Radii of the rings of the regions, so that runs at the same place stay visible."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One region: the any-length bound and, by number of rows, the bound of that length and the
    strongest run."""

    model: str
    region: str
    any_length: float
    exact: Mapping[int, float]
    attacked: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Coordinates of a panel with logarithmic axes."""

    left: float
    rows: tuple[int, int]
    powers: tuple[int, int]

    def x(self, rows: float) -> float:
        low, high = (math.log(end) for end in self.rows)
        return self.left + PANEL * (math.log(rows) - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.powers
        return BOTTOM - (BOTTOM - TOP) * (math.log10(value) - low) / (high - low)


def draw(curves: Sequence[Curve]) -> str:
    """Return the SVG: one panel for each model, one colour for each region."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        '<text x="16" y="24" font-size="15" font-weight="bold">'
        "One bound for every length (line), the bound of each length (dashes), the strongest run"
        " found (rings)</text>",
    ]
    regions = list(dict.fromkeys(curve.region for curve in curves))
    colours = dict(zip(regions, COLOURS, strict=False))
    radii = dict(zip(regions, RADII, strict=False))
    for i, region in enumerate(regions):
        x = LEFT + 170 * i
        parts.append(f'<rect x="{x}" y="40" width="12" height="12" fill="{colours[region]}"/>')
        parts.append(f'<text x="{x + 18}" y="51">{escape(region)}</text>')
    for i, model in enumerate(dict.fromkeys(curve.model for curve in curves)):
        own = [curve for curve in curves if curve.model == model]
        parts += _panel(model, own, colours, radii, LEFT + i * (PANEL + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    model: str,
    curves: Sequence[Curve],
    colours: Mapping[str, str],
    radii: Mapping[str, float],
    left: float,
) -> list[str]:
    values = [v for c in curves for v in (c.any_length, *c.exact.values(), *c.attacked.values())]
    powers = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    lengths = sorted(curves[0].exact)
    scale = _Scale(left, (lengths[0], lengths[-1]), powers)
    parts = [f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{escape(model)}</text>']
    for power in range(powers[0], powers[1] + 1):
        y = scale.y(10.0**power)
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + PANEL}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        label = f"10<tspan dy='-4' font-size='9'>{power}</tspan>"
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for rows in lengths:
        x = scale.x(rows)
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{rows}</text>')
    middle = left + PANEL / 2
    parts.append(f'<text x="{middle}" y="{BOTTOM + 40}" text-anchor="middle">rows</text>')
    for curve in curves:
        parts += _curve(curve, colours[curve.region], radii[curve.region], scale)
    return parts


def _curve(curve: Curve, colour: str, radius: float, scale: _Scale) -> list[str]:
    level = scale.y(curve.any_length)
    ends = " ".join(f"{scale.x(n):.1f},{scale.y(v):.1f}" for n, v in sorted(curve.exact.items()))
    return [
        f'<line x1="{scale.left}" y1="{level:.1f}" x2="{scale.left + PANEL}" y2="{level:.1f}"'
        f' stroke="{colour}" stroke-width="2"/>',
        f'<polyline points="{ends}" fill="none" stroke="{colour}" stroke-dasharray="5 4"/>',
        *(
            f'<circle cx="{scale.x(n):.1f}" cy="{scale.y(v):.1f}" r="{radius}"'
            f' fill="none" stroke="{colour}" stroke-width="1.6"/>'
            for n, v in sorted(curve.attacked.items())
        ),
    ]
