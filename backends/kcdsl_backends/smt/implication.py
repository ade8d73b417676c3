"""Clauses that follow from others, with their premises and reasons.

All reported clauses can be dropped at once: a clause that follows is no longer used as a premise,
and later clauses are tried first.

A claim about a whole slice follows from claims about whole slices; one about single units follows
from claims about the same units and from the consequences of hard claims for each unit. A hard
requirement on each value is equivalent for the slice, its requests and its windows. A bound of a
percentile is equivalent to a budget of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations

from kcdsl.ir.canonical import normal_formula
from kcdsl.ir.formulas import subterms, walk
from kcdsl.ir.predicates import Inside, region_inside
from kcdsl.ir.printer import region_text
from kcdsl.ir.terms import (
    Budget,
    Clause,
    Compare,
    Formula,
    Norm,
    Number,
    Program,
    Quantified,
    Statistic,
)
from kcdsl_backends.smt.claims import (
    UNITS,
    Claim,
    components,
    holds_of_parts,
    is_about_each,
    quantified,
)
from kcdsl_backends.smt.findings import Implication
from kcdsl_backends.smt.solver import Clock, Outcome
from kcdsl_backends.smt.translation import SolverSession, minimal

# --- redundant clauses ----------------------------------------------------------------------------


Covers = Callable[[Clause, Clause], bool]

_MOST_TOGETHER = 6
"""Largest number of premises with budgets of which all subsets are tried."""


def implied(
    session: SolverSession,
    claims: Sequence[Claim],
    covers: Covers,
    undecided: Callable[[Claim], None],
) -> list[Implication]:
    """Return the claims that others imply, in order; all can be dropped can_hold.

    The claims must be jointly satisfiable, since contradictory claims imply everything.
    """
    kept = list(claims)
    followers: dict[Claim, list[Claim]] = {}
    for claim in reversed(claims):
        if claim.lifted:
            continue
        core = premises_of(session, claim, _usable(kept, claim, covers))
        if core is None:
            undecided(claim)
        elif core:
            kept.remove(claim)
            followers[claim] = core
    found: list[Implication] = []
    for claim in claims:
        core = followers.get(claim, [])
        if any(premise in followers for premise in core):
            core = premises_of(session, claim, _usable(kept, claim, covers)) or []
        if core:
            found.append(Implication(claim, tuple(core), reasons(session, claim, core)))
    return found


def _usable(claims: Sequence[Claim], claim: Claim, covers: Covers) -> list[Claim]:
    return [premise for premise in claims if may_imply(premise, claim, covers)]


def may_imply(premise: Claim, claim: Claim, covers: Covers) -> bool:
    """Return whether a premise would make a claim redundant if it implied it."""
    return (
        premise is not claim
        and premise.rate <= claim.rate
        and not (premise.lifted and premise.clause.id == claim.clause.id)
        and covers(premise.clause, claim.clause)
    )


def premises_of(
    session: SolverSession, claim: Claim, premises: Sequence[Claim]
) -> list[Claim] | None:
    """Return a minimal set of premises that imply a claim; [] if there is none, None if undecided.

    A unit that violates the claim violates a premise, so the sum of the premises' budgets must not
    exceed the claim's budget.
    """
    if not premises:
        return []
    outcome, named = session.fails_if(claim, premises)
    if outcome is Outcome.UNKNOWN:
        return None
    if outcome is Outcome.SAT:
        return []
    core = minimal(session, [p for p in premises if p.name in named], claim)
    if not core:
        return []  # the claim always holds, which is reported elsewhere
    if sum((p.rate for p in core), Fraction(0)) <= claim.rate:
        return core
    is_open = False
    for chosen in _affordable(premises, claim.rate):
        outcome, named = session.fails_if(claim, chosen)
        if outcome is Outcome.UNSAT:
            return minimal(session, [p for p in chosen if p.name in named], claim)
        is_open = is_open or outcome is Outcome.UNKNOWN
    return None if is_open else []


def _affordable(premises: Sequence[Claim], rate: Fraction) -> Iterator[list[Claim]]:
    """Yield maximal sets of premises whose budgets add up to at most `rate`; if more than
    `_MOST_TOGETHER` have budgets, sets with one of these each."""
    rated = [p for p in premises if 0 < p.rate <= rate]
    sizes = range(len(rated), 0, -1) if len(rated) <= _MOST_TOGETHER else (1,)
    found: list[frozenset[Claim]] = []
    for size in sizes:
        for chosen in combinations(rated, size):
            members = frozenset(chosen)
            if sum((p.rate for p in chosen), Fraction(0)) > rate or any(members < f for f in found):
                continue
            found.append(members)
            yield [p for p in premises if p.rate == 0 or p in members]
    if not rated:
        yield [p for p in premises if p.rate == 0]


def reasons(session: SolverSession, claim: Claim, premises: Sequence[Claim]) -> tuple[str, ...]:
    """Return the reasons why premises imply a claim, as text."""
    found = list(session.reasons(claim, premises))
    found += _inclusions(session, claim, premises)
    if any(p.lifted for p in premises):
        whole, each = "a whole slice", "each of its requests"
        one, other = (each, whole) if not claim.unit else (whole, each)
        found.append(f"what holds of {one} in this form holds of {other}")
    if not found:
        found.append(_by_form(claim, premises))
    return tuple(found)


def _inclusions(session: SolverSession, claim: Claim, premises: Sequence[Claim]) -> list[str]:
    """Return the inclusions of regions of a claim in regions of its premises, as text."""
    found = []
    for own in quantified(claim.clause):
        for premise in premises:
            for other in quantified(premise.clause):
                a, b = own.region, other.region
                if a != b and region_inside(a, b, session.translator.inside):
                    found.append(f"{region_text(a)} lies inside {region_text(b)}")
    return list(dict.fromkeys(found))


def _by_form(claim: Claim, premises: Sequence[Claim]) -> str:
    if len(premises) > 1:
        return "can_hold they leave no room for it"
    first = normal_formula(premises[0].clause.require)
    second = normal_formula(claim.clause.require)
    if first == second:
        same = claim.rate == premises[0].rate
        return "the requirement is the same" if same else "the budget is smaller"
    match _compared(first), _compared(second):
        case Compare(op, left), Compare(op2, left2) if (op[0], left) == (op2[0], left2):
            return "the same quantity has a tighter threshold"
        case _:
            return "of its form alone"


def _compared(formula: object) -> Compare | None:
    """Return the comparison of a formula if it is the only one and with a constant."""
    if not isinstance(formula, Compare | Quantified):
        return None
    parts = [part for part in walk(formula) if isinstance(part, Compare)]
    if len(parts) != 1 or not isinstance(parts[0].right, Number):
        return None
    return parts[0]


# --- questions about two contracts ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: claims follow, do not (with the refuted question), or None if undecided."""

    follows: bool | None
    premises: tuple[Claim, ...] = ()
    reasons: tuple[str, ...] = ()
    refuted: NotImplied | None = None


