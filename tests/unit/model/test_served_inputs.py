"""Second checkpoints: stored scales of inputs, and transposed matrices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import CHECKPOINT_TENSORS, NUMERICS
from kcdsl.ir.terms import ModelRef
from kcdsl.model import registry
from kcdsl.model.checkpoint.headers import metadata_of
from kcdsl.model.checkpoint.modules import transposed_names
from kcdsl.model.loader import load_model
from kcdsl.model.numerics.weights import plain_parameter
from kcdsl.model.presets import resolve
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import array_digest
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.served import read_served
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support.quantised import quantise
from tests.support.small_models import DECODER, write_model

CONFIG = {**DECODER, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
BASE = "model.layers.0.mlp.up_proj"
KEY = f"{BASE}.weight"
SCALE = 0.03125
WEIGHTS = {
    "fp8 tensor": ("fp8_e4m3", "per_tensor"),
    "fp8 of one scale": ("fp8_e4m3", "per_tensor"),
    "fp8 of transformers": ("fp8_e4m3", "per_tensor"),
    "fp8 of DeepSeek": ("fp8_e4m3", "block_128"),
    "fbgemm": ("fp8_e4m3", "per_channel"),
    "modelopt fp8": ("fp8_e4m3", "per_tensor"),
    "int8 channel": ("int8_full", "per_channel"),
    "nvfp4": ("fp4_e2m1", "nvfp4"),
    "modelopt nvfp4": ("fp4_e2m1", "nvfp4"),
    "torchao per channel": ("int8_full", "per_channel"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small model."""
    write_model(tmp_path, config=CONFIG)
    return tmp_path


def both(
    folder: Path,
    name: str,
    activations: dict[str, Any],
    key: str = KEY,
    **more: dict[str, Any],
) -> tuple[str, str]:
    """Return both programs' answers for numerics of codes with such inputs: "" or the reason."""
    form, layout = WEIGHTS[name]
    numerics = resolve({
        "preset": "torch-eager", "compute": "bfloat16", "activations": activations,
        "weights": {"format": form, "scale": layout}, **more,
    })  # fmt: skip
    model = load_model(
        ModelRef("model.safetensors", "llama", tokenizer="bytes", served="quantised"), folder
    )
    assert model.served is not None
    found = ["", ""]
    try:
        model.served.refuse_other_storage(key, numerics)
    except Refusal as refused:
        found[0] = f"{refused.diagnostics[0].code.id} {refused.diagnostics[0].message}"
    kernel = replace(parse_kernel(numerics.to_json(), "infer"), served=True)
    tensors, served = read(folder / "model.safetensors").tensors, folder / "quantised"
    single = load_file(folder / "model.safetensors")[key].numpy()
    digest = array_digest("float32", single.shape, single.tobytes())
    held = Parameters(tensors, {key: digest}, read_served(served, {key}))
    try:
        held.linear(key, kernel)
    except Rejected as rejected:
        found[1] = f"{rejected.reason} {rejected}"
    return found[0], found[1]


def stored(folder: Path, name: str, **parts: torch.Tensor) -> None:
    """Write the quantised form of the model with additional tensors beside every matrix."""
    place = folder / "quantised"
    if name == "torchao per channel":
        save_torchao(folder, place, parts)
        return
    quantise(folder, place, name)
    held = load_file(place / "model.safetensors")
    bases = {key.rpartition(".")[0] for key in held if "_proj." in key}
    more = {f"{base}.{part}": one.clone() for base in bases for part, one in parts.items()}
    save_file({**held, **more}, place / "model.safetensors")


def save_torchao(folder: Path, place: Path, parts: dict[str, torch.Tensor]) -> None:
    """Save int8 weights per channel as torchao does, with additional tensors per matrix."""
    quantise(folder, place, "torchao")
    path = place / "model.safetensors"
    held, told = load_file(path), metadata_of(path.read_bytes())
    for key in [key for key in held if key.endswith("_weight_qdata")]:
        base = key.removesuffix("._weight_qdata")
        code = held[key]
        held[f"{base}._weight_scale"] = torch.full((code.shape[0], 1), 0.01)
        held[f"{base}._weight_zero_point"] = torch.zeros(code.shape[0], 1, dtype=torch.int8)
        held |= {f"{base}._weight_{part}": one.clone() for part, one in parts.items()}
        names = ["zero_point", "qdata", "scale", *parts]
        said = {"block_size": [1, code.shape[1]]}
        told[f"{base}.weight"] = json.dumps(
            {"_type": "Int8Tensor", "_data": said, "_tensor_data_names": names}
        )
    save_file(held, path, told)


