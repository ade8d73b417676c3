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
    """The data of an earlier evaluation for a row.

    `n` units of which `k` were beyond (None for a mean), the mean `value`; `needed` is the number
    of units that would show the clause with the power of the plan, if further units are like those
    of the prior trace. `threshold` is the tightest threshold that the prior trace shows.
    """

    n: int
    k: int | None = None
    value: float | None = None
    needed: int | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class PlanRow(Record):
    """One part of a clause on one slice.

    `allowed` is the share of units that may be beyond the threshold, None for a statement that is
    not about units. `have` is the number of units in the data of the slice, None where unknown.
    Units needed: `without_any` if none is beyond, `at_half` if half the allowed share is beyond,
    `with_power` to show the clause with the power of the plan if the true rate is half the allowed
    one. Of the `have` units, `may_exceed` may be beyond; `shows` is the upper limit of the rate if
    none is.
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

    def to_json(self) -> dict[str, Any]:
        """Return plain data; the allowed share as a text `p/q`."""
        allowed = None if self.allowed is None else str(self.allowed)
        return Record.to_json(self) | {"allowed": allowed}


@dataclass(frozen=True, slots=True)
class Plan(DocumentRecord):
    """The rows of a contract, the confidence over all `looks` (None: any number of them), and the
    power."""

    schema: ClassVar[str] = "kcdsl.plan/3"

    contract: Mapping[str, str]
    confidence: float
    looks: int | None
    power: float
    rows: tuple[PlanRow, ...]
    elsewhere: Mapping[str, str]
    """Clauses that measurement does not decide, each with the reason."""
