"""The charts: from the data of a report to pictures, each with the table it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kcdsl.verdict.html.svg import (
    Frame,
    Scale,
    element,
    linear,
    logarithmic,
    picture,
    powers,
    text,
    ticks,
    x_axis,
    y_axis,
)
from kcdsl.verdict.html.words import brief, share, shown

Cells = tuple[str, ...]
_STRIP = 46.0
_STRIPS = 8
"""The most slices that one picture shows; the table has all."""
_LINES = 4
_SUPPORT = 5
"""The fewest texts that a point of a curve stands for."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its caption, and the numbers it shows."""

    title: str
    caption: str
    svg: str
    head: Cells
    rows: tuple[Cells, ...]


# --- histograms ----------------------------------------------------------------------------------


def histogram(chart: Mapping[str, Any], number: int) -> Figure:
    """Draw how requests are spread, a strip for each slice, with the thresholds of clauses."""
    name, unit, rows = chart["metric"], chart["unit"], chart["slices"]
    drawn = rows[:_STRIPS]
    frame = Frame(height=30 + _STRIP * len(drawn) + 44, left=104, top=30)
    low, high, scale = _reach(chart, frame)
    parts = []
    for i, row in enumerate(drawn):
        base = frame.top + _STRIP * (i + 1)
        parts.append(_strip(row, chart["edges"], scale, base, frame))
    parts += _thresholds(chart, scale, low, high, frame)
    at = powers(low, high) if chart["scale"] == "log" else ticks(low, high)
    of = "" if unit == "1" else f" ({unit})"
    worse = "smallest" if chart["better"] == "higher" else "largest"
    parts.append(x_axis(frame, scale, at, f"{name}{of}, {worse} of each request"))
    title = f"{name} by slice"
    caption = (
        f"Requests by their {worse} {name}"
        + (f" = {chart['formula']}" if chart["formula"] else "")
        + f"; {'logarithmic' if chart['scale'] == 'log' else 'linear'} axis."
        + " Long marks: the median and the 99th percentile."
    )
    head = ("slice", "requests", "zero", "not finite", "p50", "p90", "p95", "p99", "worst")
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
        low, high = low / 1.3, high * 1.3
        return low, high, logarithmic(low, high, frame.x)
    if chart["unit"] == "ratio" and low == high:
        low, high = min(0.0, low), max(1.0, high)
    width = (high - low) or abs(high) or 1.0
    near = [v for v in limits if low - 3 * width <= v <= high + 3 * width]
    low, high = min([low, *near]), max([high, *near])
    room = 0.04 * ((high - low) or abs(high) or 1.0)
    inside = (frame.x[0] + 6, frame.x[1] - 6)
    if chart["unit"] == "ratio":
        return low, high, linear(low, high, inside)
    return low - room, high + room, linear(low - room, high + room, frame.x)


