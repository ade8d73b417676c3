"""MatMulInteger in ONNX files: the program, its numerics, and refusals."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import ONNX, ModelRef
from kcdsl.model.loader import load_model
from kcdsl.model.onnx.file_numerics import FileNumerics
from kcdsl.model.onnx.files import read_onnx
from kcdsl.model.onnx.quantisation import without_quantisers
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.interval.tensors import read
from tests.support.commands import run_here
from tests.support.onnx_files import BLOCKS, integer_mlp, model_of, save_decoder, unoptimised

TOKENS = [3, 1, 4, 1, 5]
FORMS = ("dynamic", "uint8", "int8", "int8 zero point")
CONTRACT = """\
kcdsl: 1
contract: integers
version: 1.0.0
model: {onnx: model.onnx, blocks: {mlp_0: {from: embedded, to: layer}}}
kernels:
  train: {run: torch.eager}
  infer: {run: torch.eager, numerics: NUMERICS}
data: rows.jsonl
slices: {all: {}}
clauses:
  N: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 4", level: L2}
"""


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def stated(path: Path) -> FileNumerics:
    return without_quantisers(read_onnx(path))[1]


@pytest.mark.parametrize("form", FORMS)
def test_program_equals_that_of_dequantised_numbers(tmp_path: Path, form: str) -> None:
    coded, plain = integer_mlp(form)
    path = saved(tmp_path, coded)
    model = load_model(ModelRef(path.name, ONNX), tmp_path)
    wanted = unoptimised(plain, "logits", TOKENS)
    found = model.module(model.ids(TOKENS)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    held = read(path)
    assert set(held.tensors) == set(model.checkpoint.tensors)
    for key, tensor in held.tensors.items():
        assert bytes(tensor.data) == model.checkpoint.tensors[key].numpy().tobytes(), key
    kernel = next(k for k in held.tensors if k == "wide_sum")
    named = {t.name: numpy_helper.to_array(t) for t in plain.graph.initializer}
    np.testing.assert_array_equal(model.checkpoint.tensors[kernel].numpy(), named["up_read"])


@pytest.mark.parametrize("form", FORMS)
def test_numerics_equal_those_of_the_quantisers(tmp_path: Path, form: str) -> None:
    found = stated(saved(tmp_path, integer_mlp(form)[0]))
    assert set(found.linears) == {"wide_sum", "feed_sum", "head"}
    assert not found.linears["head"].activations
    for name in ("wide_sum", "feed_sum"):
        own = found.linears[name]
        assert not own.weights
        if form == "dynamic":
            assert own.activations == {"format": "uint8", "scale": "per_tensor"}
        else:
            assert own.activations["scale"] == "static"
            assert own.activations["format"] == ("int8_full" if form == "int8" else "uint8")


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_onnx_runtime_runs_are_within_the_bound(tmp_path: Path, form: str) -> None:
    coded, plain = integer_mlp(form)
    section = stated(saved(tmp_path, coded)).section()
    (tmp_path / "contract.yaml").write_text(CONTRACT.replace("NUMERICS", json.dumps(section)))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "tokens": TOKENS}) + "\n")
    ran = run_here("verify", "--format", "json", cwd=tmp_path)
    assert ran.code == 0, ran.stderr + ran.stdout
    (goal,) = json.loads(ran.stdout)["goals"]
    drift = float(
        np.abs(unoptimised(coded, "layer", TOKENS) - unoptimised(plain, "layer", TOKENS)).max()
    )
    assert 0 < goal["attack"] <= goal["bound"]
    assert 0 < drift <= goal["bound"]
    assert recheck((tmp_path / "out" / "N.proof.json").read_bytes(), tmp_path / "model.onnx").ok


def quantised_decoder(folder: Path) -> Path:
    """Return a decoder quantised by `quantize_dynamic` of ONNX Runtime, with its embedding."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = folder / "model.onnx"
    quantize_dynamic(save_decoder(folder, "plain.onnx"), path, weight_type=QuantType.QInt8)
    operators = {node.op_type for node in onnx.load(str(path)).graph.node}
    assert {"MatMulInteger", "DequantizeLinear"} <= operators
    return path


