"""Printing the IR in the language: the printed text compiles to the same formula."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import compile_source, load_program
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir import terms as ir
from kcdsl.ir.printer import formula_text, predicate_text, region_text, term_text
from tests.support.semantics.store import Store

REPOSITORY = Path(__file__).resolve().parents[3]
CONTRACTS = sorted(
    [
        *REPOSITORY.glob("grammar/corpus/accepted/*.kc.yaml"),
        *REPOSITORY.glob("examples/*/contract.yaml"),
    ]
)


def _support(name: str) -> Any:
    path = Path(__file__).parents[2] / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"words_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


made = _support("contracts")

HEAD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices:
"""


def compiled(require: str, slices: dict[str, str], family: str = "numerical") -> ir.Program | None:
    """Compile a contract with one clause; None where it is refused."""
    text = HEAD + "".join(
        f"  {name}: {{where: {json.dumps(where)}}}\n" if where != "true" else f"  {name}: {{}}\n"
        for name, where in slices.items()
    )
    text += f"clauses:\n  A: {{require: {json.dumps(require)}, level: L2, override: direction"
    text += f", family: {family}}}\n"
    return compile_source(SourceFile("made.kc.yaml", text), Sink())


@pytest.mark.full
def test_generated_statements_survive_a_round_trip() -> None:
    """Compiling simplifies (`not a <= b` is `a > b`), so the compiled form is printed again."""
    names = {s.name: predicate_text(s.where) for s in made.SLICES}
    seen: Counter[bool] = Counter()
    for seed in range(250):
        contracts, store = made.Contracts(seed), Store()
        make = (contracts.formula, contracts.universal, contracts.observed)[seed % 3]
        first = compiled(formula_text(make()), names)
        seen[first is not None] += 1
        if first is None:
            continue
        second = compiled(formula_text(first.clauses[0].require), names)
        assert second is not None
        assert store.program(second) is store.program(first), formula_text(first.clauses[0].require)
    assert seen[True] >= 80, seen


@pytest.mark.parametrize("path", CONTRACTS, ids=lambda p: p.name)
def test_slices_and_statements_survive_a_round_trip(path: Path) -> None:
    program, store = load_program(path), Store()
    names = {s.name: predicate_text(s.where) for s in program.slices}
    known = {t.name for t in program.tables} | {m.name for m in program.metrics}
    for clause in program.clauses:
        text = formula_text(clause.require)
        if any(name in text for name in known):
            continue
        again = compiled(text, {"all": "true", **names}, clause.family)
        assert again is not None, text
        assert store.formula(again.clauses[0].require) is store.formula(clause.require), text
        for declared in program.slices:
            where = again.slice(declared.name).where
            assert store.intern(where) is store.intern(declared.where), declared.name


@pytest.mark.parametrize(
    ("term", "text"),
    [
        (ir.Number(Fraction(1, 4), "s"), "0.25 s"),
        (ir.Number(Fraction(-1, 2)), "-0.5"),
        (ir.Number(Fraction(199, 200), "ratio"), "99.5%"),
        (ir.Number(Fraction(1, 3), "nat"), "1 nats / 3"),
        (ir.Statistic("quantile", ir.Metric("kl"), Fraction(99, 100)), "p99(kl)"),
        (ir.Statistic("quantile", ir.Metric("kl"), Fraction(999, 1000)), "quantile(0.999, kl)"),
        (ir.Statistic("aggregate", ir.Metric("throughput")), "throughput"),
        (ir.Norm("2", ir.Drift("mlp_3", "x", True)), "norm_2(measured_drift(mlp_3, x))"),
        (
            ir.Arith("-", ir.Abs(ir.Metric("kl")), ir.Arith("-", ir.Metric("a"), ir.Metric("b"))),
            "abs(kl) - (a - b)",
        ),
        (ir.TableValue("limits"), "table(limits)"),
    ],
)
def test_printed_terms(term: ir.Term, text: str) -> None:
    assert term_text(term) == text


def test_printed_regions_and_statements() -> None:
    ball = ir.Region(ir.RegionKind.BALL, "all", Fraction(1, 1000))
    assert region_text(ball) == "ball(all, 0.001)"
    assert region_text(ir.Region(ir.RegionKind.HULL, "s")) == "hull(s)"
    rows = ir.Region(ir.RegionKind.ROWS, "s", longest=512)
    assert region_text(rows) == "rows(s, 512)"
    wider = ir.Region(ir.RegionKind.ROWS, "s", Fraction(1, 20), longest=512)
    assert region_text(wider) == "rows(s, 512, 0.05)"
    claim = ir.Quantified("forall", "x", ball, ir.NoFlip("model", "x", 5))
    assert formula_text(claim) == "forall x in ball(all, 0.001): no_flip(model, x, 5)"
    assert formula_text(ir.Not(ir.HasFields(("a b",)))) == 'not has(trace, ["a b"])'


@pytest.mark.parametrize(
    ("op", "turned"), [("<=", ">="), ("<", ">"), (">=", "<="), (">", "<"), ("==", "==")]
)
def test_threshold_is_printed_on_the_right(op: str, turned: str) -> None:
    metric, table = ir.Metric("kl"), ir.TableValue("limits")
    for threshold in (ir.Number(Fraction(1)), table):
        found = ir.Compare(op, threshold, metric)
        assert (found.op, found.left, found.right) == (turned, metric, threshold)
        assert ir.Compare(op, metric, threshold).op == op
        assert replace(found, right=ir.Number(Fraction(2))).op == turned
    assert ir.Compare(op, table, ir.Number(Fraction(1))).left == table
    assert ir.Compare(op, ir.Metric("k1"), metric).left == ir.Metric("k1")
