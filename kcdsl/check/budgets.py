"""Budgets: the allowed exceedance of a clause, and what it counts."""

from __future__ import annotations

from fractions import Fraction

from kcdsl.check.measurements import metrics_of
from kcdsl.check.names import quantity
from kcdsl.check.records import share
from kcdsl.check.report import Reporter, add_field, replacement, suggest
from kcdsl.check.structure import RawClause
from kcdsl.diagnostics.codes import (
    BUDGET_ON_PROOF,
    BUDGET_UNIT,
    MISSING_FIELD,
    OUT_OF_RANGE,
    PERCENTILE_WITH_BUDGET,
    WRONG_KIND,
)
from kcdsl.diagnostics.model import Fix, Label
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.walk import terms_of
from kcdsl.metrics import Registry
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax.parser import parse_budget

_BUDGET_FIELDS = ("budget", "delta", "over")
_COUNTED = {"requests": "requests", "samples": "requests", "windows": "windows"}


def read_budget(raw: RawClause, reporter: Reporter) -> tuple[ir.Budget | None, Span | None]:
    """Return the budget (None where hard) and the place where one is stated."""
    node = raw.node("budget")
    if node is not None:
        if not isinstance(node, Scalar):
            reporter.error(
                BUDGET_UNIT, "a budget is a share `of requests` or `of windows`", node.span
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
                OUT_OF_RANGE,
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
            reporter.error(MISSING_FIELD, "`over` without `delta` says nothing", over.span)
        return None, None
    if not isinstance(delta, Scalar):
        reporter.error(WRONG_KIND, f"`delta` takes a share and is {delta.kind}", delta.span)
        return None, None
    rate = share(delta, reporter, "`delta`")
    if rate is None or rate == 0:
        return None, None
    if over is None:
        reporter.error(
            BUDGET_UNIT,
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
            BUDGET_UNIT, f"a budget cannot count `{name}`", span, suggest(name, _COUNTED)
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
    """Report a budget that counts nothing, or counts what the statistic counted already."""
    if budget is None or span is None:
        return
    statistics = [t for t in terms_of(requirement) if isinstance(t, ir.Statistic)]
    if not statistics:
        reporter.error(
            BUDGET_ON_PROOF,
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
                BUDGET_UNIT,
                "an aggregate metric is one number for a window, not for a request",
                span,
                "count the budget `of windows`",
                (Label(statistic.span, "aggregate"),),
                fix=_of_windows(raw, reporter),
            )
        elif "token" not in counted:
            reporter.error(
                PERCENTILE_WITH_BUDGET,
                "the statistic already ranges over requests, so a budget of requests "
                "allows a share twice",
                span,
                "drop the budget, or count it `of windows`",
                (Label(statistic.span, "ranges over requests"),),
                fix=raw.without(reporter.source, _BUDGET_FIELDS),
            )
        elif statistic.kind == "quantile":
            reporter.warning(
                PERCENTILE_WITH_BUDGET,
                "a budget of requests judges each request by itself, so the percentile no longer "
                "ranges over the requests of the slice",
                span,
                "drop the budget to bound the percentile over all requests, or count it "
                "`of windows`",
            )


def _of_windows(raw: RawClause, reporter: Reporter) -> Fix | None:
    """Return the fix that lets the budget count windows."""
    node = raw.scalar("over") or raw.scalar("budget")
    if node is None:
        return None
    text = reporter.source.text[node.span.start : node.span.end]
    found = [(text.rfind(word), word) for word in ("requests", "samples")]
    at, word = max(found)
    start = node.span.start + at
    return replacement(Span(start, start + len(word)), "windows") if at >= 0 else None
