"""The plan for people: one table that fits 100 columns, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kcdsl.verdict.console import print_on
from kcdsl.verdict.plan import Plan, PlanRow
from kcdsl.verdict.result import share_above

_NONE = "–"
_STATES = {
    "enough": ("✓ enough", "green"),
    "too_few": ("✗ too few", "yellow"),
    "unknown": ("? open", "yellow"),
    "never": ("✗ never", "magenta"),
    "census": ("✓ census", "green"),
}
"""Word with symbol, and colour, of each state: readable without colours too."""


def print_plan(plan: Plan, stream: TextIO) -> None:
    """Print the plan; colours only where the stream is a terminal."""
    print_on(stream, render(plan))


def render(plan: Plan) -> RenderableType:
    """Return the plan as something that rich prints."""
    parts: list[RenderableType] = [_heading(plan), _table(plan), _legend(plan)]
    if any(row.pilot is not None for row in plan.rows):
        parts.append(_pilots(plan.rows, plan.power))
    parts += _notes(plan.rows)
    parts += [Text(f"not measured: {c}: {why}", style="dim") for c, why in plan.elsewhere.items()]
    parts.append(_conclusion(plan.rows))
    return Group(*parts)


def _heading(plan: Plan) -> Text:
    text = Text()
    text.append(f"{plan.contract['name']} {plan.contract['version']}", style="bold")
    text.append(f"  {plan.contract['digest'][:19]}\n", style="dim")
    sure = f"{100 * plan.confidence:g} %"
    match plan.looks:
        case 1:
            text.append(f"{sure} for each clause, one look")
        case None:
            text.append(f"{sure} for each clause over any number of looks")
        case looks:
            text.append(f"{sure} for each clause over {looks} looks together")
    return text


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    table.add_column("clause", no_wrap=True, max_width=15, overflow="ellipsis")
    table.add_column("slice", max_width=12, overflow="fold")
    table.add_column("requirement", max_width=24, overflow="fold")
    for name in ("have", "none", "half", f"{100 * plan.power:.4g} %", "shows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in plan.rows:
        word, style = _STATES[row.state]
        shows = _NONE if row.shows is None else f"< {share_above(row.shows)}"
        counts = (row.have, row.without_any, row.at_half, row.with_power)
        cells = (row.clause, row.slice, row.requirement, *map(_count, counts), shows)
        table.add_row(*map(Text, cells), Text(word, style=style))
    return table


def _legend(plan: Plan) -> Text:
    return Text(
        "units needed with none beyond, with half of what is allowed beyond, and to be shown "
        f"{100 * plan.power:.4g} % of the\ntime at half the allowed rate; shows: the rate that the "
        "units there are exclude if none is beyond",
        style="dim",
    )


def _pilots(rows: Iterable[PlanRow], power: float) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title_justify="left")
    table.title = "\nas in the pilot"
    for name in ("clause", "slice"):
        table.add_column(name, overflow="fold")
    for name in ("beyond", "mean", f"needed, {100 * power:.4g} %", "threshold shown"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.pilot is None:
            continue
        found = row.pilot
        cells = (
            row.clause,
            row.slice,
            f"{_NONE if found.k is None else found.k} of {found.n}",
            _number(found.value),
            _count(found.needed),
            _number(found.threshold),
        )
        table.add_row(*map(Text, cells))
    return table


def _notes(rows: Iterable[PlanRow]) -> Iterator[Text]:
    """Yield each remark once, with the rows it is about."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in _remarks(row):
            names = about.setdefault(note, [])
            if (name := f"{row.clause} on {row.slice}") not in names:
                names.append(name)
    for note, names in about.items():
        yield Text.assemble("  ", (", ".join(names), "bold"), f": {note}")


def _remarks(row: PlanRow) -> Iterator[str]:
    if row.state == "enough" and row.may_exceed is not None:
        yield f"held if at most {row.may_exceed} of {row.have} {row.unit} are beyond"
    if row.state == "too_few" and row.have is not None:
        if row.allowed is not None and row.without_any is not None:
            more = row.without_any - row.have
            yield f"{more} more {row.unit}, none of them beyond, would show it"
        elif row.pilot is not None and (row.pilot.needed or 0) > row.have:
            more = (row.pilot.needed or 0) - row.have
            yield f"about {more} more {row.unit}, like those of the pilot, would show it"
    if row.note and row.state != "census":
        yield row.note


def _conclusion(rows: tuple[PlanRow, ...]) -> Text:
    able = sum(row.state in ("enough", "census") for row in rows)
    style = "green" if able == len(rows) else "yellow"
    return Text.assemble((f"{able} of {len(rows)} rows", style), " can be shown with what there is")


def _count(value: int | None) -> str:
    return _NONE if value is None else str(value)


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"
