"""Quantised weights of torchao (docs/reference/quantised-checkpoints.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.decoding import Decoded, Parts, parsed
from kcdsl_certs.recheck.interval.tensors import Singles, integers, numbers
from kcdsl_certs.recheck.numerics.formats import FORMATS, Floats, Format, nearest


def told_by_torchao(metadata: Sequence[Mapping[str, str]], base: str) -> dict[str, Any]:
    """Return the metadata of a weight. Raises ValueError unless there is exactly one distinct text,
    Rejected "served/config" for malformed JSON."""
    texts = {one[f"{base}.weight"] for one in metadata if f"{base}.weight" in one}
    if len(texts) != 1:
        raise ValueError(f"{len(texts)} texts of metadata say what it is")
    return parsed(texts.pop().encode())


def torchao(served: Parts, base: str) -> Decoded:
    """Return a weight of the class that the metadata of its file names.

    It raises what the functions of the other methods raise (decoding.py).
    """
    told = told_by_torchao(served.metadata, base)
    tensor, kind = served.part(base, "_weight_qdata"), str(told.get("_type"))[:60]
    of_inputs = told["_data"].get("act_quant_kwargs") or {}
    limits = ("hp_value_lb", "hp_value_ub", "reduce_range")
    given = [of_inputs.get("_data", {}).get(name) for name in limits]
    if any(one is not None and one is not False for one in given):
        raise Rejected("served/method", f"torchao {kind!r} with limits of its inputs")
    if kind == "Int4Tensor":
        return _added(served, base, told)
    names = {
        ("Float8Tensor", "F8_E4M3"): "fp8_e4m3",
        ("Float8Tensor", "F8_E5M2"): "fp8_e5m2",
        ("Int8Tensor", "I8"): "int8",
        ("IntxUnpackedToInt8Tensor", "I8"): "",
    }
    if (kind, tensor.dtype) not in names:
        raise Rejected("served/method", f"torchao {kind!r} of {tensor.dtype}")
    listed, fields = told["_tensor_data_names"], told["_data"]
    inputs = ("act_quant_scale", "act_quant_zero_point")
    odd = [one for one in listed if one not in ("qdata", "scale", "zero_point", *inputs)]
    if odd or served.has(base, "_weight_act_pre_scale"):
        raise Rejected("served/method", f"torchao with {str(odd)[:60]} beside the codes")
    has_zero = served.has(base, "_weight_zero_point")
    if "qdata" not in listed or "scale" not in listed or has_zero != ("zero_point" in listed):
        raise ValueError("the parts are not those of the metadata")
    codes, form = numbers(tensor), names[kind, tensor.dtype]
    rows, columns = codes.shape
    if kind == "IntxUnpackedToInt8Tensor":
        form = fields["target_dtype"]["_data"]
        limit = {f"int{n}": 2 ** (n - 1) for n in range(1, 9)}[form]
        if codes.min() < -limit or codes.max() >= limit:
            raise ValueError(f"a code is not in {form}")
        form = form if form in ("int4", "int8") else ""
    stated = fields.get("block_size")
    tall, wide = (rows, columns) if stated in (None, []) else stated
    if tall < 1 or wide < 1 or rows % tall or columns % wide:
        raise ValueError("the blocks do not fit the matrix")
    grid = rows // tall, columns // wide
    layout = f"group_{wide}" if tall == 1 else "block_128" if tall == wide == 128 else ""
    if tall == 1 and wide == columns:
        layout = "per_channel"
    if (tall, wide) == (rows, columns):
        layout = "per_tensor"

    def of_blocks(name: str) -> Singles:
        stored = numbers(served.part(base, name))
        if stored.shape != grid and not (stored.size == 1 and grid == (1, 1)):
            raise ValueError(f"{name} does not fit the blocks")
        rows_of = np.repeat(stored.reshape(grid), tall, axis=0)
        return np.repeat(rows_of, wide, axis=1)

    if served.part(base, "_weight_scale").dtype not in ("F32", "F16", "BF16"):
        raise ValueError("the scales are no floats")
    scales = of_blocks("_weight_scale")
    if has_zero:
        if served.part(base, "_weight_zero_point").dtype != "I8":
            raise ValueError("the zero points are not I8")
        zeros = of_blocks("_weight_zero_point")
        form = "" if zeros.any() else form
        codes = codes - zeros
    with np.errstate(all="ignore"):
        value = np.asarray(codes * scales, dtype=np.float32)
    return Decoded(value, form, layout, float(codes.min()), float(np.abs(scales).max()))


def _added(served: Parts, base: str, told: Mapping[str, Any]) -> Decoded:
    """Return q·s + z in groups of inputs, each rounded once to the type of s and z.

    The halves of a byte, the lower first, are two inputs of an output.
    """
    fields, listed = told["_data"], told["_tensor_data_names"]
    if sorted(listed) != ["qdata", "scale", "zero_point"]:
        raise Rejected("served/method", f"torchao with {str(listed)[:80]}")
    of_inputs = fields.get("activation_dtype")
    if of_inputs is not None and of_inputs != {"_type": "torch.dtype", "_data": "bfloat16"}:
        raise Rejected("served/method", f"torchao with inputs as {str(of_inputs)[:60]}")
    others = ("act_pre_scale", "act_quant_scale", "act_quant_zero_point")
    if any(served.has(base, f"_weight_{name}") for name in others):
        raise ValueError("the parts are not those of the metadata")
    halves = integers(served.part(base, "_weight_qdata"), "I8").astype(np.int64)
    if halves.ndim != 2 or not halves.size:
        raise ValueError("the codes are no matrix")
    codes = np.empty((len(halves), 2 * halves.shape[1]), dtype=np.int64)
    codes[:, 0::2], codes[:, 1::2] = halves % 16, halves // 16 % 16
    codes[codes > 7] -= 16
    rows, columns = codes.shape
    block, shape = fields["block_size"], fields.get("shape")
    if block[0] != 1 or len(block) != 2 or shape not in (None, [rows, columns]):
        raise ValueError("the blocks or the shape do not fit the matrix")
    if type(block[1]) is not int or block[1] < 1 or columns % block[1]:
        raise ValueError("the blocks do not fit the matrix")
    kinds = {served.part(base, f"_weight_{name}").dtype for name in ("scale", "zero_point")}
    form = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[min(kinds)]
    if len(kinds) > 1:
        raise ValueError("scales and zero points are of two types")
    factors = []
    for name in ("scale", "zero_point"):
        stored = numbers(served.part(base, f"_weight_{name}"))
        if stored.shape != (columns // block[1], rows):
            raise ValueError(f"{name} does not fit the blocks")
        factors.append(np.repeat(stored.T.astype(np.float64), block[1], axis=1))
    with np.errstate(all="ignore"):
        value = _sum_in(codes * factors[0], factors[1], FORMATS[form])
    if not np.isfinite(value).all():
        raise ValueError("a number is not finite")
    return Decoded(value, "", "", float(codes.min()), float(np.abs(factors[0]).max()))


def _sum_in(a: Floats, b: Floats, form: Format) -> Singles:
    """Return the sums of numbers, rounded once to a format.

    If the double sum is the midpoint of two numbers of the format and the exact sum is not, it is
    rounded toward the exact one.
    """
    found = a + b
    rest = found - a
    lost = (a - (found - rest)) + (b - rest)
    first = nearest(found, form)
    other = 2 * found - first
    between = (other != first) & (nearest(other, form) == other)
    wrong = between & (lost != 0) & ((other > first) == (lost > 0))
    return np.where(wrong, other, first).astype(np.float32)
