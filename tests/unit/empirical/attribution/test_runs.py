"""Runs of whole slices: each request gets its own rows, alone and in batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kcdsl_backends.empirical.attribution import measurement
from kcdsl_backends.empirical.attribution.hybrids import Batches, RunMode, run_all
from kcdsl_backends.empirical.attribution.measurement import measure
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
)

REQUESTS = fixed_requests(7)


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("size", [2, 3, 16])
def test_request_gets_its_own_rows_in_any_batch(size: int, padding: bool) -> None:
    kernel = pair_of(small_model(), EAGER, EAGER).train
    mode = RunMode(("logits", "hidden"), Batches(size, padding))
    found = {ran.request.key: ran.outputs for ran in run_all(kernel, REQUESTS, mode)}
    assert sorted(found) == sorted(r.key for r in REQUESTS)
    for request in REQUESTS:
        for part, function in (("logits", kernel.logits), ("hidden", kernel.hidden)):
            own = function(request.tokens)
            assert found[request.key][part].shape == own.shape
            assert torch.allclose(found[request.key][part], own, atol=1e-5)


def test_rows_are_run_in_batches() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(logits: Tensor, ids: Any) -> Tensor:
        seen.append(tuple(torch.as_tensor(ids).shape))
        return logits

    inner = pair_of(small_model(), EAGER, EAGER).train
    assert isinstance(inner, TorchKernel)
    list(run_all(Changed(inner, watch), REQUESTS, RunMode(("logits",), Batches(3, padding=True))))
    assert [rows for rows, _ in seen] == [3, 3, 3]


def test_kernel_without_batches_has_no_batch_source() -> None:
    def alone(logits: Tensor, ids: Any) -> Tensor:
        if torch.as_tensor(ids).dim() != 1:
            raise ValueError("one request at a time")
        return logits

    pair = pair_of(
        small_model(), EAGER, ref(compute="bfloat16"), lambda r, kernel: Changed(kernel, alone)
    )
    found = attributed(subject_of(pair, REQUESTS, batch=3))
    batch = next(s for s in found.sources if s.name == "batch")
    assert batch.state == "absent"
    assert batch.shapley is None
    assert "one request at a time" in (batch.reason or "")


def test_copies_of_a_request_count_as_one_unit() -> None:
    """Seven prompts five times each are seven units, too few for an interval."""
    pair = pair_of(small_model(), EAGER, ref("torch.sdpa.math", "bfloat16"))
    copies = tuple(replace(r, key=f"{r.key}-{i}") for i in range(5) for r in REQUESTS)
    once, found = (attributed(subject_of(pair, rows)) for rows in (REQUESTS, copies))
    assert found.requests == once.requests == 7
    assert found.total.low is None
    assert found.total.value == pytest.approx(once.total.value, rel=1e-9)
    assert not any(source.shown for source in found.sources)


def test_outputs_that_are_not_cached_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(small_model(), EAGER, ref("torch.sdpa.math", "bfloat16"))
    subject = subject_of(pair, REQUESTS)
    kept = measure(subject)
    monkeypatch.setattr(measurement._TrainOutputs, "fill", _without_room)
    again = measure(subject)
    for mask, column in kept.columns.items():
        assert column.sums.tolist() == again.columns[mask].sums.tolist()


_FILL = measurement._TrainOutputs.fill


def _without_room(base: Any) -> None:
    base.capacity = 0
    _FILL(base)
    assert base.held == {}


@pytest.mark.full
def test_noise_of_a_nondeterministic_training_kernel_is_reported() -> None:
    generator = torch.Generator().manual_seed(1)

    def restless(logits: Tensor, ids: Any) -> Tensor:
        return logits + 0.1 * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)

    pair = pair_of(
        small_model(),
        EAGER,
        ref(compute="bfloat16"),
        lambda r, kernel: Changed(kernel, restless) if r == EAGER else kernel,
    )
    assert attributed(subject_of(pair, REQUESTS)).noise > 1e-3
    quiet = pair_of(small_model(), EAGER, ref(compute="bfloat16"))
    assert attributed(subject_of(quiet, REQUESTS)).noise == 0.0