def _strip(
    row: Mapping[str, Any], edges: Sequence[float], scale: Scale, base: float, frame: Frame
) -> str:
    counts, tallest = row["counts"], max(row["counts"], default=0)
    parts = [
        element("line", x1=frame.x[0], x2=frame.x[1], y1=base, y2=base, class_="grid"),
        text(frame.x[0] - 8, base - 16, _short(row["slice"], 15), text_anchor="end", class_="name"),
        text(frame.x[0] - 8, base - 3, f"n = {row['n']}", text_anchor="end", class_="tick"),
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
    parts, level = [], 0
    for limit in chart["limits"]:
        value = limit["threshold"]
        inside = low <= value <= high
        if inside and (value > 0 or chart["scale"] != "log"):
            x = scale(value)
            middle = "end" if x > sum(frame.x) / 2 else "start"
            words = f"{limit['clause']} {limit['op']} {brief(value)}"
            move = -4 if middle == "end" else 4
            parts.append(
                element("line", x1=x, x2=x, y1=frame.top - 6, y2=frame.y[0], class_="limit")
            )
            parts.append(
                text(
                    x + move,
                    frame.top - 8 - 11 * level,
                    words,
                    text_anchor=middle,
                    class_="limit-name",
                )
            )
        elif level == 0:
            far = value > high
            arrow = f"{limit['clause']} {limit['op']} {brief(value)} " + ("→" if far else "←")
            parts.append(
                text(
                    frame.x[1] if far else frame.x[0],
                    frame.top - 8,
                    arrow,
                    text_anchor="end" if far else "start",
                    class_="limit-name",
                )
            )
        level = min(level + 1, 1)
    return parts[:4]


def _spread(row: Mapping[str, Any], unit: str) -> Cells:
    spread = row["percentiles"] or {}
    values = tuple(shown(spread.get(name), unit) for name in ("p50", "p90", "p95", "p99", "worst"))
    return (row["slice"], str(row["n"]), str(row["zeros"]), str(row["outside"]), *values)


# --- curves --------------------------------------------------------------------------------------


def disagreement(curves: Sequence[Mapping[str, Any]], k: int) -> Figure | None:
    """Draw the share of texts whose top k tokens have differed by each position."""
    own = [curve for curve in curves if curve["k"] == k]
    if not own:
        return None
    frame = Frame(height=240, right=92)
    drawn = [(curve["slice"], _supported(curve)) for curve in own[:_LINES]]
    longest = max(points[-1]["at"] for _, points in drawn)
    most = max(p["count"] / p["n"] for _, points in drawn for p in points)
    x = linear(0, max(1, longest), frame.x)
    y = linear(0, 100 * (most or 0.01), frame.y)
    top = 100 * (most or 0.01)
    parts = [y_axis(frame, y, ticks(0, top, 4), "% of texts")]
    parts.append(x_axis(frame, x, ticks(0, max(1, longest)), "position (tokens)"))
    taken: list[float] = []
    for number, (name, supported) in enumerate(drawn, 1):
        points = [(x(p["at"]), y(100 * p["count"] / p["n"])) for p in supported]
        parts.append(_steps(points, f"line s{number}"))
        end = points[-1]
        parts.append(
            text(
                frame.x[1] + 6,
                _apart(end[1], taken, frame.top) + 4,
                _short(name, 11),
                class_=f"name t{number}",
            )
        )
    title = f"Texts whose top-{k} tokens have differed, by position"
    last = [(curve["slice"], curve["points"][-1]) for curve in own]
    none = all(p["count"] == 0 for curve in own for p in curve["points"])
    said = "No text disagrees anywhere." if none else ""
    described = said or "; ".join(f"{s}: {share(p['count'], p['n'])} at the end" for s, p in last)
    caption = (
        "A text has disagreed from the first position on at which the kernels do not put the same "
        f"{k} tokens first. At each position only the texts that reach it count; drawn while at "
        f"least {_SUPPORT} do. {said}"
    )
    rows = tuple(
        (curve["slice"], str(p["at"]), share(p["count"], p["n"]))
        for curve in own
        for p in _thinned(curve["points"], 12)
    )
    svg = picture(f"c{k}", title, described, frame, "".join(parts))
    return Figure(title, caption, svg, ("slice", "position", "disagreed"), rows)


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


def _thinned(points: Sequence[Any], most: int) -> list[Any]:
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def drift_by(chart: Mapping[str, Any], number: int) -> Figure:
    """Draw median, 95th percentile and worst drift in ranges of something else."""
    points, metric, by = chart["points"], chart["metric"], chart["by"]
    frame = Frame(height=250, bottom=58)
    positive = [p[n] for p in points for n in ("p50", "p95", "worst") if p[n] > 0]
    log = bool(positive) and max(positive) > 30 * min(positive)
    low = min(positive, default=0.0) if log else 0.0
    high = max(positive, default=1.0)
    if log:
        low, high = low / 1.4, high * 1.4
        y = logarithmic(low, high, frame.y)
        axis = y_axis(frame, y, powers(low, high, 5), metric)
    else:
        y = linear(low, high * 1.05, frame.y)
        axis = y_axis(frame, y, ticks(low, high, 4), metric)
    places = [
        frame.x[0] + (i + 0.5) * (frame.x[1] - frame.x[0]) / len(points) for i in range(len(points))
    ]
    parts = [axis, _bucket_axis(frame, points, places, by, chart["of"])]
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
        f"{_range(p)}: median {brief(p['p50'])}, worst {brief(p['worst'])}" for p in points
    )
    head = (f"{by}", f"{chart['of']}s", "mean", "p50", "p95", "worst")
    rows = tuple(
        (_range(p), str(p["n"]), *(brief(p[n]) for n in ("mean", "p50", "p95", "worst")))
        for p in points
    )
    caption = f"Of the {chart['of']}s in each range of the {by}."
    svg = picture(f"b{number}", title, described, frame, "".join(parts))
    return Figure(title, caption, svg, head, rows)


