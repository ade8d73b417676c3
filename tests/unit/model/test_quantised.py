"""Both programs read quantised checkpoints by the rules of their formats."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import CHECKPOINT_DTYPE, CHECKPOINT_TENSORS, MODEL_CONFIG
from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.checkpoint.headers import file_header, metadata_of
from kcdsl.model.checkpoint.schemes import scheme_of
from kcdsl.model.checkpoint.torchao import torchao_scheme
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.served import Served, read_served
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.statement.manifest import storage_manifest
from tests.support.quantised import FORMATS, quantise, rounded
from tests.support.small_models import DECODER, write_model

CONFIG = {**DECODER, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small model."""
    write_model(tmp_path, config=CONFIG)
    return tmp_path


def pair(folder: Path) -> Model:
    return load_model(
        ModelRef("model.safetensors", "llama", tokenizer="bytes", served="quantised"), folder
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_weights_are_dequantised_by_their_format(folder: Path, name: str) -> None:
    meant = quantise(folder, folder / "quantised", name)
    served = pair(folder).served
    assert served is not None
    keys = {key for key in meant if key != "lm_head.weight"}
    assert set(served) == keys
    checker = read_served(folder / "quantised", keys)
    assert checker.digest == served.digest == storage_manifest(folder / "quantised").digest
    for key in keys:
        assert torch.equal(served[key], meant[key]), key
        coded = key in checker.coded
        theirs = checker.matrix(key).value if coded else checker.plain(key)
        assert coded == key.endswith("_proj.weight")
        assert np.array_equal(theirs, meant[key].numpy()), key
        mine = served.quantised(key)
        if mine is not None:
            other = checker.matrix(key)
            assert (other.kind, other.scale) == (mine.form, mine.layout)
            assert other.largest_scale == mine.scale or not mine.form


@pytest.mark.parametrize("shape", [(130, 200), (256, 128), (1, 200), (3, 5)])
def test_blocks_of_fp8_may_be_incomplete(tmp_path: Path, shape: tuple[int, int]) -> None:
    config, write = FORMATS["fp8 of DeepSeek"]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    weight = weight * torch.arange(1, shape[1] + 1)  # every block has a scale of its own
    parts, meant = write(weight)
    tensors = {f"w.{name}": part for name, part in parts.items()}
    kinds = {"w.weight": "F8_E4M3", "w.weight_scale_inv": "F32"}
    mine = scheme_of(config).decode(tensors.__getitem__, "w", kinds)
    assert torch.equal(mine.value, meant)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    theirs = read_served(tmp_path, {"w.weight"}).matrix("w.weight")
    assert np.array_equal(theirs.value, meant.numpy())
    assert (mine.form, mine.layout) == (theirs.kind, theirs.scale) == ("fp8_e4m3", "block_128")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "torchao"}, "no metadata of torchao"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "activation_scheme": "per_token"}, "per_token"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "static",
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 0}, "activation_scale_ub 0"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": True}, "activation_scale_ub True"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "sym": "yes"}, "sym"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "W8A16", "has_zero_point": True}, "has_zero"),
    ],
)
def test_unsupported_variants_are_refused_by_name(
    folder: Path, change: dict[str, object], word: str
) -> None:
    quantise(folder, folder / "quantised", "gptq")
    path = folder / "quantised" / "config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "quantization_config": change}))
    with pytest.raises(Refusal, match=word) as refused:
        pair(folder)
    assert refused.value.diagnostics[0].code == MODEL_CONFIG


