"""Kernels of compilers, quantisers and other runtimes: refusals and enforced claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import KERNEL_FAILED, KERNEL_NUMERICS, NO_PACKAGE
from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.adapters import ADAPTERS, refuse_unserved
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.model.numerics.weights import linear_weight
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.sources.kernels import engines
from kcdsl_backends.empirical.sources.kernels.engines import quantise_linear
from kcdsl_backends.empirical.sources.kernels.onnx_runtime import Sessions
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel
from tests.support.kernel_refs import kernel

IDS = [5, 3, 250, 7, 11]
E4M3 = {"format": "fp8_e4m3", "scale": "per_channel"}
ROWS = {"format": "int8_full", "scale": "per_channel"}
LOADED_QUICKLY = (
    "torch.scaled_mm",
    "torchao.float8_weight_only",
    "torchao.int8_weight_only",
    "torchao.int8_dynamic",
    "torchao.int4_weight_only",
)

CLAIMING = [run for run, adapter in ADAPTERS.items() if adapter.presets]


@pytest.fixture(scope="module")
def tiny(repository: Path) -> Model:
    """Return the trained example."""
    ref = ModelRef("model.safetensors", architecture="llama")
    return load_model(ref, repository / "examples" / "tiny_lm")


def refused(code: object, *words: str) -> Any:
    def matches(refusal: Refusal) -> bool:
        (found,) = refusal.diagnostics
        return found.code is code and all(w in f"{found.message} {found.help}" for w in words)

    return pytest.RaisesExc(Refusal, check=matches)


@pytest.mark.parametrize("run", CLAIMING)
def test_adapter_serves_its_default_and_listed_presets(run: str) -> None:
    adapter = ADAPTERS[run]
    for preset in adapter.presets:
        refuse_unserved(run, adapter, resolve({"preset": preset}), adapter.devices[0])


@pytest.mark.parametrize("run", CLAIMING)
def test_free_casts_admit_kernels_that_round_to_nearest(run: str) -> None:
    """Casts toward zero do not: no run of a library would be covered by them."""
    adapter = ADAPTERS[run]
    if adapter.activations[0].format != "none":
        return
    given, device = {"preset": adapter.presets[0]}, adapter.devices[0]
    refuse_unserved(run, adapter, resolve({**given, "casts": "any_direction"}), device)
    for casts in ("toward_zero", "any_toward_zero"):
        with refused(KERNEL_NUMERICS, "it rounds to nearest", f"`{casts}`"):
            refuse_unserved(run, adapter, resolve({**given, "casts": casts}), device)


UNSERVED: dict[str, tuple[KernelRef, tuple[str, ...]]] = {
    "weights that are cut off": (
        kernel("torch.eager", compute="bfloat16", weights={"rounding": "toward_zero"}),
        ("it rounds weights to nearest, not toward_zero",),
    ),
    "a compiler places roundings": (kernel("torch.compile", casts="nearest"), ("`any`",)),
    "a compiler may fuse": (
        kernel("torch.compile", preset="torch-eager"),
        ("its attention is fused",),
    ),
    "scores of a compiler": (
        kernel("torch.compile", compute="bfloat16", attention={"scores": "float32"}),
        ("attention.scores is bfloat16",),
    ),
    "codes, not bytes": (
        kernel("torchao.int8_weight_only", preset="int8-weights", compute="float32"),
        ("int8_full per_channel", "not int8"),
    ),
    "bfloat16 bytes": (
        kernel("torchao.int8_dynamic", compute="bfloat16"),
        ("does not compute in bfloat16",),
    ),
    "no activations": (
        kernel("torch.scaled_mm", preset="fp8-weights"),
        ("it quantises activations", "fp8_e4m3 per_token"),
    ),
    "other activations": (
        kernel("onnxruntime.dynamic_int8", activations={"format": "uint8", "scale": "per_token"}),
        ("uint8 per_tensor, not uint8 per_token",),
    ),
    "which adapter would": (
        kernel("torch.eager", preset="onnxruntime-int8"),
        ("onnxruntime.dynamic_int8 does",),
    ),
    "finer sigmoid": (kernel("onnxruntime.float32", sigmoid="relative"), ("sigmoid",)),
    "quantised claim of a float runtime": (
        kernel("onnxruntime.float32", weights=E4M3),
        ("its weights are float32 none",),
    ),
    "scales that do not go together": (
        kernel(
            "torch.scaled_mm",
            weights=E4M3,
            activations={"format": "fp8_e4m3", "scale": "per_tensor"},
        ),
        ("scales of rows on both sides",),
    ),
    "another result": (
        kernel("torch.eager", compute="bfloat16", results={"linear": "float32"}),
        ("results.linear is bfloat16, not float32",),
    ),
    "tensor cores on a CPU": (
        kernel("torch.sdpa.flash", compute="bfloat16", tensor_core="hopper_16"),
        ("no tensor core",),
    ),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_violated_claim_is_refused(name: str, tiny: Model) -> None:
    ref, words = UNSERVED[name]
    with refused(KERNEL_NUMERICS, *words):
        load_kernel(ref, tiny, "cpu")


@pytest.mark.parametrize("run", LOADED_QUICKLY)
def test_quantised_kernels_run_the_model(run: str, tiny: Model) -> None:
    exact = load_kernel(kernel("torch.eager"), tiny, "cpu").logits(IDS)
    found = load_kernel(kernel(run), tiny, "cpu")
    drift = (found.logits(IDS) - exact).abs().max()
    assert 1e-3 < float(drift) < 2
    assert found.logits([IDS, IDS[::-1]]).shape == (2, len(IDS), 256)
    assert found.hidden(IDS).shape == (len(IDS), 96)


@pytest.mark.parametrize("run", LOADED_QUICKLY)
def test_digest_covers_the_tensors_of_a_library(run: str, tiny: Model) -> None:
    first, second = (load_kernel(kernel(run), tiny, "cpu") for _ in range(2))
    assert first.weights_digest() == second.weights_digest()
    plain = load_kernel(kernel("torch.eager"), tiny, "cpu")
    assert first.weights_digest() != plain.weights_digest()
    scale = next(
        getattr(p, "scale", p)
        for n, p in second.module.named_parameters()
        if n.endswith("scale") or hasattr(p, "qdata")
    )
    with torch.no_grad():
        scale.mul_(2)
    assert first.weights_digest() != second.weights_digest()


def test_sequences_of_a_batch_do_not_share_a_scale(tiny: Model) -> None:
    found = load_kernel(kernel("torch.scaled_mm", preset="fp8-w8a8-per-tensor"), tiny, "cpu")
    x = torch.randn(2, 4, 96, generator=torch.Generator().manual_seed(1))
    x[1] *= 1e4
    both = found.block("mlp_0", x)
    assert torch.equal(both[0], found.block("mlp_0", x[0]))


def test_missing_library_is_named(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with refused(NO_PACKAGE, "torchao", 'pip install "kcdsl[torchao]"'):
        load_kernel(kernel("torchao.int8_dynamic"), tiny, "cpu")
    with refused(NO_PACKAGE, "onnxruntime and onnxscript", "kcdsl[onnxruntime]"):
        load_kernel(kernel("onnxruntime.float32"), tiny, "cpu")
    load_kernel(kernel("torch.scaled_mm"), tiny, "cpu")


def test_library_that_stores_another_weight_is_refused(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a release quantised differently: one element is off in its last place."""
    from kcdsl_backends.empirical.sources.kernels import torch_kernel as kernels
    from kcdsl_backends.empirical.sources.kernels.engines import quantise_linear

    def other(linear: torch.nn.Linear, original: torch.Tensor, numerics: Any) -> None:
        moved = original.clone()
        moved[0, 0] += float(original.abs().amax())
        quantise_linear(linear, moved, numerics)

    monkeypatch.setattr(kernels, "quantise_linear", other)
    with refused(KERNEL_NUMERICS, "stores another weight for model.layers.0.self_attn.q_proj"):
        load_kernel(kernel("torchao.int8_weight_only"), tiny, "cpu")


