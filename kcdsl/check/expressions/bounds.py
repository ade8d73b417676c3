"""Checks of one comparison: its direction, its tail, and whether it is vacuous.

A comparison is read as `left - right <= 0` (or `< 0`, after `>=` is reversed). A measured quantity
has *the right direction* if a worse value makes that harder to satisfy, and *the wrong direction*
if it makes it easier. If all are wrong, it is an error. If some are wrong or unknown, a warning
lists them, because a clause that compares kernels with themselves bounds no drift.

A *leaf* is a statistic of a metric, or the norm of a drift. Its *polarity* is 1 where the term
grows with it, -1 where it falls, and None where neither can be shown. Sums and differences keep
the polarity of their parts; a product needs the sign of its other factor, a quotient that of both,
and signs come from the ranges of the metrics. Every statistic grows with the values it ranges over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from kcdsl.check.expressions.names import Scope
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Fix, Label
from kcdsl.diagnostics.report import Reporter, replacement
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import NEGATED, subterms
from kcdsl.logic.relations import Interval, interval
from kcdsl.metrics import Registry

_UPPER = {"<=", "<"}
_LOWER = {">=", ">"}
_WRITTEN = re.compile(r"p[0-9]+(?=[ ]*\()")
_INSTEAD = re.compile(r"write (p[0-9]+)\(")
_PLAIN = re.compile(r"[0-9.]+")


def check_compare(
    compare: ir.Compare,
    op_span: Span,
    metrics: Registry,
    reporter: Reporter,
    side: int,
    against: bool,
) -> bool:
    """Report a comparison that bounds the harmless side, or that cannot fail or hold.

    `side` as in `kcdsl.check.expressions.statements.formula`. Returns False where the comparison
    has no measured quantity, so that later checks do not apply.
    """
    if isinstance(compare.left, ir.Number) and isinstance(compare.right, ir.Number):
        reporter.error(
            codes.VACUOUS,
            "the comparison of two constants says nothing about the kernels",
            compare.span,
            "compare a statistic of a metric, or a norm of a drift, with a number",
        )
        return False
    if side == 0:
        return True
    op = compare.op if side > 0 else NEGATED.get(compare.op, compare.op)
    if (
        not against
        and op in _UPPER | _LOWER
        and not _check_direction(compare, op, op_span, metrics, reporter)
    ):
        return True
    _check_vacuous(compare, op, metrics, reporter)
    return True


def _check_direction(
    compare: ir.Compare, op: str, op_span: Span, metrics: Registry, reporter: Reporter
) -> bool:
    """Report the direction and the tail; False where the whole comparison has the wrong
    direction."""
    bounded = 1 if op in _UPPER else -1
    found = [*leaves(compare.left, metrics, bounded), *leaves(compare.right, metrics, -bounded)]
    judged = [leaf for leaf in found if not _is_signed(leaf, metrics)]
    ways = [_way(leaf) for leaf in judged]
    if judged and all(way == -1 for way in ways):
        subject, better = judged[0].subject, judged[0].better
        one = not isinstance(compare.left, ir.Arith) and len(judged) == 1
        reporter.error(
            codes.AGAINST_DIRECTION,
            f"{subject} is better when {better}, and the comparison "
            f"{'bounds it from the other side' if one else 'holds the easier the worse it gets'}",
            op_span,
            "turn the comparison round, or add `override: direction` to the clause",
            fix=_turned(reporter.source, op_span),
        )
        return False
    doubtful = [leaf for leaf, way in zip(judged, ways, strict=True) if way != 1]
    if doubtful and not any(_is_claimed(leaf) for leaf in judged):
        _report_mixed(compare, doubtful, reporter)
    _check_tails([leaf for leaf, way in zip(judged, ways, strict=True) if way == 1], reporter)
    return True


def _turned(source: SourceFile, op_span: Span) -> Fix | None:
    """Return the fix that reverses a comparison; None where no operator is written there."""
    op = source.text[op_span.start : op_span.end]
    turned = op.replace("<", "\0").replace(">", "<").replace("\0", ">")
    return replacement(op_span, turned) if turned != op and op in _UPPER | _LOWER else None


def _is_signed(leaf: Leaf, metrics: Registry) -> bool:
    """Return whether a leaf is a signed metric without `abs`, which is reported separately."""
    return isinstance(leaf.term, ir.Metric) and metrics[leaf.term.name].signed


def _is_claimed(leaf: Leaf) -> bool:
    """Return whether a leaf is a drift of every admissible run, for which only bounds are
    decided."""
    return isinstance(leaf.term, ir.Norm) and not leaf.term.of.measured


def _way(leaf: Leaf) -> int | None:
    """Return 1 where a worse value makes the comparison harder, -1 where easier, else None."""
    if leaf.polarity is None or leaf.better is None:
        return None
    return leaf.polarity if leaf.better == "lower" else -leaf.polarity


def _report_mixed(compare: ir.Compare, doubtful: Sequence[Leaf], reporter: Reporter) -> None:
    first = doubtful[0]
    place = first.statistic or first.term
    known = _way(first) is not None
    worse = "larger" if first.better == "lower" else "smaller"
    message = (
        f"a {worse} {first.subject} is worse and makes the comparison easier to satisfy"
        if known
        else f"whether a worse {first.subject} makes the comparison harder to satisfy is not known"
    )
    more = tuple(Label((leaf.statistic or leaf.term).span, "here too") for leaf in doubtful[1:])
    reporter.warning(
        codes.MIXED_DIRECTION,
        message,
        place.span,
        "bound it by a number in another clause, and add `override: direction` to this one",
        more,
    )


def _check_tails(right: Sequence[Leaf], reporter: Reporter) -> None:
    seen: set[Span] = set()
    for leaf in right:
        statistic = leaf.statistic
        if statistic is None or leaf.outer is None or statistic.span in seen:
            continue
        seen.add(statistic.span)
        _check_tail(statistic, leaf.outer > 0, reporter)


def _check_tail(statistic: ir.Statistic, from_above: bool, reporter: Reporter) -> None:
    """Report a statistic of the tail opposite to the bound."""
    half = Fraction(1, 2)
    q = statistic.q
    match statistic.kind:
        case "min" if from_above:
            _tail(reporter, statistic.span, "write max(...)")
        case "max" if not from_above:
            _tail(reporter, statistic.span, "write min(...)")
        case "quantile" if q is not None and from_above and q < half:
            _tail(reporter, statistic.span, f"write {_percentile(1 - q)} or max(...)")
        case "quantile" if q is not None and not from_above and q > half:
            _tail(reporter, statistic.span, f"write {_percentile(1 - q)} or min(...)")
        case _:
            return


def _percentile(q: Fraction) -> str:
    percent = q * 100
    return f"p{percent}(...)" if percent.denominator == 1 else f"quantile({float(q):g}, ...)"


def _tail(reporter: Reporter, span: Span, help: str) -> None:
    found = _WRITTEN.match(reporter.source.text, span.start)
    instead = _INSTEAD.match(help)
    fix = None
    if found is not None and instead is not None:
        fix = replacement(Span(*found.span()), instead[1])
    reporter.error(
        codes.WRONG_TAIL, "the statistic looks at the best values only", span, help, fix=fix
    )


def _check_vacuous(compare: ir.Compare, op: str, metrics: Registry, reporter: Reporter) -> None:
    left, right = range_of(compare.left, metrics), range_of(compare.right, metrics)
    if op in _LOWER:
        always, never = _settled(right, left, op == ">=")
    elif op in _UPPER:
        always, never = _settled(left, right, op == "<=")
    else:
        always = False
        never = _below(left.high, right.low, True) or _below(right.high, left.low, True)
    if not (always or never):
        return
    word = "always holds" if always else "can never hold"
    limits = f"the term lies in {_shown(left)}"
    if any(not isinstance(part, ir.Number) for part in subterms(compare.right)):
        limits = f"the left side lies in {_shown(left)}, the right side in {_shown(right)}"
    reporter.error(
        codes.VACUOUS,
        f"the comparison {word}: {limits}",
        compare.span,
        _as_percent(compare.right, reporter.source),
    )


def _as_percent(bound: ir.Term, source: SourceFile) -> str | None:
    """Return the help for a share that is written as a percentage without `%`."""
    if not isinstance(bound, ir.Number) or bound.dimension != "ratio" or not 1 < bound.value <= 100:
        return None
    written = source.text[bound.span.start : bound.span.end]
    return f"write `{written}%` for a percentage" if _PLAIN.fullmatch(written) else None


def _settled(small: Interval, large: Interval, equal: bool) -> tuple[bool, bool]:
    """Return whether `small <= large` (`<` unless `equal`) always holds, and whether it never
    does."""
    always = _below(small.high, large.low, not equal)
    never = _below(large.high, small.low, equal)
    return always, never


def _below(a: Fraction | None, b: Fraction | None, strictly: bool) -> bool:
    return a is not None and b is not None and (a < b if strictly else a <= b)


def _shown(where: Interval) -> str:
    low = "-inf" if where.low is None else str(where.low)
    high = "inf" if where.high is None else str(where.high)
    return f"[{low}, {high}]"


def tables_stand_alone(sides: Sequence[ir.Term], reporter: Reporter) -> bool:
    """Report a table inside another term, and a comparison of a table with a constant."""
    for side in sides:
        for part in subterms(side):
            if isinstance(part, ir.TableValue) and part is not side:
                reporter.error(
                    codes.WRONG_SORT,
                    "a table is a threshold: it stands alone on one side of a comparison",
                    part.span,
                    "put the factor into the rows of the table",
                )
                return False
    fixed = [isinstance(side, ir.Number | ir.TableValue) for side in sides]
    if all(fixed) and not all(isinstance(side, ir.Number) for side in sides):
        spans = [side.span for side in sides]
        reporter.error(
            codes.VACUOUS,
            "the comparison of a table with a constant says nothing about the kernels",
            spans[0].hull(spans[-1]),
            "compare a statistic of a metric with the table",
        )
        return False
    return True


def check_threshold(
    compare: ir.Compare,
    op_span: Span,
    scope: Scope,
    reporter: Reporter,
    side: int,
    against: bool,
) -> bool:
    """Check a comparison as `check_compare` does, for every value of its threshold."""
    if not isinstance(compare.right, ir.TableValue):
        return check_compare(compare, op_span, scope.metrics, reporter, side, against)
    table = scope.tables[compare.right.name]
    if table is None:
        return False
    values = [row.value for row in table.rows]
    values += [] if table.otherwise is None else [table.otherwise]
    numbers = [ir.Number(value, table.dimension, compare.right.span) for value in values]
    checked = [
        check_compare(
            replace(compare, right=number), op_span, scope.metrics, reporter, side, against
        )
        for number in numbers
    ]
    return all(checked)


# --- polarity -------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """One measured quantity in a term: `better` is its better direction (None: unknown), `subject`
    its name in messages, `statistic` the enclosing statistic and `outer` the polarity of that."""

    term: ir.Term
    better: str | None
    subject: str
    polarity: int | None
    statistic: ir.Statistic | None = None
    outer: int | None = None


def leaves(term: ir.Term, metrics: Registry, polarity: int | None = 1) -> Iterator[Leaf]:
    """Yield the measured quantities of a term from left to right."""
    match term:
        case ir.Number() | ir.TableValue():
            return
        case ir.Norm():
            yield Leaf(term, "lower", "the norm of a drift", polarity)
        case ir.Metric(name=name):
            definition = metrics[name]
            better = None if definition.signed else definition.better
            yield Leaf(term, better, f"`{name}`", polarity)
        case ir.Statistic(of=of):
            for leaf in leaves(of, metrics, polarity):
                yield leaf._replace(statistic=term, outer=polarity)
        case ir.Abs(of=of):
            yield from _magnitude(term, of, metrics, polarity)
        case ir.Arith(op="+" | "-" as op, left=left, right=right):
            yield from leaves(left, metrics, polarity)
            yield from leaves(right, metrics, polarity if op == "+" else _times(polarity, -1))
        case ir.Arith(op=op, left=left, right=right):
            above, below = sign(left, metrics), sign(right, metrics)
            if op == "/":
                above = None if above is None or below is None else -above
            yield from leaves(left, metrics, _times(polarity, below))
            yield from leaves(right, metrics, _times(polarity, above))


def _magnitude(
    term: ir.Abs, of: ir.Term, metrics: Registry, polarity: int | None
) -> Iterator[Leaf]:
    known = sign(of, metrics)
    if known is not None:
        yield from leaves(of, metrics, _times(polarity, known))
        return
    inner = list(leaves(of, metrics))
    if len(inner) == 1 and inner[0].better == "higher":
        yield inner[0]._replace(polarity=None)
        return
    yield Leaf(term, "lower", "a magnitude", polarity)


def _times(polarity: int | None, sign: int | None) -> int | None:
    return None if polarity is None or sign is None else polarity * sign


def sign(term: ir.Term, metrics: Registry) -> int | None:
    """Return 1 where a term is never negative, -1 where it is never positive, else None."""
    where = range_of(term, metrics)
    if where.low is not None and where.low >= 0:
        return 1
    if where.high is not None and where.high <= 0:
        return -1
    match term:
        case ir.Statistic(of=of):
            return sign(of, metrics)
        case ir.Arith(op="*" | "/", left=left, right=right):
            return _times(sign(left, metrics), sign(right, metrics))
        case ir.Arith(op=op, left=left, right=right):
            first, second = sign(left, metrics), sign(right, metrics)
            second = _times(second, 1 if op == "+" else -1)
            return first if first == second else None
        case _:
            return None


def range_of(term: ir.Term, metrics: Registry) -> Interval:
    """Return an interval that contains every value of a term."""
    return interval(term, _known(term, metrics))


def _known(term: ir.Term, metrics: Registry) -> Mapping[str, Interval]:
    named = {part.name for part in subterms(term) if isinstance(part, ir.Metric)}
    own = {name: metrics[name] for name in named}
    return {name: Interval(d.lower, d.upper) for name, d in own.items() if d.function is not None}
