"""Clauses on every metric that forward passes of both kernels provide; refusal of others."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.terms import Constants, Metric, Term
from kcdsl.metrics import MEASURES, METRICS, UNMEASURED
from kcdsl_backends.empirical.metrics.full_logits import TIER_A, tier_a
from kcdsl_backends.empirical.metrics.measures import (
    AGGREGATES,
    PROBABILITY_FUNCTIONS,
    SAMPLED_FUNCTIONS,
)
from kcdsl_backends.empirical.sources.kernels import MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.run import run_request

if TYPE_CHECKING:
    from tests.unit.empirical.conftest import Lab

OF_TEXTS = {"greedy_divergence_step", "token_kl_max", "sequence_tv"}
NEW = sorted({*TIER_A, *SAMPLED_FUNCTIONS, *PROBABILITY_FUNCTIONS, *AGGREGATES, *OF_TEXTS})


def term(lab: Lab, name: str) -> Term:
    metric = METRICS[name]
    if metric.kind == "aggregate":
        return Metric(name)
    kind = "mean" if "mean" in metric.statistics else "max"
    return lab.statistic(kind, name, magnitude=metric.signed)


def plan(*names: str, **changes: Any) -> MeasurementPlan:
    return replace(MeasurementPlan(frozenset(names), 1.0, 0, False), **changes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NEW)
def test_clauses_on_every_measured_metric_are_decided(lab: Lab, name: str) -> None:
    op, limit = (
        ("<=", "1000000000000000000000") if METRICS[name].better == "lower" else (">=", "-2")
    )
    found = lab.evaluate(
        lab.clause(term(lab, name), op, limit),
        infer=lab.kernel(lab.drifting(0.2), name="infer"),
    )
    row = found.report.clauses[0]
    assert row.verdict.__class__.__name__ in ("Held", "Inconclusive"), row.verdict
    assert row.value is not None
    assert math.isfinite(row.value)
    assert row.unit == MEASURES[name].unit or not MEASURES[name].unit
    prompts = {request.tokens for request in lab.requests(20)}
    assert row.n == (20 if row.evidence == "census" else len(prompts))


@pytest.mark.parametrize("name", sorted(UNMEASURED))
def test_clauses_on_metrics_of_recordings_are_refused(lab: Lab, name: str) -> None:
    with pytest.raises(Refusal) as refused:
        lab.evaluate(lab.clause(term(lab, name)))
    assert refused.value.diagnostics[0].code.id == "KC624"
    assert UNMEASURED[name] in refused.value.diagnostics[0].message


def test_request_values_equal_the_pass_over_its_logits(lab: Lab) -> None:
    train, infer = lab.kernel(), lab.kernel(lab.drifting(0.1), name="infer")
    request = lab.requests(1, length=9)[0]
    run = run_request(request, train, infer, plan(*TIER_A, *OF_TEXTS), lambda r, b: torch.ones(1))
    expected = tier_a(train.logits(request.tokens), infer.logits(request.tokens))
    for name in TIER_A:
        assert np.array_equal(run.unit.values[name], expected[name]), name
    flips = np.flatnonzero(expected["top1_flip"])
    step = flips[0] if flips.size else 9
    assert run.unit.values["greedy_divergence_step"].tolist() == [step]
    assert run.unit.values["token_kl_max"].tolist() == [expected["kl"].max()]
    composed = 1 - np.prod(1 - expected["tv"])
    assert run.unit.values["sequence_tv"].tolist() == pytest.approx([composed])


def _same(logits: torch.Tensor, tokens: Any) -> torch.Tensor:
    return logits


@pytest.mark.parametrize("side", [0, 1])
def test_position_with_all_tokens_excluded_is_invalid(lab: Lab, side: int) -> None:
    """One -inf excludes a token; if all are -inf there is no policy, and no rank either."""
    sides: list[Any] = [lab.kernel(), lab.kernel(lab.drifting(0.1), name="infer")]
    request = lab.requests(1, length=9)[0]
    for places, lost in (((4, slice(2)), 0), ((4, slice(None)), 1)):
        whole = sides[side].logits(request.tokens).clone()
        whole[places] = -torch.inf
        kernels = list(sides)
        kernels[side] = lab.kernel(partial(_same, whole))
        train, infer = kernels
        run = run_request(request, train, infer, plan("top1_overlap"), lambda r, b: torch.ones(1))
        assert run.nonfinite == lost
        assert (run.unit.failure is not None) == bool(lost)


def test_gradient_bound_uses_the_same_total_variation(lab: Lab) -> None:
    train, infer = lab.kernel(), lab.kernel(lab.drifting(0.1), name="infer")
    request = lab.requests(1)[0]
    run = run_request(
        request,
        train,
        infer,
        plan("tv", gradient=lambda tv: 6 * tv),
        lambda r, b: torch.ones(1),
    )
    assert np.array_equal(run.unit.values["grad_bias"], 6 * run.unit.values["tv"])
    clause = lab.clause(Metric("grad_bias"), "<=", "1")
    found = lab.evaluate(clause, infer=infer, program=lab.program(
        clause, constants=Constants(advantage_max=2, score_norm_max=3)  # type: ignore[arg-type]
    ))  # fmt: skip
    mean_tv = lab.evaluate(lab.clause(lab.statistic("mean", "tv"), "<=", "1"), infer=infer)
    assert found.report.clauses[0].value == pytest.approx(
        12 * (mean_tv.report.clauses[0].value or 0)
    )


def test_calibration_scores_exclude_the_last_position(lab: Lab) -> None:
    request = lab.requests(1, length=7)[0]
    kernels = lab.kernel(), lab.kernel(lab.drifting(0.1), name="infer")
    run = run_request(
        request, *kernels, plan("nll_gap", "brier_gap", "ace_gap"), lambda r, b: torch.ones(1)
    )
    assert run.unit.values["nll_gap"].shape == run.unit.values["brier_gap"].shape == (6,)
    assert run.unit.values["ace_train"].shape == (30,)
    lp, lq = (torch.log_softmax(k.logits(request.tokens).double(), -1) for k in kernels)
    labels = torch.tensor(request.tokens[1:])
    expected = (lp - lq)[torch.arange(6), labels]
    assert run.unit.values["nll_gap"] == pytest.approx(expected.numpy())


@pytest.mark.full
def test_equal_kernels_have_the_best_value_of_every_aggregate(lab: Lab) -> None:
    best = {"ess_frac": 1, "pearson_p": 1, "pearson_logp": 1, "nll_gap": 0, "brier_gap": 0,
            "ace_gap": 0}  # fmt: skip
    for name, value in best.items():
        op = ">=" if METRICS[name].better == "higher" else "<="
        row = lab.evaluate(lab.clause(Metric(name), op, str(value))).report.clauses[0]
        assert row.value == pytest.approx(value, abs=1e-12), name


def test_request_of_one_token_has_no_label(lab: Lab) -> None:
    row = lab.evaluate(
        lab.clause(Metric("nll_gap"), "<=", "1"), rows=lab.requests(10, length=1)
    ).report.clauses[0]
    assert row.verdict.__class__.__name__ == "InvalidEvidence"
