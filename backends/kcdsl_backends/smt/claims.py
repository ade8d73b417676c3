"""Clauses as claims about slices and units, and the groups of claims that share quantities.

A hard clause is a claim about each of its slices as a whole, a clause with a budget of requests
about single requests, and one with a budget of windows about single windows. A requirement on each
value of a slice (a bound on a maximum, fields of traces) is also a claim about each unit.

Other clauses make a clause redundant only if each violation of it violates one of them, and each of
them has at least its level, severity of action and demand of evidence.
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
    """Return the action for a violation of a clause; None if the program has no policy."""
    if clause.action is not None:
        return clause.action
    try:
        return program.escalation.action(clause.family, clause.level)
    except KeyError:
        return None


def evidence_rank(demanded: EvidenceKind | None) -> int:
    """Return the rank of an evidence demand: larger is stricter, 0 is none."""
    if demanded is None:
        return 0
    return len(_STRONGEST_FIRST) - _STRONGEST_FIRST.index(demanded)


def covers(program: Program) -> Callable[[Clause, Clause], bool]:
    """Return the predicate (a, b): a violation of `a` has all consequences of one of `b`.

    A held-out clause does not cover one that training may see.
    """
    return _covers(program, program, lambda a, b: b.holdout or not a.holdout)


def covers_between(first: Program, second: Program) -> Callable[[Clause, Clause], bool]:
    """Return covers(a, b) for a clause `a` of the first program and `b` of the second.

    A clause that training may see does not cover a held-out one either.
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
    """Return whether one action is the same as another, or of a more severe kind."""
    if first is None or second is None or first == second:
        return first == second or second is None
    return kind(first) > kind(second)


# --- claims ---------------------------------------------------------------------------------------


UNITS = ("", "requests", "windows")
"""Subjects of claims: a slice as a whole (""), or one unit of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One clause on one slice ("" if the clause names none), compared by identity.

    `lifted`: the claim is the consequence of a hard clause for each unit.
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
        """Return the name that distinguishes its quantifiers from those of other claims."""
        return str(self.index)

    @property
    def rate(self) -> Fraction:
        """Return the share of units that may fail."""
        return Fraction(0) if self.clause.budget is None else self.clause.budget.rate


def claims_of(clauses: Iterable[Clause]) -> dict[str, list[Claim]]:
    """Return the claims of each unit, in the order of the clauses.

    A clause whose budget admits all units makes no claim.
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
    """Return the consequences of hard claims for each unit; indices start at `first`."""
    able = [claim for claim in claims if claim.slice and holds_of_parts(claim.clause.require)]
    return [Claim(c.clause, c.slice, first + n, unit, True) for n, c in enumerate(able)]


def holds_of_parts(formula: Formula) -> bool:
    """Return whether a formula that holds for a set of values holds for every subset.

    A subset has a maximum at most as large and a minimum at least as large.
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
    """Return whether a formula holds for values if and only if it holds for each of them."""
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
    """Return the cached predicate whether one slice is proved to lie inside another."""
    return selection.inclusion(program, partial(selects_within, clock=clock))


def division(program: Program, clock: Clock) -> Division:
    """Return the cached function that divides a slice into others."""
    return selection.division(program, lambda where: selects_nothing(where, clock))


def same_slice(inner: str, outer: str) -> bool:
    """Return whether two slices are the same; units of different slices are counted separately."""
    return inner == outer


# --- groups --------------------------------------------------------------------------------------


def components(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Split claims into groups that share no quantity, directly or through an axiom."""
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
    """Return the subjects of a clause on any slice; clauses without common ones are independent."""
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
    """Return the function from a metric to the name of its group of metrics related by axioms."""
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
