"""Quantised checkpoints in the formats of serving libraries, with independent expected values.

Every format is written from its published layout by loops over single numbers, without the reader
of kcdsl or its checker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
Written = tuple[dict[str, Tensor], Tensor]
"""The tensors of one matrix by the last parts of their names, and the dequantised matrix."""


def _words(numbers: list[int], bits: int) -> list[int]:
    """Return 32-bit words, the first number in the lowest bits, as signed integers."""
    per = 32 // bits
    found = []
    for start in range(0, len(numbers), per):
        word = sum(n << (bits * k) for k, n in enumerate(numbers[start : start + per]))
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def _group_scales(w: Tensor, width: int, last: float, kind: torch.dtype) -> Tensor:
    """Return one scale for each `width` columns, in a storage type."""
    groups = w.reshape(w.shape[0], -1, width).abs().amax(-1)
    return (groups / last).to(kind)


def fp8(w: Tensor, layout: str, kind: torch.dtype = torch.float32) -> Written:
    """Float8 codes with scales of the tensor, of channels or of blocks of 128."""
    if layout == "tensor":
        scale = (w.abs().amax() / 448).reshape(1).to(kind)
        spread = scale.float().expand(w.shape[0], 1).expand(w.shape)
    elif layout == "channel":
        scale = (w.abs().amax(-1, keepdim=True) / 448).to(kind)
        spread = scale.float().expand(w.shape)
    else:
        rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
        scale, spread = torch.empty(rows, columns, dtype=kind), torch.empty_like(w)
        for r in range(rows):
            for c in range(columns):
                part = slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128)
                scale[r, c] = w[part].abs().amax() / 448
                spread[part] = scale[r, c].float()
    code = (w / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": code, "weight_scale": scale}, code.float() * spread


def inverse(parts: dict[str, Tensor], value: Tensor) -> Written:
    """Rename the scales as DeepSeek does."""
    return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, value


def with_inputs(written: Written, **inputs: float) -> Written:
    """Add the stored activation scales of a matrix, each one float32 number."""
    parts, value = written
    return {**parts, **{name: torch.tensor([one]) for name, one in inputs.items()}}, value


def int8(w: Tensor) -> Written:
    """Signed bytes with scales of channels, down to -128."""
    scale = (w.abs().amax(-1, keepdim=True) / 127.5).to(torch.bfloat16)
    code = (w / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": code, "weight_scale": scale}, code.float() * scale.float()


def packed_int4(w: Tensor, *, zeros: bool = False) -> Written:
    """Four-bit integers in groups of 8, packed along the row, with or without zero points."""
    scale = _group_scales(w, 8, 7.5, torch.bfloat16)
    spread = scale.float().repeat_interleave(8, dim=1)
    code = (w / spread).round().clamp(-8, 7).int()
    packed = [_words([int(n) + 8 for n in row], 4) for row in code]
    found = {
        "weight_packed": torch.tensor(packed, dtype=torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(w.shape),
    }
    if not zeros:
        return found, code.float() * spread
    points = (torch.arange(scale.numel()).reshape(scale.shape) % 5) - 2
    columns = [_words([int(n) + 8 for n in points[:, g]], 4) for g in range(points.shape[1])]
    found["weight_zero_point"] = torch.tensor(columns, dtype=torch.int32).T.contiguous()
    held = code - points.repeat_interleave(8, dim=1)
    return found, held.float() * spread


def pairs(w: Tensor) -> Written:
    """Signed 4-bit codes in groups of 8, packed by ModelOpt: a byte holds two rows of a column."""
    scale = _group_scales(w, 8, 7.5, torch.float32)
    spread = scale.repeat_interleave(8, dim=1)
    code = (w / spread).round().clamp(-8, 7)
    rows = [
        [16 * (int(high) % 16) + int(low) % 16 for low, high in zip(*two, strict=True)]
        for two in zip(code[0::2].tolist(), code[1::2].tolist(), strict=True)
    ]
    return {"weight": torch.tensor(rows, dtype=torch.uint8), "weight_scale": scale}, code * spread


def nvfp4(w: Tensor, *, divided: bool) -> Written:
    """FP4 codes in groups of 16 with nested scales, as in compressed-tensors or ModelOpt."""
    whole = w.abs().amax() / (6 * 448)
    groups = w.reshape(w.shape[0], -1, 16).abs().amax(-1)
    inner = (groups / 6 / whole).to(torch.float8_e4m3fn)
    outer = (1 / whole if divided else whole).reshape(1)
    scale = inner.float() / outer if divided else inner.float() * outer
    spread = scale.repeat_interleave(16, dim=1)
    grid = torch.tensor([*FP4, *(-x for x in FP4)])
    place = ((w / spread).unsqueeze(-1) - grid).abs().argmin(-1)
    data = torch.tensor(
        [[int(a) | int(b) << 4 for a, b in zip(r[::2], r[1::2], strict=True)] for r in place],
        dtype=torch.uint8,
    )
    value = grid[place] * spread
    if divided:
        parts = {"weight_packed": data, "weight_scale": inner, "weight_global_scale": outer}
        return parts, value
    return {"weight": data, "weight_scale": inner, "weight_scale_2": outer.reshape(())}, value


def gptq(w: Tensor, *, order: bool = False, second: bool = False) -> Written:
    """Four-bit integers in groups of 8 inputs, packed along the inputs."""
    out, inputs = w.shape
    groups = torch.arange(inputs) // 8
    if order:
        groups = groups.flip(0).contiguous()
    count = int(groups.max()) + 1
    scale, zero = torch.empty(count, out), torch.empty(count, out, dtype=torch.int64)
    for g in range(count):
        part = w[:, groups == g]
        low, high = part.amin(-1).clamp_max(0), part.amax(-1).clamp_min(0)
        scale[g] = (high - low).clamp_min(1e-6) / 15
        zero[g] = (-low / scale[g]).round().clamp(1, 15).long()
    scale = scale.to(torch.float16)
    code = torch.stack(
        [
            ((w[:, i] / scale[g].float()).round().long() + zero[g]).clamp(0, 15)
            for i, g in enumerate(groups)
        ]
    )
    stored = zero if second else zero - 1
    words = [_words([int(n) for n in code[:, o]], 4) for o in range(out)]
    points = [_words([int(n) for n in row], 4) for row in stored]
    value = torch.stack(
        [(code[i] - zero[g]).float() * scale[g].float() for i, g in enumerate(groups)], dim=1
    )
    found = {
        "qweight": torch.tensor(words, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor(points, dtype=torch.int32),
        "scales": scale,
        "g_idx": groups.int(),
    }
    return found, value


def awq(w: Tensor) -> Written:
    """Four-bit integers in groups of 8 inputs, eight outputs per word in the order of AWQ."""
    parts, value = gptq(w, second=True)
    out, inputs = w.shape
    code = torch.empty(inputs, out, dtype=torch.int64)
    words = parts["qweight"].long() & 0xFFFFFFFF
    for i in range(inputs):
        code[i] = (words[i // 8] >> (4 * (i % 8))) & 15
    zero = torch.empty(len(parts["scales"]), out, dtype=torch.int64)
    points = parts["qzeros"].long() & 0xFFFFFFFF
    for o in range(out):
        zero[:, o] = (points[:, o // 8] >> (4 * (o % 8))) & 15

    def held(rows: Tensor) -> Tensor:
        packed = [
            [w for k in range(0, out, 8) for w in _words([int(row[k + o]) for o in AWQ], 4)]
            for row in rows
        ]
        return torch.tensor(packed, dtype=torch.int32)

    return {"qweight": held(code), "qzeros": held(zero), "scales": parts["scales"]}, value


def torchao(w: Tensor) -> Written:
    """Signed bytes in groups of 8; the metadata names their class as torchao does."""
    scale = _group_scales(w, 8, 127.0, torch.float32)
    spread = scale.repeat_interleave(8, dim=1)
    code = (w / spread).round().clamp(-128, 127).to(torch.int8)
    zero = torch.zeros_like(scale, dtype=torch.int8)
    parts = {"_weight_qdata": code, "_weight_scale": scale, "_weight_zero_point": zero}
    return parts, code.float() * spread


def torchao_int4(w: Tensor) -> Written:
    """Signed 4-bit codes in groups of 8, with zero points added in bfloat16."""
    groups = w.reshape(w.shape[0], -1, 8)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).to(torch.bfloat16)
    zero = (low + 8 * (high - low) / 15).to(torch.bfloat16)
    value = torch.empty_like(w)
    codes = torch.empty(w.shape, dtype=torch.int64)
    for out, row in enumerate(w.tolist()):
        for place, number in enumerate(row):
            step, point = (float(t[out, place // 8]) for t in (scale, zero))
            codes[out, place] = code = min(max(round((number - point) / step), -8), 7)
            exact = code * Fraction(step) + Fraction(point)
            value[out, place] = rounded(exact, torch.bfloat16)
    data = (codes[:, ::2] % 16 + 16 * (codes[:, 1::2] % 16)).to(torch.uint8).view(torch.int8)
    parts = {"_weight_qdata": data, "_weight_scale": scale.T, "_weight_zero_point": zero.T}
    return parts, value


def rounded(exact: Fraction, kind: torch.dtype) -> float:
    """Return the nearest number of a type, ties to an even significand."""
    middle = torch.tensor(float(exact)).to(kind)
    ends = [torch.tensor(end, dtype=kind) for end in (-torch.inf, torch.inf)]
    near = [middle, *(torch.nextafter(middle, end) for end in ends)]
    bits = {torch.float32: torch.int32}.get(kind, torch.int16)
    order = [(abs(Fraction(float(n)) - exact), int(n.view(bits)) % 2, float(n)) for n in near]
    return min(order)[2]


TORCHAO = json.dumps({
    "_type": "Int8Tensor",
    "_data": {"block_size": [1, 8]},
    "_tensor_data_names": ["zero_point", "qdata", "scale"],
})  # fmt: skip


TORCHAO_INT4 = json.dumps({
    "_type": "Int4Tensor",
    "_data": {"block_size": [1, 8]},
    "_tensor_data_names": ["qdata", "scale", "zero_point"],
})  # fmt: skip
TEXTS = {"torchao": TORCHAO, "torchao int4": TORCHAO_INT4}
"""The metadata of a matrix in a file."""


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_F8 = {"num_bits": 8, "type": "float"}
FORMATS: Mapping[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "fp8 tensor": (
        _compressed("float-quantized", strategy="tensor", **_F8),
        lambda w: fp8(w, "tensor"),
    ),
    "fp8 channel": (
        _compressed("float-quantized", strategy="channel", **_F8),
        lambda w: fp8(w, "channel", torch.bfloat16),
    ),
    "fp8 block": (
        _compressed("float-quantized", strategy="block", block_structure=[128, 128], **_F8),
        lambda w: fp8(w, "block"),
    ),
    "fp8 of DeepSeek": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        lambda w: inverse(*fp8(w, "block")),
    ),
    "fp8 of one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: with_inputs(fp8(w, "tensor"), input_scale=0.03125),
    ),
    "fp8 of transformers": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda w: with_inputs(inverse(*fp8(w, "tensor")), activation_scale=0.03125),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda w: with_inputs(fp8(w, "channel"), input_scale_ub=1200.0),
    ),
    "int8 channel": (
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        int8,
    ),
    "int4 group": (
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8),
        packed_int4,
    ),
    "int4 group, zero points": (
        _compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="group",
            group_size=8,
            symmetric=False,
        ),
        lambda w: packed_int4(w, zeros=True),
    ),
    "nvfp4": (
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
        lambda w: nvfp4(w, divided=True),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}, gptq),
    "gptq, act order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True},
        lambda w: gptq(w, order=True),
    ),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, second=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda w: fp8(w, "tensor"),
    ),
    "modelopt fp8 channel": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        lambda w: fp8(w, "channel"),
    ),
    "modelopt int8": (
        {"quant_method": "modelopt", "quant_algo": "W8A16"},
        int8,
    ),
    "modelopt int4": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 8},
        pairs,
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        lambda w: nvfp4(w, divided=False),
    ),
    "torchao": ({"quant_method": "torchao"}, torchao),
    "torchao int4": ({"quant_method": "torchao"}, torchao_int4),
}
"""Every format: its quantisation configuration, and the function that stores a matrix."""


def quantise(source: Path, folder: Path, name: str) -> dict[str, Tensor]:
    """Write the quantised form of a model.safetensors and its config.json.

    Return the dequantised value of every tensor, as float32.
    """
    config, write = FORMATS[name]
    folder.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    told: dict[str, str] = {}
    for key, value in load_file(source / "model.safetensors").items():
        told[key] = json.dumps({"_type": "Tensor"})
        if not key.endswith("_proj.weight"):
            tensors[key] = meant[key] = value
            continue
        parts, meant[key] = write(value.float())
        base, told[key] = key.removesuffix(".weight"), TEXTS.get(name, "")
        tensors |= {f"{base}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    told["tensor_names"] = json.dumps(sorted(told))
    save_file(tensors, folder / "model.safetensors", told if name in TEXTS else None)
    document = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "quantization_config": config}))
    return meant