@pytest.fixture(autouse=True)
def signed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load torchao's dynamic bytes on every processor; how they are summed is tested elsewhere."""
    monkeypatch.setattr(
        "kcdsl_backends.empirical.sources.kernels.torch_kernel.exact_bytes", lambda device: True
    )


def test_signed_bytes_are_refused_where_sums_saturate(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kcdsl_backends.empirical.sources.kernels.torch_kernel.exact_bytes", lambda device: False
    )
    with refused(KERNEL_NUMERICS, "16 bits on this processor", "int8_weight_only"):
        load_kernel(kernel("torchao.int8_dynamic"), tiny, "cpu")
    load_kernel(kernel("torchao.int8_weight_only"), tiny, "cpu")


@pytest.mark.full
def test_probe_detects_saturation_with_older_instructions() -> None:
    """oneDNN without VNNI: the probe reports inexact sums of bytes, and only there."""
    program = (
        "import torch; from kcdsl_backends.empirical.sources.kernels.engines import exact_bytes;"
        "a = torch.full((64, 1024), 127, dtype=torch.int8);"
        "print(exact_bytes('cpu'), bool((torch._int_mm(a, a.t().contiguous()) == 1024 * 127**2)"
        ".all()))"
    )
    for held in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"ONEDNN_MAX_CPU_ISA": "SSE41"}):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **held},
            capture_output=True,
            text=True,
            check=True,
        )
        probed, exact = ran.stdout.split()
        assert probed == exact


