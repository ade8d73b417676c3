"""Drift planted in one source is attributed to that source alone."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import KernelRef
from kcdsl.verdict.studies.attribution import Attribution, EstimatedNumber, Source
from kcdsl_backends.empirical.attribution.measurement import measure
from kcdsl_backends.empirical.sources.kernels import Kernel
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from tests.support.attributions import (
    EAGER,
    Changed,
    attributed,
    fixed_requests,
    pair_of,
    ref,
    small_model,
    subject_of,
    with_module,
)

REQUESTS = fixed_requests(24)
FP8 = {"format": "fp8_e4m3", "scale": "per_channel"}


def source(found: Attribution, name: str) -> Source:
    return next(s for s in found.sources if s.name == name)


def total_of_shares(found: Attribution) -> float:
    return float(sum(Fraction(s.shapley.value) for s in found.sources if s.shapley))


@dataclass(frozen=True)
class Coarse:
    """Attention whose probabilities are rounded to a few bits."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **how: object) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * scale
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        shares = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        return (torch.round(shares * 16) / 16) @ v


def coarse_attention(module: nn.Module) -> None:
    for part in module.modules():
        if hasattr(part, "attention_program"):
            part.attention_program = Coarse()  # type: ignore[assignment]


def planted_operator(wanted: KernelRef, kernel: TorchKernel) -> Kernel:
    return with_module(kernel, coarse_attention) if wanted.run == "torch.sdpa.math" else kernel


def in_batches(logits: Tensor, ids: Any) -> Tensor:
    return logits + (0.05 * torch.sin(logits) if torch.as_tensor(ids).dim() == 2 else 0.0)


@pytest.mark.full
def test_single_difference_gets_the_whole_drift_without_hybrids() -> None:
    found = attributed(subject_of(pair_of(small_model(), EAGER, ref(compute="bfloat16")), REQUESTS))
    precision = source(found, "precision")
    assert found.status == "attributed"
    assert precision.share == 1.0
    assert precision.shown
    assert precision.shapley == precision.alone == precision.left_out
    assert [b.sources for b in found.between] == [(), ("precision",)]
    for name in ("operator", "weights", "activations", "batch"):
        equal = source(found, name)
        assert equal.state == "equal"
        assert equal.shapley is not None
        assert equal.shapley.value == 0.0
        assert not equal.shown


@pytest.mark.full
def test_coarse_attention_is_attributed_to_the_operator() -> None:
    infer = ref("torch.sdpa.math", "bfloat16", weights={"format": "bfloat16"})
    found = attributed(subject_of(pair_of(small_model(), EAGER, infer, planted_operator), REQUESTS))
    operator = source(found, "operator")
    assert operator.share is not None
    assert operator.share > 0.9
    assert operator.shown
    assert found.candidates[0].source == "operator"
    assert found.candidates[0].verdict == "most"
    assert found.candidates[0].remedies[0].id == "same_attention_program"


@pytest.mark.full
def test_quantised_weights_are_attributed_to_the_weights() -> None:
    infer = ref("torch.sdpa.math", "bfloat16", weights=FP8)
    found = attributed(subject_of(pair_of(small_model(), EAGER, infer), REQUESTS))
    share = source(found, "weights").share
    assert share is not None
    assert share > 0.9
    assert found.candidates[0].source == "weights"
    assert {t.name: t.sources for t in found.terms}["precision"] == ("precision", "weights")


@pytest.mark.full
def test_batch_dependence_is_attributed_to_the_batch() -> None:
    def planted(wanted: KernelRef, kernel: TorchKernel) -> Kernel:
        return Changed(kernel, in_batches)

    pair = pair_of(small_model(), EAGER, ref("torch.sdpa.math"), planted)
    found = attributed(subject_of(pair, REQUESTS, batch=3))
    batch, operator = source(found, "batch"), source(found, "operator")
    assert batch.share is not None
    assert operator.share is not None
    assert batch.share > 0.999
    assert abs(operator.share) < 1e-3
    assert found.candidates[0].source == "batch"
    assert found.candidates[0].remedies[0].id == "batch_invariant_kernels"
    alone = attributed(subject_of(pair, REQUESTS, batch=1))
    assert source(alone, "batch").state == "equal"


