"""The truth of formulas and the value of terms over finitely many units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import ceil
from typing import Literal, assert_never

from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import subterms
from kcdsl.metrics import find_metric
from tests.support.semantics.interpretations import Measured, Pair, Unit, World
from tests.support.semantics.norms import Length, Undefined, difference, keeps_first, less, norm

Side = Literal["largest", "smallest"]
SIDES: tuple[Side, Side] = ("largest", "smallest")
Inputs = Mapping[str, str]
"""The input of each variable, by key."""
Runs = Mapping[tuple[str, str], Pair]
"""The selected pair of runs of each block and input."""

NO_RUNS: Runs = {}


@dataclass(frozen=True, slots=True)
class Scope:
    """The units that a statement is about.

    `rows(slice)` gives the requests that a quantifier over a slice ranges over. The formulas and
    terms must belong to one store: values are cached by the identity of the term.
    """

    world: World
    rows: Callable[[str], tuple[Unit, ...]]
    requests: tuple[Unit, ...]
    timed: tuple[Unit, ...] = ()
    _known: dict[tuple[int, Side], Fraction] = field(default_factory=dict)

    # --- formulas ---------------------------------------------------------------------------

    def holds(self, formula: ir.Formula, at: Inputs, negated: bool = False) -> bool:
        """Return the truth of a formula; raises Undefined.

        Every part is evaluated, so that an undefined one is found anywhere. `negated`: the formula
        is under an odd number of negations, which reverses its harmful side.
        """
        match formula:
            case ir.Compare():
                return self._compare(formula, at, negated)
            case ir.NoFlip(block, variable, k):
                kept = [keeps_first(pair, k) for pair in self._admitted(block, at[variable])]
                return all(kept)
            case ir.HasFields(fields):
                return all(carries(unit, fields) for unit in self._recorded())
            case ir.Not(of):
                return not self.holds(of, at, not negated)
            case ir.Connective("implies", (first, second)):
                given = self.holds(first, at, not negated)
                then = self.holds(second, at, negated)
                return then or not given
            case ir.Connective(op, parts):
                found = [self.holds(part, at, negated) for part in parts]
                return all(found) if op == "and" else any(found)
            case ir.Quantified(quantifier, variable, region, body):
                inputs = self._inputs(region)
                found = [self.holds(body, {**at, variable: x}, negated) for x in inputs]
                return all(found) if quantifier == "forall" else any(found)
            case _:
                assert_never(formula)

    def _compare(self, compare: ir.Compare, at: Inputs, negated: bool) -> bool:
        """Compare two terms; a drift in them quantifies over all admitted pairs of runs."""
        small_is_good = (compare.op not in (">=", ">")) != negated
        left_side: Side = "largest" if small_is_good else "smallest"
        found = []
        for runs in self._choices(compare, at):
            left = self.value(compare.left, left_side, at, runs)
            right = self.value(compare.right, _other(left_side), at, runs)
            found.append(_compared(compare.op, left, right))
        return all(found)

    def _choices(self, compare: ir.Compare, at: Inputs) -> Iterator[Runs]:
        """Yield each choice of one admitted pair of runs for every drift of a comparison."""
        norms = [
            t
            for side in (compare.left, compare.right)
            for t in subterms(side)
            if isinstance(t, ir.Norm) and not t.of.measured
        ]
        keys = list(dict.fromkeys((n.of.block, at[n.of.variable]) for n in norms))
        for chosen in product(*(self._admitted(*key) for key in keys)):
            yield dict(zip(keys, chosen, strict=True))

    def _admitted(self, block: str, key: str) -> tuple[Pair, ...]:
        pairs = self.world.admitted.get((block, key), ())
        if not pairs:
            raise Undefined(f"no run of {block} on {key} is admitted")
        return pairs

    def _inputs(self, region: ir.Region) -> list[str]:
        every_row = region.kind is not ir.RegionKind.ROWS  # a long request is outside the region
        found = [unit.key for unit in self.rows(region.slice)] if every_row else []
        if region.kind is not ir.RegionKind.POINTS:
            found += self.world.inputs.get(region, ())
        if not found:
            raise Undefined(f"the region of {region.slice} is empty")
        return found

    def _recorded(self) -> tuple[Unit, ...]:
        if not self.requests or any(unit.record is None for unit in self.requests):
            raise Undefined("a request has no trace record")
        return self.requests

    # --- terms ------------------------------------------------------------------------------

    def value(self, term: ir.Term, side: Side, at: Inputs, runs: Runs = NO_RUNS) -> Length:
        """Return the value of a term; raises Undefined.

        `side` selects the token that represents a request where one must. Where a sign decides
        which tokens make the term large, all readings are tried.
        """
        match term:
            case ir.Number(value):
                return value
            case ir.Metric():
                return self._statistic("aggregate", term, None, side)
            case ir.Statistic(kind, of, q):
                key = id(term), side
                if key not in self._known:
                    self._known[key] = self._statistic(kind, of, q, side)
                return self._known[key]
            case ir.Norm(kind, drift):
                run = drift.block, at[drift.variable]
                pair = self.world.observed.get(run) if drift.measured else runs[run]
                if pair is None:
                    raise Undefined(f"no run of {run[0]} on {run[1]} was observed")
                return norm(kind, difference(pair))
            case ir.Abs(of):
                return _magnitude([self.value(of, one, at, runs) for one in SIDES], side)
            case ir.Arith("+" | "-" as op, left, right):
                other = _other(side) if op == "-" else side
                first = self.value(left, side, at, runs)
                return calculated(op, first, self.value(right, other, at, runs))
            case ir.Arith(op, left, right):
                lefts, rights = (
                    [self.value(part, one, at, runs) for one in SIDES] for part in (left, right)
                )
                found = [_rational(calculated(op, a, b)) for a in lefts for b in rights]
                return max(found) if side == "largest" else min(found)
            case ir.TableValue(name):
                raise Undefined(f"the table {name} was not written out")
            case _:
                assert_never(term)

    def _statistic(self, kind: str, of: ir.Term, q: Fraction | None, side: Side) -> Fraction:
        units = self.timed if is_timed(of) else self.requests
        if kind == "aggregate" and isinstance(of, ir.Metric) and _is_aggregate(of.name):
            return _finite(self.world.aggregate(of.name, units), of.name)
        values = [pointwise(of, unit) for unit in units]
        if not values:
            raise Undefined("there are no units")
        every = [value for found in values for value in found]
        match kind:
            case "mean":
                return sum(every, Fraction(0)) / len(every)
            case "rate":
                if not set(every) <= {0, 1}:
                    raise Undefined("a rate is of values 0 and 1")
                return sum(every, Fraction(0)) / len(every)
            case "max":
                return max(every)
            case "min":
                return min(every)
        worst = sorted(max(found) if side == "largest" else min(found) for found in values)
        if kind == "quantile" and q is not None:
            return worst[max(1, ceil(q * len(worst))) - 1]
        if kind == "aggregate":
            return worst[-1] if side == "largest" else worst[0]
        raise Undefined(f"{kind} is no statistic")


def pointwise(term: ir.Term, unit: Unit) -> list[Fraction]:
    """Return the values of a term on one unit: one per token, or one; raises Undefined."""
    match term:
        case ir.Number(value):
            return [value]
        case ir.Metric(name):
            values = unit.values.get(name, ())
            if not values:
                raise Undefined(f"{name}: the request {unit.key} has no values")
            return [_finite(value, name) for value in values]
        case ir.Abs(of):
            return [abs(value) for value in pointwise(of, unit)]
        case ir.Arith(op, left, right):
            a, b = pointwise(left, unit), pointwise(right, unit)
            size = max(len(a), len(b))
            if not {len(a), len(b)} <= {1, size}:
                raise Undefined("metrics with different numbers of values meet")
            pairs = zip(_spread(a, size), _spread(b, size), strict=True)
            return [_rational(calculated(op, x, y)) for x, y in pairs]
        case _:
            raise Undefined("a statistic ranges over metrics")


def carries(unit: Unit, fields: Sequence[str]) -> bool:
    """Return whether the trace record of a request has every field, not null and not empty."""
    record = unit.record or {}
    return all(record.get(name) not in (None, "", [], {}) for name in fields)


def is_timed(term: ir.Term) -> bool:
    """Return whether a term ranges over timed runs; undefined where it mixes them with requests."""
    found = {
        definition.family is ir.Family.RUNTIME and definition.name != "failure_rate"
        for part in subterms(term)
        if isinstance(part, ir.Metric) and (definition := find_metric(part.name)) is not None
    }
    if len(found) > 1:
        raise Undefined("times meet values of the model")
    return found == {True}


def calculated(op: str, left: Length, right: Length) -> Length:
    """Return `left op right`; undefined for a division by zero and for irrational numbers."""
    a, b = _rational(left), _rational(right)
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "/":
            if b == 0:
                raise Undefined("division by zero")
            return a / b
        case _:
            raise ValueError(f"unknown operation {op!r}")


def _magnitude(readings: Sequence[Length], side: Side) -> Length:
    """Return the largest or the smallest magnitude between readings of a number."""
    numbers = [reading for reading in readings if isinstance(reading, Fraction)]
    if len(numbers) < len(readings):  # the norm of a drift, which has one reading
        return readings[0]
    if side == "largest":
        return max(map(abs, numbers))
    return Fraction(0) if min(numbers) <= 0 <= max(numbers) else min(map(abs, numbers))


def _compared(op: str, left: Length, right: Length) -> bool:
    match op:
        case "<=":
            return not less(right, left)
        case "<":
            return less(left, right)
        case ">=":
            return not less(left, right)
        case ">":
            return less(right, left)
        case "==":
            return left == right
        case _:
            raise ValueError(f"unknown comparison {op!r}")


def _spread(values: list[Fraction], size: int) -> list[Fraction]:
    return values * size if len(values) == 1 else values


def _rational(value: Length) -> Fraction:
    if not isinstance(value, Fraction):
        raise Undefined("arithmetic with an irrational norm has no exact value")
    return value


def _finite(value: Measured, name: str) -> Fraction:
    if value is None:
        raise Undefined(f"{name}: a value is not a finite number")
    return value


def _is_aggregate(name: str) -> bool:
    definition = find_metric(name)
    return definition is not None and definition.kind == "aggregate"


def _other(side: Side) -> Side:
    return "smallest" if side == "largest" else "largest"
