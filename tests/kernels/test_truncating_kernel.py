"""A kernel that truncates by a bit mask satisfies the bounds of casts toward zero, not others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bench import kernels, kernels_inputs
from kcdsl.model.numerics.weights import cut_to
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory, certified_block_drift
from tests.support.truncating import cut_off, run

CUT: dict[str, Any] = {"format": "bfloat16", "rounding": "toward_zero"}
BFLOAT: dict[str, Any] = {"preset": "torch-eager", "compute": "bfloat16"}
BLOCKS = {"MiniLM": ("attn_0", "mlp_0"), "tiny LM": ("attn_0", "mlp_1")}
COUNTS = {"MiniLM": 24, "tiny LM": 48}


def shop_of(name: str, **numerics: Any) -> ProblemFactory:
    model = kernels_inputs.loaded(name)
    train, infer = resolve({"preset": "torch-eager"}), resolve({**BFLOAT, **numerics})
    return ProblemFactory(model, train, infer, torch.device("cpu"))


def graph_of(factory: ProblemFactory, block: str, x: torch.Tensor) -> Any:
    return factory.problem(block, tuple(range(len(x)))).graph


def inputs(name: str, block: str, count: int) -> list[torch.Tensor]:
    """Return block inputs for prefixes of texts and for random tokens."""
    texts = [text[: 2 + i % 7] for i, text in enumerate(kernels_inputs.texts(name))]
    tokens = [*texts[: count // 2], *kernels_inputs.random_tokens(name, 1.0)]
    found = [shop_of(name).model.block_inputs(some, block) for some in tokens[:count]]
    return [x for x in found if x is not None]


def test_bit_mask_equals_the_cast_toward_zero() -> None:
    bits = torch.randint(
        -(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(4)
    )
    x = bits.to(torch.int32).view(torch.float32)
    x = x[torch.isfinite(x)]
    assert torch.equal(cut_off(x).view(torch.int32), cut_to(x, "bfloat16").view(torch.int32))


@pytest.mark.full
@pytest.mark.parametrize("weights", [False, True], ids=["rounded weights", "masked weights"])
@pytest.mark.parametrize("name", COUNTS)
def test_truncating_kernel_stays_within_its_bounds(name: str, weights: bool) -> None:
    """Interval bounds of every specification that admits it, affine bounds of the exact one."""
    stored = {"weights": CUT} if weights else {}
    exact = shop_of(name, casts="toward_zero", **stored)
    coarse = [shop_of(name, casts=c, **stored) for c in ("any_toward_zero", "any_direction")]
    started, quotients = kernels.eager(name), []
    for block in BLOCKS[name]:
        for turn, x in enumerate(inputs(name, block, COUNTS[name] // 2)):
            tensors = exact.model.checkpoint.tensors
            output = run(graph_of(exact, block, x), tensors, x, weights=weights)
            drift = (output - started.block(block, x)).abs().double()
            bounds = kernels.bound(exact, block, x, affine=turn % 4 == 0)
            assert math.isfinite(float(bounds.max()))
            assert float(kernels.quotients(drift, bounds).max()) <= 1, (block, len(x))
            quotients.append(float(drift.max() / bounds.max()))
            for factory in coarse if turn % 4 == 0 else ():
                found = certified_block_drift(
                    factory.model, block, x, factory.train, factory.infer, factory
                )
                wide = torch.from_numpy(found.drift_bound)
                assert float(kernels.quotients(drift, wide).max()) <= 1, (block, len(x))
                assert bool((wide >= bounds).all())
    assert max(quotients) > 0.7, "bounds that are far away show nothing"


@pytest.mark.full
def test_truncating_kernel_exceeds_the_bound_of_nearest() -> None:
    """Truncated runs lie outside what `nearest` admits, so the two records differ."""
    factory, outside = shop_of("tiny LM", casts="nearest"), 0
    for x in inputs("tiny LM", "mlp_1", 8):
        graph = graph_of(factory, "mlp_1", x)
        output = run(graph, factory.model.checkpoint.tensors, x, weights=False)
        drift = (output - kernels.eager("tiny LM").block("mlp_1", x)).abs().double()
        outside += not bool((drift <= kernels.bound(factory, "mlp_1", x, affine=False)).all())
    assert outside == 8
