"""Models in ONNX files: the program, its blocks, and refused files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import ONNX, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.model.lowering.evaluate import graph_output
from kcdsl.model.lowering.export import block_graph
from kcdsl.model.onnx.files import read_onnx
from kcdsl.model.onnx.plan import OnnxPlan
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.statement.manifest import build_manifest
from tests.support.onnx_files import BLOCKS, DECODER, model_of, save_decoder, weights

TOKENS = [3, 1, 4, 1, 5]


def loaded(path: Path, blocks: dict[str, tuple[str, str]] = BLOCKS) -> Model:
    ends = tuple((name, *between) for name, between in blocks.items())
    return load_model(ModelRef(path.name, ONNX, blocks=ends), path.parent)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def model(decoder: Path) -> Model:
    return loaded(decoder)


def test_program_agrees_with_onnx_runtime(decoder: Path, model: Model) -> None:
    session = onnxruntime.InferenceSession(str(decoder), providers=["CPUExecutionProvider"])
    for tokens in (TOKENS, [7], [2] * 9):
        wanted = session.run(None, {"input_ids": np.asarray([tokens])})[0][0]
        found = model.module(model.ids(tokens)).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert not model.encoder_only
    assert model.limits[0] == 12


def test_weights_equal_those_of_the_file(model: Model) -> None:
    held = weights()
    matrices = {"wq", "wk", "wv", "wo", "up", "down", "head"}
    assert model.transposed == matrices
    assert {"embedding", "norm_weight", "gain", "offset", "up_bias"} | matrices == set(
        model.keys.values()
    )
    np.testing.assert_array_equal(model.checkpoint.tensors["up"].numpy(), held["up"])


HAS = {
    "norm_0": {"rms_norm"},
    "attn_0": {"rope", "softmax", "linear"},
    "mlp_0": {"gelu", "linear"},
    "layer_0": {"rms_norm", "rope", "softmax", "layer_norm", "gelu"},
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["layer_0", *(pytest.param(n, marks=pytest.mark.full) for n in ("norm_0", "attn_0", "mlp_0"))],
)
def test_elementary_operators_are_fused_into_supported_ones(model: Model, name: str) -> None:
    params = {key: model.weights[key].numpy() for key in model.weights}
    entering = model.block_inputs(TOKENS, name)
    assert entering is not None
    graph = block_graph(model, name, len(TOKENS), formats=("bfloat16",))
    wanted = model.block(name)(entering).numpy()
    found = graph_output(graph, params, entering.numpy())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert HAS[name] <= {node.op for node in graph.nodes}
    roles = {node.role for node in graph.nodes if node.op == "softmax"}
    assert roles <= {"probabilities"}


ROTATED = """
<ir_version: 11, opset_import: ["" : 23]>
rotated (int64[1,T] input_ids, int64[1,T] position_ids) => (float[1,T,8] turned)
{
  row = Gather <axis = 0> (table, input_ids)
  queries = MatMul (row, weight)
  turned = RotaryEmbedding <num_heads = 2> (queries, cosines, sines, position_ids)
}
"""


def test_rotations_read_their_tables_from_initializers(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    shapes = {"table": (6, 8), "weight": (8, 8), "cosines": (9, 2), "sines": (9, 2)}
    tensors = {n: random.uniform(-1, 1, s).astype(np.float32) for n, s in shapes.items()}
    file = model_of(ROTATED, tensors)
    onnx.save(file, tmp_path / "model.onnx")
    model = loaded(tmp_path / "model.onnx", {"turn": ("row", "turned")})
    tokens = [3, 1, 4, 1, 5]
    given = {"input_ids": np.asarray([tokens]), "position_ids": np.arange(5)[None]}
    results: Any = ReferenceEvaluator(file).run(None, given)
    wanted = results[0][0]
    np.testing.assert_allclose(model.module(model.ids(tokens)), wanted, rtol=1e-5, atol=1e-6)
    params = {key: model.weights[key].numpy() for key in model.weights}
    entering = model.block_inputs(tokens, "turn")
    assert entering is not None
    found = graph_output(block_graph(model, "turn", 5), params, entering.numpy())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


GELU = """
<ir_version: 9, opset_import: ["" : 18]>
gelu (int64[1,T] input_ids) => (float[1,T,4] FIRST, float[1,T,4] SECOND)
{
  row = Gather <axis = 0> (table, input_ids)
  over = Div (row, root)
  error = Erf (over)
  share = Add (error, one)
  twice = Mul (row, share)
  whole = Mul (twice, half)
}
"""


@pytest.mark.parametrize("ends", [("share", "whole"), ("whole", "share"), ("over", "whole")])
def test_an_output_inside_of_a_recognised_operator_is_an_output(
    tmp_path: Path, ends: tuple[str, str]
) -> None:
    """The program is the first output, also where GELU is one operator that does not need it."""
    numbers = {"root": np.sqrt(2.0), "one": 1.0, "half": 0.5}
    held = {name: np.asarray(value, np.float32) for name, value in numbers.items()}
    held["table"] = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    model = model_of(GELU.replace("FIRST", ends[0]).replace("SECOND", ends[1]), held)
    path = tmp_path / "gelu.onnx"
    path.write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    wanted = session.run(None, {"input_ids": np.asarray([TOKENS])})[0][0]
    found = loaded(path, {}).module(torch.tensor(TOKENS)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beside", [False, True])
def test_checker_reads_equal_weights(tmp_path: Path, beside: bool) -> None:
    path = save_decoder(tmp_path, beside=beside)
    found, mine = read(path), loaded(path)
    assert found.sha256 == mine.checkpoint.sha256
    assert found.root_digest == mine.checkpoint.root_digest == build_manifest(path).root_digest
    assert set(found.tensors) == set(mine.checkpoint.tensors)
    for key, tensor in found.tensors.items():
        stored = mine.checkpoint.tensors[key].numpy()
        assert tensor.shape == stored.shape
        assert bytes(tensor.data) == stored.tobytes()
    assert len(build_manifest(path).resources) == 1 + beside


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("raw", [False, True])
def test_every_storage_form_of_a_tensor_is_read_alike(tmp_path: Path, kind: int, raw: bool) -> None:
    numbers = np.random.default_rng(3).standard_normal((4, 3)).astype(np.float32)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    if raw:
        tensor = numpy_helper.from_array(numbers.astype(dtype), "matrix")
    else:
        tensor = helper.make_tensor("matrix", kind, (4, 3), numbers.astype(dtype).flatten())
    name = {1: "float", 10: "float16", 16: "bfloat16"}[kind]
    text = '<ir_version: 9, opset_import: ["" : 18]> g (int64[1,T] input_ids) => '
    text += f"({name}[1,T,3] hidden) {{ hidden = Gather (matrix, input_ids) }}"
    proto = model_of(text, {})
    proto.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    onnx.save(proto, str(path))
    stored = read(path).tensors["matrix"]
    assert bytes(stored.data) == numbers.astype(dtype).tobytes()
    mine = loaded(path, {}).checkpoint.tensors["matrix"].numpy()
    np.testing.assert_array_equal(mine, numbers.astype(dtype).astype(np.float32))


# --- what is refused ------------------------------------------------------------------------------


def _external(location: str) -> Any:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == "wq")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)

    return change


def _reversed(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _cyclic(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "layer"


def _twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[-1])


def _short(model: onnx.ModelProto) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == "wq")
    tensor.raw_data = tensor.raw_data[:-4]


def _huge(model: onnx.ModelProto) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == "wq")
    tensor.dims[:] = [1 << 40, 1 << 40]


def _large_constant(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray([1 << 40]), "many"))
    node = next(n for n in model.graph.node if n.output[0] == "full")
    node.input[0] = "many"


def _opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 9


def _domain(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "com.microsoft"


def _loop(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("body", model.graph))


def _operator(model: onnx.ModelProto) -> None:
    next(n for n in model.graph.node if n.output[0] == "root").op_type = "Elu"


def _attribute(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.output[0] == "second")
    node.attribute.append(helper.make_attribute("stash_type", 10))


def _odd_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("foo", 1))


def _attribute_twice(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.output[0] == "second")
    node.attribute.append(helper.make_attribute("axis", -1))


def _attribute_type(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.output[0] == "shares")
    node.attribute[0].CopyFrom(helper.make_attribute("axis", -1.0))


def _operands(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.output[0] == "shares")
    node.input.append("wq")


def _versions(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("ai.onnx", 17))


def _input_twice(model: onnx.ModelProto) -> None:
    model.graph.input.append(model.graph.input[0])


def _no_name(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), ""))


def _cache(model: onnx.ModelProto) -> None:
    value = helper.make_tensor_value_info("past_key", TensorProto.FLOAT, [1, 2, 3, 4])
    model.graph.input.append(value)


def _mask_of_scores(model: onnx.ModelProto) -> None:
    value = helper.make_tensor_value_info("attention_mask", TensorProto.FLOAT, [1, 1, None, None])
    model.graph.input.append(value)


def _function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    made = helper.make_function("", "Own", ["x"], ["y"], [node], model.opset_import)
    model.functions.append(made)


def _no_output(model: onnx.ModelProto) -> None:
    model.graph.node[0].output[0] = ""


def _not_computed(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "nowhere"


def _text(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(["a"], object), "words"))


def _unknown_type(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("attention_mask", 99, [1, None]))


DAMAGE = {
    "no output": (_no_output, "KC468", "has no output"),
    "not computed": (_not_computed, "KC468", "nothing computes its output 'nowhere'"),
    "text": (_text, "KC468", "the tensor 'words' holds no numbers"),
    "unknown type": (_unknown_type, "KC468", "input attention_mask is of type 99"),
    "outside": (_external("../weights"), "KC468", "no name of a file in its folder"),
    "absolute": (_external("/etc/passwd"), "KC468", "no name of a file in its folder"),
    "itself": (_external("model.onnx"), "KC468", "no name of a file in its folder"),
    "absent": (_external("weights"), "KC601", "weights"),
    "reversed": (_reversed, "KC468", "nothing before it computes"),
    "cyclic": (_cyclic, "KC468", "reads 'layer', which nothing before it computes"),
    "twice": (_twice, "KC468", "occurs twice"),
    "short": (_short, "KC468", "damaged"),
    "huge": (_huge, "KC468", "the shape"),
    "large constant": (_large_constant, "KC468", "elements"),
    "opset": (_opset, "KC468", "version 9"),
    "domain": (_domain, "KC461", "com.microsoft"),
    "loop": (_loop, "KC461", "a graph"),
    "operator": (_operator, "KC461", "Elu of node root"),
    "attribute": (_attribute, "KC461", "LayerNormalization of node second"),
    "odd attribute": (_odd_attribute, "KC468", "no such attribute 'foo'"),
    "attribute twice": (_attribute_twice, "KC468", "no such attribute 'axis', or it twice"),
    "attribute type": (_attribute_type, "KC468", "no such attribute 'axis'"),
    "operands": (_operands, "KC468", "another number of operands"),
    "versions": (_versions, "KC468", "of 2 versions"),
    "input twice": (_input_twice, "KC468", "an input occurs twice"),
    "no name": (_no_name, "KC468", "a tensor has no name"),
    "cache": (_cache, "KC468", "past_key"),
    "mask of scores": (_mask_of_scores, "KC468", "input attention_mask is FLOAT of [1, 1,"),
    "function": (_function, "KC468", "functions of its own"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_files_without_a_supported_program_are_refused(tmp_path: Path, damage: str) -> None:
    change, code, said = DAMAGE[damage]
    proto = model_of(DECODER, weights())
    change(proto)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(Refusal) as refused:
        loaded(path, {})
    assert str(refused.value.diagnostics[0].code) == code
    assert said in refused.value.diagnostics[0].message


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL])
def test_inputs_other_than_tokens_have_the_type_of_the_file(tmp_path: Path, kind: int) -> None:
    """An integer mask in place of floats would be folded in float64."""
    proto = model_of(DECODER, weights())
    for name, sizes in (("attention_mask", [1, None]), ("token_type_ids", [None])):
        proto.graph.input.append(helper.make_tensor_value_info(name, kind, sizes))
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    known, _ = OnnxPlan(read_onnx(path)).at(3)
    wanted = helper.tensor_dtype_to_np_dtype(kind)
    assert (known["attention_mask"].dtype, known["attention_mask"].shape) == (wanted, (1, 3))
    assert (known["token_type_ids"].dtype, known["token_type_ids"].shape) == (wanted, (3,))


def test_truncated_and_foreign_files_are_refused_by_both(tmp_path: Path) -> None:
    data = save_decoder(tmp_path).read_bytes()
    for name, content in (("cut.onnx", data[:-7]), ("text.onnx", b"no graph"), ("no.onnx", b"")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(Refusal):
            loaded(path, {})
        with pytest.raises(Rejected, match="checkpoint/format"):
            read(path)


@pytest.mark.parametrize("location", ["../weights", "/etc/passwd", "a/b", ".."])
def test_checker_follows_no_path_out_of_the_folder(tmp_path: Path, location: str) -> None:
    proto = model_of(DECODER, weights())
    _external(location)(proto)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    for reads in (read, build_manifest):
        with pytest.raises(Rejected):
            reads(path)


def test_checker_refuses_ambiguous_files(tmp_path: Path) -> None:
    proto = model_of(DECODER, weights())
    again = model_of(DECODER, {"wq": np.zeros((8, 8), dtype=np.float32)})
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString() + again.SerializeToString())
    with pytest.raises(Rejected, match="one graph"):
        read(path)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (("embeded", "layer"), "did you mean"),
        (("attention", "weighted"), "reads more of the tokens"),
        (("weighted", "layer"), "reads more of the tokens"),
        (("embedded", "scores"), "it must be hidden states"),
    ],
)
def test_invalid_blocks_are_refused(decoder: Path, ends: tuple[str, str], said: str) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(decoder, {"part": ends})
    found = refused.value.diagnostics[0]
    assert str(found.code) == "KC459"
    assert said in f"{found.message} {found.help}"


def test_unsupported_length_is_refused(tmp_path: Path) -> None:
    proto = model_of(DECODER, weights())
    fixed = next(t for t in proto.graph.initializer if t.name == "width_axis")
    fixed.CopyFrom(numpy_helper.from_array(np.asarray([2]), "width_axis"))
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(Refusal) as refused:
        loaded(path, {})
    assert "fails on 3 tokens" in refused.value.diagnostics[0].message
