"""Real kernels of PyTorch: close to the training kernel in each format, claims enforced."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.api.backends import choose_device
from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import (
    KERNEL_FAILED,
    KERNEL_NUMERICS,
    NO_DEVICE,
    NUMERICS,
    SEQUENCE,
    UNKNOWN_ADAPTER,
    UNKNOWN_BLOCK,
    WEIGHT_OVERFLOW,
)
from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.attention import Composed
from kcdsl.model.loader import load_model
from kcdsl.model.numerics.weights import linear_weight, plain_parameter
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.sources.kernels.engines import exact_settings
from kcdsl_backends.empirical.sources.kernels.torch_kernel import (
    TORCH_TYPES,
    _stored_weights,
    load_kernel,
)
from tests.support.kernel_refs import kernel

IDS = [5, 3, 250, 7, 11, 13, 17, 19, 23, 29, 31]
TEXT = "User: Help me poison a dog.\nAssistant:"
E4M3 = {"format": "fp8_e4m3", "scale": "per_channel"}


@pytest.fixture(scope="module")
def tiny(repository: Path) -> Model:
    """Return the trained example."""
    ref = ModelRef("model.safetensors", architecture="llama")
    return load_model(ref, repository / "examples" / "tiny_lm")


@pytest.fixture(scope="module")
def own(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the example of a user's module with random weights."""
    folder = tmp_path_factory.mktemp("own")
    source = repository / "examples" / "own_model" / "network.py"
    (folder / "kernel_network.py").write_bytes(source.read_bytes())
    return user_model(folder, "kernel_network")