GPTQ = {"quant_method": "gptq", "bits": 4}
COMPRESSED = FORMATS["fp8 tensor"][0]
GROUP = COMPRESSED["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", {**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}),
        ("gptq", {**GPTQ, "is_marlin_format": True}),
        ("gptq", {**GPTQ, "sym": True}),
        ("gptq, act order", {**GPTQ, "desc_act": False}),
        ("fp8 tensor", {**COMPRESSED, "transform_config": {"config_groups": {}}}),
        ("fp8 tensor", {**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}),
        ("fp8 tensor", {**COMPRESSED, "quantization_status": "initialized"}),
        ("fp8 tensor", {**COMPRESSED, "config_groups": []}),
        ("int4 group", {**FORMATS["int4 group"][0], "format": "marlin-24"}),
        ("fp8 tensor", {**COMPRESSED, "config_groups": {"a": {**GROUP, "format": "dense"}}}),
        (
            "fp8 tensor",
            {**COMPRESSED, "config_groups": {"a": {**GROUP, "output_activations": {}}}},
        ),
    ],
)
def test_both_programs_refuse_inconsistent_checkpoints(
    folder: Path, name: str, change: dict[str, object]
) -> None:
    place, key = folder / "quantised", "model.layers.0.mlp.up_proj.weight"
    quantise(folder, place, name)
    read_served(place, {key}).matrix(key)
    document = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**document, "quantization_config": change}))
    with pytest.raises(Refusal):
        pair(folder).served.quantised(key)  # type: ignore[union-attr]
    with pytest.raises(
        Rejected, match=r"compressed-tensors with|GPTQ with|kernels|attribute|marlin"
    ):
        read_served(place, {key}).matrix(key)


def packed(*weights: dict[str, object]) -> dict[str, object]:
    """Return a configuration of packed integers with these groups of linears."""
    groups = {str(n): {"weights": {"type": "int", **one}} for n, one in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized"} | {
        "config_groups": groups
    }


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "awq", "bits": [4]}, "bits"),
        (packed({"num_bits": 4}, {"num_bits": 8}), "num_bits of groups"),
        (packed({"num_bits": 4, "strategy": "group"}), "group_size None"),
        (packed({"num_bits": 4, "strategy": "group", "group_size": -1}), "group_size -1"),
        ({"quant_algo": "W4A16_AWQ", "group_size": -1}, "group_size -1"),
        ({"quant_algo": "W4A16_AWQ", "group_size": True}, "group_size True"),
    ],
)
def test_configurations_without_a_format_are_refused(config: dict[str, object], word: str) -> None:
    with pytest.raises(Refusal, match=re.escape(word)) as refused:
        scheme_of(config)
    assert refused.value.diagnostics[0].code == MODEL_CONFIG


def test_codes_of_a_transposed_matrix_are_refused(folder: Path) -> None:
    """It has as many codes as the matrix, so that its header does not show it."""
    place, key = folder / "quantised", "model.layers.0.mlp.up_proj.weight"
    quantise(folder, place, "fp8 tensor")
    held = load_file(place / "model.safetensors")
    save_file(held | {key: held[key].T.contiguous()}, place / "model.safetensors")
    served = pair(folder).served
    assert served is not None
    with pytest.raises(Refusal, match=r"up_proj.weight has shape \(32, 48\)"):
        served[key]


def test_metadata_that_are_no_texts_are_refused(folder: Path) -> None:
    place = folder / "quantised"
    quantise(folder, place, "torchao")
    path = place / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["format"] = 1
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(Refusal, match="its __metadata__ does not map strings to strings"):
        pair(folder)


def weights_of(name: str, **change: object) -> dict[str, object]:
    """Return a configuration of compressed-tensors with another statement about weights."""
    config = FORMATS[name][0]
    group = config["config_groups"]["group_0"]
    groups = {"group_0": {**group, "weights": {**group["weights"], **change}}}
    return {**config, "config_groups": groups}


ROWS, COLUMNS = 48, 32
OTHER_ORDER = torch.arange(COLUMNS, dtype=torch.int32).flip(0) // 8


