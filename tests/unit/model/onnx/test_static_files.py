"""Files of `quantize_static` of ONNX Runtime: their program, numerics and runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import ONNX, KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.model.numerics import StaticQuantiser
from kcdsl.model.onnx.files import read_onnx
from kcdsl.model.onnx.program import OnnxBlock
from kcdsl.model.onnx.quantisation import without_quantisers
from kcdsl.model.presets import resolve
from kcdsl_backends.attack.quantised_inputs import quantised_tensor
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel
from tests.support.commands import run_here
from tests.support.kernel_refs import sorted_pairs
from tests.support.onnx_files import unoptimised
from tests.support.static_files import encoder, quantised

TOKENS = [3, 1, 4, 1, 5]
BLOCKS = (
    ("attn_0", "embedded", "attended"), ("mlp_0", "attended", "summed"),
    ("layer_0", "embedded", "last_hidden_state"),
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "uint8": {"activation_type": QuantType.QUInt8},
    "channels": {"per_channel": True},
    "symmetric": {"extra_options": {"ActivationSymmetric": True, "WeightSymmetric": True}},
    "uint8 weights": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8},
    "several pairs": {"extra_options": {"DedicatedQDQPair": True}},
    "some operators": {"op_types_to_quantize": ["MatMul", "Add", "Softmax"]},
}
CONTRACT = """\
kcdsl: 1
contract: static
version: 1.0.0
model:
  onnx: model.onnx
  blocks:
    attn_0: {from: embedded, to: attended}
    mlp_0: {from: attended, to: summed}
    layer_0: {from: embedded, to: last_hidden_state}
kernels:
  train: {run: torch.eager}
  infer: {run: onnxruntime.file, numerics: NUMERICS}
data: rows.jsonl
slices: {all: {}}
clauses:
  N-ATTN: {require: "forall x in points(all): norm_inf(drift(attn_0, x)) <= 2", evidence: proof,
           level: L2}
  N-MLP: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 2", evidence: proof,
          level: L2}
  N-MLP-BALL: {require: "forall x in ball(all, 1e-3): norm_inf(drift(mlp_0, x)) <= 4",
               evidence: proof, level: L2}
  N-LAYER: {require: "forall x in points(all): norm_inf(drift(layer_0, x)) <= 4", evidence: proof,
            level: L2}
  H: {require: "max(hidden_linf) <= 4", level: L2}
