"""What a chart is: a picture, its caption and the table of what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kcdsl.verdict.html.words import brief

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
