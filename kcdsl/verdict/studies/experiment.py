"""Results of an experiment for a clause on a slice in one cell, and missing results.

A conjunction has a row for each of its parts. A cell shows the deciding one: the row with the worst
verdict, and among these the one with the fewest units that pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kcdsl.verdict.model import SIGNS, WORST_FIRST
from kcdsl.verdict.quantities import rate_text

Column = tuple[str, str]
"""A clause and a slice."""


@dataclass(frozen=True, slots=True)
class ExperimentEntry:
    """The rows of one clause on one slice in a cell that ran, the deciding one first."""

    rows: tuple[Mapping[str, Any], ...]

    @property
    def row(self) -> Mapping[str, Any]:
        """Return the row that decides."""
        return self.rows[0]

    @property
    def verdict(self) -> str:
        """Return the worst verdict."""
        return str(self.row["verdict"])

    @property
    def narrow(self) -> tuple[str, ...]:
        """Return the reasons why any part is narrow."""
        return tuple(dict.fromkeys(why for row in self.rows for why in row["narrow"]))

    @property
    def words(self) -> str:
        """Return sign and pass rate: ✓ 100%."""
        rate = self.row["rate"]
        return SIGNS[self.verdict] + ("" if rate is None else f" {rate_text(rate)}")


def columns(document: Mapping[str, Any]) -> tuple[Column, ...]:
    """Return every clause and slice with a row in any cell, in the order of the contract."""
    return tuple(
        dict.fromkeys(
            (row["clause"], row["slice"])
            for cell in document["cells"]
            if cell["status"] == "ran"
            for row in cell["rows"]
        )
    )


def entry(cell: Mapping[str, Any] | None, column: Column) -> ExperimentEntry | None:
    """Return the entry of a cell; None where it did not run or has no such row."""
    if cell is None or cell["status"] != "ran":
        return None
    own = [row for row in cell["rows"] if (row["clause"], row["slice"]) == column]
    return ExperimentEntry(tuple(sorted(own, key=_severity_key))) if own else None


def _severity_key(row: Mapping[str, Any]) -> tuple[int, float]:
    return WORST_FIRST.index(row["verdict"]), 1.0 if row["rate"] is None else float(row["rate"])


def name_of(cell: Mapping[str, Any]) -> str:
    """Return the name of a cell."""
    if "name" in cell:
        return str(cell["name"])
    return f"{cell['device']} {cell['length']} tokens x{cell['batch']} /{cell['concurrency']}"


def not_run(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each reason for not running, with its cells."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell["status"] != "ran":
            reasons.setdefault(str(cell["reason"]), []).append(name_of(cell))
    for reason, names in reasons.items():
        yield f"not run: {_several(names)}: {reason}"


def not_shown(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the clauses that some or all cells do not decide, each with the reason."""
    for name, reason in document.get("deferred", {}).items():
        yield f"{name} is not shown: {reason}"
    ran = [cell for cell in document["cells"] if cell["status"] == "ran"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in ran:
        for name, reason in cell.get("deferred", {}).items():
            reasons.setdefault((name, reason), []).append(name_of(cell))
    for (name, reason), cells in reasons.items():
        where = "" if len(cells) == len(ran) else f" of {_several(cells)}"
        yield f"{name}{where} is not shown: {reason}"


def failed_checks(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each failed precondition, with its cells."""
    failed: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for check in cell.get("failed_checks", ()):
            failed.setdefault((check["name"], check["detail"]), []).append(name_of(cell))
    for (name, detail), cells_of in failed.items():
        yield f"precheck {name} failed: {_several(cells_of)}: {detail}"


def _several(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} cells, {names[0]} first"
