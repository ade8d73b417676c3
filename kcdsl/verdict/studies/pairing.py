"""Two evaluations of one contract on the same requests: the document of `kcdsl compare`.

Plain frozen data, JSON with the schema "kcdsl.compare/1" (`compare.schema.json`) and nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kcdsl.verdict.records import Record

COMPARE_SCHEMA = "kcdsl.compare/1"
Change = Literal["regressed", "improved", "unchanged", "undecided", "not_compared"]


@dataclass(frozen=True, slots=True)
class PairedRow(Record):
    """One obligation in both runs, unit by unit.

    `incumbent` and `candidate` are the values of the clause, in base units of `unit`, with their
    verdicts. Of a statement about units, `worse` of `n` units kept the threshold in the incumbent's
    run alone and `better` in the candidate's alone; `delta` is the difference of the shares that
    keep it. Of a mean it is the difference of the means. `low` and `high` are its limits at 95 %.
    `error` is the chance of a change as harmful, or as useful, if there were none.
    """

    obligation: str
    clause: str
    slice: str
    requirement: str
    level: str
    change: Change
    unit: str
    counted: str
    verdicts: tuple[str, str]
    incumbent: float | None = None
    candidate: float | None = None
    n: int = 0
    worse: int | None = None
    better: int | None = None
    delta: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunComparison(Record):
    """All obligations of the candidate's contract, and what else differs between the runs."""

    contract: Mapping[str, str]
    """That of the candidate: name, version, digest."""
    changed: tuple[str, ...]
    """What differs: contract, checkpoint, fields of the kernels, versions of libraries."""
    error: float
    """The chance of calling any row regressed, or any improved, where none is."""
    rows: tuple[PairedRow, ...]

    @property
    def regressed(self) -> tuple[PairedRow, ...]:
        """Return what became worse, the most severe level first."""
        found = [row for row in self.rows if row.change == "regressed"]
        return tuple(sorted(found, key=lambda row: row.level, reverse=True))

    def to_json(self) -> dict[str, Any]:
        """Return the document "kcdsl.compare/1"."""
        return {"schema": COMPARE_SCHEMA, **Record.to_json(self)}
