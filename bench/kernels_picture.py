"""The picture of bench/kernels.py: every run's drift / bound, on a logarithmic axis, by kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from html import escape

LEFT, RIGHT, ROW, TOP = 350, 60, 22, 64
WIDTH = 1000
LEAST = 1e-6
"""Left edge: smaller quotients, and runs without drift or bound, are drawn there."""
BIN = 3
"""Width of a bin; the runs of a bin are one dot, darker for more runs."""
COLOURS = {"MiniLM": "#1f6feb", "tiny LM": "#d9730d"}


def draw(runs: Iterable[tuple[str, str, float]]) -> str:
    """Return the SVG of runs (kernel, model, drift / bound), kernels in order of appearance."""
    rows: dict[str, list[tuple[str, float]]] = {}
    for kernel, model, ratio in runs:
        rows.setdefault(kernel, []).append((model, ratio))
    height = TOP + ROW * len(rows) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="16" y="24" font-size="15" font-weight="bold">'
        "Measured drift / certified bound: the largest element of every run</text>",
    ]
    for i, (model, colour) in enumerate(COLOURS.items()):
        left = LEFT + 110 * i
        parts.append(f'<circle cx="{left}" cy="42" r="4" fill="{colour}" fill-opacity="0.6"/>')
        parts.append(f'<text x="{left + 10}" y="46">{model}</text>')
    bottom = TOP + ROW * len(rows)
    for power in range(round(math.log10(LEAST)), 1):
        x = _place(10.0**power)
        limit = power == 0
        colour, wide = ("#c62828", 2) if limit else ("#dddddd", 1)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}"'
            f' stroke="{colour}" stroke-width="{wide}"/>'
        )
        least = "≤ " if 10.0**power <= LEAST else ""
        label = "the bound" if limit else f"{least}10<tspan dy='-4' font-size='9'>{power}</tspan>"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for i, (kernel, found) in enumerate(rows.items()):
        y = TOP + ROW * i + ROW / 2
        parts.append(f'<text x="{LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(kernel)}</text>')
        runs_at = Counter((model, _dot(ratio)) for model, ratio in found)
        for (model, x), count in sorted(runs_at.items()):
            lower = 3.5 if model == "tiny LM" else -3.5
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y + lower}" r="3" fill="{COLOURS[model]}"'
                f' fill-opacity="{1 - 0.75 ** min(count, 12):.2f}"/>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _dot(ratio: float) -> float:
    """Return the position of the dot of a quotient, whole bins away from the bound."""
    bound = _place(1.0)
    return bound - BIN * round((bound - _place(ratio)) / BIN)


def _place(ratio: float) -> float:
    """Return the horizontal position of a quotient, clipped at ten times the bound."""
    shown = min(max(ratio, LEAST), 10.0)
    span = WIDTH - LEFT - RIGHT
    return LEFT + span * (math.log10(shown) - math.log10(LEAST)) / -math.log10(LEAST)
