"""Random contracts and worlds, and the solvers that read SMT-LIB."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random

import cvc5
import z3

from kcdsl.ir import terms as ir
from kcdsl.logic.smtlib import text
from kcdsl.logic.smtlib.theory import Extreme, MeasuredTerm, NoFlips, Opaque, Theory
from tests.support.semantics.formulas import Scope
from tests.support.semantics.interpretations import Measured, Pair, Unit, World
from tests.support.semantics.norms import Length, difference, less, norm

NUMBERS = tuple(Fraction(n, 10) for n in (0, 1, 2, 5, 7, 10, 15, 30))
METRICS = ("kl", "tv", "logit_l2", "logit_linf", "logit_span", "top1_overlap", "hidden_l2")
MEASURED = ("kl", "tv", "logit_l2", "hidden_l2", "top1_overlap")
BLOCKS = ("attn_0", "model")
FIELDS = ("rng_seed", "build_fingerprint")
LENGTH = {n: ir.FieldTest("length", ">", Fraction(v)) for n, v in (("long", 128), ("longer", 512))}
SAFETY = ir.FieldTest("category", "==", "safety")
SLICES = (
    ir.Slice("all"),
    ir.Slice("long", where=LENGTH["long"]),
    ir.Slice("longer", where=ir.AllOf((LENGTH["longer"], ir.FieldTest("beta", "==", False)))),
    ir.Slice("safety", where=ir.AnyOf((SAFETY, LENGTH["longer"]))),
    ir.Slice("tame", where=ir.NoneOf(SAFETY)),
)


class Contracts(Random):
    """Random contracts; the same seed gives the same contract."""

    linear = True
    slices: tuple[ir.Slice, ...] = SLICES

    def number(self) -> ir.Number:
        return ir.Number(self.choice(NUMBERS))

    def pointwise(self) -> ir.Term:
        name = self.choice((*METRICS, "log_ratio"))
        metric: ir.Term = ir.Metric(name)
        return ir.Abs(metric) if name == "log_ratio" or self.random() < 0.1 else metric

    def statistic(self) -> ir.Term:
        kind = self.choice(("mean", "max", "min", "quantile", "quantile"))
        q = Fraction(self.choice((50, 90, 99)), 100) if kind == "quantile" else None
        return ir.Statistic(kind, self.pointwise(), q)

    def term(self, depth: int = 2) -> ir.Term:
        if depth == 0 or self.random() < 0.6:
            return self.statistic()
        inner = self.term(depth - 1)
        match self.choice(("scale", "sum", "abs", "share", "product")):
            case "scale":
                return ir.Arith("*", ir.Number(Fraction(2)), inner)
            case "sum":
                return ir.Arith(self.choice("+-"), inner, self.term(depth - 1))
            case "abs":
                return ir.Abs(ir.Arith("-", inner, self.number()))
            case "share" if not self.linear:
                return ir.Arith("/", inner, self.term(depth - 1))
            case "product" if not self.linear:
                return ir.Arith("*", inner, self.term(depth - 1))
            case _:
                return ir.Arith("/", inner, ir.Number(Fraction(3)))

    def compare(self) -> ir.Compare:
        op = self.choice(("<=", "<=", "<", ">=", ">", "=="))
        right = self.number() if self.random() < 0.8 else self.term(1)
        return ir.Compare(op, self.term(), right)

    def fields(self) -> ir.HasFields:
        return ir.HasFields(tuple(self.sample(FIELDS, self.randint(1, 2))))

    def formula(self, depth: int = 2) -> ir.Formula:
        if depth == 0 or self.random() < 0.5:
            return self.compare() if self.random() < 0.9 else self.fields()
        parts = (self.formula(depth - 1), self.formula(depth - 1))
        op = self.choice(("and", "or", "implies", "not"))
        return ir.Not(parts[0]) if op == "not" else ir.Connective(op, parts)

    def region(self, points: bool = False) -> ir.Region:
        kinds = (ir.RegionKind.POINTS, ir.RegionKind.BALL, ir.RegionKind.HULL)
        kind = ir.RegionKind.POINTS if points else self.choice(kinds)
        radius = Fraction(0) if kind is ir.RegionKind.POINTS else self.choice(NUMBERS[:3])
        name = self.choice(self.slices).name
        if kind is ir.RegionKind.HULL and radius == NUMBERS[1]:
            return ir.Region(ir.RegionKind.ROWS, name, radius, longest=1 + len(name) % 2)
        return ir.Region(kind, name, radius)

    def norm(self, measured: bool) -> ir.Norm:
        drift = ir.Drift(self.choice(("attn_0", "model")), "x", measured)
        return ir.Norm(self.choice(("inf", "2", "span")), drift)

    def universal(self) -> ir.Formula:
        """Build a claim about every input and every admitted run."""
        if self.random() < 0.3:
            block, k = self.choice(("model", "head")), self.choice((1, 5))
            return ir.Quantified("forall", "x", self.region(), ir.NoFlip(block, "x", k))
        parts = tuple(
            ir.Compare(self.choice(("<=", "<")), self.norm(False), self.number())
            for _ in range(self.randint(1, 2))
        )
        body = parts[0] if len(parts) == 1 else ir.Connective("and", parts)
        return ir.Quantified("forall", "x", self.region(), body)

    def observed(self) -> ir.Formula:
        """Build a claim about the observed drift on the rows of a slice."""
        quantifier = self.choice(("forall", "forall", "exists"))
        return ir.Quantified(quantifier, "x", self.region(points=True), self.about_rows(2))

    def about_rows(self, depth: int) -> ir.Formula:
        if depth == 0 or self.random() < 0.6:
            op = self.choice(("<=", "<=", "<", ">=", ">"))
            left: ir.Term = self.norm(True)
            if self.random() < 0.2:
                left = ir.Arith("+", left, self.norm(True))
            return ir.Compare(op, left, self.number())
        parts = (self.about_rows(depth - 1), self.about_rows(depth - 1))
        op = self.choice(("and", "or", "implies", "not"))
        return ir.Not(parts[0]) if op == "not" else ir.Connective(op, parts)

    def clause(self, name: str) -> ir.Clause:
        kind = self.random()
        family, level = ir.Family.NUMERICAL, self.choice(list(ir.Level))
        if kind < 0.2:
            return ir.Clause(name, family, self.universal(), level)
        if kind < 0.35:
            return ir.Clause(name, family, self.observed(), level)
        count = self.randint(1, 2)
        names = tuple(s.name for s in self.sample(self.slices, count))
        budget = None
        if self.random() < 0.25:
            unit = self.choice(("requests", "windows"))
            budget = ir.Budget(self.choice((Fraction(1, 100), Fraction(1, 10))), unit)
        return ir.Clause(name, family, self.formula(), level, names, budget)

    def program(self, clauses: int = 4) -> ir.Program:
        made = tuple(self.clause(f"C-{n}") for n in range(1, clauses + 1))
        return program(*made, slices=self.slices)


def program(*clauses: ir.Clause, slices: tuple[ir.Slice, ...] = SLICES) -> ir.Program:
    """Return a program of these clauses."""
    return ir.Program(
        "generated",
        "1",
        ir.ModelRef("m.safetensors", "llama"),
        ir.KernelRef("torch.eager", ()),
        ir.KernelRef("torch.sdpa", ()),
        "data.jsonl",
        slices,
        clauses,
        ir.Escalation(
            tuple((level, "log") for level in ir.Level),
            tuple((family, level, "log") for family in ir.Family for level in ir.Level),
        ),
    )


class Worlds(Random):
    """Random finite worlds."""

    tokens = 1
    """The largest number of values of a request."""

    def unit(self, number: int) -> Unit:
        count = self.randint(1, self.tokens)
        drifts = [self.choice(NUMBERS) for _ in range(count)]
        values: dict[str, tuple[Measured, ...]] = {
            name: tuple(self.choice(NUMBERS) for _ in range(count)) for name in ("hidden_l2",)
        }
        values["top1_overlap"] = tuple(
            self.choice((Fraction(0), Fraction(1))) for _ in range(count)
        )
        # Two classes whose logits drift by (d, -d) such that p and q change places: linf = d,
        # span = 2d, tv = tanh(d/2), kl = d tanh(d/2), ln w = d or -d. Classes that nobody chooses
        # lengthen the drift to l2 = 3d/2.
        values["logit_linf"] = tuple(drifts)
        values["logit_l2"] = tuple(d * Fraction(3, 2) for d in drifts)
        values["logit_span"] = tuple(2 * d for d in drifts)
        values["tv"] = tuple(Fraction(math.tanh(d / 2)) for d in drifts)
        values["kl"] = tuple(Fraction(float(d) * math.tanh(d / 2)) for d in drifts)
        values["log_ratio"] = tuple(self.choice((-d, d)) for d in drifts)
        fields = {
            "length": Fraction(self.choice((1, 128, 129, 512, 513))),
            "category": self.choice(("safety", "other")),
            "beta": self.random() < 0.5,
        }
        record = {name: self.choice((None, "x", "x", "x")) for name in FIELDS}
        return Unit(f"r{number}", fields, values, record)

    def matrix(self) -> tuple[tuple[Measured, ...], ...]:
        return tuple(
            tuple(Fraction(self.randint(-3, 3), 2) for _ in range(3))
            for _ in range(self.randint(1, 2))
        )

    def pair(self) -> Pair:
        """Return two runs; every row of their difference has a rational length."""
        train = self.matrix()
        shapes = ((0, 0, 0), (3, 4, 0), (1, 2, 2), (0, 0, 2), (-2, 3, 6), (1, -2, -2))
        infer = []
        for row in train:
            scale = Fraction(1, self.choice((2, 5, 10)))
            moved = zip(row, self.choice(shapes), strict=True)
            infer.append(tuple(x + scale * d for x, d in moved if x is not None))
        return Pair(train, tuple(infer))

    def world(self, requests: int = 5) -> World:
        units = tuple(self.unit(n) for n in range(requests))
        blocks = ("attn_0", "model", "head")
        keys = [*(u.key for u in units), "inner"]
        return World(
            {"data.jsonl": units},
            admitted={
                (b, k): tuple(self.pair() for _ in range(self.randint(1, 3)))
                for b in blocks
                for k in keys
            },
            observed={(b, k): self.pair() for b in blocks for k in keys},
            window=2,
        )


class ExactWorlds(Worlds):
    """Worlds whose values are exact in float64."""

    tokens = 3
    spoilt = 0.0
    """The probability of a value that is not a finite number."""

    def unit(self, number: int) -> Unit:
        count = self.randint(1, self.tokens)
        values = {
            name: tuple(
                None if self.random() < self.spoilt else Fraction(self.randint(0, 8), 8)
                for _ in range(count)
            )
            for name in MEASURED
        }
        values["top1_overlap"] = tuple(Fraction(self.randint(0, 1)) for _ in range(count))
        record = {name: self.choice(("x", "x", "x", None, "")) for name in FIELDS}
        return Unit(f"r{number}", {}, values, record)

    def pair(self) -> Pair:
        rows = range(self.randint(1, 2))
        infer = tuple(tuple(Fraction(self.randint(-8, 8), 8) for _ in range(3)) for _ in rows)
        return Pair(tuple(tuple(Fraction(0) for _ in row) for row in infer), infer)


class MeasuredContracts(Contracts):
    """Statements about exact values that running the kernels decides."""

    linear = False
    slices = (ir.Slice("all"),)

    def pointwise(self) -> ir.Term:
        return ir.Metric(self.choice(MEASURED))

    def norm(self, measured: bool) -> ir.Norm:
        return ir.Norm(self.choice(("inf", "span")), ir.Drift(self.choice(BLOCKS), "x", measured))


# --- solvers -------------------------------------------------------------------------------------


def ask_z3(script: str, timeout_ms: int = 5000) -> str:
    """Return z3's answer to a script: sat, unsat or unknown."""
    solver = z3.Solver()
    solver.set("timeout", timeout_ms)
    solver.from_string(script)
    return str(solver.check())


