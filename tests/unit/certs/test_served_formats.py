"""Both programs refuse quantised matrices that do not fit their format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.model.checkpoint.headers import header_of
from kcdsl.model.checkpoint.schemes import scheme_of
from kcdsl.model.checkpoint.torchao import torchao_scheme
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.served import Served, read_served
from kcdsl_certs.recheck.interval.tensors import parse
from tests.support.quantised import FORMATS, TEXTS

Parts = dict[str, Tensor]
Change = Callable[[Parts], Any]


def written(name: str) -> tuple[dict[str, Any], Parts, str]:
    """Return the configuration, the tensors and the metadata of a matrix of 16 by 32."""
    config, write = FORMATS[name]
    parts, _ = write(torch.randn(16, 32, generator=torch.Generator().manual_seed(4)))
    return dict(config), parts, TEXTS.get(name, "")


def served(config: Mapping[str, Any], parts: Parts, told: str = "") -> Served:
    data = save({f"w.{name}": part.contiguous() for name, part in parts.items()})
    return Served("", parse(memoryview(data)), config, [{"w.weight": told}] if told else [])


def by_prover(config: Mapping[str, Any], parts: Parts, told: str) -> Tensor:
    tensors = {f"w.{name}": part.contiguous() for name, part in parts.items()}
    data = save(tensors)
    kinds = {key: one.kind for key, one in header_of(data, len(data)).items()}
    scheme = torchao_scheme({"tensor_names": "[]", "w.weight": told}) if told else scheme_of(config)
    return scheme.decode(tensors.__getitem__, "w", kinds).value


REFUSED = (Refusal, ValueError, LookupError, RuntimeError)
"""What loading a model refuses."""


def change(name: str, to: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of one tensor."""
    return lambda parts: parts.update({name: to(parts[name])})


def put(name: str, value: Tensor) -> Change:
    return lambda parts: parts.update({name: value})


def drop(name: str) -> Change:
    return lambda parts: parts.pop(name)


def nothing(parts: Parts) -> None:
    """Leave the tensors."""


