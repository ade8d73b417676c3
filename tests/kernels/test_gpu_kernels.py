"""Kernels of a CUDA device stay inside their bounds, which are computed on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import kernels_device
from bench.kernels import Case
from bench.kernels_device import FP8_UNITS, cases, measure
from kcdsl.model.architecture import Model

pytestmark = pytest.mark.gpu

NEWEST = next(reversed(FP8_UNITS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a small model whose widths every kernel supports."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    return kernels_device.random_model(folder)


def here() -> list[tuple[str, Case]]:
    """Return the kernels of this device, or those of the newest device where there is none."""
    known = torch.cuda.is_available()
    return list(cases(torch.cuda.get_device_capability(0) if known else NEWEST))


@pytest.mark.parametrize(("block", "case"), here(), ids=lambda part: getattr(part, "name", part))
def test_drift_on_the_device_is_within_its_bound(model: Model, block: str, case: Case) -> None:
    found = measure(model, case, block)
    assert found.told > 10
    assert found.ratio <= 1
