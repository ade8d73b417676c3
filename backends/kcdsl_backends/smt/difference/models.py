"""Counterexamples to implications, made readable and checked by exact arithmetic.

Values are chosen among those that satisfy the axioms: thresholds of the clauses, midpoints between
two of them, or rounded values of the solver, if they still are a counterexample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import assert_never

import z3

from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.obligations import HOLDS
from kcdsl.ir.predicates import region_inside
from kcdsl.ir.printer import region_text, term_text
from kcdsl.ir.terms import (
    Abs,
    AllOf,
    Arith,
    Compare,
    Connective,
    Drift,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    NoneOf,
    Norm,
    Not,
    Number,
    Program,
    Quantified,
    Statistic,
    Term,
)
from kcdsl.logic.algebra import LARGEST, SMALLEST, Side, Terms, other
from kcdsl.metrics import find_metric
from kcdsl.units import UNITS
from kcdsl.verdict.studies.difference import Extent, Witness, WitnessValue
from kcdsl_backends.smt.axioms import Quantity, UnknownInput
from kcdsl_backends.smt.claims import Claim, quantified
from kcdsl_backends.smt.implication import NotImplied
from kcdsl_backends.smt.slices import example, request_text
from kcdsl_backends.smt.solver import Expression, Outcome, real
from kcdsl_backends.smt.translation import (
    Environment,
    Flag,
    NormKey,
    SolverSession,
    Translator,
)
from kcdsl_certs.encoding.reals import real_text


@dataclass(frozen=True, slots=True)
class Sides:
    """Names of the two contracts in a witness."""

    accepts: str
    refuses: str
    extent: Extent = Extent.CONTRACT


def witness_of(
    program: Program, refuted: NotImplied, sides: Sides, about: frozenset[str] | None = None
) -> Witness | None:
    """Return values that satisfy the premises and violate the claim; None if none are found.

    Only quantities of the claim and of premises named in `about` are shown (None: all premises).
    If a share of the units violates the claim, the values are those of each of these units: they
    satisfy every premise with a smaller budget. None if these units must differ.
    """
    session, claim, share = refuted.session, refuted.claim, refuted.share
    premises = [p for p in refuted.premises if share is None or p.rate < share]
    spoken = [p for p in premises if about is None or p.clause.id in about]
    goals = [session.fails[claim.name], *(session.holds[p.name] for p in premises)]
    found = _values(session, [claim, *(premises if share is not None else spoken)], goals)
    if found is None:
        return None
    assignment, shown = found
    kept = all(keeps(p.clause.require, p.slice, assignment) for p in premises)
    if not kept or keeps(claim.clause.require, claim.slice, assignment):
        return None
    if share is not None:
        of = f"{real_text(share * 100)}% of the {claim.unit} of the slice {claim.slice}"
        return _witness(program, claim, (), sides, of, assignment, shown)
    of = f"the slice {claim.slice}" if claim.slice else _places(claim)
    if claim.unit:
        of = f"every {claim.unit.removesuffix('s')} of {of}"
    return _witness(program, claim, spoken, sides, of, assignment, shown)


def _witness(
    program: Program,
    claim: Claim,
    premises: Sequence[Claim],
    sides: Sides,
    of: str,
    assignment: Assignment,
    shown: _Shown,
) -> Witness:
    values = [
        WitnessValue(str(q), in_units(value, _dimension(q.term)), _exact(value))
        for q in shown.quantities
        for value in (assignment.quantities[q],)
    ]
    for key in shown.norms:
        values += _norm_values(key, assignment)
    lacking = [str(key[1]) for key in shown.flags if len(key) == 2 and not assignment.flags[key]]
    flips = [
        f"{_first(key)} at {key[0]}"
        for key in shown.flags
        if len(key) == 3 and not assignment.flags[key]
    ]
    return Witness(
        sides.accepts,
        sides.refuses,
        claim.clause.id,
        of,
        tuple(dict.fromkeys(values)),
        tuple(lacking),
        tuple(flips),
        _request(program, claim, premises),
        sides.extent,
        claim.unit or "slices",
    )


def _places(claim: Claim) -> str:
    regions = dict.fromkeys(region_text(part.region) for part in quantified(claim.clause))
    return f"an input of {', '.join(regions)}"


def _first(flag: Flag) -> str:
    _, block, k = flag
    return (
        f"the likeliest token of {block} changes" if k == 1 else f"the first {k} of {block} change"
    )


def _request(program: Program, claim: Claim, premises: Sequence[Claim]) -> str | None:
    """Return a request of the claim's slice, outside the premises' slices if possible."""
    own = _slices(claim)
    if not own:
        return None
    where = program.slice(own[0]).where
    names = dict.fromkeys(name for p in premises for name in _slices(p) if name != own[0])
    outside = [NoneOf(program.slice(name).where) for name in names]
    found = example(AllOf((where, *outside))) or example(where)
    return request_text(found) if found else None


def _slices(claim: Claim) -> list[str]:
    if claim.slice:
        return [claim.slice]
    return [part.region.slice for part in quantified(claim.clause)]


# --- values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shown:
    """Variables of the clauses in question, in the order of their text."""

    quantities: tuple[Quantity, ...]
    norms: tuple[NormKey, ...]
    flags: tuple[Flag, ...]


def _values(
    session: SolverSession, claims: Sequence[Claim], goals: Sequence[Expression]
) -> tuple[Assignment, _Shown] | None:
    """Return readable values that satisfy goals and axioms; None if there are none."""
    translator, fixed = session.translator, list(goals)
    outcome, model = session.solver.model(*fixed)
    if outcome is not Outcome.SAT or model is None:
        return None
    shown = _shown(session, claims)
    numbers = sorted({n for claim in claims for n in _numbers(claim)})
    variables = [translator.quantities[q] for q in shown.quantities]
    for key in shown.norms:
        least, some, largest = translator.norms[key]
        level = (least == some, some == largest)  # the same number if possible
        if session.solver.model(*fixed, *level)[0] is Outcome.SAT:
            fixed += level
        variables += [largest, least, some]
    for variable in variables:
        own = _fraction(model, variable)
        for candidate in _candidates(numbers, own):
            pinned = variable == real(candidate, translator.context)
            outcome, found = session.solver.model(*fixed, pinned)
            if outcome is Outcome.SAT and found is not None:
                model = found
                fixed.append(pinned)
                break
    quantities = {q: _fraction(model, v) for q, v in translator.quantities.items()}
    norms = {k: tuple(_fraction(model, v) for v in ends) for k, ends in translator.norms.items()}
    needed = [quantities[q] for q in shown.quantities]
    needed += [value for key in shown.norms for value in norms[key]]
    if any(value is None for value in needed):
        return None  # not a fraction
    flags = {
        key: z3.is_true(model.eval(v, model_completion=True)) for key, v in translator.flags.items()
    }
    exact = {q: v for q, v in quantities.items() if v is not None}
    ends = {
        k: (a, b, c)
        for k, (a, b, c) in norms.items()
        if a is not None and b is not None and c is not None
    }
    return Assignment(translator, exact, ends, flags), shown


def _fraction(model: z3.ModelRef, variable: Expression) -> Fraction | None:
    value = model.eval(variable, model_completion=True)
    if not z3.is_rational_value(value):
        return None
    return Fraction(value.numerator_as_long(), value.denominator_as_long())


def _candidates(numbers: Sequence[Fraction], own: Fraction | None) -> Iterator[Fraction]:
    """Yield readable values, the preferred first."""
    yield from reversed(numbers)
    yield from ((a + b) / 2 for a, b in pairwise(numbers))
    for number in reversed(numbers):
        yield from (2 * number, number / 2)
    yield from (Fraction(0), Fraction(1))
    if own is not None:
        for digits in (1, 2, 3, 6):
            yield Fraction(f"{float(own):.{digits}g}")


def _numbers(claim: Claim) -> Iterator[Fraction]:
    return (t.value for t in terms_of(claim.clause.require) if isinstance(t, Number))


def _shown(session: SolverSession, claims: Sequence[Claim]) -> _Shown:
    translator = session.translator
    quantities: dict[Quantity, None] = {}
    for claim in claims:
        for term in terms_of(claim.clause.require):
            if isinstance(term, Statistic | Metric):
                for side in ("largest", "smallest"):
                    quantity = translator.quantity(term, claim.slice, side)
                    if quantity in translator.quantities:
                        quantities.setdefault(quantity)
    first = claims[0].clause
    regions = [part.region for part in quantified(first)]
    spoken = {
        (t.of.block, t.of.measured, t.kind)
        for claim in claims
        for t in terms_of(claim.clause.require)
        if isinstance(t, Norm)
    }
    norms = [k for k in translator.norms if k[0].region in regions and k[1:] in spoken]
    fields = [
        (claim.slice, name)
        for claim in claims
        for part in walk(claim.clause.require)
        if isinstance(part, HasFields)
        for name in part.fields
    ]
    stable = {
        (part.block, part.k)
        for claim in claims
        for part in walk(claim.clause.require)
        if isinstance(part, NoFlip)
    }
    flags: list[Flag] = [key for key in dict.fromkeys(fields) if key in translator.flags]
    flags += [
        key
        for key in translator.flags
        if len(key) == 3 and key[1:] in stable and getattr(key[0], "region", None) in regions
    ]
    return _Shown(tuple(quantities), tuple(norms), tuple(flags))


# --- words ---------------------------------------------------------------------------------------


def _norm_values(key: NormKey, assignment: Assignment) -> list[WitnessValue]:
    witness, block, measured, kind = key
    name = f"{term_text(Norm(kind, Drift(block, 'x', measured)))} at {witness}"
    least, _, largest = assignment.norms[key]
    if measured or least == largest:
        return [WitnessValue(name, _plain(largest), _exact(largest))]
    return [
        WitnessValue(f"largest {name}", _plain(largest), _exact(largest)),
        WitnessValue(f"least {name}", _plain(least), _exact(least)),
    ]


def _exact(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _dimension(term: Term) -> str:
    match term:
        case Statistic("rate"):
            return "ratio"
        case Statistic(_, of) | Abs(of):
            return _dimension(of)
        case Metric(name):
            definition = find_metric(name)
            return "1" if definition is None else str(definition.dimension)
        case Arith("+" | "-", left, _):
            return _dimension(left)
        case _:
            return "1"


_UNITS = {
    "s": ("s", "ms", "us", "ns"),
    "B": ("GiB", "MiB", "KiB", "B"),
    "ratio": ("%",),
    "tok/s": ("tok/s",),
    "nat": ("nats",),
}
"""The units in which values of a dimension are shown, the largest first."""


def in_units(value: Fraction, dimension: str) -> str:
    """Format a value in base units of a dimension with a unit that suits its size."""
    units = [UNITS[name] for name in _UNITS.get(dimension, ())]
    if not units:
        return _plain(value)
    unit = next((unit for unit in units if abs(value) >= unit.factor), units[-1])
    return f"{_plain(value / unit.factor)}{'' if unit.name == '%' else ' '}{unit.name}"


def _plain(value: Fraction) -> str:
    """Format an exact number, small ones in scientific notation: 1e-5."""
    exact = real_text(value)
    if "/" in exact or value == 0 or abs(value) >= Fraction(1, 1000):
        return exact
    digits = exact.partition(".")[2]
    leading = len(digits) - len(digits.lstrip("0")) + 1
    mantissa = digits.lstrip("0")
    point = f".{mantissa[1:]}" if len(mantissa) > 1 else ""
    return f"{'-' if value < 0 else ''}{mantissa[0]}{point}e-{leading}"


class Unknown(Exception):
    """The values do not determine a statement, or it is undefined."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Values of a translator's variables; norms as (least, at some run, largest)."""

    translator: Translator
    quantities: Mapping[Quantity, Fraction]
    norms: Mapping[NormKey, tuple[Fraction, Fraction, Fraction]]
    flags: Mapping[Flag, bool]