def weights(name: str, **said: Any) -> dict[str, Any]:
    """Return another statement of compressed-tensors about weights."""
    group = FORMATS[name][0]["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **said}}}}


def texts(name: str, **said: Any) -> str:
    """Return other metadata of torchao."""
    told = json.loads(TEXTS[name])
    for key, value in said.items():
        (told if key.startswith("_") else told["_data"])[key] = value
    return json.dumps(told)


def first_row(part: Tensor) -> Tensor:
    return part[:1]


def first_column(part: Tensor) -> Tensor:
    return part[:, :1]


def flat(part: Tensor) -> Tensor:
    return part.reshape(-1)


def signed(part: Tensor) -> Tensor:
    return part.view(torch.int8)


def twice(part: Tensor) -> Tensor:
    return torch.cat((part, part))


def as_integers(part: Tensor) -> Tensor:
    return part.to(torch.int32)


def by_16(parts: Parts) -> None:
    """Leave 24 inputs of AWQ in two groups."""
    parts.update({"qweight": parts["qweight"][:24]})
    parts.update({name: parts[name][:2] for name in ("qzeros", "scales")})


NO_FIT, NO_FLOATS = "the scales do not fit", "the scales are no floats"
METHOD, TENSOR = "served/method", "served/tensor"
Row = tuple[str, dict[str, Any], Change, str, str]
ROWS: dict[str, Row] = {
    "a limit of no input": (
        "fbgemm", {"activation_scale_ub": 0}, nothing, METHOD, "activation_scale_ub '0'",
    ),
    "a limit that is a truth": (
        "fbgemm", {"activation_scale_ub": True}, nothing, METHOD, "activation_scale_ub 'True'",
    ),
    "an infinite limit": (
        "fbgemm", {"activation_scale_ub": float("inf")}, nothing, METHOD, "scale_ub 'inf'",
    ),
    "a limit of NaN": (
        "fbgemm", {"activation_scale_ub": float("nan")}, nothing, METHOD, "scale_ub 'nan'",
    ),
    "zero points of ModelOpt": (
        "modelopt int4", {"has_zero_point": True}, nothing, METHOD, "zero points of 'W4A16_AWQ'",
    ),
    "an algorithm of ModelOpt": (
        "modelopt int4", {"quant_algo": "W4A8_AWQ"}, nothing, METHOD, "'W4A8_AWQ' is not known",
    ),
    "signed pairs": (
        "modelopt int4", {}, change("weight", signed), TENSOR, "four bits are stored in bytes",
    ),
    "pairs in one row": (
        "modelopt int4", {}, change("weight", flat), TENSOR, "four bits are stored in bytes",
    ),
    "pairs with the scales of one output": (
        "modelopt int4", {}, change("weight_scale", first_row), TENSOR, "the scales are not those",
    ),
    "three bits": (
        "int4 group", weights("int4 group", num_bits=3), nothing, METHOD, "weights of",
    ),
    "two numbers of bits": (
        "int4 group",
        {"config_groups": {
            k: {"weights": {"num_bits": k, "strategy": "group", "group_size": 8}} for k in (4, 8)
        }},
        nothing, METHOD, "weights of",
    ),
    "words of one output": (
        "int4 group", {}, change("weight_packed", first_row), TENSOR, "the words do not fit",
    ),
    "words of one input": (
        "int4 group", {}, change("weight_packed", first_column), TENSOR, "the words do not fit",
    ),
    "words of other outputs": (
        "int4 group", {}, put("weight_shape", torch.tensor([8, 32])), TENSOR, "the words do not",
    ),
    "words of bytes": (
        "int4 group", {}, change("weight_packed", signed), TENSOR, "a tensor is I8, not I32",
    ),
    "an input of no group": (
        "int4 group", weights("int4 group", actorder="group"),
        put("weight_g_idx", torch.arange(32, dtype=torch.int32) // 4), TENSOR, "groups do not fit",
    ),
    "a group of one input for all": (
        "int4 group", weights("int4 group", actorder="group"),
        put("weight_g_idx", torch.zeros(1, dtype=torch.int32)), TENSOR, "groups do not fit",
    ),
    "groups of a text": (
        "int4 group", weights("int4 group", group_size="8"), nothing, METHOD, "groups of 8",
    ),
    "groups of nothing": (
        "int4 group", weights("int4 group", group_size=0), nothing, METHOD, "groups of 0",
    ),
    "scales of tokens": (
        "fp8 channel", weights("fp8 channel", strategy="token"), nothing, METHOD, "scales of",
    ),
    "scales of channels that are integers": (
        "fp8 channel", {}, change("weight_scale", as_integers), TENSOR, NO_FLOATS,
    ),
    "blocks of 64": (
        "fp8 of DeepSeek", {"weight_block_size": [64, 128]}, nothing, METHOD, "fp8 in blocks of",
    ),
    "codes of e5m2": (
        "fp8 of DeepSeek", {"fmt": "e5m2"}, nothing, METHOD, "fp8 in blocks of",
    ),
    "inputs scaled by tokens": (
        "fp8 of DeepSeek", {"activation_scheme": "per_token"}, nothing, METHOD, "inputs scaled",
    ),
    "static inputs of blocks": (
        "fp8 of DeepSeek", {"activation_scheme": "static"}, nothing, METHOD, "inputs scaled",
    ),
    "more scales than blocks": (
        "fp8 of DeepSeek", {}, change("weight_scale_inv", twice), TENSOR, NO_FIT,
    ),
    "a scale of blocks without a shape": (
        "fp8 of DeepSeek", {}, change("weight_scale_inv", flat), TENSOR, NO_FIT,
    ),
    "bytes in one row": (
        "fp8 of one scale", {}, change("weight", flat), TENSOR, "the bytes are no matrix",
    ),
    "bytes in one row with scales of outputs": (
        "fbgemm", {}, lambda parts: parts.update(
            weight=parts["weight"][:, 0], weight_scale=parts["weight_scale"]
        ), TENSOR, "the bytes are no matrix",
    ),
    "nested scales of float32": (
        "nvfp4", {}, change("weight_scale", torch.Tensor.float), TENSOR, NO_FIT,
    ),
    "nested scales of one output": (
        "nvfp4", {}, change("weight_scale", first_row), TENSOR, NO_FIT,
    ),
    "nested scales of one group": (
        "modelopt nvfp4", {}, change("weight_scale", first_column), TENSOR, NO_FIT,
    ),
    "two outer scales": (
        "nvfp4", {}, change("weight_global_scale", twice), TENSOR, NO_FIT,
    ),
    "an outer scale for each group": (
        "modelopt nvfp4", {}, put("weight_scale_2", torch.ones(16, 2)), TENSOR, NO_FIT,
    ),
    "groups of four bits that are cut off": (
        "nvfp4", {}, lambda parts: parts.update(
            weight_packed=parts["weight_packed"][:, :12], weight_scale=parts["weight_scale"][:, :1]
        ), TENSOR, NO_FIT,
    ),
    "scales of one output": ("gptq", {}, change("scales", first_column), TENSOR, NO_FIT),
    "scales of one group": ("gptq", {}, change("scales", first_row), TENSOR, NO_FIT),
    "zero points of one group": ("gptq", {}, change("qzeros", first_row), TENSOR, NO_FIT),
    "scales and zero points of half the outputs": (
        "gptq", {}, lambda parts: parts.update(
            scales=parts["scales"][:, :8], qzeros=parts["qzeros"][:, :1]
        ), TENSOR, NO_FIT,
    ),
    "scales that are integers": ("gptq", {}, change("scales", as_integers), TENSOR, NO_FLOATS),
    "a zero point of 16": (
        "gptq", {}, change("qzeros", lambda part: part.fill_(-1)), TENSOR, "more than its bits",
    ),
    "a group for each output": (
        "gptq, act order", {}, change("g_idx", lambda part: part[:16]), TENSOR, "groups do not fit",
    ),
    "a group of one input": (
        "gptq, act order", {}, change("g_idx", lambda part: part[:1]), TENSOR, "groups do not fit",
    ),
    "a group from behind": (
        "gptq, act order", {}, change("g_idx", lambda part: part - 1), TENSOR, "groups do not fit",
    ),
    "a group beyond the last": (
        "gptq, act order", {}, change("g_idx", lambda part: part + 1), TENSOR, "out of bounds",
    ),
    "groups in two rows": (
        "gptq, act order", {}, change("g_idx", lambda part: part.reshape(2, 16)), TENSOR,
        "groups do not fit",
    ),
    "groups of GPTQ of nothing": ("gptq", {"group_size": 0}, nothing, METHOD, "groups of 0"),
    "groups of GPTQ of a text": ("gptq", {"group_size": "8"}, nothing, METHOD, "groups of 8"),
    "groups of GPTQ that are a truth": (
        "gptq", {"group_size": True}, nothing, METHOD, "groups of True",
    ),
    "groups of no one size": (
        "gptq", {"group_size": None}, lambda parts: parts.update(
            scales=parts["scales"][:3], qzeros=parts["qzeros"][:3]
        ), TENSOR, "groups do not fit",
    ),
    "a group of AWQ of more inputs than there are": (
        "awq", {"group_size": 64}, lambda parts: parts.update(
            scales=parts["scales"][:1], qzeros=parts["qzeros"][:1]
        ), TENSOR, "groups do not fit",
    ),
    "scales of one output in AWQ": ("awq", {}, change("scales", first_column), TENSOR, NO_FIT),
    "scales of one group in AWQ": ("awq", {}, change("scales", first_row), TENSOR, NO_FIT),
    "zero points of one group in AWQ": ("awq", {}, change("qzeros", first_row), TENSOR, NO_FIT),
    "half the outputs of AWQ": (
        "awq", {}, change("qweight", first_column), TENSOR, NO_FIT,
    ),
    "a last group of AWQ that is cut off": (
        "awq", {"group_size": 16}, by_16, TENSOR, "groups do not fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_both_programs_refuse_other_configurations_and_tensors(name: str) -> None:
    form, said, make, code, message = ROWS[name]
    config, parts, told = written(form)
    served(config, parts, told).matrix("w.weight")
    make(parts)
    with pytest.raises(Rejected, match=message) as rejected:
        served({**config, **said}, parts, told).matrix("w.weight")
    assert rejected.value.reason == code
    with pytest.raises(REFUSED):
        by_prover({**config, **said}, parts, told)


TORCHAO: dict[str, Row] = {
    "blocks that do not divide the inputs": (
        "torchao", {"block_size": [1, 5]}, nothing, TENSOR, "blocks do not fit the matrix",
    ),
    "blocks of no outputs": (
        "torchao", {"block_size": [0, 8]}, nothing, TENSOR, "blocks do not fit the matrix",
    ),
    "blocks of more outputs than there are": (
        "torchao", {"block_size": [32, 8]}, nothing, TENSOR, "blocks do not fit the matrix",
    ),
    "scales that are integers": (
        "torchao", {}, change("_weight_scale", as_integers), TENSOR, NO_FLOATS,
    ),
    "scales of one group": (
        "torchao", {}, change("_weight_scale", first_column), TENSOR, "does not fit the blocks",
    ),
    "zero points of half integers": (
        "torchao", {}, change("_weight_zero_point", as_integers), TENSOR, "points are not I8",
    ),
    "scales that no metadata names": (
        "torchao", {"_tensor_data_names": ["qdata", "zero_point"]}, nothing, TENSOR, "the parts",
    ),
    "inputs scaled before four bits": (
        "torchao int4", {}, put("_weight_act_quant_scale", torch.ones(1)), TENSOR, "the parts",
    ),
    "four bits in one row": (
        "torchao int4", {}, change("_weight_qdata", flat), TENSOR, "the codes are no matrix",
    ),
    "four bits of nothing": (
        "torchao int4", {}, change("_weight_qdata", lambda part: part[:0]), TENSOR, "no matrix",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCHAO)
def test_both_programs_refuse_other_parts_of_torchao(name: str) -> None:
    form, said, make, code, message = TORCHAO[name]
    config, parts, told = written(form)
    served(config, parts, told).matrix("w.weight")
    make(parts)
    with pytest.raises(Rejected, match=message) as rejected:
        served(config, parts, texts(form, **said)).matrix("w.weight")
    assert rejected.value.reason == code
    with pytest.raises(REFUSED):
        by_prover(config, parts, texts(form, **said))


@pytest.mark.parametrize("name", TEXTS)
def test_inputs_multiplied_before_torchao_are_refused(name: str) -> None:
    """The prover refuses the tensor when it loads the model."""
    config, parts, told = written(name)
    parts["_weight_act_pre_scale"] = torch.ones(32)
    with pytest.raises(Rejected, match=r"the parts are not|beside"):
        served(config, parts, told).matrix("w.weight")


@pytest.mark.parametrize(
    ("form", "other"),
    [
        ("fp8 channel", "int8 channel"),
        ("int8 channel", "fp8 channel"),
        ("modelopt fp8 channel", "modelopt int8"),
        ("modelopt int8", "modelopt fp8 channel"),
    ],
)
def test_bytes_are_of_the_type_of_the_configuration(form: str, other: str) -> None:
    """A loader that copies them into the stated type converts them: 127 becomes 128 in E4M3."""
    config, parts, told = written(form)
    fives = {**parts, "weight": parts["weight"].float().to(torch.float8_e5m2)}
    for changed in (written(other)[1], fives):
        with pytest.raises(Rejected, match="does not state bytes of") as rejected:
            served(config, changed, told).matrix("w.weight")
        assert rejected.value.reason == TENSOR
        with pytest.raises(Refusal, match="its type is"):
            by_prover(config, changed, told)


OPTIONAL = ("input_scale", "activation_scale", "input_scale_ub")


@pytest.mark.parametrize("name", FORMATS)
def test_both_programs_refuse_missing_parts(name: str) -> None:
    config, parts, told = written(name)
    needed = parts.keys() - {*OPTIONAL, *(() if config.get("desc_act") else ("g_idx",))}
    assert len(needed) > 1
    for part in needed:
        fewer = {key: tensor for key, tensor in parts.items() if key != part}
        message = (
            f"there is no (g_idx|{part})|there are 0 scales|and there are no zero points|the parts"
        )
        with pytest.raises(Rejected, match=message) as rejected:
            served(config, fewer, told).matrix("w.weight")
        assert rejected.value.reason == TENSOR
        with pytest.raises(REFUSED):
            by_prover(config, fewer, told)


@pytest.mark.parametrize("name", ["fp8 of one scale", "fbgemm", "modelopt nvfp4", "torchao"])
def test_products_that_overflow_are_refused(name: str) -> None:
    config, parts, told = written(name)
    for part, tensor in parts.items():
        if tensor.dtype == torch.float32:
            parts[part] = torch.full_like(tensor, 3e38)
    parts.pop("input_scale_ub", None)
    with pytest.raises(Rejected) as rejected:
        served(config, parts, told).matrix("w.weight")
    assert rejected.value.reason == "parameter/not-finite"


def test_codes_of_no_number_are_refused() -> None:
    config, parts, told = written("fp8 channel")
    parts["weight"].view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(Rejected) as rejected:
        served(config, parts, told).matrix("w.weight")
    assert rejected.value.reason == "parameter/not-finite"


def test_quantised_and_missing_tensors_are_not_plain() -> None:
    config, parts, told = written("gptq")
    both = served(config, {**parts, "weight": torch.ones(16, 32)}, told)
    for key in ("w.weight", "v.weight"):
        with pytest.raises(Rejected, match="no plain") as rejected:
            both.plain(key)
        assert rejected.value.reason == "parameter/missing"
    config, parts, told = written("fp8 tensor")
    with pytest.raises(Rejected, match="no plain"):
        served(config, parts, told).plain("w.weight")


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.ones(1, dtype=torch.int32), "is no float"),
        (torch.ones(1, dtype=torch.int8), "is no float"),
        (torch.ones(2), "is not one number"),
        (torch.ones(0), "is not one number"),
    ],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale", "output_scale"])
def test_scales_of_caches_are_one_float(name: str, stored: Tensor, message: str) -> None:
    config, parts, told = written("fp8 tensor")
    with pytest.raises(Rejected, match=message) as rejected:
        served(config, {**parts, name: stored}, told).cached("w.weight", name)
    assert rejected.value.reason == TENSOR


CONFIG = "config.json"


@pytest.mark.parametrize(
    ("name", "text", "code", "message"),
    [
        (CONFIG, "[]", "served/config", "no object"),
        (CONFIG, "3", "served/config", "no object"),
        (CONFIG, "{", "served/config", "no JSON"),
        (CONFIG, "", "served/config", "no JSON"),
        (CONFIG, b"\xff{}", "served/config", "no JSON"),
        (CONFIG, "[" * 100_000, "served/config", "no JSON"),
        (CONFIG, '{"a": {"b": 1, "b": 2}}', "served/config", "a key stands twice"),
        (
            CONFIG,
            '{"quantization_config": {"quant_method": "gptq"},'
            ' "quantization_config": {"quant_method": "awq"}}',
            "served/config",
            "a key stands twice",
        ),
        (CONFIG, '{"quantization_config": [1]}', "served/config", "configuration is no object"),
        (CONFIG, '{"quantization_config": "gptq"}', "served/config", "configuration is no object"),
        (CONFIG, "{}", METHOD, "'' is not known"),
        (CONFIG, '{"quantization_config": {"quant_method": "hqq"}}', METHOD, "'hqq' is not known"),
        ("hf_quant_config.json", "[]", "served/config", "no object"),
        ("hf_quant_config.json", '{"quantization": [1]}', "served/config", "is no object"),
        (
            "hf_quant_config.json",
            '{"quantization": {"quant_algo": "INT3"}}',
            METHOD,
            "'INT3' is not known",
        ),
    ],
)
def test_configurations_of_no_known_method_are_refused(
    tmp_path: Path, name: str, text: str | bytes, code: str, message: str
) -> None:
    _, parts, _ = written("fp8 tensor")
    data = save({f"w.{part}": tensor for part, tensor in parts.items()})
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Rejected, match=message) as rejected:
        read_served(tmp_path, {"w.weight"}).matrix("w.weight")
    assert rejected.value.reason == code
