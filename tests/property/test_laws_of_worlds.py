"""Every world satisfies the axioms about measured quantities that solvers use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Literal, assert_never

import pytest
import z3

from kcdsl.ir import terms as ir
from kcdsl.ir.predicates import division, inclusion
from kcdsl.logic.algebra import LARGEST, SMALLEST, Side, axiom
from kcdsl.logic.axioms import (
    Axiom,
    ConditionalBound,
    ConstantValues,
    ContractFacts,
    ExtremeMean,
    LinearBound,
    LowerBound,
    NegatedBound,
    QuantileBound,
    UnionBounds,
    UpperBound,
    axioms_of,
    has_two_sides,
)
from kcdsl.logic.relations import Interval
from kcdsl.logic.smtlib.text import WRITTEN
from kcdsl_backends.smt.axioms import Quantity
from kcdsl_backends.smt.claims import same_slice
from kcdsl_backends.smt.solver import Z3Algebra, real
from kcdsl_backends.smt.translation import Translator
from tests.support import small_worlds as small
from tests.support.distributions import MeasuredWorlds
from tests.support.semantics.evaluation import rows, windows
from tests.support.semantics.formulas import Scope
from tests.support.semantics.interpretations import Unit, World
from tests.support.semantics.norms import Undefined

OWN = "own"
"""A metric of the user with one value per request, from 0 to 2."""
STATISTICS = (
    ("mean", None),
    ("max", None),
    ("min", None),
    ("quantile", Fraction(1, 2)),
    ("quantile", Fraction(9, 10)),
)
SMALL: tuple[ir.Term, ...] = (ir.Metric("hidden_linf"), ir.Metric("hidden_l2"), ir.Metric(OWN))
OF_DISTRIBUTIONS: tuple[ir.Term, ...] = (
    *(ir.Metric(name) for name in ("kl", "tv", "js", "logit_linf", "logit_span", "log_ratio")),
    ir.Abs(ir.Metric("log_ratio")),
)
ROUNDING = Fraction(1, 10**9)
KNOWN = {OWN: Interval(Fraction(0), Fraction(2))}


def quantities(terms: Sequence[ir.Term], slices: Sequence[str]) -> list[Quantity]:
    """Return every statistic of terms on slices, on each of its sides."""
    found = []
    for name in slices:
        for of in terms:
            for kind, q in STATISTICS:
                two = has_two_sides(ir.Statistic(kind, of, q), frozenset({OWN}))
                sides: tuple[Side | Literal[""], ...] = (LARGEST, SMALLEST) if two else ("",)
                found += [Quantity(name, kind, q, of, side) for side in sides]
    return found


def values(
    found: Sequence[Quantity], world: World, units: dict[str, tuple[Unit, ...]]
) -> list[Fraction | None]:
    """Return the measured values of the units of each slice; None where there are none."""
    return [
        value_of(quantity, Scope(world, lambda _: (), units[quantity.slice])) for quantity in found
    ]


def value_of(quantity: Quantity, scope: Scope) -> Fraction | None:
    try:
        value = scope.value(quantity.term, quantity.side or LARGEST, {})
    except Undefined:
        return None
    assert isinstance(value, Fraction)
    return value


def keeps(law: Axiom, value: Sequence[Fraction | None], slack: Fraction) -> bool | None:
    """Return whether values satisfy an axiom; None where it does not apply.

    Orders may be violated by `slack`, for rounded values.
    """

    def at(n: int) -> Fraction:
        found = value[n]
        assert found is not None
        return found

    match law:
        case LowerBound(quantity, limit):
            return at(quantity) >= limit - slack
        case UpperBound(quantity, limit):
            return at(quantity) <= limit + slack
        case LinearBound(lesser, factor, large):
            return at(lesser) <= factor * at(large) + slack
        case NegatedBound(lesser, large):
            return -at(lesser) <= at(large) + slack
        case ConditionalBound(large, bound, lesser, limit):
            return at(lesser) <= limit + slack if at(large) <= bound else None
        case ExtremeMean(mean, other, limit, low):
            if at(mean) > limit if low else at(mean) < limit:
                return None
            return at(other) <= limit if low else at(other) >= limit
        case ConstantValues(mean, extreme, other):
            return at(other) == at(extreme) if at(mean) == at(extreme) else None
        case QuantileBound(mean, quantile, q, low):
            if at(quantile) <= low:
                return None
            return (1 - q) * (at(quantile) - low) < at(mean) - low
        case UnionBounds(whole, parts, above, below):
            others = [at(part) for part in parts]
            return not ((above and at(whole) > max(others)) or (below and at(whole) < min(others)))
        case _:
            assert_never(law)


def spoken(law: Axiom) -> Iterator[int]:
    """Yield the quantities in an axiom."""
    for name in ("quantity", "small", "large", "mean", "other", "extreme", "quantile", "whole"):
        if hasattr(law, name):
            yield getattr(law, name)
    if isinstance(law, UnionBounds):
        yield from law.parts


def check(
    found: Sequence[Quantity],
    setting: ContractFacts,
    compared: Collection[Fraction],
    worlds: Iterator[list[Fraction | None]],
    slack: Fraction = Fraction(0),
) -> Counter[str]:
    told = list(axioms_of(found, [q.term for q in found], [compared] * len(found), setting))
    seen: Counter[str] = Counter()
    for measured in worlds:
        for law in told:
            if any(measured[n] is None for n in spoken(law)):
                continue
            kept = keeps(law, measured, slack)
            shown = [f"{found[n]} = {measured[n]}, {found[n].side}" for n in spoken(law)]
            assert kept is not False, (law, shown)
            seen[type(law).__name__] += kept is True
    return seen


ODD = ir.FieldTest("category", "==", "odd")
SLICES = (*small.SLICES, ir.Slice("mixed", where=ir.NoneOf(ir.AllOf((ODD, small.LONG)))))
"""`odd` and `mixed` cover all requests and overlap; `long` and `brief` are disjoint."""
PROGRAM = replace(small.program(), slices=SLICES)
NAMES = [item.name for item in SLICES]


def with_own(world: World, random: Random) -> World:
    """Return a world in which every request has a value of the user metric."""
    units = tuple(
        replace(unit, values={**unit.values, OWN: (Fraction(random.choice((0, 0, 1, 2))),)})
        for unit in world.data["data.jsonl"]
    )
    return replace(world, data={"data.jsonl": units})


def of_slices(world: World) -> dict[str, tuple[Unit, ...]]:
    return {item.name: rows(item, PROGRAM, world) for item in SLICES}


@pytest.mark.full
def test_axioms_about_whole_slices_hold() -> None:
    found, random = quantities(SMALL, NAMES), Random(1)
    setting = ContractFacts(
        inclusion(PROGRAM), Fraction(1), division(PROGRAM), KNOWN, frozenset({OWN})
    )

    def worlds() -> Iterator[list[Fraction | None]]:
        for seed in range(12):
            for world in small.worlds(seed, 11):
                measured = with_own(world, random)
                yield values(found, measured, of_slices(measured))

    seen = check(found, setting, small.NUMBERS, worlds())
    for law in (
        "LowerBound",
        "UpperBound",
        "LinearBound",
        "ExtremeMean",
        "ConstantValues",
        "QuantileBound",
        "UnionBounds",
    ):
        assert seen[law] >= 100, seen


@pytest.mark.full
def test_axioms_about_requests_and_windows_hold() -> None:
    found, random = quantities(SMALL, ["all"]), Random(2)
    for size in (1, 2):
        setting = ContractFacts(
            same_slice, Fraction(1), known=KNOWN, by_request=frozenset({OWN}), one_request=size == 1
        )

        def worlds(size: int = size) -> Iterator[list[Fraction | None]]:
            for seed in range(10):
                for world in small.worlds(seed, 5):
                    measured = with_own(world, random)
                    for group in windows(measured.data["data.jsonl"], size):
                        yield values(found, measured, {"all": group})

        seen = check(found, setting, small.NUMBERS, worlds())
        for law in ("LinearBound", "ExtremeMean", "ConstantValues", "QuantileBound"):
            assert seen[law] >= 100, (size, seen)


@pytest.mark.full
def test_axioms_hold_for_distributions() -> None:
    found = quantities(OF_DISTRIBUTIONS, ["all"])
    bounds = [Fraction(n, 100) for n in (1, 5, 20, 50, 100, 300)]
    setting = ContractFacts(same_slice, Fraction(1))

    def worlds() -> Iterator[list[Fraction | None]]:
        for seed in range(60):
            made = MeasuredWorlds(seed)
            world = made.world(made.choice((1, 2, 5, 12)))
            yield values(found, world, {"all": world.data["data.jsonl"]})

    seen = check(found, setting, bounds, worlds(), ROUNDING)
    for law in ("LowerBound", "UpperBound", "LinearBound", "ConditionalBound", "NegatedBound"):
        assert seen[law] >= 100, seen


@pytest.mark.full
def test_both_translations_state_the_axioms() -> None:
    """The statements of z3's translation and of scripts about values equal the axioms."""
    found = quantities(
        (*SMALL[:2], ir.Metric("kl"), ir.Metric("tv"), *OF_DISTRIBUTIONS[5:]), ["all"]
    )
    found += quantities(SMALL[1:], ["long", "brief"])
    inside, divided = inclusion(PROGRAM), division(PROGRAM)
    setting = ContractFacts(inside, Fraction(1), divided, KNOWN, frozenset({OWN}))
    told = list(axioms_of(found, [q.term for q in found], [small.NUMBERS] * len(found), setting))
    random, chosen = Random(3), dict[type[Axiom], list[Axiom]]()
    for law in random.sample(told, len(told)):
        same = chosen.setdefault(type(law), [])
        if len(same) < 40:
            same.append(law)
    translator = Translator()
    variables = [translator._variable(quantity) for quantity in found]
    symbols = [f"v{n}" for n in range(len(found))]
    reals = [z3.Real(symbol, translator.context) for symbol in symbols]
    declared = "\n".join(f"(declare-const {symbol} Real)" for symbol in symbols)
    seen: Counter[tuple[str, bool]] = Counter()
    for law in (law for same in chosen.values() for law in same):
        stated = axiom(law, variables, Z3Algebra(translator.context))
        script = f"{declared}\n(assert {axiom(law, symbols, WRITTEN)})"
        (written,) = z3.parse_smt2_string(script, ctx=translator.context)
        for _ in range(12):
            value = [Fraction(random.randint(-1, 4), 2) for _ in found]
            kept = keeps(law, value, Fraction(0)) is not False
            used = {n: real(value[n], translator.context) for n in spoken(law)}
            for formula, names in ((stated, variables), (written, reals)):
                put = z3.substitute(formula, *((names[n], used[n]) for n in used))
                assert z3.is_true(z3.simplify(put)) is kept, (law, value, formula)
            seen[type(law).__name__, kept] += 1
    assert len(seen) == 18, seen
