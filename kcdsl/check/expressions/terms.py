"""Typing of terms: from syntax to IR terms with their dimension.

Every function returns None after it reported an error; callers then report nothing more, so one
mistake gives one diagnostic.
"""

from __future__ import annotations

import re

from kcdsl.check.expressions.measurements import Typed, aggregate, arithmetic, statistic
from kcdsl.check.expressions.names import (
    BLOCK,
    BLOCK_EXAMPLES,
    DRIFTS,
    FUNCTIONS,
    NORMS,
    OTHER_NAMES,
    PERCENTILE,
    STATISTICS,
    Scope,
    arguments_error,
    takes,
)
from kcdsl.check.expressions.sorts import BLOCK_SORT, SEQUENCE, STATES, wrong_sort
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Edit, Fix, Label
from kcdsl.diagnostics.report import Reporter, did_you_mean, nearest, replacement, suggest, wrapped
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.syntax import ast
from kcdsl.units import (
    ONE,
    UNITS,
)

_FINE_LEVEL = re.compile(r"p(9[0-9]{2,})")
"""A common spelling of percentiles with more than two digits: p999, p9999."""


def drift(expression: ast.Expression, scope: Scope, reporter: Reporter) -> ir.Drift | None:
    """Type `drift(block, x)` or `measured_drift(block, x)`."""
    if not isinstance(expression, ast.Call) or expression.function.id not in DRIFTS:
        help = "norms take drift(block, x) or measured_drift(block, x)"
        wrong_sort("drift", expression, scope, reporter, help)
        return None
    if not takes(expression, reporter):
        return None
    block = block_name(expression.arguments[0], scope, reporter)
    variable = variable_name(expression.arguments[1], scope, reporter)
    if block is None or variable is None:
        return None
    if not check_input(block, expression.arguments[1], scope, reporter):
        return None
    measured = expression.function.id == "measured_drift"
    return ir.Drift(block, variable, measured, expression.span)


def term(expression: ast.Expression, scope: Scope, reporter: Reporter) -> Typed | None:
    """Type a term; None after an error."""
    match expression:
        case ast.Num() | ast.Minus() | ast.Binary():
            return arithmetic(expression, lambda part: term(part, scope, reporter), reporter)
        case ast.Name():
            return aggregate(expression, scope, reporter)
        case ast.Call():
            return _call(expression, scope, reporter)
        case _:
            wrong_sort("Real", expression, scope, reporter)
            return None


def _call(call: ast.Call, scope: Scope, reporter: Reporter) -> Typed | None:
    name = call.function.id
    if name in NORMS:
        if not takes(call, reporter):
            return None
        inner = drift(call.arguments[0], scope, reporter)
        return None if inner is None else Typed(ir.Norm(NORMS[name], inner, call.span), ONE)
    if name == "abs":
        if not takes(call, reporter):
            return None
        of = term(call.arguments[0], scope, reporter)
        return None if of is None else Typed(ir.Abs(of.term, call.span), of.dimension)
    if name == "table":
        return table_value(call, scope, reporter)
    if name in STATISTICS or PERCENTILE.fullmatch(name):
        return statistic(call, scope, reporter)
    if name in DRIFTS:
        help = f"write norm_inf({name}(...)), norm_2(...) or span(...)"
        wrong_sort("Real", call, scope, reporter, help, fix=wrapped(call.span, "norm_inf"))
        return None
    if name in FUNCTIONS:
        wrong_sort("Real", call, scope, reporter)
        return None
    _unknown_function(call, scope, reporter)
    return None


def _unknown_function(call: ast.Call, scope: Scope, reporter: Reporter) -> None:
    name, place = call.function.id, call.function.span
    if scope.metrics.find(name) is not None or scope.metrics.find_record(name) is not None:
        message, help = f"`{name}` is a metric, not a function", f"write mean({name})"
        reporter.error(codes.UNKNOWN_FUNCTION, message, place, help)
        return
    message, known = f"there is no function `{name}`", OTHER_NAMES.get(name.lower())
    level = _FINE_LEVEL.fullmatch(name)
    if level is not None and call.arguments:
        first = call.arguments[0].span
        written = f"quantile(0.{level[1]}, "
        fix = Fix(f"write `{written}...)`", (Edit(Span(place.start, first.start), written),), False)
        reporter.error(codes.UNKNOWN_FUNCTION, message, place, f"write {written}...)", fix=fix)
        return
    help = suggest(name, FUNCTIONS, "functions")
    if known is not None:
        help = did_you_mean(known, f"write `{known}(...)`")
    reporter.error(codes.UNKNOWN_FUNCTION, message, place, help)


def table_value(call: ast.Call, scope: Scope, reporter: Reporter) -> Typed | None:
    """Type `table(name)`, the threshold of a table; None after an error."""
    match call.arguments:
        case (ast.Name(id=name, span=span),):
            pass
        case _:
            arguments_error(call, reporter)
            return None
    if name not in scope.tables:
        close = nearest(name, scope.tables)
        reporter.error(
            codes.UNKNOWN_TABLE,
            f"no table is called `{name}`",
            span,
            suggest(name, scope.tables, "declared"),
            fix=None if close is None else replacement(span, close),
        )
        return None
    table = scope.tables[name]
    if table is None:
        return None
    dimension = next(u.dimension for u in UNITS.values() if str(u.dimension) == table.dimension)
    return Typed(ir.TableValue(name, table.dimension, call.span), dimension)


# --- arguments ------------------------------------------------------------------------------------


def block_name(expression: ast.Expression, scope: Scope, reporter: Reporter) -> str | None:
    """Return the block that an argument names."""
    if not isinstance(expression, ast.Name):
        wrong_sort(BLOCK_SORT, expression, scope, reporter)
        return None
    if not BLOCK.fullmatch(expression.id):
        reporter.error(
            codes.BLOCK_NAME,
            f"there is no block `{expression.id}`",
            expression.span,
            suggest(expression.id, _blocks_like(expression.id), "blocks, with any number"),
        )
        return None
    return expression.id


def _blocks_like(name: str) -> list[str]:
    """Return a block of each kind, with the number at the end of a name."""
    number = re.search(r"(?<![0-9])(?:0|[1-9][0-9]*)$", name)
    return [block.replace("0", number[0] if number else "0") for block in BLOCK_EXAMPLES]


def variable_name(expression: ast.Expression, scope: Scope, reporter: Reporter) -> str | None:
    """Return the bound variable that an argument names."""
    if not isinstance(expression, ast.Name):
        wrong_sort("bound variable", expression, scope, reporter)
        return None
    if expression.id not in scope.variables:
        bound = ", ".join(f"`{name}`" for name in scope.variables)
        reporter.error(
            codes.UNKNOWN_NAME,
            f"`{expression.id}` is not bound by a quantifier",
            expression.span,
            f"bound here: {bound}"
            if bound
            else f"write `forall {expression.id} in points(SLICE): ...`",
        )
        return None
    return expression.id


def check_input(
    block: str | None, variable: ast.Expression, scope: Scope, reporter: Reporter
) -> bool:
    """Report states as the input of a block that takes tokens: only inner blocks take states."""
    if block != "model" or not isinstance(variable, ast.Name):
        return True
    region = scope.regions.get(variable.id, "points")
    if region == "points":
        return True
    reporter.error(
        codes.REGION_OF_TOKENS,
        f"`model` takes a {SEQUENCE}, and `{variable.id}` is a {STATES} of a {region}",
        variable.span,
        "quantify over points(SLICE), or speak of a block inside the model",
        (Label(scope.variables[variable.id], "bound here"),),
    )
    return False
