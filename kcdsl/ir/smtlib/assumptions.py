"""What the constants of a theory satisfy whatever the kernels do, as assertions with reasons.

The facts themselves are data in `kcdsl.ir.facts`; here they meet the constants that a contract
speaks of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, permutations
from typing import Any

from kcdsl.ir import terms as ir
from kcdsl.ir.facts import MONOTONE, NORMS, Interval, domination, interval
from kcdsl.ir.smtlib import text
from kcdsl.ir.smtlib.theory import Extreme, NormAt, Quantity, Theory

Fact = tuple[str, str]
"""An assertion and its reason."""


def assumptions(
    theory: Theory, temperature: Fraction | None, known: Mapping[str, Interval]
) -> Iterator[Fact]:
    """Yield what holds of the constants that the theory has made so far.

    `temperature` relates the span of the logits to the distributions; None leaves them apart.
    `known` bounds metrics beyond their definition.
    """
    constants = list(theory.constants.items())
    for constant, symbol in constants:
        yield from _range(constant, symbol, known)
    quantities = [c for c, _ in constants if isinstance(c, Quantity)]
    yield from _orders(theory, quantities)
    yield from _dominations(theory, quantities, temperature)
    yield from _inclusions(theory, quantities)
    yield from _extremes(theory)
    yield from _at_inputs(theory)
    yield from _flags(theory)


def _range(constant: Any, symbol: str, known: Mapping[str, Interval]) -> Iterator[Fact]:
    found = interval(constant.term if isinstance(constant, Quantity) else _NORM, known)
    if found.low is not None:
        yield f"(<= {text.real(found.low)} {symbol})", "least value there is"
    if found.high is not None:
        yield f"(<= {symbol} {text.real(found.high)})", "greatest value there is"


_NORM = ir.Norm("inf", ir.Drift("", ""))


def _groups(items: Iterable[Any], key: Any) -> Iterator[list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return (group for group in found.values() if len(group) > 1)


def _orders(theory: Theory, quantities: list[Quantity]) -> Iterator[Fact]:
    """Yield: minimum <= quantiles in their order <= maximum, and the mean between the two."""
    statistics = [q for q in quantities if isinstance(q.term, ir.Statistic)]
    for group in _groups(statistics, lambda q: (q.unit, q.slice, id(q.term.of))):
        kinds = {q.term.kind: theory.constants[q] for q in group}
        levels = sorted((q.term.q, theory.constants[q]) for q in group if q.term.kind == "quantile")
        chain = [kinds.get("min"), *(symbol for _, symbol in levels), kinds.get("max")]
        present = [symbol for symbol in chain if symbol is not None]
        for low, high in pairwise(present):
            yield f"(<= {low} {high})", "order of the statistics of the same values"
        if "mean" in kinds:
            if "min" in kinds:
                yield f"(<= {kinds['min']} {kinds['mean']})", "a mean is no less than the minimum"
            if "max" in kinds:
                yield f"(<= {kinds['mean']} {kinds['max']})", "a mean is no more than the maximum"


def _dominations(
    theory: Theory, quantities: list[Quantity], temperature: Fraction | None
) -> Iterator[Fact]:
    """Yield the orders that hold value by value, for statistics that keep them."""
    statistics = [
        q for q in quantities if isinstance(q.term, ir.Statistic) and q.term.kind in MONOTONE
    ]
    for group in _groups(statistics, lambda q: (q.unit, q.slice, q.term.kind, q.term.q)):
        for small, large in permutations(group, 2):
            factor = domination(small.term.of, large.term.of, temperature)
            if factor is not None:
                low, high = theory.constants[small], theory.constants[large]
                yield f"(<= {low} {_scaled(factor, high)})", "holds of every single value"


def _inclusions(theory: Theory, quantities: list[Quantity]) -> Iterator[Fact]:
    """Yield: the extremes over fewer values lie inside those over more."""
    extremes = [
        q for q in quantities if isinstance(q.term, ir.Statistic) and q.term.kind in ("min", "max")
    ]
    for group in _groups(extremes, lambda q: (q.unit, id(q.term))):
        for inner, outer in permutations(group, 2):
            if theory.inside(inner.slice, outer.slice):
                small, large = theory.constants[inner], theory.constants[outer]
                if inner.term.kind == "min":
                    small, large = large, small
                why = f"every request of {inner.slice} is one of {outer.slice}"
                yield f"(<= {small} {large})", why


def _extremes(theory: Theory) -> Iterator[Fact]:
    """Yield how the extremes of norms over regions lie to each other."""
    found = {c: s for c, s in theory.constants.items() if isinstance(c, Extreme)}
    for group in _groups(found, lambda e: (e.unit, e.block, e.measured)):
        for small, large in permutations(group, 2):
            factor = Fraction(1) if small.kind == large.kind else _norm_factor(small, large)
            if factor is not None and _meet(theory, small, large):
                fact = f"(<= {found[small]} {_scaled(factor, found[large])})"
                same = small.region == large.region
                yield fact, "norms of the same drifts" if same else "a region inside another"


def _norm_factor(small: Extreme, large: Extreme) -> Fraction | None:
    return next((f for a, f, b in NORMS if (a, b) == (small.kind, large.kind)), None)


def _meet(theory: Theory, small: Extreme, large: Extreme) -> bool:
    """Say whether an order of norms at every input orders two extremes.

    The largest is ordered as its region is, the least the other way round; the least over one
    region lies below the largest over another where an input is in both.
    """
    grows = theory.region_inside(small.region, large.region)
    shrinks = theory.region_inside(large.region, small.region)
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
    """Yield what holds of the drift observed at single inputs."""
    found = {c: s for c, s in theory.constants.items() if isinstance(c, NormAt)}
    extremes = {c: s for c, s in theory.constants.items() if isinstance(c, Extreme) and c.measured}
    for norm, symbol in found.items():
        for small, factor, large in NORMS:
            other = found.get(replace(norm, kind=large))
            if norm.kind == small and other is not None:
                yield f"(<= {symbol} {_scaled(factor, other)})", "norms of the same drifts"
        for extreme, end in extremes.items():
            same = (extreme.unit, extreme.kind, extreme.block) == (
                norm.at.unit,
                norm.kind,
                norm.block,
            )
            if same and theory.region_inside(norm.at.region, extreme.region):
                low, high = (end, symbol) if extreme.end == "least" else (symbol, end)
                yield f"(<= {low} {high})", "the row is one of the region"


def _flags(theory: Theory) -> Iterator[Fact]:
    """Yield: what no input of a region flips, no input of a smaller one does."""
    flips = {key: s for key, s in theory.flags.items() if _is_flip(key)}
    for group in _groups(flips, lambda key: key[:4]):
        for inner, outer in permutations(group, 2):
            if theory.region_inside(inner[4], outer[4]):
                yield f"(=> {flips[outer]} {flips[inner]})", "a region inside another"


def _is_flip(key: Any) -> bool:
    return isinstance(key, tuple) and key[0] == "no_flip"


def _scaled(factor: Fraction, symbol: str) -> str:
    return symbol if factor == 1 else f"(* {text.real(factor)} {symbol})"
