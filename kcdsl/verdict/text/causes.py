"""The terminal output of `kcdsl why`: causes of a failure of a triple."""

from __future__ import annotations

from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from kcdsl.verdict.model import SHOWN
from kcdsl.verdict.quantities import quantity
from kcdsl.verdict.studies.causes import (
    FOOT,
    STATES,
    TITLES,
    Explanation,
    effect_title,
    history_lines,
)
from kcdsl.verdict.text.comparison import changes_table
from kcdsl.verdict.text.console import heading, print_on, table

_OPEN = ("? not decided", "yellow")


def print_causes(found: Explanation, stream: TextIO) -> None:
    """Print the runs, the clauses, the effect of each change, and the three causes last."""
    parts: list[RenderableType] = [heading(found.contract), *map(Text, history_lines(found)), ""]
    runs = (
        (
            *(run.checkpoint, run.kernels, run.missing or run.file or "evaluated here"),
            Text(*SHOWN.get(run.verdict or "", ("missing", "yellow"))),
        )
        for run in found.runs
    )
    agreed = (
        (
            *(f"{row.clause} {row.level}", row.slice, row.requirement),
            *(
                "–" if value is None else quantity(value, row.unit)
                for value in (row.value, row.certified)
            ),
            Text(*SHOWN.get(row.verdict, _OPEN)),
        )
        for row in found.agreed
    )
    parts += [table(("checkpoint", "kernels", "run", ""), runs), ""]
    parts.append(table(("clause", "slice", "requirement", ">value", ">certified", ""), agreed))
    for effect in found.effects:
        title = Text(effect_title(found, effect.factor, effect.at), "bold")
        parts += ["", title, changes_table(effect.rows)]
    parts.append("")
    for cause in found.causes:
        word, key = STATES[cause.state]
        parts.append(Text.assemble(f"{TITLES[cause.cause]}: ", (word, SHOWN[key][1])))
        parts += [Text(f"  {why}") for why in cause.because]
        parts += [Text(f"  missing: {why}", "dim") for why in cause.missing]
    print_on(stream, *parts, Text(FOOT, "dim"))
