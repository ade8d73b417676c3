"""What each aten operation becomes; see `lowering.py`.

A handler gets the state and the arguments by their names in the operator's schema, of which at
least one is a `Ref`, and returns a `Ref` or a list of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kcdsl.model.lowering_state import (
    MASKED,
    Arguments,
    Lowering,
    Ref,
    plain_mask,
    plain_number,
)

Handler = Callable[[Lowering, Arguments], Any]
HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# --- the same value ------------------------------------------------------------------------------


@_handles("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "dropout")
def _same(s: Lowering, a: Arguments) -> Any:
    s.need(not a.get("train", False), "dropout in training mode")
    return a.get("self", a.get("input"))


@_handles("to", "_to_copy", "type_as")
def _cast(s: Lowering, a: Arguments) -> Any:
    other = a.get("other")
    dtype = other.dtype if isinstance(other, Tensor) else a.get("dtype")
    s.need(dtype in (None, torch.float32), f"a cast to {dtype} inside the module")
    return a["self"]


# --- shapes --------------------------------------------------------------------------------------


@_handles(
    "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"
)
def _reshape(s: Lowering, a: Arguments) -> Any:
    return reshaped(s, a["self"], s.out_shape)


@_handles("expand", "expand_as", "broadcast_to")
def _expand(s: Lowering, a: Arguments) -> Any:
    return expanded(s, a["self"], s.out_shape)


@_handles("permute", "transpose", "t", "mT", "numpy_T", "T", "swapaxes", "movedim")
def _permute(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    rank = len(x.shape)
    if "dims" in a:
        dims = [d % rank for d in a["dims"]]
    elif "source" in a or rank < 2:
        raise s.unsupported("use permute or transpose")
    else:
        first, second = a.get("dim0", -2), a.get("dim1", -1)
        dims = list(range(rank))
        dims[first], dims[second] = dims[second], dims[first]
    return permuted(s, x, dims)


@_handles("slice")
def _slice(s: Lowering, a: Arguments) -> Any:
    start = 0 if a["start"] is None else a["start"]
    stop = a["end"]
    return sliced(s, a["self"], a["dim"], start, stop, a["step"])


@_handles("narrow")
def _narrow(s: Lowering, a: Arguments) -> Any:
    return sliced(s, a["self"], a["dim"], a["start"], a["start"] + a["length"], 1)


@_handles("select")
def _select(s: Lowering, a: Arguments) -> Any:
    index = a["index"] % a["self"].shape[a["dim"]]
    return reshaped(s, sliced(s, a["self"], a["dim"], index, index + 1, 1), s.out_shape)


@_handles("split", "split_with_sizes", "chunk", "unsafe_split")
def _split(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    size = x.shape[a["dim"]]
    sizes = a.get("split_sizes", a.get("split_size"))
    if "chunks" in a:
        sizes = -(-size // a["chunks"])
    if isinstance(sizes, int):
        sizes = [min(sizes, size - i) for i in range(0, size, sizes)]
    parts, start = [], 0
    for length in sizes:
        parts.append(sliced(s, x, a["dim"], start, start + length, 1))
        start += length
    return parts


@_handles("cat", "concat", "concatenate")
def _concat(s: Lowering, a: Arguments) -> Any:
    return s.emit("concat", list(a["tensors"]), s.out_shape, dim=a["dim"] % len(s.out_shape))


@_handles("stack")
def _stack(s: Lowering, a: Arguments) -> Any:
    shape = s.out_shape
    dim = a["dim"] % len(shape)
    single = (*shape[:dim], 1, *shape[dim + 1 :])
    return s.emit("concat", [reshaped(s, s.ref(t), single) for t in a["tensors"]], shape, dim=dim)


@_handles("repeat_interleave")
def _repeat_interleave(s: Lowering, a: Arguments) -> Any:
    repeats, dim = a.get("repeats"), a.get("dim")
    s.need(isinstance(repeats, int) and dim is not None, "use repeats: int and dim: int")
    assert isinstance(repeats, int)
    assert isinstance(dim, int)
    return repeated(s, a["self"], repeats, dim)


def reshaped(s: Lowering, x: Ref, shape: tuple[int, ...]) -> Ref:
    """Return x in another shape."""
    return x if x.shape == shape else s.emit("reshape", [x], shape, shape=list(shape))


def expanded(s: Lowering, x: Ref, shape: tuple[int, ...]) -> Ref:
    """Return x broadcast to a shape."""
    return x if x.shape == shape else s.emit("expand", [x], shape, shape=list(shape))


def permuted(s: Lowering, x: Ref, dims: list[int]) -> Ref:
    """Return x with its dimensions in another order."""
    if dims == list(range(len(dims))):
        return x
    return s.emit("permute", [x], tuple(x.shape[d] for d in dims), dims=dims)


def sliced(s: Lowering, x: Ref, dim: int, start: int, stop: int | None, step: int) -> Ref:
    """Return x[…, start:stop:step, …] along one dimension."""
    dim %= len(x.shape)
    start, stop, step = slice(start, stop, step).indices(x.shape[dim])
    length = len(range(start, stop, step))
    if length == x.shape[dim]:
        return x
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return s.emit("slice", [x], shape, dim=dim, start=start, stop=stop, step=step)


def repeated(s: Lowering, x: Ref, times: int, dim: int) -> Ref:
    """Return x with each entry along one dimension repeated in place."""
    dim %= len(x.shape)
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    one = reshaped(s, x, (*before, size, 1, *after))
    many = expanded(s, one, (*before, size, times, *after))
    return reshaped(s, many, (*before, size * times, *after))


# --- elementwise ---------------------------------------------------------------------------------


def _scaled_other(s: Lowering, a: Arguments) -> Any:
    alpha = float(a.get("alpha", 1))
    other = a["other"]
    if alpha == 1.0:
        return other
    return s.emit("scale", [other], s.ref(other).shape, factor=alpha)


@_handles("add")
def _add(s: Lowering, a: Arguments) -> Any:
    x, y = a["self"], _scaled_other(s, a)
    for one, two in ((x, y), (y, x)):
        number = plain_number(two)
        if number is not None and isinstance(one, Ref):
            return s.emit("shift", [one], s.out_shape, offset=number)
        mask = _additive_mask(two)
        if mask is not None and isinstance(one, Ref):
            return s.emit("mask", [one, mask], s.out_shape)
    return s.emit("add", [x, y], s.out_shape)


@_handles("sub")
def _sub(s: Lowering, a: Arguments) -> Any:
    x, y = a["self"], _scaled_other(s, a)
    if (number := plain_number(y)) is not None:
        return s.emit("shift", [x], s.out_shape, offset=-number)
    if (number := plain_number(x)) is not None:
        negative = s.emit("neg", [y], s.ref(y).shape)
        return s.emit("shift", [negative], s.out_shape, offset=number)
    return s.emit("sub", [x, y], s.out_shape)


@_handles("rsub")
def _rsub(s: Lowering, a: Arguments) -> Any:
    return _sub(s, {"self": a["other"], "other": a["self"], "alpha": a.get("alpha", 1)})


@_handles("mul")
def _mul(s: Lowering, a: Arguments) -> Any:
    for one, two in ((a["self"], a["other"]), (a["other"], a["self"])):
        number = plain_number(two)
        if number is not None and isinstance(one, Ref):
            same = number == 1.0 and one.shape == s.out_shape
            return one if same else s.emit("scale", [one], s.out_shape, factor=number)
    return s.emit("mul", [a["self"], a["other"]], s.out_shape)


@_handles("div", "true_divide")
def _div(s: Lowering, a: Arguments) -> Any:
    s.need(a.get("rounding_mode") is None, "a division that rounds")
    x, y = a["self"], a["other"]
    if (number := plain_number(y)) is not None:
        s.need(number != 0.0, "a division by zero")
        return s.emit("divide", [x], s.out_shape, divisor=number)
    if plain_number(x) == 1.0 and isinstance(y, Ref):
        return s.emit("reciprocal", [y], s.out_shape)
    return s.emit("quotient", [x, y], s.out_shape)


@_handles("pow", "square")
def _pow(s: Lowering, a: Arguments) -> Any:
    x, exponent = a["self"], a.get("exponent", 2)
    if exponent == 2 and isinstance(x, Ref):
        return s.emit("mul", [x, x], s.out_shape)
    if exponent == -0.5:
        return s.emit("rsqrt", [x], s.out_shape)
    raise s.unsupported(f"a power other than 2 and -0.5: {exponent}")


@_handles("neg", "relu", "tanh", "silu", "sigmoid", "sqrt", "rsqrt", "reciprocal")
def _unary(s: Lowering, a: Arguments) -> Any:
    return s.emit(s.operator, [a["self"]], s.out_shape)


@_handles("gelu")
def _gelu(s: Lowering, a: Arguments) -> Any:
    s.need(a["approximate"] == "none", "only the erf form of GELU is supported, not the tanh form")
    return s.emit("gelu", [a["self"]], s.out_shape)


def _over_last(s: Lowering, a: Arguments) -> Ref:
    x: Ref = a["self"]
    dims = a.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    last = dims is not None and [d % len(x.shape) for d in dims] == [len(x.shape) - 1]
    s.need(last, "only over the last dimension")
    return x


@_handles("mean")
def _mean(s: Lowering, a: Arguments) -> Any:
    x = _over_last(s, a)
    mean = s.emit("mean", [x], (*x.shape[:-1], 1))
    return reshaped(s, mean, s.out_shape)


@_handles("var")
def _var(s: Lowering, a: Arguments) -> Any:
    x = _over_last(s, a)
    biased = a.get("correction") == 0 or a.get("unbiased") is False
    s.need(biased, "only the biased variance (correction=0)")
    return reshaped(s, s.emit("variance", [x], (*x.shape[:-1], 1)), s.out_shape)


# --- products ------------------------------------------------------------------------------------


@_handles("linear")
def _linear(s: Lowering, a: Arguments) -> Any:
    bias = [a["bias"]] if a.get("bias") is not None else []
    return linear(s, a["input"], a["weight"], bias)


def linear(s: Lowering, x: Any, weight: Any, bias: list[Any]) -> Ref:
    """Return x @ weight.T + bias; a weight that is no parameter makes it a plain matmul."""
    w = s.ref(weight)
    shape = s.out_shape
    if s.drafts.nodes[w.name].op == "param":
        return s.emit("linear", [x, w, *bias], shape)
    product = s.emit("matmul", [x, permuted(s, w, [1, 0])], shape)
    return s.emit("add", [product, *bias], shape) if bias else product


@_handles("matmul", "mm", "bmm")
def _matmul(s: Lowering, a: Arguments) -> Any:
    x, y = s.ref(a["self"]), s.ref(a.get("other", a.get("mat2")))
    s.need(len(x.shape) >= 2 and len(y.shape) >= 2, "a product with a vector")
    weight = transposed_parameter(s, y)
    if weight is not None:
        return s.emit("linear", [x, weight], s.out_shape)
    return s.emit("matmul", [x, y], s.out_shape)


@_handles("addmm")
def _addmm(s: Lowering, a: Arguments) -> Any:
    s.need(a["alpha"] == 1 and a["beta"] == 1, "addmm with factors")
    weight = transposed_parameter(s, s.ref(a["mat2"]))
    if weight is not None and len(s.ref(a["self"]).shape) == 1:
        return s.emit("linear", [a["mat1"], weight, a["self"]], s.out_shape)
    op, factor = ("matmul", a["mat2"]) if weight is None else ("linear", weight)
    product = s.emit(op, [a["mat1"], factor], s.out_shape)
    return s.emit("add", [product, a["self"]], s.out_shape)


def transposed_parameter(s: Lowering, y: Ref) -> Ref | None:
    """Return w where y is the transpose of a matrix parameter w."""
    node = s.drafts.nodes[y.name]
    if node.op != "permute" or list(node.attrs["dims"]) != [1, 0]:
        return None
    source = s.drafts.nodes[node.inputs[0]]
    return Ref(source.name, source.shape) if source.op == "param" else None


@_handles("embedding")
def _embedding(s: Lowering, a: Arguments) -> Any:
    return _rows(s, a["weight"], a["indices"])


@_handles("index_select")
def _index_select(s: Lowering, a: Arguments) -> Any:
    s.need(a["dim"] == 0, "only rows")
    return _rows(s, a["self"], a["index"])


@_handles("index")
def _index(s: Lowering, a: Arguments) -> Any:
    s.need(len(a["indices"]) == 1, "only rows")
    return _rows(s, a["self"], a["indices"][0])


def _rows(s: Lowering, weight: Any, ids: Any) -> Ref:
    table = s.ref(weight)
    node = s.drafts.nodes[table.name]
    plain = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool
    s.need(node.op == "param" and len(table.shape) == 2 and plain, "only rows of a parameter")
    flat = [int(i) for i in ids.flatten()]
    found = s.emit("embedding", [table], (len(flat), table.shape[1]), ids=flat)
    return reshaped(s, found, s.out_shape)


# --- norms, softmax, attention -------------------------------------------------------------------


def _norm(s: Lowering, op: str, a: Arguments, affine: list[str], eps: float | None) -> Ref:
    x: Ref = a["input"]
    shape = a["normalized_shape"]
    s.need(list(shape) == [x.shape[-1]], "only over the last dimension")
    parts = [a[name] for name in affine if a.get(name) is not None]
    s.need(len(parts) in (0, len(affine)), "a norm with a bias needs a weight")
    value = float(np.finfo(np.float32).eps) if eps is None else float(eps)
    return s.emit(op, [x, *parts], x.shape, eps=value)


@_handles("layer_norm", "native_layer_norm")
def _layer_norm(s: Lowering, a: Arguments) -> Any:
    affine = ["weight"] if a.get("bias") is None else ["weight", "bias"]
    found = _norm(s, "layer_norm", a, affine, a["eps"])
    return [found] if s.operator.startswith("native") else found


@_handles("rms_norm", "_fused_rms_norm")
def _rms_norm(s: Lowering, a: Arguments) -> Any:
    found = _norm(s, "rms_norm", a, ["weight"], a.get("eps"))
    return [found] if s.operator.startswith("_fused") else found


@_handles("softmax", "_softmax")
def _softmax(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    s.need(a["dim"] % len(x.shape) == len(x.shape) - 1, "only over the last dimension")
    s.need(a.get("dtype") in (None, torch.float32), "softmax in another type")
    return s.emit("softmax", [x], x.shape)


@_handles("masked_fill")
def _masked_fill(s: Lowering, a: Arguments) -> Any:
    mask, number = plain_mask(a["mask"]), plain_number(a["value"])
    masks = mask is not None and number is not None and number <= MASKED
    s.need(masks and isinstance(a["self"], Ref), "only a fixed mask with -inf")
    assert mask is not None
    return s.emit("mask", [a["self"], torch.from_numpy(~mask)], s.out_shape)


@_handles("where")
def _where(s: Lowering, a: Arguments) -> Any:
    mask = plain_mask(a["condition"])
    s.need(mask is not None, "only a fixed mask with -inf")
    assert mask is not None
    for one, two, keep in ((a["self"], a["other"], mask), (a["other"], a["self"], ~mask)):
        number = plain_number(two)
        if isinstance(one, Ref) and number is not None and number <= MASKED:
            return s.emit("mask", [one, torch.from_numpy(keep)], s.out_shape)
    raise s.unsupported("only a fixed mask with -inf")


def _additive_mask(value: Any) -> Tensor | None:
    """Return the bool mask of a plain tensor that holds only 0 and -inf, both of them or -inf."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    hidden = value <= MASKED
    only = bool((hidden | (value == 0)).all()) and bool(hidden.any())
    return ~hidden if only else None