def test_files_of_quantize_dynamic_are_read(tmp_path: Path) -> None:
    path = quantised_decoder(tmp_path)
    blocks = tuple((name, *ends) for name, ends in BLOCKS.items())
    model = load_model(ModelRef(path.name, ONNX, blocks=blocks), path.parent)
    wanted = unoptimised(onnx.load(str(tmp_path / "plain.onnx")), "logits", TOKENS)
    found = model.module(model.ids(TOKENS)).numpy()
    assert 0 < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()  # weights of 8 bits
    own = stated(path)
    assert own.quantised
    assert {one.activations.get("format") for one in own.linears.values()} == {"uint8"}
    held = read(path)
    assert set(held.tensors) == set(model.checkpoint.tensors)
    for key, tensor in held.tensors.items():
        assert bytes(tensor.data) == model.checkpoint.tensors[key].numpy().tobytes(), key


LOOKUP = """
<ir_version: 10, opset_import: ["" : 21]>
g (int64[1,T] input_ids) => (float[1,T,4] hidden)
{{ c = Gather {axis} (codes, input_ids)
  x = DequantizeLinear <axis = -1> (c, scale, zero)
  {more} }}
"""


def lookup(axis: str = "", scale: Any = 0.5, more: str = "hidden = Add (x, x)") -> onnx.ModelProto:
    held: dict[str, Any] = {
        "codes": np.arange(-12, 12, dtype=np.int8).reshape(6, 4),
        "scale": np.asarray(scale, dtype=np.float32),
        "zero": np.full(np.shape(scale), 3, dtype=np.int8),
    }
    return model_of(LOOKUP.format(axis=axis, more=more), held)


def test_lookup_in_codes_is_a_lookup_in_a_parameter(tmp_path: Path) -> None:
    path = saved(tmp_path, lookup())
    model = load_model(ModelRef(path.name, ONNX), path.parent)
    np.testing.assert_array_equal(
        model.module(model.ids(TOKENS)).numpy(), unoptimised(lookup(), "hidden", TOKENS)
    )
    table = (np.arange(-12, 12).reshape(6, 4) - 3) * 0.5
    np.testing.assert_array_equal(model.checkpoint.tensors["c"].numpy(), table)
    assert bytes(read(path).tensors["c"].data) == table.astype(np.float32).tobytes()


TRANSPOSED = """
<ir_version: 10, opset_import: ["" : 21]>
g (int64[1,T] input_ids) => (float[1,T,6] logits)
{ x = Gather (table, input_ids)
  c = Transpose <perm = [1, 0]> (codes)
  w = DequantizeLinear (c, scale, zero)
  logits = MatMul (x, w) }
"""


def test_transpose_of_codes_is_a_transposed_parameter(tmp_path: Path) -> None:
    codes = np.arange(-12, 12, dtype=np.int8).reshape(6, 4)
    held: dict[str, Any] = {
        "codes": codes,
        "scale": np.asarray(0.5, dtype=np.float32),
        "zero": np.asarray(3, dtype=np.int8),
        "table": np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32),
    }
    proto = model_of(TRANSPOSED, held)
    path = saved(tmp_path, proto)
    model = load_model(ModelRef(path.name, ONNX), path.parent)
    np.testing.assert_allclose(
        model.module(model.ids(TOKENS)).numpy(), unoptimised(proto, "logits", TOKENS), rtol=1e-6
    )
    wanted = ((codes - 3.0) * 0.5).astype(np.float32)
    assert bytes(read(path).tensors["c"].data) == wanted.tobytes()
    assert set(read(path).tensors) == set(model.checkpoint.tensors)


def test_checker_refuses_a_parameter_with_several_scales(tmp_path: Path) -> None:
    """It would apply them to columns, whatever dimension they belong to."""
    assert "c" in read(saved(tmp_path, lookup())).tensors
    assert "c" not in read(saved(tmp_path, lookup(scale=[0.5, 1.0, 2.0, 4.0]))).tensors


@pytest.mark.parametrize(
    "model",
    [
        lookup(scale=[0.5, 1.0, 2.0, 4.0]),
        lookup(more="y = Cast <to = 1> (c) hidden = Add (x, y)"),
    ],
)
def test_unsupported_lookups_in_codes_are_refused(tmp_path: Path, model: onnx.ModelProto) -> None:
    path = saved(tmp_path, model)
    with pytest.raises(Refusal):
        load_model(ModelRef(path.name, ONNX), path.parent)


