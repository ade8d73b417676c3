"""Aggregates, experiments and plans for people: tables that fit 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kcdsl.verdict.experiment import (
    Column,
    Entry,
    columns,
    entry,
    failed_checks,
    name_of,
    not_run,
    not_shown,
)
from kcdsl.verdict.model import SHOWN
from kcdsl.verdict.plan import Plan, PlanRow
from kcdsl.verdict.quantities import UNREACHED as _UNREACHED
from kcdsl.verdict.quantities import scale, told
from kcdsl.verdict.report import not_decided
from kcdsl.verdict.result import share_above
from kcdsl.verdict.text.console import print_on

# --- aggregates -----------------------------------------------------------------------------------


def print_aggregate(document: Mapping[str, Any], stream: TextIO, *, queries: bool = False) -> None:
    """Print the document; colours only where the stream is a terminal."""
    print_on(stream, _render(document))
    if queries:
        print_on(stream, *(Text(f"\n{query};") for query in document["sql"]), soft_wrap=True)


def _render(document: Mapping[str, Any]) -> RenderableType:
    tables, contract = document["tables"], document["contract"]
    parts: list[RenderableType] = []
    if contract is not None:
        name = Text(f"{contract['name']} {contract['version']}", style="bold")
        parts.append(name.append(f"  {contract['digest'][:19]}", style="dim"))
    files, left = len(tables["files"]), tables["left_out"]
    head = f"{_many('row', tables['rows'])} in {_many('file', files)}, "
    head += _many("slice", len(document["slices"]))
    parts.append(Text(head + (f"; {_many('row', left)} in none of them" if left else "")))
    if contract is not None:
        parts += [_clauses(document["clauses"]), *_reasons(document)]
    parts += [_by_tokens(document["slices"]), _by_requests(document["slices"])]
    if contract is not None:
        word, style = SHOWN[document["verdict"]]
        health = document["health"]["score"]
        parts.append(
            Text("\n")
            .append(word, style=style)
            .append(f"  health {health:.3f}  action {document['action']}")
        )
        if open_clauses := not_decided(document["deferred"]):
            parts.append(Text(open_clauses))
    return Group(*parts)


def _clauses(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("", ("clause", "slice", "requirement"), ("value", "limit", "evidence"))
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        word, style = SHOWN[row["verdict"]]
        worse = row["low"] if row["op"] in (">=", ">") else row["high"]
        unit = scale(row["unit"], row["threshold"])
        beyond = row["exceedance"]
        counted = str(row["n"]) if beyond is None else f"{beyond['k']}/{beyond['n']}"
        cells = (
            f"{row['clause']} {row['level']}",
            row["slice"],
            row["requirement"],
            told(row["value"], row["threshold"], unit),
            told(worse, row["threshold"], unit),
            f"{row['evidence']} {counted}",
        )
        table.add_row(*map(Text, cells), Text(word, style=style))
    return table


def _reasons(document: Mapping[str, Any]) -> list[Text]:
    lines = [
        Text(f"  {row['clause']} on {row['slice']}: {row['reason']}")
        for row in document["clauses"]
        if row["reason"]
    ]
    lines += [
        Text(f"  {name} is not decided: {reason}") for name, reason in document["deferred"].items()
    ]
    return lines


def _by_tokens(slices: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "\ntokens",
        ("slice", "metric"),
        ("rows", "no value", "NaN, ∞", "mean", *_names(slices, "tokens"), "largest", "beyond"),
    )
    for row, metric in _metrics(slices):
        found = metric["tokens"]
        cells = (
            row["slice"],
            metric["metric"],
            f"{row['rows']:,}",
            f"{found['missing']:,}",
            f"{found['nan'] + found['infinite']:,}",
            _number(found["mean"]),
            *(_number(x) for x in found["percentiles"].values()),
            _number(found["most"]),
            _beyond(found["beyond"]),
        )
        table.add_row(*map(Text, cells))
    return table


def _by_requests(slices: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "\nrequests, each by its worst token",
        ("slice", "metric"),
        ("requests", *_names(slices, "requests"), "beyond"),
    )
    for row, metric in _metrics(slices):
        found = metric["requests"]
        if found is None:
            cells = [_UNREACHED] * (len(_names(slices, "requests")) + 1)
        else:
            cells = [_number(x) for x in found["percentiles"].values()]
            cells.append(_beyond(found["beyond"]))
        cells = [row["slice"], metric["metric"], f"{row['requests']:,}", *cells]
        table.add_row(*map(Text, cells))
    return table


def _metrics(
    slices: Sequence[Mapping[str, Any]],
) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((row, metric) for row in slices for metric in row["metrics"])


def _names(slices: Sequence[Mapping[str, Any]], side: str) -> list[str]:
    for _, metric in _metrics(slices):
        if metric[side] is not None:
            return list(metric[side]["percentiles"])
    return []


def _beyond(rows: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(f"{row['k']:,} not {row['op']} {row['limit']:g}" for row in rows)


def _number(value: float | None) -> str:
    return _UNREACHED if value is None else f"{value:.4g}"


def _many(word: str, count: int) -> str:
    return f"{count:,} {word if count == 1 else f'{word}s'}"


def _table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        header_style="bold",
        title=title or None,
        title_justify="left",
    )
    for name in left:
        table.add_column(name, overflow="fold", max_width=32)
    for name in right:
        table.add_column(name, justify="right", overflow="fold", no_wrap=name == "beyond")
    return table


# --- experiments ----------------------------------------------------------------------------------


NARROW = "*"


def print_experiment(document: Mapping[str, Any], stream: TextIO) -> None:
    """Print the document; colours only where the stream is a terminal."""
    print_on(stream, _experiment_parts(document))


def _experiment_parts(document: Mapping[str, Any]) -> RenderableType:
    contract = document["manifest"]["contract"]
    head = Text(f"{contract['name']} {contract['version']}", style="bold")
    head.append(f"  {contract['digest'][:19]}  {document['experiment']}", style="dim")
    ran = [cell for cell in document["cells"] if cell["status"] == "ran"]
    parts: list[RenderableType] = [head, _experiment_table(ran, columns(document))]
    if any(row["narrow"] for cell in ran for row in cell["rows"]):
        parts.append(Text(f"{NARROW} few units, or close to the threshold: the document has which"))
    cells = document["cells"]
    parts += [Text(line) for line in (*failed_checks(cells), *not_run(cells), *not_shown(document))]
    return Group(*parts)


def _experiment_table(cells: Sequence[Mapping[str, Any]], shown: Sequence[Column]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    table.add_column("variant" if cells and "name" in cells[0] else "cell", overflow="fold")
    for clause, slice_ in shown:
        table.add_column(Text(f"{clause}\n{slice_}"), justify="right", overflow="fold")
    for cell in cells:
        found = (_shown(entry(cell, column)) for column in shown)
        table.add_row(Text(name_of(cell)), *found)
    return table


def _shown(found: Entry | None) -> Text:
    if found is None:
        return Text("–")
    star = NARROW if found.narrow else ""
    return Text(f"{found.words}{star}", style=SHOWN[found.verdict][1])


# --- plans ----------------------------------------------------------------------------------------


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
    parts: list[RenderableType] = [_heading(plan), _plan_table(plan), _legend(plan)]
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


def _plan_table(plan: Plan) -> Table:
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
            _figure(found.value),
            _count(found.needed),
            _figure(found.threshold),
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


def _figure(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"
