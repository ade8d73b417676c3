"""Quantised weights in the storage formats of serving engines, dequantised to float32.

Sources of the rules: the documentation of compressed-tensors, GPTQ, AWQ and ModelOpt; each is
described in docs/reference/quantised-checkpoints.md. Arithmetic is float32, round to nearest even.
A nested scale is multiplied with its outer scale first. Undefined variants are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.checkpoint import inputs
from kcdsl.model.checkpoint.activations import StatedCodes
from kcdsl.model.checkpoint.headers import StoredTensor

PLAIN = frozenset({"F32", "F16", "BF16"})
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
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
    listed = []
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
        listed.append(weights)
    if kind == _NVFP4:
        nested = ("weight_scale", "weight_global_scale")
        return Scheme(f"compressed-tensors {kind}", "weight_packed", nested, _decode_nvfp4, 4)
    stated = _stated(listed)
    if kind == "pack-quantized":
        if len({one["num_bits"] for one in listed}) > 1:
            raise unknown("num_bits of groups", "different", ("the same",))
        packed = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        width = int(listed[0]["num_bits"])
        decode = _with(partial(_decode_packed, bits=width), stated)
        return Scheme(f"compressed-tensors {kind}", "weight_packed", packed, decode, width)
    parts = ("weight_scale", "weight_zero_point", "weight_g_idx")
    decode = _with(_decode_scaled, stated)
    return Scheme(f"compressed-tensors {kind}", "weight", parts, decode)


@dataclass(frozen=True, slots=True)
class _Stated:
    """The scales of matrices as a configuration states them.

    `grids` are the places of scales: "tensor", "channel", "group" with its width (0: any), or
    "block". `symmetric`: no matrix has zero points, or (False) each has. `by_index`: each matrix
    has an index of groups, or (False) none has. None: either. `types` are those of the codes,
    "int" or "float".
    """

    grids: tuple[tuple[str, int], ...]
    symmetric: bool | None = True
    by_index: bool | None = False
    types: tuple[str, ...] = ("int",)


def _stated(groups: Sequence[Mapping[str, Any]]) -> _Stated:
    """Return what groups of linears state of scales. Refuse (KC455) blocks of other sizes."""
    grids: list[tuple[str, int]] = []
    for one in groups:
        strategy, size = one.get("strategy"), one.get("group_size")
        whole = type(size) is int and (size > 0 or size == -1)
        if size is not None and not whole:
            raise unknown("group_size", size, ("a positive integer", -1, None))
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        if strategy == "block":
            allow(one, "block_structure", ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"), None)
        if strategy == "group" and size in (None, -1):
            raise unknown("group_size", size, ("a positive integer",))
        grids.append((str(strategy), int(size or 0) if strategy == "group" else 0))
    orders = [str(one.get("actorder")).lower() in ("true", "group", "dynamic") for one in groups]
    even = [allow(one, "symmetric", (True, False), True) for one in groups]
    types = tuple(str(one.get("type")) for one in groups)
    return _Stated(tuple(dict.fromkeys(grids)), _all_alike(even), _all_alike(orders), types)


def _all_alike(values: Sequence[bool]) -> bool | None:
    return values[0] if len(set(values)) == 1 else None


def _with(
    decode: Callable[..., QuantisedWeight], stated: _Stated
) -> Callable[[Reader, str, Mapping[str, Any]], QuantisedWeight]:
    return partial(decode, stated=stated)


def _decode_scaled(
    read: Reader, base: str, kinds: Mapping[str, Any], *, stated: _Stated
) -> QuantisedWeight:
    """Return float8 or int8 codes times scales per tensor, channel, group or block. Refuse codes of
    another type than the configuration states: loaders that copy them there convert them."""
    name = f"{base}.weight"
    codes = {"float": ("F8_E4M3", "fp8_e4m3"), "int": ("I8", "int8")}
    form = dict(codes[one] for one in stated.types).get(kinds[name])
    need(form is not None, name, f"it is stored as {kinds[name]}, its type is {stated.types[0]}")
    code = read(name).to(torch.float32)
    need(code.dim() == 2, name, "it is no matrix")
    zero = None
    if f"{base}.weight_zero_point" in kinds:
        zero = read(f"{base}.weight_zero_point").to(torch.float32)
    return _scaled(read, base, kinds, stated, code, zero, str(form))


def _decode_packed(
    read: Reader, base: str, kinds: Mapping[str, Any], *, bits: int, stated: _Stated
) -> QuantisedWeight:
    """Return integers packed along rows, minus half their range, times scales."""
    name = f"{base}.weight"
    need(f"{base}.weight_shape" in kinds, name, "it has no weight_shape")
    shape = tuple(int(n) for n in read(f"{base}.weight_shape").tolist())
    packed, half = read(f"{base}.weight_packed"), 1 << (bits - 1)
    words = -(-shape[1] * bits // 32) if len(shape) == 2 else -1
    need(tuple(packed.shape) == (shape[0], words), name, "its shape does not fit its words")
    code = unpacked(packed, bits)[:, : shape[1]].to(torch.float32) - half
    zero = None
    stored = kinds.get(f"{base}.weight_zero_point")
    if stored == "I8":  # that of the tensor, which is not packed
        zero = read(f"{base}.weight_zero_point").to(torch.float32)
    elif stored is not None:
        need(stored == "I32", name, f"its zero points are stored as {stored}")
        points = unpacked(read(f"{base}.weight_zero_point").T.contiguous(), bits).T
        zero = points[: shape[0]].to(torch.float32) - half
    form = {4: "int4", 8: "int8"}.get(bits, "")
    return _scaled(read, base, kinds, stated, code, zero, form)


def _scaled(
    read: Reader,
    base: str,
    kinds: Mapping[str, Any],
    stated: _Stated,
    code: Tensor,
    zero: Tensor | None,
    form: str,
) -> QuantisedWeight:
    """Return (code - zero)·s. Refuse scales, zero points and groups of inputs that are not those
    that the configuration states: kernels do not read them."""
    name, place = f"{base}.weight", f"{base}.weight_scale"
    need(place in kinds, name, "it has no weight_scale")
    need(kinds[place] in PLAIN, name, f"its scales are stored as {kinds[place]}")
    groups = _group_index(read, base, kinds, stated, code.shape[1])
    shape = (code.shape[0], code.shape[1])
    scale, layout = _tiled(read(place).to(torch.float32), shape, place, groups, stated.grids)
    need(zero is not None or stated.symmetric is not False, name, "it has no zero points")
    if zero is not None and bool((zero != 0).any()):
        need(stated.symmetric is not True, name, "it is symmetric, and it has zero points")
        code, form = code - _tiled(zero, shape, name, groups, stated.grids)[0], ""
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


def _group_index(
    read: Reader, base: str, kinds: Mapping[str, Any], stated: _Stated, columns: int
) -> Tensor | None:
    """Return the stored group index of each input; None where groups are in order: the index is
    missing, unused (negative) or that order."""
    name = f"{base}.weight_g_idx"
    found = read(name).long() if name in kinds else None
    if found is None or bool((found < 0).any()):
        said = "it has no weight_g_idx, by which its configuration says that inputs are grouped"
        need(stated.by_index is not True, f"{base}.weight", said)
        return None
    need(tuple(found.shape) == (columns,), name, "its groups do not fit its inputs")
    if stated.by_index is not False:
        return found
    count = int(found.max()) + 1
    plain = torch.arange(columns) // max(columns // count, 1)
    need(torch.equal(found, plain), name, "its configuration has no order of inputs by groups")
    return None


def _tiled(
    scale: Tensor,
    shape: tuple[int, int],
    name: str,
    groups: Tensor | None,
    grids: Sequence[tuple[str, int]],
) -> tuple[Tensor, str]:
    """Return the scale of every element of a matrix, and the layout of the scales, which is one of
    `grids`."""
    rows, columns = shape
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.dim() == 1:
        scale = scale.unsqueeze(1)
    high, wide = scale.shape
    for kind, size in grids:
        width = size or columns // max(wide, 1)
        if kind == "tensor" and (high, wide) == (1, 1):
            return scale.expand(rows, columns), "per_tensor"
        if kind == "channel" and (high, wide) == (rows, 1):
            return scale.expand(rows, columns), "per_tensor" if rows == 1 else "per_channel"
        if kind == "group" and high == rows and wide * width == columns:
            if groups is not None:
                need(int(groups.max()) < wide, name, "its groups do not fit its scales")
                return scale[:, groups], ""
            layout = f"group_{width}" if wide > 1 else "per_channel" if rows > 1 else "per_tensor"
            return scale.repeat_interleave(width, dim=1), layout
        if kind == "block" and (high, wide) == (-(-rows // BLOCK), -(-columns // BLOCK)):
            layout = "per_tensor" if high == wide == 1 else "block_128"
            return of_blocks(scale, shape, name), layout
    said = " or ".join(f"{kind} {size or ''}".strip() for kind, size in grids)
    raise broken(name, f"scales of shape {tuple(scale.shape)} for {shape} are not those of {said}")


BLOCK = 128


def of_blocks(scale: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Return the scale of every element of a matrix, from the scales of its blocks."""
    rows, columns = shape
    fits = tuple(scale.shape) == (-(-rows // BLOCK), -(-columns // BLOCK))
    said = f"scales of shape {tuple(scale.shape)} do not fit a matrix of {shape}"
    need(fits, name, said)
    tall = scale.repeat_interleave(BLOCK, dim=0)[:rows]
    return tall.repeat_interleave(BLOCK, dim=1)[:, :columns]


def unpacked(words: Tensor, bits: int) -> Tensor:
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
    decode: Callable[..., QuantisedWeight] = _decode_scaled
    if kind == "W4A16_AWQ":
        size = config.get("group_size", 0)
        if type(size) is not int or size < 0:
            raise unknown("group_size", size, ("a positive integer",))
        decode, grid = _decode_pairs, ("group", size)
    else:
        grid = ("tensor" if kind == "FP8" else "channel", 0)
    bits = 4 if kind == "W4A16_AWQ" else 8
    types = ("float",) if kind.startswith("FP8") else ("int",)
    decode = _with(decode, _Stated((grid,), types=types))
    return Scheme(f"modelopt {kind}", "weight", ("weight_scale",), decode, bits)


def _decode_pairs(
    read: Reader, base: str, kinds: Mapping[str, Any], *, stated: _Stated
) -> QuantisedWeight:
    """Return 4-bit integers times scales; a byte holds the codes of two outputs, the first in the
    low half."""
    name = f"{base}.weight"
    need(kinds[name] == "U8", name, f"it is stored as {kinds[name]}")
    raw = read(name)
    need(raw.dim() == 2, name, "it is no matrix")
    shape = (2 * raw.shape[0], raw.shape[1])
    halves = torch.stack((raw & 15, raw >> 4), dim=1).reshape(shape).to(torch.float32)
    code = torch.where(halves >= 8, halves - 16, halves)
    return _scaled(read, base, kinds, stated, code, None, "int4")


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