@pytest.mark.full
def test_case_of_the_onnx_package_agrees(tmp_path: Path) -> None:
    """Exact sums of bytes minus their zero points: with scales of 1 they are the results."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        every = collect_testcases(None)  # builds its list once per process, for the requested cases
    compared = 0
    cases = [
        case
        for case in every
        if case.model and [n.op_type for n in case.model.graph.node] == ["MatMulInteger"]
    ]
    for case in cases:
        assert case.model is not None
        for inputs, outputs in case.data_sets or ():
            a, b, zero, weight_zero = (np.asarray(part) for part in inputs)
            rows, width = outputs[0].shape
            text = f"""<ir_version: 10, opset_import: ["" : 21]>
            g (int64[1,T] input_ids) => (float[1,T,{width}] hidden) {{
              x = Gather (table, input_ids)
              c = QuantizeLinear (x, one, zero)
              sums = MatMulInteger (c, codes, zero, weight_zero)
              numbers = Cast <to = 1> (sums)
              once = Mul (numbers, one)
              hidden = Mul (once, weight_one)
            }}"""
            held = {
                "table": a.astype(np.float32) - zero.astype(np.float32),
                "one": np.ones((), np.float32), "zero": zero.reshape(()),
                "codes": b, "weight_zero": weight_zero.reshape(()),
                "weight_one": np.ones((), np.float32),
            }  # fmt: skip
            path = saved(tmp_path, model_of(text, held))
            model = load_model(ModelRef(path.name, ONNX), tmp_path)
            found = model.module(model.ids(range(rows))).numpy()
            np.testing.assert_array_equal(found.astype(np.int32), outputs[0])
            assert stated(path).linears["sums"].activations["scale"] == "static"
            compared += 1
    assert compared


def _node(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if output in n.output)


def _other_zero(model: onnx.ModelProto) -> None:
    _node(model, "wide_sum").input[2] = "z2"


def _other_scale(model: onnx.ModelProto) -> None:
    _node(model, "wide_scale").input[0] = "s2"


def _no_scale(model: onnx.ModelProto) -> None:
    _node(model, "feed").input[1] = "embedded"


def _to_int(model: onnx.ModelProto) -> None:
    _node(model, "wide_float").attribute[0].i = TensorProto.INT64


def _read_twice(model: onnx.ModelProto) -> None:
    _node(model, "layer").input[0] = "wide_float"


def _computed(model: onnx.ModelProto) -> None:
    _node(model, "wide_sum").input[1] = "c1"


CHANGES = {
    "another zero point": ("uint8", _other_zero),
    "the scale of another": ("uint8", _other_scale),
    "no scale of the input": ("dynamic", _no_scale),
    "integers": ("dynamic", _to_int),
    "a sum that is read twice": ("dynamic", _read_twice),
    "two computed matrices": ("dynamic", _computed),
}


@pytest.mark.parametrize("name", CHANGES)
def test_unsupported_products_of_codes_are_refused(tmp_path: Path, name: str) -> None:
    form, change = CHANGES[name]
    model = integer_mlp(form)[0]
    if name == "another zero point":
        held = next(t for t in model.graph.initializer if t.name == "z2")
        held.CopyFrom(numpy_helper.from_array(np.asarray(7, np.uint8), "z2"))
    change(model)
    with pytest.raises(Refusal) as refused:
        stated(saved(tmp_path, model))
    found = refused.value.diagnostics[0]
    assert str(found.code) == "KC461"
    assert "MatMulInteger" in found.message


def test_sums_that_may_exceed_32_bits_are_refused(tmp_path: Path) -> None:
    model = integer_mlp("dynamic")[0]
    held = next(t for t in model.graph.initializer if t.name == "up_codes")
    long = np.zeros((2**15 + 1, 16), np.int8)
    held.CopyFrom(numpy_helper.from_array(long, "up_codes"))
    with pytest.raises(Refusal, match="MatMulInteger"):
        stated(saved(tmp_path, model))
