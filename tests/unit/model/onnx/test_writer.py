"""Block graphs written as ONNX models: runtimes compute the values of the graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import scipy.special
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from kcdsl.ir.terms import ONNX, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.loader import load_model
from kcdsl.model.lowering.evaluate import graph_output
from kcdsl.model.lowering.export import block_graph
from kcdsl.model.onnx.writer import block_model
from tests.conftest import Cli
from tests.support.decoders import FORMS, saved_model
from tests.support.static_files import encoder

TOKENS = (3, 1, 4, 1, 5)
BLOCKS = ("attn_0", "mlp_0", "layer_0", "model")


class Erf(OpRun):
    """The operator in the format of its operand; that of the package computes in float32."""

    op_domain = ""

    def _run(self, x: Any) -> tuple[Any]:
        return (scipy.special.erf(x).astype(x.dtype),)


def reference(model: onnx.ModelProto) -> ReferenceEvaluator:
    """Return the interpreter of the `onnx` package, which rounds the result of every operator."""
    return ReferenceEvaluator(model, new_ops=[Erf])


def graph_of(model: Model, block: str, *formats: str) -> tuple[BlockGraph, dict[str, Any]]:
    """Return a block's graph on TOKENS, and the tensors of the checkpoint."""
    tokens = TOKENS if block == "model" else None
    graph = block_graph(model, block, len(TOKENS), tokens, formats)
    return graph, {key: model.weights.narrow(key) for key in graph.parameters}


def drawn(graph: BlockGraph) -> np.ndarray[Any, Any] | None:
    shape = graph.input_shape
    return None if shape is None else np.random.default_rng(0).standard_normal(shape)


def fed(x: np.ndarray[Any, Any] | None, dtype: Any) -> dict[str, Any]:
    return {} if x is None else {"hidden": x.astype(dtype)}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.sample(1)
def test_written_decoder_equals_its_graph(name: str, block: str, tmp_path: Path) -> None:
    graph, params = graph_of(saved_model(name, tmp_path), block)
    x = drawn(graph)
    unpinned = replace(graph, nodes=tuple(replace(node, format="") for node in graph.nodes))
    exact = reference(block_model(unpinned, params, "float64"))
    (found,) = np.asarray(exact.run(None, fed(x, np.float64)))
    np.testing.assert_allclose(found, graph_output(graph, params, x), rtol=1e-10, atol=1e-10)
    session = onnxruntime.InferenceSession(
        block_model(graph, params).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, fed(x, np.float32))[0]
    wanted = graph_output(graph, params, x, "float32")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_block_with_transposed_weights_is_written(tmp_path: Path) -> None:
    onnx.save(encoder(), tmp_path / "model.onnx")
    blocks = (("mlp_0", "normed", "fed"),)
    model = load_model(ModelRef("model.onnx", ONNX, blocks=blocks), tmp_path)
    graph, params = graph_of(model, "mlp_0")
    assert any(node.attrs.get("transposed") for node in graph.nodes)
    x = drawn(graph)
    written = reference(block_model(graph, params))
    (found,) = np.asarray(written.run(None, fed(x, np.float32)))
    np.testing.assert_allclose(found, graph_output(graph, params, x), rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("block", BLOCKS[:3])
def test_written_encoder_equals_its_graph(block: str, save_model: Callable[..., Model]) -> None:
    graph, params = graph_of(save_model("bert"), block)
    x = drawn(graph)
    exact = reference(block_model(graph, params, "float64"))
    (found,) = np.asarray(exact.run(None, fed(x, np.float64)))
    np.testing.assert_allclose(found, graph_output(graph, params, x), rtol=1e-10, atol=1e-10)


def graph_by_hand(*nodes: Node, width: int = 4) -> BlockGraph:
    """Return a graph whose nodes have the shape of its input x, [1, width]."""
    x = Node("x", "input", (), (1, width))
    return BlockGraph("by_hand", (x, *nodes), nodes[-1].name, {}, (1, width))


def run_by_hand(graph: BlockGraph, x: list[float], own: str) -> list[float]:
    """Return the results of all operators, after a comparison with the values of the graph."""
    dtype = {"float16": np.float16, "float32": np.float32}[own]
    model = reference(block_model(graph, {}, own))
    with np.errstate(over="ignore"):
        (found,) = np.asarray(model.run(None, {"hidden": np.array([x], dtype=dtype)}))
    np.testing.assert_array_equal(found, graph_output(graph, {}, np.array([x]), own))
    return list(found[0].astype(float))


def computed(op: str, name: str, *inputs: str, **more: Any) -> Node:
    return Node(name, op, inputs, (1, 4), **more)


def test_pinned_result_is_stored_in_its_format() -> None:
    wide = graph_by_hand(
        computed("shift", "more", "x", attrs={"offset": 1.0}, format="float32"),
        computed("sub", "less", "more", "x"),
    )
    narrow = graph_by_hand(
        computed("shift", "more", "x", attrs={"offset": 1.0}), computed("sub", "less", "more", "x")
    )
    x = [2048.0, 4096.0, 1.0, -2048.0]
    assert run_by_hand(wide, x, "float16") == [1.0, 1.0, 1.0, 1.0]
    assert run_by_hand(narrow, x, "float16") == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("square", ["", "float32"])
def test_elementary_norm_stores_its_parts(square: str) -> None:
    parts = [["square", square], ["mean", "float32"], ["shift", "float32"], ["root", "float32"]]
    attrs = {"eps": 1e-6, "form": "written", "parts": parts}
    graph = graph_by_hand(computed("rms_norm", "normed", "x", attrs=attrs))
    found = run_by_hand(graph, [300.0, 300.0, -300.0, 300.0], "float16")
    assert found == ([1.0, 1.0, -1.0, 1.0] if square else [0.0, 0.0, -0.0, 0.0])


def test_parameter_of_another_shape_is_refused(save_model: Callable[..., Model]) -> None:
    graph, params = graph_of(save_model("llama"), "mlp_0")
    key = graph.parameters[0]
    with pytest.raises(ValueError, match="has shape"):
        block_model(graph, {**params, key: torch.zeros(3, 3)})


@pytest.mark.full
def test_compile_writes_a_block(cli: Cli, repository: Path, tmp_path: Path) -> None:
    example = tmp_path / "tiny_lm"
    shutil.copytree(repository / "examples" / "tiny_lm", example)
    emit = ("compile", "--emit", "onnx", "--block")
    ran = cli(*emit, "attn_0", "--tokens", "3", "-o", "block.onnx", cwd=example)
    assert (ran.code, ran.stdout) == (0, "")
    model = onnx.load(str(example / "block.onnx"))
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 3
    assert cli(*emit, "model", "-o", "no.onnx", cwd=example).code == 2
    assert cli(*emit, "attn_0", cwd=example).code == 2
    assert cli("compile", "--block", "attn_0", cwd=example).code == 2
    assert not (example / "no.onnx").exists()
