"""Dead parts of requirements, such as conditions that never hold and redundant disjuncts.

A part is dead if replacing it by true, or by false, gives an equivalent requirement. The outermost
dead part is reported and replaced before the others are checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from kcdsl.diagnostics import Severity
from kcdsl.diagnostics.codes import DEAD_PART
from kcdsl.ir.formulas import terms_of
from kcdsl.ir.predicates import Inside
from kcdsl.ir.printer import formula_text
from kcdsl.ir.terms import (
    Arith,
    Clause,
    Compare,
    Connective,
    Formula,
    HasFields,
    NoFlip,
    Not,
    Program,
    Quantified,
)
from kcdsl_backends.smt.findings import Findings
from kcdsl_backends.smt.solver import Clock, Outcome, Solver
from kcdsl_backends.smt.translation import translator_for

TRUE, FALSE = Connective("and", ()), Connective("or", ())
_DUAL = {"and": "or", "or": "and"}
"""The connective after a negation is moved inwards."""

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FormulaPart:
    """A part of a formula with its path; `positive`: under an even number of negations.

    `role` is its role in the connective around it: "and", "or", "if", "then". `binders` are the
    quantifiers around it.
    """

    path: Path
    formula: Formula
    positive: bool
    role: str
    binders: tuple[Quantified, ...]


def check_parts(
    program: Program, clause: Clause, inside: Inside, clock: Clock, findings: Findings
) -> None:
    """Report dead parts of a requirement that can hold and can fail."""
    question = _Question(program, clause, inside, clock)
    formula = clause.require
    skipped: list[Path] = []
    for part in list(_parts(formula)):
        if any(part.path[: len(path)] == path for path in skipped):
            continue
        value = question.fixed(formula, part)
        if value is not None:
            skipped.append(part.path)
            formula = _put(formula, part.path, TRUE if value else FALSE)
            _report(clause, part, value, question.alone(part), findings)


def check_vacuous(
    program: Program, clause: Clause, inside: Inside, clock: Clock, findings: Findings
) -> bool:
    """Report why an implication always holds: its condition never holds or its consequence always.

    Return False if the requirement is no implication or holds for another reason.
    """
    question = _Question(program, clause, inside, clock)
    formula = clause.require
    while isinstance(formula, Quantified):
        formula = formula.body
    if not (isinstance(formula, Connective) and formula.op == "implies"):
        return False
    for part in _parts(clause.require):
        if part.formula is formula.parts[0] or part.formula is formula.parts[1]:
            alone = question.alone(part)
            if alone is (part.role == "then"):
                _report(clause, part, alone, alone, findings)
                return True
    return False


def _report(
    clause: Clause, part: FormulaPart, value: bool, alone: bool | None, findings: Findings
) -> None:
    never = part.role == "if" and alone is False
    findings.add_plain(
        DEAD_PART,
        f"{clause.id}: {_words(part, value, alone)}",
        part.formula.span,
        severity=Severity.ERROR if never else Severity.WARNING,
        help=_HELP[part.role],
    )


_HELP = {
    "if": "correct the condition, or drop it",
    "then": "correct the consequence, or drop the statement",
    "and": "leave it out",
    "or": "leave it out, or correct its threshold",
}


def _words(part: FormulaPart, value: bool, alone: bool | None) -> str:
    shown = formula_text(part.formula)
    match part.role, value, alone:
        case "if", False, False:
            return f"the condition `{shown}` can never hold, so nothing is required"
        case "if", True, True:
            return f"the condition `{shown}` always holds"
        case "then", True, True:
            return f"the consequence `{shown}` always holds, so nothing is required"
        case "then", False, False:
            return f"the consequence `{shown}` can never hold, so the condition is forbidden"
        case "or", False, False:
            return f"the alternative `{shown}` can never hold"
        case "or", False, _:
            return f"the alternative `{shown}` adds nothing: another one holds where it does"
        case "and", True, True:
            return f"`{shown}` always holds"
        case "and", True, _:
            return f"`{shown}` follows from what is beside it"
        case _:
            return f"`{shown}` makes no difference to what is required"


class _Question:
    """Solver questions about one clause, on the first of its slices."""

    def __init__(self, program: Program, clause: Clause, inside: Inside, clock: Clock) -> None:
        self._program, self._inside, self._clock = program, inside, clock
        self._slice = clause.slices[0] if clause.slices else ""
        self._unit = "" if clause.budget is None else clause.budget.unit

    def fixed(self, formula: Formula, part: FormulaPart) -> bool | None:
        """Return the value that a part can be replaced by without a change of meaning."""
        for value in (True, False):
            changed = _put(formula, part.path, TRUE if value else FALSE)
            # A part made true weakens the whole, or strengthens it under a negation.
            weaker, stronger = (changed, formula) if value == part.positive else (formula, changed)
            if not self._follows(weaker, stronger):
                continue
            # Without a part that divides, the whole is no longer undefined at a zero divisor.
            divides = any(isinstance(t, Arith) and t.op == "/" for t in terms_of(part.formula))
            if not divides or self._follows(stronger, weaker):
                return value
        return None

    def alone(self, part: FormulaPart) -> bool | None:
        """Return whether a part by itself always holds (True) or never (False)."""
        if self._follows(_closed(part, "exists"), FALSE):
            return False
        return True if self._follows(TRUE, _closed(part, "forall")) else None

    def _follows(self, premise: Formula, conclusion: Formula) -> bool:
        translator = translator_for(self._program, self._inside, self._clock, self._unit)
        translator.collect(premise, "p")
        translator.collect_negation(conclusion, "c")
        goals = (
            translator.requirement(premise, self._slice, "p"),
            translator.negation(conclusion, self._slice, "c"),
        )
        solver = Solver(translator.context, self._clock)
        solver.add(translator.facts())
        return solver.decide(*goals) is Outcome.UNSAT


def _closed(part: FormulaPart, quantifier: str) -> Formula:
    """Return a part with all of its variables bound by a quantifier."""
    formula = part.formula
    for binder in reversed(part.binders):
        formula = replace(binder, quantifier=quantifier, body=formula)
    return formula


def _parts(
    formula: Formula, path: Path = (), positive: bool = True, binders: tuple[Quantified, ...] = ()
) -> Iterator[FormulaPart]:
    """Yield the parts of every connective of a formula, outermost first."""
    match formula:
        case Not(of):
            yield from _parts(of, (*path, 0), not positive, binders)
        case Connective(op, parts):
            for n, part in enumerate(parts):
                here, side = (*path, n), positive != (op == "implies" and n == 0)
                role = ("if", "then")[n] if op == "implies" else (op if positive else _DUAL[op])
                yield FormulaPart(here, part, side, role, binders)
                yield from _parts(part, here, side, binders)
        case Quantified(body=body):
            yield from _parts(body, (*path, 0), positive, (*binders, formula))
        case Compare() | NoFlip() | HasFields():
            return
        case _:
            assert_never(formula)


def _put(formula: Formula, path: Path, new: Formula) -> Formula:
    """Return a formula with one part replaced."""
    if not path:
        return new
    first, rest = path[0], path[1:]
    match formula:
        case Not(of):
            return replace(formula, of=_put(of, rest, new))
        case Connective(_, parts):
            changed = tuple(_put(p, rest, new) if n == first else p for n, p in enumerate(parts))
            return replace(formula, parts=changed)
        case Quantified(body=body):
            return replace(formula, body=_put(body, rest, new))
        case _:
            raise ValueError(f"{path} leads nowhere")
