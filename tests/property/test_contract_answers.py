"""Answers about contracts hold in every small world, by the reference evaluator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.diagnostics.codes import ALWAYS_HOLDS, CONTRADICTION, NEVER_HOLDS
from kcdsl.ir import terms as ir
from kcdsl.verdict.studies.difference import ClauseDifference, ClauseStatus, Extent, Relation
from kcdsl_backends.smt import BACKEND
from kcdsl_backends.smt import consistency as module
from kcdsl_backends.smt import vacuity as parts
from kcdsl_backends.smt.findings import Implication
from tests.support import small_worlds as small
from tests.support.findings import Recorder
from tests.support.semantics.evaluation import Answer


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead part: the clause, and the requirement without it."""

    clause: ir.Clause
    without: ir.Formula


KINDS = ("implied", "dead", CONTRADICTION.id, NEVER_HOLDS.id, ALWAYS_HOLDS.id)


def found_in(program: ir.Program, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    heard: list[Any] = []
    formulas: dict[str, ir.Formula] = {}

    def dead(clause: ir.Clause, part: Any, value: bool, alone: object, findings: object) -> None:
        formula = formulas.get(clause.id, clause.require)
        formulas[clause.id] = parts._put(formula, part.path, parts.TRUE if value else parts.FALSE)
        heard.append(Dead(clause, formulas[clause.id]))

    monkeypatch.setattr(module, "Findings", lambda source: Recorder(source, heard=heard))
    monkeypatch.setattr(parts, "_report", dead)
    module.consistency(program)
    return heard


def check(
    seeds: range, monkeypatch: pytest.MonkeyPatch, worlds: int = 40, division: float = 0.0
) -> Counter[str]:
    """Search for a small world that contradicts any answer about random contracts."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        statements = small.Statements(seed)
        statements.parts, statements.division = seed % 3, division
        program = statements.program(2 + seed % 5)
        heard = found_in(program, monkeypatch)
        if not heard:
            continue
        cut = small.program(
            *(
                replace(item.clause, id=f"cut-{n}", require=item.without)
                for n, item in enumerate(heard)
                if isinstance(item, Dead)
            )
        )
        for n, world in enumerate(small.worlds(seed, worlds)):
            kept, shorter = small.in_world(program, world), small.in_world(cut, world)
            where = (seed, n)
            for index, item in enumerate(heard):
                match item:
                    case Implication(claim, premises):
                        if all(small.is_true(kept[p.clause.id, p.slice]) for p in premises):
                            seen["implied"] += 1
                            assert not small.is_broken(kept[claim.clause.id, claim.slice]), (
                                where, claim, premises,
                            )  # fmt: skip
                    case Dead(clause):
                        for name in clause.slices or ("",):
                            whole = kept[clause.id, name]
                            rest = shorter[f"cut-{index}", name]
                            seen["dead"] += small.is_true(whole)
                            assert not (small.is_true(whole) and small.is_broken(rest)), where
                            assert not (small.is_broken(whole) and small.is_true(rest)), where
                    case (code, claims):
                        values = [kept[c.clause.id, c.slice] for c in claims]
                        seen[code.id] += 1
                        if code in (CONTRADICTION, NEVER_HOLDS):
                            assert not all(small.is_true(value) for value in values), (where, item)
                        if code is ALWAYS_HOLDS:
                            assert not any(small.is_broken(value) for value in values), (
                                where,
                                item,
                            )
    return seen


@pytest.mark.full
def test_small_worlds_do_not_contradict_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = check(range(36), monkeypatch)
    assert min(seen[kind] for kind in KINDS) >= 50, seen


@pytest.mark.full
def test_small_worlds_do_not_contradict_answers_about_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = check(range(500, 510), monkeypatch, division=0.3)
    assert seen["dead"] + seen["implied"] >= 50, seen


@pytest.mark.slow
def test_thousands_of_small_worlds_do_not_contradict_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for division in (0.0, 0.3):
        seen = check(range(1000, 1400), monkeypatch, 80, division)
        assert min(seen[kind] for kind in KINDS) >= 100, seen


# --- diff ----------------------------------------------------------------------------------------


def changed(random: Any, old: ir.Program) -> ir.Program:
    """Return a program that differs from another one in a few clauses."""
    clauses = list(old.clauses)
    for _ in range(random.choice((1, 1, 2, 3))):
        n = random.randrange(len(clauses)) if clauses else 0
        match random.choice(
            ("bound", "bound", "budget", "slices", "drop", "add", "weaken", "level")
        ):
            case "bound" if clauses:
                clauses[n] = replace(clauses[n], require=_moved(random, clauses[n].require))
            case "budget" if clauses and clauses[n].slices:
                rate = Fraction(random.choice((0, 1, 2)), 4)
                budget = random.choice((None, ir.Budget(rate, "requests")))
                clauses[n] = replace(clauses[n], budget=budget)
            case "slices" if clauses and clauses[n].slices:
                names = tuple(s.name for s in random.sample(small.SLICES, random.choice((1, 2))))
                clauses[n] = replace(clauses[n], slices=names)
            case "drop" if len(clauses) > 1:
                del clauses[n]
            case "add":
                clauses.append(random.clause(f"N-{len(clauses)}-{random.randrange(99)}"))
            case "weaken" if clauses:
                op, other = random.choice(("and", "or")), random.compare()
                if clauses[n].slices:
                    require = ir.Connective(op, (clauses[n].require, other))
                    clauses[n] = replace(clauses[n], require=require)
            case "level" if clauses and random.levels:
                level = random.choice(list(ir.Level))
                clauses[n] = replace(clauses[n], level=level)
            case _:
                pass
    return replace(old, clauses=tuple(clauses))


def _moved(random: Any, formula: ir.Formula) -> ir.Formula:
    """Return a formula with other numbers in some comparisons."""
    match formula:
        case ir.Compare(op, left, ir.Number()) if random.random() < 0.7:
            return ir.Compare(random.choice((op, op, "<=")), left, random.number())
        case ir.Not(of):
            return ir.Not(_moved(random, of))
        case ir.Connective(op, parts_):
            return ir.Connective(op, tuple(_moved(random, part) for part in parts_))
        case ir.Quantified():
            return replace(formula, body=_moved(random, formula.body))
        case _:
            return formula


class Pairs(small.Statements):
    """Random contracts, and small changes of them."""

    levels = False
    """True if levels change too."""


def pair(seed: int, levels: bool = False) -> tuple[ir.Program, ir.Program]:
    random = Pairs(seed)
    random.parts, random.levels = seed % 3, levels
    random.division = 0.2 if seed % 4 == 0 else 0.0
    old = random.program(1 + seed % 3)
    return old, changed(random, old)


def of(kept: small.Kept, name: str | None) -> list[Answer]:
    """Return the answers of one clause on its slices."""
    return [answer for (own, _), answer in kept.items() if own == name]


def accepts(found: list[Answer]) -> bool:
    return all(small.is_true(answer) for answer in found)


def refuses(found: list[Answer]) -> bool:
    return any(small.is_broken(answer) for answer in found)


AT_LEAST = {Relation.EQUAL, Relation.STRICTER}
AT_MOST = {Relation.EQUAL, Relation.WEAKER}


def compare(seeds: range, worlds: int = 40) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        old, new = pair(seed)
        found = BACKEND.difference(old, new)
        seen[found.relation] += 1
        witnessed = {item.id: item for item in found.clauses if is_shown(item)}
        confirmed: set[str] = set()
        for n, world in enumerate(small.worlds(seed, worlds)):
            before, after = small.in_world(old, world), small.in_world(new, world)
            where = (seed, n)
            first, second = list(before.values()), list(after.values())
            if accepts(second):
                confirmed |= {x.id for x in witnessed.values() if refuses(of(before, x.old_id))}
            if found.relation in AT_LEAST and accepts(second):
                assert not refuses(first), (where, found.relation)
                seen["at least as strict"] += 1
            if found.relation in AT_MOST and accepts(first):
                assert not refuses(second), (where, found.relation)
                seen["at most as strict"] += 1
            for item in found.clauses:
                one = of(before, item.old_id)
                two = of(after, item.id) if item.new is not None else []
                if item.implied_by:
                    premises = before if item.status is ClauseStatus.ADDED else after
                    given = [a for name in item.implied_by for a in of(premises, name)]
                    if accepts(given):
                        left = two if item.status is ClauseStatus.ADDED else one
                        assert not refuses(left), (where, item)
                        seen["kept"] += 1
                if item.status is not ClauseStatus.BOTH:
                    continue
                if item.relation in AT_LEAST and accepts(two):
                    assert not refuses(one), (where, item)
                if item.relation in AT_MOST and accepts(one):
                    assert not refuses(two), (where, item)
        seen["witnessed"] += len(witnessed)
        seen["confirmed"] += len(confirmed)
    return seen


def is_shown(item: ClauseDifference) -> bool:
    """Return whether shown values satisfy the new contract and violate an old clause."""
    whole = item.witness is not None and item.witness.extent is Extent.CONTRACT
    return whole and item.old_id is not None


@pytest.mark.full
def test_small_worlds_do_not_contradict_differences() -> None:
    seen = compare(range(60), worlds=100)
    assert min(seen[relation] for relation in Relation if relation != "undecided") >= 5, seen
    assert min(seen["at least as strict"], seen["at most as strict"]) >= 200, seen
    assert 2 * seen["confirmed"] >= seen["witnessed"] >= 8, seen


@pytest.mark.slow
def test_thousands_of_small_worlds_do_not_contradict_differences() -> None:
    seen = compare(range(1000, 1800), worlds=80)
    assert seen["kept"] >= 80, seen
    assert 2 * seen["confirmed"] >= seen["witnessed"] >= 100, seen


TURNED = {
    Relation.EQUAL: {Relation.EQUAL},
    Relation.STRICTER: {Relation.WEAKER, Relation.UNDECIDED},
    Relation.WEAKER: {Relation.STRICTER, Relation.UNDECIDED},
    Relation.INCOMPARABLE: {Relation.INCOMPARABLE, Relation.UNDECIDED},
    Relation.UNDECIDED: set(Relation),
}


@pytest.mark.full
def test_reversed_difference_has_the_reversed_relation() -> None:
    seen: Counter[str] = Counter()
    for seed in range(80):
        old, new = pair(seed, levels=True)
        there, back = BACKEND.difference(old, new).relation, BACKEND.difference(new, old).relation
        assert back in TURNED[there], (seed, there, back)
        seen[there] += 1
    assert min(seen[relation] for relation in Relation if relation != "undecided") >= 5, seen


@pytest.mark.full
def test_relations_of_three_contracts_are_transitive() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        random = Pairs(seed)
        first = random.program(2)
        second = changed(random, first)
        third = changed(random, second)
        one, two, whole = (
            BACKEND.difference(*given).relation
            for given in ((first, second), (second, third), (first, third))
        )
        for good in (AT_LEAST, AT_MOST):
            if one in good and two in good:
                assert whole in good, (seed, one, two, whole)
                seen[whole] += 1
    assert min(seen[relation] for relation in ("equal", "stricter", "weaker")) >= 3, seen
