"""Implied results: the inequality chain is derived again, and no other reason is accepted."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import (
    IMPLIED,
    CertifiedClause,
    ChainTerms,
    Comparison,
    Evidence,
    ProofReference,
    Quantity,
    Region,
    RequiredClause,
    Verdict,
)
from kcdsl_certs.verification.coverage import check_implied
from tests.support.quantities import margin, norm, statistic

_SPAN = 0.125


def _source(**changes: Any) -> CertifiedClause:
    stated: dict[str, Any] = {
        "obligation": "N-MODEL/all/0", "id": "N-MODEL", "quantity": norm("span", "model"),
        "op": "<=", "tau": Fraction(1, 4), "unit": "1",
        "evidence": Evidence.PROOF, "method": "interval/1", "verdict": Verdict.PASSED,
        "slice": "all", "bound": _SPAN,
        "proof": ProofReference("0" * 64, "p.json"),
    }  # fmt: skip
    return CertifiedClause(**{**stated, **changes})


def _required(
    metric: str = "tv", tau: str = "1/10", op: str = "<=", **chain: Any
) -> RequiredClause:
    comparison = Comparison(
        "S-TV/long/0", statistic("max", metric), op, Fraction(tau), "1", ChainTerms(metric, **chain)
    )
    return RequiredClause("S-TV", "long", ((comparison,),), inside=("all", "long"))


def _implied(required: RequiredClause, bound: float | None, **changes: Any) -> CertifiedClause:
    ((comparison,),) = required.alternatives
    stated: dict[str, Any] = {
        "obligation": comparison.obligation, "id": "S-TV", "slice": "long",
        "quantity": comparison.quantity, "op": comparison.op, "tau": comparison.tau, "unit": "1",
        "evidence": Evidence.PROOF, "method": IMPLIED,
        "verdict": Verdict.PASSED, "bound": bound, "implied_by": "N-MODEL",
    }  # fmt: skip
    return CertifiedClause(**{**stated, **changes})


def _check(required: RequiredClause, implied: CertifiedClause, *sources: CertifiedClause) -> str:
    try:
        check_implied(implied, required, (*sources, implied))
    except Rejected as error:
        return error.reason
    return "ok"


def test_total_variation_follows_from_a_span() -> None:
    limit = math.tanh(_SPAN / 4)
    required = _required()
    above = math.nextafter(limit, 1) + 1e-15
    assert _check(required, _implied(required, above), _source()) == "ok"
    below = _implied(required, limit - 1e-15)
    assert _check(required, below, _source()) == "clause/implied-bound-not-confirmed"
    assert _check(required, _implied(required, None), _source()) == (
        "clause/implied-bound-not-confirmed"
    )


@pytest.mark.parametrize(
    ("quantity", "metric", "bound"),
    [
        (norm("span", "model"), "abs_log_ratio", _SPAN),
        (norm("inf", "model"), "abs_log_ratio", 2 * _SPAN),
        (norm("2", "model"), "abs_log_ratio", math.sqrt(2) * _SPAN * (1 + 1e-15)),
        (norm("inf", "model"), "logit_linf", _SPAN),
        (norm("2", "model"), "logit_l2", _SPAN),
        (norm("span", "model"), "logit_span", _SPAN),
    ],
)
def test_each_norm_implies_its_bound(quantity: Quantity, metric: str, bound: float) -> None:
    required = _required(metric, "1")
    source = _source(quantity=quantity)
    assert _check(required, _implied(required, bound), source) == "ok"
    less = _implied(required, bound * (1 - 1e-9))
    assert _check(required, less, source) == "clause/implied-bound-not-confirmed"


def test_implied_bounds_use_temperature_and_constants() -> None:
    cold = _required("log_ratio", "1", temperature=Fraction(1, 2))
    assert _check(cold, _implied(cold, 2 * _SPAN), _source()) == "ok"
    assert _check(cold, _implied(cold, _SPAN), _source()) == "clause/implied-bound-not-confirmed"
    reward = _required("reward_delta", "1", constants=(("reward_range", Fraction(3)),))
    assert _check(reward, _implied(reward, 3.001 * math.tanh(_SPAN / 4)), _source()) == "ok"
    missing = _required("reward_delta", "1")
    assert _check(missing, _implied(missing, 1.0), _source()) == "chain/constant"


def test_lower_bound_of_a_signed_metric() -> None:
    required = _required("log_ratio", "-1/5", ">=")
    assert _check(required, _implied(required, -_SPAN), _source()) == "ok"
    over = _implied(required, -_SPAN / 2)
    assert _check(required, over, _source()) == "clause/implied-bound-not-confirmed"


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "N-OTHER"},
        {"proof": None},
        {"verdict": Verdict.INCONCLUSIVE},
        {"verdict": Verdict.FAILED},
        {"quantity": norm("inf", "attn_0")},
        {"quantity": norm("span", "attn_0")},
        {"quantity": norm("span", "model", measured=True)},
        {"quantity": margin("model")},
        {"slice": "short"},
        {"slice": None},
        {"bound": None},
        {"bound": -1.0},
        {"op": ">="},
        {"evidence": Evidence.PROOF_REAL},
        {"region": Region("rows", "all", longest=64)},  # longer requests are outside that region
    ],
)
def test_invalid_reasons_are_rejected(changes: dict[str, Any]) -> None:
    required = _required()
    assert _check(required, _implied(required, 0.1), _source()) == "ok"
    reason = _check(required, _implied(required, 0.1), _source(**changes))
    assert reason == "clause/implied-by-unproved"


def test_probabilistic_results_imply_nothing() -> None:
    """Not even another probabilistic result."""
    likely: dict[str, Any] = {
        "evidence": Evidence.PROBABILISTIC, "assumptions": ("independent roundings",),
    }  # fmt: skip
    required = _required()
    implied = _implied(required, 0.05, **likely)
    assert _check(required, implied, _source()) == "ok"
    source = _source(**likely, alpha=Fraction(1, 10**9))
    assert _check(required, implied, source) == "clause/implied-by-unproved"


def test_result_does_not_imply_itself() -> None:
    required = _required()
    own = _implied(required, 0.1, implied_by="S-TV", proof=ProofReference("0" * 64, "p.json"))
    assert _check(required, own) == "clause/implied-by-unproved"


def test_quantity_outside_the_chain_is_not_rederivable() -> None:
    required = _required()
    bare = dataclasses.replace(required.alternatives[0][0], chain=None)
    without = dataclasses.replace(required, alternatives=((bare,),))
    assert _check(without, _implied(required, 0.1), _source()) == "clause/not-rederivable"
    other = _required("ece_gap")
    assert _check(other, _implied(other, 0.1), _source()) == "clause/implied-by-unproved"


def test_requirements_with_a_chain_survive_a_round_trip() -> None:
    required = _required("kl", constants=(("reward_range", Fraction(1, 3)),))
    assert RequiredClause.from_json(required.to_json()) == required
