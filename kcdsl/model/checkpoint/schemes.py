"""The storage format that a quantisation configuration names, and the formats GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kcdsl.model.checkpoint.activations import stated_cache, stated_inputs
from kcdsl.model.checkpoint.float8 import fbgemm_scheme, fp8_scheme
from kcdsl.model.checkpoint.quantised import (
    PLAIN,
    QuantisedWeight,
    Reader,
    Scheme,
    allow,
    broken,
    compressed_tensors_scheme,
    matrix_of,
    modelopt_scheme,
    need,
    unknown,
    unpacked,
)

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column (of eight) in each 4-bit field of an AWQ word, lowest bits first."""


def gptq_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the format of GPTQ. Refuse (KC455) unsupported variants."""
    bits = allow(config, "bits", (2, 4, 8), None)
    names = [allow(config, name, ("gptq", "gptq_v2", None), None) for name in _GPTQ_VERSIONS]
    version, *others = [name for name in names if name is not None] or ["gptq"]
    if any(other != version for other in others):
        raise unknown(" and ".join(_GPTQ_VERSIONS), names, ("the same",))
    allow(config, "is_marlin_format", (False, None), None)
    symmetric = allow(config, "sym", (True, False, None), None)
    ordered = allow(config, "desc_act", (True, False, None), None)
    size = _group_size(config)
    for name in ("dynamic", "adapter"):
        if config.get(name):
            raise unknown(name, "set", ("none",))
    offset = 0 if version == "gptq_v2" else 1
    zero = (1 << (int(bits) - 1)) - offset if symmetric else None

    def decode(read: Reader, base: str, kinds: Mapping[str, Any]) -> QuantisedWeight:
        return _decode_gptq(read, base, kinds, bits, offset, zero, ordered=ordered, size=size)

    return Scheme("gptq", "qweight", ("qzeros", "scales", "g_idx"), decode, int(bits))


_GPTQ_VERSIONS = ("checkpoint_format", "format")
"""The fields of the version of GPTQ; transformers writes the second."""


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of inputs of a group; -1 is all of them, None is not stated."""
    size = config.get("group_size")
    if size is not None and (type(size) is not int or (size < 1 and size != -1)):
        raise unknown("group_size", size, ("a positive integer", -1))
    return size