def number(value: float) -> torch.Tensor:
    return torch.tensor([value])


def static(form: str, scale: object = SCALE, **more: object) -> dict[str, Any]:
    return {"format": form, "scale": "static", "input_scale": scale, **more}


CASES: list[tuple[str, dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]] = [
    # format, additional tensors, their numerics, and numerics of another checkpoint
    ("fp8 of one scale", {}, static("fp8_e4m3"), static("fp8_e4m3", SCALE * 1.001)),
    ("fp8 of transformers", {}, static("fp8_e4m3"), static("fp8_e4m3", {"*": 1.0, BASE: 2.0})),
    (
        *("fp8 tensor", {"input_scale": number(SCALE)}, static("fp8_e4m3", {BASE: SCALE})),
        {"format": "fp8_e4m3", "scale": "per_tensor"},
    ),
    (
        *("fp8 tensor", {"input_scale": torch.linspace(1, 2, 32)}),
        static("fp8_e4m3", {BASE: torch.linspace(1, 2, 32).tolist()}),
        static("fp8_e4m3", 1.0),
    ),
    (
        *("fbgemm", {}, {"format": "fp8_e4m3", "scale": "per_token", "amax_limit": 1200.0}),
        {"format": "fp8_e4m3", "scale": "per_token"},
    ),
    ("int8 channel", {"input_scale": number(SCALE)}, static("int8"), static("int8", 0.5)),
    (
        *("int8 channel",),
        {"input_scale": number(SCALE), "input_zero_point": torch.tensor([-3], dtype=torch.int8)},
        static("uint8", input_zero_point=125),
        static("uint8", input_zero_point=128),
    ),
    (
        *("int8 channel",),
        {"input_scale": number(SCALE), "input_zero_point": torch.tensor([-3], dtype=torch.int8)},
        static("uint8", input_zero_point=125),
        static("int8"),
    ),
    (
        *("nvfp4", {"input_global_scale": number(48.0)}),
        {"format": "fp4_e2m1", "scale": "nvfp4", "input_scale": float(np.float32(1) / 48)},
        {"format": "fp4_e2m1", "scale": "nvfp4", "input_scale": 48.0},
    ),
    (
        *("modelopt nvfp4", {"input_scale": number(SCALE)}),
        {"format": "fp4_e2m1", "scale": "nvfp4", "input_scale": SCALE},
        {"format": "fp4_e2m1", "scale": "nvfp4"},
    ),
    (
        *("torchao per channel", {"act_quant_scale": torch.full((1, 1), SCALE)}),
        static("int8_full"),
        {"format": "int8_full", "scale": "per_token"},
    ),
]


@pytest.mark.parametrize(("name", "parts", "same", "other"), CASES)
def test_stored_input_scales_must_match_the_numerics(
    folder: Path,
    name: str,
    parts: dict[str, torch.Tensor],
    same: dict[str, Any],
    other: dict[str, Any],
) -> None:
    stored(folder, name, **parts)
    assert both(folder, name, same) == ("", "")
    mine, theirs = both(folder, name, other)
    assert NUMERICS.id in mine
    assert "parameter/served" in theirs


