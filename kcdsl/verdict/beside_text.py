"""The table of measured, certified, threshold and noise floor, for people at a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kcdsl.verdict.beside import domains_in_words
from kcdsl.verdict.quantities import UNREACHED, quantity, scale, stated, told
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import ClauseResult


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
    measured, certified, floor = row.beside.measured, row.beside.certified, row.beside.floor
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
