"""Every kernel of the matrix on the tiny LM: no element drifts further than its certified bound."""

from __future__ import annotations

import math

import pytest
import torch

from bench import kernels, kernels_inputs
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

FAST = [c for c in kernels.CASES if c.run != "torch.compile"]


@pytest.mark.full
@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
def test_real_kernels_stay_within_their_bounds(case: kernels.Case) -> None:
    """Attention and feed-forward blocks: two prompts and every odd input, by the tighter domain."""
    model = kernels_inputs.loaded("tiny LM")
    running, started = load_kernel(case.ref(), model, "cpu"), kernels.eager("tiny LM")
    factory, drifted = kernels.problem_factory(model, case), 0
    for block in ("attn_0", "mlp_1"):
        real = [model.block_inputs(tokens, block) for tokens in kernels_inputs.texts("tiny LM")[:2]]
        finite = 0
        for x in (*real, *kernels_inputs.odd(96)):
            assert x is not None
            drift = (running.block(block, x) - started.block(block, x)).abs()
            bounds = kernels.bound(factory, block, x, affine=len(x) <= 32)
            worst = float(kernels.quotients(drift, bounds).max())
            assert worst <= 1, (block, len(x), float(x.abs().max()))
            finite += math.isfinite(float(bounds.max()))
            drifted += bool((drift > 0).any())
        assert finite >= 7, "bounds that are infinite show nothing"
    assert drifted >= 4, "a kernel that never drifts is the training kernel"


@pytest.mark.slow
@pytest.mark.parametrize("case", kernels.CASES, ids=lambda case: case.name)
def test_all_models_texts_and_kernels_stay_within_their_bounds(case: kernels.Case) -> None:
    """Both models, every text and odd input of the benchmark, with compiled kernels."""
    found = list(kernels.compare(case))
    assert len(found) > 150
    outside = [c for c in found if not c.ratio <= 1]
    assert not outside
    assert sum(math.isfinite(c.bound) for c in found) > len(found) / 2


def test_missing_bounds_and_nan_drifts_are_failures() -> None:
    bounds = torch.tensor([1.0, 0.0, 0.0, 2.0, torch.inf, 3.0])
    drift = torch.tensor([0.5, 0.0, 1e-9, torch.nan, 7.0, torch.inf])
    inf = math.inf
    assert kernels.quotients(drift, bounds).tolist() == [0.5, 0.0, inf, inf, 0.0, inf]
