"""Stated codes of inputs, keys and values in quantised checkpoints, read by both programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kcdsl.model.checkpoint.schemes import scheme_of
from kcdsl.model.checkpoint.torchao import torchao_scheme
from kcdsl.model.numerics.formats import CODE_FORMATS, LAYOUTS
from kcdsl_certs.recheck.interval.stated import fits_cache, fits_inputs, fits_torchao
from tests.support.quantised import FORMATS

Pairs = frozenset[tuple[str, str]]
NONE: Pairs = frozenset()
KEY = "model.layers.0.mlp.up_proj.weight"
SCALES = (*LAYOUTS, "static", "none", "per_head", "per_token_head")
PAIRS = frozenset((form, scale) for form in CODE_FORMATS for scale in SCALES)


def pairs(forms: str, scales: str) -> Pairs:
    return frozenset((form, scale) for form in forms.split() for scale in scales.split())


def groups(*inputs: object, **more: object) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with the given input schemes of its groups."""
    base = FORMATS["int8 channel"][0]
    group = base["config_groups"]["group_0"]
    found = {str(n): {**group, "input_activations": one} for n, one in enumerate(inputs)}
    return {**base, "config_groups": found, **more}


def scheme(bits: int, kind: str, strategy: object, dynamic: object = True, **more: object) -> Any:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": dynamic, **more}


def fp8(**more: object) -> dict[str, Any]:
    return {"quant_method": "fp8", **more}


def modelopt(algorithm: str, **more: object) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


SQUARES = [128, 128]
WHOLE = "per_tensor per_batch"
ANY = PAIRS
INPUTS: list[tuple[dict[str, Any], Pairs]] = [
    (groups(None), ANY),
    (groups(scheme(8, "int", "token")), pairs("int8 int8_full", "per_token")),
    (groups(scheme(8, "int", "token", symmetric=False)), pairs("uint8", "per_token")),
    (groups(scheme(8, "int", "tensor", False)), pairs("int8 int8_full uint8", "static")),
    (groups(scheme(8, "float", "tensor", False)), pairs("fp8_e4m3", "static")),
    (groups(scheme(8, "float", None)), pairs("fp8_e4m3", WHOLE)),
    (groups(scheme(8, "float", "tensor")), pairs("fp8_e4m3", WHOLE)),
    (groups(scheme(8, "float", "group", group_size=128)), pairs("fp8_e4m3", "group_128")),
    (groups(scheme(8, "float", None, group_size=64)), pairs("fp8_e4m3", "group_64")),
    (groups(scheme(4, "float", "tensor_group", "local")), pairs("fp4_e2m1", "nvfp4")),
    (groups(scheme(4, "float", "tensor_group", group_size=16)), pairs("fp4_e2m1", "nvfp4")),
    (
        groups(None, scheme(8, "int", "token"), scheme(8, "float", "token")),
        pairs("int8 int8_full fp8_e4m3", "per_token"),
    ),
    *(
        (groups(stated), NONE)
        for stated in (
            scheme(4, "int", "token"),
            scheme(8, "other", "token"),
            scheme(8, "float", "token", symmetric=False),
            scheme(8, "float", "token", "local"),
            scheme(8, "float", "token", False),
            scheme(8, "float", "other"),
            scheme(8, "float", "group", group_size=32, scale_dtype="torch.uint8"),
            scheme(8, "float", "group", group_size=16),
            scheme(4, "float", "tensor_group", group_size=32),
            scheme(4, "float", "tensor_group", False),
        )
    ),
    (groups({}), pairs("int8 int8_full uint8", "static")),
    (fp8(activation_scheme="static"), pairs("fp8_e4m3", "static")),
    (fp8(activation_scheme="dynamic"), pairs("fp8_e4m3", f"per_token {WHOLE}")),
    (fp8(), pairs("fp8_e4m3", f"per_token static {WHOLE}")),
    (fp8(scale_fmt="ue8m0"), NONE),
    (fp8(weight_block_size=SQUARES), pairs("fp8_e4m3", "group_128 group_128_e8m0")),
    (
        fp8(weight_block_size=SQUARES, scale_fmt="ue8m0", activation_scheme="dynamic"),
        pairs("fp8_e4m3", "group_128_e8m0"),
    ),
    (fp8(weight_block_size=SQUARES, scale_fmt="other"), NONE),
    ({"quant_method": "fbgemm_fp8"}, pairs("fp8_e4m3", "per_token")),
    (modelopt("FP8"), pairs("fp8_e4m3", f"static {WHOLE}")),
    (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), pairs("fp8_e4m3", "per_token")),
    (modelopt("NVFP4"), pairs("fp4_e2m1", "nvfp4")),
    (modelopt("W8A16"), ANY),
    ({"quant_method": "gptq", "bits": 4}, ANY),
    ({"quant_method": "awq", "bits": 4}, ANY),
]


@pytest.mark.parametrize(("config", "able"), INPUTS)
def test_both_programs_read_input_codes_of_a_configuration(
    config: dict[str, Any], able: Pairs
) -> None:
    found = scheme_of(config).inputs_of(KEY)
    assert (ANY if found is None else set(found.able)) == able
    theirs = {pair for pair in PAIRS if fits_inputs(config, config["quant_method"], *pair)}
    assert theirs == able


