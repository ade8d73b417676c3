"""Assumptions about the constants of a theory, as assertions with reasons.

The laws of measured quantities come from `kcdsl.logic.axioms`; here they become assertions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from operator import eq
from typing import Any

from kcdsl.ir.predicates import Division
from kcdsl.logic.algebra import axiom, scaled
from kcdsl.logic.axioms import (
    Axiom,
    ContractFacts,
    LowerBound,
    UnionBounds,
    UpperBound,
    axioms_of,
    undivided,
)
from kcdsl.logic.relations import NORMS, Interval
from kcdsl.logic.smtlib.text import WRITTEN
from kcdsl.logic.smtlib.theory import Extreme, MeasuredTerm, NoFlips, NormAt, Theory

Fact = tuple[str, str]
"""An assertion and its reason."""


def assumptions(
    theory: Theory,
    temperature: Fraction | None,
    known: Mapping[str, Interval],
    division: Division = undivided,
) -> Iterator[Fact]:
    """Yield the assumptions about the constants that the theory has created so far.

    `temperature` relates the span of the logits to the distributions; None: no relation. `known`
    has tighter bounds of metrics, `division` returns whether slices are unions of others.
    """
    for constant, symbol in theory.constants.items():
        if not isinstance(constant, MeasuredTerm):
            yield f"(<= 0.0 {symbol})", "least value there is"
    measured = [c for c in theory.constants if isinstance(c, MeasuredTerm)]
    for unit in dict.fromkeys(quantity.unit for quantity in measured):
        group = [quantity for quantity in measured if quantity.unit == unit]
        # Units of different slices are unrelated.
        setting = ContractFacts(
            theory.inside if unit is None else eq,
            temperature,
            division if unit is None else undivided,
            dict(known),
            theory.by_request,
            unit is not None and unit.of == "requests",
        )
        compared = [theory.bounds.get(quantity, set()) for quantity in group]
        symbols = [theory.constants[quantity] for quantity in group]
        for law in axioms_of(group, [quantity.term for quantity in group], compared, setting):
            yield axiom(law, symbols, WRITTEN), _reason(law, group)
    yield from _extremes(theory)
    yield from _at_inputs(theory)
    yield from _flags(theory)


def _reason(law: Axiom, group: list[MeasuredTerm]) -> str:
    match law:
        case LowerBound():
            return "least value there is"
        case UpperBound():
            return "greatest value there is"
        case UnionBounds(whole, parts):
            names = ", ".join(group[part].slice for part in parts)
            return f"every request of {group[whole].slice} is in one of {names}"
        case _:
            return "; ".join(law.why) or "holds of every single value"


def _groups(items: Iterable[Any], key: Any) -> Iterator[list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return (group for group in found.values() if len(group) > 1)


def _extremes(theory: Theory) -> Iterator[Fact]:
    """Yield the orders between extremes of norms over regions."""
    found = {c: s for c, s in theory.constants.items() if isinstance(c, Extreme)}
    for group in _groups(found, lambda e: (e.unit, e.block, e.measured)):
        for small, large in permutations(group, 2):
            factor = Fraction(1) if small.kind == large.kind else _norm_factor(small, large)
            if factor is not None and _meet(theory, small, large):
                fact = f"(<= {found[small]} {scaled(factor, found[large], WRITTEN)})"
                same = small.region == large.region
                yield fact, "norms of the same drifts" if same else "a region inside another"


def _norm_factor(small: Extreme, large: Extreme) -> Fraction | None:
    return next((f for a, f, b in NORMS if (a, b) == (small.kind, large.kind)), None)


def _meet(theory: Theory, small: Extreme, large: Extreme) -> bool:
    """Return whether an order of norms at every input orders two extremes.

    The largest norm grows with the region, the least norm shrinks; the least over one region is
    at most the largest over another if an input is in both.
    """
    grows = theory.region_inside(small.region, large.region, small.unit)
    shrinks = theory.region_inside(large.region, small.region, small.unit)
    match small.end, large.end:
        case "largest", "largest":
            return grows
        case "least", "least":
            return shrinks
        case "least", "largest":
            return grows or shrinks
        case _:
            return False


def _at_inputs(theory: Theory) -> Iterator[Fact]:
    """Yield the assumptions about the drift observed at single inputs."""
    found = {c: s for c, s in theory.constants.items() if isinstance(c, NormAt)}
    extremes = {c: s for c, s in theory.constants.items() if isinstance(c, Extreme) and c.measured}
    for norm, symbol in found.items():
        for small, factor, large in NORMS:
            other = found.get(replace(norm, kind=large))
            if norm.kind == small and other is not None:
                yield f"(<= {symbol} {scaled(factor, other, WRITTEN)})", "norms of the same drifts"
        for extreme, end in extremes.items():
            same = (extreme.unit, extreme.kind, extreme.block) == (
                norm.at.unit,
                norm.kind,
                norm.block,
            )
            if same and theory.region_inside(norm.at.region, extreme.region, norm.at.unit):
                low, high = (end, symbol) if extreme.end == "least" else (symbol, end)
                yield f"(<= {low} {high})", "the row is one of the region"


def _flags(theory: Theory) -> Iterator[Fact]:
    """Yield that the absence of flips in a region implies it in every smaller region."""
    flips = {key: s for key, s in theory.flags.items() if isinstance(key, NoFlips)}
    for group in _groups(flips, lambda key: (key.unit, key.block, key.k)):
        for inner, outer in permutations(group, 2):
            if theory.region_inside(inner.region, outer.region, inner.unit):
                yield f"(=> {flips[outer]} {flips[inner]})", "a region inside another"
