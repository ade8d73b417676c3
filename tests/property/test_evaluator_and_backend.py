"""Decisions of the empirical backend equal those of the reference evaluator on the same values."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl.ir import terms as ir
from kcdsl.ir.obligations import obligations_of
from kcdsl.ir.printer import formula_text
from kcdsl.verdict.model import Held, InvalidEvidence, Violated
from kcdsl_backends.empirical.decision.results import decide_clause
from kcdsl_backends.empirical.table import evidence as measured
from kcdsl_backends.empirical.table.requirements import WINDOW, norm_name
from tests.support.semantics.evaluation import Truth, answers
from tests.support.semantics.interpretations import Pair, Unit, World
from tests.support.semantics.norms import difference, norm


def _support(name: str) -> Any:
    path = Path(__file__).parents[1] / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"backend_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


made = _support("contracts")

Values, Statements, BLOCKS = made.ExactWorlds, made.MeasuredContracts, made.BLOCKS


def data_of(world: World) -> measured.SliceData:
    """Return the values of a world as the backend records them."""
    units = []
    for unit in world.data["data.jsonl"]:
        values = {
            name: np.array([np.nan if v is None else float(v) for v in found])
            for name, found in unit.values.items()
        }
        for block in BLOCKS:
            drift = difference(world.observed[block, unit.key])
            for kind in ("inf", "span"):
                length = norm(kind, drift)
                assert isinstance(length, Fraction)
                values[norm_name(block, kind)] = np.array([float(length)])
        units.append(measured.SamplingUnit(unit.key, len(values["kl"]), values))
    records = tuple(dict(unit.record or {}) for unit in world.data["data.jsonl"])
    return measured.SliceData("all", tuple(units), records=records)


def decided(clause: ir.Clause, world: World) -> Truth:
    """Return the backend's verdict on a clause: every part of a conjunction must hold."""
    rows = [
        decide_clause(each.part, made.program(clause), data_of(world), seed=0).verdict
        for each in obligations_of(clause, "all")
    ]
    if any(isinstance(row, InvalidEvidence) for row in rows):
        return Truth.UNDEFINED
    assert all(isinstance(row, Held | Violated) for row in rows), rows
    return Truth.TRUE if all(isinstance(row, Held) for row in rows) else Truth.FALSE


def meant(clause: ir.Clause, world: World) -> Truth:
    """Return the truth of a clause on the slice `all`."""
    program = made.program(clause, slices=(ir.Slice("all"),))
    ((_, answer),) = answers(program, replace(world, window=WINDOW)).items()
    return answer.truth


def hard(formula: ir.Formula, budget: ir.Budget | None = None) -> ir.Clause:
    slices = () if isinstance(formula, ir.Quantified) else ("all",)
    return ir.Clause("A", ir.Family.NUMERICAL, formula, ir.Level.L2, slices, budget)


@pytest.mark.full
def test_hard_clauses_agree_with_the_evaluator() -> None:
    seen: Counter[Truth] = Counter()
    for seed in range(300):
        world, statements = Values(seed).world(1 + seed % 7), Statements(seed)
        formula = statements.observed() if seed % 5 == 0 else statements.formula()
        clause = hard(formula)
        assert decided(clause, world) is meant(clause, world), (seed, formula_text(formula))
        seen[meant(clause, world)] += 1
    assert min(seen[Truth.TRUE], seen[Truth.FALSE]) >= 50, seen


@pytest.mark.full
@pytest.mark.parametrize("unit", ["requests", "windows"])
def test_budgets_agree_with_the_evaluator(unit: str) -> None:
    seen: Counter[Truth] = Counter()
    for seed in range(60):
        world = Values(seed).world(1 + 7 * (seed % 7))
        rate = Fraction(1 + seed % 9, 10)
        clause = hard(Statements(seed).formula(1), ir.Budget(rate, unit))
        if isinstance(clause.require, ir.HasFields):
            continue
        assert decided(clause, world) is meant(clause, world), (
            seed,
            formula_text(clause.require),
            len(world.data["data.jsonl"]),
        )
        seen[meant(clause, world)] += 1
    assert min(seen[Truth.TRUE], seen[Truth.FALSE]) >= 10, seen


def test_non_finite_values_never_hold() -> None:
    seen: Counter[Truth] = Counter()
    for seed in range(60):
        values = Values(seed)
        values.spoilt = 0.05
        world, clause = values.world(6), hard(Statements(seed).formula())
        truth = meant(clause, world)
        assert decided(clause, world) is truth, (seed, formula_text(clause.require))
        seen[truth] += 1
    assert seen[Truth.UNDEFINED] >= 20, seen


@pytest.mark.sample(7)
@pytest.mark.parametrize("n", [1, 2, 9, 10, 11, 99, 100, 101, 200])
@pytest.mark.parametrize("percent", [50, 90, 99])
def test_percentiles_at_their_boundaries(n: int, percent: int) -> None:
    """pNN <= t if and only if at most (100 - NN) % of the requests are above t."""
    term = ir.Statistic("quantile", ir.Metric("kl"), Fraction(percent, 100))
    clause = hard(ir.Compare("<=", term, ir.Number(Fraction(1, 2))))
    allowed = (100 - percent) * n // 100
    for above in {0, max(0, allowed - 1), allowed, min(n, allowed + 1), n}:
        values = [Fraction(1)] * above + [Fraction(1, 2)] * (n - above)
        units = tuple(Unit(f"r{i}", {}, {"kl": (v,)}, {}) for i, v in enumerate(values))
        pair = Pair(((Fraction(0),),), ((Fraction(0),),))
        world = World(
            {"data.jsonl": units}, observed={(b, u.key): pair for b in BLOCKS for u in units}
        )
        expected = Truth.TRUE if 100 * above <= (100 - percent) * n else Truth.FALSE
        assert meant(clause, world) is expected
        assert decided(clause, world) is expected
