"""Inference kernels that run their own ONNX file with arbitrary operators: evaluation only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import (
    CHANGED_MEANWHILE,
    KERNEL_NUMERICS,
    METRIC_OUT_OF_REACH,
    NUMERICS,
    ONNX_FILE,
)
from kcdsl.ir.terms import ONNX, KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.sources.kernels.onnx_file import FileKernel, load_own_file
from tests.support.onnx_files import model_of, save_decoder

TOKENS = [3, 1, 4, 1, 5]
KERNEL = KernelRef("onnxruntime.file", (), checkpoint="served.onnx")
SERVED = """
<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
served (int64[1,T] input_ids, float[1,T] attention_mask) => (float[1,T,12] logits)
{
  embedded = Gather <axis = 0> (embedding, input_ids)
  active = com.microsoft.QuickGelu <alpha = 1.702> (embedded)
  column = Unsqueeze (attention_mask, last)
  kept = Mul (active, column)
  logits = MatMul (kept, head)
}
"""


def served(text: str = SERVED) -> onnx.ModelProto:
    """Return a file with a custom operator of ONNX Runtime, which the model reader refuses."""
    drawn = np.random.default_rng(5)
    return model_of(
        text,
        {
            "embedding": drawn.standard_normal((12, 8)).astype(np.float32),
            "head": drawn.standard_normal((8, 12)).astype(np.float32),
            "last": np.asarray([-1]),
        },
    )


def loaded(folder: Path, text: str = SERVED) -> Model:
    save_decoder(folder)
    (folder / "served.onnx").write_bytes(served(text).SerializeToString())
    return load_model(ModelRef("model.onnx", ONNX, served="served.onnx"), folder)


def kernel_of(folder: Path, text: str = SERVED) -> FileKernel:
    return load_own_file(KERNEL, loaded(folder, text))


def refused(code: Any, *words: str) -> Any:
    def matches(refusal: Refusal) -> bool:
        (found,) = refusal.diagnostics
        return found.code is code and all(w in f"{found.message} {found.help}" for w in words)

    return pytest.raises(Refusal, check=matches)


def test_logits_equal_those_of_onnx_runtime(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path)
    session = onnxruntime.InferenceSession(served().SerializeToString())
    mask = np.ones((1, 5), np.float32)
    wanted = session.run(None, {"input_ids": np.asarray([TOKENS]), "attention_mask": mask})[0][0]
    for file in tmp_path.iterdir():
        file.unlink()  # a copy runs
    np.testing.assert_array_equal(kernel.logits(TOKENS).numpy(), wanted)
    both = kernel.logits([TOKENS, TOKENS[::-1]])
    assert torch.equal(both[0], kernel.logits(TOKENS))
    assert kernel.fingerprint()["numerics"] is None


def test_kernel_has_no_blocks_and_states(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path)
    with refused(METRIC_OUT_OF_REACH, "attn_0"):
        kernel.block("attn_0", torch.zeros(2, 8))
    with refused(METRIC_OUT_OF_REACH, "hidden states"):
        kernel.hidden(TOKENS)
    with refused(NUMERICS, "nothing is proved"):
        resolve(KERNEL)


def test_changed_file_is_refused(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    path = tmp_path / "served.onnx"
    path.write_bytes(path.read_bytes().replace(b"QuickGelu", b"QuickGelt"))
    with refused(CHANGED_MEANWHILE):
        load_own_file(KERNEL, model)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("float[1,T] attention_mask", "float[1,T] attention_mask, float[1] past", "past"),
        ("=> (float[1,T,12] logits)", "=> (float[1,T,12] scores, float[1,T,8] kept)", "`logits`"),
    ],
)
def test_unexpected_inputs_and_outputs_are_refused(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    text = SERVED.replace(old, new)
    if "scores" in new:
        text = text.replace("logits = MatMul", "scores = MatMul")
    with refused(ONNX_FILE, says):
        kernel_of(tmp_path, text)


def test_output_without_a_row_per_token_is_refused(tmp_path: Path) -> None:
    text = SERVED.replace("float[1,T,12] logits", "float[1,12] logits").replace(
        "logits = MatMul (kept, head)",
        "rows = MatMul (kept, head) logits = ReduceMean <keepdims = 0> (rows, middle)",
    )
    proto = served(text)
    proto.graph.initializer.append(helper.make_tensor("middle", TensorProto.INT64, [1], [1]))
    model = loaded(tmp_path)
    (tmp_path / "served.onnx").write_bytes(proto.SerializeToString())
    model = load_model(ModelRef("model.onnx", ONNX, served="served.onnx"), tmp_path)
    with refused(ONNX_FILE, "[1, 12] for 5 tokens"):
        load_own_file(KERNEL, model).logits(TOKENS)


@pytest.mark.parametrize("data", [b"", b"no"])
def test_damaged_file_is_refused(tmp_path: Path, data: bytes) -> None:
    save_decoder(tmp_path)
    (tmp_path / "served.onnx").write_bytes(data)
    with refused(ONNX_FILE, "served.onnx", "checkpoint/format"):
        load_model(ModelRef("model.onnx", ONNX, served="served.onnx"), tmp_path)


@pytest.mark.parametrize("name", [b"input_ids", b"logits", b"QuickGelu"])
def test_non_text_names_are_refused(tmp_path: Path, capfd: Any, name: bytes) -> None:
    loaded(tmp_path)
    path = tmp_path / "served.onnx"
    path.write_bytes(path.read_bytes().replace(name, b"\xff" + name[1:]))
    model = load_model(ModelRef("model.onnx", ONNX, served="served.onnx"), tmp_path)
    with pytest.raises(Refusal):
        load_own_file(KERNEL, model)
    assert not capfd.readouterr().out  # a command prints it


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("int64[1,T,12]", "Cast <to = 7> (scores)"),
        ("bool[1,T,12]", "Cast <to = 9> (scores)"),
        ("float8e4m3fn[1,T,12]", "Cast <to = 17> (scores)"),
        ("bfloat16[1,T,12]", "Cast <to = 16> (scores)"),
        ("string[1,T,12]", "Cast <to = 8> (scores)"),
        ("seq(float[1,T,12])", "SequenceConstruct (scores)"),
    ],
)
def test_output_that_is_not_a_float_tensor_is_refused(tmp_path: Path, kind: str, made: str) -> None:
    text = SERVED.replace("float[1,T,12] logits", f"{kind} logits").replace(
        "logits = MatMul (kept, head)", f"scores = MatMul (kept, head) logits = {made}"
    )
    with refused(ONNX_FILE, "logits is ", "tensor(float16)"):
        kernel_of(tmp_path, text)


@pytest.mark.parametrize("deep", [False, True])
def test_external_tensors_in_node_attributes_are_refused(tmp_path: Path, deep: bool) -> None:
    """ONNX Runtime would read them from any path, and no digest covers them."""
    secret = onnx.TensorProto(dims=[1], data_type=TensorProto.FLOAT, name="secret")
    secret.data_location = TensorProto.EXTERNAL
    secret.external_data.add(key="location", value="../secret")
    node = helper.make_node("Constant", [], ["secret"], value=secret)
    if deep:
        out = [helper.make_tensor_value_info("secret", TensorProto.FLOAT, [1])]
        branch = helper.make_graph([node], "branch", [], out)
        node = helper.make_node("If", ["yes"], ["read"], then_branch=branch, else_branch=branch)
    proto = served()
    proto.graph.node.append(node)
    loaded(tmp_path)
    (tmp_path / "served.onnx").write_bytes(proto.SerializeToString())
    model = load_model(ModelRef("model.onnx", ONNX, served="served.onnx"), tmp_path)
    with refused(ONNX_FILE, "inside of a node"):
        load_own_file(KERNEL, model)


def test_other_adapters_refuse_an_onnx_file(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    with refused(KERNEL_NUMERICS, "onnxruntime.file"):
        load_own_file(KernelRef("torch.eager", (), checkpoint="served.onnx"), model)


# --- the command line -----------------------------------------------------------------------------

CONTRACT = """\
kcdsl: 1
contract: own-file
version: 1.0.0
model: {onnx: model.onnx, blocks: {attn_0: {from: weighted, to: attention}}}
kernels:
  train: {run: torch.eager}
  infer: {run: onnxruntime.file, checkpoint: served.onnx}
