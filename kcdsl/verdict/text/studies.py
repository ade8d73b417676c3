"""Aggregates, experiments and plans as tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kcdsl.verdict.messages import looks_in_words
from kcdsl.verdict.model import SHOWN
from kcdsl.verdict.quantities import UNREACHED
from kcdsl.verdict.result import share_above
from kcdsl.verdict.studies.experiment import (
    ExperimentEntry,
    columns,
    entry,
    failed_checks,
    name_of,
    not_run,
    not_shown,
)
from kcdsl.verdict.studies.plan import Plan, PlanRow
from kcdsl.verdict.text.console import folded, heading, print_on, short, table
from kcdsl.verdict.text.report import clause_table, conclusion, reasons

# --- aggregates -----------------------------------------------------------------------------------


def print_aggregate(document: Mapping[str, Any], stream: TextIO, *, queries: bool = False) -> None:
    """Print the document; colours only where the stream is a terminal."""
    print_on(stream, _aggregate(document))
    if queries:
        print_on(stream, *(Text(f"\n{query};") for query in document["sql"]), soft_wrap=True)


def _aggregate(document: Mapping[str, Any]) -> RenderableType:
    tables, contract, slices = document["tables"], document["contract"], document["slices"]
    files, left = len(tables["files"]), tables["left_out"]
    head = f"{_many('row', tables['rows'])} in {_many('file', files)}, "
    head += _many("slice", len(slices))
    head += f"; {_many('row', left)} in none of them" if left else ""
    counts = (Text(head), _by_tokens(slices), _by_requests(slices))
    if contract is None:
        return Group(*counts)
    deferred = (
        Text(f"  {name} is not decided: {why}") for name, why in document["deferred"].items()
    )
    rows = document["clauses"]
    decided = (clause_table(rows), *reasons(rows), *deferred)
    return Group(heading(contract), counts[0], *decided, *counts[1:], "", conclusion(document))


def _by_tokens(slices: Sequence[Mapping[str, Any]]) -> Table:
    names = _names(slices, "tokens")
    return table(
        (
            *(folded(name, 32) for name in ("slice", "metric")),
            *(">rows", ">no value", ">NaN, ∞", ">mean", *names, ">largest", ">beyond"),
        ),
        (
            (
                row["slice"],
                metric["metric"],
                f"{row['rows']:,}",
                f"{found['missing']:,}",
                f"{found['nan'] + found['infinite']:,}",
                *map(_number, (found["mean"], *found["percentiles"].values(), found["most"])),
                _beyond(found["beyond"]),
            )
            for row, metric in _metrics(slices)
            for found in (metric["tokens"],)
        ),
        "\ntokens",
    )


def _by_requests(slices: Sequence[Mapping[str, Any]]) -> Table:
    names = _names(slices, "requests")
    none: Mapping[str, Any] = {"percentiles": dict.fromkeys(names), "beyond": ()}
    return table(
        (*(folded(name, 32) for name in ("slice", "metric")), ">requests", *names, ">beyond"),
        (
            (
                row["slice"],
                metric["metric"],
                f"{row['requests']:,}",
                *map(_number, found["percentiles"].values()),
                UNREACHED if found is none else _beyond(found["beyond"]),
            )
            for row, metric in _metrics(slices)
            for found in (metric["requests"] or none,)
        ),
        "\nrequests, each by its worst token",
    )


def _metrics(
    slices: Sequence[Mapping[str, Any]],
) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((row, metric) for row in slices for metric in row["metrics"])


def _names(slices: Sequence[Mapping[str, Any]], side: str) -> list[str]:
    for _, metric in _metrics(slices):
        if metric[side] is not None:
            return [f">{name}" for name in metric[side]["percentiles"]]
    return []


def _beyond(rows: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(f"{row['k']:,} not {row['op']} {row['limit']:g}" for row in rows)


def _number(value: float | None) -> str:
    return UNREACHED if value is None else f"{value:.4g}"


def _many(word: str, count: int) -> str:
    return f"{count:,} {word if count == 1 else f'{word}s'}"


# --- experiments ----------------------------------------------------------------------------------


NARROW = "*"


def print_experiment(document: Mapping[str, Any], stream: TextIO) -> None:
    """Print the document; colours only where the stream is a terminal."""
    print_on(stream, _experiment(document))


def _experiment(document: Mapping[str, Any]) -> RenderableType:
    cells, shown = document["cells"], columns(document)
    ran = [cell for cell in cells if cell["status"] == "ran"]
    names = (Column(Text("\n".join(column)), justify="right", overflow="fold") for column in shown)
    first = "variant" if ran and "name" in ran[0] else "cell"
    rows = ((name_of(cell), *(_shown(entry(cell, column)) for column in shown)) for cell in ran)
    head = heading(document["manifest"]["contract"], f"  {document['experiment']}")
    parts: list[RenderableType] = [head, table((first, *names), rows)]
    if any(row["narrow"] for cell in ran for row in cell["rows"]):
        parts.append(Text(f"{NARROW} few units, or close to the threshold: the document has which"))
    lines = (*failed_checks(cells), *not_run(cells), *not_shown(document))
    return Group(*parts, *map(Text, lines))


def _shown(found: ExperimentEntry | None) -> Text:
    if found is None:
        return Text(UNREACHED)
    return Text(found.words + NARROW * bool(found.narrow), style=SHOWN[found.verdict][1])


# --- plans ----------------------------------------------------------------------------------------


_STATES = {
    "enough": ("✓ enough", "green"),
    "too_few": ("✗ too few", "yellow"),
    "unknown": ("? open", "yellow"),
    "never": ("✗ never", "magenta"),
    "census": ("✓ census", "green"),
}
"""Word with symbol, and colour, of each state."""


def print_plan(plan: Plan, stream: TextIO) -> None:
    """Print the plan; colours only where the stream is a terminal."""
    sure = f"\n{100 * plan.confidence:g} % for each clause {looks_in_words(plan.looks)}"
    parts: list[RenderableType] = [
        heading(plan.contract).append(sure),
        _plan_table(plan),
        _legend(plan),
    ]
    if any(row.prior is not None for row in plan.rows):
        parts.append(_priors(plan.rows, f"{100 * plan.power:.4g} %"))
    parts += _notes(plan.rows)
    parts += [Text(f"not measured: {c}: {why}", style="dim") for c, why in plan.elsewhere.items()]
    print_on(stream, *parts, _able(plan.rows))


def _plan_table(plan: Plan) -> Table:
    return table(
        (
            *(short("clause", 15), folded("slice", 12), folded("requirement", 24)),
            *(">units\nhere", ">needed:\n0 beyond", ">needed:\nhalf"),
            *(f">for {100 * plan.power:.4g} %\npower", ">these\nshow"),
            Column("", no_wrap=True),
        ),
        (
            (
                *(row.clause, row.slice, row.requirement),
                *map(_count, (row.have, row.without_any, row.at_half, row.with_power)),
                UNREACHED if row.shows is None else f"< {share_above(row.shows)}",
                Text(*_STATES[row.state]),
            )
            for row in plan.rows
        ),
    )


def _legend(plan: Plan) -> Text:
    return Text(
        "units needed with none beyond, with half of what is allowed beyond, and to be shown "
        f"{100 * plan.power:.4g} % of the\ntime at half the allowed rate; these show: the rate "
        "that the units here exclude if none is beyond",
        style="dim",
    )


def _priors(rows: Iterable[PlanRow], percent: str) -> Table:
    return table(
        (
            "clause",
            "slice",
            ">beyond",
            ">mean",
            f">needed, {percent}",
            ">threshold shown",
        ),
        (
            (
                row.clause,
                row.slice,
                f"{_count(found.k)} of {found.n}",
                _number(found.value),
                _count(found.needed),
                _number(found.threshold),
            )
            for row in rows
            if (found := row.prior) is not None
        ),
        "\nas in the prior trace",
    )


def _notes(rows: Iterable[PlanRow]) -> Iterator[Text]:
    """Yield each remark once, with its rows."""
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
        elif row.prior is not None and (row.prior.needed or 0) > row.have:
            more = (row.prior.needed or 0) - row.have
            yield f"about {more} more {row.unit}, like those of the prior trace, would show it"
    if row.note and row.state != "census":
        yield row.note


def _able(rows: tuple[PlanRow, ...]) -> Text:
    able = sum(row.state in ("enough", "census") for row in rows)
    style = "green" if able == len(rows) else "yellow"
    return Text.assemble((f"{able} of {len(rows)} rows", style), " can be shown with what there is")


def _count(value: int | None) -> str:
    return UNREACHED if value is None else str(value)
