"""The document of `kcdsl aggregate` for people: the clauses, then each metric on each slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kcdsl.verdict.console import print_on
from kcdsl.verdict.names import SHOWN
from kcdsl.verdict.quantities import UNREACHED as _UNREACHED
from kcdsl.verdict.quantities import scale, told
from kcdsl.verdict.report import not_decided


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
