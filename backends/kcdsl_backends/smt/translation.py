"""Formulas of the IR over measured quantities as real arithmetic for z3.

A measured quantity (a statistic of a metric on a slice, or an aggregate metric) becomes a real
variable, shared by all occurrences with the same meaning. `facts` yields the axioms about the
variables that hold for all kernels; nothing else is assumed.

A percentile of a token metric counts requests, each represented by its worst token: the largest
value if the comparison is an upper bound, else the smallest. The same term can therefore denote two
numbers, which are two variables.

A statement that divides by a measured quantity is false where that is zero.

A statement about every input of a region is replaced by its instances at one unknown input of each
region inside it, which are consequences of the statement. Regions are assumed not empty (an empty
one is an error of its own).

Tables of thresholds are expanded first (`kcdsl.ir.tables.expand_tables`); a comparison with an
unexpanded table adds no constraint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import z3

from kcdsl.ir.formulas import MIRRORED, subterms, with_leaves
from kcdsl.ir.predicates import Division, Inside, region_inside
from kcdsl.ir.terms import (
    Compare,
    Connective,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    Norm,
    Not,
    Number,
    Program,
    Quantified,
    Region,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.logic.algebra import LARGEST, SMALLEST, Side, Terms, other
from kcdsl.logic.axioms import has_two_sides, undivided
from kcdsl.logic.relations import Interval, canonical
from kcdsl_backends.smt.axioms import Assumption, Quantity, UnknownInput, assumptions
from kcdsl_backends.smt.claims import Claim, division, same_slice
from kcdsl_backends.smt.solver import Clock, Expression, Outcome, Solver, Z3Algebra, compare, real

Environment = Mapping[str, UnknownInput]
NormKey = tuple[UnknownInput, str, bool, str]
"""Input, block, measured, kind of norm."""
Flag = tuple[object, ...]
"""(slice, trace field) or (input, block, k)."""


_ENDS = ("least", "largest")


@dataclass(slots=True)
class Translator:
    """Translates formulas; one translator, one z3 context, one meaning per variable.

    `known` bounds metrics beyond their domain. `temperature` relates the span of the logits to the
    distributions in `facts`; None leaves them unrelated. `by_request` names metrics of the user
    with one value per request. `one_request`: measured terms are about a single request. The
    variables are in `quantities`, `norms`, `flags`.
    """

    context: z3.Context = field(default_factory=z3.Context)
    known: Mapping[str, Interval] = field(default_factory=dict)
    temperature: Fraction | None = None
    inside: Inside = same_slice
    division: Division = undivided
    by_request: frozenset[str] = frozenset()
    one_request: bool = False
    flags: dict[Flag, Expression] = field(default_factory=dict)
    quantities: dict[Quantity, Expression] = field(default_factory=dict)
    norms: dict[NormKey, tuple[Expression, ...]] = field(default_factory=dict)
    constants: dict[Quantity, set[Fraction]] = field(default_factory=dict)
    """The numbers that each quantity is compared with."""
    _witnesses: list[UnknownInput] = field(default_factory=list)
    _divisors: list[Expression] = field(default_factory=list)

    # --- formulas ---------------------------------------------------------------------------

    def collect(self, formula: Formula, site: str = "", positive: bool = True) -> None:
        """Collect the inputs at which universal statements are instantiated.

        Call this for every formula before the first translation, with `positive` false for
        formulas whose negation is translated.
        """
        match formula:
            case Not(of):
                self.collect(of, site, not positive)
            case Connective("implies", (left, right)):
                self.collect(left, f"{site}.0", not positive)
                self.collect(right, f"{site}.1", positive)
            case Connective(_, parts):
                for n, part in enumerate(parts):
                    self.collect(part, f"{site}.{n}", positive)
            case Quantified(quantifier, _, region, body):
                self._instances(region)
                if (quantifier == "exists") == positive:
                    self._witnesses.append(UnknownInput(region, _site(site, {})))
                self.collect(body, f"{site}.x", positive)
            case Compare() | NoFlip() | HasFields():
                return

    def requirement(self, formula: Formula, slice_name: str, site: str = "") -> Expression:
        """Return a consequence of the formula on a slice, equivalent if no input is quantified.

        `site` distinguishes the existential quantifiers of different clauses.
        """
        self._divisors.clear()
        truth = self._formula(formula, slice_name, {}, True, False, site)
        return z3.And(truth, *(divisor != 0 for divisor in self._divisors))

    def negation(self, formula: Formula, slice_name: str, site: str = "") -> Expression:
        """Return a consequence of the negation of the formula, as `requirement` does.

        The counterexample to a formula about every input of a region is the unknown input of that
        region, at which all other universal statements are instantiated.
        """
        self._divisors.clear()
        match formula:
            case Quantified("forall", variable, region, body):
                at = {variable: UnknownInput(region)}
                self._instances(region)
                falsity = self._formula(body, slice_name, at, False, False, f"{site}.x")
            case _:
                falsity = self._formula(formula, slice_name, {}, False, False, site)
        return z3.Or(falsity, *(divisor == 0 for divisor in self._divisors))

    def _formula(
        self, formula: Formula, name: str, at: Environment, positive: bool, turned: bool, site: str
    ) -> Expression:
        """Return a consequence of the formula, or of its negation (`positive` false).

        `turned`: the formula is under an odd number of negations of its clause.
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
                    inputs = [UnknownInput(region, _site(site, at))]
                found = (
                    self._formula(body, name, {**at, variable: w}, positive, turned, f"{site}.x")
                    for w in inputs
                )
                return z3.And(self._true(), *found)

    def collect_negation(self, formula: Formula, site: str = "") -> None:
        """Collect the inputs of `negation`, as `collect` does."""
        if isinstance(formula, Quantified) and formula.quantifier == "forall":
            self._instances(formula.region)
            self.collect(formula.body, f"{site}.x", False)
        else:
            self.collect(formula, site, False)

    def _instances(self, region: Region) -> list[UnknownInput]:
        """Return the collected inputs that lie in a region, including its own."""
        own = UnknownInput(region)
        if own not in self._witnesses:
            self._witnesses.append(own)
        return [w for w in self._witnesses if region_inside(w.region, region, self.inside)]

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
        """Translate a comparison; one of drift with a constant bounds all admitted runs."""
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
                return self._compare(MIRRORED[op], right, left, name, at, positive, turned)
        terms = (*subterms(left), *subterms(right))
        drifts = [term.of for term in terms if isinstance(term, Norm)]
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
        """Return the quantity of a measured term on a slice, with `side` if it has two meanings."""
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
        """Return the least value of a norm, its value at one admitted run, and the largest."""
        drift = norm.of
        key = (at[drift.variable], drift.block, drift.measured, norm.kind)
        if key not in self.norms:
            n = len(self.norms)
            some = z3.Real(f"n{n}", self.context)
            if drift.measured:
                self.norms[key] = (some, some, some)
            else:
                least, largest = (z3.Real(f"n{n}-{end}", self.context) for end in _ENDS)
                self.norms[key] = (least, some, largest)
        return self.norms[key]

    # --- facts ------------------------------------------------------------------------------

    def facts(self) -> Iterator[Expression]:
        """Yield the axioms about the variables created so far."""
        return (fact.expression for fact in assumptions(self))


