"""Exported scripts: two solvers, z3's own translation and the reference evaluator agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import z3

from kcdsl.check.compile import load_program
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.predicates import implies, inclusion
from kcdsl.logic.algebra import LARGEST, SMALLEST
from kcdsl.logic.smtlib import consistency, implication, text
from kcdsl.logic.smtlib.assumptions import assumptions
from kcdsl.logic.smtlib.requests import slice_lines
from kcdsl.logic.smtlib.text import Symbols
from kcdsl.logic.smtlib.theory import OneUnit, Theory
from kcdsl_backends.smt import BACKEND
from kcdsl_backends.smt.solver import real
from kcdsl_backends.smt.translation import Translator
from tests.support import contracts as made
from tests.support import small_worlds as small
from tests.support.semantics.evaluation import Truth, answers, rows
from tests.support.semantics.formulas import Scope
from tests.support.semantics.interpretations import Unit, World

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACTS = sorted(
    [
        *REPOSITORY.glob("grammar/corpus/accepted/*.kc.yaml"),
        *REPOSITORY.glob("examples/*/contract.yaml"),
        *REPOSITORY.glob("examples/*/variants/*.kc.yaml"),
    ]
)


_INCONSISTENT = {"KC410", "KC411", "KC412"}


def both(script: str) -> str:
    """Return the answer of z3 and cvc5, which must not be opposite; unknown if either is."""
    found = {made.ask_z3(script), made.ask_cvc5(script)}
    assert found != {"sat", "unsat"}, script
    assert found <= {"sat", "unsat", "unknown"}, found
    return "unknown" if len(found) > 1 else str(found.pop())


@pytest.mark.sample(8)
@pytest.mark.parametrize("path", CONTRACTS, ids=lambda p: p.name)
def test_valid_contracts_are_consistent_for_both_solvers(path: Path) -> None:
    program = load_program(path)
    assert both(consistency(program)) == "sat"
    for clause in program.clauses:
        assert both(implication(program, clause.id)) in {"sat", "unsat"}


def agreement(seeds: range) -> None:
    """Compare two solvers and the independent translation of `kcdsl_backends.smt`."""
    seen: Counter[str] = Counter()
    finer = 0
    for seed in seeds:
        program = made.Contracts(seed).program(1 + seed % 5)
        answer = both(consistency(program))
        codes = {d.code.id for d in BACKEND.consistency(program)}
        seen[answer] += 1
        if answer == "unsat":
            assert codes & _INCONSISTENT, (seed, codes)
        # The backend also uses implications of hard clauses for single units.
        finer += answer == "sat" and bool(codes & _INCONSISTENT)
    assert seen["unknown"] == 0
    assert finer <= len(seeds) / 50
    assert min(seen["sat"], seen["unsat"]) >= len(seeds) / 10, seen


@pytest.mark.full
def test_three_translations_agree_on_generated_contracts() -> None:
    agreement(range(60))


@pytest.mark.slow
def test_three_translations_agree_on_hundreds_of_contracts() -> None:
    agreement(range(60, 660))


def alike(random: Any, program: ir.Program) -> ir.Clause:
    """Return a clause of a program with another budget or on other slices."""
    clause: ir.Clause = random.choice(program.clauses)
    rate = Fraction(random.choice((0, 1, 2, 3)), 4)
    budget = random.choice((clause.budget, ir.Budget(rate, "requests"), ir.Budget(rate, "windows")))
    names = tuple(s.name for s in random.sample(small.SLICES, 1)) if clause.slices else ()
    slices = random.choice((clause.slices, clause.slices, names))
    return replace(clause, id="alike", budget=budget if slices else None, slices=slices)


@pytest.mark.full
def test_small_worlds_do_not_contradict_a_script() -> None:
    """Worlds with one to three requests, and some with forty, decide both questions."""
    seen: Counter[str] = Counter()
    for seed in range(90):
        statements = small.Statements(seed)
        statements.parts = seed % 2
        program = statements.program(1 + seed % 3)
        program = replace(program, clauses=(*program.clauses, alike(statements, program)))
        whole = both(consistency(program))
        implied = [c.id for c in program.clauses if both(implication(program, c.id)) == "unsat"]
        if whole != "unsat" and not implied:
            continue
        for n, world in enumerate(small.worlds(seed, 40)):
            kept = small.in_world(program, world)
            broken = {name for (name, _), answer in kept.items() if small.is_broken(answer)}
            true = {c.id for c in program.clauses} - {
                name for (name, _), answer in kept.items() if not small.is_true(answer)
            }
            if whole == "unsat":
                assert len(true) < len(program.clauses), (seed, n)
                seen["contradiction"] += 1
            for name in implied:
                if true >= {c.id for c in program.clauses if c.id != name}:
                    assert name not in broken, (seed, n, name)
                    seen["implied"] += 1
    assert seen["contradiction"] >= 300, seen
    assert seen["implied"] >= 300, seen


@pytest.mark.full
def test_solvers_agree_on_products_and_quotients() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        contracts = made.Contracts(seed)
        contracts.linear = False
        seen[both(consistency(contracts.program(2)))] += 1
    assert seen["unknown"] <= 2, seen
    assert min(seen["sat"], seen["unsat"]) >= 5, seen


@pytest.mark.full
def test_implication_equals_contradiction_of_the_negation() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        first, *others = made.Contracts(seed).program(2).clauses
        if first.slices == () or first.budget is not None:
            continue
        asked = both(implication(made.program(first, *others), first.id))
        alone = [
            both(
                consistency(
                    made.program(
                        ir.Clause(
                            first.id, first.family, ir.Not(first.require), first.level, (name,)
                        ),
                        *others,
                    )
                )
            )
            for name in first.slices
        ]
        assert asked == ("sat" if "sat" in alone else "unsat"), seed
        seen[asked] += 1
    assert min(seen["sat"], seen["unsat"]) >= 5, seen


@pytest.mark.full
def test_solvers_confirm_inclusions_of_slices() -> None:
    """The product compares slices by cases; the solvers use their definitions."""
    random = made.Contracts(5)
    seen: Counter[bool | None] = Counter()
    for _ in range(80):
        inner, outer = (ir.Slice(name, where=_predicate(random, 2)) for name in "ab")
        known = implies(inner.where, outer.where)
        seen[known] += 1
        symbols = Symbols()
        lines = [*slice_lines(inner, symbols), *slice_lines(outer, symbols)]
        kept = [line for line in lines if not line.startswith("(assert")]
        script = "\n".join(["(set-logic ALL)", *kept, *_one_request(lines), "(check-sat)"])
        assert both(script) == ("unsat" if known else "sat"), script
    assert min(seen[True], seen[False]) >= 10, seen


def _predicate(random: Any, depth: int) -> ir.Predicate:
    if depth == 0 or random.random() < 0.3:
        number = ir.FieldTest(
            "length", random.choice(("<=", "<", ">", "==", "!=")), Fraction(random.randint(1, 3))
        )
        word = ir.FieldTest("kind", random.choice(("==", "!=")), random.choice(("", "a", 'ä"\\')))
        return random.choice((number, word, ir.FieldTest("beta", "==", random.random() < 0.5)))
    parts = (_predicate(random, depth - 1), _predicate(random, depth - 1))
    return random.choice((ir.AllOf(parts), ir.AnyOf(parts), ir.NoneOf(parts[0])))


def _one_request(lines: list[str]) -> list[str]:
    """Assert that one request is in slice a and not in slice b."""
    calls, equal = [], []
    for name in "ab":
        declared = [x.split("|")[1] for x in lines if x.startswith("(declare")]
        own = [x for x in declared if x.endswith(f"a request of {name}")]
        calls.append(f"(|in slice {name}| {' '.join(f'|{x}|' for x in own)})" if own else "true")
        equal += [x.removesuffix(f" of a request of {name}") for x in own]
    shared = {field for field in equal if equal.count(field) == 2}
    same = [f"(assert (= |{f} of a request of a| |{f} of a request of b|))" for f in sorted(shared)]
    return [*same, f"(assert {calls[0]})", f"(assert (not {calls[1]}))"]


# --- the reference evaluator ---------------------------------------------------------------------


def world_of_tokens(seed: int) -> World:
    """Return a world whose requests have up to three tokens."""
    worlds = made.Worlds(seed)
    worlds.tokens = 3
    world: World = worlds.world()
    return world


@pytest.mark.full
def test_solvers_agree_with_the_truth_in_a_world() -> None:
    """With measured terms fixed, the script is satisfiable exactly where the clause is true.

    Its negation is satisfiable where it is false; the axioms about measured terms hold in the
    world.
    """
    seen: Counter[Truth] = Counter()
    for seed in range(150):
        contracts, world = made.Contracts(seed), world_of_tokens(seed)
        contracts.linear = seed % 3 > 0
        clause = contracts.clause("A")
        clause = ir.Clause("A", clause.family, clause.require, clause.level, clause.slices)
        program = made.program(clause)
        for (_, name), answer in answers(program, world).items():
            seen[answer.truth] += 1
            if answer.truth is Truth.UNDEFINED and answer.reason != "division by zero":
                continue
            theory = Theory(inclusion(program))
            holds = theory.holds(clause.require, name)

            def lookup(slice_name: str, program: Any = program, world: Any = world) -> Any:
                return rows(program.slice(slice_name), program, world)

            def scope(slice_name: str, world: Any = world, lookup: Any = lookup) -> Scope:
                return Scope(world, lookup, lookup(slice_name) if slice_name else ())

            pins = [*made.constant_values(theory, scope), *theory.instances()]
            facts = [fact for fact, _ in assumptions(theory, Fraction(1), {})]
            true = both(made.smt_script(theory, *pins, *facts, holds))
            assert true == ("sat" if answer.truth is Truth.TRUE else "unsat"), seed
            false = both(made.smt_script(theory, *pins, *facts, text.negation(holds)))
            assert false == ("unsat" if answer.truth is Truth.TRUE else "sat"), seed
    assert min(seen.values()) >= 20, seen


@pytest.mark.full
def test_z3_translation_agrees_with_the_truth_in_a_world() -> None:
    """Statements about measured terms are decided by their values.

    For a true statement about inputs, the instance in the translation is satisfiable.
    """
    exact = decided = 0
    seen: Counter[tuple[bool, bool]] = Counter()
    for seed in range(200):
        contracts, world = made.Contracts(seed), world_of_tokens(seed)
        clause = contracts.clause("A")
        clause = ir.Clause("A", clause.family, clause.require, clause.level, clause.slices)
        program = made.program(clause)
        for (_, name), answer in answers(program, world).items():
            if answer.truth is Truth.UNDEFINED:
                continue
            translator = Translator(temperature=Fraction(1), inside=inclusion(program))
            translator.collect(clause.require)
            claim = translator.requirement(clause.require, name)
            denial = translator.negation(clause.require, name)
            requests = rows(program.slice(name), program, world) if name else ()
            scope = Scope(world, lambda _: (), requests)
            pins = []
            for term in terms_of(clause.require):
                if isinstance(term, ir.Statistic):
                    for side in (LARGEST, SMALLEST):
                        value = scope.value(term, side, {})
                        assert isinstance(value, Fraction)
                        variable = translator._variable(translator.quantity(term, name, side))
                        pins.append(variable == real(value, translator.context))
            for part in walk(clause.require):
                if isinstance(part, ir.HasFields):
                    for field in part.fields:
                        single = ir.HasFields((field,))
                        carried = scope.holds(single, {})
                        pins.append(
                            (translator.requirement if carried else translator.negation)(
                                single, name
                            )
                        )
            solver = z3.Solver(ctx=translator.context)
            solver.add(*translator.facts(), *pins)
            true, false = (str(solver.check(said)) for said in (claim, denial))
            kept = answer.truth is Truth.TRUE
            assert (true if kept else false) == "sat", seed
            exact += (true, false) == (("sat", "unsat") if kept else ("unsat", "sat"))
            decided += bool(name)
            seen[bool(name), kept] += 1
    assert min(seen.values()) >= 5, seen
    assert len(seen) == 4
    assert exact >= decided, (exact, decided)


@pytest.mark.full
def test_budgets_count_the_units_that_solvers_find_violated() -> None:
    seen: Counter[bool] = Counter()
    for seed in range(60):
        contracts, world = made.Contracts(seed), world_of_tokens(seed)
        formula, rate = contracts.formula(1), Fraction(seed % 4, 4)
        clause = ir.Clause(
            "A",
            ir.Family.NUMERICAL,
            formula,
            ir.Level.L1,
            ("all",),
            ir.Budget(rate, "requests"),
        )
        ((_, answer),) = answers(made.program(clause), world).items()
        if answer.truth is Truth.UNDEFINED:
            continue
        beyond = 0
        for unit in world.data["data.jsonl"]:
            theory = Theory(inclusion(made.program(clause)))
            holds = theory.holds(formula, "all", OneUnit("requests"))

            def scope(name: str, unit: Unit = unit, world: World = world) -> Scope:
                return Scope(world, lambda _: (unit,), (unit,))

            pins = made.constant_values(theory, scope)
            beyond += both(made.smt_script(theory, *pins, holds)) != "sat"
        assert (Fraction(beyond, 5) <= rate) == (answer.truth is Truth.TRUE), seed
        seen[answer.truth is Truth.TRUE] += 1
    assert min(seen.values()) >= 10, seen
