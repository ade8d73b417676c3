"""Curves: disagreement by position, flips by margin, drift by possible explanatory variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kcdsl.verdict.html.svg import (
    Drawing,
    Figure,
    drawable,
    left_out,
    linear,
    logarithmic,
    powers,
    short,
    thinned,
    ticks,
    with_unit,
)
from kcdsl.verdict.messages import brief, share

_LINES = 4
_UNITS = {"position": "tokens", "length": "tokens", "entropy": "nats", "margin": "logits"}
_SUPPORT = 5
"""The least number of texts behind a point of a curve."""


def disagreement(curves: Sequence[Mapping[str, Any]], k: int) -> Figure | None:
    """Draw the share of texts whose top k tokens have differed at or before each position."""
    own = [curve for curve in curves if curve["k"] == k]
    if not own:
        return None
    chart = Drawing(height=240, right=92)
    drawn = [(curve["slice"], _supported(curve)) for curve in own[:_LINES]]
    longest = max(1, *(points[-1]["at"] for _, points in drawn))
    top = 100 * (max(_share(p) for _, points in drawn for p in points) or 0.01)
    x, y = linear(0, longest, chart.x), linear(0, top, chart.y)
    chart.y_axis(y, ticks(0, top, 4), "% of texts")
    chart.x_axis(x, ticks(0, longest), "position (tokens)")
    taken: list[float] = []
    for number, (name, supported) in enumerate(drawn, 1):
        (px, py), *more = [(x(p["at"]), y(100 * _share(p))) for p in supported]
        path = f"M{px:.1f},{py:.1f}"
        for px, py in more:
            path += f"H{px:.1f}V{py:.1f}"
        chart.add("path", d=path, class_=f"line s{number}")
        place = _label_position(py, taken, chart.top) + 4
        chart.text(chart.x[1] + 6, place, short(name, 11), f"name t{number}")
    title = f"Texts whose top-{k} tokens have differed, by position"
    last = [(curve["slice"], curve["points"][-1]) for curve in own]
    none = all(p["count"] == 0 for curve in own for p in curve["points"])
    said = "No text disagrees anywhere." if none else ""
    described = said or "; ".join(f"{s}: {100 * _share(p):.3g} % at the end" for s, p in last)
    outside = sum(curve.get("outside", 0) for curve in own)
    caption = (
        "A text has disagreed from the first position on at which the kernels do not put the same "
        f"{'token' if k == 1 else f'{k} tokens'} first. Texts count as long as they last "
        f"(product-limit estimate); drawn while at least {_SUPPORT} do. {said}"
        + left_out(outside, "texts with values that are no numbers are")
    )
    rows = tuple(
        (curve["slice"], str(p["at"]), f"{100 * _share(p):.3g} %", f"{p['count']} of {p['n']}")
        for curve in own
        for p in thinned(curve["points"], 12)
    )
    head = ("slice", "position", "disagreed", "of those that reach it")
    return chart.figure(f"c{k}", title, caption, head, rows, described)


def _share(point: Mapping[str, Any]) -> float:
    found = point.get("share")
    return float(point["count"] / point["n"] if found is None else found)


def _supported(curve: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the points with at least `_SUPPORT` texts; all points if no point has so many."""
    enough = [p for p in curve["points"] if p["n"] >= _SUPPORT]
    return enough or list(curve["points"])


def _label_position(y: float, taken: list[float], top: float, gap: float = 13.0) -> float:
    """Return a position near `y`, not above `top`, that is free of labels."""
    places = [y + sign * gap * step for step in range(2 * len(taken) + 2) for sign in (-1, 1)]
    free = (p for p in places if p >= top and all(abs(p - other) >= gap for other in taken))
    at = next(free, y)
    taken.append(at)
    return at