"""


def section_of(path: Path) -> dict[str, Any]:
    stated = without_quantisers(read_onnx(path))[1].section()
    return {**stated, "preset": "onnxruntime-float32", "casts": "any"}


def loaded(path: Path) -> Model:
    return load_model(ModelRef(path.name, ONNX, blocks=BLOCKS), path.parent)


def file_kernel(path: Path, model: Model) -> Any:
    return load_kernel(KernelRef("onnxruntime.file", sorted_pairs(section_of(path))), model, "cpu")


def quantising(path: Path) -> Model:
    """Return the model with quantisers as stated by the numerics of the file."""

    def step(by: StaticQuantiser) -> Callable[[Tensor], Tensor]:
        return lambda x: quantised_tensor(x.double(), by).to(x.dtype)

    model, numerics = loaded(path), resolve(section_of(path))
    for part in model.module.modules():
        if isinstance(part, OnnxBlock):
            part.quantisers = {name: step(by) for name, by in numerics.quantisers}
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("activation", ["Relu", "Gelu"])
@pytest.mark.parametrize("options", OPTIONS)
def test_numerics_of_a_file_reproduce_its_results(
    tmp_path: Path, options: str, activation: str
) -> None:
    """Exceptions are sums at the edge of a step, rounded in another order."""
    path = quantised(tmp_path, encoder(activation), **OPTIONS[options])
    model, kernel = quantising(path), file_kernel(path, loaded(path))
    drawn = np.random.default_rng(5)
    exact = []
    for length in (1, 3, 5):
        tokens = drawn.integers(0, 16, length).tolist()
        wanted = unoptimised(onnx.load(path), "last_hidden_state", tokens)
        exact.append(np.abs(kernel.hidden(tokens).numpy() - wanted) < 1e-4)
        exact.append(np.abs(model.module(model.ids(tokens)).numpy() - wanted) < 1e-4)
        for name, first, _ in BLOCKS:
            x = (
                unoptimised(onnx.load(path), first, tokens)
                + drawn.standard_normal((length, 8)) * 0.5
            )
            x = torch.from_numpy(x.astype(np.float32))
            ran = kernel.block(name, x).numpy()
            exact.append(np.abs(model.block(name)(x).numpy() - ran) < 1e-4)
    assert np.mean(np.concatenate(exact)) > 0.95


@pytest.mark.parametrize("options", ["default", "uint8", "channels", "some operators"])
def test_program_is_the_model_with_the_weights_of_the_file(tmp_path: Path, options: str) -> None:
    """It includes a Relu that a quantiser made redundant."""
    path = quantised(tmp_path, encoder(), **OPTIONS[options])
    model = loaded(path)
    kept = set(without_quantisers(read_onnx(path))[1].quantisers)
    assert {"attended_DequantizeLinear_Output", "p_DequantizeLinear_Output"} <= kept
    plain = onnx.load(tmp_path / "float.onnx")
    for held in plain.graph.initializer:
        for name in (f"{held.name}_DequantizeLinear_Output", held.name):
            found = model.checkpoint.tensors.get(name)
            if found is not None:
                held.CopyFrom(numpy_helper.from_array(found.numpy(), held.name))
                break
    onnx.save(plain, tmp_path / "dequantised.onnx")
    for tokens in (TOKENS, [0, 15]):
        wanted = unoptimised(onnx.load(tmp_path / "dequantised.onnx"), "last_hidden_state", tokens)
        found = model.module(model.ids(tokens)).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS)
def test_bounds_hold_for_runs_far_beyond_the_calibrated_ranges(
    tmp_path: Path, options: str
) -> None:
    cut_off = 0.0
    for seed in range(3):
        path = quantised(tmp_path, encoder(seed=seed), **OPTIONS[options])
        model = loaded(path)
        kernel = file_kernel(path, model)
        train = resolve({"preset": "torch-eager"})
        factory = ProblemFactory(model, train, resolve(section_of(path)), torch.device("cpu"))
        drawn = np.random.default_rng(seed)
        for size in (0.1, 1.0, 8.0):
            for name, _, _ in BLOCKS[:2]:
                x = torch.from_numpy(drawn.standard_normal((5, 8)).astype(np.float32) * size)
                with torch.no_grad():
                    drift = kernel.block(name, x).double() - model.block(name)(x).double()
                bound = factory.problem(name, tuple(TOKENS)).bound(
                    x.double(), torch.zeros(1, 1, dtype=torch.float64)
                ).output.drift  # fmt: skip
                assert bool(((bound.lo <= drift) & (drift <= bound.hi)).all()), (size, name)
                cut_off = max(cut_off, float(drift.abs().max()))
    assert cut_off > 5


@pytest.mark.full
@pytest.mark.parametrize("activation", ["Relu", "Gelu"])
def test_file_is_measured_proved_and_checked(tmp_path: Path, activation: str) -> None:
    path = quantised(tmp_path, encoder(activation))
    text = CONTRACT.replace("NUMERICS", json.dumps(section_of(path)))
    (tmp_path / "contract.yaml").write_text(text, encoding="utf-8")
    rows = [{"id": f"r{i}", "tokens": t} for i, t in enumerate((TOKENS, [2, 7, 1], [9]))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = run_here("evaluate", "--format", "json", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    outcomes = {check["name"]: check["outcome"] for check in found["prechecks"]}
    assert outcomes["stale_weights"] == outcomes["coarser_layer"] == "passed", found["prechecks"]
    crossed = {one["block"]: one for one in found["crosschecks"]}
    assert set(crossed) == {"attn_0", "mlp_0", "layer_0"}
    assert all(0 < one["measured"] <= one["certified"] for one in crossed.values())
    ran = run_here("verify", "--format", "json", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    for goal in json.loads(ran.stdout)["goals"]:
        assert goal["verdict"] == "held", goal
        assert goal["evidence"]["confirmed"]
        assert 0 < goal["attack"] <= goal["bound"]


def test_block_input_includes_all_dequantisers_of_its_codes(tmp_path: Path) -> None:
    """A quantiser may have one dequantiser per reader; each is the input of the block."""
    path, first = quantised(tmp_path, encoder()), "embedded_DequantizeLinear_Output"
    model = onnx.load(path)
    place, inverse = next((i, n) for i, n in enumerate(model.graph.node) if first in n.output)
    readers = [node for node in model.graph.node if first in node.input]
    model.graph.node.insert(
        place + 1, helper.make_node("DequantizeLinear", inverse.input, ["again"], "again")
    )
    readers[1].input[0] = readers[-1].input[0] = "again"
    onnx.save(model, path)
    blocks = (("attn_0", first, "attended"),)
    loaded_with = load_model(ModelRef(path.name, ONNX, blocks=blocks), tmp_path)
    kernel = file_kernel(path, loaded_with)
    for tokens in (TOKENS, [2, 7]):
        x = torch.from_numpy(unoptimised(onnx.load(path), first, tokens))
        wanted = unoptimised(onnx.load(path), "attended", tokens)
        assert np.mean(np.abs(kernel.block("attn_0", x).numpy() - wanted) < 1e-4) > 0.9


def test_contract_numerics_are_compared_with_the_file(tmp_path: Path) -> None:
    path = quantised(tmp_path, encoder())
    section = section_of(path)
    by = section["quantisers"]
    name = "attended_DequantizeLinear_Output"
    others = [
        {**by, name: {**by[name], "scale": by[name]["scale"] * 2}},
        {**by, name: {**by[name], "zero_point": by[name]["zero_point"] ^ 1}},
        {key: one for key, one in by.items() if key != name},
        {**by, "elsewhere": by[name]},
        {},
    ]
    for quantisers in (by, *others):
        kernel = KernelRef("onnxruntime.file", sorted_pairs({**section, "quantisers": quantisers}))
        ref = ModelRef(path.name, ONNX, blocks=BLOCKS, infer=kernel)
        if quantisers is by:
            load_model(ref, tmp_path)
            continue
        with pytest.raises(Refusal) as refused:
            load_model(ref, tmp_path)
        assert str(refused.value.diagnostics[0].code) == "KC463"
    with pytest.raises(Refusal) as refused:  # PyTorch has no quantisers of tensors
        load_kernel(KernelRef("torch.eager", sorted_pairs({**section, "preset": "torch-eager"})),
                    loaded(path), "cpu")  # fmt: skip
    assert "quantises no single tensors" in refused.value.diagnostics[0].message


def test_quantisers_of_unknown_tensors_are_refused(tmp_path: Path) -> None:
    path = quantised(tmp_path, encoder())
    numerics = resolve({"preset": "onnxruntime-float32",
                        "quantisers": {"attended": {"scale": 0.1, "zero_point": 3}}})  # fmt: skip
    with pytest.raises(Refusal) as refused:
        ProblemFactory(loaded(path), resolve({"preset": "torch-eager"}), numerics,
                       torch.device("cpu"))  # fmt: skip
    assert "quantises no tensor 'attended'" in refused.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"a": {"scale": 0.1}}, "needs `scale` and `zero_point`"),
        ({"a": {"scale": 0.1, "zero_point": 256}}, "quantisers.a.zero_point is 256"),
        ({"a": {"scale": 0, "zero_point": 3}}, "quantisers.a.scale is 0"),
        ({"a": {"scale": 0.1, "zero_point": 3, "format": "int8"}}, "no key 'format'"),
        ({"a": 0.1}, "must be a mapping"),
    ],
)
def test_malformed_quantiser_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as refused:
        resolve({"preset": "onnxruntime-float32", "quantisers": section})
    assert message in refused.value.diagnostics[0].message


@pytest.mark.parametrize("more", [{"compute": "bfloat16"}, {"casts": "any_direction"}])
def test_quantisers_require_float32_and_rounding_to_nearest(more: dict[str, Any]) -> None:
    by = {"a": {"scale": 0.1, "zero_point": 3}}
    with pytest.raises(Refusal):
        resolve({"preset": "torch-eager", "quantisers": by, **more})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_format": QuantFormat.QOperator}, "quant_format=QuantFormat.QDQ"),
        ({"activation_type": QuantType.QInt16}, "INT16"),
    ],
)
def test_unsupported_forms_are_refused_with_help(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = quantised(tmp_path, encoder(), **options)
    with pytest.raises(Refusal) as refused:
        without_quantisers(read_onnx(path))
    found = refused.value.diagnostics[0]
    assert str(found.code) == "KC461"
    assert message in f"{found.message} {found.help}"


def test_bounds_at_any_length_are_refused(tmp_path: Path) -> None:
    path = quantised(tmp_path, encoder())
    factory = ProblemFactory(loaded(path), resolve({"preset": "torch-eager"}),
                             resolve(section_of(path)), torch.device("cpu"))  # fmt: skip
    with pytest.raises(Refusal) as refused:
        factory.sequences("mlp_0", 64)
    assert "quantised tensors" in refused.value.diagnostics[0].message


MOVES = {
    "transposed": "b = Transpose <perm = [0, 2, 1]> (a) r = Relu (b)"
                  " c = Transpose <perm = [0, 2, 1]> (r)",
    "reshaped": "b = Reshape (a, apart) r = Relu (b) c = Reshape (r, whole)",
    "concatenated": "b = Concat <axis = -1> (embedded, a) r = Relu (b)"
                    " c = Slice (r, second, end, last)",
    "sliced": "b = Slice (a, first, end, last) c = Relu (b)",
    "split": "b, d = Split <axis = -1> (a, halves) r = Relu (b) s = Relu (d)"
             " c = Concat <axis = -1> (s, r)",
}  # fmt: skip
MOVED = """
<ir_version: 10, opset_import: ["" : 20]>
moved (int64[1,T] input_ids) => (float[1,T,8] last_hidden_state)
{ embedded = Gather <axis = 0> (embedding, input_ids) a = MatMul (embedded, up)
  MOVE
  fed = MatMul (c, down) last_hidden_state = Add (embedded, fed) }
