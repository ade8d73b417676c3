"""The record form of clauses: `metric`, `threshold`, `op`, `delta` and `over`; and budgets."""

from __future__ import annotations

import re
from fractions import Fraction

from kcdsl.check.expressions.bounds import check_threshold
from kcdsl.check.expressions.measurements import Typed, align, check_signs, in_words, metrics_of
from kcdsl.check.expressions.names import Scope, quantity
from kcdsl.check.expressions.sorts import described
from kcdsl.check.expressions.terms import table_value
from kcdsl.check.sections.structure import RawClause
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Fix, Label
from kcdsl.diagnostics.report import (
    Reporter,
    Suggestion,
    did_you_mean,
    nearest,
    replacement,
    suggest,
)
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import terms_of
from kcdsl.metrics import PREFIX, RECORD_NAMES, RecordMetric, Registry
from kcdsl.source.removal import add_field
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax import ast
from kcdsl.syntax.parser import parse_budget, parse_expression, parse_quantity
from kcdsl.units import UNITS

_OPERATORS = ("<=", "<", ">=", ">", "==")
_TABLE = re.compile(r"\s*table\s*\(")


def record_formula(
    raw: RawClause, scope: Scope, reporter: Reporter, against: bool
) -> ir.Compare | None:
    """Return the comparison that a record states; None after an error."""
    name = raw.scalar("metric")
    if name is None:
        reporter.error(
            codes.WRONG_KIND,
            "`metric` takes the name of a metric",
            raw.span,
            help="such as `metric: p99_kl`",
        )
        return None
    left = _subject(name, scope, reporter)
    right = _threshold(raw, name, left, scope, reporter)
    if left is None or right is None:
        return None
    aligned = align(left[1], right, right.term.span, reporter)
    if aligned is None:
        return None
    op = _operator(raw, left[0], scope, reporter)
    if op is None:
        return None
    compare = ir.Compare(op.text, aligned[0].term, aligned[1].term, name.span)
    check_signs(compare.left, scope.metrics, reporter)
    against = against or op.text[0] != _implied(left[0], scope)[0]
    check_threshold(compare, op.span, scope, reporter, 1, against)
    return compare


def _subject(name: Scalar, scope: Scope, reporter: Reporter) -> tuple[RecordMetric, Typed] | None:
    metrics = scope.metrics
    record = metrics.find_record(name.text)
    if record is None:
        if metrics.find(name.text) is not None:
            choices = ", ".join(n for n in RECORD_NAMES if n.endswith(name.text))
            reporter.error(
                codes.STATISTIC_NOT_ALLOWED,
                f"`{name.text}` needs a statistic",
                name.span,
                f"such as {choices or 'mean_' + name.text}",
            )
            return None
        names = {*RECORD_NAMES, *(d.name for d in metrics.definitions() if d.kind == "aggregate")}
        reporter.error(
            codes.UNKNOWN_METRIC,
            f"there is no metric `{name.text}`",
            name.span,
            _similar(name.text, metrics) or suggest(name.text, sorted(names), "metrics"),
        )
        return None
    definition = metrics[record.metric]
    if record.statistic not in definition.statistics:
        reporter.error(
            codes.STATISTIC_NOT_ALLOWED,
            f"`{in_words(name.text, metrics)}` is not a statistic of `{definition.name}`",
            name.span,
            help=f"statistics: {', '.join(sorted(definition.statistics)) or 'none'}",
        )
        return None
    inner: ir.Term = ir.Metric(definition.name, name.span)
    if record.magnitude:
        inner = ir.Abs(inner, name.span)
    statistic = ir.Statistic(record.statistic, inner, record.q, name.span)
    return record, Typed(statistic, definition.dimension)


def _similar(name: str, metrics: Registry) -> Suggestion | None:
    """Return a suggestion with the same statistic and a similar metric."""
    begun = re.match(rf"(?:{PREFIX.pattern})*", name)
    names = {f"{begun[0] if begun else ''}{metric}" for metric in metrics.names()}
    close = nearest(name, sorted(names))
    if close is None or metrics.find_record(close) is None:
        return None
    return did_you_mean(close, f"did you mean `{close}`?")