def flips(points: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw the share of positions whose top token differs, by margin; None where there is none."""
    if not any(p["count"] for p in points):
        return None
    chart = Drawing(height=230, bottom=50)
    most = max(p["count"] / p["n"] for p in points)
    y = linear(0, 100 * most, chart.y)
    chart.y_axis(y, ticks(0, 100 * most, 4), "% of positions")
    places, wide = _buckets(chart, points, "margin of the training kernel (logits), from", 12)
    for x, point in zip(places, points, strict=True):
        tall = chart.y[0] - y(100 * point["count"] / point["n"])
        if point["count"]:
            left = x - wide / 2 + 2
            chart.bar(left, chart.y[0] - tall, wide - 4, max(2.0, tall), "bar s1")
    title = "Other top-1 token, by margin"
    total, positions = sum(p["count"] for p in points), sum(p["n"] for p in points)
    described = f"{share(total, positions)} of all positions put another token first."
    rows = tuple((_range(p), share(p["count"], p["n"])) for p in points)
    return chart.figure("flips", title, described, ("margin", "flipped"), rows)


def drift_by(chart: Mapping[str, Any], number: int) -> Figure:
    """Draw median, 95th percentile and worst drift in ranges of another variable."""
    points, metric, by = chart["points"], chart["metric"], chart["by"]
    up = with_unit(metric, chart.get("unit"))
    drawing = Drawing(height=250, bottom=58)
    positive = [p[n] for p in points for n in ("p50", "p95", "worst") if p[n] > 0]
    log = bool(positive) and max(positive) > 30 * min(positive)
    low = min(positive, default=0.0) if log else 0.0
    high = max(positive, default=1.0)
    if log:
        low, high = low / 1.4 or low, drawable(high * 1.4)
        y = logarithmic(low, high, drawing.y)
        drawing.y_axis(y, powers(low, high, 5), up)
    else:
        y = linear(low, drawable(high * 1.05), drawing.y)
        drawing.y_axis(y, ticks(low, high, 4), up)
    places, _ = _buckets(drawing, points, f"{with_unit(by, _UNITS[by])}, from", 22)
    _key(drawing)
    drawn = [(x, p) for x, p in zip(places, points, strict=True)]
    for name, colour in (("p50", "s1"), ("p95", "s2")):
        known = [(x, y(p[name])) for x, p in drawn if p[name] > 0 or not log]
        if known:
            listed = " ".join(f"{px:.1f},{py:.1f}" for px, py in known)
            drawing.add("polyline", points=listed, class_=f"line {colour}")
        for px, py in known:
            drawing.add("circle", cx=px, cy=py, r=2.6, class_=f"dot {colour}")
    for x, point in drawn:
        if point["worst"] > 0 or not log:
            drawing.cross(x, y(point["worst"]))
    title = f"{metric} by {by}"
    described = "; ".join(
        f"{_range(p)}: median {brief(p['p50'])}, worst {brief(p['worst'])}" for p in points
    )
    head = (f"{by}", f"{chart['of']}s", "mean", "p50", "p95", "worst")
    rows = tuple(
        (_range(p), str(p["n"]), *(brief(p[n]) for n in ("mean", "p50", "p95", "worst")))
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
    return drawing.figure(f"b{number}", title, caption, head, rows, described)


def _buckets(
    chart: Drawing, points: Sequence[Mapping[str, Any]], title: str, above: float
) -> tuple[list[float], float]:
    """Draw an axis of ranges, its title `above` the lower end; return their middles and width."""
    base, (left, right) = chart.y[0], chart.x
    wide = (right - left) / len(points)
    places = [left + (i + 0.5) * wide for i in range(len(points))]
    chart.line(left, base, right, base, "axis")
    every = max(1, math.ceil(len(points) / 7))
    for x, point in list(zip(places, points, strict=True))[::every]:
        chart.text(x, base + 16, brief(point["low"]), "tick", "middle")
    chart.text((left + right) / 2, chart.height - above, title, "ax", "middle")
    return places, wide


def _key(chart: Drawing) -> None:
    """Draw the legend of lines and crosses."""
    x, y = chart.x[0], chart.height - 8
    for left, words, colour in ((x, "median", "s1"), (x + 80, "95th percentile", "s2")):
        chart.line(left, y, left + 18, y, f"line {colour}")
        chart.text(left + 23, y + 4, words, "tick")
    chart.cross(x + 208, y)
    chart.text(x + 217, y + 4, "worst", "tick")


def _range(point: Mapping[str, Any]) -> str:
    low, high = brief(point["low"]), brief(point["high"])
    return low if low == high else f"{low} – {high}"