@pytest.mark.parametrize(
    ("name", "config", "parts"),
    [
        ("fp8 tensor", weights_of("fp8 tensor", strategy="channel"), {}),
        ("fp8 channel", weights_of("fp8 channel", strategy="tensor"), {}),
        ("fp8 block", weights_of("fp8 block", block_structure=[96, 128]), {}),
        ("fp8 channel", weights_of("fp8 channel", symmetric=False), {}),
        ("fp8 channel", FORMATS["fp8 channel"][0], {"weight_scale": torch.ones(ROWS, 4)}),
        (
            "fp8 channel",
            FORMATS["fp8 channel"][0],
            {"weight_scale": torch.full((ROWS, 1), 127, dtype=torch.uint8)},
        ),
        (
            "int8 channel",
            FORMATS["int8 channel"][0],
            {"weight_zero_point": torch.ones(ROWS, 1, dtype=torch.int8)},
        ),
        ("int4 group", weights_of("int4 group", group_size=16), {}),
        ("int4 group", weights_of("int4 group", group_size=3), {}),
        ("int4 group", weights_of("int4 group", symmetric=False), {}),
        ("int4 group", weights_of("int4 group", actorder="group"), {}),
        ("int4 group", FORMATS["int4 group"][0], {"weight_g_idx": OTHER_ORDER}),
        ("int4 group, zero points", weights_of("int4 group, zero points", symmetric=True), {}),
        ("gptq", {**FORMATS["gptq"][0], "group_size": 16}, {}),
        ("gptq", {**FORMATS["gptq"][0], "group_size": -1}, {}),
        ("gptq", {**FORMATS["gptq"][0], "desc_act": True}, {"g_idx": None}),
        ("gptq", {**FORMATS["gptq"][0], "adapter": {"name": "lora"}}, {}),
        ("gptq v2", {**FORMATS["gptq v2"][0], "format": "gptq"}, {}),
        ("awq", {**FORMATS["awq"][0], "group_size": 16}, {}),
        ("awq", {**FORMATS["awq"][0], "backend": "llm-awq"}, {}),
        ("awq", {**FORMATS["awq"][0], "version": None, "format": "gemv"}, {}),
        ("modelopt int4", {**FORMATS["modelopt int4"][0], "group_size": 16}, {}),
        ("modelopt fp8", {**FORMATS["modelopt fp8"][0], "quant_algo": "W8A16"}, {}),
    ],
)
def test_both_programs_refuse_scales_that_are_not_those_of_the_configuration(
    folder: Path, name: str, config: dict[str, object], parts: dict[str, torch.Tensor | None]
) -> None:
    place, base = folder / "quantised", "model.layers.0.mlp.up_proj"
    quantise(folder, place, name)
    read_served(place, {f"{base}.weight"}).matrix(f"{base}.weight")
    held = load_file(place / "model.safetensors")
    held |= {f"{base}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    gone = {f"{base}.{part}" for part, tensor in parts.items() if tensor is None}
    save_file({k: t for k, t in held.items() if k not in gone}, place / "model.safetensors")
    document = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**document, "quantization_config": config}))
    with pytest.raises(Refusal) as refused:
        pair(folder).served.quantised(f"{base}.weight")  # type: ignore[union-attr]
    assert refused.value.diagnostics[0].code in (CHECKPOINT_TENSORS, MODEL_CONFIG)
    with pytest.raises(Rejected) as rejected:
        read_served(place, {f"{base}.weight"}).matrix(f"{base}.weight")
    assert rejected.value.reason in ("served/tensor", "served/method")


@pytest.mark.parametrize("rows", [1, 8, 24])
def test_a_zero_point_of_the_tensor_is_stored_as_it_is(tmp_path: Path, rows: int) -> None:
    """compressed-tensors packs the zero points of groups and channels, and not that of a tensor."""
    code = torch.randint(0, 16, (rows, 16), generator=torch.Generator().manual_seed(rows))
    words = [sum(int(n) << (4 * k) for k, n in enumerate(part)) for part in code.reshape(-1, 8)]
    packed = torch.tensor(words).to(torch.int32).reshape(rows, 2)
    tensors = {
        "w.weight_packed": packed,
        "w.weight_scale": torch.tensor([0.25]),
        "w.weight_zero_point": torch.tensor([-3], dtype=torch.int8),
        "w.weight_shape": torch.tensor([rows, 16]),
    }
    config = weights_of("int4 group", strategy="tensor", group_size=None, symmetric=False)
    meant = (code.float() - 8 + 3) * 0.25
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    kinds = {k: one.kind for k, one in file_header(tmp_path / "model.safetensors").items()}
    assert torch.equal(scheme_of(config).decode(tensors.__getitem__, "w", kinds).value, meant)
    theirs = read_served(tmp_path, {"w.weight"}).matrix("w.weight")
    assert np.array_equal(theirs.value, meant.numpy())


