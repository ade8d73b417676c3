"""What z3 is told of the variables of a translation, each fact with its reason.

The facts themselves are data (`kcdsl.ir.facts`, `kcdsl.ir.orders`); here they meet the quantities
that clauses speak of. Facts that are not linear are stated at the numbers that clauses compare
with, which keeps every question linear: where kl <= 0.02 is spoken of, `kl <= 0.02 implies
tv <= 0.1`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from typing import TYPE_CHECKING

import z3

from kcdsl.ir.facts import MONOTONE, NORMS, domination, metric_node, ordered
from kcdsl.ir.orders import curves, least_factor
from kcdsl.ir.terms import Abs, Drift, Norm, Term
from kcdsl.ir.words import region_text, term_text
from kcdsl_backends.smt.intervals import interval
from kcdsl_backends.smt.quantities import Quantity, Witness
from kcdsl_backends.smt.solving import Expression, real
from kcdsl_certs.reals import real_text

if TYPE_CHECKING:
    from kcdsl_backends.smt.translate import Translator


@dataclass(frozen=True, slots=True)
class Fact:
    """Something true whatever the kernels do, and why, in words."""

    expression: Expression
    reason: str


def assumptions(translator: Translator) -> Iterator[Fact]:
    """Yield what holds of the variables that the translator has made so far."""
    quantities = list(translator.quantities)
    for quantity in quantities:
        yield from _range(translator, quantity)
    for group in _groups(quantities, lambda q: (q.slice, q.of)):
        yield from _same_values(translator, group)
    monotone = [q for q in quantities if q.kind in MONOTONE or q.kind == "value"]
    for group in _groups(monotone, lambda q: (q.slice, q.kind, q.q, q.side)):
        yield from _same_statistic(translator, group)
    for group in _groups(quantities, lambda q: (q.kind, q.of) if _is_extreme(q) else None):
        yield from _inclusions(translator, group)
    yield from _norms(translator)


def _groups(items: list[Quantity], key: object) -> Iterator[list[Quantity]]:
    assert callable(key)
    found: dict[object, list[Quantity]] = defaultdict(list)
    for item in items:
        name = key(item)
        if name is not None:
            found[name].append(item)
    return (group for group in found.values() if len(group) > 1)


def _is_extreme(quantity: Quantity) -> bool:
    return quantity.kind in ("min", "max")


def _range(translator: Translator, quantity: Quantity) -> Iterator[Fact]:
    where, variable = interval(quantity.term, translator.known), translator.quantities[quantity]
    if where.low is not None:
        least = f"{quantity} is never below {real_text(where.low)}"
        yield Fact(variable >= real(where.low, translator.context), least)
    if where.high is not None:
        most = f"{quantity} is never above {real_text(where.high)}"
        yield Fact(variable <= real(where.high, translator.context), most)


def _same_values(translator: Translator, group: list[Quantity]) -> Iterator[Fact]:
    """Yield the orders of the statistics of the same values."""
    for a, b in permutations(group, 2):
        small, large = translator.quantities[a], translator.quantities[b]
        same = (a.kind, a.q) == (b.kind, b.q)
        if a.side == "smallest" and b.side == "largest" and (same or ordered(a, b)):
            yield Fact(small <= large, f"{a} by the smallest tokens <= by the largest")
        elif a.side in ("", b.side) or b.side == "":
            if ordered(a, b):
                yield Fact(small <= large, f"{a} <= {term_text(b.term)}: {_ORDER[a.kind, b.kind]}")


_ORDER = {
    ("min", "mean"): "a mean is no less than the minimum",
    ("min", "max"): "order of minimum and maximum",
    ("min", "quantile"): "no percentile is below the minimum",
    ("mean", "max"): "a mean is no more than the maximum",
    ("quantile", "max"): "no percentile is above the maximum",
    ("quantile", "quantile"): "percentiles of the same values, in the order of their levels",
}


def _same_statistic(translator: Translator, group: list[Quantity]) -> Iterator[Fact]:
    """Yield the orders that hold value by value, for statistics that keep them."""
    for a, b in permutations(group, 2):
        small, large = translator.quantities[a], translator.quantities[b]
        factor = domination(a.of, b.of, translator.temperature)
        if factor is not None:
            scale = "" if factor == 1 else f"{real_text(factor)} "
            why = f"{a} <= {scale}{term_text(b.term)}: {_why(a.of, b.of, translator.temperature)}"
            yield Fact(small <= real(factor, translator.context) * large, why)
        if isinstance(b.of, Abs) and b.of.of == a.of and a.kind in ("mean", "max"):
            yield Fact(-small <= large, f"-{a} <= {term_text(b.term)}: x >= -|x|")
        yield from _curves(translator, a, b)


def _why(small: Term, large: Term, temperature: Fraction | None) -> str:
    names = metric_node(small), metric_node(large)
    if names[0] is not None and names[1] is not None:
        path = least_factor(names[0], names[1], temperature)
        if path is not None:
            return "; ".join(dict.fromkeys(path.reasons))
    return "x <= |x|"


def _curves(translator: Translator, a: Quantity, b: Quantity) -> Iterator[Fact]:
    names = metric_node(a.of), metric_node(b.of)
    if names[0] is None or names[1] is None:
        return
    small, large = translator.quantities[a], translator.quantities[b]
    for curve in curves(names[0], names[1], translator.temperature):
        if a.kind == "mean" and not curve.concave:
            continue
        for bound in sorted(translator.constants.get(b, ())):
            limit = None if bound < 0 else curve.at(bound, translator.temperature or Fraction(1))
            if limit is None:
                continue
            premise = large <= real(bound, translator.context)
            conclusion = small <= real(limit, translator.context)
            words = f"{term_text(b.term)} <= {real_text(bound)} gives "
            words += f"{term_text(a.term)} <= {_rounded_up(limit)}: {curve.why}"
            yield Fact(z3.Implies(premise, conclusion), words)


def _rounded_up(value: Fraction) -> str:
    from kcdsl_backends.smt.text import number, outward

    return number(outward(value, up=True))


def _inclusions(translator: Translator, group: list[Quantity]) -> Iterator[Fact]:
    """Yield: the extremes over fewer values lie inside those over more."""
    for inner, outer in permutations(group, 2):
        if translator.inside(inner.slice, outer.slice):
            a, b = translator.quantities[inner], translator.quantities[outer]
            why = f"every request of {inner.slice} is one of {outer.slice}"
            yield Fact(a <= b if inner.kind == "max" else b <= a, why)


def _norms(translator: Translator) -> Iterator[Fact]:
    for key, (least, some, largest) in translator.norms.items():
        ordered_ends = z3.And(least >= 0, least <= some, some <= largest)
        yield Fact(ordered_ends, f"{_norm_text(key)} is a norm of every admitted run")
    for key, ends in translator.norms.items():
        witness, block, measured, kind = key
        for small, factor, large in NORMS:
            other_key = (witness, block, measured, large)
            other = translator.norms.get(other_key)
            if kind == small and other is not None:
                scale = real(factor, translator.context)
                shown = "" if factor == 1 else f"{real_text(factor)} "
                why = f"{_norm_text(key)} <= {shown}{_norm_text(other_key)}: norms of one drift"
                pairs = zip(ends, other, strict=True)
                yield Fact(z3.And(*(a <= scale * b for a, b in pairs)), why)


def _norm_text(key: tuple[Witness, str, bool, str]) -> str:
    witness, block, measured, kind = key
    norm = term_text(Norm(kind, Drift(block, "x", measured)))
    return f"{norm} in {region_text(witness.region)}"
