"""Clauses as statements about real constants.

A measured term on a slice (`p99(kl)` on `long`) becomes a real constant; `assumptions` has the
axioms about the constants. A claim about every input of a region becomes a claim about the largest
norm of the drift there (`Extreme`). This is exact: there are finitely many inputs and admitted
runs, so the maximum is attained. Any other quantified formula becomes a truth value (`Opaque`),
with assertions about its instances.

A percentile of a metric of tokens represents each request by its largest or its smallest token,
whichever is worse for the comparison: two constants (`MeasuredTerm.side`).

A statement that divides by a measured term is undefined, and not true, where the term is zero; so
`holds` requires every divisor to be nonzero.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, assert_never

from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import normal_formula
from kcdsl.ir.formulas import subterms, terms_of, walk, with_leaves
from kcdsl.ir.predicates import Inside, region_inside
from kcdsl.ir.printer import formula_text, region_text, term_text
from kcdsl.logic.algebra import Side, Terms, other
from kcdsl.logic.axioms import has_two_sides
from kcdsl.logic.relations import canonical
from kcdsl.logic.smtlib import text
from kcdsl.logic.smtlib.text import WRITTEN, Symbols


@dataclass(frozen=True, slots=True)
class OneUnit:
    """One of the "requests" or "windows" of a slice; different ones have different numbers."""

    of: str
    number: int = 1

    def __str__(self) -> str:
        name = f"one {self.of.removesuffix('s')}"
        return f"{name} ({self.number})" if self.number > 1 else name


@dataclass(frozen=True, slots=True)
class MeasuredTerm:
    """A measured term on a slice. `unit` is None for the slice as a whole.

    `side` is the token that represents its request, "" where there is only one value.
    """

    unit: OneUnit | None
    slice: str
    term: ir.Metric | ir.Statistic
    side: Side | Literal[""] = ""

    @property
    def kind(self) -> str:
        """Return the kind of a statistic, "value" for a single value."""
        return self.term.kind if isinstance(self.term, ir.Statistic) else "value"

    @property
    def q(self) -> Fraction | None:
        """Return the level of a quantile."""
        return self.term.q if isinstance(self.term, ir.Statistic) else None

    @property
    def of(self) -> ir.Term:
        """Return the term inside the statistic."""
        return self.term.of if isinstance(self.term, ir.Statistic) else self.term


@dataclass(frozen=True, slots=True)
class Extreme:
    """The least or the largest norm of a drift over a region."""

    unit: OneUnit | None
    end: str
    kind: str
    block: str
    measured: bool
    region: ir.Region


@dataclass(frozen=True, slots=True)
class Input:
    """One row of a slice: an arbitrary one (`number` 0), or that of a quantifier."""

    unit: OneUnit | None
    region: ir.Region
    number: int = 0


@dataclass(frozen=True, slots=True)
class NormAt:
    """The norm of the observed drift at one input."""

    kind: str
    block: str
    at: Input


@dataclass(frozen=True, slots=True)
class NoFlips:
    """The statement that the first k columns of a block stay first at every input of a region."""

    unit: OneUnit | None
    block: str
    k: int
    region: ir.Region


@dataclass(frozen=True, slots=True)
class Opaque:
    """A quantified statement that is no bound of one norm.

    `turned`: it is under an odd number of negations and contains measured terms, which then have
    their other side.
    """

    unit: OneUnit | None
    slice: str
    formula: ir.Quantified
    turned: bool = False


Constant = MeasuredTerm | Extreme | NormAt
Environment = Mapping[str, Input]


@dataclass(slots=True)
class Theory:
    """Translates clauses and records their constants in the order of use."""

    inside: Inside
    by_request: frozenset[str] = frozenset()
    """User metrics with one value per request."""
    symbols: Symbols = field(default_factory=Symbols)
    constants: dict[Constant, str] = field(default_factory=dict)
    flags: dict[Hashable, str] = field(default_factory=dict)
    opaque: dict[Opaque, str] = field(default_factory=dict)
    bounds: dict[MeasuredTerm, set[Fraction]] = field(default_factory=dict)
    """The thresholds of measured terms."""

    def holds(self, formula: ir.Formula, slice_name: str, unit: OneUnit | None = None) -> str:
        """Return the formula that a requirement is true for a slice, or for one unit of it."""
        return _Translation(self, slice_name, unit).holds(normal_formula(formula), {})

    def fails(self, formula: ir.Formula, slice_name: str, unit: OneUnit | None = None) -> str:
        """Return the formula that a requirement is not true for a slice, or for one unit of it."""
        return text.negation(self.holds(formula, slice_name, unit))

    def real(self, constant: Constant, name: str) -> str:
        """Return the symbol of a real constant."""
        symbol = self.symbols.symbol(constant, name)
        self.constants.setdefault(constant, symbol)
        return symbol

    def flag(self, meaning: Hashable, name: str) -> str:
        """Return the symbol of a truth value."""
        symbol = self.symbols.symbol(meaning, name)
        self.flags.setdefault(meaning, symbol)
        return symbol

    def region_inside(self, inner: ir.Region, outer: ir.Region, unit: OneUnit | None) -> bool:
        """Return whether every input of one region is in the other, within a unit.

        Units of different slices are unrelated.
        """
        apart = unit is not None and inner.slice != outer.slice
        return not apart and region_inside(inner, outer, self.inside)

    def instances(self) -> list[str]:
        """Return the instances of the opaque statements.

        A true universal statement is true for an input of each region inside its own, and for the
        inputs of other quantifiers there; a false one is false for some input.
        """
        found: list[str] = []
        general = list(self.opaque.items())
        chosen = {
            item: Input(item.unit, item.formula.region, number)
            for number, (item, _) in enumerate(general, 1)
        }
        known = list(dict.fromkeys(Input(i.unit, i.region) for i in chosen.values()))
        known += chosen.values()
        for item, symbol in general:
            every = item.formula.quantifier == "forall"
            claim = symbol if every else text.negation(symbol)
            for at in known:
                same = at.unit == item.unit
                if same and self.region_inside(at.region, item.formula.region, at.unit):
                    found.append(f"(=> {claim} {self._instance(item, at, every)})")
            converse = self._instance(item, chosen[item], not every)
            found.append(f"(=> {text.negation(claim)} {converse})")
        return found

    def _instance(self, item: Opaque, at: Input, positive: bool) -> str:
        translation = _Translation(self, item.slice, item.unit)
        formula = item.formula
        true = translation.holds(formula.body, {formula.variable: at}, item.turned)
        return true if positive else text.negation(true)


@dataclass(frozen=True, slots=True)
class _Translation:
    """The translation of the formulas of one clause on one slice."""

    theory: Theory
    slice: str
    unit: OneUnit | None
    divisors: list[str] = field(default_factory=list)

    def holds(self, formula: ir.Formula, at: Environment, negated: bool = False) -> str:
        """Return the formula "defined and true"; `negated` as in `formula`."""
        self.divisors.clear()
        truth = self.formula(formula, at, negated)
        defined = (f"(not (= {divisor} 0.0))" for divisor in dict.fromkeys(self.divisors))
        return text.conjunction([*defined, truth])

    def formula(self, formula: ir.Formula, at: Environment, negated: bool = False) -> str:
        """Return the truth of a formula where it is defined.

        `negated`: it is under an odd number of negations, which exchanges its worse side.
        """
        match formula:
            case ir.Compare(op, left, right):
                if not _bound(left, at) or not _bound(right, at):
                    return self._unbound(formula, negated)
                side: Side = "largest" if (op not in (">=", ">")) != negated else "smallest"
                self._note(left, right, side)
                return WRITTEN.compare(
                    op, self.term(left, at, side), self.term(right, at, other(side))
                )
            case ir.NoFlip():
                return self._unbound(formula, negated)
            case ir.HasFields(fields):
                return text.conjunction(self._field(name) for name in fields)
            case ir.Not(of):
                return text.negation(self.formula(of, at, not negated))
            case ir.Connective("implies", (left, right)):
                first = text.negation(self.formula(left, at, not negated))
                return text.disjunction([first, self.formula(right, at, negated)])
            case ir.Connective(op, parts):
                inner = [self.formula(part, at, negated) for part in parts]
                return text.conjunction(inner) if op == "and" else text.disjunction(inner)
            case ir.Quantified():
                return self._quantified(formula, negated)
            case _:
                assert_never(formula)

    def term(self, term: ir.Term, at: Environment, side: Side) -> str:
        """Return a term, on the given side where it has two."""

        def norm(of: ir.Norm) -> str:
            place = at[of.of.variable]
            name = f"{term_text(of)} for x = {_input(place)}"
            return self.theory.real(NormAt(of.kind, of.of.block, place), name)

        return Terms(WRITTEN, self._measured, norm, self.divisors).value(term, side)

    def _measured(self, term: ir.Metric | ir.Statistic, side: Side) -> str:
        quantity = self._of(term, side)
        words = term_text(term)
        if quantity.side == "smallest":
            words += " by smallest tokens"
        return self.theory.real(quantity, self._here(words))

    def _of(self, term: ir.Metric | ir.Statistic, side: Side) -> MeasuredTerm:
        plain = _plain(term)
        assert isinstance(plain, ir.Metric | ir.Statistic)
        two = has_two_sides(plain, self.theory.by_request)
        return MeasuredTerm(self.unit, self.slice, plain, side if two else "")

    def _note(self, left: ir.Term, right: ir.Term, side: Side) -> None:
        """Record the thresholds of a measured term."""
        for term, number, end in ((left, right, side), (right, left, other(side))):
            if isinstance(term, ir.Metric | ir.Statistic) and isinstance(number, ir.Number):
                self.theory.bounds.setdefault(self._of(term, end), set()).add(number.value)

    def _field(self, name: str) -> str:
        key = ("field", self.unit, self.slice, name)
        return self.theory.flag(key, self._here(f"trace has {name}"))

    def _here(self, words: str) -> str:
        """Return words followed by the slice or unit."""
        place = f" on {self.slice}" if self.slice else ""
        return f"{words}{place}{_within(self.unit)}"

    def _unbound(self, formula: ir.Compare | ir.NoFlip, negated: bool) -> str:
        """Return a truth value for a claim about admitted runs that is not in the simple form."""
        key = ("claim", self.unit, self.slice, formula, negated and _is_measured(formula))
        return self.theory.flag(key, self._here(formula_text(formula)))

    # --- quantifiers ------------------------------------------------------------------------

    def _quantified(self, formula: ir.Quantified, negated: bool) -> str:
        simple = self._simple(formula, formula.body)
        if simple is not None:
            return simple
        key = Opaque(self.unit, self.slice, formula, negated and _is_measured(formula))
        symbol = self.theory.flag(key, self._here(formula_text(formula)))
        if _only_observed(formula):
            self.theory.opaque.setdefault(key, symbol)
        return symbol

    def _simple(self, formula: ir.Quantified, body: ir.Formula) -> str | None:
        """Return a quantified statement that bounds norms, exactly; None for any other."""
        every = formula.quantifier == "forall"
        match body:
            case ir.Compare(op, ir.Norm(kind, drift), ir.Number(value)):
                if drift.variable != formula.variable or not (every or drift.measured):
                    return None
                ends = {"<=": ["largest"], "<": ["largest"], ">=": ["least"], ">": ["least"]}
                if not every:
                    swapped = {"least": ["largest"], "largest": ["least"]}
                    ends = {op: swapped[end] for op, (end,) in ends.items()}
                    if op == "==":
                        return None
                return text.conjunction(
                    WRITTEN.compare(
                        op, self._extreme(end, kind, drift, formula.region), text.real(value)
                    )
                    for end in ends.get(op, ["least", "largest"])
                )
            case ir.NoFlip(block, variable, k) if every and variable == formula.variable:
                key = NoFlips(self.unit, block, k, formula.region)
                name = f"no_flip of the first {k} of {block} in {region_text(formula.region)}"
                return self.theory.flag(key, name)
            case ir.Connective("and", parts) if every:
                inner = [self._simple(formula, part) for part in parts]
                found = [part for part in inner if part is not None]
                return text.conjunction(found) if len(found) == len(inner) else None
            case _:
                return None

    def _extreme(self, end: str, kind: str, drift: ir.Drift, region: ir.Region) -> str:
        extreme = Extreme(self.unit, end, kind, drift.block, drift.measured, region)
        return self.theory.real(extreme, extreme_name(extreme))


def extreme_name(extreme: Extreme) -> str:
    """Return an extreme in words."""
    norm = ir.Norm(extreme.kind, ir.Drift(extreme.block, "x", extreme.measured))
    where = f"{region_text(extreme.region)}{_within(extreme.unit)}"
    return f"{extreme.end} {term_text(norm)} for x in {where}"


def _input(at: Input) -> str:
    row = f"row {at.number}" if at.number else "a row"
    return f"{row} of {region_text(at.region)}{_within(at.unit)}"


def _within(unit: OneUnit | None) -> str:
    return "" if unit is None else f", {unit}"


def _bound(term: ir.Term, at: Environment) -> bool:
    """Return whether every drift of a term was observed at a known input."""
    norms = [part.of for part in subterms(term) if isinstance(part, ir.Norm)]
    return all(drift.measured and drift.variable in at for drift in norms)


def _is_measured(formula: ir.Formula) -> bool:
    """Return whether a statement contains measured terms."""
    return any(isinstance(term, ir.Metric | ir.Statistic) for term in terms_of(formula))


def _only_observed(formula: ir.Quantified) -> bool:
    """Return whether a quantifier is only about observed drift and contains no other quantifier."""
    parts = list(walk(formula.body))
    if any(isinstance(part, ir.Quantified | ir.NoFlip) for part in parts):
        return False
    norms = [term for term in terms_of(formula) if isinstance(term, ir.Norm)]
    return all(norm.of.measured and norm.of.variable == formula.variable for norm in norms)


def _plain(term: ir.Term) -> ir.Term:
    """Return a measured term with registered metric names and dimensionless numbers."""

    def leaf(part: ir.Term) -> ir.Term:
        match part:
            case ir.Metric(name):
                return ir.Metric(canonical(name))
            case ir.Number(value):
                return ir.Number(Fraction(value))
            case _:
                return part

    return with_leaves(term, leaf)
