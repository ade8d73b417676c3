"""The syntax tree of expressions. Spans point into the file and take no part in equality."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from kcdsl.diagnostics.spans import Span

_NOWHERE = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Num:
    """A number with its unit, as written; `unit_span` is that of the unit."""

    value: Fraction
    unit: str | None = None
    span: Span = field(default=_NOWHERE, compare=False)
    unit_span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Name:
    """A name: a variable, metric, slice, block, field or constant word."""

    id: str
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Text:
    """A text in quotation marks."""

    value: str
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Truth:
    """`true` or `false`."""

    value: bool
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class ListOf:
    """`[a, b, c]`."""

    items: tuple[Expression, ...]
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Call:
    """`function(arguments)`."""

    function: Name
    arguments: tuple[Expression, ...]
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Minus:
    """Unary minus."""

    of: Expression
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right` with op one of + - * /."""

    op: str
    left: Expression
    right: Expression
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class ComparisonChain:
    """`operands[0] ops[0] operands[1] …`; more than one operator parses but is a type error."""

    ops: tuple[str, ...]
    operands: tuple[Expression, ...]
    span: Span = field(default=_NOWHERE, compare=False)
    op_spans: tuple[Span, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Membership:
    """`of in [a, b]`."""

    of: Expression
    among: ListOf
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Negation:
    """`not of`."""

    of: Expression
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Logic:
    """`and`, `or` (two parts or more) or `implies` (exactly two)."""

    op: str
    parts: tuple[Expression, ...]
    span: Span = field(default=_NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Quantifier:
    """`forall x in region: body` or `exists …`."""

    kind: str
    variable: Name
    region: Call
    body: Expression
    span: Span = field(default=_NOWHERE, compare=False)


Expression = (
    Num
    | Name
    | Text
    | Truth
    | ListOf
    | Call
    | Minus
    | Binary
    | ComparisonChain
    | Membership
    | Negation
    | Logic
    | Quantifier
)


@dataclass(frozen=True, slots=True)
class BudgetText:
    """`rate of unit`."""

    rate: Num
    unit: Name
    span: Span = field(default=_NOWHERE, compare=False)
