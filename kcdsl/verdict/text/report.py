"""The report for people: tables that fit 100 columns, and the same as a picture (SVG)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from io import StringIO
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kcdsl.diagnostics.render.terminal import printable
from kcdsl.ir.tables import is_bucket
from kcdsl.verdict.model import SHOWN, Violated, verdict_name
from kcdsl.verdict.quantities import UNREACHED, quantity, scale, stated, told
from kcdsl.verdict.quantities import UNREACHED as _UNREACHED
from kcdsl.verdict.report import CrossCheck, Report, SliceSummary, Statistics
from kcdsl.verdict.result import ClauseResult, domains_in_words, reason
from kcdsl.verdict.text.console import WIDTH, HarmlessConsole, print_on

_FONT = re.compile(r"@font-face\s*\{.*?\}\s*", re.DOTALL)


def print_report(report: Report, stream: TextIO) -> None:
    """Print the report; colours only where the stream is a terminal."""
    print_on(stream, render(report))


def svg(report: Report) -> str:
    """Return the report as an SVG picture that fetches nothing: no font from elsewhere."""
    # with a height too, as rich takes terminals called "dumb" to be 80 columns wide else
    console = HarmlessConsole(
        record=True, width=WIDTH, height=50, file=StringIO(), force_terminal=True
    )
    console.print(render(report))
    picture = console.export_svg(title=f"kcdsl evaluate · {report.contract['name']}")
    return printable(_FONT.sub("", picture))


def render(report: Report) -> RenderableType:
    """Return the report as something that rich prints."""
    parts: list[RenderableType] = [_heading(report), _clause_table(report.clauses)]
    parts += _reasons(report.clauses)
    parts += beside_parts(report)
    if report.crosschecks:
        parts.append(_crosscheck_table(report.crosschecks))
    if any(s.statistics for s in report.slices):
        parts.append(_slice_table(report.slices, report.unit))
    parts += list(_remarks(report))
    parts.append(_conclusion(report))
    return Group(*parts)


def _heading(report: Report) -> Text:
    text = Text()
    text.append(f"{report.contract['name']} {report.contract['version']}", style="bold")
    text.append(f"  {report.contract['digest'][:19]}\n", style="dim")
    train, infer = report.kernels["train"], report.kernels["infer"]
    text.append(
        f"train {_kernel(train)} | infer {_kernel(infer)} | {report.environment.get('device', '')}"
    )
    return text


def _kernel(kernel: object) -> str:
    if not isinstance(kernel, dict):
        return ""
    numerics = kernel.get("fingerprint", {}).get("numerics") or {}
    words = [str(kernel.get("run", ""))]
    words += [str(numerics[name]) for name in ("compute",) if name in numerics]
    weights = numerics.get("weights", {}).get("format")
    if weights not in (None, numerics.get("compute")):
        words.append(f"weights {weights}")
    return " ".join(words)


# --- tables --------------------------------------------------------------------------------------


def _clause_table(clauses: Iterable[ClauseResult]) -> Table:
    rows = tuple(clauses)
    bucketed = any(is_bucket(row.slice) for row in rows)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    table.add_column("clause", no_wrap=True, max_width=16, overflow="ellipsis")
    if bucketed:
        table.add_column("slice", max_width=22, overflow="fold")
    else:
        table.add_column("slice", no_wrap=True, max_width=9, overflow="ellipsis")
    table.add_column("requirement", max_width=32, overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("limit", justify="right", no_wrap=True)
    table.add_column("evidence", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        word, style = SHOWN[verdict_name(row.verdict)]
        unit = scale(row.unit, row.threshold)
        cells = (
            f"{row.clause} {row.level}",
            row.slice,
            requirement(row) + (" (held out)" if row.holdout else ""),
            told(row.value, row.threshold, unit),
            told(_worse_limit(row), row.threshold, unit),
            f"{row.evidence} {beyond(row)}",
        )
        table.add_row(*map(Text, cells), Text(word, style=style))
    return table


def requirement(row: ClauseResult) -> str:
    """Return what a clause asks for, in the units of people."""
    if row.threshold is None or row.metric.startswith("coverage("):
        return row.requirement
    budget = "" if row.budget is None else f", up to {row.budget}"
    return f"{row.metric} {row.op} {stated(row.threshold, row.unit)}{budget}"


def beyond(row: ClauseResult) -> str:
    """Return how many units are beyond the threshold, as k/n; only n where none are counted."""
    if row.exceedance is None:
        return str(row.n)
    return f"{row.exceedance.k}/{row.exceedance.n}"


def _worse_limit(row: ClauseResult) -> float | None:
    """Return the limit that decides a sample; a census has no sampling error."""
    if row.evidence != "sample":
        return None
    return row.low if row.op in (">=", ">") else row.high


def _crosscheck_table(checks: Iterable[CrossCheck]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold", title_justify="left")
    table.title = "\nmeasured drift beside its certified bound"
    for name, justify in (
        ("block", "left"),
        ("requests", "right"),
        ("measured", "right"),
        ("certified", "right"),
        ("smallest ratio", "right"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for check in checks:
        cells = (
            check.block,
            str(check.requests),
            quantity(check.measured, "1"),
            quantity(check.certified, "1"),
            _UNREACHED if check.tightness is None else f"{check.tightness:.3g}",
        )
        table.add_row(*map(Text, cells))
    return table


def _slice_table(slices: Iterable[SliceSummary], unit: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold", title_justify="left")
    table.title = f"\ndrift by slice (each {unit} by its worst token; mean over tokens)"
    table.add_column("slice")
    table.add_column("metric")
    for name in ("mean", "p50", "p95", "p99", "worst"):
        table.add_column(name, justify="right")
    for row in slices:
        label = f"{row.slice} ({row.requests})"
        for metric, values in row.statistics.items():
            cells = [quantity(values.get(n), "1") for n in ("mean", "p50", "p95", "p99", "worst")]
            table.add_row(*map(Text, (label, metric, *cells)))
            label = ""
    return table


# --- text ----------------------------------------------------------------------------------------


def _reasons(clauses: Iterable[ClauseResult]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for row in clauses:
        name = f"{row.clause} on {row.slice}"
        why = reason(row.verdict)
        if isinstance(row.verdict, Violated):
            why = _counterexample(row.verdict)
        elif why is None and row.shown is not None:
            why = row.shown.text
        if why:
            style = SHOWN[verdict_name(row.verdict)][1]
            lines.append(Text.assemble("  ", (name, style), f": {why}"))
    return lines


def _counterexample(verdict: Violated) -> str:
    example = verdict.counterexample
    if "request" in example:
        token = f", token {example['token']}" if "token" in example else ""
        return f"worst at {example['request']}{token}: {example['worst']:.4g}"
    if example.get("records"):
        return "without the fields: " + ", ".join(example["records"])
    return ""


def _sampling(found: Statistics) -> str:
    """Return how sampled results were decided, in words."""
    sure = f"{100 * (1 - found.error):g} %"
    match found.looks:
        case None:
            looks = "over any number of looks"
        case 1:
            looks = "at one look"
        case count:
            looks = f"over {count} looks together"
    shared = ""
    if found.sampled > 1:
        level = f"{100 * (1 - found.violation_error):.4g} %"
        shared = f"; violations at {level}, shared among {found.sampled} results (Holm)"
    return f"samples: each pass at {sure} {looks}{shared}"


def _remarks(report: Report) -> Iterator[RenderableType]:
    if report.statistics.sampled:
        yield Text(_sampling(report.statistics), style="dim")
    failed = [p for p in report.prechecks if p.outcome == "failed"]
    passed = [p.name for p in report.prechecks if p.outcome == "passed"]
    for check in failed:
        yield Text.assemble(("precheck ", "yellow"), f"{check.name} failed: {check.detail}")
    if passed:
        yield Text(f"prechecks passed: {', '.join(passed)}", style="dim")
    for item in report.implied:
        yield Text(f"{item.clause} on {item.slice} follows once {item.by} is proved")
        for step in item.chain:
            yield Text(f"  {step}", style="dim")
    for clause, why in report.deferred.items():
        yield Text(f"not decided here: {clause}: {why}", style="dim")
    for warned in report.warnings:
        where = f"{warned.clause} on {warned.slice}"
        yield Text.assemble((f"note[{warned.code}] ", "yellow"), f"{where}: {warned.message}")
    for note in report.notes:
        yield Text(f"note: {note}", style="dim")


def _conclusion(report: Report) -> Text:
    word, style = SHOWN[report.verdict]
    deviation = report.health.deviation
    shown = f"{deviation:.3g}" if math.isfinite(deviation) else "unbounded"
    return Text.assemble(
        (word, style),
        f"  health {report.health.score:.3f} (deviation {shown})  action ",
        (report.action, "bold"),
        f"\n{report.not_decided}" if report.not_decided else "",
    )


def beside_parts(report: Report) -> Iterator[RenderableType]:
    """Yield the table and, once each, why numbers in it are missing; nothing where none is."""
    rows = [row for row in report.clauses if row.beside is not None and row.beside.measured]
    if not rows:
        return
    reasons: dict[str, int] = {}
    yield _table(rows, reasons, report.unit)
    numerics: Any = report.bounding.get("numerics")
    if numerics and any(row.beside and row.beside.certified for row in rows):
        yield Text(
            f" certified: for kernels that compute as claimed, {numerics['train']} and "
            f"{numerics['infer']}",
            style="dim",
        )
    domains = domains_in_words(report.bounding)
    if domains:
        yield Text(f" requests with a bound of the whole model: {domains}", style="dim")
    for why, number in reasons.items():
        yield Text(f" [{number}] {why}", style="dim")


def _table(rows: Iterable[ClauseResult], reasons: dict[str, int], unit: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title_justify="left")
    table.title = f"\nmeasured beside certified ({unit}s by their worst token)"
    table.add_column("clause", no_wrap=True, max_width=16, overflow="ellipsis")
    table.add_column("slice", no_wrap=True, max_width=12, overflow="ellipsis")
    for name in ("p50", "p99", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, widest in (("certified", 9), ("clause asks", 9), ("noise floor", 9)):
        table.add_column(name, justify="right", min_width=widest)
    for row in rows:
        table.add_row(*map(Text, _cells(row, reasons)))
    return table


def _cells(row: ClauseResult, reasons: dict[str, int]) -> list[str]:
    assert row.beside is not None
    assert row.beside.measured is not None
    measured, certified, floor = row.beside.measured, row.beside.certified, row.beside.noise_floor
    unit = scale(row.unit, row.threshold)
    spread = (measured.p50, measured.p99, measured.worst)
    shown = [told(value, row.threshold, unit) for value in spread]
    bound = UNREACHED
    if certified is not None:
        bound = told(certified.value, row.threshold, unit)
        if certified.value is None:
            known = "no bound"
            if certified.partial is not None:
                part = f"{certified.requests}/{certified.of}"
                known = f"{quantity(certified.partial, unit)} on {part}"
            bound = known + _mark(certified.reason, reasons)
    noise = UNREACHED
    if floor is not None:
        noise = told(floor.value, row.threshold, unit) + _mark(floor.reason, reasons)
        noise += " !" if floor.above else ""
    limit = f"{row.op} {stated(row.threshold, row.unit)}"
    return [row.clause, row.slice, *shown, bound, limit, noise]


def _mark(why: str | None, reasons: dict[str, int]) -> str:
    if why is None:
        return ""
    return f" [{reasons.setdefault(why, len(reasons) + 1)}]"
