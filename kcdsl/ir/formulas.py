"""Formulas of clauses and slices as trees of frozen nodes.

Numbers are exact fractions in base units (see `kcdsl.units`): seconds, bytes, tokens/second,
nats, or 1. Spans point into the contract file and are ignored by equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from dataclasses import field as dataclass_field
from enum import StrEnum
from fractions import Fraction
from typing import assert_never

from kcdsl.diagnostics.spans import Span

_NOWHERE = Span(0, 0)
MIRRORED = {"<=": ">=", "<": ">", ">=": "<=", ">": "<", "==": "==", "!=": "!="}
"""The equivalent comparison with exchanged sides."""
NEGATED = {"<=": ">", "<": ">=", ">=": "<", ">": "<="}
"""The negated comparison."""


# --- terms ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    """An exact constant in base units of `dimension` ("1", "s", "B", "tok/s", "nat", "ratio")."""

    value: Fraction
    dimension: str = "1"
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Metric:
    """A registered metric, evaluated per unit (token, request, window …)."""

    name: str
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of a metric over a slice. `kind`: mean, max, min, rate, quantile (with `q`), or
    aggregate, for a metric with one number per window."""

    kind: str
    of: Term
    q: Fraction | None = None
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Drift:
    """`drift(block, x)`: any admissible run of the inference kernel minus one of the training one.

    `measured`: `measured_drift`, the difference of the two observed runs.
    """

    block: str
    variable: str
    measured: bool = False
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of a drift: the largest norm of a row (token).

    `kind`: "inf", "2" or "span" (largest minus smallest component of the row).
    """

    kind: str
    of: Drift
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Abs:
    """Absolute value."""

    of: Term
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Arith:
    """`left op right` with op one of + - * /."""

    op: str
    left: Term
    right: Term
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class TableValue:
    """`table(name)`: the threshold of a table of the contract for the current request.

    It is the whole right side of a comparison. A clause with it means: for every bucket of the
    table, the clause with the value of the bucket, on the slice within the bucket
    (`kcdsl.ir.tables.expand_tables`).
    """

    name: str
    dimension: str = "1"
    span: Span = field(default=_NOWHERE, compare=False)


Term = Number | Metric | Statistic | Norm | Abs | Arith | TableValue


# --- regions -------------------------------------------------------------------------------------


MOST_ROWS = 2**20
"""The longest sequence of a region of rows."""


class RegionKind(StrEnum):
    """The kind of the set of inputs of a quantifier."""

    POINTS = "points"
    """Exactly the rows of the slice."""
    BALL = "ball"
    """An l_inf ball of the given radius around the block's input of each row of the slice."""
    HULL = "hull"
    """The box spanned by the block's inputs over all rows of the slice, plus a relative margin."""
    ROWS = "rows"
    """Every sequence of 1 to `longest` rows, each in the box spanned by the single rows of the
    block's inputs over the slice, plus a relative margin."""


@dataclass(frozen=True, slots=True)
class Region:
    """The set a quantifier ranges over; `longest` is set only for `rows`."""

    kind: RegionKind
    slice: str
    radius: Fraction = Fraction(0)
    span: Span = field(default=_NOWHERE, compare=False)
    longest: int | None = None


# --- formulas ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compare:
    """`left op right` with op one of <= < >= > ==; a threshold is always on the right.

    `0.02 >= p99(kl)` becomes `p99(kl) <= 0.02` at construction, so that other code handles only one
    form.
    """

    op: str
    left: Term
    right: Term
    span: Span = field(default=_NOWHERE, compare=False)

    def __post_init__(self) -> None:
        """Exchange the sides if the threshold is on the left."""
        if isinstance(self.left, Number | TableValue) and not isinstance(
            self.right, Number | TableValue
        ):
            left, right = self.right, self.left
            object.__setattr__(self, "left", left)
            object.__setattr__(self, "right", right)
            object.__setattr__(self, "op", MIRRORED[self.op])


@dataclass(frozen=True, slots=True)
class NoFlip:
    """No admissible pair of runs changes the top-k set of any row of `block` at `variable`."""

    block: str
    variable: str
    k: int = 1
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class HasFields:
    """Every trace record has these fields, not null."""

    fields: tuple[str, ...]
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """Negation."""

    of: Formula
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Connective:
    """`op` is "and", "or" or "implies" (exactly two parts)."""

    op: str
    parts: tuple[Formula, ...]
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Quantified:
    """`forall` or `exists` a variable in a region."""

    quantifier: str
    variable: str
    region: Region
    body: Formula
    span: Span = field(default=_NOWHERE, compare=False)


Formula = Compare | NoFlip | HasFields | Not | Connective | Quantified


# --- predicates of requests -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldTest:
    """`field op value` on a request; op one of == != <= < >= >; value a string, number or bool."""

    field: str
    op: str
    value: str | Fraction | bool
    span: Span = dataclass_field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Conjunction of slice predicates; empty means every request."""

    parts: tuple[Predicate, ...] = ()


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Disjunction of slice predicates."""

    parts: tuple[Predicate, ...] = ()


@dataclass(frozen=True, slots=True)
class NoneOf:
    """Negation of a slice predicate."""

    part: Predicate


Predicate = FieldTest | AllOf | AnyOf | NoneOf


# --- parts ----------------------------------------------------------------------------------------


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


def rewritten(formula: Formula, part: Callable[[Formula], Formula]) -> Formula:
    """Return a formula after applying a function to all sub-formulas, innermost first."""
    match formula:
        case Not(of=of):
            formula = replace(formula, of=rewritten(of, part))
        case Connective(parts=parts):
            formula = replace(formula, parts=tuple(rewritten(each, part) for each in parts))
        case Quantified(body=body):
            formula = replace(formula, body=rewritten(body, part))
        case Compare() | NoFlip() | HasFields():
            pass
        case _:
            assert_never(formula)
    return part(formula)


def with_leaves(term: Term, leaf: Callable[[Term], Term]) -> Term:
    """Return a term after applying a function to its numbers, metrics, norms and tables."""
    match term:
        case Statistic(of=of) | Abs(of=of):
            return replace(term, of=with_leaves(of, leaf))
        case Arith(left=left, right=right):
            return replace(term, left=with_leaves(left, leaf), right=with_leaves(right, leaf))
        case Number() | Metric() | Norm() | TableValue():
            return leaf(term)
        case _:
            assert_never(term)
