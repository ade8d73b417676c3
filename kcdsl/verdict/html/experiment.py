"""Experiments as one HTML page and as pictures: heat maps of pass rates, or a table of variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from kcdsl.verdict.experiment_text import SIGNS, not_run, rate_text
from kcdsl.verdict.html.svg import Frame, element, picture, text

_CELL, _HIGH, _LEFT, _TOP, _GAP = 86.0, 44.0, 58.0, 62.0, 26.0
_INK = {"light": "#10151b", "dark": "#ffffff"}
_STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif;fill:#1a1d21}"
    ".soft{fill:#545b64}.few{fill:none;stroke:#1a1d21;stroke-width:1.5;stroke-dasharray:4 3}"
    ".none{fill:#eceef1;stroke:#b9c0c8}.bg{fill:#ffffff}"
    "@media(prefers-color-scheme:dark){text{fill:#e9ecef}.soft{fill:#a6aeb8}"
    ".few{stroke:#ffffff}.none{fill:#262b32;stroke:#4a525c}.bg{fill:#1b1e23}}"
)
_WORDS = {
    "held": "held",
    "violated": "violated",
    "inconclusive": "inconclusive",
    "invalid_evidence": "invalid evidence",
}


@dataclass(frozen=True, slots=True)
class Map:
    """The pass rates of one clause on one slice over the cells of E2, as a picture."""

    name: str
    title: str
    svg: str
    width: float


def maps(document: Mapping[str, Any]) -> list[Map]:
    """Return a heat map for each clause and slice of an experiment E2."""
    wanted = dict.fromkeys(
        (row["clause"], row["slice"], row["requirement"], row["metric"])
        for cell in document["cells"]
        if cell["status"] == "ran"
        for row in cell["rows"]
    )
    found: list[Map] = []
    for number, (clause, slice_, requirement, metric) in enumerate(wanted):
        title = f"{clause} on {slice_}: {requirement}"
        svg = _map(document, (clause, slice_, metric), f"map{number}", title)
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in f"{clause}-{slice_}")
        taken = {one.name for one in found}
        name = safe if safe not in taken else f"{safe}-{number}"
        found.append(Map(name, title, svg, _width(document["axes"])))
    return found


def _map(document: Mapping[str, Any], wanted: tuple[str, str, str], name: str, title: str) -> str:
    """Return one picture: a panel for each device and concurrency, rows are lengths, columns
    batches."""
    axes = document["axes"]
    panels = [(d, c) for d in axes["device"] for c in axes["concurrency"]]
    cells = {(c["device"], c["concurrency"], c["length"], c["batch"]): c for c in document["cells"]}
    across = len(axes["concurrency"])
    wide = _panel(axes)
    high = _TOP + _HIGH * len(axes["length"]) + 18
    frame = Frame(width=_width(axes), height=30 + len(axes["device"]) * high + 34)
    content = element("style", _STYLE)
    content += element("rect", class_="bg", width=frame.width, height=frame.height)
    content += text(10, 20, title, font_weight="600", style="font-size:14px")
    for i, (device, streams) in enumerate(panels):
        x, y = (i % across) * wide + 8, 30 + (i // across) * high
        words = f"{device}, {streams} {'stream' if streams == 1 else 'streams'}"
        content += text(x + _LEFT, y + 20, words, font_weight="600")
        content += text(x + _LEFT, y + 37, "requests in a batch", class_="soft")
        content += text(x, y + 37, "tokens", class_="soft")
        for column, batch in enumerate(axes["batch"]):
            content += text(
                x + _LEFT + _CELL * (column + 0.5), y + 55, str(batch), text_anchor="middle"
            )
        for line, length in enumerate(axes["length"]):
            top = y + _TOP + _HIGH * line
            content += text(x + _LEFT - 8, top + _HIGH / 2 + 4, str(length), text_anchor="end")
            for column, batch in enumerate(axes["batch"]):
                cell = cells.get((device, streams, length, batch))
                content += _cell(cell, wanted, x + _LEFT + _CELL * column, top)
    content += _legend(frame)
    return picture(name, title, _description(document, wanted), frame, content)


def _panel(axes: Mapping[str, Any]) -> float:
    return _LEFT + _CELL * len(axes["batch"]) + _GAP


def _width(axes: Mapping[str, Any]) -> float:
    return max(560.0, len(axes["concurrency"]) * _panel(axes) + 8)


def _cell(cell: Mapping[str, Any] | None, wanted: tuple[str, str, str], x: float, y: float) -> str:
    row = _row(cell, wanted)
    box: dict[str, Any] = {"x": x + 1, "y": y + 1, "width": _CELL - 2, "height": _HIGH - 2, "rx": 4}
    middle = x + _CELL / 2
    if row is None:
        reason = "not run" if cell is None or cell["status"] != "ran" else "no row"
        shown = element("rect", class_="none", **box)
        shown += text(middle, y + _HIGH / 2 + 4, "–", text_anchor="middle", class_="soft")
        return element("g", element("title", escape(_why(cell, reason))) + shown)
    rate = row["rate"]
    shown = element("rect", fill=_colour(row), **box)
    ink = f"fill:{_ink(row)}"
    first = f"{SIGNS[row['verdict']]} {'' if rate is None else rate_text(rate)}"
    shown += text(middle, y + 19, first, text_anchor="middle", font_weight="600", style=ink)
    shown += text(middle, y + 34, _units(row), text_anchor="middle", style=ink + ";font-size:11px")
    if row["narrow"]:
        inner: dict[str, Any] = {
            **box,
            "x": x + 4,
            "y": y + 4,
            "width": _CELL - 8,
            "height": _HIGH - 8,
        }
        shown += element(
            "rect", **{**inner, "style": f"fill:none;stroke:{_ink(row)}"}, class_="few"
        )
    return element("g", element("title", escape(_told(row))) + shown)


def _row(cell: Mapping[str, Any] | None, wanted: tuple[str, str, str]) -> Mapping[str, Any] | None:
    if cell is None or cell["status"] != "ran":
        return None
    return next((r for r in cell["rows"] if (r["clause"], r["slice"], r["metric"]) == wanted), None)


def _units(row: Mapping[str, Any]) -> str:
    return f"{row['passed']}/{row['n']}" if row["passed"] is not None else f"n = {row['n']}"


def _told(row: Mapping[str, Any]) -> str:
    words = [_WORDS[row["verdict"]]]
    if row["rate"] is not None:
        words.append(f"{row['passed']} of {row['n']} units pass")
        words.append(f"95 % limits {rate_text(row['low'])} to {rate_text(row['high'])}")
    if row["value"] is not None:
        words.append(f"{row['metric']} = {row['value']:.3g}")
    return "; ".join([*words, *row["narrow"], *([row["reason"]] if row["reason"] else [])])


def _why(cell: Mapping[str, Any] | None, word: str) -> str:
    return word if cell is None or cell["reason"] is None else f"{word}: {cell['reason']}"


def _colour(row: Mapping[str, Any]) -> str:
    """Return dark red for no unit that passes, over sand, to dark green for all; grey for a row
    that counts no units."""
    if row["verdict"] == "invalid_evidence":
        return "#7743a0"
    if row["rate"] is None:
        return {"held": "#2b7442", "violated": "#a3222b"}.get(row["verdict"], "#a77a10")
    steps = (
        (163, 34, 43),
        (214, 96, 77),
        (244, 165, 110),
        (246, 226, 150),
        (150, 200, 130),
        (38, 112, 62),
    )
    place = row["rate"] * (len(steps) - 1)
    low = min(int(place), len(steps) - 2)
    part = place - low
    mixed = (round(a + (b - a) * part) for a, b in zip(steps[low], steps[low + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _ink(row: Mapping[str, Any]) -> str:
    """Return the ink that is read on the colour: by its relative luminance (WCAG 2)."""
    colour = _colour(row)
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return _INK["light"] if luminance > 0.18 else _INK["dark"]


def _legend(frame: Frame) -> str:
    words = "✓ held · ✗ violated · ? inconclusive · ! invalid evidence · – not run · dashed: narrow"
    return text(10, frame.height - 12, words, class_="soft")


def _description(document: Mapping[str, Any], wanted: tuple[str, str, str]) -> str:
    rows = [r for c in document["cells"] if (r := _row(c, wanted)) is not None]
    failed = sum(row["verdict"] == "violated" for row in rows)
    return f"Pass rates of {len(rows)} cells; {failed} violate the clause."


# --- the page ------------------------------------------------------------------------------------


def experiment_page(document: Mapping[str, Any]) -> str:
    """Return the page of an experiment: it holds everything it shows, and runs no script."""
    contract = document["manifest"]["contract"]
    kind = document["experiment"]
    title = {
        "e1": "E1: one change at a time",
        "e2": "E2: device, batch, length, concurrency",
    }[kind]
    style = files("kcdsl.verdict.html").joinpath("style.css").read_text(encoding="utf-8")
    body = _section("Pass rates", _LEAD[kind], _content(document))
    missing = [element("li", escape(line)) for line in not_run(document["cells"])]
    missing += [
        element("li", escape(f"{name} is not shown: {reason}"))
        for name, reason in document.get("deferred", {}).items()
    ]
    if missing:
        body += _section(
            "What is not shown", "Nothing is left out unsaid.", f"<ul>{''.join(missing)}</ul>"
        )
    body += _section("Of what", "Digests, seed and versions.", _manifest(document["manifest"]))
    head = f"{contract['name']} {contract['version']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(f'{title} · {head}')}</title><style>{style}{_PAGE}</style></head><body>"
        f'<div class="wrap"><header class="experiment"><h1>{escape(title)}</h1>'
        f"<p>{escape(head)}</p></header><main>{body}</main></div></body></html>\n"
    )


_PAGE = (
    ".experiment{padding-top:26px}table.rates{border-collapse:collapse;font-size:.9rem}"
    ".rates th,.rates td{padding:6px 10px;border-bottom:1px solid var(--line);text-align:left}"
    ".rates td.rate{text-align:right;white-space:nowrap;color:var(--i);background:var(--b)}"
    ".rates td.narrow{outline:2px dashed var(--l);outline-offset:-4px}"
    ".maps svg{width:100%;max-width:none;height:auto;display:block}.maps figure{margin:0 0 18px}"
)
_LEAD = {
    "e1": "Each row is the contract with one change of its inference kernel. Shares are of "
    "requests that meet the clause by themselves; dashed: few units, or close to the threshold.",
    "e2": "Each cell runs the contract's kernels at one length, in batches, with concurrent "
    "streams. Shares are of requests that meet the clause by themselves.",
}


def _section(title: str, lead: str, content: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{content}</section>'


def _content(document: Mapping[str, Any]) -> str:
    if document["experiment"] == "e2":
        shown = "".join(
            f'<figure style="max-width:{one.width:.0f}px">{one.svg}</figure>'
            for one in maps(document)
        )
        return f'<div class="maps">{shown}</div>'
    ran = [cell for cell in document["cells"] if cell["status"] == "ran"]
    columns = tuple(
        dict.fromkeys((r["clause"], r["slice"], r["metric"]) for c in ran for r in c["rows"])
    )
    head = "".join(
        f'<th scope="col">{escape(clause)}<br><span class="minor">{escape(slice_)}</span></th>'
        for clause, slice_, _ in columns
    )
    lines = "".join(_line(cell, columns) for cell in ran)
    return (
        '<div class="scroll"><table class="rates"><thead><tr><th scope="col">variant</th>'
        f"{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _line(cell: Mapping[str, Any], columns: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(_rate(_row(cell, column)) for column in columns)
    name = f"{escape(cell['name'])}<br><span class='minor'>{escape(cell['change'])}</span>"
    checks = "".join(
        f"<br><span class='minor'>{escape(check['name'])}: {escape(check['detail'])}</span>"
        for check in cell["failed_checks"]
    )
    return f'<tr><th scope="row">{name}{checks}</th>{cells}</tr>'


def _rate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return '<td class="rate v-none">–</td>'
    verdict = row["verdict"]
    share = "" if row["rate"] is None else f" {rate_text(row['rate'])}"
    value = "" if row["value"] is None else f"{row['value']:.3g}"
    narrow = " narrow" if row["narrow"] else ""
    return (
        f'<td class="rate v-{verdict}{narrow}" title="{escape(_told(row), quote=True)}">'
        f"{SIGNS[verdict]}{share}<br><span class='minor'>{escape(value)}</span></td>"
    )


def _manifest(manifest: Mapping[str, Any]) -> str:
    rows = [("contract", manifest["contract"]["digest"])]
    rows += list(manifest["files"].items())
    rows += [("seed", str(manifest["seed"])), *manifest["versions"].items()]
    listed = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th>'
        f"<td><code>{escape(str(value))}</code></td></tr>"
        for name, value in rows
    )
    return f'<div class="scroll"><table class="rates">{listed}</table></div>'
