"""The names at a place and what they mean, calls of functions, quantities, comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from kcdsl.check.expressions.functions import find_function
from kcdsl.diagnostics.codes import (
    UNKNOWN_UNIT,
    WRONG_ARGUMENTS,
    WRONG_SORT,
)
from kcdsl.diagnostics.model import Edit, Fix
from kcdsl.diagnostics.report import Reporter, meant, suggest
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.terms import ThresholdTable
from kcdsl.metrics import BUILT_IN, Registry
from kcdsl.syntax import ast
from kcdsl.units import NO_UNITS, ONE, SPELLINGS, UNITS, Dimension


@dataclass(frozen=True, slots=True)
class Scope:
    """The names at a place: the declared slices and the bound variables, with their places, and the
    declared tables (None for one in error)."""

    slices: Mapping[str, Span]
    variables: Mapping[str, Span]
    tables: Mapping[str, ThresholdTable | None] = field(default_factory=dict)
    metrics: Registry = BUILT_IN
    regions: Mapping[str, str] = field(default_factory=dict)
    """Bound variable -> the function of its region: points, ball, hull or rows."""

    def bind(self, name: str, span: Span, region: str = "points") -> Scope:
        """Return the scope inside a quantifier over a region of the given function."""
        return replace(
            self,
            variables={**self.variables, name: span},
            regions={**self.regions, name: region},
        )


def takes(call: ast.Call, reporter: Reporter) -> bool:
    """Say whether a call has as many arguments as its function takes; report it if not."""
    function = find_function(call.function.id)
    assert function is not None
    fits = function.least <= len(call.arguments) <= len(function.parameters)
    if not fits:
        arguments_error(call, reporter)
    return fits


def arguments_error(call: ast.Call, reporter: Reporter) -> None:
    """Report that a call does not have the arguments its function takes."""
    function = find_function(call.function.id)
    assert function is not None
    message = f"`{call.function.id}` is called with unsuitable arguments"
    reporter.error(WRONG_ARGUMENTS, message, call.span, function.usage)


def quantity(number: ast.Num, reporter: Reporter) -> tuple[Fraction, Dimension, bool] | None:
    """Return value in base units, dimension, and whether the unit was left out."""
    if number.unit is None:
        return number.value, ONE, True
    unit = UNITS.get(number.unit)
    if unit is None:
        reporter.error(
            UNKNOWN_UNIT,
            f"there is no unit `{number.unit}`",
            number.unit_span,
            other_unit(number.unit),
        )
        return None
    return number.value * unit.factor, unit.dimension, False


def other_unit(name: str) -> str:
    """Return what to write in place of something that is no unit."""
    if name in NO_UNITS:
        return NO_UNITS[name]
    known = SPELLINGS.get(name.lower())
    return suggest(name, UNITS, "units") if known is None else meant(known, f"write `{known}`")


def single_comparison(
    expression: ast.Comparison, reporter: Reporter
) -> tuple[str, ast.Expression, ast.Expression] | None:
    """Return operator, left and right side; report a chain such as `a <= b <= c`."""
    if len(expression.ops) > 1:
        reporter.error(
            WRONG_SORT,
            "comparisons cannot be chained",
            expression.op_spans[1],
            "write `a <= b and b <= c`",
            fix=_unchained(expression, reporter.source),
        )
        return None
    (op,), (left, right) = expression.ops, expression.operands
    return op, left, right


def _unchained(expression: ast.Comparison, source: SourceFile) -> Fix | None:
    """Return the fix that writes the middle of a chain twice; None where it runs over lines."""
    if len(expression.ops) > 2:
        return None
    middle = expression.operands[1].span
    text = source.text[middle.start : middle.end]
    if "\n" in text:
        return None
    return Fix("join two comparisons", (Edit(Span(middle.end, middle.end), f" and {text}"),))
