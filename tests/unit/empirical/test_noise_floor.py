"""The noise floor: the training kernel compared with itself in other batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl_backends.empirical.collection.kernels import REQUESTS, noise_floor
from kcdsl_backends.empirical.sources.kernels import MeasurementPlan
from kcdsl_backends.requests import Request

PLAN = MeasurementPlan(frozenset({"kl", "logit_linf", "top1_overlap", "log_ratio"}), 1.0, 0, False)


@dataclass
class Batched:
    """A kernel that drifts by `noise` in batches, and by `padded` more behind padding."""

    noise: float = 0.0
    padded: float = 0.0

    def logits(self, ids: Any) -> Tensor:
        rows = [ids] if isinstance(ids[0], int) else ids
        alone = isinstance(ids[0], int)
        out = []
        for row in rows:
            kept = torch.tensor(row[:8], dtype=torch.float64)
            logits = torch.sin(kept[:, None] * torch.arange(1.0, 17.0, dtype=torch.float64))
            extra = len(row) - len(kept)
            shift = 0.0 if alone else self.noise + (self.padded if extra else 0.0)
            logits = logits + shift * torch.linspace(-1, 1, 16, dtype=torch.float64)
            out.append(torch.cat([logits, torch.zeros(extra, 16, dtype=torch.float64)]))
        return out[0] if alone else torch.stack(out)


class Alone:
    """A kernel without batch support."""

    def logits(self, ids: Any) -> Tensor:
        if not isinstance(ids[0], int):
            raise RuntimeError("one request at a time")
        return torch.zeros(len(ids), 16, dtype=torch.float64)


def requests(count: int, length: int = 8) -> list[Request]:
    return [
        Request(f"r:{i:02}", str(i), tuple((i + 3 * j) % 40 for j in range(length)), {}, i)
        for i in range(count)
    ]


def floor(kernel: Any, count: int = 4) -> dict[str, Any]:
    return noise_floor(kernel, requests(count), PLAN, lambda done, total: None)


def test_batch_invariant_kernel_has_a_zero_floor() -> None:
    found = floor(Batched())
    assert len(found) == 4
    for unit in found.values():
        assert unit.values["kl"].size == 3 * 8  # in a batch, in reverse order, padded
        assert (unit.values["kl"] == 0).all()
        assert (unit.values["top1_overlap"] == 1).all()


@pytest.mark.parametrize(("noise", "padded"), [(1e-3, 0.0), (0.0, 1e-3), (1e-3, 1e-3)])
def test_floor_is_the_drift_between_batchings(noise: float, padded: float) -> None:
    for unit in floor(Batched(noise, padded)).values():
        parts = np.split(unit.values["logit_linf"], 3)
        assert parts[0] == pytest.approx(np.full(8, noise))
        assert parts[1] == pytest.approx(np.full(8, noise))
        assert parts[2] == pytest.approx(np.full(8, noise + padded))
        assert "log_ratio" in unit.values


def test_kernel_without_batches_and_single_request_have_no_floor() -> None:
    assert floor(Alone()) == {}
    assert floor(Batched(), count=1) == {}
    assert floor(Batched(), count=0) == {}


def test_only_some_requests_are_run_again() -> None:
    told: list[tuple[int, int]] = []
    kernel: Any = Batched()
    found = noise_floor(kernel, requests(40), PLAN, lambda *step: told.append(step))
    assert len(found) == REQUESTS
    assert told[-1] == (REQUESTS, REQUESTS)
