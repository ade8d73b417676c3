"""ONNX files run unchanged: the whole program, its blocks, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import CHANGED_MEANWHILE, KERNEL_NUMERICS, NUMERICS
from kcdsl.ir.terms import ONNX, KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.model.onnx.files import read_onnx
from kcdsl.model.onnx.quantisation import without_quantisers
from kcdsl_backends.empirical.sources.kernels.onnx_runtime import saturates
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel, load_kernel
from tests.support.onnx_files import (
    BLOCKS,
    QUANTISERS,
    model_of,
    quantised_mlp,
    save_decoder,
    unoptimised,
)

BESIDE = "model.onnx.data"
TOKENS = [3, 1, 4, 1, 5]
MLP = (("mlp_0", "embedded", "layer"),)
DECODER = tuple((name, *ends) for name, ends in BLOCKS.items())


def reference(section: dict[str, Any], run: str = "onnxruntime.file") -> KernelRef:
    def pairs(value: Any) -> Any:
        if not isinstance(value, dict):
            return tuple(value) if isinstance(value, list) else value
        return tuple(sorted((k, pairs(v)) for k, v in value.items()))

    stated = {**section, "preset": "onnxruntime-float32", "casts": "any"}
    return KernelRef(run, pairs(stated))


def loaded(path: Path, blocks: tuple[tuple[str, str, str], ...]) -> Model:
    return load_model(ModelRef(path.name, ONNX, blocks=blocks), path.parent)


def kernel_of(path: Path, blocks: tuple[tuple[str, str, str], ...]) -> TorchKernel:
    section = without_quantisers(read_onnx(path))[1].section()
    return load_kernel(reference(section), loaded(path, blocks), "cpu")


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("stored", ["codes", "numbers"])
@pytest.mark.parametrize("form", QUANTISERS)
def test_file_runs_with_its_quantisers(tmp_path: Path, form: str, stored: str) -> None:
    quantised, plain = quantised_mlp(form, stored=stored)
    path = saved(tmp_path, quantised)
    kernel = kernel_of(path, MLP)
    wanted = unoptimised(onnx.load(path), "logits", TOKENS)
    np.testing.assert_allclose(kernel.logits(TOKENS), wanted, rtol=1e-4, atol=1e-4)
    entering = torch.from_numpy(unoptimised(onnx.load(path), "embedded", TOKENS))
    layer = unoptimised(onnx.load(path), "layer", TOKENS)
    np.testing.assert_allclose(kernel.block("mlp_0", entering), layer, rtol=1e-4, atol=1e-4)
    other = tmp_path / "plain"
    other.mkdir()
    unquantised = unoptimised(onnx.load(saved(other, plain)), "layer", TOKENS)
    assert np.abs(unquantised - layer).max() > 1e-3  # the quantisers have an effect


@pytest.mark.parametrize("beside", [False, True])
def test_blocks_of_a_decoder_run_at_any_length(tmp_path: Path, beside: bool) -> None:
    path = save_decoder(tmp_path, beside=beside)
    kernel = kernel_of(path, DECODER)
    for tokens in (TOKENS, [2], list(range(12))):
        found = kernel.logits(tokens)
        np.testing.assert_allclose(
            found, unoptimised(onnx.load(path), "logits", tokens), rtol=1e-4, atol=1e-5
        )
        for name, (first, last) in BLOCKS.items():
            entering = torch.from_numpy(unoptimised(onnx.load(path), first, tokens))
            wanted = unoptimised(onnx.load(path), last, tokens)
            np.testing.assert_allclose(
                kernel.block(name, entering), wanted, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_loading_blocks_does_not_replace_the_file(tmp_path: Path) -> None:
    path = save_decoder(tmp_path).rename(tmp_path / "block-0.onnx")
    kernel = kernel_of(path, DECODER)
    first, last = BLOCKS["mlp_0"]
    for name in ("mlp_0", "norm_0"):
        kernel.block(name, torch.from_numpy(unoptimised(onnx.load(path), BLOCKS[name][0], TOKENS)))
    found = kernel.block("mlp_0", torch.from_numpy(unoptimised(onnx.load(path), first, TOKENS)))
    np.testing.assert_allclose(
        found, unoptimised(onnx.load(path), last, TOKENS), rtol=1e-4, atol=1e-5
    )
    wanted = unoptimised(onnx.load(path), "logits", TOKENS)
    np.testing.assert_allclose(kernel.logits(TOKENS), wanted, rtol=1e-4, atol=1e-5)


def test_sequences_of_a_batch_run_separately(tmp_path: Path) -> None:
    kernel = kernel_of(save_decoder(tmp_path), DECODER)
    rows = [TOKENS, TOKENS[::-1]]
    both = kernel.logits(rows)
    for row, found in zip(rows, both, strict=True):
        assert torch.equal(found, kernel.logits(row))
    states = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    blocks = kernel.block("attn_0", states)
    assert torch.equal(blocks[1], kernel.block("attn_0", states[1]))


WIDE = """
<ir_version: 10, opset_import: ["" : 21]>
wide (int64[1,T] input_ids) => (float[1,T,4] logits)
{
  x = Gather <axis = 0> (embedding, input_ids)
  c = QuantizeLinear (x, one, zero) q = DequantizeLinear (c, one, zero)
  w = DequantizeLinear (codes, one, none)
  logits = MatMul (q, w)
}
"""


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_byte_products_do_not_saturate(tmp_path: Path, kind: Any) -> None:
    """Two products of the largest codes exceed 16 bits, in which some processors add them."""
    top = float(np.iinfo(kind).max)
    held: dict[str, Any] = {
        "embedding": np.full((3, 64), top, np.float32),
        "codes": np.full((64, 4), 127, np.int8),
        "one": np.asarray(1, np.float32),
        "zero": np.asarray(0, kind),
        "none": np.asarray(0, np.int8),
    }
    kernel = kernel_of(saved(tmp_path, model_of(WIDE, held)), ())
    assert torch.equal(kernel.logits([0, 1]), torch.full((2, 4), 64 * top * 127))


MIXED = """
<ir_version: 10, opset_import: ["" : 21]>
mixed (int64[1,T] input_ids) => (float[1,T,4] logits)
{
  x = Gather <axis = 0> (embedding, input_ids)
  c = QuantizeLinear (x, one, zero)
  sum = MatMulInteger (c, codes, zero)
  wide = Cast <to = 1> (sum)
  scale = Mul (one, unit)
  y = Mul (wide, scale)
  e = QuantizeLinear (y, large, e4m3) q = DequantizeLinear (e, large, e4m3)
  logits = MatMul (q, identity)
}
"""


def test_byte_products_beside_fp8_do_not_saturate(tmp_path: Path) -> None:
    """With FP8 codes ONNX Runtime optimises less, and its setting for exact sums has no effect."""
    held: dict[str, Any] = {
        "embedding": np.full((3, 64), 255, np.float32),
        "codes": np.full((64, 4), 127, np.int8),
        "one": np.asarray(1, np.float32),
        "unit": np.asarray(1, np.float32),
        "zero": np.asarray(0, np.uint8),
        "large": np.asarray(64 * 255 * 127 / 256, np.float32),
        "e4m3": np.asarray(0, helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)),
        "identity": np.eye(4, dtype=np.float32),
    }
    path = saved(tmp_path, model_of(MIXED, held))
    if saturates("session.x64quantprecision", basic=True):
        with refused(KERNEL_NUMERICS, "VNNI"):
            kernel_of(path, ())
    else:
        found = kernel_of(path, ()).logits([0, 1])
        assert torch.equal(found, torch.full((2, 4), 64 * 255 * 127.0))


@pytest.mark.parametrize("form", QUANTISERS)
def test_relu_before_a_quantiser_is_kept(tmp_path: Path, form: str) -> None:
    quantised = quantised_mlp(form)[0]
    for held in quantised.graph.initializer:
        if held.name == "up_bias":  # half of the Relu's inputs are below zero
            held.raw_data = np.linspace(-1, 1, 16, dtype=np.float32).tobytes()
    path = saved(tmp_path, quantised)
    kernel = kernel_of(path, MLP)
    wanted = unoptimised(onnx.load(path), "logits", TOKENS)
    np.testing.assert_allclose(kernel.logits(TOKENS), wanted, rtol=1e-4, atol=1e-4)


# --- what is refused ------------------------------------------------------------------------------


def refused(code: Any, *words: str) -> Any:
    def matches(refusal: Refusal) -> bool:
        (found,) = refusal.diagnostics
        return found.code is code and all(w in f"{found.message} {found.help}" for w in words)

    return pytest.raises(Refusal, check=matches)


def test_numerics_that_differ_from_the_quantisers_are_refused(tmp_path: Path) -> None:
    """This includes the training kernel, which would run the quantisers."""
    model = loaded(saved(tmp_path, quantised_mlp("uint8")[0]), MLP)
    with refused(NUMERICS, "is uint8"):
        load_kernel(reference({"compute": "float32"}), model, "cpu")


@pytest.mark.parametrize(
    "claim",
    [
        {"compute": "float32", "weights": {"format": "int8", "scale": "per_channel"}},
        {"compute": "float16"},
        {"compute": "float32", "activations": {"format": "uint8", "scale": "per_tensor"}},
    ],
)
def test_file_without_quantisers_serves_plain_numerics_only(
    tmp_path: Path, claim: dict[str, Any]
) -> None:
    model = loaded(save_decoder(tmp_path), DECODER)
    with refused(KERNEL_NUMERICS, "compute: float32"):
        load_kernel(reference(claim), model, "cpu")


@pytest.mark.parametrize("name", ["model.onnx", BESIDE])
def test_file_changed_after_reading_is_refused(tmp_path: Path, name: str) -> None:
    model = loaded(save_decoder(tmp_path, beside=True), DECODER)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    place = data.index(b"decoder") if name == "model.onnx" else len(data) // 2
    data[place] ^= 1
    path.write_bytes(data)
    with refused(CHANGED_MEANWHILE):
        load_kernel(reference({"compute": "float32"}), model, "cpu")


def test_sessions_do_not_reread_the_folder(tmp_path: Path) -> None:
    """The hashed copy runs, even if a block runs for the first time later."""
    path = save_decoder(tmp_path, beside=True)
    wanted = unoptimised(onnx.load(path), "attention", TOKENS)
    entering = torch.from_numpy(unoptimised(onnx.load(path), "weighted", TOKENS))
    kernel = kernel_of(path, DECODER)
    for file in tmp_path.iterdir():
        file.write_bytes(b"")
    np.testing.assert_allclose(kernel.block("attn_0", entering), wanted, rtol=1e-4, atol=1e-5)


OTHER = """\
kcdsl: 1
contract: other
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, tokenizer: bytes}
kernels: {train: {run: torch.eager}, infer: {run: onnxruntime.file}}
data: rows.jsonl
slices: {all: {}}
clauses:
  N: {require: "p99(kl) <= 0.02", level: L2}
