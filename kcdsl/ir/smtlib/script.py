"""SMT-LIB scripts that ask whether a contract is consistent, or whether one clause follows.

Hard clauses speak of a slice as a whole. A clause with a budget of requests speaks of single
requests: as long as the budgets of several clauses add up to less than one, some request keeps all
of them, and the script asks whether there can be such a request. Clauses whose budgets add up to
one or more are asked about different requests. The same holds of windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kcdsl.ir.buckets import expand_tables
from kcdsl.ir.canonical import digest
from kcdsl.ir.facts import Interval
from kcdsl.ir.selection import inclusion
from kcdsl.ir.smtlib import text
from kcdsl.ir.smtlib.assumptions import assumptions
from kcdsl.ir.smtlib.requests import slice_lines
from kcdsl.ir.smtlib.theory import Theory
from kcdsl.ir.terms import Clause, Program
from kcdsl.ir.words import formula_text


@dataclass(frozen=True, slots=True)
class Claim:
    """One clause on one slice ("" where it names none), of the slice ("") or of one unit of it."""

    clause: Clause
    slice: str
    unit: str

    @property
    def name(self) -> str:
        """Return what the assertion is called."""
        return f"{self.clause.id} on {self.slice}" if self.slice else f"{self.clause.id} holds"


def consistency(program: Program) -> str:
    """Return the script that asks whether every clause of a program can hold at once.

    `unsat`: the clauses contradict each other, or a slice can have no request; the core names
    them. `sat`: nothing that the script knows speaks against the contract.
    """
    written = expand_tables(program)
    return _script(program, written, claims_of(written), None)


def implication(program: Program, clause_id: str) -> str:
    """Return the script that asks whether the other clauses imply one clause.

    `unsat`: they do, or they contradict each other by themselves. `sat`: the model shows measured
    values that keep the others and not this one. Raises KeyError for an unknown clause.
    """
    if all(clause.id != clause_id for clause in program.clauses):
        raise KeyError(clause_id)
    written = expand_tables(program)
    return _script(program, written, claims_of(written), clause_id)


def claims_of(program: Program) -> tuple[Claim, ...]:
    """Return every clause on every slice, each with the unit that it is asked about.

    A clause whose budget is everything demands nothing and is left out.
    """
    found = [Claim(c, name, "") for c in program.clauses if c.budget is None for name in _on(c)]
    for unit in ("requests", "windows"):
        groups = _one_unit_each([c for c in program.clauses if c.budget and c.budget.unit == unit])
        for number, group in enumerate(groups, 1):
            label = f"one {unit.removesuffix('s')}" + (f" ({number})" if number > 1 else "")
            found += [Claim(c, name, label) for c in group for name in _on(c)]
    return tuple(found)


def _on(clause: Clause) -> tuple[str, ...]:
    return clause.slices or ("",)


def _one_unit_each(clauses: Sequence[Clause]) -> list[list[Clause]]:
    """Split clauses with budgets into groups whose budgets add up to less than one."""
    groups: list[tuple[Fraction, list[Clause]]] = []
    for clause in clauses:
        assert clause.budget is not None
        rate = clause.budget.rate
        if rate >= 1:
            continue
        for n, (total, group) in enumerate(groups):
            if total + rate < 1:
                groups[n] = total + rate, [*group, clause]
                break
        else:
            groups.append((rate, [clause]))
    return [group for _, group in groups]


def _script(
    original: Program, program: Program, claims: Sequence[Claim], refuted: str | None
) -> str:
    theory = Theory(inclusion(program))
    asserted = [claim for claim in claims if claim.clause.id != refuted]
    formulas = [theory.holds(c.clause.require, c.slice, c.unit) for c in asserted]
    failing = [
        theory.fails(c.clause.require, c.slice, c.unit) for c in claims if c.clause.id == refuted
    ]
    instances = theory.instances()
    temperature = program.constants.temperature
    known = {metric.name: Interval(metric.lower, metric.upper) for metric in program.metrics}
    facts = dict(assumptions(theory, temperature if temperature > 0 else None, known))
    slices = [line for s in program.slices for line in slice_lines(s, theory.symbols)]
    lines = [
        *_head(original, refuted),
        *_section("slices: each has a request", slices),
        *_section("measured terms", (text.declare(s, "Real") for s in theory.constants.values())),
        *_section("statements", (text.declare(s, "Bool") for s in theory.flags.values())),
        *_section("what holds whatever the kernels do", _facts(facts)),
        *_section("what quantified statements say of single rows", _asserted(instances)),
        *_section("clauses", _claims(theory, asserted, formulas)),
        *_section(
            f"{refuted} does not hold", _asserted([text.disjunction(failing)] * bool(failing))
        ),
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
        yield "; each other. sat: (get-model) after (check-sat) shows measured values that keep"
        yield "; them and not it."
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


def _claims(theory: Theory, claims: Sequence[Claim], formulas: Sequence[str]) -> Iterator[str]:
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
