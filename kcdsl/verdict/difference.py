"""How one contract differs from another: what `kcdsl diff` says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kcdsl.diagnostics.render.terminal import json_for_terminals


class Relation(StrEnum):
    """How what is new relates to what was old."""

    EQUAL = "equal"
    STRICTER = "stricter"
    """Everything that the new one accepts, the old one accepts; not the other way round, or that
    is left open."""
    WEAKER = "weaker"
    INCOMPARABLE = "incomparable"
    """Neither accepts everything that the other one does, or they speak of different things."""
    UNDECIDED = "undecided"
    """The solver left open whether the new one is at least as strict."""

    @property
    def is_finding(self) -> bool:
        """Say whether the new one may accept what the old one refuses."""
        return self in (Relation.WEAKER, Relation.INCOMPARABLE)


def together(relations: Iterable[Relation]) -> Relation:
    """Return the relation of a whole from those of its parts.

    What is weaker in one part and undecided in another is not stricter, so it is incomparable.
    """
    found = {relation for relation in relations if relation is not Relation.EQUAL}
    if not found:
        return Relation.EQUAL
    if len(found) == 1:
        return found.pop()
    return Relation.UNDECIDED if found <= _OPEN else Relation.INCOMPARABLE


_OPEN = {Relation.UNDECIDED, Relation.STRICTER}


def from_implications(new_implies_old: bool | None, old_implies_new: bool | None) -> Relation:
    """Return the relation from the two implications; None stands for one that is open."""
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


class Status(StrEnum):
    """Whether a clause is in both contracts."""

    BOTH = "both"
    ADDED = "added"
    REMOVED = "removed"
    RENAMED = "renamed"


@dataclass(frozen=True, slots=True)
class Change:
    """One respect in which two clauses or contracts differ, in words.

    `relation` is None where only several changes together have one.
    """

    name: str
    old: str
    new: str
    relation: Relation | None


class Extent(StrEnum):
    """What accepts the values of a witness."""

    CONTRACT = "contract"
    """Every clause of the contract."""
    UNIT = "unit"
    """Its clauses about the same unit; those about others were not compared with these values."""
    CLAUSE = "clause"
    """The clause of the same name, but not the whole contract, or that is not known."""


@dataclass(frozen=True, slots=True)
class WitnessValue:
    """A measured value: what is measured, the value with its unit, and the exact fraction."""

    what: str
    shown: str
    exact: str


@dataclass(frozen=True, slots=True)
class Witness:
    """Values that the new contract accepts and the old one refuses, or the other way round.

    `of` says what they are measured on. `lacking` are trace fields; `flips` are the inputs at which
    the likeliest tokens change. `clause` is what refuses them. `extent` says what accepts them, and
    `unit` what claims the values are about: "slices" as a whole, single "requests" or "windows".
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


@dataclass(frozen=True, slots=True)
class ClauseDifference:
    """How one clause differs.

    `kept_by`: the clauses of the new contract that imply the old clause, consequences included,
    where this clause does not; for an added one, those of the old contract that imply it. `why`
    says by what.
    """

    id: str
    status: Status
    relation: Relation
    old_id: str | None = None
    old_text: str | None = None
    new_text: str | None = None
    changes: tuple[Change, ...] = ()
    witness: Witness | None = None
    kept_by: tuple[str, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Named:
    """A contract by its name, version and digest."""

    name: str
    version: str
    digest: str


@dataclass(frozen=True, slots=True)
class Difference:
    """How a contract differs from another: as a whole, clause by clause, and around the clauses."""

    old: Named
    new: Named
    relation: Relation
    clauses: tuple[ClauseDifference, ...]
    changes: tuple[Change, ...] = ()


# --- JSON -----------------------------------------------------------------------------------------


SCHEMA = "kcdsl.diff/1"


def difference_json(found: Difference) -> str:
    """Return the document that `kcdsl diff --format json` prints."""
    document = {
        "schema": SCHEMA,
        "old": _named(found.old),
        "new": _named(found.new),
        "relation": found.relation.value,
        "changes": [_change(change) for change in found.changes],
        "clauses": [_clause(clause) for clause in found.clauses],
    }
    return json_for_terminals(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


def _named(contract: Named) -> dict[str, str]:
    digest = f"sha256:{contract.digest}"
    return {"name": contract.name, "version": contract.version, "digest": digest}


def _clause(clause: ClauseDifference) -> dict[str, Any]:
    return {
        "id": clause.id,
        "status": clause.status.value,
        "relation": clause.relation.value,
        "old_id": clause.old_id,
        "old": clause.old_text,
        "new": clause.new_text,
        "changes": [_change(change) for change in clause.changes],
        "witness": None if clause.witness is None else _witness(clause.witness),
        "implied_by": list(clause.kept_by),
        "because": list(clause.why),
    }


def _change(change: Change) -> dict[str, Any]:
    relation = None if change.relation is None else change.relation.value
    return {"name": change.name, "old": change.old, "new": change.new, "relation": relation}


def _witness(witness: Witness) -> dict[str, Any]:
    return {
        "accepts": witness.accepts.lower(),
        "refuses": witness.refuses.lower(),
        "clause": witness.clause,
        "extent": witness.extent.value,
        "of": witness.of,
        "values": [{"what": v.what, "value": v.shown, "exact": v.exact} for v in witness.values],
        "lacking": list(witness.lacking),
        "flips": list(witness.flips),
        "request": witness.request,
    }
