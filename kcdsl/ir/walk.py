"""Walking over formulas and terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from kcdsl.ir.terms import (
    Abs,
    Arith,
    Compare,
    Connective,
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


def walk(formula: Formula) -> Iterator[Formula]:
    """Yield a formula and every formula inside it, outermost first."""
    yield formula
    match formula:
        case Not(of=of):
            yield from walk(of)
        case Connective(parts=parts):
            for part in parts:
                yield from walk(part)
        case Quantified(body=body):
            yield from walk(body)
        case Compare() | NoFlip() | HasFields():
            return
        case _:
            assert_never(formula)


def terms_of(formula: Formula) -> Iterator[Term]:
    """Yield every term of a formula, outermost first."""
    for part in walk(formula):
        if isinstance(part, Compare):
            yield from subterms(part.left)
            yield from subterms(part.right)


def subterms(term: Term) -> Iterator[Term]:
    """Yield a term and every term inside it, outermost first."""
    yield term
    match term:
        case Abs(of=of) | Statistic(of=of):
            yield from subterms(of)
        case Arith(left=left, right=right):
            yield from subterms(left)
            yield from subterms(right)
        case Number() | Metric() | Norm() | TableValue():
            return
        case _:
            assert_never(term)
