"""The document of `kcdsl experiment` for people: one table, then what did not run and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 100
NARROW = "*"
SIGNS = {"held": "✓", "violated": "✗", "inconclusive": "?", "invalid_evidence": "!"}
_STYLES = {
    "held": "green",
    "violated": "bold red",
    "inconclusive": "yellow",
    "invalid_evidence": "magenta",
}


def print_experiment(document: Mapping[str, Any], stream: TextIO) -> None:
    """Print the document; colours only where the stream is a terminal."""
    console = Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
    console.print(_render(document))


def _render(document: Mapping[str, Any]) -> RenderableType:
    contract = document["manifest"]["contract"]
    head = Text(f"{contract['name']} {contract['version']}", style="bold")
    head.append(f"  {contract['digest'][:19]}  {document['experiment']}", style="dim")
    ran = [cell for cell in document["cells"] if cell["status"] == "ran"]
    columns = tuple(
        dict.fromkeys((row["clause"], row["slice"]) for cell in ran for row in cell["rows"])
    )
    parts: list[RenderableType] = [head, _table(ran, columns)]
    if any(row["narrow"] for cell in ran for row in cell["rows"]):
        parts.append(Text(f"{NARROW} few units, or close to the threshold: the document has which"))
    parts += [Text(line) for line in not_run(document["cells"])]
    parts += [
        Text(f"{name} is not in the table: {reason}")
        for name, reason in document.get("deferred", {}).items()
    ]
    return Group(*parts)


def name_of(cell: Mapping[str, Any]) -> str:
    """Return how a cell is called."""
    if "name" in cell:
        return str(cell["name"])
    return f"{cell['device']} {cell['length']} tokens x{cell['batch']} /{cell['concurrency']}"


def not_run(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield, for each reason, the cells that did not run for it."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell["status"] != "ran":
            reasons.setdefault(cell["reason"], []).append(name_of(cell))
    for reason, names in reasons.items():
        shown = ", ".join(names) if len(names) <= 4 else f"{len(names)} cells, {names[0]} first"
        yield f"not run: {shown}: {reason}"


def _table(cells: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    table.add_column("variant" if cells and "name" in cells[0] else "cell", overflow="fold")
    for clause, slice_ in columns:
        table.add_column(f"{clause}\n{slice_}", justify="right", overflow="fold")
    for cell in cells:
        found = {(row["clause"], row["slice"]): row for row in cell["rows"]}
        table.add_row(name_of(cell), *(_entry(found.get(column)) for column in columns))
    return table


def _entry(row: Mapping[str, Any] | None) -> Text:
    if row is None:
        return Text("–")
    share = "" if row["rate"] is None else f" {rate_text(row['rate'])}"
    star = NARROW if row["narrow"] else ""
    return Text(f"{SIGNS[row['verdict']]}{share}{star}", style=_STYLES[row["verdict"]])


def rate_text(rate: float) -> str:
    """Return a pass rate in percent; never 100 % unless all passed, nor 0 % unless none did."""
    if rate in (0.0, 1.0):
        return f"{100 * rate:.0f}%"
    return f"{min(99.9, max(0.1, 100 * rate)):.1f}%"
