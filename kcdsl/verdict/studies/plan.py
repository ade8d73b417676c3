"""The document of `kcdsl plan`: the number of units that each clause of a contract needs.

Plain frozen data, JSON with the schema "kcdsl.plan/3" (`plan.schema.json`) and nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from kcdsl.verdict.records import DocumentRecord, Record

State = Literal["enough", "too_few", "unknown", "never", "census"]


@dataclass(frozen=True, slots=True)
class PriorSample(Record):
    """What an earlier evaluation says of a row.

    `n` units of which `k` were beyond (None for a mean), the mean `value`; `needed` are the units
    that would show the clause with the power of the plan, if the others are like those of the
    prior report. `threshold` is the tightest one of which that report shows that it is kept.
    """

    n: int
    k: int | None = None
    value: float | None = None
    needed: int | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class PlanRow(Record):
    """One part of a clause on one slice.

    `allowed` is the share of units that may be beyond the threshold, None for a statement about no
    unit. `have` counts the units that the data of the slice gives, None where that is not known.
    Units needed: `without_any` beyond, `at_half` with half the allowed share beyond, `with_power`
    to be shown with the power of the plan while each unit is beyond with half the allowed rate.
    `may_exceed` of those there are may be beyond; `shows` is the rate that those show not to be
    exceeded if none is.
    """

    obligation: str
    """Its identifier: clause, slice and the number of the part."""
    clause: str
    slice: str
    requirement: str
    evidence: str
    state: State
    unit: str
    have: int | None = None
    allowed: Fraction | None = None
    without_any: int | None = None
    at_half: int | None = None
    with_power: int | None = None
    may_exceed: int | None = None
    shows: float | None = None
    note: str = ""
    prior: PriorSample | None = None


@dataclass(frozen=True, slots=True)
class Plan(DocumentRecord):
    """The rows of a contract, and what they rest on: the confidence over all `looks` (None: any
    number of them), and the power."""

    schema: ClassVar[str] = "kcdsl.plan/3"

    contract: Mapping[str, str]
    confidence: float
    looks: int | None
    power: float
    rows: tuple[PlanRow, ...]
    elsewhere: Mapping[str, str]
    """Clauses that measuring does not decide, each with the reason."""

    def to_json(self) -> dict[str, Any]:
        """Return the document "kcdsl.plan/3"; allowed shares as texts `p/q`."""
        found = DocumentRecord.to_json(self)
        for row, own in zip(found["rows"], self.rows, strict=True):
            row["allowed"] = None if own.allowed is None else str(own.allowed)
        return found