CACHES: list[tuple[dict[str, Any], Pairs]] = [
    (groups(None), ANY),
    (
        groups(None, kv_cache_scheme=scheme(8, "float", "tensor", False)),
        pairs("fp8_e4m3", "static"),
    ),
    (groups(None, kv_cache_scheme=scheme(8, "float", "tensor")), pairs("fp8_e4m3", "per_tensor")),
    (
        groups(None, kv_cache_scheme=scheme(8, "int", "attn_head")),
        pairs("int8 int8_full", "per_head"),
    ),
    (
        groups(None, kv_cache_scheme=scheme(8, "int", "tensor", False)),
        pairs("int8 int8_full", "static"),
    ),
    (groups(None, kv_cache_scheme=scheme(8, "int", "tensor", False, symmetric=False)), NONE),
    (groups(None, kv_cache_scheme=scheme(4, "float", "tensor", False)), NONE),
    (groups(None, kv_cache_scheme=scheme(8, "float", "token")), NONE),
    (modelopt("FP8"), ANY),
    (modelopt("FP8", kv_cache_quant_algo="FP8"), pairs("fp8_e4m3", "static")),
    (modelopt("FP8", kv_cache_quant_algo="NVFP4"), NONE),
    (
        modelopt("FP8", kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"}),
        pairs("fp8_e4m3", "static"),
    ),
    (fp8(), ANY),
]


@pytest.mark.parametrize(("config", "able"), CACHES)
def test_both_programs_read_cache_codes_of_a_configuration(
    config: dict[str, Any], able: Pairs
) -> None:
    found = scheme_of(config).cache
    assert (ANY if found is None else set(found.able)) == able
    theirs = {pair for pair in PAIRS if fits_cache(config, config["quant_method"], *pair)}
    assert theirs == able


def kwargs(name: str, by: str, of: dict[str, Any], **more: object) -> dict[str, Any]:
    fields = {"granularity": {"_type": by, "_data": of}, **more}
    return {"act_quant_kwargs": {"_type": f"QuantizeTensorTo{name}Kwargs", "_data": fields}}


ROW: dict[str, Any] = {"dim": -1}
E4M3 = {"float8_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}}
E5M2 = {"float8_dtype": {"_type": "torch.dtype", "_data": "float8_e5m2"}}
SYMMETRIC = {"mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}}
ASYMMETRIC = {"mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}}
UNCLIPPED = {"mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC_NO_CLIPPING_ERR"}}
TORCHAO: list[tuple[dict[str, Any], Pairs]] = [
    ({}, ANY),
    ({"act_quant_kwargs": None}, ANY),
    (kwargs("Float8", "PerRow", ROW, **E4M3), pairs("fp8_e4m3", "per_token")),
    (kwargs("Float8", "PerRow", ROW, **E5M2), pairs("fp8_e5m2", "per_token")),
    (kwargs("Float8", "PerTensor", {}, **E4M3), pairs("fp8_e4m3", WHOLE)),
    (
        kwargs("Float8", "PerBlock", {"block_size": [1, 128]}, **E4M3),
        pairs("fp8_e4m3", "group_128"),
    ),
    (kwargs("Float8", "PerBlock", {"block_size": [128, 128]}, **E4M3), NONE),
    (kwargs("Float8", "PerRow", {"dim": 0}, **E4M3), NONE),
    (kwargs("Int8", "PerRow", ROW, **SYMMETRIC), pairs("int8 int8_full", "per_token")),
    (kwargs("Int8", "PerRow", ROW, **ASYMMETRIC), pairs("uint8", "per_token")),
    (kwargs("Int8", "PerRow", ROW, **UNCLIPPED), NONE),
    (kwargs("Other", "PerRow", ROW, **SYMMETRIC), NONE),
    ({"activation_quantization": None}, ANY),
    ({"activation_quantization": "int8_asym_per_token"}, pairs("uint8", "per_token")),
    ({"activation_quantization": "int4"}, NONE),
]


TORCHAO_STATIC: list[tuple[dict[str, Any], Pairs]] = [
    ({}, ANY),  # the scale is compared by its number
    (kwargs("Float8", "PerTensor", {}, **E4M3), pairs("fp8_e4m3", "static")),
    (kwargs("Int8", "PerRow", ROW, **SYMMETRIC), pairs("int8 int8_full uint8", "static")),
    (kwargs("Int8", "PerTensor", {}, **ASYMMETRIC), pairs("int8 int8_full uint8", "static")),
    (kwargs("Int8", "PerTensor", {}, **UNCLIPPED), NONE),
]


@pytest.mark.parametrize(
    ("parts", "fields", "able"),
    [
        *(([], *case) for case in TORCHAO),
        *((["act_quant_scale"], *case) for case in TORCHAO_STATIC),
    ],
)
def test_both_programs_read_input_codes_of_torchao(
    parts: list[str], fields: dict[str, Any], able: Pairs
) -> None:
    names = ["qdata", "scale", *parts]
    told = {"_type": "Int8Tensor", "_data": fields, "_tensor_data_names": names}
    found = torchao_scheme({"tensor_names": "[]", KEY: json.dumps(told)}).inputs_of(KEY)
    assert (ANY if found is None else set(found.able)) == able
    assert {pair for pair in PAIRS if fits_torchao(told, *pair)} == able
