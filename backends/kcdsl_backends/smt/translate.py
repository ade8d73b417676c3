"""Formulas of the IR over measured quantities as real arithmetic for z3.

A measured quantity (a statistic of a metric on a slice, or an aggregate metric) becomes a real
variable; two occurrences that mean the same share it. `facts` says what is true of the variables
whatever the kernels do; nothing else is assumed.

A statement about every input of a region is replaced by its instance at one unknown input of each
region inside it, so that what follows from the instance follows from the statement. Regions are
taken as not empty (an empty one is an error of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import z3

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
    Term,
)
from kcdsl.ir.walk import subterms
from kcdsl_backends.smt.intervals import Interval, canonical, interval
from kcdsl_backends.smt.solving import Expression, compare, real

_SQRT2_UP = Fraction(14142136, 10**7)
_MONOTONE = ("mean", "min", "max", "quantile")
# small <= factor * large for every token, so for every mean, minimum, maximum and quantile too.
_DOMINATED = (
    ("logit_linf", Fraction(1), "logit_l2"),
    ("logit_l2_centered", Fraction(1), "logit_l2"),
    ("logit_span", Fraction(2), "logit_linf"),
    ("logit_span", _SQRT2_UP, "logit_l2_centered"),
    ("hidden_linf", Fraction(1), "hidden_l2"),
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a variable stands for; `kind` is that of a Statistic, or "value"."""

    slice: str
    kind: str
    q: Fraction | None
    of: Term


@dataclass(frozen=True, slots=True)
class Witness:
    """An unknown input: the instance of a region, or of one existential quantifier."""

    region: Region
    site: str = ""


Environment = Mapping[str, Witness]
Inside = Callable[[str, str], bool]
"""inside(a, b): is every row of slice a proved to be a row of slice b."""


def _apart(inner: str, outer: str) -> bool:
    return inner == outer


