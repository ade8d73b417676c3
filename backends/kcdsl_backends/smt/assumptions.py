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
from itertools import combinations, permutations
from typing import TYPE_CHECKING

import z3

from kcdsl.ir.facts import MONOTONE, NORMS, at_most, bent
from kcdsl.ir.terms import Abs, Drift, Norm
from kcdsl.ir.words import region_text, term_text
from kcdsl_backends.smt.intervals import interval
from kcdsl_backends.smt.quantities import Quantity, Witness
from kcdsl_backends.smt.solving import Expression, real
from kcdsl_backends.smt.text import number, outward
from kcdsl_certs.reals import real_text

if TYPE_CHECKING:
    from kcdsl_backends.smt.translate import Translator


_DIGITS = 8
_MOST_PARTS, _MOST_TOGETHER = 6, 4
"""How many slices inside another are tried together, out of how many."""


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
    for a, b in permutations(quantities, 2):
        yield from _between(translator, a, b)
    yield from _divisions(translator)
    yield from _norms(translator)


def _range(translator: Translator, quantity: Quantity) -> Iterator[Fact]:
    where, variable = interval(quantity.term, translator.known), translator.quantities[quantity]
    if where.low is not None:
        least = f"{quantity} is never below {real_text(where.low)}"
        yield Fact(variable >= real(where.low, translator.context), least)
    if where.high is not None:
        most = f"{quantity} is never above {real_text(where.high)}"
        yield Fact(variable <= real(where.high, translator.context), most)


def _between(translator: Translator, a: Quantity, b: Quantity) -> Iterator[Fact]:
    """Yield what two quantities have to do with each other."""
    small, large = translator.quantities[a], translator.quantities[b]
    found = at_most(a, b, translator.temperature, translator.inside)
    if found is not None:
        factor, why = found
        scale = "" if factor == 1 else f"{_rounded_up(factor)} "
        words = f"{_named(a, b)} <= {scale}{_named(b, a)}"
        expression = small <= real(factor, translator.context) * large
        yield Fact(expression, _because(words, why))
    magnitude = isinstance(b.of, Abs) and b.of.of == a.of
    if magnitude and a.slice == b.slice and a.kind == b.kind in ("mean", "max"):
        words = f"-{term_text(a.term)} <= {term_text(b.term)}"
        yield Fact(-small <= large, _because(words, ("-x <= |x|",)))
    for bound in sorted(translator.constants.get(b, ())):
        for limit, why in bent(a, b, bound, translator.temperature, translator.inside):
            premise = large <= real(bound, translator.context)
            conclusion = small <= real(limit, translator.context)
            words = f"{_named(b, a)} <= {real_text(bound)} gives {_named(a, b)} <= "
            words += _rounded_up(limit)
            yield Fact(z3.Implies(premise, conclusion), _because(words, why))


def _because(words: str, why: tuple[str, ...]) -> str:
    return f"{words}: {'; '.join(dict.fromkeys(why))}" if why else words


def _divisions(translator: Translator) -> Iterator[Fact]:
    """Yield: a slice that is made up of others has no larger maximum than each of them, and where
    they share no request its mean and percentiles lie between theirs."""
    same: dict[object, list[Quantity]] = defaultdict(list)
    for quantity in translator.quantities:
        if quantity.kind in MONOTONE:
            same[quantity.kind, quantity.q, quantity.of, quantity.side].append(quantity)
    for group in same.values():
        for whole in group:
            parts = [
                q
                for q in group
                if q.slice != whole.slice and translator.inside(q.slice, whole.slice)
            ]
            for chosen, apart in _divided(translator, whole, parts):
                yield _of_parts(translator, whole, chosen, apart)


def _divided(
    translator: Translator, whole: Quantity, parts: list[Quantity]
) -> Iterator[tuple[tuple[Quantity, ...], bool]]:
    """Yield the fewest parts that make up a slice, and whether they share no request."""
    few = parts if len(parts) <= _MOST_PARTS else []
    sizes = range(2, min(len(few), _MOST_TOGETHER) + 1)
    choices = [chosen for size in sizes for chosen in combinations(few, size)]
    if len(parts) > _MOST_TOGETHER:
        choices.append(tuple(parts))
    found: list[set[str]] = []
    for chosen in choices:
        names = tuple(part.slice for part in chosen)
        if any(known <= set(names) for known in found):
            continue
        covered, apart = translator.division(whole.slice, names)
        if covered:
            found.append(set(names))
            if apart or whole.kind in ("min", "max"):
                yield chosen, apart


def _of_parts(
    translator: Translator, whole: Quantity, parts: tuple[Quantity, ...], apart: bool
) -> Fact:
    own = translator.quantities[whole]
    others = [translator.quantities[part] for part in parts]
    limits = []
    if apart or whole.kind == "max":
        limits.append(z3.Or(*(own <= other for other in others)))
    if apart or whole.kind == "min":
        limits.append(z3.Or(*(own >= other for other in others)))
    names = ", ".join(part.slice for part in parts)
    why = f"every request of {whole.slice} is in one of {names}"
    return Fact(z3.And(*limits), f"{why}, so {term_text(whole.term)} does not go beyond theirs")


def _named(quantity: Quantity, other: Quantity) -> str:
    """Return a quantity in words, with its slice where the other one has another."""
    return str(quantity) if quantity.slice != other.slice else term_text(quantity.term)


def _rounded_up(value: Fraction) -> str:
    exact = real_text(value)
    return exact if len(exact) <= _DIGITS and "/" not in exact else number(outward(value, up=True))


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
