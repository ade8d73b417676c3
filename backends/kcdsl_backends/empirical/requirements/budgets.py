"""What share of its units a clause allows to be beyond its threshold, where it speaks of that.

`p99(m) <= τ` says that at most 1 % of the requests exceed τ, `budget: 1% of requests` on `max(m)`
says the same, and a maximum alone says that none does. `failure_rate` and `determinism` are shares
of requests themselves. A mean speaks of no unit, and neither does a rate over tokens, which is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kcdsl.ir.formulas import subterms
from kcdsl.ir.printer import formula_text
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Clause,
    Compare,
    HasFields,
    Metric,
    Norm,
    Quantified,
    Statistic,
    Term,
)
from kcdsl.ir.terms import Number as Constant
from kcdsl.metrics import METRICS
from kcdsl_backends.empirical.requirements.clauses import main_comparison

_UPPER, _LOWER = ("<=", "<"), (">=", ">")


def allowed_rate(clause: Clause) -> Fraction | None:
    """Return the allowed rate; 0 where every unit is spoken of, None where no unit is."""
    if clause.budget is not None:
        return clause.budget.rate
    formula = clause.require
    if isinstance(formula, HasFields):
        return Fraction(0)
    if isinstance(formula, Quantified):
        return Fraction(0) if formula.quantifier == "forall" else None
    comparison = main_comparison(formula)
    return None if comparison is None else _of_comparison(comparison)


def _of_comparison(comparison: Compare) -> Fraction | None:
    found = sides(comparison)
    return None if found is None else _of_term(*found)


def sides(comparison: Compare) -> tuple[Term, str, Fraction] | None:
    """Return a comparison with a number as (term, operator, number); None for one of two terms."""
    match comparison:
        case Compare(op, term, Constant(value)) if not isinstance(term, Constant):
            return term, op, value
        case _:
            return None


def better_of(clause: Clause) -> str:
    """Return which values are good by the operator: "lower" or "higher"."""
    comparison = main_comparison(clause.require)
    found = None if comparison is None else sides(comparison)
    return "higher" if found is not None and found[1] in _LOWER else "lower"


def requirement_text(part: Clause, whole: Clause) -> str:
    """Return what a part asks for: the text of its clause, or of the comparison if it has more."""
    budget = part.budget
    if budget is not None:
        return f"{whole.text or whole.id}, up to {float(100 * budget.rate):g}% of {budget.unit}"
    comparison = main_comparison(part.require)
    if comparison is None or part.require == whole.require:
        return whole.text or whole.id
    return formula_text(comparison)


def _of_term(term: Term, op: str, tau: Fraction) -> Fraction | None:
    match term:
        case Statistic("max") if op in _UPPER:
            return Fraction(0)
        case Statistic("min") if op in _LOWER:
            return Fraction(0)
        case Statistic("quantile", _, Fraction() as q) if op in _UPPER:
            return 1 - q
        case Statistic("quantile", _, Fraction() as q) if op in _LOWER:
            return q
        case Statistic("rate", Metric(name)) if op in _UPPER and 0 <= tau < 1:
            return tau if _per_request(name) else None
        case Metric("failure_rate") if op in _UPPER and 0 <= tau < 1:
            return tau
        case Metric("determinism") if op in _LOWER and 0 < tau <= 1:
            return 1 - tau
        case Statistic("aggregate", of):
            return _of_term(of, op, tau)
        case Norm():
            return Fraction(0)
        case _:
            return None


def is_mean(clause: Clause) -> bool:
    """Say whether a clause compares one mean of values (or its magnitude) with a number; a rate
    over tokens is one."""
    comparison = main_comparison(clause.require)
    found = None if comparison is None else sides(comparison)
    if found is None or clause.budget is not None:
        return False
    term = found[0].of if isinstance(found[0], Abs) else found[0]
    match term:
        case Statistic("mean", of):
            return _pointwise(of)
        case Statistic("rate", Metric(name)):
            return not _per_request(name)
        case _:
            return False


@dataclass(frozen=True, slots=True)
class Bounded:
    """A mean of values in a range: its good end, and how far along the range from there the
    threshold lies (0 to 1)."""

    best: float
    share: Fraction


def bounded_mean(clause: Clause) -> Bounded | None:
    """Return the range of a mean of one metric; None for others, for a range that is open at an
    end, and for a threshold outside of it."""
    comparison = main_comparison(clause.require)
    found = None if comparison is None else sides(comparison)
    if found is None or not is_mean(clause):
        return None
    term, op, tau = found
    inner = term.of if isinstance(term, Statistic) else None
    definition = METRICS.get(inner.name) if isinstance(inner, Metric) else None
    if definition is None or definition.lower is None or definition.upper is None or op == "==":
        return None
    best, room = definition.lower, tau - definition.lower
    if op in _LOWER:
        best, room = definition.upper, definition.upper - tau
    share = room / (definition.upper - definition.lower)
    return Bounded(float(best), share) if 0 < share < 1 else None


def _per_request(name: str) -> bool:
    """Say whether a metric has one value of each request, as far as that is known."""
    definition = METRICS.get(name)
    return definition is not None and definition.counted == "request"


def _pointwise(term: Term) -> bool:
    return all(isinstance(part, Metric | Abs | Arith | Constant) for part in subterms(term))
