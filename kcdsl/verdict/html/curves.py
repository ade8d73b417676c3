"""Curves: disagreement by position, flips by margin, drift by what it may depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kcdsl.verdict.html.svg import (
    Figure,
    Frame,
    drawable,
    element,
    left_out,
    linear,
    logarithmic,
    picture,
    powers,
    range_of,
    short,
    text,
    thinned,
    ticks,
    with_unit,
    x_axis,
    y_axis,
)
from kcdsl.verdict.words import brief, share

_LINES = 4
_UNITS = {"position": "tokens", "length": "tokens", "entropy": "nats", "margin": "logits"}
_SUPPORT = 5
"""The fewest texts that a point of a curve stands for."""


def disagreement(curves: Sequence[Mapping[str, Any]], k: int) -> Figure | None:
    """Draw the share of texts whose top k tokens have differed by each position."""
    own = [curve for curve in curves if curve["k"] == k]
    if not own:
        return None
    frame = Frame(height=240, right=92)
    drawn = [(curve["slice"], _supported(curve)) for curve in own[:_LINES]]
    longest = max(points[-1]["at"] for _, points in drawn)
    most = max(_share(p) for _, points in drawn for p in points)
    x = linear(0, max(1, longest), frame.x)
    y = linear(0, 100 * (most or 0.01), frame.y)
    top = 100 * (most or 0.01)
    parts = [y_axis(frame, y, ticks(0, top, 4), "% of texts")]
    parts.append(x_axis(frame, x, ticks(0, max(1, longest)), "position (tokens)"))
    taken: list[float] = []
    for number, (name, supported) in enumerate(drawn, 1):
        points = [(x(p["at"]), y(100 * _share(p))) for p in supported]
        parts.append(_steps(points, f"line s{number}"))
        end = points[-1]
        parts.append(
            text(
                frame.x[1] + 6,
                _apart(end[1], taken, frame.top) + 4,
                short(name, 11),
                class_=f"name t{number}",
            )
        )
    title = f"Texts whose top-{k} tokens have differed, by position"
    last = [(curve["slice"], curve["points"][-1]) for curve in own]
    none = all(p["count"] == 0 for curve in own for p in curve["points"])
    said = "No text disagrees anywhere." if none else ""
    described = said or "; ".join(f"{s}: {100 * _share(p):.3g} % at the end" for s, p in last)
    caption = (
        "A text has disagreed from the first position on at which the kernels do not put the same "
        f"{'token' if k == 1 else f'{k} tokens'} first. Texts count as long as they last "
        f"(product-limit estimate); drawn while at least {_SUPPORT} do. {said}"
        + left_out(
            sum(c.get("outside", 0) for c in own), "texts with values that are no numbers are"
        )
    )
    rows = tuple(
        (curve["slice"], str(p["at"]), f"{100 * _share(p):.3g} %", f"{p['count']} of {p['n']}")
        for curve in own
        for p in thinned(curve["points"], 12)
    )
    svg = picture(f"c{k}", title, described, frame, "".join(parts))
    head = ("slice", "position", "disagreed", "of those that reach it")
    return Figure(title, caption, svg, head, rows)


def _share(point: Mapping[str, Any]) -> float:
    found = point.get("share")
    return float(point["count"] / point["n"] if found is None else found)


def _steps(points: Sequence[tuple[float, float]], class_: str) -> str:
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for px, py in points[1:]:
        path += f"H{px:.1f}V{py:.1f}"
    return element("path", d=path, class_=class_)


def _supported(curve: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the points that enough texts reach; all of them where there are fewer texts."""
    enough = [p for p in curve["points"] if p["n"] >= _SUPPORT]
    return enough or list(curve["points"])


def _apart(y: float, taken: list[float], top: float, gap: float = 13.0) -> float:
    """Return a place near `y`, not above `top`, at which no label stands yet."""
    places = [y + sign * gap * step for step in range(2 * len(taken) + 2) for sign in (-1, 1)]
    free = (p for p in places if p >= top and all(abs(p - other) >= gap for other in taken))
    at = next(free, y)
    taken.append(at)
    return at


