"""From the report document to the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from kcdsl.diagnostics.render.terminal import printable
from kcdsl.verdict.html import curves, sources, words
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
    beside, reasons = _beside(report["clauses"])
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


def _beside(clauses: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the table of measured, certified, threshold and noise in words, and why numbers are
    missing: each reason once, with its place in the list in the rows."""
    found: list[dict[str, Any]] = []
    reasons: list[str] = []

    def note(part: Mapping[str, Any] | None) -> int:
        why = (part or {}).get("reason")
        if not why:
            return 0
        if why not in reasons:
            reasons.append(why)
        return reasons.index(why) + 1

    for row in clauses:
        beside = row.get("beside") or {}
        spread = beside.get("measured")
        if spread is None:
            continue
        certified, floor = beside.get("certified"), beside.get("noise_floor")
        found.append(
            {
                "clause": row["clause"],
                "slice": row["slice"],
                "verdict": row["verdict"],
                "metric": row["metric"],
                **{name: words.against(spread[name], row) for name in ("p50", "p99", "worst")},
                "value": words.against(row["value"], row),
                "threshold": words.threshold_of(row),
                "certified": "–"
                if certified is None
                else "no bound"
                if certified["value"] is None
                else words.against(certified["value"], row),
                "partial": _partial(certified, row),
                "certified_note": note(certified),
                "floor": words.against((floor or {}).get("value"), row),
                "floor_note": note(floor),
                "above": bool((floor or {}).get("above")),
            }
        )
    return found, reasons


def _partial(certified: Mapping[str, Any] | None, row: Mapping[str, Any]) -> str:
    if certified is None or certified["value"] is not None or certified["partial"] is None:
        return ""
    part = f"{certified['requests']} of {certified['of']}"
    return f"{words.against(certified['partial'], row)} on {part}"


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
