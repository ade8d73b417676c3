"""The respects in which two clauses differ, in words and by rank."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from kcdsl.ir.canonical import normal_formula
from kcdsl.ir.formulas import walk
from kcdsl.ir.printer import formula_text, predicate_text
from kcdsl.ir.tables import table_of
from kcdsl.ir.terms import AllOf, Budget, Clause, Program, Quantified, Slice, ThresholdTable
from kcdsl.verdict.difference import Change, Relation, from_implications
from kcdsl_backends.smt.consequences import (
    LEVELS,
    action_of,
    acts_as_severely,
    evidence_rank,
)
from kcdsl_certs.reals import real_text


def consequences(before: Program, old: Clause, after: Program, new: Clause) -> tuple[Change, ...]:
    """Return how level, action, evidence, holdout and family differ."""
    return tuple(_consequences(before, old, after, new))


def _consequences(before: Program, old: Clause, after: Program, new: Clause) -> Iterator[Change]:
    if old.level is not new.level:
        ranks = LEVELS.index(old.level), LEVELS.index(new.level)
        yield Change("level", old.level.value, new.level.value, _ranked(*ranks))
    first, second = action_of(before, old), action_of(after, new)
    if first != second:
        relation = from_implications(
            acts_as_severely(second, first), acts_as_severely(first, second)
        )
        yield Change("action", first or "none", second or "none", relation)
    if old.evidence is not new.evidence:
        evidence = evidence_rank(old.evidence), evidence_rank(new.evidence)
        names = [kind.value if kind else "any" for kind in (old.evidence, new.evidence)]
        yield Change("evidence", names[0], names[1], _ranked(*evidence))
    if old.holdout is not new.holdout:
        shown = [str(clause.holdout).lower() for clause in (old, new)]
        yield Change("holdout", shown[0], shown[1], _ranked(old.holdout, new.holdout))
    if old.family is not new.family:
        yield Change("family", old.family.value, new.family.value, Relation.EQUAL)


def _ranked(old: int, new: int) -> Relation:
    return Relation.STRICTER if new > old else Relation.WEAKER


def stated(
    before: Program, old: Clause, after: Program, new: Clause, demand: Relation
) -> tuple[Change, ...]:
    """Return how what is demanded differs. A single change has the relation of the demands."""
    found = list(_stated(before, old, after, new))
    relation = demand if len(found) == 1 else None
    return tuple(Change(name, first, second, relation) for name, first, second in found)


def _stated(
    before: Program, old: Clause, after: Program, new: Clause
) -> Iterator[tuple[str, str, str]]:
    if normal_formula(old.require) != normal_formula(new.require):
        yield "require", _text(old), _text(new)
    if set(old.slices) != set(new.slices):
        yield "slices", ", ".join(old.slices) or "none", ", ".join(new.slices) or "none"
    if old.budget != new.budget:
        yield "budget", _budget(old.budget), _budget(new.budget)
    for name in sorted(_slices(old) & _slices(new)):
        first, second = before.slice(name), after.slice(name)
        if _requests(first, before) != _requests(second, after):
            yield f"slice {name}", _requests(first, before), _requests(second, after)
    tables = table_of(old), table_of(new)
    if tables[0] is not None and tables[0] == tables[1]:
        values = _table(before.table(tables[0])), _table(after.table(tables[0]))
        if values[0] != values[1]:
            yield f"table {tables[0]}", *values


def _text(clause: Clause) -> str:
    return " ".join((clause.text or formula_text(clause.require)).split())


def _slices(clause: Clause) -> set[str]:
    regions = {p.region.slice for p in walk(clause.require) if isinstance(p, Quantified)}
    return regions | set(clause.slices)


def _requests(declared: Slice, program: Program) -> str:
    data = declared.data or program.data or "no data"
    where = "every request" if declared.where == AllOf() else predicate_text(declared.where)
    return f"{where} in {data}"


def _budget(budget: Budget | None) -> str:
    if budget is None:
        return "none (hard)"
    return f"{real_text(budget.rate * 100)}% of {budget.unit}"


def _table(table: ThresholdTable) -> str:
    rows = [f"{predicate_text(row.where)}: {_number(row.value)}" for row in table.rows]
    rest = [] if table.otherwise is None else [f"otherwise: {_number(table.otherwise)}"]
    return "; ".join([*rows, *rest])


def _number(value: Fraction) -> str:
    return real_text(value)