def flips(points: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw the share of positions that put another token first, by the margin; None where none
    does."""
    if not any(p["count"] for p in points):
        return None
    frame = Frame(height=230, bottom=50)
    most = max(p["count"] / p["n"] for p in points)
    y = linear(0, 100 * most, frame.y)
    parts = [y_axis(frame, y, ticks(0, 100 * most, 4), "% of positions")]
    wide = (frame.x[1] - frame.x[0]) / len(points)
    base = frame.y[0]
    every = max(1, math.ceil(len(points) / 7))
    for at, point in enumerate(points):
        x, tall = frame.x[0] + at * wide, base - y(100 * point["count"] / point["n"])
        if point["count"]:
            parts.append(
                element(
                    "rect",
                    x=x + 2,
                    y=base - tall,
                    width=wide - 4,
                    height=max(2.0, tall),
                    class_="bar s1",
                )
            )
        if at % every == 0:
            parts.append(
                text(
                    x + wide / 2,
                    base + 16,
                    brief(point["low"]),
                    text_anchor="middle",
                    class_="tick",
                )
            )
    parts.append(element("line", x1=frame.x[0], x2=frame.x[1], y1=base, y2=base, class_="axis"))
    parts.append(
        text(
            sum(frame.x) / 2,
            frame.height - 12,
            "margin of the training kernel (logits), from",
            text_anchor="middle",
            class_="ax",
        )
    )
    title = "Other top-1 token, by margin"
    total, every_n = sum(p["count"] for p in points), sum(p["n"] for p in points)
    described = f"{share(total, every_n)} of all positions put another token first."
    rows = tuple((range_of(p), share(p["count"], p["n"])) for p in points)
    svg = picture("flips", title, described, frame, "".join(parts))
    return Figure(title, described, svg, ("margin", "flipped"), rows)


def drift_by(chart: Mapping[str, Any], number: int) -> Figure:
    """Draw median, 95th percentile and worst drift in ranges of something else."""
    points, metric, by = chart["points"], chart["metric"], chart["by"]
    up = with_unit(metric, chart.get("unit"))
    frame = Frame(height=250, bottom=58)
    positive = [p[n] for p in points for n in ("p50", "p95", "worst") if p[n] > 0]
    log = bool(positive) and max(positive) > 30 * min(positive)
    low = min(positive, default=0.0) if log else 0.0
    high = max(positive, default=1.0)
    if log:
        low, high = low / 1.4 or low, drawable(high * 1.4)
        y = logarithmic(low, high, frame.y)
        axis = y_axis(frame, y, powers(low, high, 5), up)
    else:
        y = linear(low, drawable(high * 1.05), frame.y)
        axis = y_axis(frame, y, ticks(low, high, 4), up)
    places = [
        frame.x[0] + (i + 0.5) * (frame.x[1] - frame.x[0]) / len(points) for i in range(len(points))
    ]
    parts = [axis, _bucket_axis(frame, points, places, by)]
    for name, class_ in (("p50", "line s1"), ("p95", "line s2")):
        known = [
            (px, y(p[name])) for px, p in zip(places, points, strict=True) if p[name] > 0 or not log
        ]
        parts.append(_polyline(known, class_))
        parts += [
            element("circle", cx=px, cy=py, r=2.6, class_=class_.replace("line", "dot"))
            for px, py in known
        ]
    for px, point in zip(places, points, strict=True):
        if point["worst"] > 0 or not log:
            py = y(point["worst"])
            parts.append(
                element("path", d=f"M{px - 4:.1f},{py - 4:.1f}l8,8m0,-8l-8,8", class_="cross")
            )
    title = f"{metric} by {by}"
    described = "; ".join(
        f"{range_of(p)}: median {brief(p['p50'])}, worst {brief(p['worst'])}" for p in points
    )
    head = (f"{by}", f"{chart['of']}s", "mean", "p50", "p95", "worst")
    rows = tuple(
        (range_of(p), str(p["n"]), *(brief(p[n]) for n in ("mean", "p50", "p95", "worst")))
        for p in points
    )
    zeros = sum(p[name] == 0 for p in points for name in ("p50", "p95", "worst")) if log else 0
    each = ", each by its worst token," if chart["of"] == "request" else ""
    caption = (
        f"Median, 95th percentile and worst {metric} of the {chart['of']}s{each} in ranges of the "
        f"{by}; {'logarithmic' if log else 'linear'} axis."
        + left_out(zeros, "marks at zero are")
        + left_out(chart.get("outside", 0), "values that are not finite are")
    )
    svg = picture(f"b{number}", title, described, frame, "".join(parts))
    return Figure(title, caption, svg, head, rows)


def _polyline(points: Sequence[tuple[float, float]], class_: str) -> str:
    if not points:
        return ""
    listed = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    return element("polyline", points=listed, class_=class_)


def _bucket_axis(
    frame: Frame, points: Sequence[Mapping[str, Any]], places: Sequence[float], by: str
) -> str:
    base = frame.y[0]
    parts = [element("line", x1=frame.x[0], x2=frame.x[1], y1=base, y2=base, class_="axis")]
    every = max(1, math.ceil(len(points) / 7))
    for at, (px, point) in enumerate(zip(places, points, strict=True)):
        if at % every == 0:
            parts.append(
                text(px, base + 16, brief(point["low"]), text_anchor="middle", class_="tick")
            )
    middle = sum(frame.x) / 2
    words = f"{with_unit(by, _UNITS[by])}, from"
    parts.append(text(middle, frame.height - 22, words, text_anchor="middle", class_="ax"))
    x = frame.x[0]
    parts.append(
        element("line", x1=x, x2=x + 18, y1=frame.height - 8, y2=frame.height - 8, class_="line s1")
    )
    parts.append(text(x + 23, frame.height - 4, "median", class_="tick"))
    parts.append(
        element(
            "line", x1=x + 80, x2=x + 98, y1=frame.height - 8, y2=frame.height - 8, class_="line s2"
        )
    )
    parts.append(text(x + 103, frame.height - 4, "95th percentile", class_="tick"))
    parts.append(
        element("path", d=f"M{x + 204:.1f},{frame.height - 12:.1f}l8,8m0,-8l-8,8", class_="cross")
    )
    parts.append(text(x + 217, frame.height - 4, "worst", class_="tick"))
    return "".join(parts)