def _site(site: str, at: Environment) -> str:
    """Name the input that an existential quantifier chooses, given the inputs chosen outside."""
    outside = sorted((variable, witness.site) for variable, witness in at.items())
    return f"{site}{outside}"


def _canonical(term: Term) -> Term:
    """Return the term with registered metric names."""
    return with_leaves(term, lambda t: Metric(canonical(t.name)) if isinstance(t, Metric) else t)


def translator_for(program: Program, inside: Inside, clock: Clock, unit: str = "") -> Translator:
    """Return a translator that knows the constants, slices and own metrics of a program."""
    temperature = program.constants.temperature
    return Translator(
        temperature=temperature if temperature > 0 else None,
        inside=same_slice if unit else inside,
        division=division(program, clock),
        known={m.name: Interval(m.lower, m.upper) for m in program.metrics},
        by_request=frozenset(m.name for m in program.metrics if m.counted == "request"),
        one_request=unit == "requests",
    )


@dataclass(slots=True)
class SolverSession:
    """Claims about one kind of unit, and their solver."""

    program: Program
    claims: Sequence[Claim]
    inside: Inside
    clock: Clock
    unit: str = ""
    translator: Translator = field(init=False)
    solver: Solver = field(init=False)
    facts: list[Assumption] = field(init=False)
    holds: dict[str, Expression] = field(default_factory=dict)
    fails: dict[str, Expression] = field(default_factory=dict)
    explainer: Solver | None = None

    def __post_init__(self) -> None:
        self.translator = translator_for(self.program, self.inside, self.clock, self.unit)
        for claim in self.claims:
            self.translator.collect(claim.clause.require, claim.site)
            self.translator.collect_negation(claim.clause.require, claim.site)
        self.solver = Solver(self.translator.context, self.clock)
        for claim in self.claims:
            asked = (claim.clause.require, claim.slice, claim.site)
            self.holds[claim.name] = self.translator.requirement(*asked)
            self.fails[claim.name] = self.translator.negation(*asked)
        self.facts = list(assumptions(self.translator))
        self.solver.add(fact.expression for fact in self.facts)
        for claim in self.claims:
            self.solver.name(claim.name, self.holds[claim.name])
            self.solver.name(f"not {claim.name}", self.fails[claim.name])

    def can_hold(self, claims: Iterable[Claim]) -> tuple[Outcome, frozenset[str]]:
        """Decide whether claims are jointly satisfiable; if not, also return the core."""
        return self.solver.decide_all(claim.name for claim in claims)

    def can_fail(self, claim: Claim) -> Outcome:
        """Decide whether a claim can be violated."""
        return self.solver.decide_all([f"not {claim.name}"])[0]

    def fails_if(self, claim: Claim, premises: Collection[Claim]) -> tuple[Outcome, frozenset[str]]:
        """Decide whether a claim can fail if premises hold; if not, also return the core."""
        names = [f"not {claim.name}", *(premise.name for premise in premises)]
        outcome, core = self.solver.decide_all(names)
        return outcome, core - {f"not {claim.name}"}

    def reasons(self, claim: Claim, premises: Iterable[Claim]) -> tuple[str, ...]:
        """Return a minimal set of axioms, as text, with which premises imply a claim."""
        return self.because([f"not {claim.name}", *(premise.name for premise in premises)])

    def because(self, given: Sequence[str]) -> tuple[str, ...]:
        """Return a minimal set of axioms, as text, with which named goals are unsatisfiable."""
        solver = self._explainer()
        names = [f"fact-{n}" for n in range(len(self.facts))]
        outcome, core = solver.decide_all(given)
        if outcome is Outcome.UNSAT:
            return ()
        outcome, core = solver.decide_all([*given, *names])
        if outcome is not Outcome.UNSAT:
            return ()
        kept = [name for name in names if name in core]
        for name in list(kept):
            rest = [other for other in kept if other != name]
            if solver.decide_all([*given, *rest])[0] is Outcome.UNSAT:
                kept = rest
        return tuple(dict.fromkeys(self.facts[int(name[5:])].reason for name in kept))

    def _explainer(self) -> Solver:
        """Return a solver in which every axiom has a name."""
        if self.explainer is None:
            self.explainer = Solver(self.translator.context, self.clock)
            for n, fact in enumerate(self.facts):
                self.explainer.name(f"fact-{n}", fact.expression)
            for claim in self.claims:
                self.explainer.name(claim.name, self.holds[claim.name])
                self.explainer.name(f"not {claim.name}", self.fails[claim.name])
        return self.explainer


def minimal(
    session: SolverSession, claims: Sequence[Claim], claim: Claim | None = None
) -> list[Claim]:
    """Shrink an unsatisfiable set, or the premises of a claim, until every member is needed."""
    core = list(claims)
    for member in list(core):
        rest = [other for other in core if other is not member]
        outcome = (session.can_hold(rest) if claim is None else session.fails_if(claim, rest))[0]
        if outcome is Outcome.UNSAT:
            core = rest
    return core
