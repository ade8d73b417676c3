"""Quantities: terms with their dimensions, and arithmetic that checks them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl.check.report import Reporter, insertion
from kcdsl.diagnostics.codes import DIMENSION, DIVISION_BY_ZERO
from kcdsl.diagnostics.model import Fix
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.units import Dimension, describe, example, sample, takes_bare_numbers


@dataclass(frozen=True, slots=True)
class Typed:
    """A term with its dimension; `bare` marks a number written without a unit."""

    term: ir.Term
    dimension: Dimension
    bare: bool = False


def align(left: Typed, right: Typed, span: Span, reporter: Reporter) -> tuple[Typed, Typed] | None:
    """Give bare numbers the dimension of the other side; report dimensions that differ."""
    if left.dimension == right.dimension:
        return left, right
    for one, other, flip in ((left, right, False), (right, left, True)):
        if one.bare and isinstance(one.term, ir.Number) and takes_bare_numbers(other.dimension):
            name = str(other.dimension)
            adapted = Typed(replace(one.term, dimension=name), other.dimension, other.bare)
            return (other, adapted) if flip else (adapted, other)
    bare = left if left.bare else right if right.bare else None
    other = right if bare is left else left
    if bare is not None and example(other.dimension) is not None:
        reporter.error(
            DIMENSION,
            f"a number without a unit meets {describe(other.dimension)}",
            bare.term.span,
            f"a number needs its unit here, such as {example(other.dimension)}",
            fix=_with_unit(bare.term, other.dimension),
        )
        return None
    reporter.error(
        DIMENSION,
        f"{describe(left.dimension)} and {describe(right.dimension)} cannot be combined",
        span,
        _needed(left, right),
    )
    return None


def _needed(left: Typed, right: Typed) -> str | None:
    """Say which dimension a number beside something else should have."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one.term, ir.Number) and not isinstance(other.term, ir.Number):
            shown = sample(other.dimension)
            return None if shown is None else f"write {describe(other.dimension)}, such as {shown}"
    return None


def _with_unit(term: ir.Term, dimension: Dimension) -> Fix | None:
    """Return the fix that gives a number the usual unit of a dimension."""
    unit = (example(dimension) or "").partition(" ")[2]
    return insertion(term.span.end, f" {unit}") if isinstance(term, ir.Number) and unit else None


def combine(op: str, left: Typed, right: Typed, span: Span, reporter: Reporter) -> Typed | None:
    """Apply an arithmetic operator; constants are computed exactly."""
    if op in "+-":
        aligned = align(left, right, span, reporter)
        if aligned is None:
            return None
        left, right = aligned
        dimension = left.dimension
    else:
        dimension = left.dimension.times(right.dimension, -1 if op == "/" else 1)
    if op == "/" and isinstance(right.term, ir.Number) and right.term.value == 0:
        reporter.error(DIVISION_BY_ZERO, "division by zero", span)
        return None
    if isinstance(left.term, ir.Number) and isinstance(right.term, ir.Number):
        a, b = left.term.value, right.term.value
        value = {"+": a + b, "-": a - b, "*": a * b}.get(op)
        value = a / b if value is None else value
        return Typed(ir.Number(value, str(dimension), span), dimension, left.bare and right.bare)
    return Typed(ir.Arith(op, left.term, right.term, span), dimension)


def negated(inner: Typed, span: Span, reporter: Reporter) -> Typed | None:
    zero = ir.Number(Fraction(0), str(inner.dimension), span)
    return combine("-", Typed(zero, inner.dimension, inner.bare), inner, span, reporter)
