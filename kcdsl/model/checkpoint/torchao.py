"""Weights that torchao quantised, as its safetensors files store them.

Source: `torchao.prototype.safetensors` 0.18. The parts of X.weight are X._weight_qdata,
X._weight_scale and X._weight_zero_point; the metadata of the file names the class of the weight and
its blocks. A class is a rule of docs/reference/quantised-checkpoints.md; no class is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.checkpoint.activations import stated_by_torchao
from kcdsl.model.checkpoint.quantised import (
    PLAIN,
    QuantisedWeight,
    Reader,
    Scheme,
    broken,
    matrix_of,
    need,
    unknown,
)
from kcdsl.model.numerics.formats import FORMATS, Format
from kcdsl.source.files import excerpt, json_value

_CLASSES = {
    "Float8Tensor": {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"},
    "Int8Tensor": {"I8": "int8"},
    "IntxUnpackedToInt8Tensor": {"I8": "int8"},
    "Int4Tensor": {"I8": ""},
}
"""The code format by stored type, for every supported class."""
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PARTS = ("scale", "zero_point", "act_quant_scale", "act_quant_zero_point")
"""Suffixes of tensors beside the codes; scales of activations do not change the weight."""


def torchao_scheme(metadata: Mapping[str, str]) -> Scheme:
    """Return the storage format of a checkpoint of torchao, from the metadata of its files.

    Refuse (KC455) files without metadata, and unsupported tensor classes, by name.
    """
    if "tensor_names" not in metadata:
        raise refuse(
            codes.MODEL_CONFIG,
            "quant_method is 'torchao', and the safetensors files have no metadata of torchao",
            help="save the model with torchao 0.14 or later and save_pretrained(FOLDER)",
        )
    told: dict[str, Mapping[str, Any]] = {}
    for name, text in metadata.items():
        if name in ("tensor_names", "format"):
            continue
        found = _object(name, text)
        kind = found.get("_type")
        if kind == "Tensor":
            continue
        if not isinstance(kind, str) or kind not in _CLASSES:
            raise unknown(f"the class of {excerpt(name)},", kind, tuple(_CLASSES))
        parts = found.get("_tensor_data_names")
        if not isinstance(parts, list) or not isinstance(found.get("_data"), dict):
            raise broken(excerpt(name), "its metadata is not that of torchao")
        others = [part for part in parts if part not in ("qdata", *_PARTS)]
        if others:
            raise unknown(f"the part {excerpt(others[0])} of", name, ("qdata", *_PARTS))
        _refuse_limits(name, found["_data"].get("act_quant_kwargs"))
        told[name] = found

    def decode(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
        name = f"{base}.weight"
        need(name in told, name, "the metadata of its file says nothing of it")
        if told[name]["_type"] == "Int4Tensor":
            return _decode_int4(read, base, kinds, told[name])
        return _decode(read, base, kinds, told[name])

    places = tuple(f"_weight_{part}" for part in _PARTS)
    halves = {
        f"{name.removesuffix('.weight')}._weight_qdata": 4
        for name, found in told.items()
        if found["_type"] == "Int4Tensor"
    }
    inputs = {name: stated_by_torchao(found) for name, found in told.items()}
    return Scheme("torchao", "_weight_qdata", places, decode, others=halves, inputs=inputs)


def _refuse_limits(name: str, kwargs: object) -> None:
    """Refuse (KC455) limits of dynamic input scales, and input codes with a reduced range."""
    fields = kwargs.get("_data") if isinstance(kwargs, dict) else None
    for field in ("hp_value_lb", "hp_value_ub", "reduce_range"):
        value = fields.get(field) if isinstance(fields, dict) else None
        if value is not None and value is not False:
            raise unknown(f"the {field} of the inputs of {excerpt(name)},", value, (None,))


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json_value(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise broken(excerpt(name), "its metadata is no JSON object")
    return found


def _decode(
    read: Reader, base: str, kinds: Mapping[str, Any], told: Mapping[str, Any]
) -> QuantisedWeight:
    """Return (q - z)·s, with one scale and zero point for each block of the matrix."""
    name, data = f"{base}.weight", told["_data"]
    place = f"{base}._weight_"
    stored = {part for part in ("qdata", *_PARTS) if f"{place}{part}" in kinds}
    need(stored == set(told["_tensor_data_names"]), name, "its metadata names other parts")
    form = _CLASSES[told["_type"]].get(kinds[f"{place}qdata"])
    need(form is not None, name, f"its codes are stored as {kinds[f'{place}qdata']}")
    need(kinds.get(f"{place}scale") in PLAIN, name, "it has no scales of a float format")
    code = read(f"{place}qdata").to(torch.float32)
    need(code.dim() == 2 and code.numel() > 0, name, "it is no matrix")
    if told["_type"] == "IntxUnpackedToInt8Tensor":
        form = _within(name, code, data.get("target_dtype"))
    high, wide = _block(name, data.get("block_size"), tuple(code.shape))
    scale = _spread(name, read(f"{place}scale"), high, wide, code)
    layout = _layout(high, wide, tuple(code.shape))
    if "zero_point" in stored:
        need(kinds[f"{place}zero_point"] == "I8", name, "its zero points are not stored as I8")
        zero = _spread(name, read(f"{place}zero_point"), high, wide, code)
        if bool((zero != 0).any()):
            form, code = "", code - zero
    return matrix_of(code * scale, str(form), layout, code, scale)


def _decode_int4(
    read: Reader, base: str, kinds: Mapping[str, Any], told: Mapping[str, Any]
) -> QuantisedWeight:
    """Return q·s + z, rounded once to the format of s and z, which are [groups, out].

    A byte holds two inputs of one output, the first in its low half. The GPU kernel multiplies and
    adds in one instruction, in that format.
    """
    name, data, place = f"{base}.weight", told["_data"], f"{base}._weight_"
    inputs = data.get("activation_dtype")
    if inputs is not None and inputs != {"_type": "torch.dtype", "_data": "bfloat16"}:
        said = inputs.get("_data") if isinstance(inputs, dict) else inputs
        raise unknown(f"the activation_dtype of {excerpt(name)},", said, ("bfloat16",))
    stored = {part for part in ("qdata", *_PARTS) if f"{place}{part}" in kinds}
    parts = ("qdata", "scale", "zero_point")
    need(stored == set(told["_tensor_data_names"]) == set(parts), name, "it has other parts")
    codes_as, kind, zeros_as = (kinds[f"{place}{part}"] for part in parts)
    need(codes_as == "I8", name, f"its codes are stored as {codes_as}")
    need(kind in _FLOATS and kind == zeros_as, name, "its scales and zero points are of two types")
    raw = read(f"{place}qdata")
    need(raw.dim() == 2 and raw.numel() > 0, name, "it is no matrix")
    halves = torch.stack((raw & 15, (raw >> 4) & 15), dim=-1).reshape(raw.shape[0], -1)
    code = torch.where(halves >= 8, halves - 16, halves).to(torch.float64)
    rows, columns = code.shape
    need(data.get("shape") in (None, [rows, columns]), name, "its metadata says another shape")
    high, wide = _block(name, data.get("block_size"), (rows, columns))
    need(high == 1, name, "its groups are of several outputs")
    scale, zero = (
        _spread(name, read(f"{place}{part}").T, 1, wide, code).to(torch.float64)
        for part in ("scale", "zero_point")
    )
    form = FORMATS[_FLOATS[kind]]
    value = _fused(code * scale, zero, form)
    need(not bool((value.abs() > form.largest).any()), name, f"a number overflows {form.name}")
    return matrix_of(value, "", "", code, scale)


def _fused(product: Tensor, addend: Tensor, form: Format) -> Tensor:
    """Return float32 sums of float64 numbers, each rounded once to a format.

    The sum is first rounded to odd in float64, so that the second rounding is the correct one.
    """
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    even = total.view(torch.int64) % 2 == 0
    toward = torch.nextafter(total, torch.full_like(total, torch.inf).copysign(lost))
    return form.nearest(torch.where((lost != 0) & even, toward, total)).to(torch.float32)


def _within(name: str, code: Tensor, kind: object) -> str:
    """Return the integer format with fewer bits; refuse codes outside its range."""
    text = kind.get("_data") if isinstance(kind, dict) else None
    widths = {f"int{bits}": bits for bits in range(1, 9)}
    need(text in widths, name, f"its target_dtype is {excerpt(text)}")
    half = 1 << (widths[str(text)] - 1)
    need(bool(((code >= -half) & (code < half)).all()), name, f"a code is not in {text}")
    return str(text) if text in ("int4", "int8") else ""


def _block(name: str, size: object, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return height and width of the blocks that share a scale; the whole matrix if not stated."""
    match size:
        case None | []:
            return shape[0], shape[1]
        case [int(high), int(wide)]:
            fits = 0 < high <= shape[0] and 0 < wide <= shape[1]
            if fits and shape[0] % high == 0 and shape[1] % wide == 0:
                return high, wide
    raise broken(name, f"blocks of {excerpt(size)} do not fit a matrix of {shape}")


def _spread(name: str, stored: Tensor, high: int, wide: int, code: Tensor) -> Tensor:
    """Return the scale or zero point of each element, from those of the blocks."""
    blocks = (code.shape[0] // high, code.shape[1] // wide)
    one = blocks == (1, 1) and stored.numel() == 1
    said = f"a part of shape {tuple(stored.shape)} does not fit {blocks} blocks"
    need(one or tuple(stored.shape) == blocks, name, said)
    grid = stored.to(torch.float32).reshape(blocks)
    return grid.repeat_interleave(high, dim=0).repeat_interleave(wide, dim=1)


def _layout(high: int, wide: int, shape: tuple[int, ...]) -> str:
    if (high, wide) == shape:
        return "per_tensor"
    if high == 1:
        return "per_channel" if wide == shape[1] else f"group_{wide}"
    return "block_128" if high == wide == 128 else ""