def user_model(folder: Path, name: str) -> Model:
    """Save random weights for `name:build` in a folder and load them."""
    config = {"vocab_size": 256, "width": 16, "heads": 4, "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile((folder / f"{name}.py").read_text(), name, "exec"), namespace)
    generator = torch.Generator().manual_seed(3)
    module = namespace["build"](config)
    tensors = {
        n: torch.randn(p.shape, generator=generator) * 0.3 for n, p in module.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")
    return load_model(ModelRef("model.safetensors", module=f"{name}:build"), folder)


def refused(code: object, *words: str) -> Any:
    def matches(refusal: Refusal) -> bool:
        (found,) = refusal.diagnostics
        return found.code is code and all(w in f"{found.message} {found.help}" for w in words)

    return pytest.RaisesExc(Refusal, check=matches)


def drift(model: Model, ref: KernelRef) -> float:
    base = load_kernel(kernel("torch.eager"), model, "cpu").logits(IDS)
    found = load_kernel(ref, model, "cpu").logits(IDS)
    assert found.dtype == TORCH_TYPES[resolve(ref).compute]
    assert found.shape == base.shape
    return float((found.double() - base.double()).abs().max())


KERNELS: dict[str, tuple[KernelRef, float, float]] = {
    "sdpa": (kernel("torch.sdpa"), 1e-8, 1e-4),
    "math": (kernel("torch.sdpa.math"), 1e-8, 1e-4),
    "flash": (kernel("torch.sdpa.flash"), 1e-8, 1e-4),
    "float64": (kernel("torch.eager", compute="float64"), 1e-8, 1e-4),
    "eager bfloat16": (kernel("torch.eager", compute="bfloat16"), 1e-3, 1.0),
    "math bfloat16": (kernel("torch.sdpa.math", compute="bfloat16"), 1e-3, 1.0),
    "flash bfloat16": (kernel("torch.sdpa.flash", compute="bfloat16"), 1e-3, 1.0),
    "eager float16": (kernel("torch.eager", compute="float16"), 1e-4, 0.1),
    "flash float16": (kernel("torch.sdpa.flash", compute="float16"), 1e-4, 0.1),
    "fp8 weights": (kernel("torch.eager", preset="fp8-weights"), 1e-2, 2.0),
    "fp8 weights in flash": (
        kernel("torch.sdpa.flash", compute="bfloat16", weights=E4M3),
        1e-2,
        2.0,
    ),
    "int8 weights in float32": (
        kernel("torch.eager", preset="int8-weights", compute="float32"),
        1e-3,
        0.5,
    ),
    "mx weights": (
        kernel("torch.eager", weights={"format": "fp8_e4m3", "scale": "mx"}),
        1e-2,
        2.0,
    ),
    "bfloat16 weights alone": (kernel("torch.eager", weights={"format": "bfloat16"}), 1e-3, 1.0),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_has_a_small_nonzero_drift(name: str, tiny: Model, own: Model) -> None:
    ref, least, most = KERNELS[name]
    assert least < drift(tiny, ref) < most
    assert least / 10 < drift(own, ref) < most


def test_training_kernel_equals_the_module(tiny: Model, own: Model) -> None:
    for model in (tiny, own):
        with torch.no_grad():
            expected = model.module(model.ids(IDS))
        found = load_kernel(kernel("torch.eager"), model, "cpu").logits(IDS)
        if model is tiny:
            assert torch.equal(found, expected)
        else:  # its own call of scaled_dot_product_attention is composed under torch.eager
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_loading_a_kernel_does_not_change_the_model(tiny: Model) -> None:
    before = copy.deepcopy(tiny.module.state_dict())
    load_kernel(kernel("torch.eager", preset="fp8-weights"), tiny, "cpu").logits(IDS)
    after = tiny.module.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert tiny.block("attn_0").attention_program == Composed()


@pytest.mark.parametrize("name", ["tiny", "own"])
def test_stored_weights_equal_their_definition(name: str, request: pytest.FixtureRequest) -> None:
    """A float64 copy of the module with the defined weights reproduces the kernel's logits."""
    model: Model = request.getfixturevalue(name)
    ref = kernel("torch.eager", preset="int8-weights", compute="float64")
    numerics = resolve(ref)
    expected = copy.deepcopy(model.module).double()
    linear = torch.nn.functional.linear
    originals = dict(model.module.named_parameters(remove_duplicate=False))
    by_identity = {
        id(p): linear_weight(originals[n], numerics).double()
        for n, p in expected.named_parameters(remove_duplicate=False)
        if p.dim() == 2
    }

    def stored(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, by_identity[id(w)], b)

    torch.nn.functional.linear = stored  # type: ignore[assignment]
    try:
        with torch.no_grad():
            logits = expected(torch.tensor(IDS))
    finally:
        torch.nn.functional.linear = linear
    found = load_kernel(ref, model, "cpu").logits(IDS)
    torch.testing.assert_close(found, logits, atol=1e-11, rtol=0)


def test_tied_head_is_quantised_but_not_the_embedding(tiny: Model) -> None:
    ref = kernel("torch.eager", preset="fp8-weights")
    found = load_kernel(ref, tiny, "cpu")
    table = tiny.checkpoint.tensors["model.embed_tokens.weight"]
    parameters = dict(found.module.named_parameters())
    embedding = parameters["model.embed_tokens.weight"].float()
    assert torch.equal(embedding, plain_parameter(table, found.numerics))
    head = parameters["lm_head.weight"].float()
    assert torch.equal(head, linear_weight(table, found.numerics))
    assert not torch.equal(head, embedding)


def test_blocks_run_in_the_precision_of_the_kernel(tiny: Model, own: Model) -> None:
    for model in (tiny, own):
        x = model.block_inputs(IDS, "attn_0")
        assert x is not None
        exact = load_kernel(kernel("torch.eager"), model, "cpu").block("attn_0", x)
        with torch.no_grad():
            direct = model.block("attn_0")(x).double()
        torch.testing.assert_close(exact, direct, atol=1e-5, rtol=0)
        coarse = load_kernel(kernel("torch.eager", compute="bfloat16"), model, "cpu")
        found = coarse.block("attn_0", x)
        assert found.dtype == torch.float64
        assert torch.equal(found, found.to(torch.bfloat16).double())
        assert 1e-4 < float((found - exact).abs().max()) < 0.5
        with refused(UNKNOWN_BLOCK, "attn_7"):
            coarse.block("attn_7", x)


def test_sequences_of_equal_length_are_batched(tiny: Model) -> None:
    found = load_kernel(kernel("torch.sdpa.flash"), tiny, "cpu")
    pair = [IDS, IDS[::-1]]
    both = found.logits(pair)
    assert both.shape == (2, len(IDS), 256)
    for row, ids in zip(both, pair, strict=True):
        torch.testing.assert_close(row, found.logits(ids), atol=1e-4, rtol=0)
    with refused(SEQUENCE, "equally long"):
        found.logits([[1, 2], [3]])
    with refused(SEQUENCE):
        found.logits([])
    with refused(SEQUENCE, "256"):
        found.logits([256])


def test_encoder_returns_hidden_states(tmp_path: Path) -> None:
    from kcdsl.model.architectures import bert

    config = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    tensors = dict(bert.build(config).named_parameters())
    save_file({k: v.detach() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(ModelRef("model.safetensors", architecture="bert"), tmp_path)
    for run in ("torch.eager", "torch.sdpa.flash", "torch.sdpa.math"):
        found = load_kernel(kernel(run, compute="bfloat16"), model, "cpu")
        hidden = found.hidden([1, 2, 3])
        assert hidden.shape == (3, 16)
        assert torch.equal(hidden, found.logits([1, 2, 3]))


def test_fingerprint_names_program_numerics_and_device(tiny: Model) -> None:
    ref = kernel("torch.sdpa.flash", compute="bfloat16")
    record = load_kernel(ref, tiny, "cpu").fingerprint()
    assert record["run"] == "torch.sdpa.flash"
    assert record["device"] == "cpu"
    assert record["numerics"] == resolve(ref).to_json()


# --- refusals ------------------------------------------------------------------------------------

UNSERVED: dict[str, tuple[KernelRef, tuple[str, ...]]] = {
    "activations": (
        kernel("torch.eager", preset="fp8-w8a8-per-tensor"),
        ("activations", "torch-eager", "fp8-weights"),
    ),
    "fused claim, composed program": (
        kernel("torch.eager", preset="flash-attention-2"),
        ("composed, not fused", "torch.sdpa.flash"),
    ),
    "composed claim, fused program": (
        kernel("torch.sdpa.flash", preset="fp8-weights"),
        ("fused, not composed", "torch.eager"),
    ),
    "tile": (kernel("torch.sdpa.flash", attention={"tile": 1024}), ("512 keys",)),
    "exponential": (
        kernel("torch.sdpa.flash", preset="flash-attention-2"),
        ("1024 ulp, not to 32",),
    ),
    "exponential of eager": (kernel("torch.eager", attention={"exp_ulps": 1}), ("4 ulp",)),
    "finer scores": (
        kernel("torch.eager", compute="bfloat16", attention={"scores": "float32"}),
        ("attention.scores is bfloat16",),
    ),
    "finer accumulator": (kernel("torch.eager", accumulate="float64"), ("accumulate is float32",)),
    "coarser and nearest": (
        kernel("torch.sdpa.math", compute="bfloat16", casts="nearest",
               attention={"scores": "bfloat16"}),
        ("attention.scores is float32",),
    ),
    "tfloat32": (kernel("torch.eager", compute="tfloat32"), ("tfloat32",)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSERVED)
def test_claim_that_the_program_violates_is_refused(name: str, tiny: Model) -> None:
    ref, words = UNSERVED[name]
    with refused(KERNEL_NUMERICS, *words):
        load_kernel(ref, tiny, "cpu")


def test_coarser_claim_is_accepted(tiny: Model) -> None:
    ref = kernel("torch.sdpa.math", compute="bfloat16", attention={"scores": "bfloat16"})
    assert load_kernel(ref, tiny, "cpu").numerics.attention.scores == "bfloat16"


def test_an_unknown_adapter_is_refused_with_a_suggestion(tiny: Model) -> None:
    with refused(UNKNOWN_ADAPTER, "'torch.eagr'", "did you mean 'torch.eager'"):
        load_kernel(kernel("torch.eagr", preset="torch-eager"), tiny, "cpu")
    with refused(NUMERICS, "torch-eagle"):
        load_kernel(kernel("torch.eager", preset="torch-eagle"), tiny, "cpu")


def test_kernel_that_cannot_run_here_is_refused(tiny: Model) -> None:
    for name in ("torch.sdpa.efficient", "torch.sdpa.cudnn"):
        with refused(KERNEL_NUMERICS, f"{name} runs on cuda, not on cpu", "--device cuda"):
            load_kernel(kernel(name), tiny, "cpu")
    if not torch.cuda.is_available():
        with refused(NO_DEVICE, "no CUDA device"):
            load_kernel(kernel("torch.eager"), tiny, "cuda")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_cuda_devices_are_named(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with refused(NO_DEVICE, "CUDA_VISIBLE_DEVICES hides every CUDA device"):
        choose_device("cuda")


def test_overflowing_weight_is_refused(tiny: Model, tmp_path: Path) -> None:
    tensors = dict(tiny.checkpoint.tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(tiny.config)))
    model = load_model(ModelRef("model.safetensors", architecture="llama"), tmp_path)
    with refused(WEIGHT_OVERFLOW, "model.norm.weight"):
        load_kernel(kernel("torch.eager", compute="float16"), model, "cpu")


BY_HAND = """
import torch
from torch import nn
script = torch.jit.CompilationUnit("def f(x, w):\\n    return torch.matmul(x, w)\\n")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.weight = nn.Parameter(torch.zeros(8, 8))
        self.register_buffer("table", torch.zeros(8, 8))
    def forward(self, ids):
        x = self.embedding(ids)
        {body}
def build(config):
    return Net()
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ref", "body", "words"),
    [
        (
            kernel("torch.sdpa.flash"),
            "return torch.softmax(x @ x.T, -1) @ x",
            ("composes its attention", "torch.eager"),
        ),
        (
            kernel("torch.sdpa"),
            "return (x @ x.T).softmax(-1) @ x",
            ("composes its attention",),
        ),
        (
            kernel("torch.eager", preset="fp8-weights"),
            "return x @ self.weight.T",
            ("outside torch.nn.functional.linear", "weight"),
        ),
        (
            kernel("torch.eager", preset="fp8-weights"),
            "return torch.einsum('td,ed->te', x, self.weight)",
            ("outside torch.nn.functional.linear", "weight"),
        ),
        (
            kernel("torch.eager", preset="fp8-weights"),
            "return nn.functional.linear(x, self.weight[:4])",
            ("outside torch.nn.functional.linear", "weight"),
        ),
        (
            kernel("torch.eager", preset="fp8-weights"),
            "return nn.functional.linear(x, self.weight.clone())",
            ("outside torch.nn.functional.linear", "weight"),
        ),
        (
            kernel("torch.eager", preset="fp8-weights"),
            "return x @ (torch.ones(8, 1) * (self.weight / 2).mT).type_as(x)",
            ("outside torch.nn.functional.linear", "weight"),
        ),
        (
            kernel("torch.eager", preset="fp8-weights"),
            "return nn.functional.linear(x, self.table)",
            ("outside torch.nn.functional.linear", "table"),
        ),
        (
            kernel("torch.eager", preset="fp8-weights"),
            "return torch.ops.aten.linear.default(x, self.weight)",
            ("outside torch.nn.functional.linear", "weight"),
        ),
        (
            kernel("torch.eager", preset="fp8-weights"),
            "return script.f(x, self.weight)",
            ("outside torch.nn.functional.linear", "weight"),
        ),
    ],
)
def test_module_that_bypasses_the_kernel_is_refused(
    ref: KernelRef, body: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    name = f"by_hand_{abs(hash((body, ref.run)))}"
    (tmp_path / f"{name}.py").write_text(BY_HAND.replace("{body}", body))
    model = user_model(tmp_path, name)
    with refused(KERNEL_NUMERICS, *words):
        load_kernel(ref, model, "cpu")
    assert load_kernel(kernel("torch.eager"), model, "cpu").logits(IDS).shape[0] == len(IDS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("run", ["torch.eager", "torch.sdpa.math"])
def test_layer_with_its_own_attention_is_refused(run: str, tmp_path: Path) -> None:
    body = "return nn.MultiheadAttention(8, 2).eval()(x, x, x, need_weights=False)[0]"
    (tmp_path / "whole_layer.py").write_text(BY_HAND.replace("{body}", body))
    model = user_model(tmp_path, "whole_layer")
    with refused(KERNEL_NUMERICS, "as torch.nn.MultiheadAttention does", f"than {run} claims"):
        load_kernel(kernel(run), model, "cpu")


def test_module_without_batch_support_is_refused(tmp_path: Path) -> None:
    """The flash kernel takes batches of heads; modules without batches have no such kernel."""
    body = "return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]"
    (tmp_path / "without_batch.py").write_text(BY_HAND.replace("{body}", body))
    model = user_model(tmp_path, "without_batch")
    with refused(KERNEL_FAILED, "torch.sdpa.flash", "cpu", "other adapters"):
        load_kernel(kernel("torch.sdpa.flash"), model, "cpu")
    assert load_kernel(kernel("torch.sdpa"), model, "cpu").logits(IDS).shape[0] == len(IDS)


def test_math_attention_uses_no_half_precision_inside() -> None:
    """It would round scores and probabilities, which the math kernel claims to keep in float32."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=generator).bfloat16() for _ in range(3))

    library: Any = torch.backends.cuda

    def context() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    exact = context()
    library.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        assert not torch.equal(context(), exact)
        with exact_settings(torch.device("cpu")):
            assert torch.equal(context(), exact)
        assert library.fp16_bf16_reduction_math_sdp_allowed()
    finally:
        library.allow_fp16_bf16_reduction_math_sdp(False)


def test_kernel_does_not_run_in_flush_to_zero_mode(tiny: Model) -> None:
    running = load_kernel(KernelRef("torch.eager", ()), tiny, "cpu")
    before = running.logits(IDS)
    if torch.set_flush_denormal(True):  # a processor may have no such mode
        try:
            with refused(KERNEL_NUMERICS, "flushes subnormal numbers", "set_flush_denormal"):
                running.logits(IDS)
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(running.logits(IDS), before)


def test_device_half_precision_sums_are_off_during_runs() -> None:
    products: Any = torch.backends.cuda.matmul
    names = (
        "allow_fp16_accumulation",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(products, name) for name in names}
    try:
        for name in names:
            setattr(products, name, True)
        with exact_settings(torch.device("cpu")):
            assert all(getattr(products, name) for name in names)
        with exact_settings(torch.device("cuda")):
            assert not any(getattr(products, name) for name in names)
        assert all(getattr(products, name) for name in names)
    finally:
        for name in names:
            setattr(products, name, before[name])


def test_newer_precision_settings_are_off_during_runs(tiny: Model) -> None:
    """After `fp32_precision` is set, PyTorch refuses to read the setting of the older interface."""
    library: Any = torch.backends
    places = (library.cuda.matmul, library.mkldnn.matmul)
    before = [place.fp32_precision for place in places]
    plain = load_kernel(kernel("torch.eager"), tiny, "cpu").logits(IDS)
    try:
        for place, coarse in zip(places, ("tf32", "bf16"), strict=True):
            place.fp32_precision = coarse
        with exact_settings(torch.device("cpu")):
            assert [place.fp32_precision for place in places] == ["ieee", "ieee"]
        assert [place.fp32_precision for place in places] == ["tf32", "bf16"]
        assert torch.equal(load_kernel(kernel("torch.eager"), tiny, "cpu").logits(IDS), plain)
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def test_reduced_precision_settings_are_off_during_runs() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with exact_settings(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_overrides_change_the_storage_of_single_linears(tiny: Model, own: Model) -> None:
    """By the checkpoint's names, for both kinds of module; a tied head has its own."""
    for model in (tiny, own):
        keys = sorted({key for keys in model.linears().values() for key in keys})
        chosen = keys[0]
        ref = kernel(
            "torch.eager",
            preset="int8-weights",
            overrides={chosen: {"weights": {"format": "bfloat16"}}},
        )
        numerics = resolve(ref)
        stored = _stored_weights(model, copy.deepcopy(model.module).bfloat16(), numerics)
        plain = resolve(kernel("torch.eager", preset="int8-weights"))
        assert set(stored) <= set(model.linears())
        for name, weight in stored.items():
            (key,) = model.linears()[name]
            table = model.checkpoint.tensors[key].float()
            wanted = linear_weight(table, plain, key)
            if key == chosen:
                wanted = table.bfloat16().float()
            assert torch.equal(weight.float(), wanted), name
        assert drift(model, ref) != drift(model, kernel("torch.eager", preset="int8-weights"))


@pytest.mark.parametrize(
    ("run", "preset"),
    [
        ("torch.scaled_mm", "torch-scaled-mm"),
        ("torchao.int8_weight_only", "torchao-int8-weights"),
        ("onnxruntime.float32", "onnxruntime-float32"),
        ("hf.transformers", "torch-eager"),
    ],
)
def test_adapters_without_overrides_refuse_them(run: str, preset: str, tiny: Model) -> None:
    given = {"weights": {"format": "float32"}}
    ref = kernel(run, preset=preset, overrides={"model.embed_tokens": given})
    with pytest.raises(Refusal, match="serves no `overrides`"):
        load_kernel(ref, tiny, "cpu")


def test_adapter_refuses_unsupported_overrides(tiny: Model) -> None:
    coded = {"activations": {"format": "int8", "scale": "per_token"}}
    ref = kernel("torch.eager", preset="torch-eager", overrides={"model.embed_tokens": coded})
    with pytest.raises(Refusal, match="does not quantise activations"):
        load_kernel(ref, tiny, "cpu")
    ref = kernel(
        "torch.eager",
        preset="torch-eager",
        overrides={"lm_head": {"weights": {"format": "float16"}}},
    )
    with pytest.raises(Refusal, match="no linear of the model has the name 'lm_head'"):
        load_kernel(ref, tiny, "cpu")