@pytest.mark.full
def test_shares_sum_to_the_total_and_are_reproducible() -> None:
    infer = ref("torch.sdpa.math", "bfloat16", weights=FP8)
    pair = pair_of(small_model(), EAGER, infer, planted_operator)
    subject = subject_of(pair, REQUESTS, batch=4)
    found = attributed(subject)
    assert found.method == "shapley"
    assert len(found.between) == 16
    assert total_of_shares(found) == pytest.approx(found.total.value, rel=1e-14)
    terms = sum(t.shapley.value for t in found.terms if t.shapley is not None)
    assert terms == pytest.approx(found.total.value, rel=1e-14)
    assert attributed(subject).dumps() == found.dumps()


@pytest.mark.full
def test_agreement_metric_starts_at_one() -> None:
    infer = ref("torch.sdpa.math", weights=FP8)
    pair = pair_of(small_model(), EAGER, infer)
    found = attributed(subject_of(pair, REQUESTS, metric="top1_overlap"))
    assert found.baseline == 1.0
    assert found.total.value < 0
    weights = source(found, "weights")
    assert weights.share is not None
    assert weights.share > 0.9


@pytest.mark.full
def test_source_without_effect_has_share_zero_and_is_not_shown() -> None:
    """The weights are float16 numbers, so storing them in float16 changes no bit."""
    model = small_model()
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(tensor.to(torch.float16))
    exact = replace(model, module=module)
    pair = pair_of(exact, EAGER, ref(compute="bfloat16", weights={"format": "float16"}))
    weights = source(attributed(subject_of(pair, REQUESTS)), "weights")
    assert weights.state == "differs"
    assert weights.shapley == EstimatedNumber(0.0, 0.0, 0.0)
    assert not weights.shown


@pytest.mark.full
def test_unavailable_hybrids_are_named_and_the_rest_attributed() -> None:
    """torchao computes with its own weights only, so no hybrid has its operator alone."""
    infer = ref("torchao.int8_weight_only", weights={"format": "int8_full", "scale": "per_channel"})
    found = attributed(subject_of(pair_of(small_model(), EAGER, infer), REQUESTS))
    assert found.method == "orders_that_run"
    assert found.orders == (1, 2)
    missing = {b.sources: b.reason for b in found.between if b.value is None}
    assert list(missing) == [("operator",)]
    assert "weights" in (missing[("operator",)] or "")
    assert source(found, "operator").alone is None
    assert source(found, "operator").reason is not None
    assert total_of_shares(found) == pytest.approx(found.total.value, rel=1e-14)


@pytest.mark.full
def test_quantised_inputs_are_simulated_without_a_kernel() -> None:
    infer = ref(
        "torch.scaled_mm",
        "float32",
        weights=FP8,
        activations={"format": "fp8_e4m3", "scale": "per_token"},
    )
    found = attributed(subject_of(pair_of(small_model(), EAGER, infer), REQUESTS))
    simulated = {b.sources for b in found.between if b.simulated}
    assert ("activations",) in simulated
    assert ("weights", "activations") in simulated
    assert ("operator", "weights", "activations") not in simulated
    activations, weights = source(found, "activations"), source(found, "weights")
    operator = source(found, "operator")
    assert activations.share is not None
    assert weights.share is not None
    assert operator.share is not None
    assert min(activations.share, weights.share) > 0.1
    assert abs(operator.share) < 0.1


def test_hybrids_that_give_nan_are_excluded() -> None:
    def planted(wanted: KernelRef, kernel: TorchKernel) -> Kernel:
        numerics = dict(wanted.numerics)
        between = wanted.run == "torch.sdpa.math" and numerics["compute"] == "float32"
        return Changed(kernel, lambda z, ids: z * torch.nan) if between else kernel

    pair = pair_of(small_model(), EAGER, ref("torch.sdpa.math", "bfloat16"), planted)
    found = attributed(subject_of(pair, REQUESTS))
    broken = next(b for b in found.between if b.sources == ("operator",))
    assert broken.value is None
    assert "not finite" in (broken.reason or "")
    assert found.method == "orders_that_run"


