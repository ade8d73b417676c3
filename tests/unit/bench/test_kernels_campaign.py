"""Random modules under real kernels: inputs, kernels, outcomes, and reported violations."""

from __future__ import annotations

import pytest
import torch

from bench.kernels_campaign import (
    BUILT_IN,
    SIZES,
    Run,
    cases_of,
    examine,
    figures,
    inputs,
    table,
)


def test_module_above_its_bound_fails_and_is_counted() -> None:
    good, bad = Run(1, "torch.eager", 0.5, 3, 3), Run(2, "torch.eager", 1.5, 3, 3)
    modules, above = figures([good, bad, Run(3, "torch.eager", refused="KC461")])
    assert (modules.value, above.value) == (2, 1)
    assert not above.within
    text = table([good, bad, Run(3, "torch.eager", refused="KC461")])
    assert "| torch.eager | 3 | 1 | 6, 6 | 1.5 | 1 |" in text
    assert "3 modules, of which 2 ran under some kernel; 1 above a bound." in text


def test_seeds_reach_every_adapter_format_and_size() -> None:
    cases = {(c.run, c.numerics.get("compute")) for seed in range(400) for c in cases_of(seed)}
    runs = {run for run, _ in cases}
    assert {"torch.compile", "onnxruntime.float32", "torchao.int8_dynamic"} <= runs
    assert {("torch.eager", f) for f in ("float64", "bfloat16", "float16", "float32")} <= cases
    sizes = {float(x.abs().amax()) for seed in range(9) for x in inputs(seed, 4, 4)}
    assert min(sizes) < 1e-38
    assert max(sizes) > 1e7 > SIZES[-2]
    assert any(bool((x == 0).all(-1).any()) for x in inputs(5, 3, 4))


@pytest.mark.full
def test_module_drifts_are_within_their_bounds() -> None:
    """One user-defined module, one built in."""
    before = torch.is_grad_enabled()
    try:
        for seed in (5, 2 * BUILT_IN):
            runs = examine(seed)
            assert sum(run.bounded for run in runs) > 0
            assert all(run.ratio <= 1 for run in runs)
    finally:
        torch.set_grad_enabled(before)
