"""Distributions of what was measured, and certified bounds with what was measured, as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kcdsl.verdict.html.svg import (
    Cells,
    Figure,
    Frame,
    Scale,
    drawable,
    element,
    left_out,
    linear,
    logarithmic,
    picture,
    powers,
    short,
    text,
    thinned,
    ticks,
    with_unit,
    x_axis,
    y_axis,
)
from kcdsl.verdict.words import brief, shown

_STRIP = 46.0
_LIMITS, _LINE = 3, 12.5
"""The most thresholds that one picture shows, and the height of a line of their names."""
_STRIPS = 8
"""The most slices that one picture shows; the table has all."""


def histogram(chart: Mapping[str, Any], number: int, called: str) -> Figure:
    """Draw how units, `called` requests or prompts, are spread: a strip for each slice, with the
    thresholds of clauses."""
    unit, rows = chart["unit"], chart["slices"]
    name = f"|{chart['metric']}|" if chart.get("magnitude") else chart["metric"]
    drawn = rows[:_STRIPS]
    top = 18 + _LINE * max(1, min(_LIMITS, len(chart["limits"])))
    frame = Frame(height=top + _STRIP * len(drawn) + 44, left=112, top=top)
    low, high, scale = _reach(chart, frame)
    parts = []
    for i, row in enumerate(drawn):
        base = frame.top + _STRIP * (i + 1)
        parts.append(_strip(row, chart["edges"], scale, base, frame))
    parts += _thresholds(chart, scale, low, high, frame)
    at = powers(low, high) if chart["scale"] == "log" else ticks(low, high)
    worse = "smallest" if chart["better"] == "higher" else "largest"
    parts.append(x_axis(frame, scale, at, f"{with_unit(name, unit)}, {worse} of each {called}"))
    title = f"{name} by slice"
    zeros, outside = (sum(row[key] for row in rows) for key in ("zeros", "outside"))
    caption = (
        f"{called.capitalize()}s by their {worse} {name}"
        + (f" = {chart['formula']}" if chart["formula"] else "")
        + f"; {'logarithmic' if chart['scale'] == 'log' else 'linear'} axis."
        + f" A bar counts {called}s; that of most is as high in every slice, with its count"
        + " beside n."
        + " Long marks: the median and the 99th percentile."
        + (" Grey, at the left: zeros." if zeros else "")
        + left_out(outside, "that are not finite are")
        + left_out(max(0, len(chart["limits"]) - _LIMITS), "more thresholds are")
    )
    head = ("slice", f"{called}s", "zero", "not finite", "p50", "p90", "p95", "p99", "worst")
    table = tuple(_spread(row, unit) for row in rows)
    described = "; ".join(f"{row[0]}: median {row[4]}, worst {row[8]}" for row in table[:_STRIPS])
    return Figure(
        title, caption, picture(f"h{number}", title, described, frame, "".join(parts)), head, table
    )


def _reach(chart: Mapping[str, Any], frame: Frame) -> tuple[float, float, Scale]:
    """Return the ends of the axis: all values, and thresholds that are not far away."""
    edges = chart["edges"] or [0.0, 1.0]
    low, high = edges[0], edges[-1]
    limits = [limit["threshold"] for limit in chart["limits"]]
    if chart["scale"] == "log":
        near = [v for v in limits if v > 0 and low / 1e3 <= v <= high * 1e3]
        low, high = min([low, *near]), max([high, *near])
        low, high = low / 1.3 or low, drawable(high * 1.3)
        return low, high, logarithmic(low, high, frame.x)
    if chart["unit"] == "ratio" and low == high:
        low, high = min(0.0, low), max(1.0, high)
    width = drawable(high - low) or abs(high) or 1.0
    near = [v for v in limits if low - 3 * width <= v <= high + 3 * width]
    low, high = min([low, *near]), max([high, *near])
    room = 0.04 * (drawable(high - low) or abs(high) or 1.0)
    inside = (frame.x[0] + 6, frame.x[1] - 6)
    if chart["unit"] == "ratio":
        return low, high, linear(low, high, inside)
    low, high = drawable(low - room), drawable(high + room)
    return low, high, linear(low, high, frame.x)


def _strip(
    row: Mapping[str, Any], edges: Sequence[float], scale: Scale, base: float, frame: Frame
) -> str:
    counts, tallest = row["counts"], max(row["counts"], default=0)
    most = f"n = {row['n']}, ▮ {tallest}" if tallest else f"n = {row['n']}"
    parts = [
        element("line", x1=frame.x[0], x2=frame.x[1], y1=base, y2=base, class_="grid"),
        text(frame.x[0] - 8, base - 16, short(row["slice"], 15), text_anchor="end", class_="name"),
        text(frame.x[0] - 8, base - 3, most, text_anchor="end", class_="tick"),
    ]
    room = _STRIP - 12
    for at, count in enumerate(counts):
        if not count:
            continue
        x, end = scale(edges[at]), scale(edges[at + 1])
        tall = max(2.0, room * count / tallest)
        wide = max(3.0, end - x - 1)
        parts.append(
            element(
                "rect",
                x=min(x, frame.x[1] - wide),
                y=base - tall,
                width=wide,
                height=tall,
                class_="bar s1",
            )
        )
    if row["zeros"]:
        tall = max(2.0, room * min(1.0, row["zeros"] / max(tallest, row["zeros"])))
        parts.append(
            element("rect", x=frame.x[0] - 5, y=base - tall, width=4, height=tall, class_="bar s0")
        )
    spread = row["percentiles"] or {}
    for name in ("p50", "p99"):
        value = spread.get(name)
        if value is not None and (value > 0 or edges[0] <= 0):
            x = scale(value)
            parts.append(element("line", x1=x, x2=x, y1=base - room - 4, y2=base, class_="mark"))
    return "".join(parts)


def _thresholds(
    chart: Mapping[str, Any], scale: Scale, low: float, high: float, frame: Frame
) -> list[str]:
    """Return lines at the thresholds, and arrows towards those that lie outside."""
    parts = []
    for level, limit in enumerate(chart["limits"][:_LIMITS]):
        value = limit["threshold"]
        y = frame.top - 8 - _LINE * level
        words = f"{limit['clause']} {limit['op']} {brief(value)}"
        if low <= value <= high and (value > 0 or chart["scale"] != "log"):
            x = scale(value)
            right = x > sum(frame.x) / 2
            line = element("line", x1=x, x2=x, y1=frame.top - 6, y2=frame.y[0], class_="limit")
            parts.append(line)
            anchor, x = ("end", x - 4) if right else ("start", x + 4)
        else:
            far = value > high
            words = f"{words} →" if far else f"← {words}"
            anchor, x = ("end", frame.x[1]) if far else ("start", frame.x[0])
        parts.append(text(x, y, words, text_anchor=anchor, class_="limit-name"))
    return parts


def _spread(row: Mapping[str, Any], unit: str) -> Cells:
    spread = row["percentiles"] or {}
    values = tuple(shown(spread.get(name), unit) for name in ("p50", "p90", "p95", "p99", "worst"))
    return (row["slice"], str(row["n"]), str(row["zeros"]), str(row["outside"]), *values)


def certified(chart: Mapping[str, Any], number: int) -> Figure:
    """Draw certified over measured drift, one dot for each request, on logarithmic axes."""
    points = [p for p in chart["points"] if p["measured"] > 0 and p["certified"] > 0]
    frame = Frame(height=300)
    title = f"{chart['metric']}: certified over measured"
    every = [v for p in points for v in (p["measured"], p["certified"])]
    if not every:
        words = "Nothing to draw on logarithmic axes: no request drifts."
        body = text(frame.width / 2, frame.height / 2, words, text_anchor="middle", class_="ax")
    else:
        measured = [p["measured"] for p in points]
        low, high = min(every) / 2 or min(every), drawable(max(every) * 2)
        left = min(measured) / 2 or min(measured)
        right = drawable(max(max(measured) * 2, min(measured) * 20))
        x, y = logarithmic(left, right, frame.x), logarithmic(low, high, frame.y)
        unit = chart.get("unit")
        body = y_axis(frame, y, powers(low, high, 5), with_unit("certified", unit))
        across = with_unit("measured, worst of each request", unit)
        body += x_axis(frame, x, powers(left, right, 5), across)
        a, b = max(left, low), min(right, high)
        if a < b:
            corner = f"{x(a):.1f},{y(a):.1f} {x(b):.1f},{y(b):.1f} {x(b):.1f},{frame.y[0]:.1f}"
            edge = f" {x(a):.1f},{frame.y[0]:.1f}"
            body += element("polygon", points=corner + edge, class_="forbidden")
            body += element("line", x1=x(a), y1=y(a), x2=x(b), y2=y(b), class_="limit")
            body += text(
                x(b) - 4,
                frame.y[0] - 8,
                "measured above certified: never",
                text_anchor="end",
                class_="limit-name",
            )
        body += "".join(
            element("circle", cx=x(p["measured"]), cy=y(p["certified"]), r=3.4, class_="dot s1")
            for p in points
        )
    ratios = sorted(p["certified"] / p["measured"] for p in points)
    least = f"least ratio {brief(ratios[0])}" if ratios else "no ratio"
    drawn = f"; {len(points)} are drawn" if 0 < len(points) < chart["n"] else ""
    caption = (
        f"Each dot is a request; the farther above the line, the looser its bound. {chart['n']} of "
        f"{chart['of']} requests have a bound{drawn}; {least}."
    )
    rows = tuple(
        (
            p["request"],
            brief(p["measured"]),
            brief(p["certified"]),
            brief(p["certified"] / p["measured"]) if p["measured"] > 0 else "–",
        )
        for p in thinned(chart["points"], 20)
    )
    svg = picture(f"m{number}", title, caption, frame, body)
    return Figure(title, caption, svg, ("request", "measured", "certified", "ratio"), rows)
