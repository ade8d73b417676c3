"""What the constants of a theory satisfy whatever the kernels do, as assertions with reasons.

The facts themselves are data in `kcdsl.ir.facts`; here they meet the constants that a contract
speaks of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from typing import Any

from kcdsl.ir import terms as ir
from kcdsl.ir.facts import NORMS, Interval, at_most, bent, interval
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
    for a, b in permutations(quantities, 2):
        if a.unit == b.unit:
            yield from _between(theory, a, b, temperature)
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


@dataclass(frozen=True, slots=True)
class _Placed:
    """A constant as `kcdsl.ir.facts` looks at it."""

    kind: str
    q: Fraction | None
    of: ir.Term
    slice: str
    side: str = ""


def _placed(quantity: Quantity) -> _Placed:
    match quantity.term:
        case ir.Statistic(kind, of, q):
            return _Placed(kind, q, of, quantity.slice)
        case term:
            return _Placed("value", None, term, quantity.slice)


def _between(
    theory: Theory, a: Quantity, b: Quantity, temperature: Fraction | None
) -> Iterator[Fact]:
    """Yield what two measured terms have to do with each other, whatever is measured.

    Units of different slices are counted apart, so nothing relates them.
    """
    inside = theory.inside if not a.unit else _same
    low, high = theory.constants[a], theory.constants[b]
    found = at_most(_placed(a), _placed(b), temperature, inside)
    if found is not None:
        factor, why = found
        reason = "; ".join(why) or "holds of every single value"
        yield f"(<= {low} {_scaled(factor, high)})", reason
    for bound in sorted(theory.bounds.get(b, ())):
        for limit, why in bent(_placed(a), _placed(b), bound, temperature, inside):
            premise = f"(<= {high} {text.real(bound)})"
            yield f"(=> {premise} (<= {low} {text.real(limit)}))", "; ".join(why)


def _same(inner: str, outer: str) -> bool:
    return inner == outer


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
            if same and theory.region_inside(norm.at.region, extreme.region, norm.at.unit):
                low, high = (end, symbol) if extreme.end == "least" else (symbol, end)
                yield f"(<= {low} {high})", "the row is one of the region"


def _flags(theory: Theory) -> Iterator[Fact]:
    """Yield: what no input of a region flips, no input of a smaller one does."""
    flips = {key: s for key, s in theory.flags.items() if _is_flip(key)}
    for group in _groups(flips, lambda key: key[:4]):
        for inner, outer in permutations(group, 2):
            if theory.region_inside(inner[4], outer[4], inner[1]):
                yield f"(=> {flips[outer]} {flips[inner]})", "a region inside another"


def _is_flip(key: Any) -> bool:
    return isinstance(key, tuple) and key[0] == "no_flip"


def _scaled(factor: Fraction, symbol: str) -> str:
    return symbol if factor == 1 else f"(* {text.real(factor)} {symbol})"