@pytest.mark.parametrize(
    "parts",
    [
        {"input_scale": number(0.0)},
        {"input_scale": number(float("nan"))},
        {"input_scale": number(float("inf"))},
        {"input_scale": number(-SCALE)},
        {"input_scale": torch.ones(0)},
        {"input_scale": torch.ones(1, dtype=torch.int32)},
        {"input_scale": number(SCALE), "activation_scale": number(SCALE)},
        {"input_zero_point": torch.zeros(1, dtype=torch.int8)},
        {"input_scale": number(SCALE), "input_zero_point": number(0.0)},
        {"input_scale": number(SCALE), "input_zero_point": torch.tensor([0, 1])},
    ],
)
def test_invalid_input_scales_are_refused(folder: Path, parts: dict[str, torch.Tensor]) -> None:
    stored(folder, "fp8 tensor", **parts)
    mine, theirs = both(folder, "fp8 tensor", static("fp8_e4m3"))
    assert CHECKPOINT_TENSORS.id in mine
    assert theirs.startswith(("served/tensor", "parameter/not-finite"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fp8 of one scale", {"weight_scale_inv": number(1.0)}),
        ("fp8 of one scale", {"weight_scale": torch.ones(2)}),
        ("fp8 of one scale", {"weight_scale": torch.ones(1, dtype=torch.int32)}),
        ("fbgemm", {"weight_scale": torch.ones(1)}),
        ("fbgemm", {"input_scale_ub": number(1000.0)}),
    ],
)
def test_input_scales_outside_float8_are_refused(
    folder: Path, name: str, parts: dict[str, torch.Tensor]
) -> None:
    stored(folder, name, **parts)
    stated = {"format": "fp8_e4m3", "scale": "per_token", "amax_limit": 1200.0}
    mine, theirs = both(folder, name, stated if name == "fbgemm" else static("fp8_e4m3"))
    assert "the quantised weight" in mine
    assert "served/tensor" in theirs


def cache(scale: str = "static", **scales: object) -> dict[str, Any]:
    return {"kv_cache": {"format": "fp8_e4m3", "scale": scale, **scales}}


@pytest.mark.parametrize(
    ("stated", "able"),
    [
        ({}, True),
        (cache(key_scale=0.5, value_scale=0.25), True),
        (cache(key_scale={BASE: [0.5, 0.5], "*": 3.0}, value_scale=0.25), True),
        (cache(key_scale=0.5, value_scale=0.5), False),
        (cache(key_scale=0.25, value_scale=0.25), False),
        (cache(key_scale={BASE: [0.5, 0.25]}, value_scale=0.25), False),
        (cache(key_scale={"other": 0.5}, value_scale=0.25), False),
        (cache("per_head"), False),
        (cache("none"), False),
    ],
)
def test_stored_cache_scales_must_match_the_numerics(
    folder: Path, stated: dict[str, Any], able: bool
) -> None:
    stored(folder, "modelopt fp8", k_scale=torch.tensor(0.5), v_scale=number(0.25))
    found = both(folder, "modelopt fp8", {"format": "fp8_e4m3", "scale": "per_tensor"}, **stated)
    assert found == ("", "") if able else all(found)


ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("linear", "stated", "able"),
    [
        ("k_proj", {}, True),
        ("k_proj", cache(key_scale=0.5, value_scale=3.0), True),
        ("v_proj", cache(key_scale=3.0, value_scale=0.5), True),
        ("k_proj", cache(key_scale=3.0, value_scale=0.5), False),
        ("v_proj", cache(key_scale=0.5, value_scale=3.0), False),
        ("k_proj", cache("per_head"), False),
    ],
)
def test_cache_scales_in_compressed_tensors_layout(
    folder: Path, linear: str, stated: dict[str, Any], able: bool
) -> None:
    quantise(folder, folder / "quantised", "fp8 tensor")
    path, key = folder / "quantised" / "model.safetensors", f"{ATTENTION}.{linear}.weight"
    save_file({**load_file(path), f"{ATTENTION}.{linear}.output_scale": number(0.5)}, path)
    inputs = {"format": "fp8_e4m3", "scale": "per_tensor"}
    found = both(folder, "fp8 tensor", inputs, key, **stated)
    assert found == ("", "") if able else all(found)


