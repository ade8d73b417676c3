"""Axioms: relations between measured quantities that hold for all kernels, each with its reason.

The inequalities are data (`kcdsl.logic.relations`, `kcdsl.logic.orders`); here they are applied to
the quantities in clauses. Every translation of contracts into logic states exactly these axioms, so
that different solvers get the same problem. Nonlinear relations are stated at the thresholds of
clauses, which keeps every problem linear: if a clause has kl <= 0.02, the axiom is
`kl <= 0.02 implies tv <= 0.1`.

A percentile is over requests, each represented by its worst token: its largest value where the
comparison needs the term to be small, else its smallest (`side`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, permutations

from kcdsl.ir.formulas import subterms
from kcdsl.ir.predicates import Division, Inside
from kcdsl.ir.terms import Abs, Metric, Statistic, Term
from kcdsl.logic.relations import MONOTONE, Interval, Placed, at_most, conditional_bounds, interval
from kcdsl.metrics import find_metric

_MOST_PARTS, _MOST_TOGETHER = 6, 4
"""The largest number of contained slices considered, and of slices combined at a time."""


def undivided(whole: str, parts: tuple[str, ...]) -> tuple[bool, bool]:
    """Return the default division: no slice is known to be a union of others."""
    return False, False


@dataclass(frozen=True, slots=True)
class ContractFacts:
    """Facts about a contract other than its clauses.

    `temperature` relates the span of the logits to the distributions; None: no relation.
    `known` has bounds of metrics tighter than by definition. `by_request` names user metrics with
    one value per request. `one_request`: the quantities are of a single request.
    """

    inside: Inside
    temperature: Fraction | None = None
    division: Division = undivided
    known: dict[str, Interval] = field(default_factory=dict)
    by_request: frozenset[str] = frozenset()
    one_request: bool = False


# --- laws, about quantities by their index ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LowerBound:
    """quantity >= limit."""

    quantity: int
    limit: Fraction


@dataclass(frozen=True, slots=True)
class UpperBound:
    """quantity <= limit."""

    quantity: int
    limit: Fraction


@dataclass(frozen=True, slots=True)
class LinearBound:
    """small <= factor * large."""

    small: int
    factor: Fraction
    large: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NegatedBound:
    """-small <= large."""

    small: int
    large: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConditionalBound:
    """large <= bound implies small <= limit."""

    large: int
    bound: Fraction
    small: int
    limit: Fraction
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExtremeMean:
    """If a mean is at the end of the range, every value is.

    `low`: mean <= limit implies other <= limit; else mean >= limit implies other >= limit.
    """

    mean: int
    other: int
    limit: Fraction
    low: bool
    why: tuple[str, ...] = ("a mean is at an end of the range only where every value is",)


@dataclass(frozen=True, slots=True)
class ConstantValues:
    """If a mean equals an extreme, all values are equal: mean == extreme implies
    other == extreme."""

    mean: int
    extreme: int
    other: int
    why: tuple[str, ...] = ("a mean is an extreme only where all values are equal",)


@dataclass(frozen=True, slots=True)
class QuantileBound:
    """quantile > low implies (1 - q) (quantile - low) < mean - low."""

    mean: int
    quantile: int
    q: Fraction
    low: Fraction
    why: tuple[str, ...] = ("more than 1 - q of the values reach the q-quantile",)


@dataclass(frozen=True, slots=True)
class UnionBounds:
    """The value of a union is at most that of one part (`above`), and at least that of one part
    (`below`)."""

    whole: int
    parts: tuple[int, ...]
    above: bool
    below: bool


Axiom = (
    LowerBound
    | UpperBound
    | LinearBound
    | NegatedBound
    | ConditionalBound
    | ExtremeMean
    | ConstantValues
    | QuantileBound
    | UnionBounds
)


def axioms_of(
    quantities: Sequence[Placed],
    terms: Sequence[Term],
    compared: Sequence[Collection[Fraction]],
    setting: ContractFacts,
) -> Iterator[Axiom]:
    """Yield the laws of quantities; `terms` are the measured terms, `compared` the thresholds of
    each."""
    ranges = [interval(term, setting.known) for term in terms]
    for n, found in enumerate(ranges):
        if found.low is not None:
            yield LowerBound(n, found.low)
        if found.high is not None:
            yield UpperBound(n, found.high)
    for small, large in permutations(range(len(quantities)), 2):
        a, b = quantities[small], quantities[large]
        related = at_most(a, b, setting.temperature, setting.inside)
        if related is not None:
            yield LinearBound(small, related[0], large, related[1])
        magnitude = isinstance(b.of, Abs) and b.of.of == a.of and a.slice == b.slice
        if magnitude and a.kind == b.kind and a.kind in ("mean", "max"):
            yield NegatedBound(small, large, ("-x <= |x|",))
        for bound in sorted(compared[large]):
            for limit, why in conditional_bounds(a, b, bound, setting.temperature, setting.inside):
                yield ConditionalBound(large, bound, small, limit, why)
        if setting.one_request and _is_worst(a, b):
            yield LinearBound(large, Fraction(1), small, ("a request counts as its worst token",))
            yield LinearBound(small, Fraction(1), large, ("a request counts as its worst token",))
    yield from _means(quantities, ranges, setting)
    yield from _divisions(quantities, setting)


def _is_worst(a: Placed, b: Placed) -> bool:
    """Return whether a is the extreme token of a single request and b its percentile."""
    if a.of != b.of or a.slice != b.slice or b.kind != "quantile":
        return False
    return (a.kind, b.side) in (("max", "largest"), ("min", "smallest"))


def _means(
    quantities: Sequence[Placed], ranges: Sequence[Interval], setting: ContractFacts
) -> Iterator[Axiom]:
    """Yield the laws between a mean and the other statistics of the same values."""
    same: dict[object, list[int]] = defaultdict(list)
    for n, quantity in enumerate(quantities):
        if quantity.kind in MONOTONE:
            same[quantity.of, quantity.slice].append(n)
    for group in same.values():
        for mean in (n for n in group if quantities[n].kind == "mean"):
            for other in (n for n in group if n != mean):
                low, high = ranges[mean].low, ranges[mean].high
                if low is not None:
                    yield ExtremeMean(mean, other, low, True)
                if high is not None:
                    yield ExtremeMean(mean, other, high, False)
                for extreme in group:
                    if quantities[extreme].kind in ("min", "max") and extreme != other:
                        yield ConstantValues(mean, extreme, other)
                q, of = quantities[other].q, quantities[other].of
                single = low is not None and not is_of_tokens(of, setting.by_request)
                if single and low is not None and q is not None and q < 1:
                    yield QuantileBound(mean, other, q, low)


def _divisions(quantities: Sequence[Placed], setting: ContractFacts) -> Iterator[UnionBounds]:
    """Yield the laws of unions: the maximum of a slice is at most the largest maximum of its parts,
    and if parts are disjoint, its mean and percentiles lie between theirs."""
    same: dict[object, list[int]] = defaultdict(list)
    for n, quantity in enumerate(quantities):
        if quantity.kind in MONOTONE:
            same[quantity.kind, quantity.q, quantity.of, quantity.side].append(n)
    for group in same.values():
        for whole in group:
            name = quantities[whole].slice
            inner = [
                n
                for n in group
                if quantities[n].slice != name and setting.inside(quantities[n].slice, name)
            ]
            for chosen, apart in _divided(quantities, whole, inner, setting):
                kind = quantities[whole].kind
                yield UnionBounds(whole, chosen, apart or kind == "max", apart or kind == "min")


def _divided(
    quantities: Sequence[Placed], whole: int, parts: Sequence[int], setting: ContractFacts
) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield minimal sets of parts whose union is a slice, and whether they are disjoint."""
    few = parts if len(parts) <= _MOST_PARTS else ()
    sizes = range(2, min(len(few), _MOST_TOGETHER) + 1)
    choices = [chosen for size in sizes for chosen in combinations(few, size)]
    if len(parts) > _MOST_TOGETHER:
        choices.append(tuple(parts))
    found: list[set[str]] = []
    for chosen in choices:
        names = tuple(quantities[part].slice for part in chosen)
        if any(known <= set(names) for known in found):
            continue
        covered, apart = setting.division(quantities[whole].slice, names)
        if covered:
            found.append(set(names))
            if apart or quantities[whole].kind in ("min", "max"):
                yield chosen, apart


# --- sides ---------------------------------------------------------------------------------------


def has_two_sides(term: Metric | Statistic, by_request: frozenset[str]) -> bool:
    """Return whether a measured term differs between the largest and the smallest token of each
    request."""
    if isinstance(term, Statistic) and term.kind not in ("quantile", "aggregate"):
        return False
    return is_of_tokens(term.of if isinstance(term, Statistic) else term, by_request)


def is_of_tokens(term: Term, by_request: frozenset[str]) -> bool:
    """Return whether a request can have several values of a term."""
    for part in subterms(term):
        if isinstance(part, Metric):
            definition = find_metric(part.name)
            if definition is None:
                if part.name not in by_request:
                    return True
            elif definition.kind == "pointwise" and definition.counted == "token":
                return True
    return False
