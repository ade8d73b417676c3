"""The terminal output of `kcdsl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from kcdsl.verdict.quantities import quantity
from kcdsl.verdict.studies.comparison import (
    MeasureDelta,
    PairedRow,
    RunComparison,
    band_text,
    baseline_lines,
    number_text,
    worse_text,
)
from kcdsl.verdict.text.console import folded, heading, print_on, short, table

_CHANGES = {
    "regressed": ("✗ worse", "red"),
    "improved": ("✓ better", "green"),
    "unchanged": ("= same", "dim"),
    "undecided": ("? not shown", "yellow"),
    "within_noise": ("≈ noise", "cyan"),
    "not_compared": ("– not compared", "magenta"),
}
_MOST_DIFFERENCES = 12


def print_comparison(found: RunComparison, stream: TextIO) -> None:
    """Print the comparison; colours only where the stream is a terminal."""
    parts: list[RenderableType] = [heading(found.contract), changes_table(found.rows)]
    parts += [
        Text(f"not compared: {row.clause} {row.slice}: {row.reason}", style="dim")
        for row in found.rows
        if row.change == "not_compared"
    ]
    parts += [Text(f"differs: {name}") for name in found.changed[:_MOST_DIFFERENCES]]
    if len(found.changed) > _MOST_DIFFERENCES:
        parts.append(Text(f"and {len(found.changed) - _MOST_DIFFERENCES} more, in --format json"))
    if found.measures:
        parts += ["", _measures_table(found.measures)]
    parts += [Text(line) for line in baseline_lines(found)]
    parts += [
        Text(f"worse: {words}", style="bold red") for words in map(worse_text, found.regressed)
    ]
    parts += [Text(f"beyond its band: {band_text(row)}", "bold red") for row in found.beyond]
    if found.verdict != "violated":
        parts.append(Text("nothing was shown to be worse", style="bold"))
    print_on(stream, *parts)


def _measures_table(measures: Sequence[MeasureDelta]) -> Table:
    columns = ("", "metric", "slice", ">incumbent", ">candidate", ">difference", ">95 % limits")
    rows = (
        (
            *(row.kind, row.metric, row.slice),
            *(quantity(value, row.unit) for value in (row.incumbent, row.candidate, row.delta)),
            f"{quantity(row.low, row.unit)} … {quantity(row.high, row.unit)}",
        )
        for row in measures
    )
    return table(columns, rows)


def changes_table(rows: Sequence[PairedRow]) -> Table:
    """Return the table of a paired comparison, by obligation."""
    return table(
        (
            *(short("clause", 15), folded("slice", 12), ">incumbent", ">candidate", ">units"),
            *(">worse", ">better", ">difference", ">95 % limits", Column("", no_wrap=True)),
        ),
        (
            (
                *(row.clause, row.slice, number_text(row.incumbent), number_text(row.candidate)),
                *(str(row.n or "–"), *_counts(row), number_text(row.delta)),
                "–" if row.low is None else f"{number_text(row.low)} … {number_text(row.high)}",
                Text(*_CHANGES[row.change]),
            )
            for row in rows
        ),
    )


def _counts(row: PairedRow) -> tuple[str, str]:
    return ("–", "–") if row.worse is None else (str(row.worse), str(row.better))