@dataclass(frozen=True, slots=True)
class NotImplied:
    """A claim that does not follow from premises; both are in the session.

    `share` is given if the implication holds for each unit but the budgets do not suffice: the
    share of units that can violate the claim within the premises' budgets.
    """

    session: SolverSession
    claim: Claim
    premises: tuple[Claim, ...]
    share: Fraction | None = None


@dataclass(slots=True)
class Pool:
    """Clauses of two contracts (sides), for questions whether one side implies the other."""

    program: Program
    clauses: Sequence[tuple[str, Clause]]
    """(side, clause)"""
    inside: Inside
    clock: Clock
    asked: frozenset[tuple[str, str]]
    """The clauses of later questions; groups without any of them get no session."""
    claims: list[tuple[str, Claim]] = field(default_factory=list)
    sessions: dict[Claim, SolverSession] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side, stated in self.clauses:
            for clause, unit, lifted in _forms(stated):
                for name in clause.slices or ("",):
                    claim = Claim(clause, name, len(self.claims), unit, lifted)
                    self.claims.append((side, claim))
        asked = {c for side, c in self.claims if (side, c.clause.id) in self.asked}
        for unit in UNITS:
            group = [claim for _, claim in self.claims if claim.unit == unit]
            for part in components(group):
                if asked.isdisjoint(part):
                    continue
                session = SolverSession(self.program, part, self.inside, self.clock, unit)
                self.sessions.update(dict.fromkeys(part, session))

    def of(self, side: str, ids: Collection[str] | None = None) -> list[Claim]:
        """Return the claims of one side, of all its clauses or of some."""
        return [c for s, c in self.claims if s == side and (ids is None or c.clause.id in ids)]

    def follow(
        self,
        claims: Sequence[Claim],
        premises: Sequence[Claim],
        may: Callable[[Clause, Clause], bool],
    ) -> Answer:
        """Return whether every claim of one clause follows from the premises that
        `may(premise, clause)` allows."""
        used: dict[Claim, None] = {}
        why: dict[str, None] = {}
        refuted: NotImplied | None = None
        is_open = False
        for claim in _own_claims(claims):
            answer = self._follows(claim, claims, premises, may)
            match answer.follows:
                case True:
                    used.update(dict.fromkeys(answer.premises))
                    why.update(dict.fromkeys(answer.reasons))
                case False:
                    refuted = refuted or answer.refuted
                    if refuted is None:
                        return Answer(False)
                case None:
                    is_open = True
        if refuted is not None:
            return Answer(False, refuted=refuted)
        return Answer(None) if is_open else Answer(True, tuple(used), tuple(why))

    def _follows(
        self,
        claim: Claim,
        forms: Sequence[Claim],
        premises: Sequence[Claim],
        may: Callable[[Clause, Clause], bool],
    ) -> Answer:
        asked = [claim]
        if is_about_each(claim.clause.require) or _percentile_as_budget(claim.clause) is not None:
            asked += [c for c in forms if c.lifted and c.slice == claim.slice]
        found: list[Answer] = []
        for form in asked:
            usable = [
                p
                for p in premises
                if p.unit == form.unit
                and p is not form
                and self.sessions.get(p) is self.sessions[form]
                and may(p.clause, claim.clause)
            ]
            answer = self._ask(form, usable)
            if answer.follows:
                return answer
            found.append(answer)
        if any(answer.follows is None for answer in found):
            return Answer(None)
        return max(found, key=lambda answer: _rank(answer, claim))

    def _ask(self, claim: Claim, premises: Sequence[Claim]) -> Answer:
        session = self.sessions[claim]
        match session.can_fail(claim):
            case Outcome.UNSAT:
                return Answer(True, (), ("no kernel can violate it",))
            case Outcome.UNKNOWN:
                return Answer(None)
            case Outcome.SAT:
                pass
        allowed = [p for p in premises if p.rate <= claim.rate]
        core = premises_of(session, claim, allowed)
        if core:
            return Answer(True, tuple(core), reasons(session, claim, core))
        if core is None:
            return Answer(None)
        if not all(is_exact(c.clause.require) for c in (claim, *premises)):
            return Answer(None)
        match session.fails_if(claim, premises)[0] if premises else Outcome.SAT:
            case Outcome.SAT:
                return Answer(False, refuted=NotImplied(session, claim, tuple(premises)))
            case Outcome.UNSAT:
                share = _violating_share(session, claim, premises)
                if share is None:
                    return Answer(None)
                return Answer(False, refuted=NotImplied(session, claim, tuple(premises), share))
            case _:
                return Answer(None)