def _width(size: int | None, inputs: int, count: int, name: str) -> int:
    """Return the inputs of a group. Refuse another number of groups than the configuration
    states."""
    width = inputs // max(count, 1) if size is None else inputs if size == -1 else size
    fits = width > 0 and -(-inputs // width) == count and (size is not None or inputs % count == 0)
    need(fits, name, f"its {count} groups of {inputs} inputs are not those of group_size {size}")
    return width


def _decode_gptq(
    read: Reader,
    base: str,
    kinds: Mapping[str, Any],
    bits: int,
    offset: int,
    symmetric: int | None,
    *,
    ordered: bool | None,
    size: int | None,
) -> QuantisedWeight:
    """Return (code - z)·s; words hold inputs of one output, and z is the stored one plus `offset`.

    Refuse zero points other than `symmetric`, if given, and groups out of order unless inputs are
    `ordered` by groups: kernels do not read them then. Refuse missing groups if they are.
    """
    name = f"{base}.weight"
    for part in ("qzeros", "scales"):
        need(f"{base}.{part}" in kinds, name, f"it has no {part}")
    words, scale = read(f"{base}.qweight"), read(f"{base}.scales").to(torch.float32)
    code = unpacked(words.T.contiguous(), bits)
    out, inputs = code.shape
    zero = unpacked(read(f"{base}.qzeros"), bits)
    need(tuple(zero.shape) == tuple(scale.shape), name, "zero points and scales do not fit")
    need(scale.dim() == 2 and scale.shape[1] == out, name, "its scales do not fit")
    need(kinds[f"{base}.scales"] in PLAIN, name, "its scales are no floats")
    if offset and bool((zero == (1 << bits) - 1).any()):
        raise broken(name, "a zero point is one more than its bits hold, which libraries differ in")
    middle = symmetric is None or bool((zero == symmetric).all())
    need(middle, name, "it is symmetric by its configuration, and its zero points are others")
    groups = plain = torch.arange(inputs) // _width(size, inputs, len(scale), name)
    need(f"{base}.g_idx" in kinds or ordered is not True, name, "desc_act is true without g_idx")
    if f"{base}.g_idx" in kinds:
        groups = read(f"{base}.g_idx").long()
        fits = len(groups) == inputs and 0 <= int(groups.min()) <= int(groups.max()) < len(scale)
        need(fits, name, "its g_idx does not fit")
        same = ordered is not False or torch.equal(groups, plain)
        need(same, name, "desc_act is false, and its g_idx has another order")
    held = code.T.to(torch.float32) - (zero[groups] + offset).to(torch.float32)
    spread = scale[groups]
    return matrix_of((held * spread).T, "", "", held, spread)


def awq_scheme(config: Mapping[str, Any]) -> Scheme:
    """Return the format of AWQ. Refuse (KC455) unsupported variants."""
    for name in ("version", "format", "checkpoint_format"):
        allow(config, name, ("gemm", "GEMM", None), None)
    if str(config.get("backend")).lower() == "llm-awq":
        raise unknown("backend", config["backend"], ("autoawq",))
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise unknown("bits", bits, (4,))
    allow(config, "zero_point", (True, None), None)
    decode = partial(_decode_awq, size=_group_size(config))
    return Scheme("awq", "qweight", ("qzeros", "scales"), decode, 4)


def _decode_awq(
    read: Reader, base: str, kinds: Mapping[str, Any], *, size: int | None
) -> QuantisedWeight:
    """Return (code - z)·s; words hold eight outputs of one input, in AWQ order."""
    name = f"{base}.weight"
    for part in ("qzeros", "scales"):
        need(f"{base}.{part}" in kinds, name, f"it has no {part}")
    scale = read(f"{base}.scales").to(torch.float32)
    code, zero = (_ordered(unpacked(read(f"{base}.{part}"), 4)) for part in ("qweight", "qzeros"))
    inputs, out = code.shape
    fits = tuple(zero.shape) == tuple(scale.shape) and scale.shape[1] == out
    need(fits and kinds[f"{base}.scales"] in PLAIN, name, "its scales do not fit")
    width = _width(size, inputs, len(scale), name)
    need(inputs % width == 0, name, "its groups do not fit its inputs")
    held = code.to(torch.float32) - zero.to(torch.float32).repeat_interleave(width, dim=0)
    spread = scale.repeat_interleave(width, dim=0)
    return matrix_of((held * spread).T, "", "", held, spread)


def _ordered(parts: Tensor) -> Tensor:
    """Return columns in AWQ order in their natural order."""
    place = torch.tensor([_AWQ_ORDER.index(column) for column in range(8)])
    rows, columns = parts.shape
    return parts.reshape(rows, columns // 8, 8)[:, :, place].reshape(rows, columns)


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": compressed_tensors_scheme,
    "gptq": gptq_scheme,
    "awq": awq_scheme,
    "modelopt": modelopt_scheme,
    "fp8": fp8_scheme,
    "fbgemm_fp8": fbgemm_scheme,
}


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """Return the storage format that a quantisation configuration names.

    Refuse (KC455) unsupported methods and variants, by name.
    """
    method = str(config.get("quant_method", "")).lower()
    if method not in ("compressed-tensors", "gptq", "awq") and "quant_algo" in config:
        method = "modelopt"
    if method not in _METHODS:
        raise unknown("quant_method", config.get("quant_method"), (*_METHODS, "torchao"))
    scheme = _METHODS[method](config)
    inputs, cache = stated_inputs(method, config), stated_cache(method, config)
    return replace(scheme, inputs={"*": inputs}, cache=cache)
