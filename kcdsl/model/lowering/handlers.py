"""Handlers that lower aten operations to nodes; see `calls.py`.

A handler gets the state and the arguments by their names in the operator's schema, of which at
least one is a `Ref`, and returns a `Ref` or a list of them. An argument that the handler does not
read is refused unless it has its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kcdsl.model.graph import View
from kcdsl.model.lowering.evaluate import POINTWISE
from kcdsl.model.lowering.state import MASKED, Arguments, Lowering, Plain, Ref, Varied, plain_mask

Handler = Callable[[Lowering, Arguments], Any]
HANDLERS: dict[str, Handler] = {}
_KNOWN = frozenset({"param", "constant"})
"""Nodes whose values are known: the biases of linears, and the weights and biases of norms."""


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# --- the same value ------------------------------------------------------------------------------


@_handles("contiguous", "clone", "detach", "detach_", "alias", "lift_fresh_copy", "positive")
def _same(s: Lowering, a: Arguments) -> Any:
    return a["self"]


@_handles("kcdsl::route")
def _route(s: Lowering, a: Arguments) -> Any:
    """Add a node with the experts that a router chooses at every position."""
    logits, chosen = a["logits"], a["chosen"]
    route = chosen.fixed if isinstance(chosen, Plain) else None
    s.need(isinstance(logits, Ref) and route is not None, "a route that is not given")
    assert route is not None
    return s.emit("route", [logits], s.out_shape, experts=route.tolist())


@_handles("kcdsl::quantise")
def _quantise(s: Lowering, a: Arguments) -> Any:
    """Add a node where kernels may quantise a tensor, which may be a constant."""
    tensor = a["tensor"]
    assert isinstance(tensor, str)
    return s.emit("quantise", [a["x"]], s.out_shape, tensor=tensor)


@_handles("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def _dropout(s: Lowering, a: Arguments) -> Any:
    share, training = a["p"], a["train"]
    s.need(share == 0.0 or training is False, "dropout in training mode")
    return a["input"]


@_handles("to", "_to_copy", "type_as")
def _cast(s: Lowering, a: Arguments) -> Any:
    """Return a cast; the type of the result determines `dtype` and `other`."""
    a.shown_by_the_result("dtype", "other")
    s.need(isinstance(a["self"], Ref), "a cast to the type of a result")
    return s.cast(a["self"], s.out_format)


# --- shapes --------------------------------------------------------------------------------------


@_handles("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten",
          "view_as", "reshape_as")  # fmt: skip
def _reshape(s: Lowering, a: Arguments) -> Any:
    """All of these keep the order of the elements, so the shape of the result determines it."""
    a.shown_by_the_result("size", "shape", "dim", "start_dim", "end_dim", "sizes", "other")
    return reshaped(s, a["self"], s.out_shape)


@_handles("expand", "expand_as", "broadcast_to")
def _expand(s: Lowering, a: Arguments) -> Any:
    a.shown_by_the_result("size", "other")
    return expanded(s, a["self"], s.out_shape)


@_handles("permute")
def _permute(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    return permuted(s, x, [d % len(x.shape) for d in a["dims"]])


@_handles("transpose", "swapdims")
def _transpose(s: Lowering, a: Arguments) -> Any:
    return exchanged(s, a["self"], a["dim0"], a["dim1"])


@_handles("swapaxes")
def _swapaxes(s: Lowering, a: Arguments) -> Any:
    return exchanged(s, a["self"], a["axis0"], a["axis1"])


@_handles("mT", "mH", "adjoint")
def _last_two(s: Lowering, a: Arguments) -> Any:
    """Numbers are real: the adjoint of a matrix is its transpose."""
    return exchanged(s, a["self"], -2, -1)


@_handles("t", "numpy_T", "matrix_H")
def _reversed(s: Lowering, a: Arguments) -> Any:
    """`t` and `matrix_H` take at most two dimensions, and `numpy_T` reverses any number of them."""
    x: Ref = a["self"]
    return permuted(s, x, list(reversed(range(len(x.shape)))))


@_handles("movedim", "moveaxis")
def _movedim(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    rank = len(x.shape)
    source, destination = (
        [d % rank for d in (dims if isinstance(dims, list) else [dims])]
        for dims in (a["source"], a["destination"])
    )
    rest = iter([d for d in range(rank) if d not in source])
    moved = dict(zip(destination, source, strict=True))
    return permuted(s, x, [moved[i] if i in moved else next(rest) for i in range(rank)])


@_handles("slice")
def _slice(s: Lowering, a: Arguments) -> Any:
    return sliced(s, a["self"], a["dim"], a["start"], a["end"], a["step"])


@_handles("narrow")
def _narrow(s: Lowering, a: Arguments) -> Any:
    x, start, length = a["self"], a["start"], a["length"]
    s.need(isinstance(start, int), "a start that is a tensor")
    first = start % x.shape[a["dim"]] if start < 0 else start
    return sliced(s, x, a["dim"], first, first + length, 1)


@_handles("select")
def _select(s: Lowering, a: Arguments) -> Any:
    index = a["index"] % a["self"].shape[a["dim"]]
    return reshaped(s, sliced(s, a["self"], a["dim"], index, index + 1, 1), s.out_shape)


@_handles("unbind")
def _unbind(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    parts = pieces(s, x, a["dim"], [1] * x.shape[a["dim"]])
    return [reshaped(s, part, s.out_shape) for part in parts]


@_handles("split", "unsafe_split")
def _split(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    sizes = a["split_size"] if "split_size" in a else a["split_sizes"]
    return pieces(s, x, a["dim"], sizes if isinstance(sizes, list) else _even(x, a, sizes))


@_handles("split_with_sizes")
def _split_with_sizes(s: Lowering, a: Arguments) -> Any:
    return pieces(s, a["self"], a["dim"], a["split_sizes"])


@_handles("chunk", "unsafe_chunk")
def _chunk(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    return pieces(s, x, a["dim"], _even(x, a, max(1, -(-x.shape[a["dim"]] // a["chunks"]))))


@_handles("tensor_split")
def _tensor_split(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    size = x.shape[a["dim"]]
    if "sections" in a:
        count = a["sections"]
        sizes = [size // count + (i < size % count) for i in range(count)]
    else:
        s.need("indices" in a, "a split by a tensor")
        ends = [slice(i).indices(size)[1] for i in a["indices"]]
        sizes = [stop - start for start, stop in zip([0, *ends], [*ends, size], strict=True)]
        s.need(min(sizes) >= 0, "a split at indices that do not grow")
    return pieces(s, x, a["dim"], sizes)


def _even(x: Ref, a: Arguments, width: int) -> list[int]:
    size = x.shape[a["dim"]]
    return [min(width, size - i) for i in range(0, size, width)]


def pieces(s: Lowering, x: Ref, dim: int, sizes: list[int]) -> list[Ref]:
    """Return x cut along one dimension into pieces of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [sliced(s, x, dim, end - size, end, 1) for end, size in zip(ends, sizes, strict=True)]


