"""One node per meaning, and a digest per clause."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import digest
from tests.support.semantics.store import Store, clause_digest, fold, postorder

REPOSITORY = Path(__file__).resolve().parents[3]
ACCEPTED = sorted((REPOSITORY / "grammar" / "corpus" / "accepted").glob("*.kc.yaml"))


def _support(name: str) -> Any:
    path = Path(__file__).parents[2] / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"store_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


made = _support("contracts")

NOWHERE = Span(0, 0)
KL = ir.Statistic("mean", ir.Metric("kl"))


def compare(value: int = 1, span: Span = NOWHERE) -> ir.Compare:
    return ir.Compare("<=", KL, ir.Number(Fraction(value)), span)


def test_nodes_are_identical_only_for_equal_meanings() -> None:
    store = Store()
    assert store.intern(compare()) is store.intern(compare(span=Span(3, 9)))
    assert store.intern(compare()) is not store.intern(compare(2))
    both = store.intern(ir.Connective("and", (compare(1), compare(2))))
    assert isinstance(both, ir.Connective)
    first, second = both.parts
    assert isinstance(first, ir.Compare)
    assert isinstance(second, ir.Compare)
    assert first.left is second.left
    assert len(store) == 7  # kl, its mean, two numbers, two comparisons, their conjunction


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, Fraction(1)),
        (False, Fraction(0)),
        ("1", Fraction(1)),
        ("true", True),
    ],
)
def test_values_equal_in_python_only_are_distinct(one: Any, other: Any) -> None:
    store = Store()
    tests = [ir.FieldTest("beta", "==", value) for value in (one, other)]
    assert store.intern(tests[0]) is not store.intern(tests[1])
    assert store.intern(tests[0]).value is one
    assert type(store.intern(tests[1]).value) is type(other)


def test_variable_names_and_field_order_do_not_matter() -> None:
    store = Store()

    def claim(name: str) -> ir.Formula:
        norm = ir.Norm("inf", ir.Drift("attn_0", name))
        body = ir.Compare("<=", norm, ir.Number(Fraction(1)))
        region = ir.Region(ir.RegionKind.POINTS, "all")
        return ir.Quantified("forall", name, region, body)

    assert store.formula(claim("x")) is store.formula(claim("input"))
    assert store.formula(ir.HasFields(("a", "b"))) is store.formula(ir.HasFields(("b", "a")))
    turned = ir.Compare(">=", ir.Number(Fraction(1)), KL)
    assert store.formula(turned) is store.formula(compare())


@pytest.mark.full
def test_deep_terms_are_supported() -> None:
    def deep(leaf: str) -> ir.Term:
        term: ir.Term = ir.Metric(leaf)
        for _ in range(50_000):
            term = ir.Abs(term)
        return term

    store = Store()
    found = store.intern(deep("kl"))
    assert store.intern(deep("kl")) is found
    assert store.intern(deep("tv")) is not found
    assert fold(found, lambda node, parts: 1 + sum(parts)) == 50_001


def test_shared_part_is_visited_once() -> None:
    store = Store()
    term: ir.Term = KL
    for _ in range(60):  # a tree of 2^60 nodes, a graph of 62
        term = store.intern(ir.Arith("+", term, term))
    assert sum(1 for _ in postorder(term)) == 62
    sizes = fold(term, lambda node, parts: 1 + sum(parts))
    assert sizes == 3 * 2**60 - 1
    last = list(postorder(term))
    assert last[-1] is term
    assert last.index(term.left if isinstance(term, ir.Arith) else term) == 60


@pytest.mark.parametrize("path", ACCEPTED, ids=lambda p: p.name)
def test_stored_programs_keep_digest_and_order(path: Path) -> None:
    program, store = load_program(path), Store()
    stored = store.program(program)
    assert digest(stored) == digest(program)
    assert store.program(stored) is stored
    assert [c.id for c in stored.clauses] == sorted(c.id for c in program.clauses)
    shuffled = replace(program, clauses=program.clauses[::-1], slices=program.slices[::-1])
    assert store.program(shuffled) is stored


def test_digests_are_equal_only_for_identical_stored_forms() -> None:
    store = Store()
    programs = [made.Contracts(seed).program(1) for seed in range(120)]
    programs += [replace(p, clauses=p.clauses[:1] * 1) for p in programs[::4]]
    programs += [
        replace(p, clauses=tuple(_changed(c) for c in p.clauses)) for p in programs[:120:3]
    ]
    stored = [store.program(program) for program in programs]
    digests = [digest(program) for program in programs]
    same = [(a is b, c == d) for a, c in zip(stored, digests, strict=True)
            for b, d in zip(stored, digests, strict=True)]  # fmt: skip
    assert all(one == other for one, other in same)
    assert sum(one for one, _ in same) > len(programs)


def _changed(clause: ir.Clause) -> ir.Clause:
    other = ir.Level.L1 if clause.level is not ir.Level.L1 else ir.Level.L2
    return replace(clause, level=other)


# --- clauses -------------------------------------------------------------------------------------


def made_program(**changes: Any) -> ir.Program:
    clause = ir.Clause("A", ir.Family.NUMERICAL, compare(), ir.Level.L2, ("long",))
    other = replace(clause, id="B", require=compare(2), slices=("all",))
    return replace(made.program(clause, other), **changes)


def test_digest_of_a_clause_covers_only_what_it_names() -> None:
    base = made_program()
    before = clause_digest(base, "A")
    assert len(before) == 64
    unrelated = replace(base, version="9", clauses=base.clauses[:1], slices=base.slices[:2])
    assert clause_digest(unrelated, "A") == before
    wider = tuple(
        replace(s, where=ir.FieldTest("length", ">", Fraction(7))) if s.name == "long" else s
        for s in base.slices
    )
    assert clause_digest(replace(base, slices=wider), "A") != before
    assert clause_digest(replace(base, slices=wider), "B") == clause_digest(base, "B")
    assert clause_digest(replace(base, data="other.jsonl"), "A") != before
    assert clause_digest(base, "B") != before


def test_data_of_a_slice_may_be_named_by_contract_or_slice() -> None:
    base = made_program()
    named = tuple(replace(s, data=base.data) for s in base.slices)
    assert clause_digest(replace(base, slices=named), "A") == clause_digest(base, "A")


def test_digest_of_a_clause_covers_its_table() -> None:
    rows = (ir.TableRow(ir.FieldTest("length", "<=", Fraction(64)), Fraction(1, 10)),)
    table = ir.ThresholdTable("limits", "nat", rows, Fraction(1))
    require = ir.Compare("<=", KL, ir.TableValue("limits", "nat"))
    clause = ir.Clause("A", ir.Family.NUMERICAL, require, ir.Level.L2, ("all",))
    base = replace(made.program(clause), tables=(table,))
    looser = replace(base, tables=(replace(table, otherwise=Fraction(2)),))
    assert clause_digest(base, "A") != clause_digest(looser, "A")


def test_unknown_clause_raises_key_error() -> None:
    with pytest.raises(KeyError):
        clause_digest(made_program(), "C")
