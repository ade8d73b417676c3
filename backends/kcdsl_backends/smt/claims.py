"""Clauses as claims about slices and units, and which claims can have to do with each other.

A hard clause is a claim about each of its slices as a whole; a clause with a budget of requests is
one about single requests, and with a budget of windows about single windows. What holds of the
values of a slice taken one by one (a bound on a maximum, fields of traces) is a claim about each
unit too.

A clause can be dropped for the sake of others only if nothing is lost: whenever it is violated, one
of the others is, and each of them has the level, the action and the demand of evidence that the
dropped one has, or more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial

from kcdsl.ir import predicates as selection
from kcdsl.ir.escalation import kind
from kcdsl.ir.formulas import subterms, terms_of, walk
from kcdsl.ir.predicates import Division, Inside
from kcdsl.ir.terms import (
    Clause,
    Compare,
    Connective,
    EvidenceKind,
    Formula,
    HasFields,
    Level,
    Metric,
    NoFlip,
    Norm,
    Number,
    Program,
    Quantified,
    Statistic,
)
from kcdsl.logic.orders import CURVES, EDGES, TEMPERED
from kcdsl.logic.relations import canonical
from kcdsl_backends.smt.solver import Clock, selects_nothing, selects_within

# --- consequences of a violation ------------------------------------------------------------------


LEVELS = tuple(Level)
_STRONGEST_FIRST = tuple(EvidenceKind)


def action_of(program: Program, clause: Clause) -> str | None:
    """Return the action that a violation leads to; None where the program has no policy."""
    if clause.action is not None:
        return clause.action
    try:
        return program.escalation.action(clause.family, clause.level)
    except KeyError:
        return None


def evidence_rank(demanded: EvidenceKind | None) -> int:
    """Return how much a demand of evidence excludes: 0 for none."""
    if demanded is None:
        return 0
    return len(_STRONGEST_FIRST) - _STRONGEST_FIRST.index(demanded)


def covers(program: Program) -> Callable[[Clause, Clause], bool]:
    """Return whether a violation of clause `a` has every consequence of one of `b`, as (a, b).

    A held-out clause does not stand for one that training is to see.
    """
    return _covers(program, program, lambda a, b: b.holdout or not a.holdout)


def covers_between(first: Program, second: Program) -> Callable[[Clause, Clause], bool]:
    """Return covers(a, b) for a clause `a` of the first program and `b` of the second.

    What was held out is not shown to training for the sake of another clause either.
    """
    return _covers(first, second, lambda a, b: a.holdout is b.holdout)


def _covers(
    first: Program, second: Program, may_stand: Callable[[Clause, Clause], bool]
) -> Callable[[Clause, Clause], bool]:
    known: dict[tuple[bool, str], _Consequences] = {}
    answers: dict[tuple[_Consequences, _Consequences], bool] = {}

    def consequences(clause: Clause, own: bool) -> _Consequences:
        key = own, clause.id
        if key not in known:
            level, evidence = LEVELS.index(clause.level), evidence_rank(clause.evidence)
            action = action_of(first if own else second, clause)
            known[key] = _Consequences(level, action, evidence)
        return known[key]

    def compare(a: Clause, b: Clause) -> bool:
        pair = consequences(a, True), consequences(b, False)
        if pair not in answers:
            answers[pair] = pair[0].cover(pair[1])
        return answers[pair] and may_stand(a, b)

    return compare


@dataclass(frozen=True, slots=True)
class _Consequences:
    level: int
    action: str | None
    evidence: int

    def cover(self, other: _Consequences) -> bool:
        return (
            self.level >= other.level
            and acts_as_severely(self.action, other.action)
            and self.evidence >= other.evidence
        )


def acts_as_severely(first: str | None, second: str | None) -> bool:
    """Say whether one action is the same as another, or of a more severe kind."""
    if first is None or second is None or first == second:
        return first == second or second is None
    return kind(first) > kind(second)


# --- claims ---------------------------------------------------------------------------------------


UNITS = ("", "requests", "windows")
"""What claims are about: a slice as a whole, or one unit of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One clause on one slice ("" where the clause names none); equal to itself alone.

    `lifted`: the clause is hard, and this is what it says of each unit.
    """

    clause: Clause
    slice: str
    index: int
    unit: str = ""
    lifted: bool = False

    @property
    def name(self) -> str:
        return f"claim-{self.index}"

    @property
    def site(self) -> str:
        """Return what tells its quantifiers apart from those of other claims."""
        return str(self.index)

    @property
    def rate(self) -> Fraction:
        """Return the share of units that may fail."""
        return Fraction(0) if self.clause.budget is None else self.clause.budget.rate


def claims_of(clauses: Iterable[Clause]) -> dict[str, list[Claim]]:
    """Return the claims of each unit, in the order of the clauses.

    A clause whose budget is everything demands nothing and makes none.
    """
    found: dict[str, list[Claim]] = {unit: [] for unit in UNITS}
    index = 0
    for clause in clauses:
        if clause.budget is not None and clause.budget.rate >= 1:
            continue
        unit = "" if clause.budget is None else clause.budget.unit
        for name in clause.slices or ("",):
            found[unit].append(Claim(clause, name, index, unit))
            index += 1
    return found


def lifted(claims: Sequence[Claim], unit: str, first: int) -> list[Claim]:
    """Return what hard claims say of each unit; indices count from `first`."""
    able = [claim for claim in claims if claim.slice and holds_of_parts(claim.clause.require)]
    return [Claim(c.clause, c.slice, first + n, unit, True) for n, c in enumerate(able)]


def holds_of_parts(formula: Formula) -> bool:
    """Say whether a formula that holds of some values holds of every part of them.

    A statistic over fewer values has a smaller maximum and a larger minimum.
    """
    match formula:
        case Compare(op, Statistic(kind), Number()):
            return _bounds_extreme(kind, op)
        case Connective("and" | "or", parts):
            return all(holds_of_parts(part) for part in parts)
        case HasFields():
            return True
        case _:
            return False


def is_about_each(formula: Formula) -> bool:
    """Say whether a formula holds of values if and only if it holds of each part of them."""
    match formula:
        case Connective("and", parts):
            return all(is_about_each(part) for part in parts)
        case Connective():
            return False
        case _:
            return holds_of_parts(formula)


def _bounds_extreme(kind: str, op: str) -> bool:
    return (kind == "max" and op in ("<=", "<")) or (kind == "min" and op in (">=", ">"))


# --- slices --------------------------------------------------------------------------------------


def inclusion(program: Program, clock: Clock) -> Inside:
    """Return which slices are proved to lie inside which; answers are remembered."""
    return selection.inclusion(program, partial(selects_within, clock=clock))


def division(program: Program, clock: Clock) -> Division:
    """Return how slices are made up of others; answers are remembered."""
    return selection.division(program, lambda where: selects_nothing(where, clock))


def same_slice(inner: str, outer: str) -> bool:
    """Say whether two slices are one: units of different slices are counted apart."""
    return inner == outer


# --- groups --------------------------------------------------------------------------------------


def components(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Split claims into groups that share no quantity, also not by way of a fact."""
    parents: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        parents.setdefault(key, key)
        while parents[key] != key:
            parents[key] = parents[parents[key]]
            key = parents[key]
        return key

    firsts: list[Hashable] = []
    for claim in claims:
        keys = list(dict.fromkeys(_keys(claim))) or [("claim", claim.index)]
        for key in keys[1:]:
            parents[root(key)] = root(keys[0])
        firsts.append(keys[0])
    found: dict[Hashable, list[Claim]] = {}
    for claim, first in zip(claims, firsts, strict=True):
        found.setdefault(root(first), []).append(claim)
    return list(found.values())