@pytest.mark.parametrize("side", ["train", "infer"])
def test_kernel_that_gives_nan_is_refused(side: str) -> None:
    def planted(wanted: KernelRef, kernel: TorchKernel) -> Kernel:
        hit = (wanted == EAGER) == (side == "train")
        return Changed(kernel, lambda z, ids: z * torch.nan) if hit else kernel

    pair = pair_of(small_model(), EAGER, ref(compute="bfloat16"), planted)
    with pytest.raises(Refusal) as refused:
        measure(subject_of(pair, REQUESTS))
    assert refused.value.diagnostics[0].code == codes.NO_ATTRIBUTION


def test_no_requests_are_refused() -> None:
    with pytest.raises(Refusal) as refused:
        measure(subject_of(pair_of(small_model(), EAGER, ref(compute="bfloat16")), ()))
    assert refused.value.diagnostics[0].code == codes.NO_ATTRIBUTION


@pytest.mark.parametrize("count", [1, 5])
def test_few_requests_give_shares_without_intervals(count: int) -> None:
    pair = pair_of(small_model(), EAGER, ref(compute="bfloat16", weights=FP8))
    found = attributed(subject_of(pair, REQUESTS[:count]))
    assert found.status == "inconclusive"
    assert int(found.exit) == 3
    assert not any(s.shown for s in found.sources)
    assert all(c.verdict == "not_shown" for c in found.candidates)
    assert all(s.shapley is None or s.shapley.low in (None, 0.0) for s in found.sources)


@pytest.mark.full
def test_maximum_is_about_these_requests_only() -> None:
    pair = pair_of(small_model(), EAGER, ref(compute="bfloat16", weights=FP8))
    found = attributed(subject_of(pair, REQUESTS), statistic="max")
    assert found.status == "inconclusive"
    assert "these requests alone" in (found.reason or "")


@pytest.mark.full
def test_failed_precondition_leaves_no_candidate() -> None:
    pair = pair_of(small_model(), EAGER, ref(compute="bfloat16", weights=FP8))
    found = attributed(subject_of(pair, REQUESTS), blocked="precheck temperature_fit failed")
    assert found.status == "invalid_evidence"
    assert int(found.exit) == 2
    assert found.candidates == ()
    assert not any(s.shown for s in found.sources)


@pytest.mark.full
def test_equal_kernels_have_no_drift() -> None:
    found = attributed(subject_of(pair_of(small_model(), EAGER, EAGER), REQUESTS))
    assert found.status == "no_drift"
    assert found.total.value == 0.0
    assert found.method == "none"
    assert found.candidates == ()


@pytest.mark.full
def test_drift_without_a_source_is_reported_as_unexplained() -> None:
    seen: list[bool] = []

    def planted(wanted: KernelRef, kernel: TorchKernel) -> Kernel:
        seen.append(True)
        return kernel if len(seen) == 1 else Changed(kernel, lambda z, ids: z * 1.01)

    found = attributed(subject_of(pair_of(small_model(), EAGER, EAGER, planted), REQUESTS))
    assert found.status == "inconclusive"
    assert found.total.value > 0
    assert "equal in every source" in (found.reason or "")


@pytest.mark.full
def test_documents_follow_the_schema(follows: Any) -> None:
    infer = ref("torch.sdpa.math", "bfloat16", weights=FP8)
    found = attributed(subject_of(pair_of(small_model(), EAGER, infer), REQUESTS, batch=2))
    document = json.loads(found.dumps())
    follows(document)
    for key in ("metric", "statistic", "unit", "total", "sources", "layers", "first_block"):
        assert key in document
    few = attributed(subject_of(pair_of(small_model(), EAGER, infer), REQUESTS[:1]))
    follows(json.loads(few.dumps()))