def _polyline(points: Sequence[tuple[float, float]], class_: str) -> str:
    if not points:
        return ""
    listed = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    return element("polyline", points=listed, class_=class_)


def _bucket_axis(
    frame: Frame, points: Sequence[Mapping[str, Any]], places: Sequence[float], by: str, of: str
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
    unit = {"length": " (tokens), from", "entropy": " (nats), from"}.get(by, ", from")
    parts.append(text(middle, frame.height - 22, f"{by}{unit}", text_anchor="middle", class_="ax"))
    del of
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


def _range(point: Mapping[str, Any]) -> str:
    low, high = brief(point["low"]), brief(point["high"])
    return low if low == high else f"{low} – {high}"


# --- flips, bounds, sources ----------------------------------------------------------------------


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
            "margin of the training kernel, from",
            text_anchor="middle",
            class_="ax",
        )
    )
    title = "Other top-1 token, by margin"
    total, every_n = sum(p["count"] for p in points), sum(p["n"] for p in points)
    described = f"{share(total, every_n)} of all positions put another token first."
    rows = tuple((_range(p), share(p["count"], p["n"])) for p in points)
    svg = picture("flips", title, described, frame, "".join(parts))
    return Figure(title, described, svg, ("margin", "flipped"), rows)


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
        low, high = min(every) / 2, max(every) * 2
        left, right = min(measured) / 2, max(max(measured) * 2, min(measured) * 20)
        x, y = logarithmic(left, right, frame.x), logarithmic(low, high, frame.y)
        body = y_axis(frame, y, powers(low, high, 5), "certified")
        body += x_axis(frame, x, powers(left, right, 5), "measured, worst of each request")
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
    caption = f"{chart['n']} of {chart['of']} requests have a bound; {least}."
    rows = tuple(
        (
            p["request"],
            brief(p["measured"]),
            brief(p["certified"]),
            brief(p["certified"] / p["measured"]) if p["measured"] > 0 else "–",
        )
        for p in _thinned(chart["points"], 20)
    )
    svg = picture(f"m{number}", title, caption, frame, body)
    return Figure(title, caption, svg, ("request", "measured", "certified", "ratio"), rows)


