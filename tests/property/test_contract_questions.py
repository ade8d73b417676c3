"""Answers about whole contracts have no counterexample among measured worlds.

Worlds consist of random logits and every metric computed from them, with several tokens for each
request. The reference evaluator decides what is true in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.diagnostics.codes import ALWAYS_HOLDS, CONTRADICTION, NEVER_HOLDS
from kcdsl.ir import terms as ir
from kcdsl.logic.orders import CURVES, EDGES, TEMPERED, UNTEMPERED, curves, least_factor
from kcdsl_backends.smt import consistency as module
from kcdsl_backends.smt.findings import Implication
from tests.support import contracts as made
from tests.support.distributions import MeasuredWorlds, metrics_of_row
from tests.support.findings import Recorder
from tests.support.semantics.evaluation import Truth, answers
from tests.support.semantics.interpretations import World

TEMPERATURE = Fraction(1)
METRICS = (
    "kl", "kl_infer_train", "jeffreys", "js", "tv", "hellinger2", "log_ratio_linf",
    "logit_span", "logit_linf", "logit_l2", "logit_l2_centered", "top1_overlap", "hidden_l2",
)  # fmt: skip


class Contracts(made.Contracts):
    """Contracts about these metrics, with thresholds near the values of worlds."""

    plain = False
    """Only upper bounds that most worlds satisfy, so that many implications hold."""

    def formula(self, depth: int = 2) -> ir.Formula:
        return self.compare() if self.plain else super().formula(depth)

    def pointwise(self) -> ir.Term:
        if self.random() < 0.15:
            return ir.Abs(ir.Metric("log_ratio"))
        return ir.Metric(self.choice(METRICS))

    def compare(self) -> ir.Compare:
        if self.plain:
            bound = ir.Number(Fraction(self.choice((20, 50, 100, 200, 300)), 100))
            return ir.Compare(self.choice(("<=", "<")), self.statistic(), bound)
        if self.random() < 0.7:
            threshold = Fraction(self.choice((1, 2, 5, 10, 20, 50, 100, 200, 300)), 100)
            op = self.choice(("<=", "<=", "<=", "<", ">=", ">"))
            return ir.Compare(op, self.statistic(), ir.Number(threshold))
        return super().compare()

    def clause(self, name: str) -> ir.Clause:
        clause = super().clause(name)
        if self.plain:
            return replace(clause, level=ir.Level.L2)
        level = self.choice((ir.Level.L1, ir.Level.L2, ir.Level.L2))
        return replace(
            clause, level=level, evidence=self.choice((None, None, ir.EvidenceKind.SAMPLE))
        )


# --- facts ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("temperature", [Fraction(1, 2), Fraction(1), Fraction(3)])
def test_distributions_satisfy_every_order_and_bound_function(temperature: Fraction) -> None:
    random = made.Worlds(1)
    nearest: dict[tuple[str, str], float] = {}
    names = {e.small for e in (*EDGES, *TEMPERED, *UNTEMPERED)} | {c.small for c in CURVES}
    names |= {e.large for e in (*EDGES, *TEMPERED, *UNTEMPERED)} | {c.large for c in CURVES}
    for _ in range(400):
        row = metrics_of_row(random, float(temperature))
        row["abs(log_ratio)"] = abs(row["log_ratio"])
        known = sorted(names & set(row))
        for small in known:
            for large in known:
                path = least_factor(small, large, temperature)
                if path is not None:
                    limit = float(path.factor) * row[large]
                    assert row[small] <= limit * (1 + 1e-9) + 1e-12, (small, large)
                for curve in curves(small, large, temperature):
                    bound = curve.at(Fraction(row[large]), temperature)
                    assert bound is not None
                    assert row[small] <= float(bound) * (1 + 1e-9) + 1e-12, (small, large)
                    share = row[small] / float(bound) if bound else 0.0
                    nearest[small, large] = max(share, nearest.get((small, large), 0.0))
    assert {(c.small, c.large) for c in CURVES} <= set(nearest)
    assert min(nearest.values()) > 0.2, nearest  # no bound function is far from observed values


# --- what is found -------------------------------------------------------------------------------


def found_in(program: ir.Program, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    heard: list[Any] = []
    monkeypatch.setattr(module, "Findings", lambda source: Recorder(source, heard=heard))
    module.consistency(program)
    return heard


def truths(program: ir.Program, worlds: int, seed: int) -> Iterator[dict[tuple[str, str], Truth]]:
    for n in range(worlds):
        world: World = MeasuredWorlds(1000 * seed + n).world()
        yield {key: answer.truth for key, answer in answers(program, world).items()}


def check(seeds: range, monkeypatch: pytest.MonkeyPatch, worlds: int = 12) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        contracts = Contracts(seed)
        contracts.plain = seed % 3 == 0
        program = contracts.program(3 + seed % 5)
        heard = found_in(program, monkeypatch)
        if not heard:
            continue
        for truth in truths(program, worlds, seed):
            for item in heard:
                match item:
                    case Implication(claim, premises):
                        keys = {(p.clause.id, p.slice) for p in premises}
                        if all(truth[key] is Truth.TRUE for key in keys):
                            seen["implied"] += 1
                            broken = truth[claim.clause.id, claim.slice]
                            assert broken is not Truth.FALSE, (seed, claim, premises)
                    case (code, claims):
                        values = [truth[c.clause.id, c.slice] for c in claims]
                        seen[code.id] += 1
                        if code in (CONTRADICTION, NEVER_HOLDS):
                            assert set(values) != {Truth.TRUE}, (seed, claims)
                        if code is ALWAYS_HOLDS:
                            assert Truth.FALSE not in values, (seed, claims)
    return seen


@pytest.mark.full
def test_implications_and_contradictions_have_no_counterexample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = check(range(60), monkeypatch)
    assert seen["implied"] >= 50, seen
    assert seen["KC410"] >= 10, seen


@pytest.mark.slow
def test_thousands_of_worlds_have_no_counterexample(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = check(range(60, 800), monkeypatch, worlds=20)
    assert seen["implied"] >= 1500, seen
