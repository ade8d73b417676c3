"""ONNX files with QuantizeLinear and DequantizeLinear: their program, and their numerics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import ONNX, KernelRef, ModelRef
from kcdsl.model.files import Artefacts
from kcdsl.model.loader import load_model
from kcdsl.model.numerics import Numerics
from kcdsl.model.onnx.file_numerics import FileNumerics
from kcdsl.model.onnx.files import read_onnx
from kcdsl.model.onnx.quantisation import without_quantisers
from kcdsl.model.presets import resolve
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.check import recheck
from kcdsl_certs.recheck.interval.tensors import read
from tests.support.commands import run_here
from tests.support.kernel_refs import sorted_pairs
from tests.support.onnx_files import QUANTISERS, quantised_mlp, unoptimised

TOKENS = [3, 1, 4, 1, 5]
CONTRACT = """\
kcdsl: 1
contract: qdq
version: 1.0.0
model: {onnx: model.onnx, blocks: {mlp_0: {from: embedded, to: layer}}}
kernels:
  train: {run: torch.eager}
  infer: {run: torch.eager, numerics: NUMERICS}
data: rows.jsonl
slices: {all: {}}
clauses:
  N:
    require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 4"
    evidence: proof
    level: L2
"""


def saved(folder: Path, model: onnx.ModelProto, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def stated(path: Path) -> FileNumerics:
    return without_quantisers(read_onnx(path))[1]


def numerics_of(path: Path) -> Numerics:
    return resolve(stated(path).section())


@pytest.mark.parametrize("stored", ["codes", "numbers"])
@pytest.mark.parametrize("form", QUANTISERS)
def test_program_is_the_graph_without_quantisers(tmp_path: Path, form: str, stored: str) -> None:
    quantised, plain = quantised_mlp(form, stored=stored)
    path = saved(tmp_path, quantised)
    model = load_model(ModelRef(path.name, ONNX), path.parent)
    wanted = unoptimised(plain, "logits", TOKENS)
    np.testing.assert_allclose(
        model.module(model.ids(TOKENS)).numpy(), wanted, rtol=1e-5, atol=1e-5
    )
    held = read(path)
    assert set(held.tensors) == set(model.checkpoint.tensors)
    for key, tensor in held.tensors.items():
        assert bytes(tensor.data) == model.checkpoint.tensors[key].numpy().tobytes(), key


WANTED = {
    "uint8": ("uint8", 128), "int8": ("int8_full", 0), "int8 zero point": ("uint8", 91),
    "e4m3": ("fp8_e4m3", 0), "e5m2": ("fp8_e5m2", 0),
}  # fmt: skip


@pytest.mark.parametrize("stored", ["codes", "numbers"])
@pytest.mark.parametrize("form", QUANTISERS)
def test_numerics_equal_those_of_the_file(tmp_path: Path, form: str, stored: str) -> None:
    path = saved(tmp_path, quantised_mlp(form, stored=stored)[0])
    found = numerics_of(path)
    coded = {
        "codes": "float32",
        "numbers": {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}.get(form, "int8"),
    }
    for name, scale in (("up", 0.03), ("down", 0.05)):
        own = found.serving(name if stored == "numbers" else f"{name}_read")
        assert own.weights.format == coded[stored]
        assert own.weights.scale == ("per_channel" if stored == "numbers" else "none")
        if form == "dynamic":
            assert (own.activations.format, own.activations.scale) == ("uint8", "per_tensor")
            continue
        calibrated = own.activations.calibrated(name)
        assert calibrated is not None
        assert calibrated.scales == (float(np.float32(scale)),)
        assert (own.activations.format, calibrated.zero_point) == WANTED[form]
    assert not found.serving("head").activations.quantised


def contract(folder: Path, model: onnx.ModelProto) -> None:
    path = saved(folder, model)
    text = CONTRACT.replace("NUMERICS", json.dumps(stated(path).section()))
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    (folder / "rows.jsonl").write_text(json.dumps({"id": "a", "tokens": TOKENS}) + "\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "stored"),
    [
        ("uint8", "codes"),
        *(pytest.param(f, s, marks=pytest.mark.full) for f in QUANTISERS
          for s in ("codes", "numbers") if (f, s) != ("uint8", "codes")),
    ],
)  # fmt: skip
def test_drift_of_a_file_is_proved_and_checked(tmp_path: Path, form: str, stored: str) -> None:
    quantised, plain = quantised_mlp(form, stored=stored)
    contract(tmp_path, quantised)
    ran = run_here("verify", "--format", "json", cwd=tmp_path)
    assert ran.code == 0, ran.stderr + ran.stdout
    (goal,) = json.loads(ran.stdout)["goals"]
    drift = float(
        np.abs(unoptimised(quantised, "layer", TOKENS) - unoptimised(plain, "layer", TOKENS)).max()
    )
    assert 0 < goal["attack"] <= goal["bound"]
    assert 0 < drift <= goal["bound"]
    assert recheck((tmp_path / "out" / "N.proof.json").read_bytes(), tmp_path / "model.onnx").ok


def test_numerics_that_differ_from_the_file_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, quantised_mlp("uint8")[0])
    base = stated(path).section()
    model = ModelRef(path.name, ONNX)
    up, down = (base["overrides"][n]["activations"] for n in ("up_read", "down_read"))
    others: list[dict[str, Any]] = [
        {**base, "overrides": {"down_read": {"activations": down}}},
        {**base, "overrides": {"up_read": {"activations": {**up, "input_scale": 0.04}},
                               "down_read": {"activations": down}}},
        {**base, "overrides": {"up_read": {"activations": {**up, "input_zero_point": 127}},
                               "down_read": {"activations": down}}},
        {**base, "weights": {"format": "int8", "scale": "per_channel"}},
        {"preset": "torch-eager", "compute": "bfloat16", "overrides": base["overrides"]},
        {"preset": "torch-eager"},
    ]  # fmt: skip
    for numerics in (base, *others):
        kernel = KernelRef("torch.eager", sorted_pairs(numerics))
        ref = ModelRef(model.checkpoint, ONNX, infer=kernel)
        if numerics is base:
            load_model(ref, Artefacts.of(tmp_path))
            continue
        with pytest.raises(Refusal) as refused:
            load_model(ref, Artefacts.of(tmp_path))
        assert str(refused.value.diagnostics[0].code) == "KC463"
        assert "those of the ONNX file" in refused.value.diagnostics[0].message


# --- what is refused ------------------------------------------------------------------------------


def _node(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if output in n.output)


def _tensor(model: onnx.ModelProto, name: str, value: Any) -> None:
    held = next((t for t in model.graph.initializer if t.name == name), None)
    made = numpy_helper.from_array(np.asarray(value), name)
    if held is None:
        model.graph.initializer.append(made)
    else:
        held.CopyFrom(made)


def _residual(model: onnx.ModelProto) -> None:
    _node(model, "layer").input[0] = "q1"


def _output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "q2"


def _codes_read(model: onnx.ModelProto) -> None:
    _node(model, "wide").op_type = "MatMulInteger"
    _node(model, "wide").input[0] = "c1"


def _computed(model: onnx.ModelProto) -> None:
    scale = helper.make_node("Neg", ["s1"], ["computed"], "negative")
    model.graph.node.insert(1, scale)
    _node(model, "c1").input[1] = "computed"


def _blocks(model: onnx.ModelProto) -> None:
    _node(model, "up_read").attribute.append(helper.make_attribute("block_size", 2))


def _unsaturated(model: onnx.ModelProto) -> None:
    _tensor(model, "z1", np.zeros((), dtype=helper.tensor_dtype_to_np_dtype(17)))
    _node(model, "c1").attribute.append(helper.make_attribute("saturate", 0))


def _int16(model: onnx.ModelProto) -> None:
    _tensor(model, "z1", np.zeros((), dtype=np.int16))


def _not_undone(model: onnx.ModelProto) -> None:
    _node(model, "q1").input[1] = "s2"


def _negative(model: onnx.ModelProto) -> None:
    _tensor(model, "s1", np.float32(-1))


def _rows(model: onnx.ModelProto) -> None:
    _tensor(model, "s1", np.full(5, 0.03, dtype=np.float32))
    _tensor(model, "z1", np.full(5, 128, dtype=np.uint8))


def _other_product(model: onnx.ModelProto) -> None:
    again = helper.make_node("MatMul", ["embedded", "up_read"], ["again"], "again")
    model.graph.node.insert(len(model.graph.node) - 1, again)


def _not_finite(model: onnx.ModelProto) -> None:
    _tensor(model, "up_scale", np.full(16, np.inf, dtype=np.float32))


def _channels(model: onnx.ModelProto) -> None:
    _tensor(model, "s1", np.full(8, 0.03, dtype=np.float32))
    _tensor(model, "z1", np.full(8, 128, dtype=np.uint8))
    _node(model, "c1").attribute.append(helper.make_attribute("axis", -1))
    _node(model, "q1").attribute.append(helper.make_attribute("axis", -1))
    _residual(model)


def _own_operator(model: onnx.ModelProto) -> None:
    _node(model, "layer").op_type = "quantise"
    del _node(model, "layer").input[1]


def _insert(model: onnx.ModelProto, before: str, *nodes: tuple[str, list[str], str, Any]) -> None:
    place = [node.output[0] for node in model.graph.node].index(before)
    for kind, inputs, output, attributes in reversed(nodes):
        made = helper.make_node(kind, inputs, [output], output, **attributes)
        model.graph.node.insert(place, made)


def _view(kind: str, *inputs: str, **attributes: Any) -> Callable[[onnx.ModelProto], None]:
    """Return a change after which the product reads a view of its weight."""

    def change(model: onnx.ModelProto) -> None:
        _tensor(model, "sizes", np.asarray([8, 16]))
        _insert(model, "wide", (kind, ["up_read", *inputs], "view", attributes))
        _node(model, "wide").input[1] = "view"

    return change


def _beside(*nodes: tuple[str, list[str], str, Any]) -> Callable[[onnx.ModelProto], None]:
    """Return a change that adds to a product another one, named "more"."""

    def change(model: onnx.ModelProto) -> None:
        _tensor(model, "third", np.asarray([2]))
        _insert(model, "biased", *nodes, ("Add", ["wide", "more"], "both", {}))
        _node(model, "biased").input[0] = "both"

    return change


def _both_ways(model: onnx.ModelProto) -> None:
    _tensor(model, "square", np.eye(8, dtype=np.float32))
    _insert(
        model, "wide",
        ("MatMul", ["q1", "square"], "straight", {}),
        ("Transpose", ["square"], "turned", {"perm": [1, 0]}),
        ("MatMul", ["q1", "turned"], "across", {}),
    )  # fmt: skip


def _gemm(place: int, bias: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        node = _node(model, "wide")
        node.op_type = "Gemm"
        if bias:
            _insert(model, "wide", ("Neg", ["up_bias"], bias, {}))
            node.input.append(bias)
        else:
            node.attribute.append(helper.make_attribute("transA", place))

    return change


def _zeros_differ(model: onnx.ModelProto) -> None:
    _channels(model)
    _node(model, "layer").input[0] = "embedded"
    _tensor(model, "z1", np.asarray([128] * 7 + [127], dtype=np.uint8))


def _no_scale(model: onnx.ModelProto) -> None:
    _tensor(model, "s1", np.zeros(0, dtype=np.float32))
    _tensor(model, "z1", np.zeros(0, dtype=np.uint8))


def _no_zero_point(model: onnx.ModelProto) -> None:
    _node(model, "c1").output[2] = ""
    del _node(model, "q1").input[2]


def _again(model: onnx.ModelProto) -> None:
    _insert(
        model, "wide",
        ("QuantizeLinear", ["q1", "k", "l"], "more_codes", {}),
        ("DequantizeLinear", ["more_codes", "k", "l"], "more", {}),
    )  # fmt: skip
    _node(model, "wide").input[0] = "more"
    _tensor(model, "k", np.float32(0.1))
    _tensor(model, "l", np.uint8(0))


def _type(model: onnx.ModelProto) -> None:
    for name in ("c1", "q1"):
        del _node(model, name).input[2]
    _node(model, "c1").attribute.append(helper.make_attribute("output_dtype", 77))


def _cube(model: onnx.ModelProto) -> None:
    held = next(t for t in model.graph.initializer if t.name == "up")
    held.dims[:] = [1, *held.dims]
    for name in ("up_codes", "up_read"):
        del _node(model, name).attribute[:]
        _node(model, name).attribute.append(helper.make_attribute("axis", 2))


REFUSED = {
    "transposed otherwise": (
        _beside(
            ("Transpose", ["up_read"], "same", {"perm": [0, 1]}),
            ("MatMul", ["embedded", "same"], "more", {}),
        ),
        "another product reads up_read with another quantiser",
    ),
    "transposed twice": (
        _beside(
            ("Transpose", ["up_read"], "turned", {}),
            ("Transpose", ["turned"], "same", {}),
            ("MatMul", ["embedded", "same"], "more", {}),
        ),
        "another product reads up_read with another quantiser",
    ),
    "convolution": (
        _beside(
            ("Transpose", ["up_read"], "turned", {}),
            ("Unsqueeze", ["turned", "third"], "kernel", {}),
            ("Transpose", ["embedded"], "columns", {"perm": [0, 2, 1]}),
            ("Conv", ["columns", "kernel"], "result", {}),
            ("Transpose", ["result"], "more", {"perm": [0, 2, 1]}),
        ),
        "another product reads up_read with another quantiser",
    ),
    "both ways": (_both_ways, "another product reads square with another quantiser, or transposed"),
    "view": (_view("Reshape", "sizes"), "its weight is a view of up_read"),
    "view of numbers": (
        _view("Reshape", "sizes"),
        "it reads the parameter that QuantizeLinear of node up_codes",
    ),
    "moved numbers": (_view("Transpose", perm=[0, 1]), "it moves a quantised parameter"),
    "cube": (_cube, "up is no matrix of FLOAT"),
    "transposed input": (_gemm(1, ""), "its quantised input is transposed"),
    "computed bias": (_gemm(0, "negative"), "its bias is computed"),
    "zero points": (_zeros_differ, "its zero points differ"),
    "no scale": (_no_scale, "a scale is not a number above 0"),
    "no zero point": (_no_zero_point, "it leaves out its scale or its zero point"),
    "again": (_again, "it quantises q1 once more"),
    "unknown type": (_type, "its codes are of type 77"),
    "residual": (_residual, "Add of node layer is not supported: it reads what DynamicQuantize"),
    "output": (_output, "the output of the file is quantised"),
    "fp8 residual": (
        _residual,
        "it quantises a tensor to fp8_e4m3",
    ),
    "channels of a residual": (_channels, "its scales are of channels"),
    "own operator": (_own_operator, "quantise of node layer is no operator of ONNX"),
    "codes": (_codes_read, "MatMulInteger of node wide is not supported: it reads the codes of"),
    "computed": (_computed, "QuantizeLinear of node c1 is not supported: its scale is no tensor"),
    "blocks": (_blocks, "DequantizeLinear of node up_read is not supported: its scales are of"),
    "unsaturated": (_unsaturated, "it does not saturate"),
    "int16": (_int16, "its codes are INT16"),
    "not undone": (_not_undone, "DequantizeLinear of node q1 is not supported: it does not undo"),
    "negative": (_negative, "a scale is not a number above 0"),
    "rows": (_rows, "its scales are not those of the last dimension"),
    "other product": (_other_product, "another product reads up_read"),
    "not finite": (_not_finite, "a scale is not a number above 0"),
}


FORMS = {
    "residual": "dynamic", "output": "dynamic", "fp8 residual": "e4m3", "no zero point": "dynamic",
    "again": "dynamic",
}  # fmt: skip
NUMBERS = {"view of numbers", "moved numbers", "cube"}


@pytest.mark.parametrize("change", REFUSED)
def test_unsupported_quantisers_are_refused(tmp_path: Path, change: str) -> None:
    stored = "numbers" if change in NUMBERS else "codes"
    model = quantised_mlp(FORMS.get(change, "uint8"), stored=stored)[0]
    REFUSED[change][0](model)
    path = saved(tmp_path, model)
    with pytest.raises(Refusal) as refused:
        stated(path)
    found = refused.value.diagnostics[0]
    assert str(found.code) == "KC461"
    assert REFUSED[change][1] in found.message
    assert found.help


def _constant(model: onnx.ModelProto) -> None:
    held = next(t for t in model.graph.initializer if t.name == "up")
    model.graph.initializer.remove(held)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["up"], "stored", value=held))


def _looked_up(model: onnx.ModelProto) -> None:
    _insert(model, "wide", ("Gather", ["up", "input_ids"], "rows", {}))


def _hidden(model: onnx.ModelProto) -> None:
    held = next(t for t in model.graph.initializer if t.name == "up")
    value = numpy_helper.to_array(held).copy()
    value[0, 0] = -2e30
    _tensor(model, "up", value)
    _tensor(model, "up_scale", np.abs(value).max(0) / np.float32(127))


@pytest.mark.parametrize("change", [_constant, _looked_up, _hidden])
def test_quantised_product_that_is_no_linear_is_refused(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None]
) -> None:
    """Numerics are those of linears: this product would be bounded without its quantisers."""
    model = quantised_mlp("dynamic", stored="numbers")[0]
    change(model)
    path = saved(tmp_path, model)
    with pytest.raises(Refusal, match="a product with up is quantised, but no linear"):
        load_model(ModelRef(path.name, ONNX), tmp_path)


def test_weight_scale_must_match_the_largest_magnitude(tmp_path: Path) -> None:
    model = quantised_mlp("uint8", stored="numbers")[0]
    held = next(t for t in model.graph.initializer if t.name == "up_scale")
    _tensor(model, "up_scale", numpy_helper.to_array(held) * np.float32(1.5))
    with pytest.raises(Refusal, match=r"."):
        stated(saved(tmp_path, model))


def test_shared_transposed_parameter_is_refused(tmp_path: Path) -> None:
    """The other reader would get the unquantised parameter."""
    model = quantised_mlp("uint8", stored="numbers")[0]
    nodes = [
        helper.make_node("Transpose", ["up_read"], ["turned"], "turned", perm=[1, 0]),
        helper.make_node("Relu", ["turned"], ["positive"], "positive"),
    ]
    for node in nodes:
        model.graph.node.insert(len(model.graph.node) - 1, node)
    with pytest.raises(Refusal) as refused:
        stated(saved(tmp_path, model))
    assert "Relu of node positive" in refused.value.diagnostics[0].message


def test_product_of_parameters_with_one_quantised_is_refused(tmp_path: Path) -> None:
    """It is a constant, and the numerics of linears do not say that it is quantised."""
    model = quantised_mlp("uint8", stored="numbers")[0]
    _tensor(model, "row", np.ones((5, 8), dtype=np.float32))
    nodes = [
        helper.make_node("MatMul", ["row", "up_read"], ["product"], "product"),
        helper.make_node("Add", ["wide", "product"], ["moved"], "moved"),
    ]
    _node(model, "biased").input[0] = "moved"
    after = [node.name or node.output[0] for node in model.graph.node].index("wide") + 1
    for node in reversed(nodes):
        model.graph.node.insert(after, node)
    with pytest.raises(Refusal, match="product is not supported: it multiplies two parameters"):
        stated(saved(tmp_path, model))


def test_checker_rejects_inconsistent_codes(tmp_path: Path) -> None:
    model = quantised_mlp("uint8")[0]
    _tensor(model, "up_scale", np.ones(3, dtype=np.float32))
    with pytest.raises(Rejected, match="do not fit"):
        read(saved(tmp_path, model))
    twice = quantised_mlp("uint8")[0]
    twice.graph.node.append(_node(twice, "up_read"))
    with pytest.raises(Rejected, match="computed twice"):
        read(saved(tmp_path, twice))
