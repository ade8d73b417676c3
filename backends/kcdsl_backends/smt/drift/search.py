"""Bounds of the largest drift that a system of forms admits, by threshold questions to z3.

A question is whether some symbols satisfy the facts and move one element of the drift, in one
direction, to a threshold. If it is unsatisfiable, the threshold is a bound. Only facts that are
connected to the element are asserted; symbols in no fact take their worst value.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import z3

from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.smt.drift.forms import Constraint, Inequality, SymbolForm, System, row
from kcdsl_backends.smt.solver import Expression, Outcome

CLOSE = 2.0**-6
"""Relative gap between a bound and the attained value at which the search ends."""
_MEGABYTES = 2048
"""Memory limit of z3."""
_STEPS = 64
"""Largest number of questions about one element."""


@dataclass(slots=True)
class DriftElement:
    """One element of the drift in one direction, with upper bound `high` and attained value `low`.

    `integers` are symbols of codes; see `System`. `core` has the coefficients of symbols in facts,
    `rest` is the sum of all other terms. `hard` is a threshold that z3 did not decide.
    """

    place: int
    sign: int
    core: Inequality
    rest: float
    facts: tuple[Constraint, ...]
    high: float
    integers: dict[int, tuple[float, float]] = field(default_factory=dict)
    low: float = -math.inf
    values: dict[int, float] = field(default_factory=dict)
    hard: float = -math.inf
    asked: int = 0

    def attained(self) -> float:
        """Return the drift at `values`."""
        pairs = zip(self.core.symbols, self.core.coefs, strict=True)
        return math.fsum(c * self.values[i] for i, c in pairs) + self.rest


@dataclass(frozen=True, slots=True)
class Size:
    """Maximum size of the questions about one element."""

    symbols: int
    splits: int
    terms: int

    def __str__(self) -> str:
        return f"{self.symbols:,} symbols, {self.splits:,} case splits, {self.terms:,} terms"


def targets(system: System, drift: SymbolForm, known: Box) -> list[DriftElement]:
    """Return the elements of a drift in both directions, the largest bound first."""
    by_symbol: dict[int, list[int]] = defaultdict(list)
    symbols = [fact.symbols for fact in system.facts]
    for number, own in enumerate(symbols):
        for symbol in own:
            by_symbol[symbol].append(number)
    found = []
    for place in range(drift.centre.numel()):
        for sign in (1, -1):
            whole = row(drift if sign < 0 else -drift, place)  # -drift <= 0 for a positive sign
            one = _target(system, symbols, by_symbol, place, sign, whole)
            end = float((known.hi if sign > 0 else -known.lo).flatten()[place])
            one.high = min(one.high, end)
            found.append(one)
    return sorted(found, key=lambda one: -one.high)


def _target(
    system: System,
    symbols: list[frozenset[int]],
    by_symbol: dict[int, list[int]],
    place: int,
    sign: int,
    whole: Inequality,
) -> DriftElement:
    reached, numbers, waiting = set[int](), set[int](), list(whole.symbols)
    while waiting:
        for number in by_symbol.get(waiting.pop(), ()):
            if number not in numbers:
                numbers.add(number)
                new = symbols[number] - reached
                reached |= new
                waiting += new
    pairs = list(zip(whole.symbols, whole.coefs, strict=True))
    core = [(i, -c) for i, c in pairs if i in reached]
    rest = math.fsum(abs(c) for i, c in pairs if i not in reached) - whole.constant
    high = rest + math.fsum(abs(c) for _, c in core)
    held = Inequality(tuple(i for i, _ in core), tuple(c for _, c in core), 0.0)
    facts = tuple(system.facts[number] for number in sorted(numbers))
    integers = {i: system.integers[i] for i in sorted(reached) if i in system.integers}
    return DriftElement(place, sign, held, _up(rest), facts, _up(_up(high)), integers)


def _up(value: float) -> float:
    return math.nextafter(value, math.inf)


def size_of(found: list[DriftElement]) -> Size:
    """Return the maximum size of the questions about some targets."""

    def one(target: DriftElement) -> tuple[int, int, int]:
        symbols = frozenset[int]().union(*(fact.symbols for fact in target.facts))
        splits = sum(len(fact.cases) > 1 for fact in target.facts) + len(target.integers)
        rows = [row for fact in target.facts for case in fact.cases for row in case]
        return len(symbols), splits, sum(len(row.symbols) for row in rows)

    by_size = [one(target) for target in found]
    return Size(*(max((each[i] for each in by_size), default=0) for i in range(3)))


class ElementQuestion(Protocol):
    """Asks a solver about one target."""

    def reaches(self, threshold: float, seconds: float) -> Outcome:
        """Return whether the element reaches a threshold; if so, store values that reach it."""


# --- z3 -------------------------------------------------------------------------------------------


class DriftQuestion:
    """A z3 solver that holds the facts of one target."""

    def __init__(self, target: DriftElement) -> None:
        self._context = z3.Context()
        self._target = target
        self._solver = z3.Solver(ctx=self._context)
        self._solver.set("random_seed", 0)
        self._solver.set("max_memory", _MEGABYTES)
        used = {i for fact in target.facts for i in fact.symbols} | set(target.core.symbols)
        self._symbols = {i: z3.Real(f"s{i}", self._context) for i in sorted(used)}
        for symbol in self._symbols.values():
            self._solver.add(symbol >= -1, symbol <= 1)
        for fact in target.facts:
            cases = [self._all(case) for case in fact.cases]
            self._solver.add(cases[0] if len(cases) == 1 else z3.Or(*cases))
        for i, (middle, radius) in target.integers.items():
            code = z3.ToReal(z3.Int(f"n{i}", self._context))
            self._solver.add(self._number(radius) * self._symbols[i] == code - self._number(middle))
        self._objective = self._sum(target.core)

    def _all(self, case: tuple[Inequality, ...]) -> Expression:
        rows = [self._sum(one) <= self._number(-one.constant) for one in case]
        return rows[0] if len(rows) == 1 else z3.And(*rows)

    def _sum(self, one: Inequality) -> Expression:
        pairs = zip(one.symbols, one.coefs, strict=True)
        terms = [self._number(value) * self._symbols[i] for i, value in pairs]
        if len(terms) < 2:
            return terms[0] if terms else self._number(0.0)
        return z3.Sum(terms)

    def _number(self, value: float) -> Expression:
        exact = Fraction(value)
        return z3.Q(exact.numerator, exact.denominator, self._context)

    def reaches(self, threshold: float, seconds: float) -> Outcome:
        """Return whether the element reaches a threshold; if so, store values that reach it."""
        if seconds <= 0:
            return Outcome.UNKNOWN
        self._solver.push()
        try:
            self._assert(threshold)
            self._solver.set("timeout", max(1, int(1000 * min(seconds, 10**6))))
            answer = self._solver.check()
            if answer == z3.sat:
                self._keep(self._solver.model())
                return Outcome.SAT
            return Outcome.UNSAT if answer == z3.unsat else Outcome.UNKNOWN
        except z3.Z3Exception:
            return Outcome.UNKNOWN
        finally:
            self._solver.pop()

    def _assert(self, threshold: float) -> None:
        target = self._target
        exact = Fraction(threshold) - Fraction(target.rest)
        self._solver.add(self._objective >= z3.Q(exact.numerator, exact.denominator, self._context))

    def _keep(self, model: z3.ModelRef) -> None:
        values = {}
        for i, symbol in self._symbols.items():
            value = model.eval(symbol, model_completion=True)
            values[i] = float(Fraction(value.numerator_as_long(), value.denominator_as_long()))
        self._target.values = values
        self._target.low = max(self._target.low, self._target.attained())

    def text(self, threshold: float) -> str:
        """Return the question in SMT-LIB: satisfiable if the element may reach a threshold."""
        self._solver.push()
        try:
            self._assert(threshold)
            logic = "QF_LIRA" if self._target.integers else "QF_LRA"
            return f"(set-logic {logic})\n{self._solver.to_smt2()}"
        finally:
            self._solver.pop()


@dataclass(slots=True)
class Search:
    """Lowers the largest bound of all targets until it is close to the attained value.

    Args:
        found: the targets; their bounds are lowered in place.
        seconds: time limit; None for none.
        question: makes the question about a target.
    """

    found: list[DriftElement]
    seconds: float | None = None
    question: Callable[[DriftElement], ElementQuestion] = DriftQuestion
    _started: float = field(default_factory=time.monotonic)
    _questions: dict[tuple[int, int], ElementQuestion] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        """Return the number of questions so far."""
        return sum(one.asked for one in self.found)

    def left(self) -> float:
        """Return the remaining seconds."""
        if self.seconds is None:
            return math.inf
        return self.seconds - (time.monotonic() - self._started)

    def settle(self, threshold: float) -> Outcome:
        """Decide whether some target exceeds a threshold, the largest bounds first."""
        for target in self.found:
            if target.high <= threshold:
                continue
            answer = self._ask(target, _up(threshold), 1.0)
            if answer is not Outcome.UNSAT:
                return answer
            target.high = _up(threshold) if target.high > threshold else target.high
        return Outcome.UNSAT

    def tighten(self) -> None:
        """Lower the largest bound until it is close to the attained value or the time is over."""
        while self.left() > 0:
            top = max(self.found, key=lambda one: one.high)
            low = max(*(one.low for one in self.found), top.hard, 0.0)
            middle = low + (top.high - low) * (0.5 if top.asked else 0.75)
            done = top.high <= low * (1 + CLOSE) or top.asked >= _STEPS
            if done or not low < middle < top.high:
                return
            match self._ask(top, middle, 0.25):
                case Outcome.UNSAT:
                    top.high = middle
                case Outcome.UNKNOWN:
                    top.hard = middle

    def _ask(self, target: DriftElement, threshold: float, share: float) -> Outcome:
        """Ask about one target within a share of the remaining time."""
        target.asked += 1
        if threshold > target.high:
            return Outcome.UNSAT
        if not target.facts:  # all symbols are free
            target.low = target.high
            return Outcome.SAT
        key = target.place, target.sign
        if key not in self._questions:
            self._questions.clear()
            self._questions[key] = self.question(target)
        return self._questions[key].reaches(threshold, self.left() * share)
