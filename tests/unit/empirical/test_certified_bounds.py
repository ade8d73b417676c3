"""Certified bounds of requests: above admitted drift, within a time budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.diagnostics.model import Refusal
from kcdsl_backends.empirical.bounds.requests import (
    Certificates,
    RequestBounds,
    agreement_bounds,
    certify,
    check_measured,
    logit_bounds,
    state_bounds,
)
from kcdsl_backends.empirical.collection import collect
from kcdsl_backends.empirical.metrics.full_logits import tier_a
from kcdsl_backends.empirical.metrics.measures import PROBABILITY_FUNCTIONS, SAMPLED_FUNCTIONS
from kcdsl_backends.empirical.metrics.policies import policy_pair
from kcdsl_backends.empirical.table.evidence import SamplingUnit
from kcdsl_backends.requests import Request
from tests.support.reference_metrics import PAIR_FUNCTIONS


@dataclass
class Fixed:
    """A constant bound whose computation takes a stated time."""

    size: float
    price: float = 1.0
    clock: list[float] = field(default_factory=lambda: [0.0])
    slower: float = 1.0
    width: int = 16
    reason: str | None = None
    domains: tuple[str, ...] = ("boxes",)
    sharper: float = 0.5
    open_in: frozenset[int] = frozenset()
    asked: list[tuple[str, int]] = field(default_factory=list)

    @property
    def numerics(self) -> Mapping[str, str]:
        return {"train": "a float64", "infer": "b float64"}

    def cost(self, request: Request, domain: int) -> float:
        return self.price * request.length * 3**domain

    def bound(self, request: Request, domain: int) -> RequestBounds:
        self.clock[0] += self.slower * self.cost(request, domain)
        self.asked.append((request.key, domain))
        limit = np.full((request.length, self.width), self.size * self.sharper**domain)
        reason = "not by this domain" if domain in self.open_in else self.reason
        return RequestBounds(-limit, limit, reason)


def requests(*lengths: int) -> list[Request]:
    return [Request(f"r:{n}", str(n), tuple(range(n)), {}, 1) for n in lengths]


def sought(model: Fixed, lengths: tuple[int, ...], seconds: float) -> dict[str, SamplingUnit]:
    return certificates(model, lengths, seconds).units


def certificates(model: Fixed, lengths: tuple[int, ...], seconds: float) -> Certificates:
    return certify(
        model,
        requests(*lengths),
        seconds=seconds,
        temperature=Fraction(1),
        encoder=False,
        clock=lambda: model.clock[0],
        progress=lambda done, total: None,
    )


@pytest.mark.parametrize("temperature", [Fraction(1), Fraction(1, 2), Fraction(7, 3)])
@pytest.mark.parametrize("size", [1e-7, 1e-2, 2.0])
def test_no_pair_in_the_box_exceeds_a_bound(size: float, temperature: Fraction) -> None:
    generator = torch.Generator().manual_seed(1)
    train = 3 * torch.randn(200, 16, generator=generator, dtype=torch.float64)
    low = -size * torch.rand(200, 16, generator=generator, dtype=torch.float64)
    high = size * torch.rand(200, 16, generator=generator, dtype=torch.float64)
    share = torch.rand(200, 16, generator=generator, dtype=torch.float64)
    share[:100] = (share[:100] > 0.5).double()  # corners of the box
    infer = train + low + share * (high - low)
    limits = logit_bounds(RequestBounds(low.numpy(), high.numpy()), temperature)
    exact = limits.keys() & PAIR_FUNCTIONS.keys()
    assert {"kl", "tv", "js", "logit_linf", "logit_span", "chi2_train_infer"} <= exact
    found = tier_a(train, infer, float(temperature), exact)
    for name, values in found.items():
        assert (values <= limits[name] * (1 + 1e-7) + 1e-12).all(), name
        assert limits[name].shape == (200,)
    pair = policy_pair(train, infer, float(temperature))
    ratio = (pair.train_log - pair.infer_log).abs().amax(dim=-1).numpy()
    assert (ratio <= limits["log_ratio"] * (1 + 1e-9) + 1e-12).all()
    for name in limits.keys() & SAMPLED_FUNCTIONS.keys():
        values = SAMPLED_FUNCTIONS[name](pair.train_log - pair.infer_log).abs().amax(dim=-1).numpy()
        assert (values <= limits[name] * (1 + 1e-9) + 1e-12).all(), name
    for name in limits.keys() & PROBABILITY_FUNCTIONS.keys():
        values = PROBABILITY_FUNCTIONS[name](pair.train_log, pair.infer_log).amax(dim=-1).numpy()
        assert (values <= limits[name] * (1 + 1e-9) + 1e-12).all(), name
    known = {*PAIR_FUNCTIONS, *SAMPLED_FUNCTIONS, *PROBABILITY_FUNCTIONS, "log_ratio"}
    assert limits.keys() <= known


@pytest.mark.parametrize("size", [1e-9, 1e-5, 0.03, 1.0, 20.0])
def test_rare_class_attains_the_bound_at_one_token(size: float) -> None:
    """All classes but a rare one lose `size`, and it gains `size`: ln w is nearly the span."""
    limits = logit_bounds(RequestBounds(np.full((1, 2), -size), np.full((1, 2), size)), Fraction(1))
    delta = torch.tensor([2 * size, -2 * size], dtype=torch.float64)
    assert limits.keys() & SAMPLED_FUNCTIONS.keys() >= {"k2", "w_log_w_minus", "chi2_token"}
    for name in limits.keys() & SAMPLED_FUNCTIONS.keys():
        values = SAMPLED_FUNCTIONS[name](delta).abs().numpy()
        assert values.max() == pytest.approx(limits[name][0], rel=1e-6, abs=1e-30), name
        assert values.max() <= limits[name][0] * (1 + 1e-9)


def test_overflow_has_no_finite_bound() -> None:
    limits = logit_bounds(
        RequestBounds(np.full((1, 2), -500.0), np.full((1, 2), 500.0)), Fraction(1)
    )
    assert limits["log_ratio"][0] == 1000.0
    for name in ("k3", "importance_ratio", "w_log_w_minus", "chi2_is", "is_variance_inflation"):
        assert limits[name][0] == np.inf, name
    assert not any(np.isnan(values).any() for values in limits.values())


def test_two_classes_attain_the_bounds() -> None:
    low, high = np.array([[-0.1, 0.1]]), np.array([[-0.1, 0.1]])
    limits = logit_bounds(RequestBounds(low, high), Fraction(1))
    train = torch.tensor([[0.1, -0.1]], dtype=torch.float64)
    infer = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    found = tier_a(train, infer, 1.0, {"tv", "log_ratio_linf"})
    assert limits["logit_span"][0] == pytest.approx(0.2)
    assert limits["tv"][0] == pytest.approx(np.tanh(0.05))
    assert found["tv"][0] == pytest.approx(limits["tv"][0], rel=1e-2)


def test_bounds_of_states() -> None:
    box = RequestBounds(np.array([[-3.0, 0.0]]), np.array([[1.0, 4.0]]))
    found = state_bounds(box)
    assert found["hidden_linf"][0] == 4.0
    assert found["hidden_l2"][0] == pytest.approx(5.0)
    assert found["hidden_l2"][0] >= 5.0


def test_positions_with_margin_above_the_span_are_stable() -> None:
    unit = SamplingUnit("r", 3, {"logit_span": np.full(4, 1.0), "logit_linf": np.full(4, 0.6)})
    found = agreement_bounds(np.array([0.9, 1.0, 1.1, 1.3]), unit)
    assert found["top1_overlap"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found["jaccard1"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found["top1_flip"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert found["stable_fraction"].tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("size", [0.01, 0.2, 0.6])
def test_flips_in_the_box_respect_the_margin(size: float) -> None:
    generator = torch.Generator().manual_seed(2)
    train = torch.randn(400, 8, generator=generator, dtype=torch.float64)
    moved = size * (2 * torch.rand(400, 8, generator=generator, dtype=torch.float64) - 1)
    moved[:200] = moved[:200].sign() * size
    limits = logit_bounds(
        RequestBounds(np.full((400, 8), -size), np.full((400, 8), size)), Fraction(1)
    )
    names = {"top1_overlap", "jaccard1", "top1_flip", "stable_fraction", "margin"}
    found = tier_a(train, train + moved, 1.0, names)
    bounds = agreement_bounds(found["margin"], SamplingUnit("r", 400, limits))
    check_measured("r", found, SamplingUnit("r", 400, bounds))
    assert 0 < bounds["top1_overlap"].mean() < 1
    assert not any((found[name] == bounds[name]).all() for name in ("top1_overlap", "top1_flip"))


# --- the budget ----------------------------------------------------------------------------------


def test_cheapest_requests_are_bounded_first_within_the_time() -> None:
    found = sought(Fixed(1e-3), (9, 2, 4, 3), seconds=10)
    assert [key for key, unit in found.items() if unit.failure is None] == ["r:2", "r:3", "r:4"]
    assert found["r:9"].failure == "it would take about 9 s, and 1 s of 10 s are left"


def test_long_times_are_formatted() -> None:
    found = sought(Fixed(1e-3, price=173.4), (2, 9), seconds=1800)
    said = "it would take about 1,600 s, and 1,453 s of 1,800 s are left"
    assert found["r:9"].failure == said


def test_slow_bounds_postpone_the_rest() -> None:
    found = sought(Fixed(1e-3, slower=3.0), (2, 3, 4), seconds=10)
    assert [key for key, unit in found.items() if unit.failure is None] == ["r:2"]


def test_bounds_that_exceed_the_time_are_not_started() -> None:
    model = Fixed(1e-3, price=1e6)
    found = sought(model, (2, 3), seconds=10)
    assert model.clock[0] == 0.0
    assert all(unit.failure is not None for unit in found.values())


def test_model_without_a_bound_states_the_reason() -> None:
    found = sought(Fixed(1e-3, reason="the variance may be zero"), (2, 3), seconds=10)
    assert {unit.failure for unit in found.values()} == {"the variance may be zero"}
    assert all(not unit.values for unit in found.values())


def test_all_requests_are_bounded_before_any_is_refined() -> None:
    model = Fixed(1e-3, domains=("quick", "sharp"))
    found = certificates(model, (2, 3, 4), seconds=20)
    assert model.asked == [("r:2", 0), ("r:3", 0), ("r:4", 0), ("r:2", 1)]
    assert found.domains == {"r:2": "sharp", "r:3": "quick", "r:4": "quick"}
    assert found.units["r:2"].values["logit_linf"].tolist() == [5e-4] * 2
    assert found.units["r:3"].values["logit_linf"].tolist() == [1e-3] * 3
    assert all(unit.failure is None for unit in found.units.values())


def test_only_the_tightest_domain_runs_if_time_suffices() -> None:
    model = Fixed(1e-3, domains=("quick", "sharp"))
    found = certificates(model, (2, 3), seconds=15)
    assert model.asked == [("r:2", 1), ("r:3", 1)]
    assert set(found.domains.values()) == {"sharp"}


def test_tighter_domain_never_widens_a_bound() -> None:
    found = certificates(Fixed(1e-3, domains=("quick", "sharp"), sharper=8.0), (2, 9), seconds=18)
    assert found.domains == {"r:2": "sharp", "r:9": "quick"}
    assert found.units["r:2"].values["logit_linf"].tolist() == [1e-3] * 2


def test_request_without_a_bound_goes_to_the_next_domain() -> None:
    model = Fixed(1e-3, domains=("quick", "sharp"), open_in=frozenset({0}))
    found = certificates(model, (2, 9), seconds=20)
    assert found.domains == {"r:2": "sharp"}
    assert found.units["r:2"].failure is None
    assert found.units["r:9"].failure == "it would take about 27 s, and 3 s of 20 s are left"
    model = Fixed(1e-3, domains=("quick", "sharp"), open_in=frozenset({1}))
    found = certificates(model, (2, 9), seconds=20)
    assert found.domains == {"r:2": "quick", "r:9": "quick"}
    assert found.units["r:2"].failure is None


def test_disjoint_bounds_are_a_defect() -> None:
    low, high = (
        RequestBounds(np.zeros((1, 2)), np.ones((1, 2))),
        RequestBounds(np.full((1, 2), 2.0), np.full((1, 2), 3.0)),
    )
    with pytest.raises(AssertionError, match="exclude each other"):
        low.meet(high)


# --- measured above certified --------------------------------------------------------------------


def evaluation(lab: Any, size: float, drift: float, **changes: Any) -> Any:
    clause = lab.clause(lab.statistic("max", "kl"), limit="100", id="N-KL")
    infer = lab.kernel(lab.drifting(drift))
    setting = lab.setting(
        clause, infer=infer, certified=1.0, bound_model=Fixed(size), bound_seconds=1e9, **changes
    )
    return collect(setting)


def test_measured_values_are_below_their_bounds(lab: Any) -> None:
    found = evaluation(lab, 0.1, 1e-2)
    for key, unit in found.certified.items():
        measured = found.runs[key].unit.values
        assert (measured["kl"] <= unit.values["kl"]).all()
        assert (measured["top1_overlap"] >= unit.values["top1_overlap"]).all()
    assert found.bounding["numerics"] == {"train": "a float64", "infer": "b float64"}


def test_measured_value_above_its_bound_ends_the_evaluation(lab: Any) -> None:
    with pytest.raises(Refusal) as refused:
        evaluation(lab, 1e-3, 1e-2)
    (found,) = refused.value.diagnostics
    assert found.code.id == "KC625"
    assert "is above the certified" in found.message


def test_nan_is_never_below_a_bound() -> None:
    unit = SamplingUnit("r", 2, {"kl": np.array([1.0, 1.0]), "top1_overlap": np.array([0.0, 1.0])})
    check_measured("r", {"kl": np.array([1.0, 0.5])}, unit)
    check_measured("r", {"top1_overlap": np.array([0.0, 1.0])}, unit)
    for values in (
        {"kl": np.array([1.0, np.nan])},
        {"kl": np.array([1.01, 0.0])},
        {"kl": np.array([1.0])},
        {"top1_overlap": np.array([1.0, 0.0])},
    ):
        with pytest.raises(Refusal):
            check_measured("r", values, unit)


def test_report_states_that_no_time_was_left_for_bounds(lab: Any) -> None:
    clause = lab.clause(lab.statistic("max", "kl"), limit="100", id="N-KL")
    found = collect(lab.setting(clause, bound_model=Fixed(1.0), bound_seconds=0.0))
    assert found.certified == {}
    assert found.bounding["reason"] == "no time was given to bounds of the whole model"