def _threshold(
    raw: RawClause,
    name: Scalar,
    left: tuple[RecordMetric, Typed] | None,
    scope: Scope,
    reporter: Reporter,
) -> Typed | None:
    scalar = raw.scalar("threshold")
    if scalar is None:
        if raw.node("threshold") is None:
            reporter.error(
                codes.MISSING_FIELD,
                "a record needs the field `threshold`",
                name.span,
                "add `threshold: NUMBER`, or `threshold: table(NAME)`",
            )
        else:
            reporter.error(
                codes.WRONG_KIND,
                "`threshold` takes a number",
                raw.span,
                help="such as `threshold: 0.02`, with the unit where the metric has one",
            )
        return None
    if _TABLE.match(scalar.text):
        return _from_table(scalar, scope, reporter)
    number = parse_quantity(reporter.source, scalar, reporter.sink)
    read = quantity(number, reporter) if number is not None else None
    if number is None or read is None:
        return None
    value, dimension, bare = read
    if bare and left is not None and left[0].unit is not None:
        unit = UNITS[left[0].unit]
        value, dimension, bare = value * unit.factor, unit.dimension, False
    return Typed(ir.Number(value, str(dimension), number.span), dimension, bare)


def _from_table(scalar: Scalar, scope: Scope, reporter: Reporter) -> Typed | None:
    parsed = parse_expression(reporter.source, scalar, reporter.sink)
    if isinstance(parsed, ast.Call) and parsed.function.id == "table":
        return table_value(parsed, scope, reporter)
    if parsed is not None:
        reporter.error(
            codes.WRONG_KIND,
            f"`threshold` takes a number or a table and is {described(parsed, scope)}",
            parsed.span,
            "write `threshold: table(NAME)`",
        )
    return None


def _implied(record: RecordMetric, scope: Scope) -> str:
    """Return the operator that bounds a metric on its harmful side."""
    lower = record.magnitude or scope.metrics[record.metric].better == "lower"
    return "<=" if lower else ">="


def _operator(
    raw: RawClause, record: RecordMetric, scope: Scope, reporter: Reporter
) -> Scalar | None:
    implied = _implied(record, scope)
    better = "lower" if implied == "<=" else "higher"
    node = raw.node("op")
    if node is None:
        threshold = raw.scalar("threshold")
        assert threshold is not None
        return Scalar(implied, implied, "plain", threshold.span)
    if not isinstance(node, Scalar) or node.text not in _OPERATORS:
        reporter.error(
            codes.NOT_ALLOWED,
            "`op` takes a comparison operator",
            node.span,
            f"one of {' '.join(_OPERATORS)}, in quotation marks",
        )
        return None
    if node.text[0] != implied[0] and node.text != "==":
        reporter.warning(
            codes.AGAINST_DIRECTION,
            f"`{record.metric}` is better when {better}, and `op` bounds it from the other side",
            node.span,
            f"leave `op` out to get `{implied}`",
        )
    return node


def share(scalar: Scalar, reporter: Reporter, what: str) -> Fraction | None:
    """Read a share such as `0.01` or `1%`; None after an error."""
    number = parse_quantity(reporter.source, scalar, reporter.sink)
    read = quantity(number, reporter) if number is not None else None
    if number is None or read is None:
        return None
    value, dimension, _ = read
    if dimension.exponents or not 0 <= value < 1:
        reporter.error(
            codes.OUT_OF_RANGE,
            f"{what} is a share, at least 0 and below 1",
            number.span,
            help="write it as 1% or 0.01",
        )
        return None
    return value


_BUDGET_FIELDS = ("budget", "delta", "over")
_COUNTED = {"requests": "requests", "samples": "requests", "windows": "windows"}


def read_budget(raw: RawClause, reporter: Reporter) -> tuple[ir.Budget | None, Span | None]:
    """Return the budget (None where hard) and the span where one is stated."""
    node = raw.node("budget")
    if node is not None:
        if not isinstance(node, Scalar):
            reporter.error(
                codes.BUDGET_UNIT,
                "a budget is a share `of requests` or `of windows`",
                node.span,
                help="such as `budget: 1% of requests`",
            )
            return None, None
        parsed = parse_budget(reporter.source, node, reporter.sink)
        read = quantity(parsed.rate, reporter) if parsed is not None else None
        if parsed is None or read is None:
            return None, None
        unit = _counted(parsed.unit.id, parsed.unit.span, reporter)
        rate, dimension, _ = read
        if dimension.exponents or not 0 <= rate < 1:
            percent = parsed.rate.unit is None and 1 <= rate < 100
            reporter.error(
                codes.OUT_OF_RANGE,
                "a budget is a share, at least 0 and below 1",
                parsed.rate.span,
                f"write `{rate}%` for a percentage" if percent else None,
            )
            return None, None
        return _make_budget(rate, unit), node.span
    return _record_budget(raw, reporter)


