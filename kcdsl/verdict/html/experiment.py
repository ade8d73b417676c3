"""Experiments as one HTML page: heat maps of pass rates, or a table of variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kcdsl.diagnostics.render.terminal import printable
from kcdsl.verdict.experiment_rows import (
    Column,
    Entry,
    columns,
    entry,
    failed_checks,
    not_run,
    not_shown,
)
from kcdsl.verdict.html.experiment_maps import maps, told
from kcdsl.verdict.html.svg import element
from kcdsl.verdict.html.words import VERDICTS, against

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
_PAGE = (
    ".experiment{padding-top:26px}table.rates{border-collapse:collapse;font-size:.9rem}"
    ".rates th,.rates td{padding:6px 10px;border-bottom:1px solid var(--line);text-align:left}"
    ".rates thead th{white-space:nowrap}.rates tbody th{min-width:200px}"
    ".rates td.rate{text-align:right;white-space:nowrap;color:var(--i);background:var(--b)}"
    ".rates td.rate .minor{color:inherit}.rates th .minor{font-weight:400}"
    ".rates td.narrow{outline:2px dashed var(--i);outline-offset:-4px}"
    ".maps svg{width:100%;max-width:none;height:auto;display:block}.maps figure{margin:0 0 18px}"
    ".maps .scroll>svg{min-width:600px}"
)


def experiment_page(document: Mapping[str, Any]) -> str:
    """Return the page of an experiment: it holds everything it shows, and runs no script."""
    contract = document["manifest"]["contract"]
    kind = document["experiment"]
    style = files("kcdsl.verdict.html").joinpath("style.css").read_text(encoding="utf-8")
    content = _maps(document) if kind == "e2" else _table(document)
    body = _section("Pass rates", _LEADS[kind], content)
    cells = document["cells"]
    for title, lead, lines in (
        (
            "Preconditions that failed",
            "Numbers of these cells may have another cause than the numerics.",
            failed_checks(cells),
        ),
        (
            "What is not shown",
            "Nothing is left out unsaid.",
            (*not_run(cells), *not_shown(document)),
        ),
    ):
        listed = "".join(element("li", escape(line)) for line in lines)
        if listed:
            body += _section(title, lead, f"<ul>{listed}</ul>")
    body += _section("Of what", "Digests, seed and versions.", _manifest(document["manifest"]))
    head = f"{contract['name']} {contract['version']}"
    title = _TITLES[kind]
    return printable(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        'style-src \'unsafe-inline\'; img-src data:"><link rel="icon" href="data:,">'
        f"<title>{escape(f'{title} · {head}')}</title><style>{style}{_PAGE}</style></head><body>"
        f'<div class="wrap"><header class="experiment"><h1>{escape(title)}</h1>'
        f"<p>{escape(head)}</p></header><main>{body}</main></div></body></html>\n"
    )


def _section(title: str, lead: str, content: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{content}</section>'


def _scroll(label: str, content: str) -> str:
    return element("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def _maps(document: Mapping[str, Any]) -> str:
    drawn = "".join(
        f'<figure style="max-width:{one.width:.0f}px">{_scroll(one.title, one.svg)}</figure>'
        for one in maps(document)
    )
    return f'<div class="maps">{drawn}</div>'


def _table(document: Mapping[str, Any]) -> str:
    asked = columns(document)
    head = "".join(
        f'<th scope="col">{escape(clause)}<br><span class="minor">{escape(slice_)}</span></th>'
        for clause, slice_ in asked
    )
    ran = (cell for cell in document["cells"] if cell["status"] == "ran")
    lines = "".join(_line(cell, asked) for cell in ran)
    return _scroll(
        "Pass rates",
        '<table class="rates"><thead><tr><th scope="col">variant</th>'
        f"{head}</tr></thead><tbody>{lines}</tbody></table>",
    )


def _line(cell: Mapping[str, Any], asked: Sequence[Column]) -> str:
    cells = "".join(_rate(entry(cell, column)) for column in asked)
    name = f"{escape(cell['name'])}<br><span class='minor'>{escape(cell['change'])}</span>"
    return f'<tr><th scope="row">{name}</th>{cells}</tr>'


def _rate(found: Entry | None) -> str:
    if found is None:
        return '<td class="rate v-none">–</td>'
    row = found.row
    value = "" if row["value"] is None else against(row["value"], row)
    narrow = " narrow" if found.narrow else ""
    return (
        f'<td class="rate v-{found.verdict}{narrow}" title="{escape(told(found), quote=True)}">'
        f'{escape(found.words)}<span class="sr"> {VERDICTS[found.verdict][1]}</span>'
        f"<br><span class='minor'>{escape(value)}</span></td>"
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
    return _scroll("Of what", f'<table class="rates">{listed}</table>')
