"""Formulas of the IR over measured quantities as real arithmetic for z3.

A measured quantity (a statistic of a metric on a slice, or an aggregate metric) becomes a real
variable; two occurrences that mean the same share it. `facts` says what is true of the variables
whatever the kernels do (`assumptions`); nothing else is assumed.

A percentile of a metric of tokens counts requests, each of which stands by its worst token: by its
largest value where the comparison needs the term to be small, else by its smallest. So the same
words can mean two numbers, and they are two variables.

A statement that divides by a measured quantity is undefined where that is zero, so not true.

A statement about every input of a region is replaced by its instance at one unknown input of each
region inside it, so that what follows from the instance follows from the statement. Regions are
taken as not empty (an empty one is an error of its own).

Tables of thresholds are written out first (`kcdsl.ir.tables.expand_tables`); of a comparison with
a table that was not, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import z3

from kcdsl.ir.formulas import subterms
from kcdsl.ir.predicates import Division, Inside
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Compare,
    Connective,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    Norm,
    Not,
    Number,
    Quantified,
    Region,
    RegionKind,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.logic.algebra import LARGEST, SMALLEST, Side, Terms, other
from kcdsl.logic.axioms import has_two_sides, undivided
from kcdsl.logic.relations import Interval, canonical
from kcdsl_backends.smt.axioms import Fact, Quantity, Witness, assumptions
from kcdsl_backends.smt.solver import Expression, Z3Algebra, compare, real

Environment = Mapping[str, Witness]
NormKey = tuple[Witness, str, bool, str]
"""Input, block, measured, kind of norm."""
Flag = tuple[object, ...]
"""(slice, trace field) or (input, block, k)."""


def _apart(inner: str, outer: str) -> bool:
    return inner == outer


@dataclass(slots=True)
class Translator:
    """Translates formulas; one translator, one z3 context, one meaning per variable.

    `known` bounds metrics beyond their domain. `temperature` relates the span of the logits to the
    distributions in `facts`; None leaves them unrelated. `by_request` names metrics of the user
    with one value per request. `one_request`: measured terms are about a single request. What was
    made is in `quantities`, `norms`, `flags`.
    """

    context: z3.Context = field(default_factory=z3.Context)
    known: Mapping[str, Interval] = field(default_factory=dict)
    temperature: Fraction | None = None
    inside: Inside = _apart
    division: Division = undivided
    by_request: frozenset[str] = frozenset()
    one_request: bool = False
    flags: dict[Flag, Expression] = field(default_factory=dict)
    quantities: dict[Quantity, Expression] = field(default_factory=dict)
    norms: dict[NormKey, tuple[Expression, ...]] = field(default_factory=dict)
    constants: dict[Quantity, set[Fraction]] = field(default_factory=dict)
    """The numbers that each quantity is compared with."""
    _witnesses: list[Witness] = field(default_factory=list)
    _divisors: list[Expression] = field(default_factory=list)

    # --- formulas ---------------------------------------------------------------------------

    def announce(self, formula: Formula, site: str = "", positive: bool = True) -> None:
        """Make the inputs known at which universal statements are to be instantiated.

        To be called for every formula before the first is translated, and with `positive` false
        where its negation is going to be.
        """
        match formula:
            case Not(of):
                self.announce(of, site, not positive)
            case Connective("implies", (left, right)):
                self.announce(left, f"{site}.0", not positive)
                self.announce(right, f"{site}.1", positive)
            case Connective(_, parts):
                for n, part in enumerate(parts):
                    self.announce(part, f"{site}.{n}", positive)
            case Quantified(quantifier, _, region, body):
                self._instances(region)
                if (quantifier == "exists") == positive:
                    self._witnesses.append(Witness(region, _site(site, {})))
                self.announce(body, f"{site}.x", positive)
            case Compare() | NoFlip() | HasFields():
                return

    def requirement(self, formula: Formula, slice_name: str, site: str = "") -> Expression:
        """Return a consequence of the formula on a slice; equivalent where no input is quantified.

        `site` tells the existential quantifiers of different clauses apart.
        """
        self._divisors.clear()
        truth = self._formula(formula, slice_name, {}, True, False, site)
        return z3.And(truth, *(divisor != 0 for divisor in self._divisors))

    def negation(self, formula: Formula, slice_name: str, site: str = "") -> Expression:
        """Return a consequence of the formula's not being true, as `requirement`.

        Where the formula is about every input of a region, the one that speaks against it is the
        unknown input of that region, at which every other statement is instantiated.
        """
        self._divisors.clear()
        match formula:
            case Quantified("forall", variable, region, body):
                at = {variable: Witness(region)}
                self._instances(region)
                falsity = self._formula(body, slice_name, at, False, False, f"{site}.x")
            case _:
                falsity = self._formula(formula, slice_name, {}, False, False, site)
        return z3.Or(falsity, *(divisor == 0 for divisor in self._divisors))

    def _formula(
        self,
        formula: Formula,
        name: str,
        at: Environment,
        positive: bool,
        turned: bool,
        site: str,
    ) -> Expression:
        """Return what follows from the formula, or from its negation (`positive` false).

        `turned`: it stands under an odd number of negations of its clause.
        """
        match formula:
            case Compare(op, left, right):
                return self._compare(op, left, right, name, at, positive, turned)
            case NoFlip(block, variable, k):
                if variable not in at:
                    return self._true()
                flag = self._flag((at[variable], block, k))
                return flag if positive else z3.Not(flag)
            case HasFields(fields):
                every = z3.And(self._true(), *(self._flag((name, field)) for field in fields))
                return every if positive else z3.Not(every)
            case Not(of):
                return self._formula(of, name, at, not positive, not turned, site)
            case Connective("implies", (left, right)):
                parts = (
                    self._formula(left, name, at, not positive, not turned, f"{site}.0"),
                    self._formula(right, name, at, positive, turned, f"{site}.1"),
                )
                return z3.Or(*parts) if positive else z3.And(*parts)
            case Connective(op, parts):
                inner = [
                    self._formula(part, name, at, positive, turned, f"{site}.{n}")
                    for n, part in enumerate(parts)
                ]
                if (op == "and") == positive:
                    return z3.And(self._true(), *inner)
                return z3.Or(z3.Not(self._true()), *inner)
            case Quantified(quantifier, variable, region, body):
                inputs = self._instances(region)
                if (quantifier == "forall") != positive:
                    inputs = [Witness(region, _site(site, at))]
                found = (
                    self._formula(body, name, {**at, variable: w}, positive, turned, f"{site}.x")
                    for w in inputs
                )
                return z3.And(self._true(), *found)

    def announce_negation(self, formula: Formula, site: str = "") -> None:
        """Make the inputs known that `negation` speaks of, as `announce`."""
        if isinstance(formula, Quantified) and formula.quantifier == "forall":
            self._instances(formula.region)
            self.announce(formula.body, f"{site}.x", False)
        else:
            self.announce(formula, site, False)

    def _instances(self, region: Region) -> list[Witness]:
        """Return the known inputs that lie in the region; its own one always."""
        own = Witness(region)
        if own not in self._witnesses:
            self._witnesses.append(own)
        return [w for w in self._witnesses if self._region_inside(w.region, region)]

    def _region_inside(self, inner: Region, outer: Region) -> bool:
        return region_inside(inner, outer, self.inside)

    def _compare(
        self,
        op: str,
        left: Term,
        right: Term,
        name: str,
        at: Environment,
        positive: bool,
        turned: bool,
    ) -> Expression:
        """`drift` stands for every admitted run: a comparison with a constant uses the extremes."""
        match left, right:
            case (TableValue(), _) | (_, TableValue()):
                return self._true()
            case Norm(_, drift), Number(value) if drift.variable in at:
                least, _, largest = self._norm(left, at)
                constant = real(value, self.context)
                ends = {"<=": [largest], "<": [largest], ">=": [least], ">": [least]}
                parts = [compare(op, end, constant) for end in ends.get(op, [least, largest])]
                every = z3.And(self._true(), *parts)
                return every if positive else z3.Not(every)
            case Number(), Norm():
                flipped = {"<=": ">=", "<": ">", ">=": "<=", ">": "<"}.get(op, op)
                return self._compare(flipped, right, left, name, at, positive, turned)
        drifts = [norm.of for side in (left, right) for norm in _norms(side)]
        if any(drift.variable not in at for drift in drifts):
            return self._true()
        if not positive and any(not drift.measured for drift in drifts):
            return self._true()
        side: Side = LARGEST if (op not in (">=", ">")) != turned else SMALLEST
        first = self._term(left, name, at, side)
        second = self._term(right, name, at, other(side))
        self._note_constants(left, right, name, side)
        formula = compare(op, first, second)
        return formula if positive else z3.Not(formula)

    def _note_constants(self, left: Term, right: Term, name: str, side: Side) -> None:
        for term, number, end in ((left, right, side), (right, left, other(side))):
            if isinstance(number, Number) and isinstance(term, Metric | Statistic):
                quantity = self.quantity(term, name, end)
                self.constants.setdefault(quantity, set()).add(number.value)

    def _flag(self, key: Flag) -> Expression:
        if key not in self.flags:
            self.flags[key] = z3.Bool(f"b{len(self.flags)}", self.context)
        return self.flags[key]

    def _true(self) -> Expression:
        return z3.BoolVal(True, self.context)

    # --- terms ------------------------------------------------------------------------------

    def _term(self, term: Term, name: str, at: Environment, side: Side) -> Expression:
        def measured(of: Metric | Statistic, end: Side) -> Expression:
            return self._variable(self.quantity(of, name, end))

        def norm(of: Norm) -> Expression:
            return self._norm(of, at)[1]

        return Terms(Z3Algebra(self.context), measured, norm, self._divisors).value(term, side)

    def quantity(self, term: Metric | Statistic, name: str, side: Side) -> Quantity:
        """Return what a measured term on a slice is, on the given side where it has two."""
        if isinstance(term, Metric):
            kind, q, of = "value", None, _canonical(term)
        else:
            kind, q, of = term.kind, term.q, _canonical(term.of)
        two = has_two_sides(term, self.by_request)
        return Quantity(name, kind, q, of, side if two else "")

    def _variable(self, quantity: Quantity) -> Expression:
        if quantity not in self.quantities:
            self.quantities[quantity] = z3.Real(f"q{len(self.quantities)}", self.context)
        return self.quantities[quantity]

    def _norm(self, norm: Norm, at: Environment) -> tuple[Expression, ...]:
        """Return the norm at its least, at one admitted run, and at its largest."""
        drift = norm.of
        key = (at[drift.variable], drift.block, drift.measured, norm.kind)
        if key not in self.norms:
            n = len(self.norms)
            some = z3.Real(f"n{n}", self.context)
            if drift.measured:
                self.norms[key] = (some, some, some)
            else:
                ends = (z3.Real(f"n{n}-{end}", self.context) for end in ("least", "largest"))
                least, largest = ends
                self.norms[key] = (least, some, largest)
        return self.norms[key]

    # --- facts ------------------------------------------------------------------------------

    def facts(self) -> Iterator[Expression]:
        """Yield what holds of the variables made so far, whatever the kernels do."""
        return (fact.expression for fact in self.assumptions())

    def assumptions(self) -> Iterator[Fact]:
        """Yield what `facts` does, each with its reason."""
        return assumptions(self)


def region_inside(inner: Region, outer: Region, inside: Inside) -> bool:
    """Say whether every input of one region is known to be one of the other."""
    if inner == outer:
        return True
    if not inside(inner.slice, outer.slice):
        return False
    if outer.kind is RegionKind.ROWS:  # a request may be longer than the longest sequence
        shorter = inner.longest is not None and inner.longest <= (outer.longest or 0)
        return inner.kind is outer.kind and shorter and inner.radius <= outer.radius
    if inner.kind is RegionKind.POINTS:
        return True
    return inner.kind is outer.kind and inner.radius <= outer.radius


def _site(site: str, at: Environment) -> str:
    """Name the input that an existential quantifier chooses, given the inputs chosen outside."""
    outside = sorted((variable, witness.site) for variable, witness in at.items())
    return f"{site}{outside}"


def _canonical(term: Term) -> Term:
    """Return the term with registered metric names, without places in the source."""
    match term:
        case Metric(name):
            return Metric(canonical(name))
        case Abs(of):
            return Abs(_canonical(of))
        case Statistic(kind, of, q):
            return Statistic(kind, _canonical(of), q)
        case Arith(op, left, right):
            return Arith(op, _canonical(left), _canonical(right))
        case Number(value):
            return Number(value)
        case Norm() | TableValue():
            return term


def _norms(term: Term) -> Iterator[Norm]:
    return (part for part in subterms(term) if isinstance(part, Norm))
