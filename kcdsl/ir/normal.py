"""The normal form of requirements: what only looks different is made equal.

The rules keep the meaning by their form alone: bound variables are called `x`, `x1`, `x2` … from
the outside in; a constant or a table stands on the right of its comparison; `a >= b` of two other
terms is `b <= a`; trace fields stand in the order of their names. Nothing else is rewritten: parts
of `and`, sums and products keep the author's order, so requirements that are equal by a law of
logic or arithmetic only are different requirements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count, islice
from typing import assert_never

from kcdsl.ir.formulas import MIRRORED
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Compare,
    Connective,
    Drift,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    Norm,
    Not,
    Number,
    Quantified,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.ir.walk import subterms, walk

_Names = Mapping[str, str]


def normal_formula(formula: Formula) -> Formula:
    """Return the normal form of a formula, with the spans of the original."""
    free = free_variables(formula)
    fresh = (name for n in count() if (name := f"x{n}" if n else "x") not in free)
    depth = sum(isinstance(part, Quantified) for part in walk(formula))
    return _formula(formula, {}, tuple(islice(fresh, depth)))


def free_variables(formula: Formula) -> frozenset[str]:
    """Return the variables of a formula that no quantifier in it binds."""
    match formula:
        case NoFlip(variable=variable):
            return frozenset({variable})
        case Compare(left=left, right=right):
            terms = (*subterms(left), *subterms(right))
            return frozenset(term.of.variable for term in terms if isinstance(term, Norm))
        case Not(of=of):
            return free_variables(of)
        case Connective(parts=parts):
            return frozenset().union(*(free_variables(part) for part in parts))
        case Quantified(variable=variable, body=body):
            return free_variables(body) - {variable}
        case HasFields():
            return frozenset()
        case _:
            assert_never(formula)


def _formula(formula: Formula, names: _Names, fresh: tuple[str, ...]) -> Formula:
    """Rename bound variables; `fresh` holds the names for the quantifiers further in."""
    match formula:
        case Compare():
            return _compare(formula, names)
        case NoFlip(variable=variable):
            return replace(formula, variable=names.get(variable, variable))
        case HasFields(fields=fields):
            return replace(formula, fields=tuple(sorted(fields)))
        case Not(of=of):
            return replace(formula, of=_formula(of, names, fresh))
        case Connective(parts=parts):
            return replace(formula, parts=tuple(_formula(part, names, fresh) for part in parts))
        case Quantified(variable=variable, body=body):
            inner = _formula(body, {**names, variable: fresh[0]}, fresh[1:])
            return replace(formula, variable=fresh[0], body=inner)
        case _:
            assert_never(formula)


def _compare(compare: Compare, names: _Names) -> Compare:
    op, left, right = compare.op, _term(compare.left, names), _term(compare.right, names)
    if not isinstance(right, Number | TableValue) and op in {">=", ">"}:
        op, left, right = MIRRORED[op], right, left
    return replace(compare, op=op, left=left, right=right)


def _term(term: Term, names: _Names) -> Term:
    match term:
        case Number() | Metric() | TableValue():
            return term
        case Statistic(of=of) | Abs(of=of):
            return replace(term, of=_term(of, names))
        case Norm(of=drift):
            return replace(term, of=_drift(drift, names))
        case Arith(left=left, right=right):
            return replace(term, left=_term(left, names), right=_term(right, names))
        case _:
            assert_never(term)


def _drift(drift: Drift, names: _Names) -> Drift:
    return replace(drift, variable=names.get(drift.variable, drift.variable))
