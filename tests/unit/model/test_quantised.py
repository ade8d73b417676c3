"""Quantised checkpoints mean what the rules of their formats say, in both programs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import CHECKPOINT_DTYPE, MODEL_CONFIG
from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model, load_model
from kcdsl.model.checkpoint.headers import file_header
from kcdsl.model.checkpoint.quantised import scheme_of
from kcdsl.model.presets import resolve
from kcdsl_certs.recheck.interval.served import Served, read_served
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.statement.manifest import storage_manifest
from tests.support.quantised import FORMATS, quantise
from tests.support.small_models import DECODER, write_model

CONFIG = {**DECODER, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model."""
    write_model(tmp_path, config=CONFIG)
    return tmp_path


def pair(folder: Path) -> Model:
    return load_model(
        ModelRef("model.safetensors", "llama", tokenizer="bytes", served="quantised"), folder
    )


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_weight_is_what_its_format_says(folder: Path, name: str) -> None:
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
def test_blocks_of_fp8_may_be_cut_off(tmp_path: Path, shape: tuple[int, int]) -> None:
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
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "weight_block_size"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ],
)
def test_a_variant_that_is_not_read_is_refused_by_name(
    folder: Path, change: dict[str, object], word: str
) -> None:
    quantise(folder, folder / "quantised", "gptq")
    path = folder / "quantised" / "config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "quantization_config": change}))
    with pytest.raises(Refusal, match=word) as refused:
        pair(folder)
    assert refused.value.diagnostics[0].code == MODEL_CONFIG


def test_tensors_that_do_not_belong_to_the_model_are_refused(folder: Path) -> None:
    place = folder / "quantised"
    quantise(folder, place, "fp8 channel")
    document = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**document, "rms_norm_eps": 0.5}))
    with pytest.raises(Refusal, match="rms_norm_eps"):
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


def test_numerics_of_codes_must_be_those_of_the_checkpoint(folder: Path) -> None:
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


VECTORS = Path(__file__).parents[2] / "support" / "vectors" / "compressed_tensors.safetensors"
"""Matrices that compressed-tensors 0.20.0 quantised, packed and dequantised, with float32 scales:
`NAME.weight…` as it stores them, `NAME.expected` as it reads them."""


def recorded_config(name: str) -> dict[str, object]:
    form = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}
    weights = {"num_bits": 8, "type": "float" if name.startswith("fp8") else "int"}
    if name.startswith("int4"):
        weights["num_bits"] = 4
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
def test_both_programs_read_what_the_library_wrote(name: str) -> None:
    stored = load_file(VECTORS)
    kinds = {key: one.kind for key, one in file_header(VECTORS).items()}
    config = recorded_config(name)
    found = scheme_of(config).decode(lambda key: stored[key], name, kinds)
    expected = stored[f"{name}.expected"]
    assert torch.equal(found.value, expected)
    checker = Served("", read(VECTORS).tensors, config)
    assert np.array_equal(checker.matrix(f"{name}.weight").value, expected.numpy())