def _record_budget(raw: RawClause, reporter: Reporter) -> tuple[ir.Budget | None, Span | None]:
    delta, over = raw.node("delta"), raw.node("over")
    unit = None
    if over is not None:
        text = over.text if isinstance(over, Scalar) else ""
        unit = _counted(text, over.span, reporter)
    if delta is None:
        if over is not None:
            reporter.error(
                codes.MISSING_FIELD,
                "`over` without `delta` says nothing",
                over.span,
                help="add `delta: 1%`, or leave `over` out",
            )
        return None, None
    if not isinstance(delta, Scalar):
        reporter.error(
            codes.WRONG_KIND,
            f"`delta` takes a share and is {delta.kind}",
            delta.span,
            help="such as `delta: 1%`",
        )
        return None, None
    rate = share(delta, reporter, "`delta`")
    if rate is None or rate == 0:
        return None, None
    if over is None:
        reporter.error(
            codes.BUDGET_UNIT,
            "`delta` does not say what it counts",
            delta.span,
            "add `over: requests` or `over: windows`",
            fix=add_field(reporter.source, raw.body, "delta", "over: windows"),
        )
        return None, None
    return _make_budget(rate, unit), delta.span


def _make_budget(rate: Fraction, unit: str | None) -> ir.Budget | None:
    return None if rate == 0 or unit is None else ir.Budget(rate, unit)


def _counted(name: str, span: Span, reporter: Reporter) -> str | None:
    unit = _COUNTED.get(name)
    if unit is None:
        reporter.error(
            codes.BUDGET_UNIT, f"a budget cannot count `{name}`", span, suggest(name, _COUNTED)
        )
    return unit


def check_budget(
    raw: RawClause,
    requirement: ir.Formula,
    budget: ir.Budget | None,
    span: Span | None,
    metrics: Registry,
    reporter: Reporter,
) -> None:
    """Report a budget that counts nothing, or counts the units that the statistic ranges over."""
    if budget is None or span is None:
        return
    statistics = [t for t in terms_of(requirement) if isinstance(t, ir.Statistic)]
    if not statistics:
        reporter.error(
            codes.BUDGET_ON_PROOF,
            "a clause about every input or every record has no budget",
            span,
            "leave the budget out",
            fix=raw.without(reporter.source, _BUDGET_FIELDS),
        )
        return
    if budget.unit != "requests":
        return
    for statistic in statistics:
        counted = [metrics[m.name].counted for m in metrics_of(statistic)]
        if statistic.kind == "aggregate":
            reporter.error(
                codes.BUDGET_UNIT,
                "an aggregate metric is one number for a window, not for a request",
                span,
                "count the budget `of windows`",
                (Label(statistic.span, "aggregate"),),
                fix=_of_windows(raw, reporter),
            )
        elif "token" not in counted:
            reporter.error(
                codes.PERCENTILE_WITH_BUDGET,
                "the statistic already ranges over requests, so a budget of requests "
                "allows a share twice",
                span,
                "drop the budget, or count it `of windows`",
                (Label(statistic.span, "ranges over requests"),),
                fix=raw.without(reporter.source, _BUDGET_FIELDS),
            )
        elif statistic.kind == "quantile":
            reporter.warning(
                codes.PERCENTILE_WITH_BUDGET,
                "a budget of requests judges each request by itself, so the percentile no longer "
                "ranges over the requests of the slice",
                span,
                "drop the budget to bound the percentile over all requests, or count it "
                "`of windows`",
            )


def _of_windows(raw: RawClause, reporter: Reporter) -> Fix | None:
    """Return the fix that changes the unit of the budget to windows."""
    node = raw.scalar("over") or raw.scalar("budget")
    if node is None:
        return None
    text = reporter.source.text[node.span.start : node.span.end]
    found = [(text.rfind(word), word) for word in ("requests", "samples")]
    at, word = max(found)
    start = node.span.start + at
    return replacement(Span(start, start + len(word)), "windows") if at >= 0 else None
