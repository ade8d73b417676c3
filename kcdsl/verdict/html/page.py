"""Rendering of a report document as an HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kcdsl.diagnostics.render.terminal import printable
from kcdsl.verdict import messages
from kcdsl.verdict.html import curves, distributions
from kcdsl.verdict.html.svg import Figure
from kcdsl.verdict.model import WORST_FIRST
from kcdsl.verdict.quantities import rate_text
from kcdsl.verdict.result import domains_in_words


def page(report: Mapping[str, Any], attribution: Mapping[str, Any] | None = None) -> str:
    """Return the page of a report document, with the charts of an attribution where one is given.

    All text of the documents is escaped and free of terminal control characters.
    """
    charts = report.get("charts") or {}
    unit = str(report["environment"].get("unit", "request"))
    context, reasons = messages.context_rows(report["clauses"])
    return rendered(
        "page.html.j2",
        report=report,
        shown=messages.shown,
        against=messages.against,
        brief=messages.brief,
        sign=messages.VERDICTS[report["verdict"]][0],
        word=messages.VERDICTS[report["verdict"]][1],
        verdicts=messages.VERDICTS,
        headline=messages.headline(report),
        advice=messages.advice(report),
        findings=messages.findings(report),
        heatmap=heatmap(report["clauses"]),
        context=context,
        reasons=reasons,
        numerics=_numerics(report),
        domains=domains_in_words(report.get("bounding") or {}),
        limit_of=messages.limit_of,
        sections=_sections(charts, attribution, unit),
        unit=unit,
        what_if=charts.get("what_if") or [],
        attribution=attribution,
        prechecks=sorted(report["prechecks"], key=_by_outcome),
        statistics=report.get("statistics"),
        fingerprints=_fingerprints(report["kernels"]),
    )


def rendered(template: str, **values: Any) -> str:
    """Return the page rendered from a template of this folder."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files("kcdsl.verdict.html")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["picture"] = Markup  # svg.py has escaped it
    environment.filters["coded"] = _coded
    made = environment.from_string(folder.joinpath(template).read_text(encoding="utf-8"))
    style = Markup(folder.joinpath("style.css").read_text(encoding="utf-8"))
    return printable(made.render(style=style, **values))


def _coded(text: str) -> str:
    """Return a text as HTML, with text between backticks as code."""
    from markupsafe import Markup, escape

    parts = str(text).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    code = Markup("<code>{}</code>")
    shown = (code.format(part) if i % 2 else escape(part) for i, part in enumerate(parts))
    return Markup("").join(shown)


def _by_outcome(check: Mapping[str, Any]) -> int:
    return {"failed": 0, "passed": 1, "not_applicable": 2}[check["outcome"]]


def _numerics(report: Mapping[str, Any]) -> str:
    found = (report.get("bounding") or {}).get("numerics")
    if not found:
        return ""
    return f"{found['train']} for training and {found['infer']} for inference"


def _sections(
    charts: Mapping[str, Any], attribution: Mapping[str, Any] | None, unit: str
) -> list[tuple[str, str, list[Figure]]]:
    """Return the chart sections (id, title, figures) that have figures."""
    disagreement = charts.get("disagreement") or []
    by_drift = charts.get("drift_by") or []
    histograms, certified = (charts.get(name) or [] for name in ("histograms", "certified"))
    agreement = (
        curves.disagreement(disagreement, 1),
        curves.disagreement(disagreement, 5),
        curves.flips(charts.get("flips_by_margin") or []),
    )
    spread = [distributions.histogram(chart, n, unit) for n, chart in enumerate(histograms)]
    bounds = [distributions.certified(chart, n) for n, chart in enumerate(certified)]
    found: list[tuple[str, str, Sequence[Figure | None]]] = [
        ("distributions", "Spread", spread),
        ("agreement", "Agreement", agreement),
        ("where", "Where drift is", [curves.drift_by(c, n) for n, c in enumerate(by_drift)]),
        ("certified", "Measured versus certified", bounds),
    ]
    if attribution is not None:
        sources = (distributions.attribution(attribution), distributions.layers(attribution))
        found.append(("attribution", "Attribution", sources))
    return [
        (name, title, [figure for figure in figures if figure is not None])
        for name, title, figures in found
        if any(figures)
    ]


def _fingerprints(kernels: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return (side, run, digest, fingerprint as JSON) of both kernels."""
    return [
        (
            side,
            str(kernels[side]["run"]),
            str(kernels[side]["digest"]),
            json.dumps(kernels[side]["fingerprint"], indent=2, ensure_ascii=False),
        )
        for side in ("train", "infer")
    ]


# --- pass rates of clauses by slice ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One clause on one slice: its verdict, the share of units that pass, and why it is narrow.

    `large` is shown in large print: the number of a decided clause, and for any other clause that
    it is undecided.
    """

    verdict: str
    sign: str
    word: str
    share: str
    value: str
    units: str
    narrow: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Return whether the clause is held or violated."""
        return self.verdict in ("held", "violated")

    @property
    def large(self) -> str:
        """Return the text in large print."""
        return self.share or self.value if self.decided else self.word

    @property
    def small(self) -> str:
        """Return the other numbers."""
        shares = (self.share,) if self.share and not self.decided else ()
        value = (self.value,) if self.share or not self.decided else ()
        return " · ".join((*shares, *value, self.units))


@dataclass(frozen=True, slots=True)
class HeatmapRow:
    """One clause over all slices; None for a slice on which it was not evaluated."""

    clause: str
    level: str
    requirement: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True)
class Heatmap:
    """All clauses over all slices."""

    slices: tuple[str, ...]
    rows: tuple[HeatmapRow, ...]

    @property
    def narrow(self) -> bool:
        """Return whether any cell is narrow."""
        return any(cell is not None and cell.narrow for row in self.rows for cell in row.cells)


def heatmap(clauses: Sequence[Mapping[str, Any]]) -> Heatmap:
    """Return the map; the parts of a conjunction share a cell, which shows the worst part."""
    slices = tuple(dict.fromkeys(row["slice"] for row in clauses))
    rows: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in clauses:
        rows.setdefault(row["clause"], {}).setdefault(row["slice"], []).append(row)
    made = []
    for name, by_slice in rows.items():
        first = next(iter(by_slice.values()))[0]
        cells = tuple(_cell(by_slice[s]) if s in by_slice else None for s in slices)
        made.append(HeatmapRow(name, first["level"], _requirement(first), cells))
    return Heatmap(slices, tuple(made))


def _requirement(row: Mapping[str, Any]) -> str:
    budget = f", up to {row['budget']}" if row.get("budget") else ""
    return f"{row['requirement']}{budget}"


def _cell(parts: Sequence[Mapping[str, Any]]) -> Cell:
    row = min(parts, key=lambda part: WORST_FIRST.index(part["verdict"]))
    sign, word = messages.VERDICTS[row["verdict"]]
    counted = row.get("exceedance")
    rate = None if counted is None else 1.0 - counted["rate"]
    context = row.get("context") or {}
    return Cell(
        row["verdict"],
        sign,
        word,
        "" if rate is None else rate_text(rate),
        messages.against(row["value"], row),
        f"{row['n']} {row['counted']}" if counted is None else f"{counted['n']} {counted['of']}",
        tuple(context.get("narrow") or ()),
    )
