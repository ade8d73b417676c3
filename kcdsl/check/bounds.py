"""Checks of one comparison: its direction, its tail, and whether it says anything at all.

A comparison is read as `left - right <= 0` (or `< 0`, after turning `>=` round). A measured
quantity stands *the right way round* where its getting worse makes that harder to satisfy, *the
wrong way round* where it makes it easier. All right: nothing to say. All wrong: an error. Where
some are wrong, or the way of some cannot be shown, a warning says which, because a clause that
compares kernels with themselves bounds no drift.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from kcdsl.check.polarity import Leaf, leaves, range_of
from kcdsl.check.report import Reporter, replacement
from kcdsl.diagnostics.codes import AGAINST_DIRECTION, MIXED_DIRECTION, VACUOUS, WRONG_TAIL
from kcdsl.diagnostics.model import Fix, Label
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.facts import Interval
from kcdsl.ir.walk import subterms
from kcdsl.metrics import Registry

_UPPER = {"<=", "<"}
_LOWER = {">=", ">"}
_WRITTEN = re.compile(r"p[0-9]+(?=[ ]*\()")
_INSTEAD = re.compile(r"write (p[0-9]+)\(")
_PLAIN = re.compile(r"[0-9.]+")
_NEGATED = {"<=": ">", "<": ">=", ">=": "<", ">": "<="}


def check_compare(
    compare: ir.Compare,
    op_span: Span,
    metrics: Registry,
    reporter: Reporter,
    side: int,
    against: bool,
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
    if side == 0:
        return True
    op = compare.op if side > 0 else _NEGATED.get(compare.op, compare.op)
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
    """Report the direction and the tail; False where the whole comparison is the wrong way."""
    bounded = 1 if op in _UPPER else -1
    found = [*leaves(compare.left, metrics, bounded), *leaves(compare.right, metrics, -bounded)]
    judged = [leaf for leaf in found if not _is_signed(leaf, metrics)]
    ways = [_way(leaf) for leaf in judged]
    if judged and all(way == -1 for way in ways):
        subject, better = judged[0].subject, judged[0].better
        one = not isinstance(compare.left, ir.Arith) and len(judged) == 1
        reporter.error(
            AGAINST_DIRECTION,
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
    """Return the fix that turns a comparison round; None where no operator is written there."""
    op = source.text[op_span.start : op_span.end]
    turned = op.replace("<", "\0").replace(">", "<").replace("\0", ">")
    return replacement(op_span, turned) if turned != op and op in _UPPER | _LOWER else None


def _is_signed(leaf: Leaf, metrics: Registry) -> bool:
    """Say whether a leaf is a signed metric without a magnitude, which is an error by itself."""
    return isinstance(leaf.term, ir.Metric) and metrics[leaf.term.name].signed


def _is_claimed(leaf: Leaf) -> bool:
    """Say whether a leaf is a drift of every admissible run, of which only bounds are decided."""
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
        MIXED_DIRECTION,
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
    """Report a statistic that looks at the values on the other side than the bound."""
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
    reporter.error(WRONG_TAIL, "the statistic looks at the best values only", span, help, fix=fix)


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
        VACUOUS,
        f"the comparison {word}: {limits}",
        compare.span,
        _as_percent(compare.right, reporter.source),
    )


def _as_percent(bound: ir.Term, source: SourceFile) -> str | None:
    """Return the help for a share that is written as a number of percent without the sign."""
    if not isinstance(bound, ir.Number) or bound.dimension != "ratio" or not 1 < bound.value <= 100:
        return None
    written = source.text[bound.span.start : bound.span.end]
    return f"write `{written}%` for a percentage" if _PLAIN.fullmatch(written) else None


def _settled(small: Interval, large: Interval, equal: bool) -> tuple[bool, bool]:
    """Return whether `small <= large` (`<` unless `equal`) always holds, and whether it never."""
    always = _below(small.high, large.low, not equal)
    never = _below(large.high, small.low, equal)
    return always, never


def _below(a: Fraction | None, b: Fraction | None, strictly: bool) -> bool:
    return a is not None and b is not None and (a < b if strictly else a <= b)


def _shown(where: Interval) -> str:
    low = "-inf" if where.low is None else str(where.low)
    high = "inf" if where.high is None else str(where.high)
    return f"[{low}, {high}]"
