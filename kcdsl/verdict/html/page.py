"""From the report document to the page."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from kcdsl.diagnostics.render.terminal import printable
from kcdsl.verdict import words
from kcdsl.verdict.html import curves, sources
from kcdsl.verdict.html import distributions as bounds
from kcdsl.verdict.html import distributions as histograms
from kcdsl.verdict.html.heatmap import heatmap
from kcdsl.verdict.html.svg import Figure
from kcdsl.verdict.result import domains_in_words


def page(report: Mapping[str, Any], attribution: Mapping[str, Any] | None = None) -> str:
    """Return the page of a report document, with the charts of an attribution where one is given.

    Everything that comes from the documents is escaped, and nothing in it controls a terminal.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files("kcdsl.verdict.html")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["picture"] = Markup  # made by svg.py, which escapes
    environment.globals["shown"] = words.shown
    environment.globals["against"] = words.against
    environment.globals["brief"] = words.brief
    template = environment.from_string(folder.joinpath("page.html.j2").read_text(encoding="utf-8"))
    charts = report.get("charts") or {}
    unit = str(report["environment"].get("unit", "request"))
    beside, reasons = words.beside_rows(report["clauses"])
    text = template.render(
        report=report,
        style=Markup(folder.joinpath("style.css").read_text(encoding="utf-8")),
        sign=words.VERDICTS[report["verdict"]][0],
        word=words.VERDICTS[report["verdict"]][1],
        verdicts=words.VERDICTS,
        headline=words.headline(report),
        advice=words.advice(report),
        findings=words.findings(report),
        heatmap=heatmap(report["clauses"]),
        beside=beside,
        reasons=reasons,
        numerics=_numerics(report),
        domains=domains_in_words(report.get("bounding") or {}),
        limit_of=words.limit_of,
        sections=_sections(charts, attribution, unit),
        unit=unit,
        what_if=charts.get("what_if") or [],
        attribution=attribution,
        prechecks=sorted(report["prechecks"], key=_by_outcome),
        statistics=report.get("statistics"),
        fingerprints=_fingerprints(report["kernels"]),
    )
    return printable(text)


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
    """Return the chart sections: (id, title, figures), those without figures left out."""
    disagreement = charts.get("disagreement") or []
    by_drift = charts.get("drift_by") or []
    found = [
        (
            "distributions",
            "Spread",
            [
                histograms.histogram(c, n, unit)
                for n, c in enumerate(charts.get("histograms") or [])
            ],
        ),
        (
            "agreement",
            "Agreement",
            _present(
                curves.disagreement(disagreement, 1),
                curves.disagreement(disagreement, 5),
                curves.flips(charts.get("flips_by_margin") or []),
            ),
        ),
        (
            "where",
            "Where drift is",
            [curves.drift_by(chart, n) for n, chart in enumerate(by_drift)],
        ),
        (
            "certified",
            "Measured versus certified",
            [bounds.certified(c, n) for n, c in enumerate(charts.get("certified") or [])],
        ),
    ]
    if attribution is not None:
        shown = _present(sources.attribution(attribution), sources.layers(attribution))
        found.append(("attribution", "Attribution", shown))
    return [section for section in found if section[2]]


def _present(*found: Figure | None) -> list[Figure]:
    return [figure for figure in found if figure is not None]


def _fingerprints(kernels: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return (side, run, digest, fingerprint as JSON) of both kernels."""
    import json

    return [
        (
            side,
            str(kernels[side]["run"]),
            str(kernels[side]["digest"]),
            json.dumps(kernels[side]["fingerprint"], indent=2, ensure_ascii=False),
        )
        for side in ("train", "infer")
    ]
