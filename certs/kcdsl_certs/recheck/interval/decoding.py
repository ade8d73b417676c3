"""Formats of quantised weights (docs/reference/quantised-checkpoints.md).

A function for each method of a quantisation configuration returns the matrix whose name, less
".weight", it is given. Each raises Rejected "served/method" or "served/config"; ValueError,
LookupError, TypeError, AttributeError or ArithmeticError for what does not fit its format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.tensors import Singles, Tensor, integers, numbers

_BYTES = {"float": "F8_E4M3", "int": "I8"}
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A matrix as float32; code format, scale layout ("" for none), least code, largest scale."""

    value: Singles
    kind: str = ""
    scale: str = ""
    least: float = 0.0
    largest_scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a checkpoint, its quantisation configuration, and the texts of its files."""

    tensors: Mapping[str, Tensor]
    method: Mapping[str, Any]
    metadata: Sequence[Mapping[str, str]]

    def part(self, base: str, name: str) -> Tensor:
        """Return a tensor of a matrix."""
        found = self.tensors.get(f"{base}.{name}")
        if found is None:
            raise ValueError(f"there is no {name}")
        return found

    def has(self, base: str, name: str) -> bool:
        """Return whether a matrix has a tensor."""
        return f"{base}.{name}" in self.tensors


def largest_amax(method: Mapping[str, Any]) -> float | None:
    """Return the limit of the amax of dynamic scales of inputs, if a format states one.

    Raises Rejected "served/method" if it is not a positive number.
    """
    if method_name(method) != "fbgemm_fp8":
        return None
    bound = method.get("activation_scale_ub", 1200.0)
    number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if not number or not 0 < bound < float("inf"):
        raise Rejected("served/method", f"activation_scale_ub {str(bound)[:40]!r}")
    return float(np.float32(bound))


def parsed(data: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises Rejected "served/config"."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise Rejected("served/config", f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Rejected("served/config", "no object")
    return found


def method_name(method: Mapping[str, Any]) -> str:
    """Return the method of a quantisation configuration; ModelOpt may name its algorithm alone."""
    name = str(method.get("quant_method", "")).lower()
    others = ("compressed-tensors", "gptq", "awq")
    return "modelopt" if "quant_algo" in method and name not in others else name


def modelopt(served: Parts, base: str) -> Decoded:
    """Return a matrix that ModelOpt stores: bytes, four bits with nested scales, or AWQ codes."""
    method = served.method
    kind = method.get("quant_algo")
    if served.has(base, "pre_quant_scale"):
        raise Rejected("served/method", f"inputs of {base[:60]!r} are multiplied before it")
    if kind == "NVFP4":
        return _four(served, base, "weight", "weight_scale_2", False)
    if method.get("has_zero_point") not in (False, None):
        raise Rejected("served/method", f"zero points of {str(kind)[:40]!r}")
    if kind in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W8A16"):
        said = {"strategy": "tensor" if kind == "FP8" else "channel"}
        return _bytes(served, base, [{**said, "type": "int" if kind == "W8A16" else "float"}])
    if kind != "W4A16_AWQ":
        raise Rejected("served/method", f"the algorithm {str(kind)[:40]!r} is not known")
    stored = served.part(base, "weight")
    if stored.dtype != "U8" or len(stored.shape) != 2:
        raise ValueError("four bits are stored in bytes of a matrix")
    data = np.frombuffer(stored.data, dtype=np.uint8).reshape(stored.shape).astype(np.int64)
    codes = np.empty((2 * data.shape[0], data.shape[1]), dtype=np.int64)
    codes[0::2], codes[1::2] = data % 16, data // 16
    codes[codes > 7] -= 16
    width = method.get("group_size")
    if width is None:  # any that divides the inputs
        width = codes.shape[1] // max(served.part(base, "weight_scale").shape[-1], 1)
    return _product(codes, served, base, "int4", [{"strategy": "group", "group_size": width}], None)


def compressed_tensors(served: Parts, base: str) -> Decoded:
    """Return a matrix that compressed-tensors stores: bytes, packed integers, or four bits."""
    method = served.method
    form = method.get("format")
    others = [name for name in ("transform_config", "sparsity_config") if method.get(name)]
    others += [name for name, group in method["config_groups"].items() if _apart(group, form)]
    if others or method.get("quantization_status") not in ("compressed", "frozen", None):
        raise Rejected("served/method", f"compressed-tensors with {str(others)[:60]}")
    said = [group["weights"] for group in method["config_groups"].values()]
    if form in ("float-quantized", "int-quantized", "naive-quantized"):
        return _bytes(served, base, said)
    if form == "nvfp4-pack-quantized":
        return _four(served, base, "weight_packed", "weight_global_scale", True)
    if form != "pack-quantized":
        raise Rejected("served/method", f"the format {str(form)[:40]!r} is not known")
    bits = {one["num_bits"] for one in said}
    if len(bits) != 1 or not bits <= {2, 4, 8}:
        raise Rejected("served/method", f"weights of {sorted(map(str, bits))} bits")
    (width,) = bits
    rows, columns = (int(n) for n in integers(served.part(base, "weight_shape"), "I64").tolist())
    words = integers(served.part(base, "weight_packed"), "I32")
    if words.shape != (rows, -(-columns * width // 32)):
        raise ValueError("the words do not fit the shape")
    middle = 2 ** (width - 1)
    codes = _fields(words, width)[:, :columns] - middle
    zeros = None
    if served.has(base, "weight_zero_point"):
        stored = served.part(base, "weight_zero_point")
        if stored.dtype == "I8":  # one of the whole tensor, as it is
            zeros = integers(stored, "I8").astype(np.int64)
        else:
            packed = np.ascontiguousarray(integers(stored, "I32").T)
            zeros = _fields(packed, width).T[:rows] - middle
    kind = {4: "int4", 8: "int8"}.get(width, "")
    return _product(codes, served, base, kind, said, zeros)


def _apart(group: Mapping[str, Any], form: object) -> bool:
    """Return whether a group of linears is stored in another format, or quantises its outputs."""
    return group.get("format") not in (form, None) or group.get("output_activations") is not None


def _bytes(served: Parts, base: str, said: Sequence[Mapping[str, Any]]) -> Decoded:
    """Return bytes times scales. Bytes of another type than the configuration states raise
    ValueError: loaders that copy them into the stated type convert them."""
    tensor, zeros = served.part(base, "weight"), None
    if tensor.dtype not in {_BYTES[one["type"]] for one in said}:
        raise ValueError(f"the configuration does not state bytes of {tensor.dtype}")
    kind = "int8" if tensor.dtype == "I8" else "fp8_e4m3"
    if served.has(base, "weight_zero_point"):
        zeros = numbers(served.part(base, "weight_zero_point"))
    return _product(numbers(tensor), served, base, kind, said, zeros)


def fp8(served: Parts, base: str) -> Decoded:
    """Return bytes times the scales of blocks of 128 by 128 (the last may be smaller), or times one
    scale if the configuration states no blocks."""
    method = served.method
    stated = method.get("weight_block_size"), method.get("fmt"), method.get("activation_scheme")
    if stated[0] not in ([128, 128], None) or stated[1] not in ("e4m3", None):
        raise Rejected("served/method", f"fp8 in blocks of {str(stated[0])[:40]}")
    if stated[2] not in ("dynamic", None, *(["static"] if stated[0] is None else [])):
        raise Rejected("served/method", f"fp8 with inputs scaled {str(stated[2])[:40]!r}")
    if stated[0] is None:
        return _whole(served, base)
    codes, scales = _scaled(served, base, "weight_scale_inv")
    value = np.empty_like(codes)
    tall, wide = (-(-n // 128) for n in codes.shape)
    if scales.shape != (tall, wide):
        raise ValueError("the scales do not fit")
    with np.errstate(all="ignore"):
        for row in range(tall):
            for column in range(wide):
                square = np.s_[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
                value[square] = codes[square] * scales[row, column]
    return Decoded(value, "fp8_e4m3", "block_128", float(codes.min()), float(np.abs(scales).max()))


def _whole(served: Parts, base: str) -> Decoded:
    """Return bytes times one scale."""
    given = [name for name in ("weight_scale_inv", "weight_scale") if served.has(base, name)]
    if len(given) != 1:
        raise ValueError(f"there are {len(given)} scales of the tensor")
    codes, scales = _scaled(served, base, given[0])
    if scales.size != 1:
        raise ValueError("there is more than one scale")
    with np.errstate(all="ignore"):
        value = codes * scales.ravel()[0]
    return Decoded(value, "fp8_e4m3", "per_tensor", float(codes.min()), float(np.abs(scales).max()))


def fbgemm_fp8(served: Parts, base: str) -> Decoded:
    """Return bytes times the scales of outputs."""
    codes, scales = _scaled(served, base, "weight_scale")
    if scales.shape not in ((len(codes),), (len(codes), 1)):
        raise ValueError("the scales are not those of outputs")
    limit = largest_amax(served.method)
    if served.has(base, "input_scale_ub"):
        bound = numbers(served.part(base, "input_scale_ub")).ravel().tolist()
        if bound != [limit]:
            raise ValueError("its input_scale_ub is not that of the configuration")
    with np.errstate(all="ignore"):
        value = codes * scales.reshape(-1, 1)
    largest = float(np.abs(scales).max())
    return Decoded(value, "fp8_e4m3", "per_channel", float(codes.min()), largest)


def _scaled(served: Parts, base: str, name: str) -> tuple[Singles, Singles]:
    """Return the numbers that bytes encode [outputs, inputs], and the stored scales."""
    tensor, scales = served.part(base, "weight"), served.part(base, name)
    if tensor.dtype != "F8_E4M3" or scales.dtype not in ("F32", "F16", "BF16"):
        raise ValueError(f"bytes are {tensor.dtype}, scales {scales.dtype}")
    if len(tensor.shape) != 2:
        raise ValueError("the bytes are no matrix")
    return numbers(tensor), numbers(scales)


def _product(
    codes: NDArray[Any],
    served: Parts,
    base: str,
    kind: str,
    said: Sequence[Mapping[str, Any]],
    zeros: NDArray[Any] | None,
) -> Decoded:
    """Return codes less zero points, times scales.

    `said` is what the configuration says of weights: scales, zero points and groups of inputs that
    are none of those raise ValueError.
    """
    held = codes.astype(np.float32)
    if served.part(base, "weight_scale").dtype not in ("F32", "F16", "BF16"):
        raise ValueError("the scales are no floats")
    scales = numbers(served.part(base, "weight_scale"))
    order = _order(served, base, held.shape[1], said)
    even = {one.get("symmetric", True) for one in said}
    if not even <= {True, False} or (zeros is None and even == {False}):
        raise ValueError("the codes are not symmetric, and there are no zero points")
    if zeros is not None and zeros.any():
        if even == {True}:
            raise ValueError("the codes are symmetric, and there are zero points")
        held, kind = held - _tiles(zeros.astype(np.float32), held.shape, order, said)[0], ""
    spread, layout = _tiles(scales, held.shape, order, said)
    with np.errstate(all="ignore"):
        value = np.asarray(held * spread, dtype=np.float32)
    return Decoded(value, kind, layout, float(held.min()), float(np.abs(scales).max()))


def _four(served: Parts, base: str, name: str, outer: str, divided: bool) -> Decoded:
    """Return the numbers of four bits times nested scales."""
    data = np.frombuffer(served.part(base, name).data, dtype=np.uint8)
    shape = served.part(base, name).shape
    if served.part(base, name).dtype != "U8" or len(shape) != 2:
        raise ValueError("four bits are stored in bytes of a matrix")
    codes = np.empty((*shape, 2), dtype=np.float32)
    for place, half in enumerate((data & 0x0F, data >> 4)):
        signs = np.where(half & 8, np.float32(-1), np.float32(1))
        codes[..., place] = (signs * _MAGNITUDES[half & 7]).reshape(shape)
    held = codes.reshape(shape[0], 2 * shape[1])
    inner = served.part(base, "weight_scale")
    multiples, whole = numbers(inner), numbers(served.part(base, outer)).ravel()
    fits = inner.dtype == "F8_E4M3" and multiples.shape == (len(held), held.shape[1] // 16)
    if not fits or whole.size != 1 or held.shape[1] % 16:
        raise ValueError("the scales do not fit")
    with np.errstate(all="ignore"):
        scales = multiples / whole if divided else multiples * whole
        value = np.asarray(held * np.repeat(scales, 16, axis=1), dtype=np.float32)
    return Decoded(value, "fp4_e2m1", "nvfp4", float(held.min()), float(np.abs(scales).max()))


def gptq(served: Parts, base: str) -> Decoded:
    """Return a matrix in groups of inputs, which are stored in the words of an output."""
    method = served.method
    bits = method.get("bits")
    forms = {method.get(name) for name in ("checkpoint_format", "format")} - {None}
    form = next(iter(forms), None)
    if bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2", None) or len(forms) > 1:
        raise Rejected("served/method", f"GPTQ of {bits!r} bits, {str(forms)[:40]!r}")
    if method.get("dynamic") or method.get("is_marlin_format") or method.get("adapter"):
        raise Rejected("served/method", "GPTQ with bits of some matrices, adapters, or for Marlin")
    one = 0 if form == "gptq_v2" else 1
    scales = numbers(served.part(base, "scales"))
    words = integers(served.part(base, "qweight"), "I32")
    codes = _fields(np.ascontiguousarray(words.T), bits).T
    zeros = _fields(integers(served.part(base, "qzeros"), "I32"), bits)
    if zeros.shape != scales.shape or codes.shape[1] != scales.shape[1]:
        raise ValueError("the scales do not fit")
    if one and (zeros == 2**bits - 1).any():
        raise ValueError("a zero point is more than its bits hold")
    if method.get("sym") and (zeros + one != 2 ** (bits - 1)).any():
        raise ValueError("symmetric codes have zero points, which kernels of them do not read")
    groups = plain = _groups(served, base, method, len(codes))
    if served.has(base, "g_idx"):
        groups = integers(served.part(base, "g_idx"), "I32").astype(np.int64)
        if method.get("desc_act") is False and not np.array_equal(groups, plain):
            raise ValueError("kernels do not read the order of its groups: desc_act is false")
    elif method.get("desc_act"):
        raise ValueError("inputs are ordered by groups, and there is no g_idx")
    if groups.shape != (len(codes),) or groups.min() < 0:
        raise ValueError("the groups do not fit")
    less = codes - (zeros + one)[groups]
    return Decoded(np.ascontiguousarray((less.astype(np.float32) * scales[groups]).T))


def _groups(served: Parts, base: str, method: Mapping[str, Any], inputs: int) -> NDArray[np.int64]:
    """Return the group of every input, in order; the groups are as large as the configuration says,
    and all of one size if it does not. Raises ValueError for another number of groups."""
    stored, size = served.part(base, "scales"), method.get("group_size")
    if stored.dtype not in ("F32", "F16", "BF16"):
        raise ValueError("the scales are no floats")
    count = stored.shape[0]
    if size is None:
        size = inputs // count
        if size * count != inputs:
            raise ValueError("the groups do not fit")
    elif type(size) is not int or (size < 1 and size != -1):
        raise Rejected("served/method", f"groups of {str(size)[:40]}")
    found = np.zeros(inputs, dtype=np.int64) if size == -1 else np.arange(inputs) // size
    if found[-1] != count - 1:
        raise ValueError(f"there are {count} groups, and their size is {size}")
    return found


def awq(served: Parts, base: str) -> Decoded:
    """Return a matrix whose outputs are interleaved in words."""
    method = served.method
    bits = method.get("bits", method.get("w_bit"))
    version = [method.get(name) for name in ("version", "format", "checkpoint_format")]
    known = bits == 4 and all(one in ("gemm", "GEMM", None) for one in version)
    known = known and str(method.get("backend")).lower() != "llm-awq"
    if not known or method.get("zero_point") not in (True, None):
        raise Rejected("served/method", f"AWQ of {bits!r} bits, {str(version)[:40]!r}")
    scales = numbers(served.part(base, "scales"))
    codes, zeros = (
        _interleaved(_fields(integers(served.part(base, name), "I32"), 4))
        for name in ("qweight", "qzeros")
    )
    if zeros.shape != scales.shape or codes.shape[1] != scales.shape[1]:
        raise ValueError("the scales do not fit")
    groups, size = _groups(served, base, method, len(codes)), method.get("group_size")
    if size not in (None, -1) and len(codes) % size:
        raise ValueError("the groups do not fit")
    less = codes - zeros[groups]
    value = less.astype(np.float32) * scales[groups]
    return Decoded(np.ascontiguousarray(value.T))


def _interleaved(fields: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return columns in order: the k-th four bits hold column 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
    found = np.empty_like(fields)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        found[:, column::8] = fields[:, place::8]
    return found


def _order(
    served: Parts, base: str, columns: int, said: Sequence[Mapping[str, Any]]
) -> NDArray[np.int64] | None:
    """Return the group of every input, None if they are in order."""
    grouped = {str(one.get("actorder")).lower() in ("group", "dynamic", "true") for one in said}
    found = np.array([-1])
    if served.has(base, "weight_g_idx"):
        found = integers(served.part(base, "weight_g_idx"), "I32").astype(np.int64)
    if (found < 0).any():
        if grouped == {True}:
            raise ValueError("inputs are ordered by groups, and there is no index of groups")
        return None
    if found.shape != (columns,):
        raise ValueError("the groups do not fit")
    if grouped != {False}:
        return found
    width = max(columns // (int(found.max()) + 1), 1)
    if not np.array_equal(found, np.arange(columns) // width):
        raise ValueError("kernels do not read the order of its groups: there is no actorder")
    return None


def _tiles(
    scales: Singles,
    shape: tuple[int, ...],
    order: NDArray[np.int64] | None,
    said: Sequence[Mapping[str, Any]],
) -> tuple[Singles, str]:
    """Return the scale of every element of a matrix, and the name of the scale layout."""
    rows, columns = shape
    grid = scales.reshape(1, 1) if scales.size == 1 else scales
    grid = grid.reshape(-1, 1) if grid.ndim == 1 else grid
    for tall, wide in (_tile(one, rows, columns) for one in said):
        cut = tall == 1 and columns % wide
        if cut or grid.shape != (-(-rows // tall), -(-columns // wide)):
            continue
        if order is not None and tall == 1 and wide < columns:
            if order.max() >= grid.shape[1]:
                raise ValueError("the groups do not fit")
            return grid[:, order], ""
        spread = grid[np.arange(rows) // tall][:, np.arange(columns) // wide]
        if grid.size == 1:
            return spread, "per_tensor"
        if tall > 1:
            return spread, "block_128"
        return spread, "per_channel" if wide == columns else f"group_{wide}"
    raise ValueError("the scales are not those that the configuration states")


def _tile(said: Mapping[str, Any], rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    size, kind = said.get("group_size"), said.get("strategy")
    if kind is None:
        kind = {None: "tensor", -1: "channel"}.get(size, "group")
    if kind == "group" and (type(size) is not int or size < 1):
        raise Rejected("served/method", f"groups of {str(size)[:40]}")
    if kind == "block" and said.get("block_structure") not in ([128, 128], "128x128"):
        raise Rejected("served/method", f"blocks of {str(said.get('block_structure'))[:40]}")
    tiles: dict[str, tuple[int, Any]] = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, size),
        "block": (128, 128),
    }
    if kind not in tiles:
        raise Rejected("served/method", f"scales of {str(kind)[:40]!r}")
    return tiles[kind]


def _fields(words: NDArray[Any], bits: int) -> NDArray[np.int64]:
    """Return the fields of 32-bit words along the last axis, the lowest bits first."""
    plain = np.ascontiguousarray(words).view(np.uint32).astype(np.int64)
    found = np.empty((*plain.shape, 32 // bits), dtype=np.int64)
    for place in range(32 // bits):
        found[..., place] = (plain >> (bits * place)) % 2**bits
    return found.reshape(*plain.shape[:-1], -1)