"""


@pytest.mark.parametrize("move", MOVES)
def test_consecutive_quantisers_are_kept_separate(tmp_path: Path, move: str) -> None:
    """ONNX Runtime would merge two quantisers between which transposes cancel.

    The merged scale is in no file; it also drops the Relu before the second one.
    """
    rng = np.random.default_rng(3)
    sizes = {"embedding": (16, 8), "up": (8, 8), "down": (8, 8)}
    held: dict[str, Any] = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()
    }
    held |= {"apart": np.array([1, -1, 2, 4]), "whole": np.array([1, -1, 8])}
    held |= {name: np.array([at]) for name, at in
             (("first", 0), ("second", 8), ("end", 16), ("last", -1))}  # fmt: skip
    held["halves"] = np.array([4, 4])
    plain = onnx.parser.parse_model(MOVED.replace("MOVE", MOVES[move]))
    read = {name for node in plain.graph.node for name in node.input}
    plain.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in held.items() if name in read
    )
    path = quantised(tmp_path, plain)
    assert "Relu" not in {node.op_type for node in onnx.load(path).graph.node}
    blocks = (("layer_0", "embedded", "last_hidden_state"),)
    model = load_model(ModelRef(path.name, ONNX, blocks=blocks), tmp_path)
    kernel, infer = file_kernel(path, model), resolve(section_of(path))
    factory = ProblemFactory(
        model, resolve({"preset": "torch-eager"}), infer, torch.device("cpu")
    )  # fmt: skip
    problem = factory.problem("layer_0", tuple(TOKENS))
    for tokens in (TOKENS, [0, 15, 7]):
        wanted = unoptimised(onnx.load(path), "last_hidden_state", tokens)
        assert np.mean(np.abs(kernel.hidden(tokens).numpy() - wanted) < 1e-4) > 0.95
        close = unoptimised(onnx.load(tmp_path / "float.onnx"), "last_hidden_state", tokens)
        found = model.module(model.ids(tokens)).numpy()
        assert np.abs(found - close).max() < 0.5
    for size in (0.1, 1.0, 8.0):
        x = torch.from_numpy(rng.standard_normal((5, 8)).astype(np.float32) * size)
        with torch.no_grad():
            drift = kernel.block("layer_0", x).double() - model.block("layer_0")(x).double()
        bound = problem.bound(x.double(), torch.zeros(1, 1, dtype=torch.float64)).output.drift
        assert bool(((bound.lo <= drift) & (drift <= bound.hi)).all()), size
