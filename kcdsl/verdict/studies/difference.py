"""The differences of two contracts, as `kcdsl diff` states them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from kcdsl.diagnostics.render.terminal import counted, one_line
from kcdsl.verdict.records import DocumentRecord, Record


class Relation(StrEnum):
    """The relation of a new contract or part to the old one."""

    EQUAL = "equal"
    STRICTER = "stricter"
    """The old one accepts everything that the new one accepts; the converse is false or
    undecided."""
    WEAKER = "weaker"
    INCOMPARABLE = "incomparable"
    """Neither accepts everything that the other one does, or they concern different quantities."""
    UNDECIDED = "undecided"
    """The solver could not decide whether the new one is at least as strict."""

    @property
    def is_finding(self) -> bool:
        """Return whether the new one may accept something that the old one refuses."""
        return self in (Relation.WEAKER, Relation.INCOMPARABLE)


def together(relations: Iterable[Relation]) -> Relation:
    """Return the relation of a whole from those of its parts.

    If one part is weaker and another undecided, the whole is incomparable.
    """
    found = {relation for relation in relations if relation is not Relation.EQUAL}
    if not found:
        return Relation.EQUAL
    if len(found) == 1:
        return found.pop()
    return Relation.UNDECIDED if found <= _OPEN else Relation.INCOMPARABLE


_OPEN = {Relation.UNDECIDED, Relation.STRICTER}


def from_implications(new_implies_old: bool | None, old_implies_new: bool | None) -> Relation:
    """Return the relation from the two implications; None is undecided."""
    match new_implies_old, old_implies_new:
        case True, True:
            return Relation.EQUAL
        case True, _:
            return Relation.STRICTER
        case False, True:
            return Relation.WEAKER
        case False, _:
            return Relation.INCOMPARABLE
        case _:
            return Relation.UNDECIDED


class ClauseStatus(StrEnum):
    """The contracts that a clause is in."""

    BOTH = "both"
    ADDED = "added"
    REMOVED = "removed"
    RENAMED = "renamed"


@dataclass(frozen=True, slots=True)
class Change(Record):
    """One difference of two clauses or contracts, in words.

    `relation` is None where only several changes together have one.
    """

    name: str
    old: str
    new: str
    relation: Relation | None


class Extent(StrEnum):
    """The part of a contract that accepts the values of a witness."""

    CONTRACT = "contract"
    """Every clause of the contract."""
    UNIT = "unit"
    """Its clauses about the same unit; the other clauses were not evaluated on these values."""
    CLAUSE = "clause"
    """The clause of the same name; the whole contract refuses them, or that is unknown."""


@dataclass(frozen=True, slots=True)
class WitnessValue(Record):
    """A value of a witness: the quantity, the value with its unit, and the exact fraction."""

    what: str
    value: str
    exact: str


@dataclass(frozen=True, slots=True)
class Witness(Record):
    """Values that the new contract accepts and the old one refuses, or the other way round.

    `of` is the data they are measured on. `lacking` are missing trace fields; `flips` are the
    inputs at which the likeliest tokens change. `clause` refuses the values and `extent` accepts
    them. `unit` is the unit of the values: "slices" as a whole, single "requests" or "windows".
    """

    accepts: str
    refuses: str
    clause: str
    of: str
    values: tuple[WitnessValue, ...] = ()
    lacking: tuple[str, ...] = ()
    flips: tuple[str, ...] = ()
    request: str | None = None
    extent: Extent = Extent.CONTRACT
    unit: str = "slices"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        found = Record.to_json(self)
        del found["unit"]
        return found | {"accepts": self.accepts.lower(), "refuses": self.refuses.lower()}


@dataclass(frozen=True, slots=True)
class ClauseDifference(Record):
    """The difference of one clause.

    `implied_by`: the clauses of the new contract that imply the old clause, consequences included,
    where this clause does not; for an added one, those of the old contract that imply it.
    `because` is the justification.
    """

    id: str
    status: ClauseStatus
    relation: Relation
    old_id: str | None = None
    old: str | None = None
    new: str | None = None
    changes: tuple[Change, ...] = ()
    witness: Witness | None = None
    implied_by: tuple[str, ...] = ()
    because: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContractName(Record):
    """A contract by its name, version and digest (sha256:…)."""

    name: str
    version: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}  {self.digest[:23]}"


@dataclass(frozen=True, slots=True)
class Difference(DocumentRecord):
    """The difference of two contracts: as a whole, per clause, and outside the clauses."""

    schema: ClassVar[str] = "kcdsl.diff/1"

    old: ContractName
    new: ContractName
    relation: Relation
    clauses: tuple[ClauseDifference, ...]
    changes: tuple[Change, ...] = ()


# --- for people -----------------------------------------------------------------------------------


_MEANING = {
    Relation.EQUAL: "both accept the same kernels",
    Relation.STRICTER: "whatever NEW accepts, OLD accepts",
    Relation.WEAKER: "NEW may accept kernels that OLD refuses, or is milder with them",
    Relation.INCOMPARABLE: "NEW is neither as strict as OLD nor weaker throughout",
    Relation.UNDECIDED: "whether NEW is as strict as OLD is open",
}
_UNITS = {"slices": "whole slices", "requests": "single requests", "windows": "single windows"}
_ORDER = (
    Relation.WEAKER,
    Relation.INCOMPARABLE,
    Relation.UNDECIDED,
    Relation.STRICTER,
    Relation.EQUAL,
)


def full(found: Difference) -> str:
    """Return the difference as plain text; equal clauses are only counted."""
    lines = [f"OLD  {found.old}", f"NEW  {found.new}", ""]
    lines.append(f"{found.relation}: {_MEANING[found.relation]}")
    lines.append(_counts(found))
    if found.changes:
        lines += ["", "around the clauses", *change_lines(found.changes)]
    for clause in found.clauses:
        if _is_shown(clause):
            lines += ["", f"{_head(clause)}", *_body(clause)]
    return plain(lines)


def plain(lines: Iterable[str]) -> str:
    """Return lines as text; quoted text has no line breaks or terminal control characters."""
    return "".join(f"{one_line(line)}\n" for line in lines)


def _is_shown(clause: ClauseDifference) -> bool:
    same = clause.relation is Relation.EQUAL and clause.status is ClauseStatus.BOTH
    return not same or bool(clause.changes)


def _counts(found: Difference) -> str:
    counts = Counter(clause.relation for clause in found.clauses)
    parts = [f"{counts[relation]} {relation}" for relation in _ORDER if counts[relation]]
    return f"{counted(len(found.clauses), 'clause')}: {', '.join(parts) or 'none'}"


def _title(clause: ClauseDifference) -> str:
    if clause.status is ClauseStatus.RENAMED:
        return f"{clause.old_id} is now {clause.id}"
    return clause.id


def _head(clause: ClauseDifference) -> str:
    status = (
        f"{clause.status}, " if clause.status in (ClauseStatus.ADDED, ClauseStatus.REMOVED) else ""
    )
    return f"{_title(clause)}: {status}{clause.relation}"


def _body(clause: ClauseDifference) -> Iterator[str]:
    if clause.status in (ClauseStatus.ADDED, ClauseStatus.REMOVED):
        yield f"  require  {clause.new or clause.old}"
    yield from change_lines(clause.changes)
    for line in _remarks(clause):
        yield f"  {line}"


def _remarks(clause: ClauseDifference) -> Iterator[str]:
    """Yield the consequences of the changes: a witness, or the clauses that imply the old one."""
    if clause.witness is not None:
        yield from _witness_lines(clause.witness)
    if clause.implied_by:
        names = ", ".join(clause.implied_by)
        known = clause.status is ClauseStatus.ADDED
        yield f"{'adds nothing to' if known else 'still implied by'} {names}"
    elif clause.status is ClauseStatus.ADDED and clause.relation is Relation.EQUAL:
        yield "adds nothing"
    for reason in clause.because:
        equal = clause.implied_by or clause.relation is Relation.EQUAL
        yield f"  because {reason}" if equal else f"though {reason}"


def change_lines(changes: tuple[Change, ...]) -> list[str]:
    """Return changes as lines of text, one or two for each."""
    width = max((len(change.name) for change in changes), default=0)
    lines = []
    for change in changes:
        relation = f"  ({change.relation})" if change.relation is not None else ""
        if len(change.old) + len(change.new) + width > 84:
            lines.append(f"  {change.name.ljust(width)}  {change.old}")
            lines.append(f"  {''.ljust(width)}  -> {change.new}{relation}")
        else:
            lines.append(f"  {change.name.ljust(width)}  {arrow(change)}{relation}")
    return lines


def arrow(change: Change) -> str:
    """Return both sides of a change."""
    return f"{change.old} -> {change.new}"


def _witness_lines(witness: Witness) -> Iterator[str]:
    """Yield a witness as text."""
    accepts, refuses = witness.accepts, witness.refuses
    match witness.extent:
        case Extent.CONTRACT:
            said = f"{accepts} accepts and {refuses} refuses"
        case Extent.UNIT:
            said = (
                f"{refuses} refuses, and no clause of {accepts} about {_UNITS[witness.unit]} does"
            )
        case Extent.CLAUSE:
            said = f"{witness.clause} of {accepts} accepts and that of {refuses} refuses"
    yield f"{said}, on {witness.of}:"
    for value in witness.values:
        yield f"  {value.what} = {value.value}"
    for field in witness.lacking:
        yield f"  a trace record without {field}"
    for flip in witness.flips:
        yield f"  {flip}"
    if witness.request is not None:
        yield f"  for example a request {witness.request}"