def attribution(found: Mapping[str, Any]) -> Figure:
    """Draw what each source contributes: its Shapley value, alone, and its certified envelope."""
    sources = found["sources"]
    row = 46.0
    frame = replace(Frame(), height=40 + row * max(1, len(sources)) + 44, left=104, top=22)
    total = found.get("total")
    fields = ("shapley", "alone")
    values = [s.get(f) or 0.0 for s in sources for f in fields] + [total or 0.0]
    low, high = min(0.0, *values), max(0.0, *values) or 1.0
    x = linear(low, high * 1.2, frame.x)
    unit = "" if found.get("unit") in (None, "1") else f" ({found['unit']})"
    what = f"{found.get('statistic', '')} {found.get('metric', '')}".strip()
    parts = [x_axis(frame, x, ticks(low, high), f"{what}{unit}")]
    zero = x(0.0)
    for at, source in enumerate(sources):
        y = frame.top + row * at + 6
        parts.append(
            text(
                frame.x[0] - 8, y + 18, _short(source["name"], 16), text_anchor="end", class_="name"
            )
        )
        for index, name in enumerate(fields):
            value = source.get(name)
            if value is None:
                continue
            end, top = x(value), y + 15 * index
            parts.append(
                element(
                    "rect",
                    x=min(zero, end),
                    y=top,
                    width=max(1.5, abs(end - zero)),
                    height=12,
                    class_=f"bar s{index + 1}",
                )
            )
            parts.append(text(max(zero, end) + 5, top + 10, brief(value), class_="tick"))
    base = frame.y[0]
    parts.append(element("line", x1=zero, x2=zero, y1=frame.top, y2=base, class_="axis"))
    if total:
        parts.append(
            element("line", x1=x(total), x2=x(total), y1=frame.top - 4, y2=base, class_="limit")
        )
        parts.append(
            text(
                x(total) - 4,
                frame.top - 8,
                f"total {brief(total)}",
                text_anchor="end",
                class_="limit-name",
            )
        )
    parts.append(
        text(frame.x[0], frame.top - 8, "above: Shapley value, below: alone", class_="tick")
    )
    title = f"Where {what} comes from"
    described = "; ".join(f"{s['name']}: {_or_dash(s.get('shapley'))}" for s in sources)
    head = ("source", "Shapley", "alone", "left out", "certified envelope", "can explain it alone")
    rows = tuple(
        (
            str(s["name"]),
            *(_or_dash(s.get(name)) for name in ("shapley", "alone", "left_out", "envelope")),
            {True: "yes", False: "no: its envelope is smaller", None: "not known"}[
                s.get("can_explain")
            ],
        )
        for s in sources
    )
    svg = picture("attribution", title, described, frame, "".join(parts))
    return Figure(title, "Shapley values add up to the total.", svg, head, rows)


def layers(found: Mapping[str, Any]) -> Figure | None:
    """Draw the drift of each block when it alone is replaced, and what the rest makes of it."""
    blocks = found.get("layers") or []
    if not blocks:
        return None
    row = 22.0
    frame = replace(Frame(), height=20 + row * len(blocks) + 44, left=104, top=14)
    most = max((b.get("drift") or 0.0 for b in blocks), default=0.0) or 1.0
    x = linear(0.0, most * 1.35, frame.x)
    parts = [x_axis(frame, x, ticks(0.0, most), "drift of the block on what enters it in training")]
    for at, block in enumerate(blocks):
        y, value = frame.top + row * at, block.get("drift") or 0.0
        first = block["block"] == found.get("first_block")
        parts.append(
            text(
                frame.x[0] - 8,
                y + 13,
                _short(str(block["block"]), 16),
                text_anchor="end",
                class_="name",
            )
        )
        parts.append(
            element(
                "rect",
                x=frame.x[0],
                y=y + 3,
                width=max(1.0, x(value) - frame.x[0]),
                height=13,
                class_="bar s2" if first else "bar s1",
            )
        )
        words = brief(value) + (" first" if first else "")
        parts.append(text(x(value) + 5, y + 13, words, class_="tick"))
    title = "Drift by block"
    first = found.get("first_block")
    caption = f"The first block that drifts is {first}." if first else "No block drifts."
    rows = tuple(
        (str(b["block"]), _or_dash(b.get("drift")), _or_dash(b.get("gain"))) for b in blocks
    )
    svg = picture("layers", title, caption, frame, "".join(parts))
    return Figure(title, caption, svg, ("block", "drift", "gain"), rows)


def _or_dash(value: Any) -> str:
    return "–" if value is None else brief(float(value))


def _short(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"