def keeps(formula: Formula, slice_name: str, values: Assignment) -> bool:
    """Return whether values satisfy a requirement on a slice.

    A universal statement is evaluated at the inputs that have values, an existential one is taken
    as true. A statement with missing values or a division by zero is not satisfied.
    """
    try:
        return _Values(values, slice_name).holds(formula, {}, False)
    except Unknown:
        return False


@dataclass(frozen=True, slots=True)
class _Values:
    values: Assignment
    slice: str

    def holds(self, formula: Formula, at: Environment, turned: bool) -> bool:
        """Return the truth of a formula; evaluate every part, so that missing values are found."""
        match formula:
            case Compare():
                return self._compare(formula, at, turned)
            case NoFlip(block, variable, k):
                return self._flag((at[variable], block, k))
            case HasFields(fields):
                carried = [self._flag((self.slice, name)) for name in fields]
                return all(carried)
            case Not(of):
                return not self.holds(of, at, not turned)
            case Connective("implies", (left, right)):
                given, then = self.holds(left, at, not turned), self.holds(right, at, turned)
                return then or not given
            case Connective(op, parts):
                found = [self.holds(part, at, turned) for part in parts]
                return all(found) if op == "and" else any(found)
            case Quantified("forall", variable, region, body):
                inside = self.values.translator.inside
                known = [w for w in self._inputs() if region_inside(w.region, region, inside)]
                found = [self.holds(body, {**at, variable: w}, turned) for w in known]
                return all(found)
            case Quantified():
                return True
            case _:
                assert_never(formula)

    def _inputs(self) -> list[UnknownInput]:
        found = [key[0] for key in self.values.norms]
        found += [key[0] for key in self.values.flags if isinstance(key[0], UnknownInput)]
        return list(dict.fromkeys(found))

    def _flag(self, key: Flag) -> bool:
        if key not in self.values.flags:
            raise Unknown
        return self.values.flags[key]

    def _compare(self, compare: Compare, at: Environment, turned: bool) -> bool:
        op, left, right = compare.op, compare.left, compare.right
        match left, right:
            case Norm(), Number(value):
                least, _, largest = self._norm(left, at)
                return HOLDS[op](least, value) and HOLDS[op](largest, value)
        side: Side = LARGEST if (op not in (">=", ">")) != turned else SMALLEST
        return HOLDS[op](self._term(left, at, side), self._term(right, at, other(side)))

    def _norm(self, norm: Norm, at: Environment) -> tuple[Fraction, Fraction, Fraction]:
        drift = norm.of
        key = (at[drift.variable], drift.block, drift.measured, norm.kind)
        if key not in self.values.norms:
            raise Unknown
        return self.values.norms[key]

    def _term(self, term: Term, at: Environment, side: Side) -> Fraction:
        def measured(of: Metric | Statistic, end: Side) -> Fraction:
            quantity = self.values.translator.quantity(of, self.slice, end)
            if quantity not in self.values.quantities:
                raise Unknown
            return self.values.quantities[quantity]

        def norm(of: Norm) -> Fraction:
            return self._norm(of, at)[1]

        return Terms(EXACT, measured, norm).value(term, side)


class Exact:
    """Exact numbers and truth values (`kcdsl.logic.algebra.Algebra`)."""

    def real(self, value: Fraction) -> Fraction:
        return value

    def arithmetic(self, op: str, left: Fraction, right: Fraction) -> Fraction:
        match op:
            case "+":
                return left + right
            case "-":
                return left - right
            case "*":
                return left * right
            case _ if right == 0:
                raise Unknown
            case _:
                return left / right

    def negative(self, of: Fraction) -> Fraction:
        return -of

    def compare(self, op: str, left: Fraction, right: Fraction) -> bool:
        return HOLDS[op](left, right)

    def choose(self, test: bool, first: Fraction, second: Fraction) -> Fraction:
        return first if test else second

    def every(self, parts: Sequence[bool]) -> bool:
        return all(parts)

    def some(self, parts: Sequence[bool]) -> bool:
        return any(parts)

    def implies(self, premise: bool, conclusion: bool) -> bool:
        return conclusion or not premise

    def same(self, left: Fraction, right: Fraction) -> bool:
        return left == right


EXACT = Exact()
