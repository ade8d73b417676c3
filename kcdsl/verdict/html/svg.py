"""SVG drawings: elements, scales, axes. Colours are CSS classes, set by the page."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count
from typing import Any

from kcdsl.verdict.messages import brief

Scale = Callable[[float], float]
"""Maps a value to a coordinate."""


Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its caption and the table of its numbers."""

    title: str
    caption: str
    svg: str
    head: Cells
    rows: tuple[Cells, ...]
    size: tuple[float, float]


@dataclass(slots=True)
class Drawing:
    """A picture of `width` x `height` under construction, with margins for axes around a plot."""

    width: float = 460
    height: float = 250
    left: float = 62
    right: float = 16
    top: float = 14
    bottom: float = 44
    parts: list[str] = field(default_factory=list)

    @property
    def x(self) -> tuple[float, float]:
        """Return the left and the right end of the plot."""
        return self.left, self.width - self.right

    @property
    def y(self) -> tuple[float, float]:
        """Return the lower and the upper end of the plot."""
        return self.height - self.bottom, self.top

    def add(self, name: str, content: str = "", **attributes: object) -> None:
        """Draw an element."""
        self.parts.append(element(name, content, **attributes))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        class_: str | None = None,
        anchor: str | None = None,
        **more: object,
    ) -> None:
        """Write words, escaped, at a place."""
        place = {"x": float(x), "y": float(y), "text_anchor": anchor, "class_": class_}
        self.add("text", escape(words), **place, **more)

    def line(self, x1: float, y1: float, x2: float, y2: float, class_: str) -> None:
        """Draw a straight line."""
        self.add("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=class_)

    def bar(self, x: float, y: float, width: float, height: float, class_: str) -> None:
        """Draw a rectangle from its upper left corner."""
        self.add("rect", x=x, y=y, width=width, height=height, class_=class_)

    def cross(self, x: float, y: float) -> None:
        """Draw a cross around a place."""
        self.add("path", d=f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8", class_="cross")

    def x_axis(self, scale: Scale, at: Sequence[float], title: str) -> None:
        """Draw the axis below the plot."""
        base, (left, right) = self.y[0], self.x
        self.line(left, base, right, base, "axis")
        for value, label in zip(at, labels(at), strict=True):
            x = scale(value)
            self.line(x, base, x, base + 4, "axis")
            self.text(x, base + 17, label, "tick", "end" if x > right - 8 else "middle")
        self.text(sum(self.x) / 2, self.height - 6, title, "ax", "middle")

    def y_axis(self, scale: Scale, at: Sequence[float], title: str) -> None:
        """Draw the axis at the left of the plot, with lines across it."""
        for value, label in zip(at, labels(at), strict=True):
            y = scale(value)
            self.line(self.x[0], y, self.x[1], y, "grid")
            self.text(self.x[0] - 6, y + 4, label, "tick", "end")
        middle = sum(self.y) / 2
        self.text(12, middle, title, "ax", "middle", transform=f"rotate(-90 12 {middle:g})")

    def svg(self, name: str, title: str, description: str, **more: object) -> str:
        """Return the accessible picture; `name` makes its ids unique on the page."""
        labelled = element("title", escape(title), id=f"{name}-t")
        labelled += element("desc", escape(description), id=f"{name}-d")
        return element(
            "svg",
            labelled + "".join(self.parts),
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            role="img",
            aria_labelledby=f"{name}-t {name}-d",
            class_="chart",
            **more,
        )

    def figure(
        self,
        name: str,
        title: str,
        caption: str,
        head: Cells,
        rows: tuple[Cells, ...],
        described: str | None = None,
    ) -> Figure:
        """Return the picture with its numbers; the caption is the default of the description."""
        picture = self.svg(name, title, caption if described is None else described)
        return Figure(title, caption, picture, head, rows, (self.width, self.height))


def element(name: str, content: str = "", **attributes: object) -> str:
    """Return an element; attributes are escaped, `content` is markup.

    `class_` stands for the attribute class, and underscores for hyphens.
    """
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{listed}>{content}</{name}>" if content else f"<{name}{listed}/>"


def _attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


# --- scales --------------------------------------------------------------------------------------

_LEAST, _MOST = 1e-300, 1e300
"""The range in which steps of ticks are round numbers in float64."""


def linear(low: float, high: float, ends: tuple[float, float]) -> Scale:
    """Map [low, high] onto `ends`; a single value onto the middle."""
    start, end = ends
    width = high / 2 - low / 2  # high - low may overflow
    if not width > 0:
        return lambda value: (start + end) / 2
    return lambda value: start + (value / 2 - low / 2) / width * (end - start)


def logarithmic(low: float, high: float, ends: tuple[float, float]) -> Scale:
    """Map [low, high], both positive, onto `ends` by the logarithm."""
    inner = linear(math.log10(low), math.log10(high), ends)
    return lambda value: inner(math.log10(value))


def drawable(value: float) -> float:
    """Return the end of an axis, clipped to the finite range of float64."""
    return max(-sys.float_info.max, min(sys.float_info.max, value))


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten, halved
    if there would be fewer than three ticks."""
    if not high > low:
        return [low]
    raw = high / max(1, wanted) - low / max(1, wanted)
    if not _LEAST < raw < _MOST:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    if high / step - low / step < 2:
        step /= 2
    first = math.ceil(low / step - 1e-9)
    found: list[float] = []
    for n in count(first):
        if n * step > high + step * 1e-9:
            return found
        found.append(n * step)
    raise AssertionError("unreachable")


def powers(low: float, high: float, most: int = 7) -> list[float]:
    """Return about `most` round numbers from `low` to `high` for a logarithmic axis: powers of ten,
    with 2 and 5 times these if there are few, else even steps."""
    first, last = math.floor(math.log10(low)), min(308, math.ceil(math.log10(high)))
    tens = [10.0**n for n in range(first, last + 1) if low <= 10.0**n <= high]
    if len(tens) > 2:
        return tens[:: math.ceil(len(tens) / most)]
    between = [m * 10.0**n for n in range(first, last + 1) for m in (1, 2, 5)]
    found = [value for value in between if low <= value <= high]
    return found if len(found) > 1 else ticks(low, high, 3)


def labels(values: Sequence[float]) -> list[str]:
    """Return tick labels with the fewest digits that distinguish them."""
    short = [brief(value) for value in values]
    for digits in range(4, 13):
        if len(set(short)) == len(set(values)):
            break
        short = [f"{value:.{digits}g}" for value in values]
    return short


def with_unit(name: str, unit: str | None) -> str:
    """Return the title of an axis: kl (nat)."""
    return name if unit in (None, "1") else f"{name} ({unit})"


def left_out(count: int, what: str) -> str:
    """Return a sentence about values that a chart cannot draw; empty where there are none."""
    return f" {count} {what} not drawn." if count else ""


def short(words: str, most: int) -> str:
    """Return words, truncated to `most` characters."""
    return words if len(words) <= most else words[: most - 1] + "…"


def thinned(points: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` evenly chosen points, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
