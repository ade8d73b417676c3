"""The document of `kcdsl experiment` for people: one table, then what did not run and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kcdsl.verdict.console import print_on
from kcdsl.verdict.experiment_rows import (
    Column,
    Entry,
    columns,
    entry,
    failed_checks,
    name_of,
    not_run,
    not_shown,
)
from kcdsl.verdict.names import SHOWN

NARROW = "*"


def print_experiment(document: Mapping[str, Any], stream: TextIO) -> None:
    """Print the document; colours only where the stream is a terminal."""
    print_on(stream, _render(document))


def _render(document: Mapping[str, Any]) -> RenderableType:
    contract = document["manifest"]["contract"]
    head = Text(f"{contract['name']} {contract['version']}", style="bold")
    head.append(f"  {contract['digest'][:19]}  {document['experiment']}", style="dim")
    ran = [cell for cell in document["cells"] if cell["status"] == "ran"]
    parts: list[RenderableType] = [head, _table(ran, columns(document))]
    if any(row["narrow"] for cell in ran for row in cell["rows"]):
        parts.append(Text(f"{NARROW} few units, or close to the threshold: the document has which"))
    cells = document["cells"]
    parts += [Text(line) for line in (*failed_checks(cells), *not_run(cells), *not_shown(document))]
    return Group(*parts)


def _table(cells: Sequence[Mapping[str, Any]], shown: Sequence[Column]) -> Table:
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
