"""Quantised weights in the storage formats of serving engines, dequantised to float32.

Sources of the rules: the documentation of compressed-tensors, GPTQ, AWQ and ModelOpt; each is
described in docs/reference/quantised-checkpoints.md. Arithmetic is float32, round to nearest even.
A nested scale is multiplied with its outer scale first. Undefined variants are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.checkpoint import inputs
from kcdsl.model.checkpoint.activations import StatedCodes
from kcdsl.model.checkpoint.headers import StoredTensor

PLAIN = frozenset({"F32", "F16", "BF16"})
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column (of eight) in each 4-bit field of an AWQ word, lowest bits first."""
_INERT_PARTS = (*inputs.SCALES, *inputs.ZERO_POINTS, "weight_shape")
"""Tensors beside a weight that do not change its numbers; those of inputs and caches are compared
with what the numerics state (`inputs`)."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A matrix [out, in] as float32, with properties of its storage.

    `form` names a code format and `layout` a scale layout of `numerics.formats`; "" where it has
    none. `least_code` is the least code, `scale` the largest scale.
    """

    value: Tensor
    form: str
    layout: str
    least_code: float
    scale: float


Reader = Callable[[str], Tensor]
"""Reads a stored tensor by name, in its stored type."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A storage format: the suffix of the tensor of codes, the suffixes of its companion tensors,
    the function that decodes the matrix, and the bits per stored code.

    Dynamic scales of inputs clip magnitudes to `limit`, where the format has one.
    `others` has the bits per code of tensors for which it is not `bits`. `inputs` has the codes
    that the format states for the inputs of a weight ("*": any), `cache` those of keys and values.
    """

    name: str
    codes: str
    parts: tuple[str, ...]
    decode: Callable[[Reader, str, Mapping[str, Any]], QuantisedWeight]
    bits: int = 8
    limit: float | None = None
    others: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, StatedCodes | None] = field(default_factory=dict)
    cache: StatedCodes | None = None

    def inputs_of(self, key: str) -> StatedCodes | None:
        """Return the codes that are stated for the inputs of a weight; None where none are."""
        return self.inputs.get(key, self.inputs.get("*"))

    def holds(self, shape: Sequence[int], name: str, stored: StoredTensor) -> bool:
        """Return whether a tensor has as many codes as a matrix [out, in]; the last word of a row
        may be partly used."""
        rows, columns = shape
        bits = self.others.get(name, self.bits)
        word = 8 * (stored.end - stored.start) // max(math.prod(stored.shape), 1)
        codes = math.prod(stored.shape) * word // bits
        per = max(word // bits, 1)
        return codes in (rows * columns, rows * -(-columns // per) * per)

    def matrices(self, names: Sequence[str], kinds: Mapping[str, str]) -> dict[str, frozenset[str]]:
        """Return the quantised matrices, by the name of the weight, with the tensors of each."""
        found: dict[str, frozenset[str]] = {}
        for name in names:
            base, _, part = name.rpartition(".")
            if part == self.codes and (part != "weight" or kinds[name] not in PLAIN):
                inert = (*_INERT_PARTS, *inputs.cache_scales(base))
                mine = {f"{base}.{one}" for one in (part, *self.parts, *inert)}
                found[f"{base}.weight"] = frozenset(mine & kinds.keys())
        return found


def unknown(field: str, value: object, known: Sequence[object]) -> Refusal:
    """Return the refusal (KC455) of a field of a configuration, with the supported values."""
    shown = ", ".join(map(str, known))
    return refuse(
        codes.MODEL_CONFIG,
        f"the quantisation configuration has {field} {value!r}; read are: {shown}",
        help="save the checkpoint in one of these, or dequantise it to bfloat16 and state how the "
        "kernel stores it in `numerics`",
    )


def allow(config: Mapping[str, Any], field: str, known: Sequence[object], default: object) -> Any:
    """Return a field of a configuration; refuse (KC455) an unsupported value."""
    value = config.get(field, default)
    if not any(value == one and type(value) is type(one) for one in known):
        raise unknown(field, value, known)
    return value


def broken(name: str, why: str) -> Refusal:
    """Return the refusal of a quantised weight whose tensors do not fit its format."""
    return refuse(
        codes.CHECKPOINT_TENSORS,
        f"the quantised weight {name}: {why}",
        help="quantise the model again with the library that its configuration names",
    )


def need(holds: bool, name: str, why: str) -> None:
    """Refuse (KC451) a quantised weight whose tensors do not fit its format."""
    if not holds:
        raise broken(name, why)


# --- compressed-tensors ---------------------------------------------------------------------------

_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_NVFP4 = "nvfp4-pack-quantized"
_STRATEGIES = ("tensor", "channel", "group", "block")


def compressed_tensors_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the format of compressed-tensors. Refuse (KC455) unsupported variants."""
    kind = allow(config, "format", (*_COMPRESSED, _NVFP4), None)
    allow(config, "quantization_status", ("compressed", "frozen", None), None)
    allow(config, "sparsity_config", (None, {}), None)
    if config.get("transform_config"):
        raise unknown("transform_config", "set", ("none",))
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unknown("config_groups", groups, ("groups of linears",))
    stated = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise unknown("weights of a group", weights, ("a scheme",))
        if group.get("format") not in (None, kind):
            raise unknown("format of a group", group["format"], (kind,))
        allow(group, "output_activations", (None,), None)
        allow(weights, "dynamic", (False, None), False)
        if kind == _NVFP4:
            allow(weights, "type", ("float",), None)
            allow(weights, "num_bits", (4,), None)
            allow(weights, "group_size", (16,), 16)
        else:
            allow(weights, "strategy", (*_STRATEGIES, None), None)
            bits = (2, 4, 8) if kind == "pack-quantized" else (8,)
            allow(weights, "num_bits", bits, None)
            names = ("float",) if kind == "float-quantized" else ("int", "float")
            allow(weights, "type", ("int",) if kind == "pack-quantized" else names, None)
        stated.append(weights)
    if kind == _NVFP4:
        nested = ("weight_scale", "weight_global_scale")
        return Scheme(f"compressed-tensors {kind}", "weight_packed", nested, _decode_nvfp4, 4)
    if kind == "pack-quantized":
        if len({one["num_bits"] for one in stated}) > 1:
            raise unknown("num_bits of groups", "different", ("the same",))
        packed = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        decode = _with(_decode_packed, stated)
        width = int(stated[0]["num_bits"])
        return Scheme(f"compressed-tensors {kind}", "weight_packed", packed, decode, width)
    parts = ("weight_scale", "weight_zero_point", "weight_g_idx")
    return Scheme(f"compressed-tensors {kind}", "weight", parts, _decode_scaled)


def _with(
    decode: Callable[[Reader, str, Mapping[str, Any], int], QuantisedWeight],
    stated: Sequence[Mapping[str, Any]],
) -> Callable[[Reader, str, Mapping[str, Any]], QuantisedWeight]:
    bits = int(stated[0]["num_bits"])
    return lambda read, base, kinds: decode(read, base, kinds, bits)


def _decode_scaled(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
    """Return float8 or int8 codes times scales per tensor, channel, group or block."""
    name = f"{base}.weight"
    form = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2", "I8": "int8"}.get(kinds[name])
    need(form is not None, name, f"it is stored as {kinds[name]}")
    stored = read(name).to(torch.float32)
    need(stored.dim() == 2, name, "it is no matrix")
    need(f"{base}.weight_scale" in kinds, name, "it has no weight_scale")
    scale, layout = _spread(read, f"{base}.weight_scale", tuple(stored.shape), base, kinds)
    if f"{base}.weight_zero_point" in kinds:
        zero, _ = _spread(read, f"{base}.weight_zero_point", tuple(stored.shape), base, kinds)
        if bool((zero != 0).any()):
            return matrix_of((stored - zero) * scale, "", layout, stored - zero, scale)
    return matrix_of(stored * scale, str(form), layout, stored, scale)


def _decode_packed(read: Reader, base: str, kinds: Mapping[str, Any], bits: int) -> QuantisedWeight:
    """Return integers packed along rows, minus half their range, times scales."""
    name = f"{base}.weight"
    for part in ("weight_scale", "weight_shape"):
        need(f"{base}.{part}" in kinds, name, f"it has no {part}")
    shape = tuple(int(n) for n in read(f"{base}.weight_shape").tolist())
    packed, half = read(f"{base}.weight_packed"), 1 << (bits - 1)
    words = -(-shape[1] * bits // 32) if len(shape) == 2 else -1
    need(tuple(packed.shape) == (shape[0], words), name, "its shape does not fit its words")
    code = _unpacked(packed, bits)[:, : shape[1]].to(torch.float32) - half
    scale, layout = _spread(read, f"{base}.weight_scale", shape, base, kinds)
    form = {4: "int4", 8: "int8"}.get(bits, "")
    if f"{base}.weight_zero_point" in kinds:
        points = _unpacked(read(f"{base}.weight_zero_point").T.contiguous(), bits).T
        points = points[: shape[0]].to(torch.float32) - half
        zero, _ = _tiled(points, shape, name, _group_index(read, base, kinds))
        return matrix_of((code - zero) * scale, "", layout, code - zero, scale)
    return matrix_of(code * scale, form, layout, code, scale)


def _decode_nvfp4(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
    """Return fp4 codes times a float8 scale per 16 codes, divided by the scale of the tensor."""
    whole = read(f"{base}.weight_global_scale").to(torch.float32).reshape(-1)
    need(whole.numel() == 1, f"{base}.weight", "it has several global scales")
    return _nvfp4(read, base, kinds, f"{base}.weight_packed", lambda s: s / whole)


def _nvfp4(
    read: Reader,
    base: str,
    kinds: Mapping[str, Any],
    packed: str,
    scaled: Callable[[Tensor], Tensor],
) -> QuantisedWeight:
    name = f"{base}.weight"
    need(kinds[packed] == "U8", name, f"it is stored as {kinds[packed]}")
    need(kinds.get(f"{base}.weight_scale") == "F8_E4M3", name, "its scales are not F8_E4M3")
    raw, scale = read(packed), read(f"{base}.weight_scale").to(torch.float32)
    shape = (raw.shape[0], 2 * raw.shape[1])
    need(tuple(scale.shape) == (shape[0], shape[1] // 16), name, "its scales do not fit")
    digits = torch.stack((raw & 15, raw >> 4), dim=-1).reshape(shape).long()
    sizes = torch.tensor(_FP4)[digits & 7]
    code = torch.where(digits >= 8, -sizes, sizes)
    spread = scaled(scale).repeat_interleave(16, dim=1)
    return matrix_of(code * spread, "fp4_e2m1", "nvfp4", code, spread)


def _group_index(read: Reader, base: str, kinds: Mapping[str, Any]) -> Tensor | None:
    """Return the stored group index of each input; None where it is missing or unused
    (negative)."""
    name = f"{base}.weight_g_idx"
    if name not in kinds:
        return None
    found = read(name).long()
    return None if bool((found < 0).any()) else found


def _spread(
    read: Reader, name: str, shape: tuple[int, ...], base: str, kinds: Mapping[str, Any]
) -> tuple[Tensor, str]:
    return _tiled(read(name).to(torch.float32), shape, name, _group_index(read, base, kinds))


def _tiled(
    scale: Tensor, shape: tuple[int, ...], name: str, groups: Tensor | None
) -> tuple[Tensor, str]:
    """Return the scale of every element of a matrix, and the layout of the scales."""
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, columns), "per_tensor"
    if scale.dim() == 1:
        scale = scale.unsqueeze(1)
    high, wide = scale.shape
    if groups is not None:
        fits = high == rows and len(groups) == columns and int(groups.max()) < wide
        need(fits, name, "its groups do not fit its scales")
        return scale[:, groups], ""
    if (high, wide) == (rows, 1):
        return scale.expand(rows, columns), "per_channel"
    if high == rows and columns % wide == 0:
        width = columns // wide
        return scale.repeat_interleave(width, dim=1), f"group_{width}"
    return of_blocks(scale, shape, name), "block_128"


BLOCK = 128


def of_blocks(scale: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Return the scale of every element of a matrix, from the scales of its blocks."""
    rows, columns = shape
    fits = tuple(scale.shape) == (-(-rows // BLOCK), -(-columns // BLOCK))
    said = f"scales of shape {tuple(scale.shape)} do not fit a matrix of {shape}"
    need(fits, name, said)
    tall = scale.repeat_interleave(BLOCK, dim=0)[:rows]
    return tall.repeat_interleave(BLOCK, dim=1)[:, :columns]


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of 32-bit words along the last dimension, low bits first."""
    shifts = torch.arange(0, 32, bits)
    parts = (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return parts.reshape(*words.shape[:-1], -1)


def matrix_of(
    value: Tensor, form: str, layout: str, code: Tensor, scale: Tensor
) -> QuantisedWeight:
    """Return a matrix with the least of its codes and the largest of its scales."""
    least = float(code.min()) if code.numel() else 0.0
    largest = float(scale.abs().max()) if scale.numel() else 0.0
    return QuantisedWeight(value.contiguous(), form, layout, least, largest)


# --- GPTQ and AWQ ---------------------------------------------------------------------------------


def gptq_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the format of GPTQ. Refuse (KC455) unsupported variants."""
    bits = allow(config, "bits", (2, 4, 8), None)
    version = allow(config, "checkpoint_format", ("gptq", "gptq_v2", None), None)
    allow(config, "is_marlin_format", (False, None), None)
    symmetric = allow(config, "sym", (True, False, None), None)
    in_order = allow(config, "desc_act", (True, False, None), None) is False
    if config.get("dynamic"):
        raise unknown("dynamic", "set", ("none",))
    offset = 0 if version == "gptq_v2" else 1
    zero = (1 << (int(bits) - 1)) - offset if symmetric else None

    def decode(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
        return _decode_gptq(read, base, kinds, bits, offset, zero, in_order=in_order)

    return Scheme("gptq", "qweight", ("qzeros", "scales", "g_idx"), decode, int(bits))


def _decode_gptq(
    read: Reader,
    base: str,
    kinds: Mapping[str, Any],
    bits: int,
    offset: int,
    symmetric: int | None,
    *,
    in_order: bool,
) -> QuantisedWeight:
    """Return (code - z)·s; words hold inputs of one output, and z is the stored one plus `offset`.

    Refuse zero points other than `symmetric`, if given, and groups out of order if `in_order`:
    kernels do not read them then.
    """
    name = f"{base}.weight"
    for part in ("qzeros", "scales"):
        need(f"{base}.{part}" in kinds, name, f"it has no {part}")
    words, scale = read(f"{base}.qweight"), read(f"{base}.scales").to(torch.float32)
    code = _unpacked(words.T.contiguous(), bits)
    out, inputs = code.shape
    zero = _unpacked(read(f"{base}.qzeros"), bits)
    need(tuple(zero.shape) == tuple(scale.shape), name, "zero points and scales do not fit")
    need(scale.shape[1] == out and inputs % scale.shape[0] == 0, name, "its scales do not fit")
    if offset and bool((zero == (1 << bits) - 1).any()):
        raise broken(name, "a zero point is one more than its bits hold, which libraries differ in")
    middle = symmetric is None or bool((zero == symmetric).all())
    need(middle, name, "it is symmetric by its configuration, and its zero points are others")
    groups = plain = torch.arange(inputs) // (inputs // len(scale))
    if f"{base}.g_idx" in kinds:
        groups = read(f"{base}.g_idx").long()
        fits = len(groups) == inputs and 0 <= int(groups.min()) <= int(groups.max()) < len(scale)
        need(fits, name, "its g_idx does not fit")
        ordered = not in_order or torch.equal(groups, plain)
        need(ordered, name, "desc_act is false, and its g_idx has another order")
    held = code.T.to(torch.float32) - (zero[groups] + offset).to(torch.float32)
    spread = scale[groups]
    return matrix_of((held * spread).T, "", "", held, spread)


def awq_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the format of AWQ. Refuse (KC455) unsupported variants."""
    allow(config, "version", ("gemm", "GEMM", None), None)
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise unknown("bits", bits, (4,))
    allow(config, "zero_point", (True, None), None)
    return Scheme("awq", "qweight", ("qzeros", "scales"), _decode_awq, 4)


def _decode_awq(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
    """Return (code - z)·s; words hold eight outputs of one input, in AWQ order."""
    name = f"{base}.weight"
    for part in ("qzeros", "scales"):
        need(f"{base}.{part}" in kinds, name, f"it has no {part}")
    scale = read(f"{base}.scales").to(torch.float32)
    code, zero = (_ordered(_unpacked(read(f"{base}.{part}"), 4)) for part in ("qweight", "qzeros"))
    inputs, out = code.shape
    fits = tuple(zero.shape) == tuple(scale.shape) and scale.shape[1] == out
    need(fits and inputs % len(scale) == 0, name, "its scales do not fit")
    width = inputs // len(scale)
    held = code.to(torch.float32) - zero.to(torch.float32).repeat_interleave(width, dim=0)
    spread = scale.repeat_interleave(width, dim=0)
    return matrix_of((held * spread).T, "", "", held, spread)


def _ordered(parts: Tensor) -> Tensor:
    """Return columns in AWQ order in their natural order."""
    place = torch.tensor([_AWQ_ORDER.index(column) for column in range(8)])
    rows, columns = parts.shape
    return parts.reshape(rows, columns // 8, 8)[:, :, place].reshape(rows, columns)


# --- ModelOpt -------------------------------------------------------------------------------------


_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A16", "W4A16_AWQ", "NVFP4")


def modelopt_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the format of ModelOpt. Refuse (KC455) unsupported variants."""
    kind = allow(config, "quant_algo", _MODELOPT, None)
    if kind == "NVFP4":
        allow(config, "group_size", (16, None), None)
        nested = ("weight_scale", "weight_scale_2")
        return Scheme("modelopt NVFP4", "weight", nested, _decode_modelopt, 4)
    allow(config, "has_zero_point", (False, None), None)
    if kind == "W4A16_AWQ":
        return Scheme(f"modelopt {kind}", "weight", ("weight_scale",), _decode_pairs, 4)
    return Scheme(f"modelopt {kind}", "weight", ("weight_scale",), _decode_scaled)


def _decode_pairs(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
    """Return 4-bit integers times scales; a byte holds the codes of two outputs, the first in the
    low half."""
    name = f"{base}.weight"
    need(kinds[name] == "U8", name, f"it is stored as {kinds[name]}")
    need(f"{base}.weight_scale" in kinds, name, "it has no weight_scale")
    raw = read(name)
    need(raw.dim() == 2, name, "it is no matrix")
    shape = (2 * raw.shape[0], raw.shape[1])
    halves = torch.stack((raw & 15, raw >> 4), dim=1).reshape(shape).to(torch.float32)
    code = torch.where(halves >= 8, halves - 16, halves)
    scale, layout = _spread(read, f"{base}.weight_scale", shape, base, kinds)
    return matrix_of(code * scale, "int4", layout, code, scale)


def _decode_modelopt(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
    """Return fp4 codes times a float8 scale per 16 codes times the scale of the tensor."""
    name = f"{base}.weight"
    need(f"{base}.weight_scale_2" in kinds, name, "it has no weight_scale_2")
    whole = read(f"{base}.weight_scale_2").to(torch.float32).reshape(-1)
    need(whole.numel() == 1, name, "it has several scales of the tensor")
    return _nvfp4(read, base, kinds, name, lambda s: s * whole)


def is_sound(found: QuantisedWeight) -> bool:
    """Return whether all numbers of a weight and its scales are finite."""
    return bool(torch.isfinite(found.value).all()) and math.isfinite(found.scale)