@_handles("scaled_dot_product_attention")
def _attention(s: Lowering, a: Arguments) -> Any:
    """Expand to matmul, scale, mask, softmax, matmul."""
    q, k, v = (s.ref(a[name]) for name in ("query", "key", "value"))
    s.need(a["dropout_p"] == 0.0, "dropout in attention")
    out_shape = s.out_shape
    if a.get("enable_gqa") and k.shape[-3] != q.shape[-3]:
        times = q.shape[-3] // k.shape[-3]
        k, v = repeated(s, k, times, -3), repeated(s, v, times, -3)
    rank = len(k.shape)
    turned = permuted(s, k, [*range(rank - 2), rank - 1, rank - 2])
    length, width = k.shape[-2], q.shape[-1]
    shape = (*out_shape[:-1], length)
    scores = s.emit("matmul", [q, turned], shape)
    factor = 1.0 / math.sqrt(width) if a.get("scale") is None else float(a["scale"])
    scores = s.emit("scale", [scores], shape, factor=factor)
    mask = a.get("attn_mask")
    if a.get("is_causal"):
        s.need(mask is None, "a mask beside is_causal")
        mask = torch.ones(q.shape[-2], length, dtype=torch.bool).tril()
    if mask is not None:
        keep = torch.from_numpy(m) if (m := plain_mask(mask)) is not None else _additive_mask(mask)
        if keep is not None:
            scores = s.emit("mask", [scores, keep], shape)
        else:
            scores = s.emit("add", [scores, mask], shape)
    return s.emit("matmul", [s.emit("softmax", [scores], shape), v], out_shape)
