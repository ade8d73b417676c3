"""Contracts about two metrics, and all small worlds that distinguish them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import combinations_with_replacement, product
from random import Random

from kcdsl.ir import terms as ir
from kcdsl.ir.predicates import Value
from tests.support.semantics.evaluation import Answer, Truth, answers
from tests.support.semantics.interpretations import Pair, Unit, World
from tests.support.semantics.norms import Undefined

LONG = ir.FieldTest("length", ">", Fraction(128))
BRIEF = ir.FieldTest("length", "<=", Fraction(128))
SLICES = (
    ir.Slice("all"),
    ir.Slice("long", where=LONG),
    ir.Slice("brief", where=BRIEF),
    ir.Slice("odd", where=ir.FieldTest("category", "==", "odd")),
)
FIELDS = ("rng_seed", "build_fingerprint")
TOKENS = ((0, 0), (1, 1), (1, 2), (2, 2))
"""(hidden_linf, hidden_l2) of one token; the first is at most the second."""
NUMBERS = tuple(Fraction(n, 2) for n in range(5))


class Statements(Random):
    """Random statements about `hidden_linf` and `hidden_l2`, whose values are 0, 1 and 2."""

    parts = 2
    """The depth of connectives."""
    division = 0.0
    """The probability that a term is a share."""

    def statistic(self) -> ir.Statistic:
        kind = self.choice(("mean", "max", "min", "quantile", "quantile"))
        q = Fraction(self.choice((50, 99)), 100) if kind == "quantile" else None
        metric: ir.Term = ir.Metric(self.choice(("hidden_linf", "hidden_l2", "hidden_l2")))
        return ir.Statistic(kind, metric, q)

    def term(self) -> ir.Term:
        chance = self.random()
        if chance < self.division:
            return ir.Arith("/", self.statistic(), self.statistic())
        if chance < 0.75:
            return self.statistic()
        if chance < 0.85:
            return ir.Arith(self.choice("+-"), self.statistic(), self.statistic())
        return ir.Abs(ir.Arith("-", self.statistic(), self.number()))

    def number(self) -> ir.Number:
        return ir.Number(self.choice(NUMBERS))

    def compare(self) -> ir.Formula:
        if self.random() < 0.1:
            return ir.HasFields(tuple(self.sample(FIELDS, self.randint(1, 2))))
        op = self.choice(("<=", "<=", "<=", "<", ">=", ">", "=="))
        right = self.number() if self.random() < 0.9 else self.statistic()
        return ir.Compare(op, self.term(), right)

    def formula(self, depth: int | None = None) -> ir.Formula:
        depth = self.parts if depth is None else depth
        if depth == 0 or self.random() < 0.55:
            return self.compare()
        parts = (self.formula(depth - 1), self.formula(depth - 1))
        op = self.choice(("and", "or", "or", "implies", "not"))
        return ir.Not(parts[0]) if op == "not" else ir.Connective(op, parts)

    def rows(self) -> ir.Formula:
        """Build a statement about the observed drift on every row, or on some row."""
        region = ir.Region(ir.RegionKind.POINTS, self.choice(SLICES).name)
        norms = [ir.Norm(self.choice(("inf", "2")), ir.Drift("b", "x", True)) for _ in range(2)]
        bounds: tuple[ir.Formula, ...] = tuple(
            ir.Compare(self.choice(("<=", "<", ">=", ">")), norm, self.number()) for norm in norms
        )
        body = ir.Connective(self.choice(("and", "or", "implies")), bounds)
        chosen = body if self.random() < 0.5 else bounds[0]
        return ir.Quantified(self.choice(("forall", "forall", "exists")), "x", region, chosen)

    def clause(self, name: str) -> ir.Clause:
        """Build a clause; all have one level and action, so that they are interchangeable."""
        family, level = ir.Family.NUMERICAL, ir.Level.L2
        if self.random() < 0.15:
            return ir.Clause(name, family, self.rows(), level)
        names = tuple(s.name for s in self.sample(SLICES, self.choice((1, 1, 2))))
        budget = None
        if self.random() < 0.25:
            rate = Fraction(self.choice((0, 1, 2, 3)), 4)
            budget = ir.Budget(rate, self.choice(("requests", "requests", "windows")))
        return ir.Clause(name, family, self.formula(), level, names, budget)

    def program(self, clauses: int) -> ir.Program:
        return program(*(self.clause(f"C-{n}") for n in range(1, clauses + 1)))


def program(*clauses: ir.Clause) -> ir.Program:
    """Return a program of these clauses."""
    return ir.Program(
        "small",
        "1",
        ir.ModelRef("m.safetensors", "llama"),
        ir.KernelRef("torch.eager", ()),
        ir.KernelRef("torch.sdpa", ()),
        "data.jsonl",
        SLICES,
        clauses,
        ir.Escalation(
            tuple((level, "log") for level in ir.Level),
            tuple((family, level, "log") for family in ir.Family for level in ir.Level),
        ),
    )


# --- worlds --------------------------------------------------------------------------------------


@cache
def requests() -> tuple[tuple[tuple[tuple[int, int], ...], int, str], ...]:
    """Return every request with one token or two: its tokens, its length and its category."""
    tokens = [
        *combinations_with_replacement(TOKENS, 1),
        *combinations_with_replacement(TOKENS, 2),
    ]
    return tuple(product(tokens, (100, 200), ("odd", "even")))


def world(random: Random, size: int) -> World:
    """Return a world of random requests, with the same drift of a block as of its state."""
    chosen = [random.choice(requests()) for _ in range(size)]
    if size > 3:  # few different requests, one of them often: percentiles differ from extremes
        few = chosen[:2]
        chosen = [few[0] if random.random() < 0.9 else few[1] for _ in range(size)]
    units, observed = [], {}
    for n, (tokens, length, category) in enumerate(chosen):
        values = {
            "hidden_linf": tuple(Fraction(t[0]) for t in tokens),
            "hidden_l2": tuple(Fraction(t[1]) for t in tokens),
        }
        record = {name: "x" for name in FIELDS if random.random() < 0.7}
        fields: dict[str, Value] = {"length": Fraction(length), "category": category}
        units.append(Unit(f"r{n}", fields, values, record))
        drift = random.choice(((0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 1), (2, 0, 0, 0)))
        zero = tuple(Fraction(0) for _ in drift)
        observed["b", f"r{n}"] = Pair((zero,), (tuple(Fraction(x) for x in drift),))
    return World({"data.jsonl": tuple(units)}, observed=observed, window=2)


def with_non_finite(given: World, random: Random) -> World:
    """Return a world in which one value is not a finite number."""
    units = list(given.data["data.jsonl"])
    n = random.randrange(len(units))
    name = random.choice(("hidden_linf", "hidden_l2"))
    values = {**units[n].values, name: (None, *units[n].values[name][1:])}
    units[n] = replace(units[n], values=values)
    return replace(given, data={"data.jsonl": tuple(units)})


def worlds(seed: int, count: int) -> Iterator[World]:
    """Yield small worlds: no request, one to three, and sometimes many."""
    random = Random(seed)
    yield World({"data.jsonl": ()})
    for n in range(count):
        found = world(random, random.choice((1, 1, 2, 2, 3, 40)))
        yield with_non_finite(found, random) if n % 12 == 11 else found


Kept = Mapping[tuple[str, str], Answer]


def is_true(answer: Answer) -> bool:
    """Return whether a statement is true."""
    return answer.truth is Truth.TRUE


def is_broken(answer: Answer) -> bool:
    """Return whether measured values contradict a statement: it is false, or divides by zero.

    A statement that is undefined for lack of evidence (no rows, no finite value, no record) is
    neither true nor broken.
    """
    return answer.truth is Truth.FALSE or answer.reason == "division by zero"


def in_world(given: ir.Program, here: World) -> Kept:
    """Return which clauses are true in a world."""
    try:
        return answers(given, here)
    except Undefined as error:
        raise AssertionError(error) from error
