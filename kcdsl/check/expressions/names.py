"""Names of the language and what they mean at a place: functions, blocks, variables, units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

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

BLOCK = re.compile(r"(?:attn|mlp|norm|layer)_(?:0|[1-9][0-9]*)|head|model")
PERCENTILE = re.compile(r"p([1-9][0-9]?)")
NORMS = {"norm_inf": "inf", "norm_2": "2", "span": "span"}
STATISTICS = ("mean", "max", "min", "rate", "quantile", "p50", "p90", "p95", "p99")
DRIFTS = ("drift", "measured_drift")
REGIONS = ("points", "ball", "hull", "rows")
STATEMENTS = ("no_flip", "has")
FUNCTIONS = (*STATISTICS, *NORMS, "abs", "table", *DRIFTS, *REGIONS, *STATEMENTS)
OTHER_NAMES = {
    "median": "p50",
    "avg": "mean",
    "average": "mean",
    "maximum": "max",
    "p100": "max",
    "minimum": "min",
    "p0": "min",
    "percentile": "quantile",
    "share": "rate",
}
"""What people call functions that have another name here."""
SIGNATURES = {
    "drift": "drift(block, x)",
    "measured_drift": "measured_drift(block, x)",
    "no_flip": "no_flip(block, x) or no_flip(block, x, k)",
    "has": "has(trace, [field, ...])",
    "points": "points(slice)",
    "ball": "ball(slice, radius)",
    "hull": "hull(slice) or hull(slice, margin)",
    "rows": "rows(slice, longest) or rows(slice, longest, margin)",
    "quantile": "quantile(q, metric)",
    "norm_inf": "norm_inf(drift(block, x))",
    "norm_2": "norm_2(drift(block, x))",
    "span": "span(drift(block, x))",
    "abs": "abs(term)",
    "table": "table(name)",
}
BLOCK_EXAMPLES = ("attn_0", "mlp_0", "norm_0", "layer_0", "head", "model")


@dataclass(frozen=True, slots=True)
class Scope:
    """What names mean: the declared slices and the bound variables, with their places, and the
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


def arguments_error(call: ast.Call, reporter: Reporter) -> None:
    """Report that a call does not have the arguments its function takes."""
    name = call.function.id
    signature = SIGNATURES.get(name, f"{name}(metric)")
    reporter.error(
        WRONG_ARGUMENTS, f"`{name}` is called with unsuitable arguments", call.span, signature
    )


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