def on_a_processor(monkeypatch: pytest.MonkeyPatch, *, saturating: bool) -> None:
    from kcdsl_backends.empirical.sources.kernels import onnx_runtime

    monkeypatch.setattr(onnx_runtime, "saturates", lambda: saturating)


@pytest.mark.full
def test_exact_byte_sums_are_refused_where_they_saturate(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without VNNI adds pairs of products in 16 bits, which needs its own claim."""
    on_a_processor(monkeypatch, saturating=True)
    x = torch.randn(5, 96)
    with refused(KERNEL_NUMERICS, "sums products of 8-bit numbers in 16 bits", "int8-pairs"):
        load_kernel(kernel("onnxruntime.dynamic_int8"), tiny, "cpu").block("head", x)
    paired = kernel("onnxruntime.dynamic_int8", preset="onnxruntime-int8-pairs")
    found = load_kernel(paired, tiny, "cpu").block("head", x)
    assert bool(torch.isfinite(found).all())


@pytest.mark.full
def test_saturating_claim_admits_exact_sums(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_processor(monkeypatch, saturating=False)
    x = torch.randn(5, 96)
    found = [
        load_kernel(kernel("onnxruntime.dynamic_int8", preset=preset), tiny, "cpu").block("head", x)
        for preset in ("onnxruntime-int8", "onnxruntime-int8-pairs")
    ]
    assert torch.equal(*found)


@pytest.mark.full
def test_session_with_another_weight_is_refused(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_processor(monkeypatch, saturating=False)
    numerics = resolve({"preset": "onnxruntime-int8"})
    part = tiny.block("head")
    expected = torch.zeros(256, 96)
    sessions = Sessions("onnxruntime.dynamic_int8", numerics, (expected,), 256)
    with refused(KERNEL_NUMERICS, "stores another weight for a product of head"):
        sessions("head", part)(torch.randn(5, 96))


def test_zero_row_that_torchao_cannot_quantise_is_refused(tiny: Model) -> None:
    import copy
    from dataclasses import replace

    module = copy.deepcopy(tiny.module)
    with torch.no_grad():
        module.get_parameter("model.layers.1.mlp.up_proj.weight")[3] = 0
    with refused(KERNEL_NUMERICS, "model.layers.1.mlp.up_proj", "zeros"):
        load_kernel(kernel("torchao.float8_weight_only"), replace(tiny, module=module), "cpu")


def test_user_module_is_not_quantised_in_parts(tiny: Model) -> None:
    from dataclasses import replace

    own = replace(tiny, built_in=False)
    for run in (*LOADED_QUICKLY, "onnxruntime.float32", "onnxruntime.dynamic_int8"):
        with refused(KERNEL_NUMERICS, "built-in architectures", "torch.compile"):
            load_kernel(kernel(run), own, "cpu")
    with refused(KERNEL_NUMERICS, "built-in architectures"):
        load_kernel(kernel("torch.compile", weights=E4M3), own, "cpu")


def test_fingerprint_names_the_library(tiny: Model) -> None:
    from importlib.metadata import version

    record = load_kernel(kernel("torchao.int8_dynamic"), tiny, "cpu").fingerprint()
    assert record["software"]["torchao"]["version"] == version("torchao")
    eager = load_kernel(kernel("torch.eager"), tiny, "cpu").fingerprint()
    assert "torchao" not in eager["software"]


def test_int4_groups_must_divide_the_width(tiny: Model) -> None:
    groups = {"format": "int4_full", "scale": "group_128"}
    with refused(KERNEL_NUMERICS, "groups of 128"):
        load_kernel(kernel("torchao.int4_weight_only", weights=groups), tiny, "cpu")


def test_int4_group_weights_follow_the_numerics() -> None:
    """Each weight stored by torchao is compared with the numerics; here with plain loops too."""
    numerics = resolve(
        {"preset": "torchao-int4-weights", "weights": {"format": "int4_full", "scale": "group_128"}}
    )
    linear = torch.nn.Linear(256, 6)
    w = linear.weight.detach().clone()
    quantise_linear(linear, w, numerics)
    held = getattr(linear.weight, "dequantize")()  # noqa: B009
    for row in range(6):
        for start in (0, 128):
            part = w[row, start : start + 128]
            step = part.abs().max() / 7.5
            codes = (part * (1 / step)).round().clamp(-8, 7)
            assert torch.equal(held[row, start : start + 128], codes * step)
    assert torch.equal(held, linear_weight(w, numerics))


def decoder(folder: Path, **config: Any) -> Model:
    """Return a small random decoder."""
    from tests.support.small_models import DECODER, write_model

    write_model(folder, config={**DECODER, **config})
    ref = ModelRef("model.safetensors", architecture="llama", config="config.json")
    return load_model(ref, folder)


@pytest.mark.full
@pytest.mark.parametrize("eps", [1e-8, 1e-12, 1e-5])
def test_exported_norm_keeps_its_epsilon(tmp_path: Path, eps: float) -> None:
    """Compare with the model's norm on rows of zeros, tiny rows and huge ones."""
    model = decoder(tmp_path, rms_norm_eps=eps)
    sizes = [0.0, 1e-40, 1e-20, 1e-8, 1e-5, 1e-3, 1.0, 1e8]
    x = torch.randn(len(sizes), 16, generator=torch.Generator().manual_seed(1))
    x = x * torch.tensor(sizes)[:, None]
    ran, wanted = (
        load_kernel(kernel(run), model, "cpu").block("norm_0", x)
        for run in ("onnxruntime.float32", "torch.eager")
    )
    assert torch.isfinite(ran).all()
    torch.testing.assert_close(ran, wanted, rtol=1e-5, atol=1e-30)


@pytest.mark.full
def test_exported_program_that_differs_from_the_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some exporters drop an epsilon; here another program is exported."""
    from kcdsl_backends.empirical.sources.kernels import onnx_runtime

    model, export = decoder(tmp_path, rms_norm_eps=1e-8), onnx_runtime._export

    def other(part: Any, example: torch.Tensor, path: Path) -> None:
        part.eps, before = 0.0, part.eps
        export(part, example, path)
        part.eps = before

    monkeypatch.setattr(onnx_runtime, "_export", other)
    running = load_kernel(kernel("onnxruntime.float32"), model, "cpu")
    with refused(KERNEL_NUMERICS, "norm_0", "something else than the model"):
        running.block("norm_0", torch.randn(3, 16))


@pytest.mark.parametrize("run", LOADED_QUICKLY)
def test_linear_that_torchao_does_not_support_is_refused(tmp_path: Path, run: str) -> None:
    if not run.startswith("torchao"):
        load_kernel(kernel(run), decoder(tmp_path, intermediate_size=1), "cpu")
        return
    with refused(KERNEL_FAILED, "torchao cannot quantise model.layers.0.mlp.down_proj [16, 1]"):
        load_kernel(kernel(run), decoder(tmp_path, intermediate_size=1), "cpu")
