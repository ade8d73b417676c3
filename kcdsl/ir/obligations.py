"""Obligations: the single statements that a contract demands, each with a name.

A clause on several slices, or one that is a conjunction, is several obligations. Plans, reports and
certificates name the obligation that a row or a result is about, so that none of them counts
positions in another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kcdsl.ir.terms import Clause, Connective, Formula


@dataclass(frozen=True, slots=True)
class Obligation:
    """One part of a clause on one slice (None where the clause names none).

    `part` is the clause with that part of its conjunction as its requirement, the `number`-th from
    zero in the order of the contract.
    """

    clause: Clause
    part: Clause
    number: int
    slice: str | None

    @property
    def id(self) -> str:
        """Return the name: clause, slice and the number of the part."""
        return f"{self.clause.id}/{self.slice or ''}/{self.number}"


def obligations_of(clause: Clause, slice: str | None) -> tuple[Obligation, ...]:
    """Return the obligations of a clause on a slice.

    A conjunction with a budget is one: a unit is beyond where any part of it fails.
    """
    parts = (clause.require,) if clause.budget is not None else tuple(_parts(clause.require))
    return tuple(
        Obligation(clause, replace(clause, require=part), number, slice)
        for number, part in enumerate(parts)
    )


def _parts(formula: Formula) -> Iterator[Formula]:
    if isinstance(formula, Connective) and formula.op == "and":
        for part in formula.parts:
            yield from _parts(part)
    else:
        yield formula