data: rows.jsonl
slices: {all: {}}
clauses:
  N: {require: "p99(logit_linf) <= 1000", level: L2}
"""
PROVED = 'N: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 9", level: L2}'


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (CONTRACT.splitlines()[-1].strip(), PROVED, "nothing is proved about it"),
        ("served.onnx}", "served.onnx, numerics: {compute: float32}}", "a program of its own"),
        ("run: onnxruntime.file", "run: torch.compile", "does not run served.onnx"),
    ],
)
def test_unmeasurable_clauses_do_not_compile(
    cli: Any, tmp_path: Path, old: str, new: str, says: str
) -> None:
    loaded(tmp_path)
    assert old in CONTRACT
    (tmp_path / "contract.yaml").write_text(CONTRACT.replace(old, new))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "tokens": TOKENS}) + "\n")
    ran = cli("compile", "contract.yaml", cwd=tmp_path)
    assert ran.code == 2
    assert says in ran.stderr
    ran = cli("verify", "contract.yaml", cwd=tmp_path)
    assert ran.code == 2  # nor proved, with the numerics of the other file


@pytest.mark.full
def test_certificate_names_the_file(cli: Any, tmp_path: Path) -> None:
    loaded(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    rows = [{"id": str(n), "tokens": [n % 12, 3, 1 + n % 5, 2]} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = cli("evaluate", "contract.yaml", cwd=tmp_path)
    assert ran.code in (0, 1, 3), ran.stderr  # another program: a diagnosis may report it
    assert cli("keygen", cwd=tmp_path).code == 0
    ran = cli("sign", "out/evaluate.statement.json", "--key", "kcdsl.key", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    check = ("check", "out/evaluate.cert.json", "--key", "kcdsl.key.pub")
    before = cli(*check, cwd=tmp_path)
    assert "checkpoint-mismatch" not in before.stdout + before.stderr
    path = tmp_path / "served.onnx"
    path.write_bytes(path.read_bytes().replace(b"QuickGelu", b"QuickGelt"))
    after = cli(*check, cwd=tmp_path)
    assert after.code != 0
    assert "triple/checkpoint-mismatch" in after.stdout + after.stderr