@dataclass(slots=True)
class Translator:
    """Translates formulas; one translator, one z3 context, one meaning per variable.

    `known` bounds metrics beyond their domain. `temperature` relates the span of the logits to the
    distributions in `facts`; None leaves them unrelated.
    """

    context: z3.Context = field(default_factory=z3.Context)
    known: Mapping[str, Interval] = field(default_factory=dict)
    temperature: Fraction | None = None
    inside: Inside = _apart
    _witnesses: list[Witness] = field(default_factory=list)
    _flags: dict[tuple[object, ...], Expression] = field(default_factory=dict)
    _quantities: dict[Quantity, Expression] = field(default_factory=dict)
    _norms: dict[tuple[Witness, str, bool, str], tuple[Expression, ...]] = field(
        default_factory=dict
    )

    # --- formulas ---------------------------------------------------------------------------

    def announce(self, formula: Formula, site: str = "") -> None:
        """Make the inputs known at which universal statements are to be instantiated.

        To be called for every formula before the first is translated.
        """
        match formula:
            case Not(of):
                self.announce(of, site)
            case Connective(_, parts):
                for n, part in enumerate(parts):
                    self.announce(part, f"{site}.{n}")
            case Quantified(quantifier, _, region, body):
                self._instances(region)
                if quantifier == "exists":
                    self._witnesses.append(Witness(region, _site(site, {})))
                self.announce(body, f"{site}.x")
            case Compare() | NoFlip() | HasFields():
                return

    def requirement(self, formula: Formula, slice_name: str, site: str = "") -> Expression:
        """Return a consequence of the formula on a slice; equivalent where no input is quantified.

        `site` tells the existential quantifiers of different clauses apart.
        """
        return self._formula(formula, slice_name, {}, True, site)

    def negation(self, formula: Formula, slice_name: str, site: str = "") -> Expression:
        """Return a consequence of the formula's negation, as `requirement`."""
        return self._formula(formula, slice_name, {}, False, site)

    def _formula(
        self, formula: Formula, name: str, at: Environment, positive: bool, site: str
    ) -> Expression:
        match formula:
            case Compare(op, left, right):
                return self._compare(op, left, right, name, at, positive)
            case NoFlip(block, variable, k):
                if variable not in at:
                    return self._true()
                flag = self._flag((at[variable], block, k))
                return flag if positive else z3.Not(flag)
            case HasFields(fields):
                every = z3.And(self._true(), *(self._flag((name, field)) for field in fields))
                return every if positive else z3.Not(every)
            case Not(of):
                return self._formula(of, name, at, not positive, site)
            case Connective("implies", (left, right)):
                parts = (
                    self._formula(left, name, at, not positive, f"{site}.0"),
                    self._formula(right, name, at, positive, f"{site}.1"),
                )
                return z3.Or(*parts) if positive else z3.And(*parts)
            case Connective(op, parts):
                inner = [
                    self._formula(part, name, at, positive, f"{site}.{n}")
                    for n, part in enumerate(parts)
                ]
                if (op == "and") == positive:
                    return z3.And(self._true(), *inner)
                return z3.Or(z3.Not(self._true()), *inner)
            case Quantified(quantifier, variable, region, body):
                inside = self._instances(region)
                if (quantifier == "forall") != positive:
                    inside = [Witness(region, _site(site, at))]
                return z3.And(
                    self._true(),
                    *(
                        self._formula(body, name, {**at, variable: w}, positive, f"{site}.x")
                        for w in inside
                    ),
                )

    def _instances(self, region: Region) -> list[Witness]:
        """Return the known inputs that lie in the region; its own one always."""
        own = Witness(region)
        if own not in self._witnesses:
            self._witnesses.append(own)
        return [w for w in self._witnesses if self._region_inside(w.region, region)]

    def _region_inside(self, inner: Region, outer: Region) -> bool:
        if (inner.kind, inner.slice, inner.radius) == (outer.kind, outer.slice, outer.radius):
            return True
        if not self.inside(inner.slice, outer.slice):
            return False
        if inner.kind is RegionKind.POINTS:
            return True
        return inner.kind is outer.kind and inner.radius <= outer.radius

    def _compare(
        self, op: str, left: Term, right: Term, name: str, at: Environment, positive: bool
    ) -> Expression:
        """`drift` stands for every admitted run: a comparison with a constant uses the extremes."""
        match left, right:
            case Norm(_, drift), Number(value) if drift.variable in at:
                least, _, largest = self._norm(left, at)
                constant = real(value, self.context)
                ends = {"<=": [largest], "<": [largest], ">=": [least], ">": [least]}
                parts = [compare(op, end, constant) for end in ends.get(op, [least, largest])]
                every = z3.And(self._true(), *parts)
                return every if positive else z3.Not(every)
            case Number(), Norm():
                flipped = {"<=": ">=", "<": ">", ">=": "<=", ">": "<"}.get(op, op)
                return self._compare(flipped, right, left, name, at, positive)
            case _ if _has_norm(left) or _has_norm(right):
                if not positive or not _bound_norms(left, at) or not _bound_norms(right, at):
                    return self._true()
                return compare(op, self._term(left, name, at), self._term(right, name, at))
            case _:
                formula = compare(op, self._term(left, name, at), self._term(right, name, at))
                return formula if positive else z3.Not(formula)

    def _flag(self, key: tuple[object, ...]) -> Expression:
        if key not in self._flags:
            self._flags[key] = z3.Bool(f"b{len(self._flags)}", self.context)
        return self._flags[key]

    def _true(self) -> Expression:
        return z3.BoolVal(True, self.context)

    # --- terms ------------------------------------------------------------------------------

    def _term(self, term: Term, name: str, at: Environment) -> Expression:
        match term:
            case Number(value):
                return real(value, self.context)
            case Metric():
                return self._quantity(Quantity(name, "value", None, _canonical(term)))
            case Statistic(kind, of, q):
                return self._quantity(Quantity(name, kind, q, _canonical(of)))
            case Norm():
                return self._norm(term, at)[1]
            case Abs(of):
                inner = self._term(of, name, at)
                return z3.If(inner >= 0, inner, -inner)
            case Arith(op, left, right):
                a, b = self._term(left, name, at), self._term(right, name, at)
                match op:
                    case "+":
                        return a + b
                    case "-":
                        return a - b
                    case "*":
                        return a * b
                    case "/":
                        return a / b
                    case _:
                        raise ValueError(f"{op!r} is no operation")

    def _quantity(self, quantity: Quantity) -> Expression:
        if quantity not in self._quantities:
            self._quantities[quantity] = z3.Real(f"q{len(self._quantities)}", self.context)
        return self._quantities[quantity]

    def _norm(self, norm: Norm, at: Environment) -> tuple[Expression, ...]:
        """Return the norm at its least, at one admitted run, and at its largest."""
        drift = norm.of
        key = (at[drift.variable], drift.block, drift.measured, norm.kind)
        if key not in self._norms:
            n = len(self._norms)
            some = z3.Real(f"n{n}", self.context)
            if drift.measured:
                self._norms[key] = (some, some, some)
            else:
                ends = (z3.Real(f"n{n}-{end}", self.context) for end in ("least", "largest"))
                least, largest = ends
                self._norms[key] = (least, some, largest)
        return self._norms[key]

    # --- facts ------------------------------------------------------------------------------

    def facts(self) -> Iterator[Expression]:
        """Yield what holds of the variables made so far, whatever the kernels do."""
        for quantity, variable in self._quantities.items():
            where = interval(_as_term(quantity), self.known)
            if where.low is not None:
                yield variable >= real(where.low, self.context)
            if where.high is not None:
                yield variable <= real(where.high, self.context)
        pairs = [(a, b) for a in self._quantities for b in self._quantities if a != b]
        for a, b in pairs:
            factor = self._at_most(a, b)
            if factor is not None:
                left, right = self._quantities[a], self._quantities[b]
                yield left <= real(factor, self.context) * right
        yield from self._norm_facts()

    def _at_most(self, a: Quantity, b: Quantity) -> Fraction | None:
        """Return c if a <= c b holds of the two quantities whatever the kernels do."""
        one = Fraction(1)
        if a.of == b.of:
            if a.slice == b.slice:
                return one if _ordered(a, b) else None
            if a.kind == b.kind == "max" and self.inside(a.slice, b.slice):
                return one
            if a.kind == b.kind == "min" and self.inside(b.slice, a.slice):
                return one
            return None
        same = (a.slice, a.kind, a.q) == (b.slice, b.kind, b.q)
        if not same or a.kind not in _MONOTONE:
            return None
        if b.of == Abs(a.of):  # x <= |x|
            return one
        return self._domination(a.of, b.of)

    def _domination(self, small: Term, large: Term) -> Fraction | None:
        match small, large:
            case Metric("tv"), Metric("logit_span") if self.temperature:
                return 1 / (4 * self.temperature)  # tv <= tanh(s/4) <= s/4
            case Abs(Metric("log_ratio")), Metric("logit_span") if self.temperature:
                return 1 / self.temperature
            case Metric(a), Metric(b):
                return next((c for s, c, t in _DOMINATED if (s, t) == (a, b)), None)
            case _:
                return None

    def _norm_facts(self) -> Iterator[Expression]:
        factors = {
            ("inf", "2"): Fraction(1),
            ("span", "inf"): Fraction(2),
            ("span", "2"): _SQRT2_UP,
        }
        for least, some, largest in self._norms.values():
            yield z3.And(least >= 0, least <= some, some <= largest)
        for (witness, block, measured, kind), ends in self._norms.items():
            for (small, large), factor in factors.items():
                other = self._norms.get((witness, block, measured, large))
                if kind == small and other is not None:
                    scale = real(factor, self.context)
                    yield z3.And(*(a <= scale * b for a, b in zip(ends, other, strict=True)))


def _site(site: str, at: Environment) -> str:
    """Name the input that an existential quantifier chooses, given the inputs chosen outside."""
    outside = sorted((variable, witness.site) for variable, witness in at.items())
    return f"{site}{outside}"


def _as_term(quantity: Quantity) -> Term:
    if quantity.kind == "value":
        return quantity.of
    return Statistic(quantity.kind, quantity.of, quantity.q)


def _ordered(a: Quantity, b: Quantity) -> bool:
    """Say whether a <= b holds of two statistics of the same values."""
    if a.kind == "min":
        return b.kind in ("mean", "max", "quantile")
    if b.kind == "max":
        return a.kind in ("mean", "quantile")
    if a.kind == b.kind == "quantile":
        return a.q is not None and b.q is not None and a.q < b.q
    return False


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
        case Norm():
            return term


def _norms(term: Term) -> Iterator[Norm]:
    return (part for part in subterms(term) if isinstance(part, Norm))


def _has_norm(term: Term) -> bool:
    return next(_norms(term), None) is not None


def _bound_norms(term: Term, at: Environment) -> bool:
    return all(norm.of.variable in at for norm in _norms(term))
