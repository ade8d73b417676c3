"""Which clauses follow from others, from which, and by what.

The clauses that are reported can all be dropped at once: one that is found to follow is no longer
used as a premise, and later clauses are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations

from kcdsl.ir.canonical import normal_formula
from kcdsl.ir.formulas import walk
from kcdsl.ir.printer import region_text
from kcdsl.ir.terms import Clause, Compare, Number, Quantified
from kcdsl_backends.smt.claims import Claim, quantified
from kcdsl_backends.smt.findings import Implication
from kcdsl_backends.smt.scene import Scene, minimal
from kcdsl_backends.smt.solving import Outcome
from kcdsl_backends.smt.translate import region_inside

Covers = Callable[[Clause, Clause], bool]

_MOST_TOGETHER = 6
"""Out of how many premises with budgets every choice is tried."""


def implied(
    scene: Scene, claims: Sequence[Claim], covers: Covers, undecided: Callable[[Claim], None]
) -> list[Implication]:
    """Return the claims that others imply, in their order; all can be dropped together.

    The claims must be able to hold at once, or everything would follow from them.
    """
    kept = list(claims)
    followers: dict[Claim, list[Claim]] = {}
    for claim in reversed(claims):
        if claim.lifted:
            continue
        core = premises_of(scene, claim, _usable(kept, claim, covers))
        if core is None:
            undecided(claim)
        elif core:
            kept.remove(claim)
            followers[claim] = core
    found: list[Implication] = []
    for claim in claims:
        core = followers.get(claim, [])
        if any(premise in followers for premise in core):
            core = premises_of(scene, claim, _usable(kept, claim, covers)) or []
        if core:
            found.append(Implication(claim, tuple(core), reasons(scene, claim, core)))
    return found


def _usable(claims: Sequence[Claim], claim: Claim, covers: Covers) -> list[Claim]:
    return [premise for premise in claims if may_imply(premise, claim, covers)]


def may_imply(premise: Claim, claim: Claim, covers: Covers) -> bool:
    """Say whether a claim would make another superfluous if it implied it."""
    return (
        premise is not claim
        and premise.rate <= claim.rate
        and not (premise.lifted and premise.clause.id == claim.clause.id)
        and covers(premise.clause, claim.clause)
    )


def premises_of(scene: Scene, claim: Claim, premises: Sequence[Claim]) -> list[Claim] | None:
    """Return the fewest premises found that imply a claim; none if they do not, None if open.

    A unit that fails the claim fails one of the premises, so their budgets together must not
    exceed that of the claim.
    """
    if not premises:
        return []
    outcome, named = scene.without(claim, premises)
    if outcome is Outcome.UNKNOWN:
        return None
    if outcome is Outcome.SAT:
        return []
    core = minimal(scene, [p for p in premises if p.name in named], claim)
    if not core:
        return []  # it holds by itself, which is reported elsewhere
    if sum((p.rate for p in core), Fraction(0)) <= claim.rate:
        return core
    is_open = False
    for chosen in _affordable(premises, claim.rate):
        outcome, named = scene.without(claim, chosen)
        if outcome is Outcome.UNSAT:
            return minimal(scene, [p for p in chosen if p.name in named], claim)
        is_open = is_open or outcome is Outcome.UNKNOWN
    return None if is_open else []


def _affordable(premises: Sequence[Claim], rate: Fraction) -> Iterator[list[Claim]]:
    """Yield premises whose budgets together do not exceed a rate, no set inside another; of many
    with budgets of their own, each alone."""
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


def reasons(scene: Scene, claim: Claim, premises: Sequence[Claim]) -> tuple[str, ...]:
    """Return by what premises imply a claim, in words."""
    found = list(scene.reasons(claim, premises))
    found += _inclusions(scene, claim, premises)
    if any(p.lifted for p in premises):
        whole, each = "a whole slice", "each of its requests"
        one, other = (each, whole) if not claim.unit else (whole, each)
        found.append(f"what holds of {one} in this form holds of {other}")
    if not found:
        found.append(_by_form(claim, premises))
    return tuple(found)


def _inclusions(scene: Scene, claim: Claim, premises: Sequence[Claim]) -> list[str]:
    """Return which regions of the claim lie inside regions of its premises."""
    found = []
    for own in quantified(claim.clause):
        for premise in premises:
            for other in quantified(premise.clause):
                a, b = own.region, other.region
                if a != b and region_inside(a, b, scene.translator.inside):
                    found.append(f"{region_text(a)} lies inside {region_text(b)}")
    return list(dict.fromkeys(found))


def _by_form(claim: Claim, premises: Sequence[Claim]) -> str:
    if len(premises) > 1:
        return "together they leave no room for it"
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
    """Return the only comparison with a constant of a formula."""
    if not isinstance(formula, Compare | Quantified):
        return None
    parts = [part for part in walk(formula) if isinstance(part, Compare)]
    if len(parts) != 1 or not isinstance(parts[0].right, Number):
        return None
    return parts[0]
