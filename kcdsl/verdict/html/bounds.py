"""Measured values against their certified bounds, request by request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kcdsl.verdict.html.figure import Figure, thinned, with_unit
from kcdsl.verdict.html.svg import (
    Frame,
    drawable,
    element,
    logarithmic,
    picture,
    powers,
    text,
    x_axis,
    y_axis,
)
from kcdsl.verdict.html.words import brief


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
