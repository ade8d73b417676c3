"""The attribution as a picture: bars of the sources with their intervals, and of the blocks.

Plain SVG that fetches nothing, legible in light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from kcdsl.diagnostics.render.terminal import printable
from kcdsl.verdict.attribution import Attribution, Layer, Source

_WIDTH = 760
_LEFT, _RIGHT = 150, 150
_ROW, _THICK = 26, 14
_BLOCKS = 48
"""Blocks that are drawn at most: those that gain or lose most."""
_STYLE = """\
:root{color-scheme:light dark}
.back{fill:#fff}.text{fill:#1c1c1c;font:13px system-ui,sans-serif}
.small{fill:#5a5a5a;font:11px system-ui,sans-serif}.head{font-weight:600}.end{text-anchor:end}
.shown{fill:#2f6db3}.faint{fill:#b9c6d6}.gain{fill:#4a8f5b}.less{fill:#b8663c}
.line{stroke:#1c1c1c;stroke-width:1.5}.axis{stroke:#8a8a8a;stroke-width:1}
@media(prefers-color-scheme:dark){.back{fill:#16181b}.text{fill:#ececec}.small{fill:#a8a8a8}
.shown{fill:#6ea8e6}.faint{fill:#465364}.gain{fill:#7cc08c}.less{fill:#dd9468}
.line{stroke:#ececec}.axis{stroke:#777}}"""


def picture(found: Attribution) -> str:
    """Return the picture."""
    rows = [s for s in found.sources if s.shapley is not None and s.state == "differs"]
    blocks = () if found.layers is None else found.layers.largest(_BLOCKS)
    parts: list[str] = []
    y = _words(parts, 14, 26, _title(found), "text head")
    y = _words(parts, 14, y + 20, _subtitle(found), "small")
    y = _sources(parts, rows, y + 16)
    block = next((row.envelope_block for row in rows if row.reach is not None), None)
    if block is not None:
        words = f"≤: the most of the drift of {block} that the source alone can make, certified"
        y = _words(parts, 14, y + 18, words, "small")
    if blocks:
        y = _words(parts, 14, y + 28, "gain of each block", "text head")
        y = _blocks(parts, blocks, y + 10)
    height = y + 22
    label = escape(_title(found), quote=True)
    return printable(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        f"<style>{_STYLE}</style>"
        f'<rect class="back" width="{_WIDTH}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _title(found: Attribution) -> str:
    return f"{found.contract['name']}: {found.statistic}({found.metric}) by source"


def _subtitle(found: Attribution) -> str:
    text = f"{found.total.value:.4g} over {found.requests} requests"
    if found.total.low is not None and found.total.high is not None:
        text += f", 95 % [{found.total.low:.3g}, {found.total.high:.3g}]"
    return f"{text}; {found.status.replace('_', ' ')}"


def _words(parts: list[str], x: float, y: int, text: str, kind: str) -> int:
    parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(text)}</text>')
    return y


class _Scale:
    """Places values on the width between labels and numbers; 0 is always on it."""

    def __init__(self, values: Iterable[float]) -> None:
        every = [0.0, *values]
        self._low, high = min(every), max(every)
        self._size = (high - self._low) or 1.0

    def __call__(self, value: float) -> float:
        room = _WIDTH - _LEFT - _RIGHT
        return _LEFT + room * (value - self._low) / self._size


def _sources(parts: list[str], rows: list[Source], top: int) -> int:
    if not rows:
        return _words(parts, 14, top + 16, "no source has a share", "small")
    figures = [row.shapley for row in rows if row.shapley is not None]
    ends = [e for f in figures for e in (f.value, f.low, f.high) if e is not None]
    at = _Scale(ends)
    y = top
    for row, figure in zip(rows, figures, strict=True):
        middle = y + _ROW // 2
        _words(parts, _LEFT - 12, middle + 4, row.name, "text end")
        _bar(parts, at(0.0), at(figure.value), middle, "shown" if row.shown else "faint")
        if figure.low is not None and figure.high is not None:
            _whisker(parts, at(figure.low), at(figure.high), middle)
        share = "" if row.share is None else f"{round(100 * row.share, 1) + 0.0:.1f} %"
        _words(parts, _WIDTH - 70, middle + 4, share, "text end")
        if row.reach is not None:
            _words(parts, _WIDTH - 10, middle + 4, f"≤{100 * row.reach:.2g} %", "small end")
        y += _ROW
    _axis(parts, at(0.0), top, y)
    return y


def _blocks(parts: list[str], rows: tuple[Layer, ...], top: int) -> int:
    at = _Scale(row.gain for row in rows)
    y = top
    for row in rows:
        middle = y + _ROW // 2
        _words(parts, _LEFT - 12, middle + 4, row.block, "text end")
        _bar(parts, at(0.0), at(row.gain), middle, "gain" if row.gain >= 0 else "less")
        _words(parts, _WIDTH - 14, middle + 4, f"{row.gain:.3g}", "text end")
        y += _ROW
    _axis(parts, at(0.0), top, y)
    return y


def _bar(parts: list[str], start: float, end: float, middle: int, kind: str) -> None:
    left, width = min(start, end), max(abs(end - start), 0.5)
    parts.append(
        f'<rect class="{kind}" x="{left:.1f}" y="{middle - _THICK // 2}" width="{width:.1f}" '
        f'height="{_THICK}" rx="2"/>'
    )


def _whisker(parts: list[str], low: float, high: float, middle: int) -> None:
    parts.append(
        f'<path class="line" fill="none" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8'
        f'M{high:.1f} {middle - 4}v8"/>'
    )


def _axis(parts: list[str], x: float, top: int, bottom: int) -> None:
    parts.append(f'<path class="axis" d="M{x:.1f} {top}V{bottom}"/>')