@_handles("cat", "concat", "concatenate")
def _concat(s: Lowering, a: Arguments) -> Any:
    rank = len(s.out_shape)
    parts = [s.ref(t) for t in a["tensors"]]
    s.need(all(len(p.shape) == rank for p in parts), "an empty part")
    return s.emit("concat", parts, s.out_shape, dim=a["dim"] % rank)


@_handles("stack")
def _stack(s: Lowering, a: Arguments) -> Any:
    shape = s.out_shape
    dim = a["dim"] % len(shape)
    single = (*shape[:dim], 1, *shape[dim + 1 :])
    return s.emit("concat", [reshaped(s, s.ref(t), single) for t in a["tensors"]], shape, dim=dim)


@_handles("repeat_interleave")
def _repeat_interleave(s: Lowering, a: Arguments) -> Any:
    repeats, dim = a["repeats"], a["dim"]
    s.need(isinstance(repeats, int) and isinstance(dim, int), "use repeats: int and dim: int")
    a.shown_by_the_result("output_size")
    return repeated(s, a["self"], repeats, dim)


@_handles("repeat", "tile")
def _repeat(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    times = a["repeats"] if "repeats" in a else a["dims"]
    rank = max(len(times), len(x.shape))
    sizes = [1] * (rank - len(x.shape)) + list(x.shape)
    times = [1] * (rank - len(times)) + list(times)
    pairs = list(zip(times, sizes, strict=True))
    one = reshaped(s, x, tuple(n for _, size in pairs for n in (1, size)))
    many = expanded(s, one, tuple(n for pair in pairs for n in pair))
    return reshaped(s, many, tuple(count * size for count, size in pairs))


def reshaped(s: Lowering, x: Ref, shape: tuple[int, ...]) -> Ref:
    """Return x in another shape."""
    if x.shape == shape:
        return x
    return _viewed(s, x, View.reshaped(shape))


def expanded(s: Lowering, x: Ref, shape: tuple[int, ...]) -> Ref:
    """Return x broadcast to a shape."""
    if x.shape == shape:
        return x
    return _viewed(s, x, View.expanded(x.shape, shape))


def permuted(s: Lowering, x: Ref, dims: list[int]) -> Ref:
    """Return x with its dimensions in another order."""
    if dims == list(range(len(dims))):
        return x
    return _viewed(s, x, View.permuted(x.shape, dims))


def exchanged(s: Lowering, x: Ref, one: int, two: int) -> Ref:
    """Return x with two of its dimensions exchanged."""
    dims = list(range(len(x.shape)))
    if dims:
        dims[one], dims[two] = dims[two], dims[one]
    return permuted(s, x, dims)


def sliced(s: Lowering, x: Ref, dim: int, start: int | None, stop: int | None, step: int) -> Ref:
    """Return x[…, start:stop:step, …] along one dimension."""
    dim %= len(x.shape)
    start, stop, step = slice(start, stop, step).indices(x.shape[dim])
    length = len(range(start, stop, step))
    if length == x.shape[dim]:
        return x
    s.need(length > 0, "an empty slice")
    return _viewed(s, x, View.sliced(x.shape, dim, start, stop, step))


def _viewed(s: Lowering, x: Ref, view: View) -> Ref:
    return s.emit("view", [x], view.shape, stored=s.format_of(x), **view.attrs)


def repeated(s: Lowering, x: Ref, times: int, dim: int) -> Ref:
    """Return x with each entry along one dimension repeated in place."""
    dim %= len(x.shape)
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    one = reshaped(s, x, (*before, size, 1, *after))
    many = expanded(s, one, (*before, size, times, *after))
    return reshaped(s, many, (*before, size * times, *after))


# --- elementwise ---------------------------------------------------------------------------------


def _scaled_other(s: Lowering, a: Arguments) -> Any:
    """Return alpha * other, computed inside the operation.

    Half-precision kernels may or may not round alpha and the product to their format first.
    """
    alpha, other = s.number(a["alpha"]), a["other"]
    assert alpha is not None
    if alpha == 1.0:
        return other
    s.need(isinstance(other, Ref), "a factor alpha of a number")
    exact = abs(alpha) == 1.0 or not s.drafts.halves
    s.need(exact, f"alpha={alpha}, whose product half-precision kernels may round")
    return s.emit("scale", [other], other.shape, stored=s.wide, factor=alpha)


def _shifted(s: Lowering, x: Any, offset: float) -> Ref:
    s.need(math.isfinite(offset), f"an offset of {offset}")
    return s.emit("shift", [x], s.out_shape, offset=offset)


@_handles("add")
def _add(s: Lowering, a: Arguments) -> Any:
    x, y = a["self"], _scaled_other(s, a)
    for one, two in ((x, y), (y, x)):
        if not isinstance(one, Ref):
            continue
        if (number := s.number(two)) is not None:
            return _shifted(s, one, number)
        hiding = _hiding(two)
        if hiding is not None:
            return _hidden(s, one, *hiding)
    return s.emit("add", [x, y], s.out_shape)


@_handles("sub", "subtract")
def _sub(s: Lowering, a: Arguments) -> Any:
    return _difference(s, a["self"], _scaled_other(s, a))


@_handles("rsub")
def _rsub(s: Lowering, a: Arguments) -> Any:
    s.need(s.number(a["alpha"]) == 1.0, "with a factor alpha")
    return _difference(s, a["other"], a["self"])


def _difference(s: Lowering, x: Any, y: Any) -> Ref:
    if isinstance(x, Ref) and (number := s.number(y)) is not None:
        return _shifted(s, x, -number)
    if isinstance(y, Ref) and (number := s.number(x)) is not None:
        return _shifted(s, s.emit("neg", [y], y.shape, stored=s.format_of(y)), number)
    return s.emit("sub", [x, y], s.out_shape)


@_handles("mul", "multiply")
def _mul(s: Lowering, a: Arguments) -> Any:
    x, y = a["self"], a["other"]
    for one, two in ((x, y), (y, x)):
        number = s.number(two) if isinstance(one, Ref) else None
        if number is not None:
            if number == 1.0 and one.shape == s.out_shape and s.format_of(one) == s.out_format:
                return one
            s.need(math.isfinite(number), f"a factor of {number}")
            return s.emit("scale", [one], s.out_shape, factor=number)
    return s.emit("mul", [x, y], s.out_shape)


@_handles("div", "divide", "true_divide")
def _div(s: Lowering, a: Arguments) -> Any:
    s.need("rounding_mode" not in a or a["rounding_mode"] is None, "a division that rounds")
    x, y = a["self"], a["other"]
    if isinstance(x, Ref) and (number := s.number(y)) is not None:
        s.need(number != 0.0 and math.isfinite(number), f"a division by {number}")
        return s.emit("divide", [x], s.out_shape, divisor=number)
    if isinstance(y, Ref) and s.number(x) == 1.0:
        return s.emit("reciprocal", [y], s.out_shape)
    return s.emit("quotient", [x, y], s.out_shape)


@_handles("square")
def _square(s: Lowering, a: Arguments) -> Any:
    return s.emit("mul", [a["self"], a["self"]], s.out_shape)


@_handles("pow")
def _pow(s: Lowering, a: Arguments) -> Any:
    x, exponent = a["self"], s.number(a["exponent"])
    s.need(isinstance(x, Ref), "a number to the power of a result")
    if exponent == 2:
        return s.emit("mul", [x, x], s.out_shape)
    s.need(exponent == -0.5, f"a power other than 2 and -0.5: {a['exponent']}")
    return s.emit("rsqrt", [x], s.out_shape)


@_handles(*POINTWISE, "negative", "sigmoid", "sqrt", "rsqrt", "reciprocal")
def _unary(s: Lowering, a: Arguments) -> Any:
    return s.emit("neg" if s.operator == "negative" else s.operator, [a["self"]], s.out_shape)


@_handles("gelu")
def _gelu(s: Lowering, a: Arguments) -> Any:
    form = a["approximate"]
    s.need(form in ("none", "tanh"), f"there is no form {form!r} of GELU")
    attrs = {"approximate": form} if form == "tanh" else {}
    return s.emit("gelu", [a["self"]], s.out_shape, **attrs)


def _over_last(s: Lowering, a: Arguments) -> Ref:
    """Return the operand of a reduction over its last dimension, in the type of the result."""
    x: Ref = a["self"]
    dims = a.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    last = dims is not None and [d % len(x.shape) for d in dims] == [len(x.shape) - 1]
    s.need(last, "only over the last dimension")
    a.shown_by_the_result("keepdim", "dtype")
    return s.cast(x, s.out_format)


@_handles("mean")
def _mean(s: Lowering, a: Arguments) -> Any:
    x = _over_last(s, a)
    return reshaped(s, s.emit("mean", [x], (*x.shape[:-1], 1)), s.out_shape)


@_handles("var")
def _var(s: Lowering, a: Arguments) -> Any:
    x = _over_last(s, a)
    biased = s.number(a["correction"]) == 0 if "correction" in a else a["unbiased"] is False
    s.need(biased, "only the biased variance (correction=0)")
    return reshaped(s, s.emit("variance", [x], (*x.shape[:-1], 1)), s.out_shape)


# --- products ------------------------------------------------------------------------------------


@_handles("linear")
def _linear(s: Lowering, a: Arguments) -> Any:
    """Return a linear, or a plain product where the weight or the bias is no parameter."""
    weight, bias = s.ref(a["weight"]), None if a["bias"] is None else s.ref(a["bias"])
    if _is_param(s, weight) and (bias is None or s.drafts.nodes[bias.name].op in _KNOWN):
        return s.emit(
            "linear", [a["input"], weight, *([] if bias is None else [bias])], s.out_shape
        )
    return _product(s, s.ref(a["input"]), permuted(s, weight, [1, 0]), bias)


def _product(s: Lowering, x: Ref, y: Ref, bias: Ref | None) -> Ref:
    """Return x @ y + bias; the bias is a term of every sum, because kernels may start with it."""
    if bias is None:
        return s.emit("matmul", [x, y], s.out_shape)
    wide = s.out_shape[-1]
    s.need(
        math.prod(bias.shape) == bias.shape[-1] == wide,
        "what is added to the product is not one row: add it after the product",
    )
    ones = s.column(x)
    longer = (*x.shape[:-1], x.shape[-1] + 1), (y.shape[0] + 1, wide)
    left = s.emit("concat", [x, ones], longer[0], stored=s.format_of(x), dim=len(x.shape) - 1)
    row = reshaped(s, bias, (1, wide))
    right = s.emit("concat", [y, row], longer[1], stored=s.format_of(y), dim=0)
    return s.emit("matmul", [left, right], s.out_shape)


@_handles("matmul")
def _matmul(s: Lowering, a: Arguments) -> Any:
    return multiplied(s, s.ref(a["self"]), s.ref(a["other"]))


@_handles("mm", "bmm")
def _mm(s: Lowering, a: Arguments) -> Any:
    return multiplied(s, s.ref(a["self"]), s.ref(a["mat2"]))


def multiplied(s: Lowering, x: Ref, y: Ref) -> Ref:
    """Return x @ y; it is a linear where y is the transpose of a matrix parameter."""
    s.need(len(x.shape) >= 2 and len(y.shape) >= 2, "a product with a vector")
    weight = transposed_parameter(s, y)
    if weight is not None:
        return s.emit("linear", [x, weight], s.out_shape)
    return s.emit("matmul", [x, y], s.out_shape)


@_handles("addmm")
def _addmm(s: Lowering, a: Arguments) -> Any:
    s.need(s.number(a["alpha"]) == 1 and s.number(a["beta"]) == 1, "addmm with factors")
    bias, x, y = (s.ref(a[name]) for name in ("self", "mat1", "mat2"))
    weight, leaf = transposed_parameter(s, y), s.drafts.nodes[bias.name].op in _KNOWN
    if weight is not None and bias.shape == y.shape[1:] and leaf:
        return s.emit("linear", [x, weight, bias], s.out_shape)
    return _product(s, x, y, bias)


def transposed_parameter(s: Lowering, y: Ref) -> Ref | None:
    """Return w where y is the transpose of a matrix parameter w."""
    node = s.drafts.nodes[y.name]
    source = s.drafts.nodes[node.inputs[0]] if node.op == "view" else node
    if source.op != "param" or len(source.shape) != 2:
        return None
    transposed = dict(node.attrs) == View.permuted(source.shape, (1, 0)).attrs
    return Ref(source.name, source.shape) if transposed else None


def _is_param(s: Lowering, value: Ref) -> bool:
    return s.drafts.nodes[value.name].op == "param"


@_handles("embedding")
def _embedding(s: Lowering, a: Arguments) -> Any:
    a.inert("padding_idx", "scale_grad_by_freq", "sparse")
    return _rows(s, a["weight"], a["indices"])


@_handles("index_select")
def _index_select(s: Lowering, a: Arguments) -> Any:
    s.need(a["dim"] % len(a["self"].shape) == 0, "only rows")
    return _rows(s, a["self"], a["index"])


@_handles("index")
def _index(s: Lowering, a: Arguments) -> Any:
    s.need(len(a["indices"]) == 1, "only rows")
    return _rows(s, a["self"], a["indices"][0])


def _rows(s: Lowering, weight: Any, ids: Any) -> Ref:
    table = s.ref(weight)
    chosen = ids.fixed if isinstance(ids, Plain) else None
    s.need(_is_param(s, table) and len(table.shape) == 2, "only rows of a parameter")
    whole = chosen is not None and not chosen.is_floating_point() and chosen.dtype != torch.bool
    s.need(whole, "only rows of a parameter")
    assert chosen is not None
    flat = [int(i) % table.shape[0] for i in chosen.flatten()]
    found = s.emit("embedding", [table], (len(flat), table.shape[1]), ids=flat)
    return reshaped(s, found, s.out_shape)


# --- norms, softmax, attention -------------------------------------------------------------------


def _norm(s: Lowering, op: str, a: Arguments, affine: list[Any]) -> Ref:
    x: Ref = a["input"]
    s.need(list(a["normalized_shape"]) == [x.shape[-1]], "only over the last dimension")
    eps = a["eps"]
    if eps is None:
        s.need(s.formats == ("float32",), "without eps: it would depend on the format")
        eps = float(np.finfo(np.float32).eps)
    known = [s.ref(part) for part in affine]
    leaf = all(s.drafts.nodes[s.drafts.before_casts(part.name)].op in _KNOWN for part in known)
    s.need(leaf, "a weight or bias that is computed")
    s.need(s.format_of(x) == s.out_format, "a weight of another type than the input")
    return s.emit(op, [x, *known], x.shape, eps=float(eps))


@_handles("layer_norm", "native_layer_norm")
def _layer_norm(s: Lowering, a: Arguments) -> Any:
    weight, bias = a["weight"], a["bias"]
    s.need(bias is None or weight is not None, "a norm with a bias needs a weight")
    found = _norm(s, "layer_norm", a, [part for part in (weight, bias) if part is not None])
    return [found] if s.operator.startswith("native") else found


@_handles("rms_norm", "_fused_rms_norm")
def _rms_norm(s: Lowering, a: Arguments) -> Any:
    found = _norm(s, "rms_norm", a, [] if a["weight"] is None else [a["weight"]])
    return [found] if s.operator.startswith("_fused") else found


@_handles("softmax", "_softmax")
def _softmax(s: Lowering, a: Arguments) -> Any:
    x: Ref = a["self"]
    s.need(a["dim"] % len(x.shape) == len(x.shape) - 1, "only over the last dimension")
    a.shown_by_the_result("dtype", "half_to_float")
    return s.emit("softmax", [s.cast(x, s.out_format)], x.shape)


def masked(s: Lowering, scores: Ref, keep: Tensor) -> Ref:
    """Return scores where a mask is True, and a number whose exp is 0 where it is False."""
    return s.emit("mask", [scores, s.mask(keep)], s.out_shape)


@_handles("masked_fill")
def _masked_fill(s: Lowering, a: Arguments) -> Any:
    mask, hidden = plain_mask(a["mask"]), _hides(s, a["value"])
    s.need(
        mask is not None and hidden and isinstance(a["self"], Ref), "only a fixed mask with -inf"
    )
    assert mask is not None
    return masked(s, a["self"], ~mask)


@_handles("where")
def _where(s: Lowering, a: Arguments) -> Any:
    mask = plain_mask(a["condition"])
    s.need(mask is not None, "only a fixed mask with -inf")
    assert mask is not None
    for one, two, keep in ((a["self"], a["other"], mask), (a["other"], a["self"], ~mask)):
        if isinstance(one, Ref) and _hides(s, two):
            return masked(s, one, keep)
    raise s.unsupported("only a fixed mask with -inf")


def _hides(s: Lowering, value: Any) -> bool:
    """Return whether a number represents a masked-out score in every format."""
    match value:
        case Varied():
            return all(isinstance(v, float) and v <= MASKED for v in value.values.values())
        case Plain():
            return value.shape == () and all(
                v.is_floating_point() and v.item() <= MASKED for v in value.values.values()
            )
        case bool():
            return False
        case _:
            return isinstance(value, int | float) and value <= MASKED


def _hiding(value: Any) -> tuple[Tensor, Plain | None] | None:
    """Split a plain tensor that is added to scores into a mask and a bias.

    None for a tensor that masks no score, or different ones per format. The bias is 0 at masked
    scores, and None if it is 0 everywhere.
    """
    if not isinstance(value, Plain):
        return None
    tensors = value.values.values()
    if not all(tensor.is_floating_point() for tensor in tensors):
        return None
    hidden, *others = (tensor <= MASKED for tensor in tensors)
    if not bool(hidden.any()) or not all(torch.equal(hidden, other) for other in others):
        return None
    kept = {name: tensor.masked_fill(hidden, 0.0) for name, tensor in value.values.items()}
    bias = Plain(kept) if any(bool(tensor.any()) for tensor in kept.values()) else None
    return ~hidden, bias


def _hidden(s: Lowering, scores: Ref, keep: Tensor, bias: Plain | None, role: str = "") -> Ref:
    """Return masked scores with a bias."""
    added = scores if bias is None else s.emit("add", [scores, bias], s.out_shape, role=role)
    return masked(s, added, keep)


@_handles("scaled_dot_product_attention")
def _attention(s: Lowering, a: Arguments) -> Any:
    """Expand to matmul, scale, mask, softmax, matmul, as composed kernels do.

    The nodes get attention roles, however operands and mask were computed.
    """
    q, k, v = (s.ref(a[name]) for name in ("query", "key", "value"))
    s.need(a["dropout_p"] == 0.0, "dropout in attention")
    out_shape = s.out_shape
    if a["enable_gqa"]:
        s.need(
            min(len(t.shape) for t in (q, k, v)) >= 3, "grouped heads without a dimension of them"
        )
        k, v = (repeated(s, t, q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    turned = exchanged(s, k, -2, -1)
    length, width = k.shape[-2], q.shape[-1]
    s.out_shape = shape = (*out_shape[:-1], length)
    scores = s.emit("matmul", [q, turned], shape, role="scores")
    factor = 1.0 / math.sqrt(width) if a["scale"] is None else s.number(a["scale"])
    s.need(factor is not None and math.isfinite(factor) and factor > 0, f"a scale of {a['scale']}")
    scores = s.emit("scale", [scores], shape, role="scores", factor=factor)
    mask = a["attn_mask"]
    if a["is_causal"]:
        s.need(mask is None, "a mask beside is_causal")
        scores = masked(s, scores, torch.ones(q.shape[-2], length, dtype=torch.bool).tril())
    elif mask is not None:
        keep, hiding = plain_mask(mask), _hiding(mask)
        if keep is not None:
            scores = masked(s, scores, keep)
        elif hiding is not None:
            scores = _hidden(s, scores, *hiding, role="scores")
        else:
            scores = s.emit("add", [scores, mask], shape, role="scores")
    s.out_shape = out_shape
    shares = s.emit("softmax", [scores], shape, role="probabilities")
    return s.emit("matmul", [shares, v], out_shape, role="context")
