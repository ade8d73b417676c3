"""The supported ONNX operators, each as operations of PyTorch.

Any other operator is refused, with its name and that of the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.lowering.quantisers import quantised
from kcdsl.model.onnx.files import Array, OnnxNode, type_name
from kcdsl.source.files import excerpt

PINNED = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.DOUBLE: torch.float64,
}
QUANTISE = "quantise"
"""The operator where kernels may quantise a tensor, in place of QuantizeLinear and
DequantizeLinear; the tensor has the name of its result."""
INTEGERS = {TensorProto.INT64: torch.int64, TensorProto.INT32: torch.int32}


@dataclass(frozen=True, slots=True)
class Turned:
    """A matrix that the file stores as [in, out], held as [out, in], with the module that
    multiplies by it, if there is one."""

    weight: Tensor
    linear: nn.Module | None = None

    def times(self, x: Tensor, *bias: Tensor) -> Tensor:
        """Return x @ weight.T, with a bias added if one is given."""
        found: Tensor = (
            F.linear(x, self.weight, *bias) if self.linear is None else self.linear(x, *bias)
        )
        return found


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One node with its operands: computed tensors and fixed arrays.

    `own` is the ONNX type in which the program computes, `dtype` the type to which the module is
    converted, `device` its device.
    """

    node: OnnxNode
    inputs: tuple[Any, ...]
    own: int
    dtype: torch.dtype
    opset: int
    device: torch.device | None = None
    read: set[str] = field(default_factory=set)

    def refusal(self, what: str = "") -> Refusal:
        """Build the refusal of this node."""
        return refuse(
            codes.OPERATION_UNSUPPORTED,
            f"{self.node.place} is not supported{': ' if what else ''}{what}",
            help="verify blocks that do without it, or export the model in another form",
        )

    def need(self, holds: bool, what: str) -> None:
        """Refuse this node unless `holds`."""
        if not holds:
            raise self.refusal(what)

    def run(self) -> list[Any]:
        """Return the results. Refuse an operator that is not in the table, and an attribute that
        was not read."""
        operator = _quantise if self.node.kind == QUANTISE else OPERATORS.get(self.node.kind)
        if operator is None:
            raise self.refusal()
        found = operator(self)
        for name in self.node.attributes.keys() - self.read - _INERT:
            value = self.node.attributes[name]
            told = onnx.defs.get_schema(self.node.kind, self.opset).attributes.get(name)
            usual = None if told is None else told.default_value
            set_so = usual is not None and bool(usual.name)
            default = helper.get_attribute_value(usual) if usual and set_so else None
            default = default.decode() if isinstance(default, bytes) else default
            self.need(value == default, f"with {name}={excerpt(str(value))}")
        return found if isinstance(found, list) else [found]

    def given(self, place: int) -> bool:
        """Return whether an operand is present; missing trailing ones and "" are not."""
        return place < len(self.inputs) and self.inputs[place] is not None

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute, and record that it was read."""
        self.read.add(name)
        return self.node.attributes.get(name, default)

    def tensor(self, place: int) -> Tensor:
        """Return an operand as a tensor; a fixed one of the program's own type is converted to the
        type of the module."""
        value = self.inputs[place]
        if isinstance(value, Turned):
            return value.weight.T
        return value if isinstance(value, Tensor) else self._plain(value)

    def _plain(self, array: Array) -> Tensor:
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        device = next((v.device for v in self.inputs if isinstance(v, Tensor)), self.device)
        if kind in PINNED:
            wide = torch.from_numpy(np.array(array, dtype=np.float64 if kind == 11 else np.float32))
            return wide.to(device=device, dtype=self.dtype if kind == self.own else PINNED[kind])
        self.need(array.dtype in (np.bool_, np.int64, np.int32), f"a constant of {array.dtype}")
        return torch.from_numpy(np.array(array)).to(device=device)

    def numbers(self, place: int) -> list[int]:
        """Return a fixed operand as a list of integers."""
        value = self.inputs[place]
        fixed = isinstance(value, np.ndarray) and value.dtype.kind in "iu"
        self.need(fixed, "a shape, an axis or an index that depends on the tokens")
        return [int(n) for n in np.asarray(value).reshape(-1)]

    def scalar(self, place: int, beside: int) -> Any:
        """Return an operand, as a number if it is a scalar that does not change the result's
        shape."""
        value, other = self.inputs[place], self.inputs[beside]
        rank = other.weight.dim() if isinstance(other, Turned) else np.ndim(other)
        if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= rank:
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            if kind == self.own or value.dtype.kind in "iu":
                return (
                    value.reshape(()).astype(np.float64 if kind == self.own else value.dtype).item()
                )
        return self.tensor(place)


def _quantise(c: OperatorCall) -> Any:
    return quantised(c.tensor(0), c.node.outputs[0])


_INERT = frozenset({"kernel_shape", "seed"})
"""Attributes that are redundant or have no effect in inference."""
Operator = Callable[[OperatorCall], Any]
OPERATORS: dict[str, Operator] = {}


def _operator(*names: str) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


# --- of single numbers ----------------------------------------------------------------------------

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "Neg": torch.neg,
    "Relu": torch.relu,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Erf": torch.erf,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
    "Identity": lambda x: x,
    "Dropout": lambda x: x,
}


@_operator(*_POINTWISE)
def _pointwise(c: OperatorCall) -> Any:
    training = c.given(2) and bool(np.all(c.inputs[2]))
    c.need(c.node.kind != "Dropout" or not training, "dropout in training mode")
    return _POINTWISE[c.node.kind](c.tensor(0))


@_operator("Gelu")
def _gelu(c: OperatorCall) -> Any:
    form = c.attribute("approximate", "none")
    c.need(form in ("none", "tanh"), f"there is no form {form!r} of GELU")
    return F.gelu(c.tensor(0), approximate=form)


@_operator("Swish")
def _swish(c: OperatorCall) -> Any:
    c.need(c.attribute("alpha", 1.0) == 1.0, "with a factor alpha")
    return F.silu(c.tensor(0))


@_operator("Add")
def _add(c: OperatorCall) -> Any:
    for x, other in ((0, 1), (1, 0)):
        fixed, value = c.inputs[other], c.inputs[x]
        nothing = isinstance(fixed, np.ndarray) and not fixed.any()
        if nothing and isinstance(value, Tensor):
            shape = tuple(value.shape)
            if np.broadcast_shapes(fixed.shape, shape) == shape:
                return value
    return c.scalar(0, 1) + c.scalar(1, 0)


@_operator("Sub")
def _sub(c: OperatorCall) -> Any:
    return c.scalar(0, 1) - c.scalar(1, 0)


@_operator("Mul")
def _mul(c: OperatorCall) -> Any:
    return c.scalar(0, 1) * c.scalar(1, 0)


@_operator("Div")
def _div(c: OperatorCall) -> Any:
    x, y = c.scalar(0, 1), c.scalar(1, 0)
    c.need(isinstance(x, float) or not isinstance(x, int), "a division of integers")
    c.need(not isinstance(x, Tensor) or x.is_floating_point(), "a division of integers")
    return x / y


@_operator("Pow")
def _pow(c: OperatorCall) -> Any:
    exponent = c.scalar(1, 0)
    known = not isinstance(exponent, Tensor) and exponent in (2, 3, 0.5)
    c.need(known, "a power other than 2, 3 and 0.5")
    x = c.tensor(0)
    return torch.sqrt(x) if exponent == 0.5 else x.pow(int(exponent))


@_operator("Cast")
def _cast(c: OperatorCall) -> Any:
    kind = c.attribute("to")
    if kind == c.own:
        return c.tensor(0).to(c.dtype)
    dtype = (PINNED | INTEGERS).get(kind)
    c.need(dtype is not None, f"a cast to {type_name(kind)}")
    return c.tensor(0).to(dtype)


@_operator("Where")
def _where(c: OperatorCall) -> Any:
    c.need(isinstance(c.inputs[0], np.ndarray), "a condition that depends on the tokens")
    return torch.where(c.tensor(0), c.scalar(1, 0), c.scalar(2, 0))


# --- shapes ---------------------------------------------------------------------------------------


@_operator("Reshape")
def _reshape(c: OperatorCall) -> Any:
    x, sizes = c.tensor(0), c.numbers(1)
    if not c.attribute("allowzero", 0):
        c.need(all(n or i < x.dim() for i, n in enumerate(sizes)), "a size 0 beyond the operand")
        sizes = [n if n else x.shape[i] for i, n in enumerate(sizes)]
    return x.reshape(sizes)


@_operator("Flatten")
def _flatten(c: OperatorCall) -> Any:
    x = c.tensor(0)
    axis = c.attribute("axis", 1)
    axis += x.dim() if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@_operator("Transpose")
def _transpose(c: OperatorCall) -> Any:
    x = c.tensor(0)
    return x.permute(c.attribute("perm", list(reversed(range(x.dim())))))


def _axes(c: OperatorCall, place: int) -> list[int] | None:
    if c.given(place):
        return c.numbers(place)
    found: list[int] | None = c.attribute("axes")
    return found


@_operator("Unsqueeze")
def _unsqueeze(c: OperatorCall) -> Any:
    x, axes = c.tensor(0), _axes(c, 1)
    c.need(bool(axes), "without axes")
    rank = x.dim() + len(axes or ())
    for axis in sorted(a % rank for a in axes or ()):
        x = x.unsqueeze(axis)
    return x


@_operator("Squeeze")
def _squeeze(c: OperatorCall) -> Any:
    x, axes = c.tensor(0), _axes(c, 1)
    c.need(axes != [], "with empty axes, which runtimes take for all and others for none")
    every = [i for i, n in enumerate(x.shape) if n == 1]
    chosen = every if axes is None else [a % x.dim() for a in axes]
    c.need(set(chosen) <= set(every), "of a dimension that is not 1")
    return x.reshape([n for i, n in enumerate(x.shape) if i not in chosen])


@_operator("Concat")
def _concat(c: OperatorCall) -> Any:
    return torch.cat([c.tensor(i) for i in range(len(c.inputs))], dim=c.attribute("axis"))


@_operator("Split")
def _split(c: OperatorCall) -> Any:
    x, axis = c.tensor(0), c.attribute("axis", 0)
    if c.given(1):
        sizes = c.numbers(1)
    else:
        count = c.attribute("num_outputs", len(c.node.outputs))
        width = -(-x.shape[axis] // count)
        sizes = [min(width, x.shape[axis] - i) for i in range(0, x.shape[axis], width)]
    return list(torch.split(x, sizes, dim=axis))


@_operator("Slice")
def _slice(c: OperatorCall) -> Any:
    x, starts, ends = c.tensor(0), c.numbers(1), c.numbers(2)
    axes = c.numbers(3) if c.given(3) else list(range(len(starts)))
    steps = c.numbers(4) if c.given(4) else [1] * len(starts)
    c.need(min(steps, default=1) > 0, "with a negative step")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        first, stop, step = slice(start, end, step).indices(x.shape[axis])
        index = [slice(None)] * x.dim()
        index[axis] = slice(first, max(first, stop), step)
        x = x[tuple(index)]
    return x


@_operator("Expand")
def _expand(c: OperatorCall) -> Any:
    x = c.tensor(0)
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(c.numbers(1))))


@_operator("Gather")
def _gather(c: OperatorCall) -> Any:
    x, chosen = c.tensor(0), c.inputs[1]
    axis = c.attribute("axis", 0) % x.dim()
    if isinstance(chosen, np.ndarray) and chosen.ndim == 0:
        return x.select(axis, int(chosen))
    index = c.tensor(1)
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(index % x.shape[0] if isinstance(chosen, np.ndarray) else index, x)
    c.need(isinstance(chosen, np.ndarray), "indices that depend on the tokens")
    found = x.index_select(axis, index.reshape(-1) % x.shape[axis])
    return found.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


# --- reductions, products, norms, attention -------------------------------------------------------


@_operator("ReduceMean")
def _reduce_mean(c: OperatorCall) -> Any:
    x, axes = c.tensor(0), _axes(c, 1)
    c.need(bool(axes), "over all dimensions")
    return x.mean(axes, keepdim=bool(c.attribute("keepdims", 1)))


@_operator("Softmax")
def _softmax(c: OperatorCall) -> Any:
    return c.tensor(0).softmax(c.attribute("axis", -1))


@_operator("MatMul")
def _matmul(c: OperatorCall) -> Any:
    weight = c.inputs[1]
    if isinstance(weight, Turned):
        return weight.times(c.tensor(0))
    return c.tensor(0) @ c.tensor(1)


@_operator("Gemm")
def _gemm(c: OperatorCall) -> Any:
    plain = c.attribute("alpha", 1.0) == 1.0 and c.attribute("beta", 1.0) == 1.0
    c.need(plain, "with factors alpha and beta")
    x, weight = c.tensor(0), c.inputs[1]
    x = x.T if c.attribute("transA", 0) else x
    turned = bool(c.attribute("transB", 0))
    if not isinstance(weight, Turned) or turned:
        weight = Turned(c.tensor(1) if turned else c.tensor(1).T)
    if not c.given(2):
        return weight.times(x)
    bias = c.tensor(2)
    if tuple(bias.shape) == (weight.weight.shape[0],):
        return weight.times(x, bias)
    return weight.times(x) + bias


@_operator("Conv")
def _conv(c: OperatorCall) -> Any:
    """Return a convolution as a product with the concatenated patches of its input."""
    x, kernel = c.tensor(0), c.tensor(1)
    spatial = x.dim() - 2
    sizes = kernel.shape[2:]
    strides, dilations = (c.attribute(n, [1] * spatial) for n in ("strides", "dilations"))
    pads = c.attribute("pads", [0] * (2 * spatial))
    c.need(c.attribute("group", 1) == 1, "in groups")
    auto = c.attribute("auto_pad", "NOTSET")
    c.need(auto == "NOTSET" or (auto == "VALID" and not any(pads)), "with automatic padding")
    for axis in range(spatial):
        for before in (True, False):
            width = pads[axis if before else axis + spatial]
            if width:
                shape = [*x.shape[: axis + 2], width, *x.shape[axis + 3 :]]
                zeros = torch.zeros(shape, dtype=x.dtype, device=x.device)
                x = torch.cat([zeros, x] if before else [x, zeros], dim=axis + 2)
    counts = [
        (x.shape[i + 2] - dilations[i] * (sizes[i] - 1) - 1) // strides[i] + 1
        for i in range(spatial)
    ]
    c.need(min(counts, default=1) > 0, "of an input that is smaller than its kernel")
    patches = []
    for offset in np.ndindex(*sizes):
        index: list[Any] = [slice(None), slice(None)]
        for i in range(spatial):
            first = offset[i] * dilations[i]
            index.append(slice(first, first + strides[i] * (counts[i] - 1) + 1, strides[i]))
        patches.append(x[tuple(index)].flatten(2))
    together = torch.stack(patches, dim=2).flatten(1, 2).transpose(1, 2)
    found = together @ kernel.flatten(1).T
    if c.given(2):
        found = found + c.tensor(2)
    return found.transpose(1, 2).reshape(x.shape[0], kernel.shape[0], *counts)


@_operator("LayerNormalization")
def _layer_norm(c: OperatorCall) -> Any:
    x = c.tensor(0)
    last = c.attribute("axis", -1) % x.dim() == x.dim() - 1
    c.need(last, "over more than the last dimension")
    c.need(c.attribute("stash_type", 1) == 1, "computed in another format than float32")
    bias = c.tensor(2) if c.given(2) else None
    return F.layer_norm(x, x.shape[-1:], c.tensor(1), bias, c.attribute("epsilon", _EPS))


@_operator("RMSNormalization")
def _rms_norm(c: OperatorCall) -> Any:
    x = c.tensor(0)
    last = c.attribute("axis", -1) % x.dim() == x.dim() - 1
    c.need(last, "over more than the last dimension")
    c.need(c.attribute("stash_type", 1) == 1, "computed in another format than float32")
    return F.rms_norm(x, x.shape[-1:], c.tensor(1), c.attribute("epsilon", _EPS))


_EPS = float(np.float32(1e-5))


@_operator("Attention")
def _attention(c: OperatorCall) -> Any:
    c.need(not any(c.given(i) for i in range(4, len(c.inputs))), "with a cache or padding")
    c.need(len([o for o in c.node.outputs if o]) == 1, "with more than one result")
    c.need(c.attribute("softcap", 0.0) == 0.0, "with a cap on scores")
    c.need(c.attribute("softmax_precision", c.own) == c.own, "with a softmax in another format")
    q, k, v = (c.tensor(i) for i in range(3))
    packed = q.dim() == 3
    if packed:
        heads = [c.attribute("q_num_heads"), *[c.attribute("kv_num_heads")] * 2]
        c.need(all(heads), "on three dimensions without numbers of heads")
        q, k, v = (
            t.reshape(*t.shape[:2], n, -1).transpose(1, 2)
            for t, n in zip((q, k, v), heads, strict=True)
        )
    mask = c.tensor(3) if c.given(3) else None
    c.need(mask is None or mask.dim() > 1, "with a mask of one dimension")
    causal = bool(c.attribute("is_causal", 0))
    found = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=c.attribute("scale"),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return found.transpose(1, 2).flatten(2) if packed else found


@_operator("RotaryEmbedding")
def _rotary(c: OperatorCall) -> Any:
    c.need(not c.attribute("interleaved", 0), "with interleaved pairs")
    c.need(not c.attribute("rotary_embedding_dim", 0), "of a part of each head")
    x, heads = c.tensor(0), c.attribute("num_heads", 0)
    packed = x.dim() == 3
    c.need(bool(heads) or not packed, "on three dimensions without a number of heads")
    tables = [c.inputs[1], c.inputs[2]]
    c.need(all(isinstance(t, np.ndarray) for t in tables), "with tables that are computed")
    if c.given(3):
        c.need(isinstance(c.inputs[3], np.ndarray), "positions that depend on the tokens")
        tables = [t[c.inputs[3]] for t in tables]
    if packed:
        x = x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
    cos, sin = (c._plain(np.concatenate((t, t), axis=-1)[:, None]) for t in tables)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    found = x * cos + turned * sin
    return found.transpose(1, 2).flatten(2) if packed else found
