"""Typing of terms: from syntax to IR terms with their dimension.

Every function returns None after an error that it reported; callers treat None as poison and stay
silent, so one mistake gives one diagnostic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl.check.metrics import (
    ALIASES,
    METRICS,
    MetricDefinition,
    find_metric,
    find_record_metric,
)
from kcdsl.check.names import (
    BLOCK,
    DRIFTS,
    FUNCTIONS,
    NORMS,
    PERCENTILE,
    STATISTICS,
    Scope,
    arguments_error,
    block_name,
    quantity,
    sort_of,
    variable_name,
)
from kcdsl.check.report import Reporter, nearest, suggest
from kcdsl.check.units import (
    ONE,
    Dimension,
    describe,
    example,
    takes_bare_numbers,
)
from kcdsl.diagnostics.codes import (
    DIMENSION,
    DIVISION_BY_ZERO,
    OUT_OF_RANGE,
    SIGNED_METRIC,
    STATISTIC_NOT_ALLOWED,
    UNKNOWN_FUNCTION,
    UNKNOWN_METRIC,
    WRONG_SORT,
)
from kcdsl.ir import terms as ir
from kcdsl.source.text import Span
from kcdsl.syntax import ast


@dataclass(frozen=True, slots=True)
class Typed:
    """A term with its dimension; `bare` marks a number written without a unit."""

    term: ir.Term
    dimension: Dimension
    bare: bool = False


def drift(expression: ast.Expression, scope: Scope, reporter: Reporter) -> ir.Drift | None:
    """Type `drift(block, x)` or `measured_drift(block, x)`."""
    if not isinstance(expression, ast.Call) or expression.function.id not in DRIFTS:
        reporter.error(
            WRONG_SORT,
            f"a drift is needed here, not {sort_of(expression)}",
            expression.span,
            "norms take drift(block, x) or measured_drift(block, x)",
        )
        return None
    if len(expression.arguments) != 2:
        arguments_error(expression, reporter)
        return None
    block = block_name(expression.arguments[0], reporter)
    variable = variable_name(expression.arguments[1], scope, reporter)
    if block is None or variable is None:
        return None
    measured = expression.function.id == "measured_drift"
    return ir.Drift(block, variable, measured, expression.span)


def term(expression: ast.Expression, scope: Scope, reporter: Reporter) -> Typed | None:
    """Type a term; None after an error."""
    match expression:
        case ast.Num(span=span):
            read = quantity(expression, reporter)
            if read is None:
                return None
            value, dimension, bare = read
            return Typed(ir.Number(value, str(dimension), span), dimension, bare)
        case ast.Name():
            return _aggregate(expression, scope, reporter)
        case ast.Minus(of=of, span=span):
            inner = term(of, scope, reporter)
            if inner is None:
                return None
            zero = Typed(
                ir.Number(Fraction(0), str(inner.dimension), span), inner.dimension, inner.bare
            )
            return _combine("-", zero, inner, span, reporter)
        case ast.Binary(op=op, left=left, right=right, span=span):
            first, second = term(left, scope, reporter), term(right, scope, reporter)
            if first is None or second is None:
                return None
            return _combine(op, first, second, span, reporter)
        case ast.Call():
            return _call(expression, scope, reporter)
        case _:
            reporter.error(
                WRONG_SORT,
                f"a number is needed here, not {sort_of(expression)}",
                expression.span,
            )
            return None


def _call(call: ast.Call, scope: Scope, reporter: Reporter) -> Typed | None:
    name = call.function.id
    if name in NORMS:
        if len(call.arguments) != 1:
            arguments_error(call, reporter)
            return None
        inner = drift(call.arguments[0], scope, reporter)
        return None if inner is None else Typed(ir.Norm(NORMS[name], inner, call.span), ONE)
    if name == "abs":
        if len(call.arguments) != 1:
            arguments_error(call, reporter)
            return None
        of = term(call.arguments[0], scope, reporter)
        return None if of is None else Typed(ir.Abs(of.term, call.span), of.dimension)
    if name in STATISTICS or PERCENTILE.fullmatch(name):
        return _statistic(call, scope, reporter)
    if name in DRIFTS:
        reporter.error(
            WRONG_SORT,
            f"`{name}(...)` is a vector, not a number",
            call.span,
            f"write norm_inf({name}(...)), norm_2(...) or span(...)",
        )
        return None
    if name in FUNCTIONS:
        reporter.error(WRONG_SORT, f"`{name}(...)` is not a number", call.span)
        return None
    metric = find_metric(name) is not None or find_record_metric(name) is not None
    reporter.error(
        UNKNOWN_FUNCTION,
        f"`{name}` is a metric, not a function" if metric else f"there is no function `{name}`",
        call.function.span,
        f"write mean({name})" if metric else suggest(name, FUNCTIONS, "functions"),
    )
    return None


def _combine(op: str, left: Typed, right: Typed, span: Span, reporter: Reporter) -> Typed | None:
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
    help = None
    if bare is not None and example(other.dimension) is not None:
        help = f"a number needs its unit here, such as {example(other.dimension)}"
        reporter.error(
            DIMENSION,
            f"a number without a unit meets {describe(other.dimension)}",
            bare.term.span,
            help,
        )
        return None
    reporter.error(
        DIMENSION,
        f"{describe(left.dimension)} and {describe(right.dimension)} cannot be combined",
        span,
        help,
    )
    return None


def _metric_reference(name: ast.Name, scope: Scope, reporter: Reporter) -> MetricDefinition | None:
    found = find_metric(name.id)
    if found is not None:
        return found
    if name.id in scope.variables:
        reporter.error(
            WRONG_SORT,
            f"`{name.id}` is an input, not a number",
            name.span,
            f"write norm_inf(drift(block, {name.id}))",
        )
    elif BLOCK.fullmatch(name.id) or name.id in scope.slices:
        kind = "slice" if name.id in scope.slices else "block"
        reporter.error(WRONG_SORT, f"`{name.id}` is a {kind}, not a number", name.span)
    elif find_record_metric(name.id) is not None:
        reporter.error(
            UNKNOWN_METRIC,
            f"`{name.id}` is a name of the record form",
            name.span,
            f"write {in_words(name.id)}",
        )
    else:
        names = [*METRICS, *ALIASES]
        help = suggest(name.id, names, "metrics")
        close = nearest(name.id, names)
        if close is None and nearest(name.id, FUNCTIONS) is not None:
            help = f"did you mean `{nearest(name.id, FUNCTIONS)}(...)`?"
        reporter.error(UNKNOWN_METRIC, f"there is no metric `{name.id}`", name.span, help)
    return None


def in_words(record_name: str) -> str:
    """Return the expression that a metric name of the record form stands for."""
    record = find_record_metric(record_name)
    assert record is not None
    inner = f"abs({record.metric})" if record.magnitude else record.metric
    if record.statistic == "aggregate":
        return inner
    if record.statistic == "quantile":
        assert record.q is not None
        return f"p{record.q * 100}({inner})"
    return f"{record.statistic}({inner})"


def _aggregate(name: ast.Name, scope: Scope, reporter: Reporter) -> Typed | None:
    definition = _metric_reference(name, scope, reporter)
    if definition is None:
        return None
    if definition.kind != "aggregate":
        reporter.error(
            STATISTIC_NOT_ALLOWED,
            f"`{name.id}` has one value for each {definition.counted}",
            name.span,
            f"say which statistic is meant, such as mean({name.id})",
        )
        return None
    of = ir.Metric(definition.name, name.span)
    return Typed(ir.Statistic("aggregate", of, None, name.span), definition.dimension)


def _statistic(call: ast.Call, scope: Scope, reporter: Reporter) -> Typed | None:
    name, arguments = call.function.id, call.arguments
    kind, q = name, None
    percentile = PERCENTILE.fullmatch(name)
    if percentile is not None:
        kind, q = "quantile", Fraction(int(percentile[1]), 100)
    if name == "quantile":
        if len(arguments) != 2:
            arguments_error(call, reporter)
            return None
        q = _level(arguments[0], reporter)
        arguments = arguments[1:]
        if q is None:
            return None
    if len(arguments) != 1:
        arguments_error(call, reporter)
        return None
    inner = pointwise(arguments[0], scope, reporter)
    if inner is None:
        return None
    definitions = [METRICS[m.name] for m in metrics_of(inner.term)]
    for definition in definitions:
        if kind not in definition.statistics:
            allowed = ", ".join(sorted(definition.statistics - {"aggregate"}))
            reporter.error(
                STATISTIC_NOT_ALLOWED,
                f"`{name}` is not a statistic of `{definition.name}`",
                call.function.span,
                f"write {definition.name} alone" if not allowed else f"statistics: {allowed}",
            )
            return None
    return Typed(ir.Statistic(kind, inner.term, q, call.span), inner.dimension)


def _level(expression: ast.Expression, reporter: Reporter) -> Fraction | None:
    read = quantity(expression, reporter) if isinstance(expression, ast.Num) else None
    if read is None:
        if not isinstance(expression, ast.Num):
            reporter.error(WRONG_SORT, "the level of a quantile is a number", expression.span)
        return None
    value, dimension, bare = read
    if not bare and str(dimension) != "ratio":
        reporter.error(DIMENSION, "the level of a quantile is a share", expression.span)
        return None
    if not 0 < value < 1:
        reporter.error(
            OUT_OF_RANGE,
            "the level of a quantile lies strictly between 0 and 1",
            expression.span,
            "for the extremes write max(...) or min(...)",
        )
        return None
    return value


def pointwise(expression: ast.Expression, scope: Scope, reporter: Reporter) -> Typed | None:
    """Type what a statistic ranges over: a metric, its magnitude, or arithmetic of them."""
    match expression:
        case ast.Name():
            definition = _metric_reference(expression, scope, reporter)
            if definition is None:
                return None
            return Typed(ir.Metric(definition.name, expression.span), definition.dimension)
        case ast.Call(function=ast.Name(id="abs"), arguments=(only,), span=span):
            inner = pointwise(only, scope, reporter)
            return None if inner is None else Typed(ir.Abs(inner.term, span), inner.dimension)
        case ast.Num(span=span):
            return term(expression, scope, reporter)
        case ast.Binary(op=op, left=left, right=right, span=span):
            first = pointwise(left, scope, reporter)
            second = pointwise(right, scope, reporter)
            if first is None or second is None:
                return None
            return _combine(op, first, second, span, reporter)
        case _:
            reporter.error(
                WRONG_SORT,
                f"a statistic ranges over a metric, not {sort_of(expression)}",
                expression.span,
            )
            return None


def metrics_of(term: ir.Term) -> tuple[ir.Metric, ...]:
    """Return every metric in a term."""
    match term:
        case ir.Metric():
            return (term,)
        case ir.Statistic(of=of) | ir.Abs(of=of):
            return metrics_of(of)
        case ir.Arith(left=left, right=right):
            return metrics_of(left) + metrics_of(right)
        case _:
            return ()


def check_signs(term: ir.Term, reporter: Reporter, under_abs: bool = False) -> None:
    """Report a signed metric that no `abs` covers."""
    match term:
        case ir.Metric(name=name, span=span):
            if METRICS[name].signed and not under_abs:
                reporter.error(
                    SIGNED_METRIC,
                    f"`{name}` takes both signs, and nothing bounds it from the other side",
                    span,
                    f"write abs({name})",
                )
        case ir.Abs(of=of):
            check_signs(of, reporter, True)
        case ir.Statistic(of=of):
            check_signs(of, reporter, under_abs)
        case ir.Arith(left=left, right=right):
            check_signs(left, reporter, under_abs)
            check_signs(right, reporter, under_abs)
        case _:
            return
