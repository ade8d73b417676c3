"""Pieces of SVG: elements, scales and axes. Colours are classes, so that pages decide on them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import Any

from kcdsl.verdict.words import brief

Scale = Callable[[float], float]
"""From a value to a coordinate."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a chart draws: a picture of `width` x `height` with room for axes."""

    width: float = 460
    height: float = 250
    left: float = 62
    right: float = 16
    top: float = 14
    bottom: float = 44

    @property
    def x(self) -> tuple[float, float]:
        """Return the left and the right end of the plot."""
        return self.left, self.width - self.right

    @property
    def y(self) -> tuple[float, float]:
        """Return the lower and the upper end of the plot."""
        return self.height - self.bottom, self.top


def element(name: str, content: str = "", **attributes: object) -> str:
    """Return an element; attributes are escaped, `content` is markup already.

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


def text(x: float, y: float, words: str, **attributes: object) -> str:
    """Return escaped words at a place."""
    return element("text", escape(words), x=float(x), y=float(y), **attributes)


def picture(name: str, title: str, description: str, frame: Frame, content: str) -> str:
    """Return an accessible SVG; `name` makes its ids unique on the page."""
    labels = element("title", escape(title), id=f"{name}-t")
    labels += element("desc", escape(description), id=f"{name}-d")
    return element(
        "svg",
        labels + content,
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
        role="img",
        aria_labelledby=f"{name}-t {name}-d",
        class_="chart",
    )


# --- scales --------------------------------------------------------------------------------------

_LEAST, _MOST = 1e-300, 1e300
"""Steps of ticks beyond these are not round numbers of float64."""


def linear(low: float, high: float, ends: tuple[float, float]) -> Scale:
    """Map [low, high] onto `ends`; a single value onto the middle."""
    start, end = ends
    width = high / 2 - low / 2  # high - low may be beyond float64
    if not width > 0:
        return lambda value: (start + end) / 2
    return lambda value: start + (value / 2 - low / 2) / width * (end - start)


def logarithmic(low: float, high: float, ends: tuple[float, float]) -> Scale:
    """Map [low, high], both positive, onto `ends` by the logarithm."""
    inner = linear(math.log10(low), math.log10(high), ends)
    return lambda value: inner(math.log10(value))


def drawable(value: float) -> float:
    """Return the end of an axis, or the nearest one that a float64 is where it lies beyond."""
    return max(-sys.float_info.max, min(sys.float_info.max, value))


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten, half of
    that where two ticks would have to tell the scale."""
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
    """Return round numbers from `low` to `high` for a logarithmic axis, about `most` of them:
    powers of ten, between them 2 and 5 times these where there are few, else even steps."""
    first, last = math.floor(math.log10(low)), min(308, math.ceil(math.log10(high)))
    tens = [10.0**n for n in range(first, last + 1) if low <= 10.0**n <= high]
    if len(tens) > 2:
        return tens[:: math.ceil(len(tens) / most)]
    between = [m * 10.0**n for n in range(first, last + 1) for m in (1, 2, 5)]
    found = [value for value in between if low <= value <= high]
    return found if len(found) > 1 else ticks(low, high, 3)


def labels(values: Sequence[float]) -> list[str]:
    """Return ticks in as few digits as tell them apart."""
    short = [brief(value) for value in values]
    for digits in range(4, 13):
        if len(set(short)) == len(set(values)):
            break
        short = [f"{value:.{digits}g}" for value in values]
    return short


# --- axes ----------------------------------------------------------------------------------------


def x_axis(frame: Frame, scale: Scale, at: Sequence[float], title: str) -> str:
    """Return the axis below the plot."""
    base = frame.y[0]
    parts = [element("line", x1=frame.x[0], x2=frame.x[1], y1=base, y2=base, class_="axis")]
    for value, label in zip(at, labels(at), strict=True):
        x = scale(value)
        parts.append(element("line", x1=x, x2=x, y1=base, y2=base + 4, class_="axis"))
        middle = "end" if x > frame.x[1] - 8 else "middle"
        parts.append(text(x, base + 17, label, text_anchor=middle, class_="tick"))
    parts.append(text(sum(frame.x) / 2, frame.height - 6, title, text_anchor="middle", class_="ax"))
    return "".join(parts)


def y_axis(frame: Frame, scale: Scale, at: Sequence[float], title: str) -> str:
    """Return the axis at the left of the plot, with lines across it."""
    parts = []
    for value, label in zip(at, labels(at), strict=True):
        y = scale(value)
        parts.append(element("line", x1=frame.x[0], x2=frame.x[1], y1=y, y2=y, class_="grid"))
        parts.append(text(frame.x[0] - 6, y + 4, label, text_anchor="end", class_="tick"))
    middle = sum(frame.y) / 2
    turned = f"rotate(-90 12 {middle:g})"
    parts.append(text(12, middle, title, text_anchor="middle", class_="ax", transform=turned))
    return "".join(parts)


Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its caption, and the numbers it shows."""

    title: str
    caption: str
    svg: str
    head: Cells
    rows: tuple[Cells, ...]


def with_unit(name: str, unit: str | None) -> str:
    """Return what an axis is called: kl (nat)."""
    return name if unit in (None, "1") else f"{name} ({unit})"


def left_out(count: int, what: str) -> str:
    """Return a sentence about values that a chart cannot draw; nothing where there are none."""
    return f" {count} {what} not drawn." if count else ""


def short(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def thinned(points: Sequence[Any], most: int) -> list[Any]:
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def or_dash(value: Any) -> str:
    return "–" if value is None else brief(float(value))


def range_of(point: Mapping[str, Any]) -> str:
    low, high = brief(point["low"]), brief(point["high"])
    return low if low == high else f"{low} – {high}"
