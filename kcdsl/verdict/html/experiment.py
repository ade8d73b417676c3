"""Experiments as one HTML page: heat maps of pass rates, or a table of variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

from kcdsl.verdict.html.page import rendered
from kcdsl.verdict.html.svg import Drawing
from kcdsl.verdict.messages import VERDICTS, against
from kcdsl.verdict.model import SIGNS
from kcdsl.verdict.quantities import rate_text
from kcdsl.verdict.studies.experiment import (
    Column,
    ExperimentEntry,
    columns,
    entry,
    failed_checks,
    not_run,
    not_shown,
)

_CELL, _HIGH, _LEFT, _TOP, _GAP = 86.0, 44.0, 58.0, 62.0, 26.0
_FOOT = 50.0
_LINE, _WIDE = 18.0, 8.2
"""The line height of the title, and the width of its widest common letter."""
_INK = {"light": "#000000", "dark": "#ffffff"}
"""Text colours for light and dark cells: on any colour, one of them has a contrast of 4.5."""
_STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;fill:#1a1d21}"
    ".soft{fill:#545b64}.few{fill:none;stroke-width:1.5;stroke-dasharray:4 3}"
    ".none{fill:#eceef1;stroke:#b9c0c8}.bg{fill:#ffffff}"
    "@media(prefers-color-scheme:dark){text{fill:#e9ecef}.soft{fill:#a6aeb8}"
    ".none{fill:#262b32;stroke:#4a525c}.bg{fill:#1b1e23}}"
)
_HUES = {
    "held": ((205, 232, 196), (38, 112, 62)),
    "violated": ((148, 26, 36), (246, 178, 160)),
    "inconclusive": ((250, 232, 178), (214, 158, 46)),
    "invalid_evidence": ((119, 67, 160), (119, 67, 160)),
}
"""RGB colours of each verdict at a pass rate of 0 and of 1."""


@dataclass(frozen=True, slots=True)
class Map:
    """The pass rates of one clause on one slice over the cells of E2, as a picture."""

    title: str
    svg: str
    width: float


def maps(document: Mapping[str, Any]) -> list[Map]:
    """Return a heat map for each clause and slice of an experiment E2."""
    found: list[Map] = []
    for number, column in enumerate(columns(document)):
        title = f"{column[0]} on {column[1]}: {_requirement(document, column)}"
        svg = _map(document, column, f"map{number}", title)
        found.append(Map(title, svg, _width(document["axes"])))
    return found


def _requirement(document: Mapping[str, Any], column: Column) -> str:
    entries = (entry(cell, column) for cell in document["cells"])
    found = (row["requirement"] for one in entries if one is not None for row in one.rows)
    return " and ".join(dict.fromkeys(found))


def _map(document: Mapping[str, Any], column: Column, name: str, title: str) -> str:
    """Return one picture: a panel for each device and concurrency, rows are lengths, columns
    batches."""
    axes = document["axes"]
    panels = [(d, c) for d in axes["device"] for c in axes["concurrency"]]
    cells = {(c["device"], c["concurrency"], c["length"], c["batch"]): c for c in document["cells"]}
    across = len(axes["concurrency"])
    wide = _panel(axes)
    high = _TOP + _HIGH * len(axes["length"]) + 18
    lines = wrap(title, int((_width(axes) - 20) / _WIDE))
    head = 12 + _LINE * len(lines)
    drawing = Drawing(width=_width(axes), height=head + len(axes["device"]) * high + _FOOT)
    drawing.add("style", _STYLE)
    drawing.bar(0, 0, drawing.width, drawing.height, "bg")
    for number, words in enumerate(lines):
        drawing.text(10, 20 + _LINE * number, words, style="font-size:14px;font-weight:600")
    for i, (device, streams) in enumerate(panels):
        x, y = (i % across) * wide + 8, head + (i // across) * high
        words = f"{device}, {streams} {'stream' if streams == 1 else 'streams'}"
        drawing.text(x + _LEFT, y + 20, words, style="font-weight:600")
        drawing.text(x + _LEFT, y + 37, "requests in a batch", "soft")
        drawing.text(x, y + 37, "tokens", "soft")
        for across_, batch in enumerate(axes["batch"]):
            drawing.text(x + _LEFT + _CELL * (across_ + 0.5), y + 55, str(batch), anchor="middle")
        for line, length in enumerate(axes["length"]):
            top = y + _TOP + _HIGH * line
            drawing.text(x + _LEFT - 8, top + _HIGH / 2 + 4, str(length), anchor="end")
            for across_, batch in enumerate(axes["batch"]):
                cell = cells.get((device, streams, length, batch))
                drawing.add("g", _cell(cell, column, x + _LEFT + _CELL * across_, top))
    signs = " · ".join(f"{sign} {VERDICTS[name][1]}" for name, sign in SIGNS.items())
    colours = "hue: the verdict; green deepens as more units pass, red as fewer do"
    drawing.text(10, drawing.height - 28, f"{signs} · – not run · dashed: narrow", "soft")
    drawing.text(10, drawing.height - 11, colours, "soft")
    return drawing.svg(name, title, _description(document, column))


def _panel(axes: Mapping[str, Any]) -> float:
    return _LEFT + _CELL * len(axes["batch"]) + _GAP


def _width(axes: Mapping[str, Any]) -> float:
    return max(600.0, len(axes["concurrency"]) * _panel(axes) + 8)


def _cell(cell: Mapping[str, Any] | None, column: Column, x: float, y: float) -> str:
    """Return the SVG elements of a cell."""
    found, drawn = entry(cell, column), Drawing()
    box: dict[str, Any] = {"x": x + 1, "y": y + 1, "width": _CELL - 2, "height": _HIGH - 2, "rx": 4}
    middle = x + _CELL / 2
    drawn.add("title", escape(_why(cell) if found is None else findings_text(found)))
    if found is None:
        drawn.add("rect", class_="none", **box)
        drawn.text(middle, y + _HIGH / 2 + 4, "–", "soft", "middle")
        return "".join(drawn.parts)
    ink = _ink(found)
    drawn.add("rect", fill=_colour(found), **box)
    for words, down, more in (
        (found.words, 19, "font-weight:600"),
        (_units(found.row), 34, "font-size:11px"),
    ):
        drawn.text(middle, y + down, words, anchor="middle", style=f"fill:{ink};{more}")
    if found.narrow:
        inner = {**box, "x": x + 4, "y": y + 4, "width": _CELL - 8, "height": _HIGH - 8}
        drawn.add("rect", class_="few", style=f"stroke:{ink}", **inner)
    return "".join(drawn.parts)


def _units(row: Mapping[str, Any]) -> str:
    return f"{row['passed']}/{row['n']}" if row["passed"] is not None else f"n = {row['n']}"


def findings_text(found: ExperimentEntry) -> str:
    """Return the findings of a cell in words, each part of a conjunction separately."""
    return " | ".join(_told(row) for row in found.rows)


def _told(row: Mapping[str, Any]) -> str:
    words = [VERDICTS[row["verdict"]][1]]
    if row["rate"] is not None:
        words.append(f"{row['passed']} of {row['n']} units pass")
        ends = ["–" if end is None else rate_text(end) for end in (row["low"], row["high"])]
        words.append(f"95 % limits {' to '.join(ends)}")
    if row["value"] is not None:
        words.append(f"{row['metric']} = {against(row['value'], row)}")
    return "; ".join([*words, *row["narrow"], *([row["reason"]] if row["reason"] else [])])


def _why(cell: Mapping[str, Any] | None) -> str:
    if cell is not None and cell["status"] == "ran":
        return "this clause is not decided here"
    return "not run" if cell is None or cell["reason"] is None else f"not run: {cell['reason']}"


def _mixed(found: ExperimentEntry) -> tuple[int, int, int]:
    low, high = _HUES[found.verdict]
    rate = 0.5 if found.row["rate"] is None else float(found.row["rate"])
    red, green, blue = (round(a + (b - a) * rate) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _colour(found: ExperimentEntry) -> str:
    return "#" + "".join(f"{channel:02x}" for channel in _mixed(found))


def _ink(found: ExperimentEntry) -> str:
    """Return the text colour with the better contrast, by relative luminance (WCAG 2)."""
    parts = [channel / 255 for channel in _mixed(found)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return _INK["light"] if luminance > 0.179 else _INK["dark"]


def _description(document: Mapping[str, Any], column: Column) -> str:
    found = [one for cell in document["cells"] if (one := entry(cell, column)) is not None]
    counted = {name: sum(one.verdict == name for one in found) for name in SIGNS}
    words = ", ".join(f"{count} {VERDICTS[name][1]}" for name, count in counted.items() if count)
    absent = len(document["cells"]) - len(found)
    return f"Pass rates of {len(found)} cells: {words}; {absent} have none."


_TITLES = {
    "e1": "E1: one change at a time",
    "e2": "E2: device, batch, length, concurrency",
}
_LEADS = {
    "e1": "Each row is the contract with one change of its inference kernel. Shares are of "
    "requests that meet the clause by themselves; below them the value that decides. Dashed: few "
    "units, or close to the threshold.",
    "e2": "Each cell runs the contract's kernels at one length, in batches, with concurrent "
    "streams. Shares are of requests that meet the clause by themselves.",
}
_FAILED = "Numbers of these cells may have another cause than the numerics."


def experiment_page(document: Mapping[str, Any]) -> str:
    """Return the self-contained page of an experiment, without scripts."""
    kind, cells, manifest = document["experiment"], document["cells"], document["manifest"]
    absent = (*not_run(cells), *not_shown(document))
    return rendered(
        "experiment.html.j2",
        title=_TITLES[kind],
        lead=_LEADS[kind],
        contract=manifest["contract"],
        maps=maps(document) if kind == "e2" else None,
        columns=columns(document),
        cells=[cell for cell in cells if cell["status"] == "ran"],
        entry=entry,
        told=findings_text,
        against=against,
        verdicts=VERDICTS,
        remarks=(
            ("Preconditions that failed", _FAILED, tuple(failed_checks(cells))),
            ("What is not shown", "Nothing is left out unsaid.", absent),
        ),
        manifest=(
            ("contract", manifest["contract"]["digest"]),
            *manifest["files"].items(),
            ("seed", manifest["seed"]),
            *manifest["versions"].items(),
        ),
    )
