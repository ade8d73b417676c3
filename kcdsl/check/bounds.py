"""Checks of one comparison: its direction, its tail, and whether it says anything at all."""

from __future__ import annotations

from fractions import Fraction

from kcdsl.check.metrics import METRICS, MetricDefinition
from kcdsl.check.report import Reporter
from kcdsl.diagnostics.codes import AGAINST_DIRECTION, VACUOUS, WRONG_TAIL
from kcdsl.ir import terms as ir
from kcdsl.source.text import Span

_UPPER = {"<=", "<"}
_LOWER = {">=", ">"}


def check_compare(
    compare: ir.Compare, op_span: Span, reporter: Reporter, side: int, against: bool
) -> bool:
    """Report a comparison that bounds the harmless side, or that cannot fail or hold.

    `side` as in `kcdsl.check.typing.formula`. Returns False where the comparison says nothing
    about the kernels at all, so that later checks have nothing to look at.
    """
    if isinstance(compare.left, ir.Number) and isinstance(compare.right, ir.Number):
        reporter.error(
            VACUOUS,
            "the comparison of two constants says nothing about the kernels",
            compare.span,
            "compare a statistic of a metric, or a norm of a drift, with a number",
        )
        return False
    if not isinstance(compare.right, ir.Number) or side == 0:
        return True
    effective = compare.op
    if side < 0:
        effective = {"<=": ">", "<": ">=", ">=": "<", ">": "<="}.get(compare.op, compare.op)
    better, subject = _direction(compare.left)
    harmless = effective in (_LOWER if better == "lower" else _UPPER)
    if better is not None and harmless and not against:
        reporter.error(
            AGAINST_DIRECTION,
            f"{subject} is better when {better}, and the comparison bounds it from the other side",
            op_span,
            "turn the comparison round, or add `override: direction` to the clause",
        )
        return True
    if not against:
        _check_tail(compare.left, reporter)
    _check_vacuous(compare.left, effective, compare.right.value, compare.span, reporter)
    return True


def _direction(term: ir.Term) -> tuple[str | None, str]:
    """Return the better direction of a term, None where it has none, and its name."""
    match term:
        case ir.Norm():
            return "lower", "the norm of a drift"
        case ir.Statistic(of=ir.Metric(name=name)) if not METRICS[name].signed:
            return METRICS[name].better, f"`{name}`"
        case ir.Statistic(of=ir.Abs()) | ir.Abs():
            return "lower", "a magnitude"
        case ir.Arith(op="*" | "/", left=left, right=ir.Number(value=value)) if value > 0:
            return _direction(left)
        case ir.Arith(op="*", left=ir.Number(value=value), right=right) if value > 0:
            return _direction(right)
        case ir.Arith(op="*" | "/", left=left, right=ir.Number(value=value)) if value < 0:
            return _opposite(left)
        case ir.Arith(op="*", left=ir.Number(value=value), right=right) if value < 0:
            return _opposite(right)
        case ir.Arith(op="+" | "-", left=left, right=ir.Number()):
            return _direction(left)
        case ir.Arith(op="+", left=ir.Number(), right=right):
            return _direction(right)
        case ir.Arith(op="-", left=ir.Number(), right=right):
            return _opposite(right)
        case _:
            return None, "the term"


def _opposite(term: ir.Term) -> tuple[str | None, str]:
    better, subject = _direction(term)
    turned = {"lower": "higher", "higher": "lower"}.get(better or "")
    return turned, f"the term with {subject}"


def _check_tail(term: ir.Term, reporter: Reporter) -> None:
    match term:
        case ir.Statistic(kind="quantile", of=of, q=q, span=span) if q is not None:
            better = "lower"
            if isinstance(of, ir.Metric):
                better = METRICS[of.name].better
            if better == "higher" and q > Fraction(1, 2):
                advice = f"quantile({1 - q}, ...)" if q < 1 else "min(...)"
                percent = (1 - q) * 100
                if percent.denominator == 1:
                    advice = f"p{percent}(...)"
                _tail(reporter, span, "best", f"write {advice} or min(...)")
            if better == "lower" and q < Fraction(1, 2):
                _tail(reporter, span, "best", f"write quantile({float(1 - q):g}, ...) or max(...)")
        case ir.Statistic(kind="max", of=ir.Metric(name=name), span=span):
            if METRICS[name].better == "higher":
                _tail(reporter, span, "best", "write min(...)")
        case ir.Statistic(kind="min", of=of, span=span):
            if not isinstance(of, ir.Metric) or METRICS[of.name].better == "lower":
                _tail(reporter, span, "best", "write max(...)")
        case _:
            return


def _tail(reporter: Reporter, span: Span, which: str, help: str) -> None:
    reporter.error(WRONG_TAIL, f"the statistic looks at the {which} values only", span, help)


def _check_vacuous(
    term: ir.Term, op: str, threshold: Fraction, span: Span, reporter: Reporter
) -> None:
    low, high = _range(term)
    always = never = False
    if op in _UPPER:
        always = high is not None and (threshold > high or (threshold == high and op == "<="))
        never = low is not None and (threshold < low or (threshold == low and op == "<"))
    elif op in _LOWER:
        always = low is not None and (threshold < low or (threshold == low and op == ">="))
        never = high is not None and (threshold > high or (threshold == high and op == ">"))
    elif op == "==":
        never = (low is not None and threshold < low) or (high is not None and threshold > high)
    if always or never:
        word = "always holds" if always else "can never hold"
        limits = f"the term lies in [{_end(low, '-inf')}, {_end(high, 'inf')}]"
        reporter.error(VACUOUS, f"the comparison {word}: {limits}", span)


def _end(value: Fraction | None, otherwise: str) -> str:
    return otherwise if value is None else str(value)


def _range(term: ir.Term) -> tuple[Fraction | None, Fraction | None]:
    match term:
        case ir.Norm():
            return Fraction(0), None
        case ir.Abs(of=of):
            return Fraction(0), _range(of)[1] if _range(of)[0] == 0 else None
        case ir.Statistic(of=ir.Metric(name=name)):
            return _metric_range(METRICS[name])
        case ir.Statistic(of=ir.Abs()):
            return Fraction(0), None
        case _:
            return None, None


def _metric_range(metric: MetricDefinition) -> tuple[Fraction | None, Fraction | None]:
    if metric.name == "w_log_w":
        return Fraction(0), None
    return (Fraction(0) if metric.nonnegative else None), metric.upper
