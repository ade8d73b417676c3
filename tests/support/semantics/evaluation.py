"""The reference evaluator: the meaning of a contract on finite domains.

It decides every formula, clause and program in a `World` by the definitions of the language, with
exact fractions. It is written for clarity, not speed; backends, translations and documentation are
tested against it. A statement is true, false or undefined. Undefined results come from missing
values, non-finite numbers, division by zero, and missing fields, records or runs; they propagate to
every enclosing statement, and are never true. Percentiles count units: a request is represented by
its worst token, the largest where the comparison needs the term to be small, else the smallest. The
q-quantile of n values is the smallest of them that at least q n of them do not exceed, so `p99(x)
<= t` means 100 #(x > t) <= n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import partial

from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import terms_of
from kcdsl.ir.predicates import holds, tests_of
from kcdsl.ir.tables import expand_tables, gaps
from tests.support.semantics.formulas import Scope, is_timed
from tests.support.semantics.interpretations import Unit, World
from tests.support.semantics.norms import Undefined
from tests.support.semantics.store import Store


class Truth(Enum):
    """The truth value of a statement in a world."""

    TRUE = "true"
    FALSE = "false"
    UNDEFINED = "undefined"


@dataclass(frozen=True, slots=True)
class Answer:
    """A truth value, with the reason where it is undefined."""

    truth: Truth
    reason: str = ""


def evaluate(program: ir.Program, world: World) -> Truth:
    """Return whether a program holds: false where a clause is, else undefined where one is."""
    found = {answer.truth for answer in answers(program, world).values()}
    for truth in (Truth.FALSE, Truth.UNDEFINED):
        if truth in found:
            return truth
    return Truth.TRUE if found else Truth.UNDEFINED


def answers(program: ir.Program, world: World) -> dict[tuple[str, str], Answer]:
    """Return the answer for every clause on every slice ("" where a clause names none).

    A clause with a table has one answer for each bucket of its slice that is not empty by
    definition.
    """
    written = Store().intern(expand_tables(program))
    slices = _Slices(written, world)
    spoilt: dict[str, str] = {}
    for gap in gaps(program):
        try:
            missed = rows(gap.slice, program, world)
        except Undefined as error:
            spoilt.update(dict.fromkeys(gap.spoils, str(error)))
            continue
        if missed:
            reason = f"the request {missed[0].key} is in no row of the table"
            spoilt.update(dict.fromkeys(gap.spoils, reason))
    found: dict[tuple[str, str], Answer] = {}
    for clause in written.clauses:
        for name in clause.slices or ("",):
            if name in spoilt:
                found[clause.id, name] = Answer(Truth.UNDEFINED, spoilt[name])
            else:
                found[clause.id, name] = _answer(partial(_clause, clause, name, slices))
    return found


def truth_of(
    formula: ir.Formula, requests: Sequence[Unit], world: World, timed: Sequence[Unit] = ()
) -> Answer:
    """Return the truth of a formula about given units; every slice consists of the requests."""
    every = tuple(requests)
    scope = Scope(world, lambda name: every, every, tuple(timed))
    stored = Store().intern(formula)
    return _answer(lambda: scope.holds(stored, {}))


def rows(slice_: ir.Slice, program: ir.Program, world: World) -> tuple[Unit, ...]:
    """Return the requests of a slice; undefined where one of the file lacks a field it tests."""
    file = program.data if slice_.data is None else slice_.data
    if file not in world.data:
        raise Undefined(f"there are no requests {file}")
    for test in tests_of(slice_.where):
        for unit in world.data[file]:
            if type(unit.fields.get(test.field)) is not type(test.value):
                raise Undefined(f"the request {unit.key} cannot be tested by its {test.field}")
    return tuple(unit for unit in world.data[file] if holds(slice_.where, unit.fields))


@dataclass(frozen=True, slots=True)
class _Slices:
    """The slices of a program in a world; each is evaluated when it is first needed."""

    program: ir.Program
    world: World
    _known: dict[str, tuple[Unit, ...]] = field(default_factory=dict)

    def rows(self, name: str) -> tuple[Unit, ...]:
        """Return the requests of a slice; raises Undefined."""
        if name not in self._known:
            self._known[name] = rows(self.program.slice(name), self.program, self.world)
        return self._known[name]

    def timed(self, name: str) -> tuple[Unit, ...]:
        """Return the timed runs of the requests of a slice."""
        keys = {unit.key for unit in self.rows(name)}
        return tuple(run for run in self.world.timed if run.key in keys)

    def scope(self, requests: tuple[Unit, ...], timed: tuple[Unit, ...] = ()) -> Scope:
        """Return the scope of statements about some units."""
        return Scope(self.world, self.rows, requests, timed)


def _answer(decide: Callable[[], bool]) -> Answer:
    try:
        return Answer(Truth.TRUE if decide() else Truth.FALSE)
    except Undefined as error:
        return Answer(Truth.UNDEFINED, str(error))


def _clause(clause: ir.Clause, name: str, slices: _Slices) -> bool:
    """Return whether a clause holds on a slice; raises Undefined."""
    if clause.budget is not None:
        return _within_budget(clause.require, clause.budget, name, slices)
    if not name:  # its quantifiers name their slices
        return slices.scope(()).holds(clause.require, {})
    return slices.scope(slices.rows(name), slices.timed(name)).holds(clause.require, {})


def _within_budget(require: ir.Formula, budget: ir.Budget, name: str, slices: _Slices) -> bool:
    """Return whether at most `rate` of the units violate the requirement, each taken alone.

    A quantifier over the rows of a slice then ranges over the rows of the unit.
    """
    quantified = require if isinstance(require, ir.Quantified) else None
    where = name or (quantified.region.slice if quantified is not None else "")
    timed = any(isinstance(t, ir.Metric) and is_timed(t) for t in terms_of(require))
    units = slices.timed(where) if timed else slices.rows(where)
    size = slices.world.window if budget.unit == "windows" else 1
    groups = windows(units, size)
    if not groups:
        raise Undefined(f"there are no {budget.unit}")
    kept = []
    for group in groups:
        scope = slices.scope((), group) if timed else slices.scope(group)
        if quantified is None:
            kept.append(scope.holds(require, {}))
        else:
            here = [scope.holds(quantified.body, {quantified.variable: u.key}) for u in group]
            kept.append(all(here) if quantified.quantifier == "forall" else any(here))
    return Fraction(len(kept) - sum(kept), len(kept)) <= budget.rate


def windows(units: Sequence[Unit], size: int) -> list[tuple[Unit, ...]]:
    """Cut units into consecutive windows of `size`; a short rest joins the last window."""
    if not units:
        return []
    starts = list(range(0, len(units), size))
    if len(starts) > 1 and len(units) - starts[-1] < size:
        starts.pop()
    ends = [*starts[1:], len(units)]
    return [tuple(units[a:b]) for a, b in zip(starts, ends, strict=True)]
