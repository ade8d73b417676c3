"""Typing of measurements: quantities and their arithmetic, metrics and statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from kcdsl.check.expressions.names import (
    BLOCK,
    FUNCTIONS,
    PERCENTILE,
    STATISTICS,
    Scope,
    quantity,
    takes,
)
from kcdsl.check.expressions.sorts import described
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Edit, Fix, Label
from kcdsl.diagnostics.report import Reporter, insertion, nearest, replacement, suggest, wrapped
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import subterms
from kcdsl.metrics import MetricDefinition, Registry
from kcdsl.syntax import ast
from kcdsl.units import Dimension, describe, example, sample, takes_bare_numbers


class Typed(NamedTuple):
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
            codes.DIMENSION,
            f"a number without a unit meets {describe(other.dimension)}",
            bare.term.span,
            f"a number needs its unit here, such as {example(other.dimension)}",
            fix=_with_unit(bare.term, other.dimension),
        )
        return None
    reporter.error(
        codes.DIMENSION,
        f"{describe(left.dimension)} and {describe(right.dimension)} cannot be combined",
        span,
        _needed(left, right),
    )
    return None


def _needed(left: Typed, right: Typed) -> str | None:
    """Return a help text with the dimension that a number should have."""
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
        reporter.error(
            codes.DIVISION_BY_ZERO,
            "division by zero",
            span,
            help="divide by a number other than 0, or compare the numerator alone",
        )
        return None
    if isinstance(left.term, ir.Number) and isinstance(right.term, ir.Number):
        a, b = left.term.value, right.term.value
        value = {"+": a + b, "-": a - b, "*": a * b}.get(op)
        value = a / b if value is None else value
        return Typed(ir.Number(value, str(dimension), span), dimension, left.bare and right.bare)
    return Typed(ir.Arith(op, left.term, right.term, span), dimension)


def arithmetic(
    expression: ast.Num | ast.Minus | ast.Binary,
    typed: Callable[[ast.Expression], Typed | None],
    reporter: Reporter,
) -> Typed | None:
    """Type a number, or a sum, product or negation of parts that `typed` types."""
    span = expression.span
    match expression:
        case ast.Num():
            read = quantity(expression, reporter)
            if read is None:
                return None
            value, dimension, bare = read
            return Typed(ir.Number(value, str(dimension), span), dimension, bare)
        case ast.Minus(of=of):
            inner = typed(of)
            if inner is None:
                return None
            zero = ir.Number(Fraction(0), str(inner.dimension), span)
            return combine("-", Typed(zero, inner.dimension, inner.bare), inner, span, reporter)
        case ast.Binary(op=op, left=left, right=right):
            first, second = typed(left), typed(right)
            if first is None or second is None:
                return None
            return combine(op, first, second, span, reporter)


def metric_reference(name: ast.Name, scope: Scope, reporter: Reporter) -> MetricDefinition | None:
    """Return the metric of a name; report one that is no metric."""
    found = scope.metrics.find(name.id)
    if found is not None:
        return found
    if name.id in scope.variables:
        reporter.error(
            codes.WRONG_SORT,
            f"`{name.id}` is an input, not a number",
            name.span,
            f"write norm_inf(drift(block, {name.id}))",
        )
    elif BLOCK.fullmatch(name.id) or name.id in scope.slices:
        kind = "slice" if name.id in scope.slices else "block"
        reporter.error(
            codes.WRONG_SORT,
            f"`{name.id}` is a {kind}, not a number",
            name.span,
            help="compare a statistic of a metric, such as p99(kl); slices stand in `slices`, and "
            "blocks in drift(BLOCK, x)",
        )
    elif scope.metrics.find_record(name.id) is not None:
        reporter.error(
            codes.UNKNOWN_METRIC,
            f"`{name.id}` is a name of the record form",
            name.span,
            f"write {in_words(name.id, scope.metrics)}",
            fix=replacement(name.span, in_words(name.id, scope.metrics), safe=True),
        )
    elif name.id in scope.tables:
        reporter.error(
            codes.WRONG_SORT,
            f"`{name.id}` is a table, not a number",
            name.span,
            f"write table({name.id})",
            fix=wrapped(name.span, "table"),
        )
    else:
        names = scope.metrics.names()
        help = suggest(name.id, names, "metrics")
        close = nearest(name.id, names)
        if close is None and nearest(name.id, FUNCTIONS) is not None:
            help = f"did you mean `{nearest(name.id, FUNCTIONS)}(...)`?"
        reporter.error(codes.UNKNOWN_METRIC, f"there is no metric `{name.id}`", name.span, help)
    return None


def in_words(record_name: str, metrics: Registry) -> str:
    """Return the expression that a metric name of the record form stands for."""
    record = metrics.find_record(record_name)
    assert record is not None
    inner = f"abs({record.metric})" if record.magnitude else record.metric
    if record.statistic == "aggregate":
        return inner
    if record.statistic == "quantile":
        assert record.q is not None
        return f"p{record.q * 100}({inner})"
    return f"{record.statistic}({inner})"


def aggregate(name: ast.Name, scope: Scope, reporter: Reporter) -> Typed | None:
    """Return the type of an aggregate metric; report a metric that has a value for each unit."""
    definition = metric_reference(name, scope, reporter)
    if definition is None:
        return None
    if definition.kind != "aggregate":
        reporter.error(
            codes.STATISTIC_NOT_ALLOWED,
            f"`{name.id}` has one value for each {definition.counted}",
            name.span,
            f"say which statistic is meant, such as mean({name.id})",
            fix=wrapped(name.span, "mean") if not definition.signed else None,
        )
        return None
    of = ir.Metric(definition.name, name.span)
    return Typed(ir.Statistic("aggregate", of, None, name.span), definition.dimension)


def statistic(call: ast.Call, scope: Scope, reporter: Reporter) -> Typed | None:
    """Return the type of a statistic of a metric; report wrong arguments."""
    name, arguments = call.function.id, call.arguments
    kind, q = name, None
    percentile = PERCENTILE.fullmatch(name)
    if percentile is not None:
        kind, q = "quantile", Fraction(int(percentile[1]), 100)
    if not takes(call, reporter):
        return None
    if name == "quantile":
        q = _level(arguments[0], reporter)
        arguments = arguments[1:]
        if q is None:
            return None
    inner = pointwise(arguments[0], scope, reporter)
    if inner is None:
        return None
    if not _range_over(arguments[0], inner, scope, reporter):
        return None
    definitions = [scope.metrics[m.name] for m in metrics_of(inner.term)]
    for definition in definitions:
        if kind not in definition.statistics:
            allowed = ", ".join(sorted(definition.statistics - {"aggregate"}))
            reporter.error(
                codes.STATISTIC_NOT_ALLOWED,
                f"`{name}` is not a statistic of `{definition.name}`",
                call.function.span,
                f"write {definition.name} alone" if not allowed else f"statistics: {allowed}",
                fix=None if allowed else _unwrap_fix(call),
            )
            return None
    return Typed(ir.Statistic(kind, inner.term, q, call.span), inner.dimension)


def _unwrap_fix(call: ast.Call) -> Fix:
    """Return the fix that removes a function around its last argument."""
    inner = call.arguments[-1].span
    edits = (Edit(Span(call.span.start, inner.start), ""), Edit(Span(inner.end, call.span.end), ""))
    return Fix(f"remove `{call.function.id}`", edits, safe=False)


def _range_over(expression: ast.Expression, inner: Typed, scope: Scope, reporter: Reporter) -> bool:
    """Report an argument without values to range over, or with values of different units."""
    metrics = metrics_of(inner.term)
    if not metrics:
        reporter.error(
            codes.WRONG_SORT,
            f"a statistic ranges over a metric, not {described(expression, scope)}",
            expression.span,
            "name a metric, such as kl",
        )
        return False
    first, *others = ((metric, scope.metrics[metric.name]) for metric in metrics)
    for metric, definition in others:
        timed = ["timing" in d.needs for d in (first[1], definition)]
        if definition.counted == first[1].counted and timed[0] == timed[1]:
            continue
        what = [f"timed {first[1].counted}" if timed[0] else first[1].counted]
        what.append(f"timed {definition.counted}" if timed[1] else definition.counted)
        reporter.error(
            codes.WRONG_SORT,
            f"`{definition.name}` has one value per {what[1]} and `{first[1].name}` one per "
            f"{what[0]}, so they cannot be combined value by value",
            metric.span,
            "form the statistics first, such as mean(...) - mean(...)",
            (Label(first[0].span, f"one per {what[0]}"),),
        )
        return False
    return True


def _level(expression: ast.Expression, reporter: Reporter) -> Fraction | None:
    read = quantity(expression, reporter) if isinstance(expression, ast.Num) else None
    if read is None:
        if not isinstance(expression, ast.Num):
            reporter.error(
                codes.WRONG_SORT,
                "the level of a quantile is a number",
                expression.span,
                help="write it as quantile(0.95, kl)",
            )
        return None
    value, dimension, bare = read
    if not bare and str(dimension) != "ratio":
        reporter.error(
            codes.DIMENSION,
            "the level of a quantile is a share",
            expression.span,
            help="write it without a unit or in percent, such as 0.95 or 95%",
        )
        return None
    if not 0 < value < 1:
        reporter.error(
            codes.OUT_OF_RANGE,
            "the level of a quantile lies strictly between 0 and 1",
            expression.span,
            f"write {value}%"
            if bare and 1 < value < 100 and isinstance(expression, ast.Num)
            else "for the extremes write max(...) or min(...)",
        )
        return None
    return value


def pointwise(expression: ast.Expression, scope: Scope, reporter: Reporter) -> Typed | None:
    """Type the argument of a statistic: a metric, its magnitude, or arithmetic of them."""
    match expression:
        case ast.Name():
            definition = metric_reference(expression, scope, reporter)
            if definition is None:
                return None
            return Typed(ir.Metric(definition.name, expression.span), definition.dimension)
        case ast.Call(function=ast.Name(id="abs"), arguments=(only,), span=span):
            inner = pointwise(only, scope, reporter)
            return None if inner is None else Typed(ir.Abs(inner.term, span), inner.dimension)
        case ast.Num() | ast.Minus() | ast.Binary():
            return arithmetic(expression, lambda part: pointwise(part, scope, reporter), reporter)
        case _:
            reporter.error(
                codes.WRONG_SORT,
                f"a statistic ranges over a metric, not {described(expression, scope)}",
                expression.span,
                _instead(expression),
            )
            return None


def _instead(expression: ast.Expression) -> str | None:
    match expression:
        case ast.ComparisonChain():
            return "bound the metric itself, and say in `budget` which share may exceed the bound"
        case ast.Call(function=ast.Name(id=name)) if name in STATISTICS:
            return "a statistic is one number; compare it as it is"
        case ast.Call(function=ast.Name(id=name)) if name not in FUNCTIONS:
            close = nearest(name, FUNCTIONS)
            return None if close is None else f"did you mean `{close}(...)`?"
        case _:
            return None


def metrics_of(term: ir.Term) -> tuple[ir.Metric, ...]:
    """Return every metric in a term."""
    return tuple(part for part in subterms(term) if isinstance(part, ir.Metric))


def check_signs(
    term: ir.Term, metrics: Registry, reporter: Reporter, under_abs: bool = False
) -> None:
    """Report a signed metric that no `abs` covers."""
    match term:
        case ir.Metric(name=name, span=span):
            if metrics[name].signed and not under_abs:
                reporter.error(
                    codes.SIGNED_METRIC,
                    f"`{name}` takes both signs, and nothing bounds it from the other side",
                    span,
                    f"write abs({name})",
                    fix=wrapped(span, "abs"),
                )
        case ir.Abs(of=of):
            check_signs(of, metrics, reporter, True)
        case ir.Statistic(of=of):
            check_signs(of, metrics, reporter, under_abs)
        case ir.Arith(left=left, right=right):
            check_signs(left, metrics, reporter, under_abs)
            check_signs(right, metrics, reporter, under_abs)
        case _:
            return
