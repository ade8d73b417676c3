"""The report as tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kcdsl.ir.tables import is_bucket
from kcdsl.verdict.messages import (
    context_rows,
    limit_of,
    looks_in_words,
    where,
    without_implied_unit,
)
from kcdsl.verdict.model import SHOWN
from kcdsl.verdict.quantities import quantity, stated
from kcdsl.verdict.report import Report, not_decided
from kcdsl.verdict.result import TRACE_RECORDS, domains_in_words
from kcdsl.verdict.text.console import (
    folded,
    heading,
    print_on,
    short,
    table,
)

Document = Mapping[str, Any]
_STATISTICS = ("mean", "p50", "p95", "p99", "worst")


def print_report(report: Report, stream: TextIO) -> None:
    """Print the report; colours only where the stream is a terminal."""
    print_on(stream, render(report.to_json()))


def render(report: Document) -> RenderableType:
    """Return a report document as a rich renderable."""
    parts = [_heading(report), clause_table(report["clauses"]), *reasons(report["clauses"])]
    parts += context_parts(report)
    if report["crosschecks"]:
        parts.append(_crosscheck_table(report["crosschecks"]))
    if any(row["statistics"] for row in report["slices"]):
        parts.append(_slice_table(report["slices"], report["environment"].get("unit", "request")))
    return Group(*parts, *_remarks(report), conclusion(report))


def _heading(report: Document) -> Text:
    train, infer = (_kernel(report["kernels"][side]) for side in ("train", "infer"))
    device = report["environment"].get("device", "")
    return heading(report["contract"]).append(f"\ntrain {train} | infer {infer} | {device}")


def _kernel(kernel: Document) -> str:
    numerics = kernel.get("fingerprint", {}).get("numerics") or {}
    compute, weights = numerics.get("compute"), numerics.get("weights", {}).get("format")
    words = [kernel.get("run", ""), compute]
    words.append(None if weights in (None, compute) else f"weights {weights}")
    return " ".join(str(word) for word in words if word is not None)


# --- tables --------------------------------------------------------------------------------------


def clause_table(clauses: Sequence[Document]) -> Table:
    """Return the table of results: value, limit, evidence and verdict of each clause."""
    bucketed = any(is_bucket(row["slice"]) for row in clauses)
    columns = [
        short("clause", 16),
        folded("slice", 22) if bucketed else short("slice", 9),
        folded("requirement", 32),
        ">value",
        ">limit",
        Column("evidence", no_wrap=True),
        Column("verdict", no_wrap=True),
    ]
    return table(
        columns,
        (
            (
                f"{row['clause']} {row['level']}",
                row["slice"],
                _requirement(row) + (" (held out)" if row["holdout"] else ""),
                without_implied_unit(row["value"], row),
                without_implied_unit(limit_of(row), row),
                f"{row['evidence']} {_beyond(row)}",
                Text(*SHOWN[row["verdict"]]),
            )
            for row in clauses
        ),
    )


def _requirement(row: Document) -> str:
    """Return the requirement of a clause in readable units."""
    if row["threshold"] is None or row["counted"] == TRACE_RECORDS:
        return str(row["requirement"])
    budget = "" if row["budget"] is None else f", up to {row['budget']}"
    return f"{row['metric']} {row['op']} {stated(row['threshold'], row['unit'])}{budget}"


def _beyond(row: Document) -> str:
    """Return the number of units beyond the threshold as k/n; only n where k is not counted."""
    counted = row["exceedance"]
    return str(row["n"]) if counted is None else f"{counted['k']}/{counted['n']}"


def _crosscheck_table(checks: Sequence[Document]) -> Table:
    return table(
        ("block", ">requests", ">measured", ">certified", ">smallest ratio"),
        (
            (
                check["block"],
                str(check["requests"]),
                *(quantity(check[name], "1") for name in ("measured", "certified", "tightness")),
            )
            for check in checks
        ),
        "\nmeasured drift beside its certified bound",
        padding=(0, 1),
    )


def _slice_table(slices: Sequence[Document], unit: str) -> Table:
    return table(
        ("slice", "metric", *(f">{name}" for name in _STATISTICS)),
        (
            (
                "" if number else f"{row['slice']} ({row['requests']})",
                metric,
                *(quantity(values.get(name), "1") for name in _STATISTICS),
            )
            for row in slices
            for number, (metric, values) in enumerate(row["statistics"].items())
        ),
        f"\ndrift by slice (each {unit} by its worst token; mean over tokens)",
        padding=(0, 1),
    )


def context_parts(report: Document) -> Iterator[RenderableType]:
    """Yield the table and the reasons of missing numbers, each once; nothing without rows."""
    rows, whys = context_rows(report["clauses"], without_implied_unit)
    if not rows:
        return
    unit = report["environment"].get("unit", "request")
    numbers = (Column(name, justify="right", min_width=9) for name in ("certified", "clause asks"))
    columns = (short("clause", 16), short("slice", 12), ">p50", ">p99", ">worst", *numbers)
    yield table(
        (*columns, Column("noise floor", justify="right", min_width=9)),
        (
            (
                *(row[name] for name in ("clause", "slice", "p50", "p99", "worst")),
                (row["partial"] or row["certified"]) + _mark(row["certified_note"]),
                row["threshold"],
                row["floor"] + _mark(row["floor_note"]) + (" !" if row["above"] else ""),
            )
            for row in rows
        ),
        f"\nmeasured beside certified ({unit}s by their worst token)",
    )
    numerics = report["bounding"].get("numerics")
    if numerics and any(
        row["context"] and row["context"]["certified"] for row in report["clauses"]
    ):
        claimed = f"{numerics['train']} and {numerics['infer']}"
        yield Text(f" certified: for kernels that compute as claimed, {claimed}", style="dim")
    if domains := domains_in_words(report["bounding"]):
        yield Text(f" requests with a bound of the whole model: {domains}", style="dim")
    for number, why in enumerate(whys, 1):
        yield Text(f" [{number}] {why}", style="dim")


def _mark(number: int) -> str:
    return f" [{number}]" if number else ""


# --- text ----------------------------------------------------------------------------------------


def reasons(clauses: Sequence[Document]) -> list[RenderableType]:
    """Return why each clause is not simply held, or the conclusion from its sample."""
    lines: list[RenderableType] = []
    for row in clauses:
        why = row["reason"] or (row["shown"] or {}).get("text")
        if row["verdict"] == "violated":
            why = where(row)
        if why:
            name = (f"{row['clause']} on {row['slice']}", SHOWN[row["verdict"]][1])
            lines.append(Text.assemble("  ", name, f": {why}"))
    return lines


def _sampling(found: Document) -> str:
    """Return the error levels of sampled results in words."""
    shared = ""
    if found["sampled"] > 1:
        level = f"{100 * (1 - found['violation_error']):.4g} %"
        shared = f"; violations at {level}, shared among {found['sampled']} results (Holm)"
    sure = f"{100 * (1 - found['error']):g} %"
    return f"samples: each pass at {sure} {looks_in_words(found['looks'])}{shared}"


def _remarks(report: Document) -> Iterator[RenderableType]:
    if report["statistics"]["sampled"]:
        yield Text(_sampling(report["statistics"]), style="dim")
    for check in report["prechecks"]:
        if check["outcome"] == "failed":
            failed = f"{check['name']} failed: {check['detail']}"
            yield Text.assemble(("precheck ", "yellow"), failed)
    if passed := [c["name"] for c in report["prechecks"] if c["outcome"] == "passed"]:
        yield Text(f"prechecks passed: {', '.join(passed)}", style="dim")
    for item in report["implied"]:
        yield Text(f"{item['clause']} on {item['slice']} follows once {item['by']} is proved")
        for step in item["chain"]:
            yield Text(f"  {step}", style="dim")
    for clause, why in report["deferred"].items():
        yield Text(f"not decided here: {clause}: {why}", style="dim")
    for warned in report["warnings"]:
        said = f"{warned['clause']} on {warned['slice']}: {warned['message']}"
        yield Text.assemble((f"note[{warned['code']}] ", "yellow"), said)
    for note in report["notes"]:
        yield Text(f"note: {note}", style="dim")


def conclusion(report: Document) -> Text:
    """Return verdict, health and action, and the open clauses."""
    health, open_clauses = report["health"], not_decided(report["deferred"])
    deviation = "unbounded" if health["deviation"] is None else f"{health['deviation']:.3g}"
    return Text.assemble(
        SHOWN[report["verdict"]],
        f"  health {health['score']:.3f} (deviation {deviation})  action ",
        (report["action"], "bold"),
        f"\n{open_clauses}" if open_clauses else "",
    )
