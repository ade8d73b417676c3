"""SMT-LIB scripts that ask whether a contract is consistent, or whether one clause follows.

Hard clauses are about a slice as a whole. A clause with a budget of requests is about single
requests: if the budgets of several clauses add up to less than one, some request satisfies all of
them, and the script asks whether there can be such a request. Clauses whose budgets add up to one
or more are about different requests. The same holds for windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kcdsl.ir.canonical import digest
from kcdsl.ir.predicates import division, inclusion
from kcdsl.ir.printer import formula_text
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Clause, Program
from kcdsl.logic.relations import Interval
from kcdsl.logic.smtlib import text
from kcdsl.logic.smtlib.assumptions import assumptions
from kcdsl.logic.smtlib.requests import slice_lines
from kcdsl.logic.smtlib.theory import OneUnit, Theory

UNITS = ("requests", "windows")


@dataclass(frozen=True, slots=True)
class ScriptClaim:
    """One clause on one slice ("" where it names none), about the slice (no unit) or one unit."""

    clause: Clause
    slice: str
    unit: OneUnit | None

    @property
    def name(self) -> str:
        """Return the name of the assertion."""
        return f"{self.clause.id} on {self.slice}" if self.slice else f"{self.clause.id} holds"


Failure = tuple[ScriptClaim, ...]
"""A way in which a clause fails: the claims that are false, each about its unit."""


@dataclass(frozen=True, slots=True)
class BudgetLimit:
    """The limit on the sum of the budgets of a unit: less than one, or at most `rate`."""

    unit: str
    rate: Fraction | None = None

    def allows(self, total: Fraction) -> bool:
        """Return whether a sum of budgets is within the limit."""
        return total < 1 and (self.rate is None or total <= self.rate)


def consistency(program: Program) -> str:
    """Return the script that asks whether all clauses of a program can hold together.

    `unsat`: the clauses contradict each other, or a slice is empty; the core names them.
    `sat`: the contract is consistent as far as the axioms show.
    """
    written = expand_tables(program)
    return _script(program, written, claims_of(written))


def implication(program: Program, clause_id: str) -> str:
    """Return the script that asks whether the other clauses imply one clause.

    `unsat`: they do, or they contradict each other. `sat`: the model has measured values that
    satisfy the encoded other clauses but not this one. Raises KeyError for an unknown clause.
    """
    if all(clause.id != clause_id for clause in program.clauses):
        raise KeyError(clause_id)
    written = expand_tables(program)
    claims, failures = _question(written.clauses, clause_id)
    return _script(program, written, claims, clause_id, failures)


def claims_of(program: Program) -> tuple[ScriptClaim, ...]:
    """Return every clause on every slice, each with its unit.

    A clause with a budget of 100 % demands nothing and is omitted.
    """
    return tuple(_claims(program.clauses))


def _claims(clauses: Sequence[Clause], limit: BudgetLimit | None = None) -> Iterator[ScriptClaim]:
    """Yield claims; clauses with budgets of the unit of `limit` are grouped within the limit."""
    yield from (ScriptClaim(c, name, None) for c in clauses if c.budget is None for name in _on(c))
    for unit in UNITS:
        own = limit is not None and limit.unit == unit
        for one, group in _groups(clauses, limit if limit and own else BudgetLimit(unit)):
            yield from (ScriptClaim(c, name, one) for c in group for name in _on(c))


def _on(clause: Clause) -> tuple[str, ...]:
    return clause.slices or ("",)


def _question(
    clauses: Sequence[Clause], clause_id: str
) -> tuple[tuple[ScriptClaim, ...], tuple[Failure, ...]]:
    """Return the claims of the other clauses, and the ways in which this one can fail."""
    others = [c for c in clauses if c.id != clause_id]
    asked = [c for c in clauses if c.id == clause_id]
    budget = next((c.budget for c in asked), None)  # all buckets of a table have the same
    if budget is None:
        return tuple(_claims(others)), tuple(
            (ScriptClaim(c, n, None),) for c in asked for n in _on(c)
        )
    limit = BudgetLimit(budget.unit, budget.rate)
    units = [one for one, _ in _groups(others, limit)] or [OneUnit(budget.unit)]
    failures = (tuple(ScriptClaim(c, n, at) for at in units) for c in asked for n in _on(c))
    return tuple(_claims(others, limit)), tuple(failures) if budget.rate < 1 else ()


def _groups(clauses: Sequence[Clause], limit: BudgetLimit) -> list[tuple[OneUnit, list[Clause]]]:
    """Split clauses with budgets of a unit into groups within a limit, each about a separate unit.
    Clauses with budget 0 are in every group, clauses that exceed the limit alone in none."""
    own = [c for c in clauses if c.budget is not None and c.budget.unit == limit.unit]
    rated = [(_rate(c), c) for c in own if _rate(c) > 0]
    groups: list[tuple[Fraction, list[Clause]]] = []
    for rate, clause in rated:
        if not limit.allows(rate):
            continue
        for n, (total, group) in enumerate(groups):
            if limit.allows(total + rate):
                groups[n] = total + rate, [*group, clause]
                break
        else:
            groups.append((rate, [clause]))
    free = [c for c in own if _rate(c) == 0]
    chosen = [[c for c in own if c in free or c in group] for _, group in groups]
    chosen = chosen or [free] * bool(free)
    return [(OneUnit(limit.unit, n), group) for n, group in enumerate(chosen, 1)]


def _rate(clause: Clause) -> Fraction:
    return Fraction(0) if clause.budget is None else clause.budget.rate


def _script(
    original: Program,
    program: Program,
    claims: Sequence[ScriptClaim],
    refuted: str | None = None,
    failures: Sequence[Failure] = (),
) -> str:
    by_request = frozenset(m.name for m in program.metrics if m.counted == "request")
    theory = Theory(inclusion(program), by_request)
    formulas = [theory.holds(c.clause.require, c.slice, c.unit) for c in claims]
    failing = text.disjunction(
        text.conjunction(theory.fails(c.clause.require, c.slice, c.unit) for c in failure)
        for failure in failures
    )
    instances = theory.instances()
    temperature = program.constants.temperature
    known = {metric.name: Interval(metric.lower, metric.upper) for metric in program.metrics}
    tempered = temperature if temperature > 0 else None
    facts = dict(assumptions(theory, tempered, known, division(program)))
    slices = [line for s in program.slices for line in slice_lines(s, theory.symbols)]
    lines = [
        *_head(original, refuted),
        *_section("slices: each has a request", slices),
        *_section("measured terms", (text.declare(s, "Real") for s in theory.constants.values())),
        *_section("statements", (text.declare(s, "Bool") for s in theory.flags.values())),
        *_section("what holds whatever the kernels do", _facts(facts)),
        *_section("what quantified statements say of single rows", _asserted(instances)),
        *_section("clauses", _named(theory, claims, formulas)),
        *_section(f"{refuted} does not hold", _asserted([failing] * (refuted is not None))),
        "",
        "(check-sat)",
    ]
    return "\n".join(lines) + "\n"


def _head(program: Program, refuted: str | None) -> Iterator[str]:
    yield text.comment(f"contract {program.name} {program.version}, sha256:{digest(program)}")
    if refuted is None:
        yield "; Can every clause hold at once? unsat: they contradict each other, or a slice is"
        yield "; empty; (get-unsat-core) after (check-sat) names them. sat: not as far as is known."
    else:
        yield text.comment(f"Do the other clauses imply {refuted}? unsat: they do, or contradict")
        yield "; each other, or a slice is empty. sat: (get-model) after (check-sat) shows measured"
        yield "; values that keep them and not it."
    yield "(set-info :smt-lib-version 2.6)"
    yield "(set-option :produce-unsat-cores true)"
    yield "(set-option :produce-models true)"
    yield "(set-logic ALL)"


def _section(title: str, lines: Sequence[str] | Iterator[str]) -> Iterator[str]:
    first = True
    for line in lines:
        if first:
            yield ""
            yield text.comment(title, "; --- ")
            first = False
        yield line


def _facts(facts: dict[str, str]) -> Iterator[str]:
    """Yield each fact under its reason, the reasons in the order of their first use."""
    for reason in dict.fromkeys(facts.values()):
        yield text.comment(reason)
        yield from (f"(assert {fact})" for fact, why in facts.items() if why == reason)


def _asserted(formulas: Sequence[str]) -> Iterator[str]:
    return (f"(assert {formula})" for formula in formulas)


def _named(theory: Theory, claims: Sequence[ScriptClaim], formulas: Sequence[str]) -> Iterator[str]:
    last = ""
    for claim, formula in zip(claims, formulas, strict=True):
        clause = claim.clause
        told = f"{clause.id}, {_strength(clause)}: {clause.text or formula_text(clause.require)}"
        if told != last:
            yield text.comment(" ".join(told.split()))
            last = told
        yield text.named(formula, theory.symbols.symbol(claim, claim.name))


def _strength(clause: Clause) -> str:
    if clause.budget is None:
        return f"{clause.level}, hard"
    rate = clause.budget.rate * 100
    shown = str(rate.numerator) if rate.denominator == 1 else f"{float(rate):.6g}"
    return f"{clause.level}, budget {shown}% of {clause.budget.unit}"
