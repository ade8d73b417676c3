"""C-convergence: one verdict about a contract from proofs and measurements together.

A kernel pair is C-convergent where every hard clause holds on all of its slices, and every soft
clause c satisfies Pr[d_c(x) > tau_c] <= delta_c on each of its slices (Definition 1 of the paper).
Held-out clauses count like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kcdsl.exits import Exit
from kcdsl.ir.terms import Clause, Program
from kcdsl.verdict.model import EXITS, HELD, worst
from kcdsl.verdict.records import Record
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.statement import CertifiedClause, Predicate, RequiredClause, Verdict, uncovered

STATUS_SCHEMA = "kcdsl.status/1"
MISSING = "nothing was decided"


@dataclass(frozen=True, slots=True)
class Joined(Record):
    """One clause on one slice: its verdict, and the files that determine it.

    `slice` is None for a clause whose requirement names its slice. `budget` None makes it hard.
    """

    derived: ClassVar[tuple[str, ...]] = ("hard",)

    clause: str
    slice: str | None
    level: str
    budget: str | None
    holdout: bool
    verdict: str
    evidence: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def hard(self) -> bool:
        """Return whether every unit must satisfy the clause."""
        return self.budget is None


@dataclass(frozen=True, slots=True)
class Convergence(Record):
    """The joined results of a contract. `unused` names files that do not concern it, with
    reasons."""

    derived: ClassVar[tuple[str, ...]] = ("verdict", "convergent", "exit")

    contract: Mapping[str, str]
    rows: tuple[Joined, ...]
    unused: Mapping[str, str]

    @property
    def verdict(self) -> str:
        """Return held if the pair is C-convergent, else the worst verdict of all clauses."""
        return worst({row.verdict for row in self.rows})

    @property
    def convergent(self) -> bool | None:
        """Return whether the pair is C-convergent; None if undecided."""
        return {HELD: True, "violated": False}.get(self.verdict)

    @property
    def exit(self) -> Exit:
        """Return the exit code."""
        return EXITS[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Return the document "kcdsl.status/1"."""
        found = Record.to_json(self)
        return {"schema": STATUS_SCHEMA, "clauses": found.pop("rows"), **found}


def join(
    program: Program,
    contract: Mapping[str, str],
    required: Sequence[RequiredClause],
    statements: Mapping[str, Predicate],
    unused: Mapping[str, str],
) -> Convergence:
    """Join statements, by file name, to one verdict for every clause on every slice.

    A clause is violated if any statement refutes it, and holds if one statement alone shows it.
    Parts of several statements are not combined.
    """
    clauses = {clause.id: clause for clause in program.clauses}
    rows = tuple(_joined(item, clauses[item.id], statements) for item in required)
    return Convergence(contract, rows, unused)


def _joined(
    required: RequiredClause, clause: Clause, statements: Mapping[str, Predicate]
) -> Joined:
    found = {
        file: tuple(c for c in body.clauses if (c.id, c.slice) == (required.id, required.slice))
        for file, body in statements.items()
    }
    found = {file: results for file, results in found.items() if results}
    refuting = {file: r for file, r in found.items() if refutes(required, r)}
    showing = {file: r for file, r in found.items() if not uncovered(required, r)}
    reason = None
    if refuting:
        verdict, deciding = "violated", refuting
    elif showing:
        verdict, deciding = HELD, showing
    else:
        verdict, deciding = "inconclusive", found
        reasons = [c.reason for results in found.values() for c in results if c.reason]
        reasons = reasons or [f.detail for r in found.values() for f in uncovered(required, r)]
        reason = "; ".join(dict.fromkeys(reasons)) or MISSING
    return Joined(
        clause=required.id,
        slice=required.slice,
        level=clause.level.value,
        budget=None if required.budget is None else _budget(clause),
        holdout=clause.holdout,
        verdict=verdict,
        evidence=tuple(dict.fromkeys(_evidence(c) for r in deciding.values() for c in r)),
        files=tuple(deciding),
        reason=reason,
    )


def refutes(required: RequiredClause, results: Sequence[CertifiedClause]) -> bool:
    """Return whether each alternative of the requirement has a failed comparison."""
    return bool(required.alternatives) and all(
        any(c.is_of(r) and r.verdict is Verdict.FAILED for c in part for r in results)
        for part in required.alternatives
    )


def _budget(clause: Clause) -> str | None:
    budget = clause.budget
    return None if budget is None else f"{real_text(100 * budget.rate)}% of {budget.unit}"


def _evidence(clause: CertifiedClause) -> str:
    """Return the kind of evidence, with the number of units if it has any."""
    kind = clause.evidence.value
    if clause.implied_by is not None:
        return f"{kind}, implied by {clause.implied_by}"
    return kind if clause.n is None else f"{kind} of {clause.n}"