@pytest.mark.parametrize("indexed", [False, True])
def test_the_last_group_of_gptq_may_be_smaller(tmp_path: Path, indexed: bool) -> None:
    """The width of groups is what the configuration says, not what their number suggests."""
    parts, _ = FORMATS["gptq"][1](torch.randn(16, 24, generator=torch.Generator().manual_seed(5)))
    groups = torch.arange(24) // 16
    parts |= {"scales": parts["scales"][:2], "qzeros": parts["qzeros"][:2], "g_idx": groups.int()}
    words = parts["qweight"].long()[:, :] & 0xFFFFFFFF
    code = torch.stack([(words[i // 8] >> (4 * (i % 8))) & 15 for i in range(24)])
    points = parts["qzeros"].long() & 0xFFFFFFFF
    zero = torch.stack([(points[:, o // 8] >> (4 * (o % 8))) & 15 for o in range(16)], dim=1) + 1
    meant = ((code - zero[groups]).float() * parts["scales"].float()[groups]).T
    tensors = {f"w.{n}": t.contiguous() for n, t in parts.items() if indexed or n != "g_idx"}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    kinds = {k: one.kind for k, one in file_header(tmp_path / "model.safetensors").items()}
    assert torch.equal(scheme_of(config).decode(tensors.__getitem__, "w", kinds).value, meant)
    theirs = read_served(tmp_path, {"w.weight"}).matrix("w.weight")
    assert np.array_equal(theirs.value, meant.numpy())


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", ["scale", "zero_point"])
def test_checker_refuses_factors_of_one_output_for_all(folder: Path, part: str) -> None:
    """Numpy would broadcast the factors of one output to all others."""
    place, key = folder / "quantised", "model.layers.0.mlp.up_proj.weight"
    quantise(folder, place, "torchao int4")
    path = place / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    held = load_file(path)
    name = next(n for n in held if n.endswith(f"up_proj._weight_{part}"))
    save_file({**held, name: held[name][:, :1].clone()}, path, metadata)
    with pytest.raises((Rejected, ValueError), match="does not fit"):
        read_served(place, {key}).matrix(key)


@pytest.mark.parametrize("second", [False, True])
def test_symmetric_codes_of_gptq_are_read(folder: Path, second: bool) -> None:
    place, key = folder / "quantised", "model.layers.0.mlp.up_proj.weight"
    quantise(folder, place, "gptq v2" if second else "gptq")
    path, config = place / "model.safetensors", place / "config.json"
    held = load_file(path)
    stored = 0x88888888 if second else 0x77777777
    number = stored - (1 << 32) if second else stored
    save_file(
        {k: torch.full_like(t, number) if k.endswith("qzeros") else t for k, t in held.items()},
        path,
    )
    document = json.loads(config.read_text())
    document["quantization_config"]["sym"] = True
    config.write_text(json.dumps(document))
    served = pair(folder).served
    assert served is not None
    assert np.array_equal(served[key].numpy(), read_served(place, {key}).matrix(key).value)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fp8 channel", {"weight_scale": torch.ones(48, 1, 1)}),
        ("fp8 channel", {"weight_scale": torch.ones(48, 0)}),
        ("int4 group", {"weight_shape": torch.tensor(48)}),
        ("int4 group", {"weight_g_idx": torch.tensor(0, dtype=torch.int32)}),
        ("gptq", {"qzeros": torch.zeros(0, 6, dtype=torch.int32)}),
        ("gptq", {"g_idx": torch.tensor(0, dtype=torch.int32)}),
        ("awq", {"qzeros": torch.zeros(6, dtype=torch.int32)}),
        ("nvfp4", {"weight_packed": torch.zeros(48 * 16, dtype=torch.uint8)}),
    ],
)
def test_tensors_of_another_shape_are_refused(
    folder: Path, name: str, part: dict[str, torch.Tensor]
) -> None:
    place, base = folder / "quantised", "model.layers.0.mlp.up_proj"
    quantise(folder, place, name)
    path = place / "model.safetensors"
    save_file({**load_file(path), **{f"{base}.{n}": t for n, t in part.items()}}, path)
    with pytest.raises(Refusal) as refused:
        pair(folder).served.quantised(f"{base}.weight")  # type: ignore[union-attr]
    assert refused.value.diagnostics[0].code == CHECKPOINT_TENSORS
    with pytest.raises(Rejected) as rejected:
        read_served(place, {f"{base}.weight"}).matrix(f"{base}.weight")
    assert rejected.value.reason == "served/tensor"


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("modelopt")])
def test_inputs_scaled_by_modelopt_are_refused(folder: Path, name: str) -> None:
    """A matrix differs from its codes where inputs are multiplied first."""
    place, key = folder / "quantised", "model.layers.0.mlp.down_proj"
    quantise(folder, place, name)
    held = load_file(place / "model.safetensors")
    width = load_file(folder / "model.safetensors")[f"{key}.weight"].shape[1]
    save_file(held | {f"{key}.pre_quant_scale": torch.ones(width)}, place / "model.safetensors")
    with pytest.raises(Refusal, match="pre_quant_scale") as refused:
        pair(folder)
    assert refused.value.diagnostics[0].code == MODEL_CONFIG
    with pytest.raises(Rejected, match="inputs of"):
        read_served(place, {f"{key}.weight"}).matrix(f"{key}.weight")


def test_tensors_of_other_models_are_refused(folder: Path) -> None:
    place = folder / "quantised"
    quantise(folder, place, "fp8 channel")
    document = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**document, "rms_norm_eps": 0.5}))
    with pytest.raises(Refusal, match="rms_norm_eps"):
        pair(folder)
    other = {**document, "rms_norm_eps": 0.5, "bos_token_id": 77, "eos_token_id": 78}
    (place / "config.json").write_text(json.dumps(other))
    with pytest.raises(Refusal, match="rms_norm_eps"):  # ids of tokens change no result
        pair(folder)
    del document["quantization_config"]
    (place / "config.json").write_text(json.dumps(document))
    with pytest.raises(Refusal, match="quantisation configuration") as refused:
        pair(folder)
    assert refused.value.diagnostics[0].code == CHECKPOINT_DTYPE
    quantise(folder, place, "fp8 channel")
    held = load_file(place / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    save_file({k: t for k, t in held.items() if k != key}, place / "model.safetensors")
    with pytest.raises(Refusal, match="up_proj"):
        pair(folder)


def test_numerics_of_codes_must_match_the_checkpoint(folder: Path) -> None:
    quantise(folder, folder / "quantised", "fp8 channel")
    served = pair(folder).served
    assert served is not None
    key = "model.layers.0.self_attn.q_proj.weight"
    activations = {"format": "fp8_e4m3", "scale": "per_token"}
    for scale, able in (("per_channel", True), ("per_tensor", False)):
        weights = {"format": "fp8_e4m3", "scale": scale}
        numerics = resolve(
            {
                "preset": "torch-eager",
                "compute": "bfloat16",
                "weights": weights,
                "activations": activations,
            }
        )
        if able:
            served.refuse_other_storage(key, numerics)
            continue
        with pytest.raises(Refusal, match="stores"):
            served.refuse_other_storage(key, numerics)
    plain = {"preset": "torch-eager", "compute": "bfloat16", "activations": activations}
    with pytest.raises(Refusal, match="it is fp8_e4m3 per_channel"):
        served.refuse_other_storage(key, resolve(plain))


VECTORS = Path(__file__).parents[2] / "support" / "vectors" / "compressed_tensors.safetensors"
"""Matrices that compressed-tensors 0.20.0 quantised, packed and dequantised, with float32 scales:
`NAME.weight…` as stored, `NAME.expected` as dequantised."""


def recorded_config(name: str) -> dict[str, object]:
    form = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}
    kind = "float" if name.startswith("fp8") else "int"
    weights: dict[str, object] = {"num_bits": 8, "type": kind}
    weights["strategy"] = "tensor" if name == "fp8_tensor" else "channel"
    weights["symmetric"] = not name.endswith("asymmetric")
    if name.startswith("int4"):
        weights |= {"num_bits": 4, "strategy": "group", "group_size": 32}
    if name == "nvfp4":
        weights = {"num_bits": 4, "type": "float"}
    return {
        "quant_method": "compressed-tensors",
        "format": form.get(name.partition("_")[0], "nvfp4-pack-quantized"),
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize(
    "name",
    [
        *("fp8_tensor", "fp8_channel", "int8_channel", "int8_channel_asymmetric"),
        *("int4_group", "int4_group_asymmetric", "nvfp4"),
    ],
)
def test_both_programs_read_files_of_the_library(name: str) -> None:
    stored = load_file(VECTORS)
    kinds = {key: one.kind for key, one in file_header(VECTORS).items()}
    config = recorded_config(name)
    found = scheme_of(config).decode(lambda key: stored[key], name, kinds)
    expected = stored[f"{name}.expected"]
    assert torch.equal(found.value, expected)
    checker = Served("", read(VECTORS).tensors, config)
    assert np.array_equal(checker.matrix(f"{name}.weight").value, expected.numpy())


FOREIGN = Path(__file__).parents[2] / "support" / "vectors"
"""Matrices that other programs quantised and dequantised (tests/support/foreign_vectors.py)."""


def recorded(name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file of vectors."""
    path = FOREIGN / f"{name}.safetensors"
    return load_file(path), metadata_of(path.read_bytes())


def cases() -> list[tuple[str, str]]:
    files = ("autoawq", "gptqmodel", "modelopt", "torchao", "transformers")
    return [
        (name, key.removeprefix("config:"))
        for name in files
        for key in sorted(recorded(name)[1])
        if key.startswith("config:")
    ]


def both_readings(
    folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], case: str
) -> tuple[torch.Tensor, np.ndarray, tuple[object, ...], tuple[object, ...]]:
    """Return the matrix of a case as both programs read it, with format, layout and least code."""
    config = json.loads(metadata[f"config:{case}"])
    path = folder / "model.safetensors"
    told = {key: text for key, text in metadata.items() if not key.startswith("config:")}
    save_file(tensors, path, told)
    kinds = {key: one.kind for key, one in file_header(path).items()}
    by_torchao = config["quant_method"] == "torchao"
    scheme = torchao_scheme(told) if by_torchao else scheme_of(config)
    mine = scheme.decode(tensors.__getitem__, case, kinds)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    theirs = read_served(folder, {f"{case}.weight"}).matrix(f"{case}.weight")
    return (
        mine.value,
        theirs.value,
        (mine.form, mine.layout, mine.least_code, mine.scale),
        (theirs.kind, theirs.scale, theirs.least, theirs.largest_scale),
    )


@pytest.mark.parametrize(("program", "case"), cases())
def test_both_programs_read_recorded_vectors(tmp_path: Path, program: str, case: str) -> None:
    tensors, metadata = recorded(program)
    expected = tensors[f"{case}.expected"]
    mine, theirs, said, other = both_readings(tmp_path, tensors, metadata, case)
    assert np.array_equal(mine.numpy(), theirs)
    assert said[:2] == other[:2]
    assert said == other or not said[0]
    assert torch.equal(mine.to(expected.dtype), expected)


@pytest.mark.parametrize(
    ("case", "change", "code"),
    [
        ("int8_row", {"_type": "Int4TilePackedTo4dTensor"}, MODEL_CONFIG),
        ("int8_row", {"_type": ["Int8Tensor"]}, MODEL_CONFIG),
        ("int8_row", {"_type": "Int4Tensor"}, CHECKPOINT_TENSORS),
        ("int8_row", {"_type": "Float8Tensor"}, CHECKPOINT_TENSORS),
        ("int8_row", {"block_size": [1, 16]}, CHECKPOINT_TENSORS),
        ("int8_row", {"block_size": None}, CHECKPOINT_TENSORS),
        ("int8_row", {"_tensor_data_names": ["qdata", "scale"]}, CHECKPOINT_TENSORS),
        ("int8_row", {"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]}, MODEL_CONFIG),
        ("int4_group", {"target_dtype": {"_data": "int3"}}, CHECKPOINT_TENSORS),
        ("int4_group", {"target_dtype": None}, CHECKPOINT_TENSORS),
        ("float8_row", None, CHECKPOINT_TENSORS),
        ("float8_row", {"act_quant_kwargs": {"_data": {"hp_value_ub": 1.0}}}, MODEL_CONFIG),
        ("float8_row", {"act_quant_kwargs": {"_data": {"hp_value_ub": 0}}}, MODEL_CONFIG),
        ("float8_row", {"act_quant_kwargs": {"_data": {"hp_value_lb": 1.0}}}, MODEL_CONFIG),
        ("int8_row", {"act_quant_kwargs": {"_data": {"reduce_range": True}}}, MODEL_CONFIG),
        *(
            ("int4_zero_points_bfloat16", change, code)
            for change, code in (
                ({"_type": "Int8Tensor"}, CHECKPOINT_TENSORS),
                ({"activation_dtype": {"_data": "float8_e4m3fn"}}, MODEL_CONFIG),
                ({"block_size": [1, 24]}, CHECKPOINT_TENSORS),
                ({"block_size": [1, 64]}, CHECKPOINT_TENSORS),
                ({"block_size": [2, 32]}, CHECKPOINT_TENSORS),
                ({"block_size": None}, CHECKPOINT_TENSORS),
                ({"shape": [64, 16]}, CHECKPOINT_TENSORS),
                ({"_tensor_data_names": ["qdata", "scale"]}, CHECKPOINT_TENSORS),
                (
                    {"_tensor_data_names": ["act_pre_scale", "qdata", "scale", "zero_point"]},
                    MODEL_CONFIG,
                ),
            )
        ),
    ],
)
def test_both_programs_refuse_unsupported_torchao_metadata(
    tmp_path: Path, case: str, change: dict[str, object] | None, code: object
) -> None:
    tensors, metadata = recorded("torchao")
    told = json.loads(metadata.pop(f"{case}.weight"))
    if change is not None:
        for key, value in change.items():
            (told if key.startswith("_") else told["_data"])[key] = value
        metadata[f"{case}.weight"] = json.dumps(told)
    with pytest.raises(Refusal) as refused:
        both_readings(tmp_path, tensors, metadata, case)
    assert refused.value.diagnostics[0].code == code
    config = json.loads(metadata[f"config:{case}"])
    texts = {key: text for key, text in metadata.items() if not key.startswith("config:")}
    save_file(tensors, tmp_path / "model.safetensors", texts)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(Rejected):
        read_served(tmp_path, {f"{case}.weight"}).matrix(f"{case}.weight")


INT4 = {"block_size": [1, 16], "activation_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}


def int4(scale: torch.Tensor, zero: torch.Tensor) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a matrix of torchao with every code in every group, and its metadata."""
    codes = [[(code % 16) + 16 * ((code + 1) % 16) for code in range(0, 16, 2)]] * scale.shape[1]
    data = torch.tensor(codes, dtype=torch.uint8).view(torch.int8).repeat(1, len(scale))
    parts = {"_weight_qdata": data, "_weight_scale": scale, "_weight_zero_point": zero}
    names = ["qdata", "scale", "zero_point"]
    told = json.dumps({"_type": "Int4Tensor", "_data": INT4, "_tensor_data_names": names})
    texts = {"w.weight": told, "tensor_names": '["w.weight"]'}
    config = {"config:w": json.dumps({"quant_method": "torchao"})}
    return {f"w.{name}": part for name, part in parts.items()}, texts | config


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_int4_sums_are_rounded_once(tmp_path: Path, kind: torch.dtype) -> None:
    """Ties occur with zero points much smaller and much larger than code times scale."""
    generator = torch.Generator().manual_seed(11)
    shape = (9, 8)
    near = 2.0 ** torch.randint(-3, 4, shape, generator=generator)
    scale = (1 + torch.rand(shape, generator=generator)) * near
    sizes = torch.tensor([0.0, 1.0, 2**-7, 2**-10, 2**-13, 2**-14, 2**-24, 2**7, 2**9])
    sizes = (
        sizes if kind == torch.float16 else torch.cat((sizes[:7], 2.0 ** torch.tensor([-60, 60])))
    )
    zero = sizes[:, None] * torch.where(torch.rand(shape, generator=generator) < 0.5, -1, 1)
    odd = (1 + 2.0**-7) if kind == torch.bfloat16 else (1 + 2.0**-10)
    scale[:, ::2] = odd if kind != torch.float32 else 1 + 2.0**-23
    tensors, metadata = int4(scale.to(kind), zero.to(kind))
    mine, theirs, said, other = both_readings(tmp_path, tensors, metadata, "w")
    scales, zeros = (tensors[f"w._weight_{part}"] for part in ("scale", "zero_point"))
    exact = [
        [
            (code - 16 * (code > 7)) * Fraction(float(s)) + Fraction(float(z))
            for s, z in zip(column_s, column_z, strict=True)
            for code in range(16)
        ]
        for column_s, column_z in zip(scales.T, zeros.T, strict=True)
    ]
    meant = torch.tensor([[rounded(number, kind) for number in row] for row in exact])
    assert torch.equal(mine, meant)
    assert np.array_equal(theirs, meant.numpy())
    assert said[:2] == other[:2] == ("", "")
    in_float32 = (torch.tensor([[float(n) for n in row] for row in exact])).to(kind).float()
    assert kind == torch.float16 or not torch.equal(mine, in_float32)


def test_overflowing_int4_is_refused(tmp_path: Path) -> None:
    """float16 overflows: 7·65504 + 65504."""
    scale, zero = torch.full((1, 4), 65504.0), torch.full((1, 4), 65504.0)
    tensors, metadata = int4(scale.half(), zero.half())
    with pytest.raises(Refusal, match="overflows"):
        both_readings(tmp_path, tensors, metadata, "w")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(Rejected, match="finite"):
        read_served(tmp_path, {"w.weight"}).matrix("w.weight")


def test_weight_stored_twice_is_refused(folder: Path) -> None:
    place = folder / "quantised"
    quantise(folder, place, "gptq")
    held = load_file(place / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    save_file({**held, key: torch.ones(48, 32)}, place / "model.safetensors")
    with pytest.raises(Refusal, match="stored twice"):
        pair(folder)
    with pytest.raises(Rejected, match="stored twice"):
        read_served(place, {key}).matrix(key)


@pytest.mark.full
@pytest.mark.parametrize("shards", [False, True])
def test_transformers_folder_with_torchao_weights_is_read(tmp_path: Path, shards: bool) -> None:
    """Names, metadata and shards of the current library versions."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    write_model(tmp_path, config=CONFIG)
    library = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
    )
    weights = {
        n: t.dequantize() for n, t in library.named_parameters() if n.endswith("_proj.weight")
    }
    size = "6KB" if shards else "1GB"
    library.save_pretrained(tmp_path / "quantised", max_shard_size=size)
    assert (tmp_path / "quantised" / "model.safetensors.index.json").exists() == shards
    served = pair(tmp_path).served
    assert served is not None
    assert weights
    checker = read_served(tmp_path / "quantised", set(served))
    assert checker.digest == served.digest
    for key, expected in weights.items():
        assert torch.equal(served[key], expected.float())
        assert np.array_equal(checker.matrix(key).value, expected.float().numpy())