def test_output_scales_of_other_linears_are_refused(folder: Path) -> None:
    """A kernel may quantise the output of such a linear, and no bound covers this rounding."""
    quantise(folder, folder / "quantised", "fp8 tensor")
    path = folder / "quantised" / "model.safetensors"
    save_file({**load_file(path), f"{BASE}.output_scale": number(0.5)}, path)
    with pytest.raises(Refusal, match="output_scale"):
        both(folder, "fp8 tensor", {"format": "fp8_e4m3", "scale": "per_tensor"})
    tensors = read(folder / "model.safetensors").tensors
    single = load_file(folder / "model.safetensors")[KEY].numpy()
    digest = array_digest("float32", single.shape, single.tobytes())
    held = Parameters(tensors, {KEY: digest}, read_served(folder / "quantised", {KEY}))
    plain = resolve({"preset": "torch-eager", "compute": "bfloat16"})
    kernel = replace(parse_kernel(plain.to_json(), "infer"), served=True)
    with pytest.raises(Rejected, match="outputs of"):
        held.linear(KEY, kernel)


def test_both_programs_read_transposed_matrices(tmp_path: Path) -> None:
    """GPT-2 stores matrices as [in, out], in its second checkpoint too."""
    config = {"vocab_size": 16, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8}
    module = registry.load("gpt2").build(config)
    turned, drawn = transposed_names(module), torch.Generator().manual_seed(3)
    state = {n: torch.randn(t.shape, generator=drawn) for n, t in module.state_dict().items()}
    del state["lm_head.weight"]
    (tmp_path / "second").mkdir()
    for place, kind in ((tmp_path, torch.float32), (tmp_path / "second", torch.float16)):
        held = {n: (t.T if n in turned else t).contiguous().to(kind) for n, t in state.items()}
        save_file(held, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    model = load_model(
        ModelRef("model.safetensors", "gpt2", tokenizer="bytes", served="second"), tmp_path
    )
    assert model.served is not None
    assert len(turned) == 4
    numerics = resolve({"preset": "torch-eager", "compute": "float32"})
    kernel = replace(parse_kernel(numerics.to_json(), "infer"), served=True)
    digests = {
        n: array_digest("float32", tuple(t.shape), t.numpy().tobytes()) for n, t in state.items()
    }
    checker = Parameters(
        *(read(tmp_path / "model.safetensors").tensors, digests),
        *(read_served(tmp_path / "second", set(state)), turned),
    )
    for name, tensor in state.items():
        meant = tensor.to(torch.float16).float()
        assert torch.equal(model.served[name], meant), name
        assert torch.equal(plain_parameter(model.served[name], numerics), meant), name
        assert np.array_equal(checker.plain(name, kernel), meant.double().numpy()), name
        if tensor.dim() == 2:
            assert np.array_equal(checker.linear(name, kernel), meant.double().numpy()), name


# --- codes that a configuration states ------------------------------------------------------------


def restate(folder: Path, name: str, change: dict[str, Any]) -> None:
    """Change the configuration of the quantised form, or the metadata of torchao."""
    place = folder / "quantised"
    if name == "torchao per channel":
        path = place / "model.safetensors"
        told = metadata_of(path.read_bytes())
        of_key = json.loads(told[KEY])
        of_key["_data"] |= change
        save_file(load_file(path), path, {**told, KEY: json.dumps(of_key)})
        return
    document = json.loads((place / "config.json").read_text())
    config = document["quantization_config"]
    config |= {key: one for key, one in change.items() if key != "input_activations"}
    if "input_activations" in change:
        config["config_groups"]["group_0"]["input_activations"] = change["input_activations"]
    (place / "config.json").write_text(json.dumps(document))


def dynamic(form: str, scale: str) -> dict[str, Any]:
    return {"format": form, "scale": scale}


BYTES = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FLOATS = {**BYTES, "type": "float"}
ROWS = {
    "act_quant_kwargs": {
        "_type": "QuantizeTensorToInt8Kwargs",
        "_data": {
            "granularity": {"_type": "PerRow", "_data": {"dim": -1}},
            "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
        },
    }
}
STATED: list[tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = [
    # format, its configuration, its numerics, and numerics of other checkpoints
    (
        *("int8 channel", {"input_activations": BYTES}, dynamic("int8", "per_token")),
        [dynamic("fp8_e5m2", "per_tensor"), dynamic("int8", "per_tensor"), static("int8")],
    ),
    (
        *("fp8 tensor", {"input_activations": FLOATS}, dynamic("fp8_e4m3", "per_token")),
        [dynamic("fp8_e5m2", "per_token"), dynamic("fp8_e4m3", "group_128")],
    ),
    (
        *(
            "fp8 tensor",
            {"input_activations": {**FLOATS, "dynamic": False, "strategy": "tensor"}},
        ),
        *(static("fp8_e4m3"), [dynamic("fp8_e4m3", "per_token")]),
    ),
    ("fp8 tensor", {"input_activations": None}, dynamic("int8", "per_token"), []),
    (
        *("fp8 of DeepSeek", {}, dynamic("fp8_e4m3", "group_128")),
        [dynamic("fp8_e4m3", "per_token"), dynamic("int8", "group_128")],
    ),
    (
        *("fp8 of DeepSeek", {"scale_fmt": "ue8m0"}, dynamic("fp8_e4m3", "group_128_e8m0")),
        [dynamic("fp8_e4m3", "group_128")],
    ),
    (
        *("fbgemm", {}, {**dynamic("fp8_e4m3", "per_token"), "amax_limit": 1200.0}),
        [{**dynamic("fp8_e4m3", "per_tensor"), "amax_limit": 1200.0}],
    ),
    (
        *("modelopt nvfp4", {}, dynamic("fp4_e2m1", "nvfp4")),
        [dynamic("fp8_e4m3", "per_token"), dynamic("fp4_e2m1", "mx")],
    ),
    (
        *("torchao per channel", ROWS, dynamic("int8_full", "per_token")),
        [dynamic("fp8_e4m3", "per_token"), dynamic("int8_full", "per_tensor")],
    ),
    (  # not expressible in numerics
        *("fp8 tensor", {"input_activations": {**FLOATS, "symmetric": False}}, {}),
        [dynamic("fp8_e4m3", "per_token")],
    ),
]


@pytest.mark.parametrize(("name", "change", "same", "others"), STATED)
def test_input_codes_must_match_the_checkpoint(
    folder: Path,
    name: str,
    change: dict[str, Any],
    same: dict[str, Any],
    others: list[dict[str, Any]],
) -> None:
    stored(folder, name)
    restate(folder, name, change)
    assert both(folder, name, same) == ("", "")
    # a kernel that quantises only weights has no input codes
    assert both(folder, name, {"format": "none"}) == ("", "")
    for other in others:
        mine, theirs = both(folder, name, other)
        assert mine.startswith(f"{NUMERICS.id} the checkpoint of the inference kernel states"), (
            other
        )
        assert theirs.startswith("parameter/served"), other
        assert "other codes of inputs" in theirs


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fp8 tensor", {"kv_cache_scheme": {**FLOATS, "dynamic": False, "strategy": "tensor"}}),
        ("modelopt fp8", {"kv_cache_quant_algo": "FP8"}),
    ],
)
def test_cache_codes_must_match_the_checkpoint(
    folder: Path, name: str, change: dict[str, Any]
) -> None:
    quantise(folder, folder / "quantised", name)
    restate(folder, name, change)
    inputs = dynamic("fp8_e4m3", "per_tensor")
    assert both(folder, name, inputs) == ("", "")
    assert both(folder, name, inputs, **cache(key_scale=1.0, value_scale=1.0)) == ("", "")
    bytes_ = {"kv_cache": {"format": "int8", "scale": "per_head"}}
    for other in (cache("per_head"), cache("none"), bytes_):
        mine, theirs = both(folder, name, inputs, **other)
        assert "for keys and values" in mine
        assert theirs.startswith("parameter/served")
        assert "other codes of keys and values" in theirs


def test_invalid_metadata_of_inputs_are_refused(folder: Path) -> None:
    stored(folder, "torchao per channel")
    restate(folder, "torchao per channel", {"act_quant_kwargs": {"_type": "X", "_data": {}}})
    mine, theirs = both(folder, "torchao per channel", dynamic("int8_full", "per_token"))
    assert NUMERICS.id in mine
    assert theirs.startswith("served/method")
