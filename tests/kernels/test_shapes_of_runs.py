"""Batches, padding, lengths around tiles, threads: runs satisfy the bound of one sequence."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bench import kernels, kernels_inputs
from bench.kernels import Case
from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.files import Artefacts
from kcdsl.model.loader import load_model
from kcdsl_backends.certifier.statements.problems import certified_block_drift
from kcdsl_backends.empirical.sources.kernels.engines import exact_settings
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel, load_kernel

NEAREST = {"casts": "nearest"}
ATTENTION = [
    Case(run, {"compute": compute, **NEAREST})
    for run in ("torch.eager", "torch.sdpa.math", "torch.sdpa.flash")
    for compute in ("float32", "bfloat16", "float16")
]
FREE = Case("torch.scaled_mm", {"preset": "fp8-w8a8-per-tensor"})
"""Numerics with scores in bfloat16 and free casts."""
BY_SEQUENCE = [
    Case("torch.sdpa.flash", {"compute": "bfloat16", **NEAREST}),
    Case("torch.scaled_mm"),
    FREE,
    *kernels.SIGNED_BYTES,
    Case("torchao.int4_weight_only"),
    Case("onnxruntime.dynamic_int8", kernels.BYTE_SUMS[0]),
]


def states(model: str, block: str, count: int, length: int) -> list[Tensor]:
    """Return block inputs for the first tokens of several texts, with different magnitudes."""
    found = []
    longer = [t for t in kernels_inputs.texts(model) if len(t) >= length]
    for i, tokens in enumerate(longer[:count]):
        x = kernels_inputs.loaded(model).block_inputs(tokens[:length], block)
        assert x is not None
        found.append(x * 10.0**i)
    assert len(found) == count
    return found


def inside(case: Case, model: str, block: str, x: Tensor, out: Tensor, affine: bool = True) -> None:
    """Assert that the drift of a run on x from the training run is within its certified bound."""
    stays_inside(case, kernels_inputs.loaded(model), block, x, out, kernels.eager(model), affine)


def stays_inside(
    case: Case, model: Model, block: str, x: Tensor, out: Tensor, train: TorchKernel, affine: bool
) -> None:
    factory = kernels.problem_factory(model, case)
    drift = (out - train.block(block, x)).abs()
    bounds = kernels.bound(factory, block, x, affine)
    assert bool(torch.isfinite(bounds).any())
    assert float(kernels.quotients(drift, bounds).max()) <= 1


@pytest.mark.full
@pytest.mark.parametrize("case", BY_SEQUENCE, ids=lambda c: c.name)
def test_batched_sequences_stay_within_their_single_bounds(case: Case) -> None:
    """A scale of the tensor serves as one of each sequence, however large the others are."""
    running = load_kernel(case.ref(), kernels_inputs.loaded("tiny LM"), "cpu")
    share = 0.01 if case is FREE else 1.0  # large scores have no bound there, as asserted below
    batch = [x * share for x in states("tiny LM", "attn_0", 3, 7)]
    for x, out in zip(batch, running.block("attn_0", torch.stack(batch)), strict=True):
        inside(case, "tiny LM", "attn_0", x, out)


def test_large_scores_with_free_casts_have_no_bound() -> None:
    """Free casts may round scores to bfloat16 in the sum of a row and not in its numerators.

    Exp of the difference has no bound where scores are large, even without a batch.
    """
    model = kernels_inputs.loaded("tiny LM")
    factory = kernels.problem_factory(model, FREE)
    small, _, large = states("tiny LM", "attn_0", 3, 7)
    told = certified_block_drift(model, "attn_0", small, factory.train, factory.infer, factory)
    assert told.reason is None
    assert bool(torch.isfinite(torch.from_numpy(told.drift_bound)).all())
    refused = certified_block_drift(model, "attn_0", large, factory.train, factory.infer, factory)
    assert refused.reason == "softmax:0: a bound is not finite"


def padded(running: TorchKernel, x: Tensor, more: int, fill: float) -> Tensor:
    """Run an attention on x with rows of padding behind it; return the original rows."""
    part = running.module.get_submodule("encoder.layer.0.attention")
    whole = torch.cat([x, torch.full((more, x.shape[1]), fill)])
    keys = torch.arange(len(whole)) < len(x)
    entering = whole.to(next(running.module.parameters()).dtype)
    with torch.no_grad(), exact_settings(torch.device("cpu")):
        out: Tensor = part(entering[None], keys[None])
    return out[0, : len(x)].double()


@pytest.mark.full
@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.name)
def test_padded_runs_stay_within_the_bound(case: Case) -> None:
    """Masked columns add exact zeros: the bound of the sequence alone holds."""
    running = load_kernel(case.ref(), kernels_inputs.loaded("MiniLM"), "cpu")
    (x,) = states("MiniLM", "attn_0", 1, 6)
    for more, fill in ((1, 0.0), (35, 1.0), (5, -300.0)):
        out = padded(running, x, more, fill)
        inside(case, "MiniLM", "attn_0", x, out, affine=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("length", [1, 2, 31, 33, 65, 257])
@pytest.mark.parametrize("case", ATTENTION[6:8], ids=lambda c: c.name)
def test_lengths_around_tile_sizes_stay_within_the_bound(case: Case, length: int) -> None:
    x = torch.randn(length, 384, generator=torch.Generator().manual_seed(length))
    running = load_kernel(case.ref(), kernels_inputs.loaded("MiniLM"), "cpu")
    out = running.block("attn_0", x)
    inside(case, "MiniLM", "attn_0", x, out, affine=False)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the tiny LM with RoPE tables for 2,048 positions."""
    folder = kernels_inputs.ROOT / "examples" / "tiny_lm"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    path = tmp_path_factory.mktemp("longer") / "config.json"
    path.write_text(json.dumps(config | {"max_position_embeddings": 2048}), encoding="utf-8")
    ref = ModelRef("model.safetensors", architecture="llama", tokenizer="bytes", config=str(path))
    files = Artefacts.of(folder)
    files.allow(path)
    return load_model(ref, files)