def _rank(answer: Answer, claim: Claim) -> tuple[bool, int]:
    """Rank refutations: those with a premise of the claim's name first, then by premises."""
    premises = () if answer.refuted is None else answer.refuted.premises
    return any(p.clause.id == claim.clause.id for p in premises), len(premises)


def _violating_share(
    session: SolverSession, claim: Claim, premises: Sequence[Claim]
) -> Fraction | None:
    """Return a share of units above the claim's budget that can violate it within the budgets of
    the premises; None if unknown. Units that satisfy all premises satisfy the claim."""
    if session.can_hold(premises)[0] is not Outcome.SAT:
        return None  # the other units must satisfy all premises
    large = [p.rate for p in premises if p.rate > claim.rate]
    small = [p for p in premises if p.rate <= claim.rate]
    if large and session.fails_if(claim, small)[0] is Outcome.SAT:
        return min(large)
    alone = Fraction(0)
    for premise in premises:
        rest = [p for p in premises if p is not premise]
        if premise.rate and session.fails_if(claim, rest)[0] is Outcome.SAT:
            alone += premise.rate
    return min(alone, Fraction(1)) if alone > claim.rate else None


def is_exact(formula: Formula) -> bool:
    """Return whether the translation of a formula is exact, so that a refutation is valid.

    It is exact if no quantifier is nested and drift of all admitted runs is compared with numbers.
    """
    quantifiers = [part for part in walk(formula) if isinstance(part, Quantified)]
    if any(isinstance(inner, Quantified) for q in quantifiers for inner in walk(q.body)):
        return False
    for part in walk(formula):
        if isinstance(part, Compare):
            sides = (part.left, part.right)
            norms = [t for side in sides for t in subterms(side) if isinstance(t, Norm)]
            simple = any(isinstance(s, Norm) for s in sides) and any(
                isinstance(s, Number) for s in sides
            )
            if any(not norm.of.measured for norm in norms) and not simple:
                return False
    return True


def _forms(clause: Clause) -> list[tuple[Clause, str, bool]]:
    """Return the equivalent forms of a clause by unit: (clause, unit, lifted)."""
    own = "" if clause.budget is None else clause.budget.unit
    counted = _percentile_as_budget(clause)
    if counted is not None:
        return [(clause, own, False), (counted, "requests", True)]
    strict = clause.budget is None or clause.budget.rate == 0
    carries = holds_of_parts if not own else is_about_each
    if not (strict and clause.slices and carries(clause.require)):
        return [(clause, own, False)]
    return [(clause, own, False), *((clause, unit, True) for unit in UNITS if unit != own)]


def _percentile_as_budget(clause: Clause) -> Clause | None:
    """Return the bound of a percentile as a budget of requests: `p99(x) <= t` holds on a slice if
    and only if at most 1% of its requests violate `max(x) <= t`."""
    match clause.require:
        case Compare(("<=" | "<") as op, Statistic("quantile", of, q), Number() as bound):
            if clause.budget is not None or not clause.slices or q is None or not 0 < q < 1:
                return None
            require = Compare(op, Statistic("max", of), bound)
            return replace(clause, require=require, budget=Budget(1 - q, "requests"))
        case _:
            return None


def _own_claims(claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims of a clause in its own form, without those that always hold."""
    return [c for c in claims if not c.lifted and c.rate < Fraction(1)]
