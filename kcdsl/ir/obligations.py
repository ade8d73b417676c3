"""Obligations: the single statements that a contract demands, each with an identifier.

A clause on several slices, or a conjunction, is several obligations. They are created once from the
checked program; goals, plans, reports and certificates refer to an obligation or its identifier.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import prod
from typing import TypeVar

from kcdsl.ir.formulas import NEGATED, walk
from kcdsl.ir.printer import formula_text, term_text
from kcdsl.ir.terms import (
    Arith,
    Clause,
    Compare,
    Connective,
    Formula,
    HasFields,
    NoFlip,
    Norm,
    Not,
    Number,
    Quantified,
    Region,
    Term,
)

_T = TypeVar("_T")

MOST_ALTERNATIVES = 64
HOLDS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}
"""The comparison operators on exact numbers."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`quantity op threshold`: the threshold is exact and in base units of `unit`.

    The quantity of `no_flip` is the margin between the top k columns and the others, compared with
    0; that of `has` is the share of records that carry every field, compared with 1.
    """

    quantity: Term | NoFlip | HasFields
    op: str
    threshold: Fraction
    unit: str = "1"

    @property
    def text(self) -> str:
        """Return the quantity as the language writes it."""
        if isinstance(self.quantity, NoFlip | HasFields):
            return formula_text(self.quantity)
        return term_text(self.quantity)

    def admits(self, value: Fraction) -> bool:
        """Return whether a value of the quantity satisfies the comparison, exactly."""
        return HOLDS[self.op](value, self.threshold)


Alternatives = tuple[tuple[Comparison, ...], ...]


@dataclass(frozen=True, slots=True)
class Obligation:
    """One part of a clause on one slice (None where the clause names none).

    `part` is the clause with only the `number`-th part (from zero) of its conjunction as its
    requirement. It holds if every comparison of one of the `alternatives` holds (disjunctive normal
    form); there are none where the part has no such form.
    """

    clause: Clause
    part: Clause
    number: int
    slice: str | None
    alternatives: Alternatives

    @property
    def id(self) -> str:
        """Return the name: clause, slice and the number of the part."""
        return f"{self.clause.id}/{self.slice or ''}/{self.number}"

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Return the comparisons of all alternatives."""
        return tuple(comparison for choice in self.alternatives for comparison in choice)

    @property
    def comparison(self) -> Comparison | None:
        """Return its only comparison; None where there are several or none."""
        found = self.comparisons
        return found[0] if len(found) == 1 else None

    @property
    def drift(self) -> tuple[Quantified, Comparison] | None:
        """Return the quantifier and comparison of a universal statement about one drift or order;
        None for any other statement."""
        formula, comparison = self.part.require, self.comparison
        if comparison is None or not isinstance(formula, Quantified):
            return None
        match comparison:
            case Comparison(NoFlip(variable=variable), ">"):
                bound = variable
            case Comparison(Norm(of=drift), "<=" | "<") if not drift.measured:
                bound = drift.variable
            case _:
                return None
        plain = isinstance(formula.body, Compare | NoFlip) and bound == formula.variable
        return (formula, comparison) if plain else None


def obligations_of(clause: Clause, slice: str | None) -> tuple[Obligation, ...]:
    """Return the obligations of a clause on a slice.

    A part whose quantifiers name slices is an obligation on these only. A conjunction with a
    budget is one obligation: a unit is beyond if any part fails for it.
    """
    parts = (clause.require,) if clause.budget is not None else tuple(conjuncts(clause.require))
    return tuple(
        Obligation(clause, replace(clause, require=part), number, slice, alternatives(part))
        for number, part in enumerate(parts)
        if slice is None or slice in ({r.slice for r in regions_of(part)} or {slice})
    )


def named_slices(clause: Clause) -> tuple[str, ...]:
    """Return the slices that a clause or its quantifiers name, in the order of the contract."""
    named = (*clause.slices, *(region.slice for region in regions_of(clause.require)))
    return tuple(dict.fromkeys(named))


def slices_of(clause: Clause) -> tuple[str | None, ...]:
    """Return the slices a clause is decided on; (None,) where it names none."""
    return named_slices(clause) or (None,)


def regions_of(formula: Formula) -> tuple[Region, ...]:
    """Return the regions of the quantifiers, outermost first."""
    return tuple(part.region for part in walk(formula) if isinstance(part, Quantified))


def conjuncts(formula: Formula) -> Iterator[Formula]:
    """Yield the parts of a conjunction; any other formula is one part."""
    if isinstance(formula, Connective) and formula.op == "and":
        for part in formula.parts:
            yield from conjuncts(part)
    else:
        yield formula


# --- disjunctive normal form ---------------------------------------------------------------------


def alternatives(formula: Formula) -> Alternatives:
    """Return a requirement in disjunctive normal form over comparisons.

    Empty for an existential quantifier, a negated quantifier, or more than 64 alternatives. A
    disjunction under `forall` is strengthened to a disjunction of universal statements.
    """
    return _normal_form(formula, negated=False)


def conjunction(parts: Sequence[tuple[tuple[_T, ...], ...]]) -> tuple[tuple[_T, ...], ...]:
    """Return the alternatives of the conjunction of requirements; none if more than 64."""
    if prod(map(len, parts)) > MOST_ALTERNATIVES:
        return ()
    return tuple(tuple(c for part in choice for c in part) for choice in product(*parts))


def _normal_form(formula: Formula, *, negated: bool) -> Alternatives:
    match formula:
        case Compare() if negated and formula.op not in NEGATED:
            return ()
        case Compare(op, left, right):
            return ((_comparison(NEGATED[op] if negated else op, left, right),),)
        case NoFlip() | HasFields() | Quantified() if negated:
            return ()
        case NoFlip():
            return ((Comparison(formula, ">", Fraction(0)),),)
        case HasFields():
            return ((Comparison(formula, ">=", Fraction(1), "ratio"),),)
        case Not(of):
            return _normal_form(of, negated=not negated)
        case Connective("implies", (antecedent, consequent)):
            either = Connective("or", (Not(antecedent), consequent))
            return _normal_form(either, negated=negated)
        case Connective(op, parts):
            inner = [_normal_form(part, negated=negated) for part in parts]
            return conjunction(inner) if (op == "and") != negated else _disjunction(inner)
        case Quantified(quantifier, _, _, body):
            return _normal_form(body, negated=False) if quantifier == "forall" else ()


def _disjunction(parts: list[Alternatives]) -> Alternatives:
    found = tuple(choice for part in parts for choice in part)
    return found if len(found) <= MOST_ALTERNATIVES else ()


def _comparison(op: str, left: Term, right: Term) -> Comparison:
    if isinstance(right, Number):
        return Comparison(left, op, right.value, right.dimension)
    return Comparison(Arith("-", left, right), op, Fraction(0))