@pytest.mark.full
@pytest.mark.parametrize("case", ATTENTION[6:], ids=lambda c: c.name)
def test_more_keys_than_one_tile_stay_within_the_bound(case: Case, longer: Model) -> None:
    """The CPU flash kernel takes 512 keys per tile, so it rescales here."""
    with_rows(600, case, longer)


@pytest.mark.slow
@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.name)
def test_more_keys_than_two_tiles_stay_within_the_bound(case: Case, longer: Model) -> None:
    with_rows(1030, case, longer)


def with_rows(count: int, case: Case, model: Model) -> None:
    x = torch.randn(count, 96, generator=torch.Generator().manual_seed(1))
    running, train = (load_kernel(c.ref(), model, "cpu") for c in (case, kernels.TRAIN))
    stays_inside(case, model, "attn_0", x, running.block("attn_0", x), train, affine=False)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Give PyTorch one thread, then two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


THREADED = [
    Case("torch.sdpa.flash", {"compute": "float32", **NEAREST}),
    Case("torch.sdpa.flash", {"compute": "bfloat16", **NEAREST}),
    Case("torch.scaled_mm", {"preset": "fp8-w8a8-per-channel"}),
    Case("onnxruntime.float32"),
]


@pytest.mark.full
@pytest.mark.parametrize("case", THREADED, ids=lambda c: c.name)
def test_drift_is_within_the_bound_for_any_thread_count(case: Case, threads: int) -> None:
    running = load_kernel(case.ref(), kernels_inputs.loaded("tiny LM"), "cpu")
    (x,) = states("tiny LM", "attn_0", 1, 40)
    assert torch.get_num_threads() == threads
    inside(case, "tiny LM", "attn_0", x, running.block("attn_0", x))