"""


def test_other_models_are_refused_at_compile_time(
    cli: Any, tmp_path: Path, repository: Path
) -> None:
    folder = repository / "examples" / "tiny_lm"
    model = load_model(ModelRef("model.safetensors", architecture="llama"), folder)
    with refused(KERNEL_NUMERICS, "is not an ONNX file"):
        load_kernel(reference({}), model, "cpu")
    (tmp_path / "contract.yaml").write_text(OTHER)
    ran = cli("compile", "contract.yaml", cwd=tmp_path)
    assert ran.code == 2
    assert "the model is not an ONNX file" in ran.stderr


# --- the command line -----------------------------------------------------------------------------


PROOF = """\
kcdsl: 1
contract: proved
version: 1.0.0
model: {onnx: model.onnx, blocks: {mlp_0: {from: embedded, to: layer}}}
kernels: {train: {run: torch.eager}, infer: {run: torch.compile, numerics: STATED}OTHER}
data: rows.jsonl
slices: {all: {}}
clauses:
  N: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 9", level: L2}
"""


@pytest.mark.parametrize("role", ["train", "guard", "fallback"])
def test_proofs_require_the_numerics_of_the_file(cli: Any, tmp_path: Path, role: str) -> None:
    """A kernel that runs the file runs its quantisers, whatever the contract states."""
    path = saved(tmp_path, quantised_mlp("uint8")[0])
    section = json.dumps(without_quantisers(read_onnx(path))[1].section())
    text = PROOF.replace("STATED", section)
    if role == "train":
        text = text.replace("torch.eager", "onnxruntime.file").replace("OTHER", "")
    else:
        text = text.replace("OTHER", f", {role}: {{run: onnxruntime.file}}")
    (tmp_path / "contract.yaml").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "tokens": TOKENS}) + "\n")
    for command in ("compile", "verify"):
        ran = cli(command, "contract.yaml", cwd=tmp_path)
        assert ran.code == 2, ran.stdout
        assert "not those of the ONNX file" in ran.stderr


def test_proofs_refuse_quantisers_that_the_file_lacks(cli: Any, tmp_path: Path) -> None:
    save_decoder(tmp_path)
    stated = json.dumps({"activations": {"format": "uint8", "scale": "per_tensor"}})
    text = PROOF.replace("embedded", "second").replace("to: layer", "to: feed")
    text = text.replace("torch.compile", "onnxruntime.file").replace("OTHER", "")
    (tmp_path / "contract.yaml").write_text(text.replace("STATED", stated))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "tokens": TOKENS}) + "\n")
    ran = cli("verify", "contract.yaml", cwd=tmp_path)
    assert ran.code == 2, ran.stdout
    assert "runs the file as it is" in ran.stderr


ENCODER = """
<ir_version: 9, opset_import: ["" : 18]>
g (int64[1,T] input_ids) => (float[1,T,3] hidden)
{ states = Gather (table, input_ids) wide = MatMul (states, up) high = Relu (wide)
  hidden = MatMul (high, down) }
"""


def encoder() -> onnx.ModelProto:
    drawn = np.random.default_rng(1)
    shapes = {"table": (9, 3), "up": (3, 5), "down": (5, 3)}
    return model_of(
        ENCODER, {n: drawn.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    )


@pytest.mark.full
@pytest.mark.parametrize("form", ["int8", "e4m3", "encoder"])
def test_contract_of_an_onnx_file_is_evaluated(cli: Any, tmp_path: Path, form: str) -> None:
    """Its errors follow its numerics: no diagnosis reports other weights or coarser formats."""
    saved(tmp_path, encoder() if form == "encoder" else quantised_mlp(form)[0])
    assert cli("init", "model.onnx", cwd=tmp_path).code == 0
    ran = cli("evaluate", "contract.yaml", "--format", "json", cwd=tmp_path)
    found = json.loads(ran.stdout)
    assert found["prechecks"]
    outcomes = {check["name"]: check["outcome"] for check in found["prechecks"]}
    assert outcomes["stale_weights"] == outcomes["coarser_layer"] == "passed", found["prechecks"]
    assert ran.code == 0, ran.stdout + ran.stderr
