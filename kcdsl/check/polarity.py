"""Which way each measured quantity moves a term: what the direction of a comparison rests on.

A *leaf* is a statistic of a metric, or the norm of a drift. Its polarity is 1 where the term grows
with it, -1 where the term falls, and None where neither can be shown. Sums and differences keep
what they add up; a product needs the sign of its other factor, a quotient that of both, and those
come from the ranges of the metrics. Every statistic grows with the values it ranges over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kcdsl.ir import terms as ir
from kcdsl.ir.facts import Interval, interval
from kcdsl.ir.walk import subterms
from kcdsl.metrics import MetricDefinition, Registry


@dataclass(frozen=True, slots=True)
class Leaf:
    """One measured quantity in a term: `better` says which of its values are good (None: the
    language does not say), `subject` names it in a message, `statistic` is what it stands in and
    `outer` the polarity of that statistic."""

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
            yield Leaf(term, _better(definition), f"`{name}`", polarity)
        case ir.Statistic(of=of):
            for leaf in leaves(of, metrics, polarity):
                yield replace(leaf, statistic=term, outer=polarity)
        case ir.Abs(of=of):
            yield from _magnitude(term, of, metrics, polarity)
        case ir.Arith(op="+" | "-" as op, left=left, right=right):
            yield from leaves(left, metrics, polarity)
            yield from leaves(right, metrics, polarity if op == "+" else _turned(polarity, -1))
        case ir.Arith(op=op, left=left, right=right):
            above, below = sign(left, metrics), sign(right, metrics)
            if op == "/":
                above = None if above is None or below is None else -above
            yield from leaves(left, metrics, _turned(polarity, below))
            yield from leaves(right, metrics, _turned(polarity, above))


def _magnitude(
    term: ir.Abs, of: ir.Term, metrics: Registry, polarity: int | None
) -> Iterator[Leaf]:
    known = sign(of, metrics)
    if known is not None:
        yield from leaves(of, metrics, _turned(polarity, known))
        return
    inner = list(leaves(of, metrics))
    if len(inner) == 1 and inner[0].better == "higher":
        yield replace(inner[0], polarity=None)
        return
    yield Leaf(term, "lower", "a magnitude", polarity)


def _turned(polarity: int | None, sign: int | None) -> int | None:
    return None if polarity is None or sign is None else polarity * sign


def _better(definition: MetricDefinition) -> str | None:
    return None if definition.signed else definition.better


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
            return _turned(sign(left, metrics), sign(right, metrics))
        case ir.Arith(op=op, left=left, right=right):
            first, second = sign(left, metrics), sign(right, metrics)
            second = _turned(second, 1 if op == "+" else -1)
            return first if first == second else None
        case _:
            return None


def range_of(term: ir.Term, metrics: Registry) -> Interval:
    """Return an interval that holds every value of a term."""
    return interval(term, _known(term, metrics))


def _known(term: ir.Term, metrics: Registry) -> Mapping[str, Interval]:
    named = {part.name for part in subterms(term) if isinstance(part, ir.Metric)}
    own = {name: metrics[name] for name in named}
    return {name: Interval(d.lower, d.upper) for name, d in own.items() if d.function is not None}