def ask_cvc5(script: str, timeout_ms: int = 5000) -> str:
    """Return cvc5's answer to a script: sat, unsat or unknown."""
    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("tlimit-per", str(timeout_ms))
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, script, "script")
    said = []
    while not (command := parser.nextCommand()).isNull():
        said.append(str(command.invoke(solver, parser.getSymbolManager())))
    return "".join(said).strip()


# --- worlds as logic -----------------------------------------------------------------------------


def constant_values(theory: Theory, scopes: Callable[[str], Scope]) -> Iterator[str]:
    """Yield the value in a world of every constant that a theory has made.

    `scopes(slice)` gives the units of statements about a slice.
    """
    for constant, symbol in theory.constants.items():
        match constant:
            case MeasuredTerm():
                value = scopes(constant.slice).value(constant.term, constant.side or "largest", {})
            case Extreme():
                value = extreme(constant, scopes(""))
            case _:
                continue
        assert isinstance(value, Fraction)
        yield f"(= {symbol} {text.real(value)})"
    for meaning, symbol in theory.flags.items():
        match meaning:
            case ("field", _, str() as name, str() as wanted):
                true = scopes(name).holds(ir.HasFields((wanted,)), {})
            case NoFlips(_, block, k, region):
                claim = ir.Quantified("forall", "x", region, ir.NoFlip(block, "x", k))
                true = scopes("").holds(claim, {})
            case Opaque():
                true = scopes(meaning.slice).holds(meaning.formula, {}, meaning.turned)
            case _:
                raise AssertionError(meaning)
        yield symbol if true else f"(not {symbol})"


def extreme(wanted: Extreme, scope: Scope) -> Length:
    """Return the least or largest norm over a region of a world."""
    keys = [unit.key for unit in scope.rows(wanted.region.slice)]
    if wanted.region.kind is not ir.RegionKind.POINTS:
        keys += scope.world.inputs.get(wanted.region, ())
    pairs = [
        pair
        for key in keys
        for pair in (
            (scope.world.observed[wanted.block, key],)
            if wanted.measured
            else scope.world.admitted[wanted.block, key]
        )
    ]
    best, *rest = (norm(wanted.kind, difference(pair)) for pair in pairs)
    for length in rest:
        if less(best, length) if wanted.end == "largest" else less(length, best):
            best = length
    return best


def smt_script(theory: Theory, *claims: str) -> str:
    """Return a script that declares the constants of a theory and asserts claims."""
    lines = ["(set-logic ALL)"]
    lines += [text.declare(s, "Real") for s in theory.constants.values()]
    lines += [text.declare(s, "Bool") for s in theory.flags.values()]
    lines += [f"(assert {claim})" for claim in claims]
    return "\n".join([*lines, "(check-sat)"])
