"""The heat map of pass rates: a row for each clause, a column for each slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kcdsl.verdict.model import WORST_FIRST
from kcdsl.verdict.words import VERDICTS, against


@dataclass(frozen=True, slots=True)
class Cell:
    """One clause on one slice: its verdict, the share of units within, and why it is narrow.

    `large` is what is read first: the number of a decided clause, and of any other that it is not
    decided, whatever its numbers are.
    """

    verdict: str
    sign: str
    word: str
    share: str
    value: str
    units: str
    narrow: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Say whether the clause is held or violated."""
        return self.verdict in ("held", "violated")

    @property
    def large(self) -> str:
        """Return what is read first."""
        return self.share or self.value if self.decided else self.word

    @property
    def small(self) -> str:
        """Return the other numbers."""
        shares = (self.share,) if self.share and not self.decided else ()
        value = (self.value,) if self.share or not self.decided else ()
        return " · ".join((*shares, *value, self.units))


@dataclass(frozen=True, slots=True)
class Row:
    """One clause over all slices; a slice on which it was not decided has None."""

    clause: str
    level: str
    requirement: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True)
class Heatmap:
    """All clauses over all slices."""

    slices: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def narrow(self) -> bool:
        """Say whether a cell is narrow."""
        return any(cell is not None and cell.narrow for row in self.rows for cell in row.cells)


def heatmap(clauses: Sequence[Mapping[str, Any]]) -> Heatmap:
    """Return the map; the parts of a conjunction share a cell, which shows the worst of them."""
    slices = tuple(dict.fromkeys(row["slice"] for row in clauses))
    rows: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in clauses:
        rows.setdefault(row["clause"], {}).setdefault(row["slice"], []).append(row)
    made = []
    for name, by_slice in rows.items():
        first = next(iter(by_slice.values()))[0]
        cells = tuple(_cell(by_slice[s]) if s in by_slice else None for s in slices)
        made.append(Row(name, first["level"], _requirement(first), cells))
    return Heatmap(slices, tuple(made))


def _requirement(row: Mapping[str, Any]) -> str:
    budget = f", up to {row['budget']}" if row.get("budget") else ""
    return f"{row['requirement']}{budget}"


def _cell(parts: Sequence[Mapping[str, Any]]) -> Cell:
    row = min(parts, key=lambda part: WORST_FIRST.index(part["verdict"]))
    sign, word = VERDICTS[row["verdict"]]
    counted = row.get("exceedance")
    rate = None if counted is None else 1.0 - counted["rate"]
    beside = row.get("beside") or {}
    return Cell(
        row["verdict"],
        sign,
        word,
        "" if rate is None else _percent(rate),
        against(row["value"], row),
        f"{row['n']} {row['counted']}" if counted is None else f"{counted['n']} {counted['of']}",
        tuple(beside.get("narrow") or ()),
    )


def _percent(rate: float) -> str:
    """Return a share in percent; 100 only where all are within, 0 only where none is."""
    if rate in (0.0, 1.0):
        return f"{100 * rate:.0f} %"
    return f"{min(99.9, max(0.1, 100 * rate)):.1f} %"