def _keys(claim: Claim) -> Iterator[Hashable]:
    require = claim.clause.require
    for term in terms_of(require):
        match term:
            case Statistic(_, of):
                for name in _metrics(subterms(of)):
                    yield "values", claim.slice, _cluster()(name)
                    if not claim.unit:
                        yield "statistics", _cluster()(name)
            case Metric(name):
                yield "values", claim.slice, _cluster()(canonical(name))
            case Norm(_, drift):
                yield "drift", drift.block, drift.measured
            case _:
                pass
    for part in walk(require):
        match part:
            case NoFlip(block):
                yield "flip", block
            case HasFields(fields):
                yield from (("field", claim.slice, name) for name in fields)
            case _:
                pass


def subjects(clause: Clause) -> frozenset[Hashable]:
    """Return what a clause speaks of, wherever: clauses that share nothing are independent."""
    found: set[Hashable] = {_cluster()(name) for name in _metrics(terms_of(clause.require))}
    for term in terms_of(clause.require):
        if isinstance(term, Norm):
            found.add(("drift", term.of.block, term.of.measured))
    for part in walk(clause.require):
        if isinstance(part, NoFlip):
            found.add(("flip", part.block))
        if isinstance(part, HasFields):
            found |= {("field", name) for name in part.fields}
    return frozenset(found)


def _metrics(terms: Iterable[object]) -> Iterator[str]:
    return (canonical(term.name) for term in terms if isinstance(term, Metric))


@cache
def _cluster() -> Callable[[str], str]:
    """Return the name of the group of metrics that facts relate to a metric."""
    group: dict[str, str] = {}
    pairs = [(e.small, e.large) for e in (*EDGES, *TEMPERED)]
    pairs += [(curve.small, curve.large) for curve in CURVES]
    pairs += [("log_ratio", "abs(log_ratio)")]
    for small, large in pairs:
        a, b = group.setdefault(small, small), group.setdefault(large, large)
        for name, member in group.items():
            if member == b:
                group[name] = a
    return lambda name: group.get(name, name)


def quantified(clause: Clause) -> Iterator[Quantified]:
    """Return the quantified parts of a requirement."""
    return (part for part in walk(clause.require) if isinstance(part, Quantified))
