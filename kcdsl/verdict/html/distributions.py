"""Charts of measured distributions, certified bounds, and sources of drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kcdsl.verdict.html.svg import (
    Cells,
    Drawing,
    Figure,
    Scale,
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
from kcdsl.verdict.messages import brief, shown

_STRIP = 46.0
_LIMITS, _LINE = 3, 12.5
"""The largest number of thresholds in one chart, and the line height of their names."""
_STRIPS = 8
"""The largest number of slices in one chart; the table has all."""


def histogram(chart: Mapping[str, Any], number: int, called: str) -> Figure:
    """Draw the distribution of units: a strip for each slice, with the thresholds of clauses.

    `called` is the name of the units, requests or prompts."""
    unit, rows = chart["unit"], chart["slices"]
    name = f"|{chart['metric']}|" if chart.get("magnitude") else chart["metric"]
    drawn = rows[:_STRIPS]
    top = 18 + _LINE * max(1, min(_LIMITS, len(chart["limits"])))
    drawing = Drawing(height=top + _STRIP * len(drawn) + 44, left=112, top=top)
    low, high, scale = _reach(chart, drawing)
    for i, row in enumerate(drawn):
        _strip(row, chart["edges"], scale, drawing.top + _STRIP * (i + 1), drawing)
    _thresholds(chart, scale, low, high, drawing)
    at = powers(low, high) if chart["scale"] == "log" else ticks(low, high)
    worse = "smallest" if chart["better"] == "higher" else "largest"
    drawing.x_axis(scale, at, f"{with_unit(name, unit)}, {worse} of each {called}")
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
    return drawing.figure(f"h{number}", title, caption, head, table, described)


def _reach(chart: Mapping[str, Any], frame: Drawing) -> tuple[float, float, Scale]:
    """Return the ends and the scale of the axis: all values, and thresholds near them."""
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
    row: Mapping[str, Any], edges: Sequence[float], scale: Scale, base: float, drawing: Drawing
) -> None:
    counts, tallest = row["counts"], max(row["counts"], default=0)
    most = f"n = {row['n']}, ▮ {tallest}" if tallest else f"n = {row['n']}"
    (left, right), room = drawing.x, _STRIP - 12
    drawing.line(left, base, right, base, "grid")
    drawing.text(left - 8, base - 16, short(row["slice"], 15), "name", "end")
    drawing.text(left - 8, base - 3, most, "tick", "end")
    for at, count in enumerate(counts):
        if count:
            x, end = scale(edges[at]), scale(edges[at + 1])
            wide, tall = max(3.0, end - x - 1), max(2.0, room * count / tallest)
            drawing.bar(min(x, right - wide), base - tall, wide, tall, "bar s1")
    if row["zeros"]:
        tall = max(2.0, room * min(1.0, row["zeros"] / max(tallest, row["zeros"])))
        drawing.bar(left - 5, base - tall, 4, tall, "bar s0")
    for name in ("p50", "p99"):
        value = (row["percentiles"] or {}).get(name)
        if value is not None and (value > 0 or edges[0] <= 0):
            drawing.line(scale(value), base - room - 4, scale(value), base, "mark")


def _thresholds(
    chart: Mapping[str, Any], scale: Scale, low: float, high: float, drawing: Drawing
) -> None:
    """Draw lines at the thresholds, and arrows towards thresholds outside the axis."""
    for level, limit in enumerate(chart["limits"][:_LIMITS]):
        value = limit["threshold"]
        y = drawing.top - 8 - _LINE * level
        words = f"{limit['clause']} {limit['op']} {brief(value)}"
        if low <= value <= high and (value > 0 or chart["scale"] != "log"):
            x = scale(value)
            drawing.line(x, drawing.top - 6, x, drawing.y[0], "limit")
            anchor, x = ("end", x - 4) if x > sum(drawing.x) / 2 else ("start", x + 4)
        else:
            far = value > high
            words = f"{words} →" if far else f"← {words}"
            anchor, x = ("end", drawing.x[1]) if far else ("start", drawing.x[0])
        drawing.text(x, y, words, "limit-name", anchor)


def _spread(row: Mapping[str, Any], unit: str) -> Cells:
    spread = row["percentiles"] or {}
    values = tuple(shown(spread.get(name), unit) for name in ("p50", "p90", "p95", "p99", "worst"))
    return (row["slice"], str(row["n"]), str(row["zeros"]), str(row["outside"]), *values)


def certified(chart: Mapping[str, Any], number: int) -> Figure:
    """Draw certified against measured drift, one dot for each request, on logarithmic axes."""
    points = [p for p in chart["points"] if p["measured"] > 0 and p["certified"] > 0]
    drawing = Drawing(height=300)
    if points:
        _dots(drawing, points, chart.get("unit"))
    else:
        words = "Nothing to draw on logarithmic axes: no request drifts."
        drawing.text(drawing.width / 2, drawing.height / 2, words, "ax", "middle")
    title = f"{chart['metric']}: certified over measured"
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
    head = ("request", "measured", "certified", "ratio")
    return drawing.figure(f"m{number}", title, caption, head, rows)


def _dots(drawing: Drawing, points: Sequence[Mapping[str, Any]], unit: str | None) -> None:
    measured = [p["measured"] for p in points]
    every = [*measured, *(p["certified"] for p in points)]
    low, high = min(every) / 2 or min(every), drawable(max(every) * 2)
    left = min(measured) / 2 or min(measured)
    right = drawable(max(max(measured) * 2, min(measured) * 20))
    x, y = logarithmic(left, right, drawing.x), logarithmic(low, high, drawing.y)
    drawing.y_axis(y, powers(low, high, 5), with_unit("certified", unit))
    across = with_unit("measured, worst of each request", unit)
    drawing.x_axis(x, powers(left, right, 5), across)
    a, b, base = max(left, low), min(right, high), drawing.y[0]
    if a < b:
        corners = ((x(a), y(a)), (x(b), y(b)), (x(b), base), (x(a), base))
        area = " ".join(f"{px:.1f},{py:.1f}" for px, py in corners)
        drawing.add("polygon", points=area, class_="forbidden")
        drawing.line(x(a), y(a), x(b), y(b), "limit")
        words = "measured above certified: never"
        drawing.text(x(b) - 4, base - 8, words, "limit-name", "end")
    for p in points:
        drawing.add("circle", cx=x(p["measured"]), cy=y(p["certified"]), r=3.4, class_="dot s1")


# --- where drift comes from -----------------------------------------------------------------------


def attribution(found: Mapping[str, Any]) -> Figure:
    """Draw the contribution of each source: its Shapley value with interval, and its effect
    alone."""
    sources, total = found["sources"], found.get("total")
    row, fields = 46.0, ("shapley", "alone")
    drawing = Drawing(height=98 + row * max(1, len(sources)), left=104, right=72, top=36)
    ends = [s.get(f) or 0.0 for s in sources for f in (*fields, "low", "high")] + [total or 0.0]
    low, high = min(0.0, *ends), max(0.0, *ends) or 1.0
    x, zero = linear(low, high * 1.2, drawing.x), linear(low, high * 1.2, drawing.x)(0.0)
    what = f"{found.get('statistic', '')} {found.get('metric', '')}".strip()
    drawing.x_axis(x, ticks(low, high), with_unit(what, found.get("unit")))
    base, top = drawing.y
    for at, source in enumerate(sources):
        y = top + row * at + 6
        drawing.text(drawing.x[0] - 8, y + 18, short(str(source["name"]), 16), "name", "end")
        _share(drawing, source, y)
        for index, name in enumerate(fields):
            if (value := source.get(name)) is not None:
                end, place = x(value), y + 15 * index
                wide = max(1.5, abs(end - zero))
                drawing.bar(min(zero, end), place, wide, 12, f"bar s{index + 1}")
                whisker = source.get("high") if name == "shapley" else None
                beyond = max(zero, end, end if whisker is None else x(whisker))
                drawing.text(beyond + 5, place + 10, brief(value), "tick")
        if source.get("low") is not None and source.get("high") is not None:
            drawing.line(x(source["low"]), y + 6, x(source["high"]), y + 6, "axis")
    drawing.line(zero, top, zero, base, "axis")
    if total:
        drawing.line(x(total), top - 4, x(total), base, "limit")
        drawing.text(x(total) - 4, top - 8, f"total {brief(total)}", "limit-name", "end")
    drawing.text(drawing.x[0], 12, "above: Shapley value, below: alone", "tick")
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
    caption = "Shapley values add up to the total. At the right: shares, and what bounds allow."
    return drawing.figure("attribution", title, caption, head, rows, described)


def _share(drawing: Drawing, source: Mapping[str, Any], y: float) -> None:
    """Write the share of a source, and the largest share that a certified bound allows."""
    right = drawing.width - 4
    if source.get("share") is not None:
        drawing.text(right, y + 10, f"{round(100 * source['share'], 1) + 0.0:.1f} %", "tick", "end")
    bounded = source.get("can_explain") is False and source.get("observed")
    if bounded and source.get("envelope") is not None:
        most = 100 * source["envelope"] / source["observed"]
        drawing.text(right, y + 25, f"≤ {most:.2g} %", "tick", "end")


def layers(found: Mapping[str, Any]) -> Figure | None:
    """Draw the drift of each block when it alone is replaced, and its effect on the output."""
    blocks, first = found.get("layers") or [], found.get("first_block")
    if not blocks:
        return None
    row = 22.0
    drawing = Drawing(height=64 + row * len(blocks), left=104, right=84, top=14)
    most = max(b.get("drift") or 0.0 for b in blocks) or 1.0
    x, left = linear(0.0, most * 1.35, drawing.x), drawing.x[0]
    drawing.x_axis(x, ticks(0.0, most), "drift of the block on what enters it in training")
    for at, block in enumerate(blocks):
        y, value = drawing.top + row * at, block.get("drift") or 0.0
        is_first = block["block"] == first
        drawing.text(left - 8, y + 13, short(str(block["block"]), 16), "name", "end")
        colour = "bar s2" if is_first else "bar s1"
        drawing.bar(left, y + 3, max(1.0, x(value) - left), 13, colour)
        drawing.text(x(value) + 5, y + 13, brief(value) + " first" * is_first, "tick")
        if block.get("gain") is not None:
            gain = f"gain {brief(block['gain'])}"
            drawing.text(drawing.width - 4, y + 13, gain, "tick", "end")
    title = "Drift by block"
    caption = f"The first block that drifts is {first}." if first else "No block drifts."
    rows = tuple(
        (str(b["block"]), _or_dash(b.get("drift")), _or_dash(b.get("gain"))) for b in blocks
    )
    return drawing.figure("layers", title, caption, ("block", "drift", "gain"), rows)


def _or_dash(value: Any) -> str:
    return "–" if value is None else brief(float(value))
