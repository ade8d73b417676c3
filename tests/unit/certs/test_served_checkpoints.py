"""Proofs about an inference kernel with a checkpoint of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.interval.served import read_served
from tests.support import proofs
from tests.support.quantised import FORMATS

Document = dict[str, Any]
ROWS, INPUTS, OUTPUTS = 2, 32, 16
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(9))
INT8, CHANNELS = ("int8_full", "per_channel"), ("fp8_e4m3", "per_channel")
TOKENS = ("fp8_e4m3", "per_token")


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a proof of a linear, and its checkpoint."""
    graph = proofs.Graph((ROWS, INPUTS))
    x = graph.add("input", [], (ROWS, INPUTS))
    graph.add("linear", [x, graph.param("w.weight", WEIGHT.numpy())], (ROWS, OUTPUTS))
    path = tmp_path_factory.mktemp("served") / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = np.random.default_rng(3).standard_normal((ROWS, INPUTS))
    side = proofs.numerics("float32")
    return proofs.document(graph, side, side, sha256, centre, 2.0**-10), path


def stored(
    folder: Path, name: str, more: Mapping[str, torch.Tensor] | None = None, weight: Any = WEIGHT
) -> Path:
    """Write the weight in a format of serving libraries, or as it is; `more` replaces tensors."""
    config: Document = {}
    parts = {"weight": weight}
    if name:
        method, write = FORMATS[name]
        config, (parts, _) = {"quantization_config": method}, write(weight)
    tensors = {f"w.{key}": part.contiguous() for key, part in {**parts, **(more or {})}.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def judged(
    linear: tuple[Document, Path],
    folder: Path,
    weights: tuple[str, str] | None = None,
    activations: Any = ("none", "none"),
    region: Document | None = None,
) -> tuple[str, str]:
    """Return reason and detail for a proof with this checkpoint of the inference kernel."""
    digest = read_served(folder, {"w.weight"}).digest
    side = proofs.numerics("float32", weights=weights, activations=activations)
    (first,) = linear[0]["cases"]
    document = {
        **linear[0],
        "checkpoint": {**linear[0]["checkpoint"], "infer": digest},
        "numerics": {**linear[0]["numerics"], "infer": side},
        "cases": [{**first, "region": {**first["region"], **(region or {})}}],
    }
    found = recheck(proofs.dump(document), linear[1], served=folder)
    return found.reason, found.detail


def test_proofs_about_two_checkpoints_are_accepted(
    linear: tuple[Document, Path], tmp_path: Path
) -> None:
    assert judged(linear, stored(tmp_path, ""))[0] == "ok"
    for name in ("fp8 channel", "gptq", "awq"):
        assert judged(linear, stored(tmp_path, name))[0] == "ok"
    assert judged(linear, stored(tmp_path, "int8 channel"), INT8)[0] == "ok"
    assert judged(linear, stored(tmp_path, "fp8 channel"), CHANNELS)[0] == "ok"


def test_checkpoint_of_the_inference_kernel_is_the_one_of_the_proof(
    linear: tuple[Document, Path], tmp_path: Path
) -> None:
    digest = read_served(stored(tmp_path, "gptq"), {"w.weight"}).digest
    document = {**linear[0], "checkpoint": {**linear[0]["checkpoint"], "infer": digest}}
    assert recheck(proofs.dump(document), linear[1], served=tmp_path).reason == "ok"
    assert recheck(proofs.dump(document), linear[1]).reason == "checkpoint/served"
    config = tmp_path / "config.json"
    config.write_text(config.read_text() + " ")
    found = recheck(proofs.dump(document), linear[1], served=tmp_path)
    assert (found.reason, found.detail[:24]) == ("checkpoint/digest", "the inference kernel's c")
    stored(tmp_path, "gptq v2")
    assert recheck(proofs.dump(document), linear[1], served=tmp_path).reason == "checkpoint/digest"


SERVED, SHAPE = "parameter/served", "parameter/shape"


@pytest.mark.parametrize(
    ("name", "more", "weights", "code", "message"),
    [
        ("", {}, INT8, SERVED, "is not quantised"),
        ("int8 channel", {}, CHANNELS, SERVED, "is stored as int8 per_channel"),
        ("int8 channel", {}, ("int8_full", "per_tensor"), SERVED, "is stored as int8 per_channel"),
        ("int8 channel", {}, ("int8", "per_channel"), SERVED, "is stored as int8 per_channel"),
        ("fp8 channel", {}, INT8, SERVED, "is stored as fp8_e4m3 per_channel"),
        ("fp8 tensor", {}, CHANNELS, SERVED, "is stored as fp8_e4m3 per_tensor"),
        ("gptq", {}, ("int4_full", "group_128"), SERVED, "is stored as"),
        ("", {"weight": WEIGHT[:1]}, None, SHAPE, "another shape in the two"),
        ("", {"weight": WEIGHT[:, :1]}, None, SHAPE, "another shape in the two"),
        ("", {"weight": WEIGHT.T}, None, SHAPE, "another shape in the two"),
        ("", {"weight": WEIGHT[None]}, None, SHAPE, "another shape in the two"),
        ("", {"weight": WEIGHT[0]}, None, SHAPE, "another shape in the two"),
    ],
)
def test_matrices_stored_in_another_way_are_refused(
    linear: tuple[Document, Path], tmp_path: Path, name: str, more: Any, weights: Any, code: str,
    message: str,
) -> None:  # fmt: skip
    reason, detail = judged(linear, stored(tmp_path, name, more), weights)
    assert reason == code
    assert message in detail


@pytest.mark.parametrize("name", ["fp8 channel", "gptq", "awq"])
def test_quantised_matrices_of_another_shape_are_refused(
    linear: tuple[Document, Path], tmp_path: Path, name: str
) -> None:
    folder = stored(tmp_path, name, weight=WEIGHT[:8])
    reason, detail = judged(linear, folder)
    assert (reason, "another shape" in detail) == (SHAPE, True)


def test_scales_larger_than_their_codes_need_are_refused(
    linear: tuple[Document, Path], tmp_path: Path
) -> None:
    """Rules of late scales bound a scale by the largest number of the matrix."""
    parts, _ = FORMATS["fp8 channel"][1](WEIGHT)
    assert judged(linear, stored(tmp_path, "fp8 channel"), CHANNELS, TOKENS)[0] == "ok"
    codes, scale = parts["weight"].clone(), parts["weight_scale"].clone()
    codes[3], scale[3] = torch.zeros(INPUTS), 1000.0
    folder = stored(tmp_path, "fp8 channel", {"weight": codes, "weight_scale": scale})
    assert judged(linear, folder, CHANNELS)[0] == "ok"
    reason, detail = judged(linear, folder, CHANNELS, TOKENS)
    assert (reason, "larger than its codes need" in detail) == (SERVED, True)


def test_regions_of_weights_are_of_one_checkpoint(
    linear: tuple[Document, Path], tmp_path: Path
) -> None:
    reason, detail = judged(linear, stored(tmp_path, ""), region={"weights": "0.001"})
    assert (reason, "of two checkpoints" in detail) == (SERVED, True), detail


def turned(folder: Path, *, also: bool = False) -> tuple[Document, Path]:
    """Return a proof that reads the weight transposed; with `also` a second case reads it as it
    is."""
    square, documents = WEIGHT[:, :OUTPUTS].contiguous(), []
    path = folder / "train" / "turned.safetensors"
    path.parent.mkdir()
    sha256 = proofs.write_safetensors(path, {"w.weight": square.T.numpy()})
    attrs: Any
    for attrs in ({"transposed": True}, {}):
        graph = proofs.Graph((ROWS, OUTPUTS))
        x = graph.add("input", [], (ROWS, OUTPUTS))
        w = graph.add("param", [], (OUTPUTS, OUTPUTS), key="w.weight", **attrs)
        graph.add("linear", [x, w], (ROWS, OUTPUTS))
        graph.tensors["w.weight"] = square.numpy()
        side, centre = proofs.numerics("float32"), np.ones((ROWS, OUTPUTS))
        documents.append(proofs.document(graph, side, side, sha256, centre))
    first, second = documents
    if also:
        first["graphs"] |= second["graphs"]
        first["cases"].append({**second["cases"][0], "name": "case-1"})
    return first, path


def test_quantised_matrices_are_not_read_transposed(tmp_path: Path) -> None:
    proof = turned(tmp_path)
    assert recheck(proofs.dump(proof[0]), proof[1]).reason == "ok"
    square = WEIGHT[:, :OUTPUTS].contiguous()
    assert judged(proof, stored(tmp_path, "", weight=square.T.contiguous()))[0] == "ok"
    for weight in (square, square.T.contiguous()):
        reason, detail = judged(proof, stored(tmp_path, "fp8 channel", weight=weight))
        assert (reason, "quantised and read transposed" in detail) == (SERVED, True)


def test_all_graphs_read_a_matrix_in_one_way(tmp_path: Path) -> None:
    """The digest is that of one of the two readings."""
    document, path = turned(tmp_path, also=True)
    found = recheck(proofs.dump(document), path)
    assert found.reason == "graph/field"
    assert "'w.weight' is read transposed and as it is" in found.detail
