"""Where drift comes from: its sources, and the blocks in which it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kcdsl.verdict.html.svg import (
    Figure,
    Frame,
    element,
    linear,
    or_dash,
    picture,
    short,
    text,
    ticks,
    x_axis,
)
from kcdsl.verdict.words import brief


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
                frame.x[0] - 8, y + 18, short(source["name"], 16), text_anchor="end", class_="name"
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
    described = "; ".join(f"{s['name']}: {or_dash(s.get('shapley'))}" for s in sources)
    head = ("source", "Shapley", "alone", "left out", "certified envelope", "can explain it alone")
    rows = tuple(
        (
            str(s["name"]),
            *(or_dash(s.get(name)) for name in ("shapley", "alone", "left_out", "envelope")),
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
                short(str(block["block"]), 16),
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
    rows = tuple((str(b["block"]), or_dash(b.get("drift")), or_dash(b.get("gain"))) for b in blocks)
    svg = picture("layers", title, caption, frame, "".join(parts))
    return Figure(title, caption, svg, ("block", "drift", "gain"), rows)
