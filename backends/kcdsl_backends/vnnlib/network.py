"""ONNX networks as programs of real numbers: operators without rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from scipy import sparse

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.onnx.files import OnnxFile, OnnxNode
from kcdsl.model.onnx.folding import FOLDED, folded
from kcdsl.source.files import excerpt
from kcdsl_backends.vnnlib.program import Affine, NetworkProgram, TooLarge, constant, joined

_MOST = 1 << 24
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_WHOLE = (TensorProto.INT32, TensorProto.INT64)
_MOVES = frozenset({
    *("Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
    *("Tile", "Transpose", "Unsqueeze"),
})  # fmt: skip
"""Operators that only move elements."""
_SCALARS = {
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Reciprocal": "reciprocal",
    "Erf": "erf",
    "Floor": "floor",
    "Ceil": "ceil",
}
"""Operators of one operand that are a kind of block."""


@dataclass(frozen=True, slots=True)
class RealTensor:
    """A tensor that depends on the input: its elements, its shape and its ONNX type."""

    affine: Affine
    shape: tuple[int, ...]
    type: int

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return the places of the elements, in the shape of the tensor."""
        return np.arange(self.affine.size, dtype=np.int64).reshape(self.shape)

    def taken(self, ids: NDArray[Any]) -> RealTensor:
        """Return the elements at some places."""
        return RealTensor(self.affine.rows(ids.reshape(-1)), ids.shape, self.type)


Operand = RealTensor | NDArray[Any] | None


@dataclass(slots=True)
class NetworkReader:
    """Adds the nodes of a file to a program."""

    file: OnnxFile
    program: NetworkProgram
    node: OnnxNode | None = None

    def values(self, inputs: Mapping[str, RealTensor]) -> dict[str, Any]:
        """Return every tensor of the file for these inputs, by its name.

        Refuse operators that are not supported and numbers that are not finite.
        """
        known: dict[str, Any] = {**self.file.tensors, **inputs}
        for node in self.file.nodes:
            self.node = node
            operands = [known.get(name) if name else None for name in node.inputs]
            try:
                found = self._run(node, operands)
            except Refusal:
                raise
            except (TooLarge, MemoryError):
                raise self.refusal("has more coefficients than are followed") from None
            except Exception as error:  # e.g. operands with unsuitable sizes or types
                first = (str(error).splitlines() or [type(error).__name__])[0]
                raise self.refusal(f"fails: {excerpt(first)}") from None
            known.update(zip(node.outputs, found, strict=False))
        return known

    def refusal(self, what: str) -> Refusal:
        """Build the refusal of the node."""
        assert self.node is not None
        return refuse(
            codes.OPERATION_UNSUPPORTED,
            f"{self.file.path}: {self.node.place} {what}",
            help="`kcdsl vnnlib supports --onnx-operators` lists what is followed",
        )

    def need(self, true: bool, what: str) -> None:
        """Refuse the node unless a condition holds."""
        if not true:
            raise self.refusal(what)

    def _run(self, node: OnnxNode, operands: list[Any]) -> Sequence[Any]:
        moving = [o for o in operands if isinstance(o, RealTensor)]
        if node.kind in ("Shape", "Size") and moving:
            sizes = np.asarray(moving[0].shape, dtype=np.int64)
            first, last = node.attributes.get("start", 0), node.attributes.get("end")
            return [sizes.prod() if node.kind == "Size" else sizes[first:last]]
        if node.kind == "Dropout":
            self.need(len(operands) < 3 or operands[2] is None or not operands[2], "trains")
            return [operands[0]]
        if not moving and (node.kind in FOLDED or node.kind not in OPERATORS):
            return self._folded(node, operands)
        if node.kind in _MOVES and isinstance(operands[0], RealTensor):
            self.need(len(moving) == 1, "moves elements to places that depend on the input")
            x = operands[0]
            assert x is not None
            return [x.taken(ids) for ids in folded(node, [x.ids, *operands[1:]], self.file.opset)]
        run = OPERATORS.get(node.kind)
        self.need(run is not None, "is an operator without a meaning here")
        assert run is not None
        found = run(self, *operands)
        self.need(found.affine.size <= _MOST, "has too many elements")
        return [found]

    def _folded(self, node: OnnxNode, operands: list[Any]) -> list[Any]:
        if node.kind == "Constant" and "value" not in node.attributes:
            for name, kind in (("float", np.float32), ("int", np.int64)):
                for many in (name, f"{name}s"):
                    if f"value_{many}" in node.attributes:
                        return [np.asarray(node.attributes[f"value_{many}"], dtype=kind)]
        return folded(node, operands, self.file.opset)

    # --- helpers of operators ---------------------------------------------------------------------

    def real(self, operand: Operand) -> RealTensor:
        """Return an operand as a tensor of real numbers; refuse numbers that are not finite."""
        if isinstance(operand, RealTensor):
            return operand
        self.need(operand is not None, "has an operand too few")
        held = np.asarray(operand)
        numbers = held.astype(np.float64)
        self.need(bool(np.isfinite(numbers).all()), "reads numbers that are not finite")
        whole = held.dtype.kind in "iu"
        kind = TensorProto.BOOL if held.dtype == bool else TensorProto.FLOAT
        return RealTensor(constant(numbers), held.shape, TensorProto.INT64 if whole else kind)

    def numbers(self, operand: Operand, what: str) -> NDArray[np.float64]:
        """Return a constant operand; refuse one that depends on the input or is not finite."""
        self.need(isinstance(operand, np.ndarray), f"has {what} that depends on the input")
        found = np.asarray(operand).astype(np.float64)
        self.need(bool(np.isfinite(found).all()), "reads numbers that are not finite")
        return found

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute of the node."""
        assert self.node is not None
        return self.node.attributes.get(name, default)

    def both(self, a: Operand, b: Operand) -> tuple[RealTensor, RealTensor]:
        """Broadcast two operands to their common shape."""
        x, y = self.real(a), self.real(b)
        ids = np.broadcast_arrays(x.ids, y.ids)
        x, y = x.taken(ids[0]), y.taken(ids[1])
        return x, y if isinstance(b, RealTensor) else RealTensor(y.affine, y.shape, x.type)

    def like(self, x: RealTensor, affine: Affine, type: int | None = None) -> RealTensor:
        """Return a tensor of the shape of another."""
        return RealTensor(affine, x.shape, x.type if type is None else type)

    def product(self, x: RealTensor, y: RealTensor) -> RealTensor:
        """Return x y, element by element."""
        for one, other in ((x, y), (y, x)):
            if not other.affine.terms:
                return self.like(x, self.program.times(one.affine, other.affine.constant))
        return self.like(x, self.program.add("mul", x.affine, y.affine))

    def divided(self, x: Affine, divisors: NDArray[np.float64]) -> Affine:
        """Return x divided by constants; refuse a divisor 0."""
        self.need(bool((divisors != 0).all()), "divides by 0")
        mantissas = np.frexp(divisors)[0]
        if bool((np.abs(mantissas) == 0.5).all()) and bool((np.abs(divisors) < 2.0**900).all()):
            return self.program.times(x, 1.0 / divisors)
        exact = tuple(Fraction(1) / Fraction(float(d)) for d in divisors)
        return self.program.add("factor", x, value=exact)

    def maximum(self, x: Affine, y: Affine) -> Affine:
        """Return the larger of two, which is x + relu(y - x)."""
        program = self.program
        return program.plus(x, program.add("relu", program.plus(y, x, -1.0)))

    def summed(self, x: RealTensor, groups: NDArray[Any]) -> Affine:
        """Return the sums of groups [n, k] of elements; those at -1 are left out."""
        rows, columns = np.nonzero(groups >= 0)
        data = np.ones(len(rows))
        shape = (len(groups), x.affine.size)
        return self.program.linear(
            x.affine, sparse.csr_array((data, (rows, groups[rows, columns])), shape=shape)
        )


# --- operators ------------------------------------------------------------------------------------

R = NetworkReader


def _scalar(r: R, x: Operand) -> RealTensor:
    assert r.node is not None
    one = r.real(x)
    return r.like(one, r.program.add(_SCALARS[r.node.kind], one.affine))


def _add(r: R, a: Operand, b: Operand) -> RealTensor:
    x, y = r.both(a, b)
    return r.like(x, r.program.plus(x.affine, y.affine))


def _sub(r: R, a: Operand, b: Operand) -> RealTensor:
    x, y = r.both(a, b)
    return r.like(x, r.program.plus(x.affine, y.affine, -1.0))


def _mul(r: R, a: Operand, b: Operand) -> RealTensor:
    return r.product(*r.both(a, b))


def _div(r: R, a: Operand, b: Operand) -> RealTensor:
    x, y = r.both(a, b)
    r.need(x.type in FLOATS, "divides integers")
    if not y.affine.terms:
        return r.like(x, r.divided(x.affine, y.affine.constant))
    inverse = r.program.add("reciprocal", y.affine)
    return r.product(x, r.like(y, inverse))


def _neg(r: R, a: Operand) -> RealTensor:
    x = r.real(a)
    return r.like(x, r.program.times(x.affine, -np.ones(x.affine.size)))


def _abs(r: R, a: Operand) -> RealTensor:
    x, program = r.real(a), r.program
    return r.like(x, program.plus(program.add("relu", x.affine), _below(r, x.affine)))


def _below(r: R, x: Affine) -> Affine:
    """Return relu(-x)."""
    return r.program.add("relu", r.program.times(x, -np.ones(x.size)))


def _leaky(r: R, a: Operand, slope: Operand = None) -> RealTensor:
    x = r.real(a)
    assert r.node is not None
    if r.node.kind == "PRelu":
        slopes = np.broadcast_to(r.numbers(slope, "a slope"), x.shape).reshape(-1)
    else:
        slopes = np.full(x.affine.size, float(np.float32(r.attribute("alpha", 0.01))))
    low = r.program.times(_below(r, x.affine), slopes)
    return r.like(x, r.program.plus(r.program.add("relu", x.affine), low, -1.0))


def _clip(r: R, a: Operand, low: Operand = None, high: Operand = None) -> RealTensor:
    x = r.real(a)
    found, size = x.affine, x.affine.size
    low = r.attribute("min", None) if low is None else low
    high = r.attribute("max", None) if high is None else high
    # Clip is min(max(x, low), high)
    for bound, sign in ((low, 1.0), (high, -1.0)):
        if bound is not None and not np.array_equal(np.asarray(bound), -sign * np.inf):
            value = r.numbers(np.asarray(bound), "a bound")
            end = constant(np.full(size, sign * float(value.reshape(()))))
            largest = r.maximum(r.program.times(found, np.full(size, sign)), end)
            found = r.program.times(largest, np.full(size, sign))
    return r.like(x, found)


def _extreme(r: R, *operands: Operand) -> RealTensor:
    assert r.node is not None
    sign = 1.0 if r.node.kind == "Max" else -1.0
    found = r.real(operands[0])
    for other in operands[1:]:
        x, y = r.both(found, other)
        signs = np.full(x.affine.size, sign)
        one, two = (r.program.times(t.affine, signs) for t in (x, y))
        found = r.like(x, r.program.times(r.maximum(one, two), signs))
    return found


def _pow(r: R, a: Operand, b: Operand) -> RealTensor:
    if not isinstance(a, RealTensor):
        base, x = r.both(b, a)[1].affine.constant, r.both(b, a)[0]
        r.need(isinstance(a, np.ndarray) and bool((base > 0).all()), "has a base below 0")
        return r.like(x, r.program.add("power-of", x.affine, value=base))
    held = r.numbers(b, "an exponent")
    x, y = r.both(a, RealTensor(constant(held), held.shape, a.type))
    exponents, groups = np.unique(y.affine.constant, return_inverse=True)
    order = np.argsort(groups, kind="stable")
    parts = [
        _raised(r, x.affine.rows(np.flatnonzero(groups == i)), float(e))
        for i, e in enumerate(exponents)
    ]
    return r.like(x, joined(parts).rows(np.argsort(order)))


def _raised(r: R, x: Affine, exponent: float) -> Affine:
    """Return x to an integer power or to ±1/2."""
    size = abs(exponent)
    r.need(size == 0.5 or (size == int(size) and size <= 32), "has an exponent without a meaning")
    if exponent == 0:
        return constant(np.ones(x.size))
    if size == 0.5:
        found = r.program.add("sqrt", x)
    else:
        found = x if size == 1 else r.program.add("power", x, value=int(size))
    return r.program.add("reciprocal", found) if exponent < 0 else found


def _matmul(r: R, a: Operand, b: Operand) -> RealTensor:
    x, y = r.real(a), r.real(b)
    left, right = x.ids, y.ids
    left = left[None] if left.ndim == 1 else left
    right = right[:, None] if right.ndim == 1 else right
    r.need(left.shape[-1] == right.shape[-2], "multiplies rows and columns of other lengths")
    outer = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*outer, left.shape[-2], right.shape[-1], left.shape[-1])
    if math.prod(shape) > 1 << 25:
        raise TooLarge
    i = np.broadcast_to(left[..., :, None, :], shape).reshape(-1, shape[-1])
    j = np.broadcast_to(np.swapaxes(right, -1, -2)[..., None, :, :], shape).reshape(-1, shape[-1])
    found = shape[:-1]
    found = found[:-2] + found[-1:] if len(x.shape) == 1 else found
    found = found[:-1] if len(y.shape) == 1 else found
    return RealTensor(_products(r, x, i, y, j), tuple(found), x.type if x.affine.terms else y.type)


def _products(r: R, x: RealTensor, i: NDArray[Any], y: RealTensor, j: NDArray[Any]) -> Affine:
    """Return Σ x[i] y[j] over groups [n, k] of elements."""
    if x.affine.terms and y.affine.terms:
        each = r.product(x.taken(i), y.taken(j))
        return r.summed(each, each.ids)
    if not x.affine.terms:
        x, i, y, j = y, j, x, i
    data = y.affine.constant[j.reshape(-1)]
    rows = np.repeat(np.arange(len(i)), i.shape[1])
    shape = (len(i), x.affine.size)
    coo = sparse.coo_array((data, (rows, i.reshape(-1))), shape=shape)
    return r.program.linear(x.affine, coo)


def _gemm(r: R, a: Operand, b: Operand, c: Operand = None) -> RealTensor:
    x, y = r.real(a), r.real(b)
    x = x.taken(x.ids.T) if r.attribute("transA", 0) else x
    y = y.taken(y.ids.T) if r.attribute("transB", 0) else y
    found = _matmul(r, x, y)
    alpha, beta = (float(np.float32(r.attribute(name, 1.0))) for name in ("alpha", "beta"))
    found = r.like(found, r.program.times(found.affine, np.full(found.affine.size, alpha)))
    if c is None:
        return found
    _, bias = r.both(found, c)
    scaled = r.program.times(bias.affine, np.full(bias.affine.size, beta))
    return r.like(found, r.program.plus(found.affine, scaled))


def _windows(r: R, ids: NDArray[Any], kernel: Sequence[int], ceil: bool) -> NDArray[Any]:
    """Return the element indices under windows: [N, C, *positions, *kernel], -1 for padding."""
    dims = len(kernel)
    strides = r.attribute("strides", [1] * dims)
    dilations = r.attribute("dilations", [1] * dims)
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = list(r.attribute("pads", [0] * 2 * dims))
    auto = r.attribute("auto_pad", "NOTSET")
    r.need(auto == "NOTSET" or not any(pads), "is padded both by numbers and automatically")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        r.need(set(dilations) <= {1}, "has gaps and automatic padding, of which runtimes differ")
        for d in range(dims):
            need = (-(-ids.shape[2 + d] // strides[d]) - 1) * strides[d] + extents[d]
            total = max(0, need - ids.shape[2 + d])
            small, large = total // 2, total - total // 2
            pads[d], pads[dims + d] = (small, large) if auto == "SAME_UPPER" else (large, small)
    else:
        r.need(auto in ("NOTSET", "VALID"), "has another padding")
    r.need(min(pads, default=0) >= 0 and min(strides) > 0, "has such windows")
    for d in range(dims if ceil else 0):
        # the last window must begin in the elements or the leading padding
        begin = ids.shape[2 + d] + pads[d]
        short = (begin + pads[dims + d] - extents[d]) % strides[d]
        next_ = begin + pads[dims + d] - extents[d] - short + strides[d]
        pads[dims + d] += strides[d] - short if short and next_ < begin else 0
    around = [(0, 0), (0, 0), *zip(pads[:dims], pads[dims:], strict=True)]
    padded = np.pad(ids, around, constant_values=-1)
    axes = tuple(range(2, 2 + dims))
    found = np.lib.stride_tricks.sliding_window_view(padded, extents, axes)
    steps = (slice(None, None, s) for s in strides)
    return found[(slice(None), slice(None), *steps, *(slice(None, None, d) for d in dilations))]


def _conv(r: R, a: Operand, w: Operand, b: Operand = None) -> RealTensor:
    x, weight = r.real(a), r.numbers(w, "a kernel")
    groups, outs = r.attribute("group", 1), weight.shape[0]
    windows = _windows(r, x.ids, weight.shape[2:], False)
    dims = weight.ndim - 2
    n, places = windows.shape[0], windows.shape[2 : 2 + dims]
    r.need(x.shape[1] == groups * weight.shape[1] and outs % groups == 0, "has other channels")
    if n * outs * math.prod(places) * math.prod(weight.shape[1:]) > 1 << 25:
        raise TooLarge
    # [N, groups, positions, inputs of a group and kernel]
    per = windows.reshape(n, groups, weight.shape[1], math.prod(places), -1)
    per = np.moveaxis(per, 2, 3).reshape(n, groups, math.prod(places), -1)
    kernels = weight.reshape(groups, outs // groups, -1)
    ids = np.broadcast_to(
        per[:, :, None], (n, groups, outs // groups, *per.shape[2:])
    )  # [N, groups, outputs of a group, positions, k]
    data = np.broadcast_to(kernels[None, :, :, None, :], ids.shape)
    flat, values = ids.reshape(-1, ids.shape[-1]), data.reshape(-1, ids.shape[-1])
    rows, columns = np.nonzero(flat >= 0)
    shape = (len(flat), x.affine.size)
    matrix = sparse.coo_array((values[rows, columns], (rows, flat[rows, columns])), shape=shape)
    found = RealTensor(r.program.linear(x.affine, matrix), (n, outs, *places), x.type)
    if b is None:
        return found
    bias = r.numbers(b, "a bias").reshape(1, outs, *(1,) * dims)
    return _add(r, found, bias)


def _pool(r: R, a: Operand) -> RealTensor:
    assert r.node is not None
    x = r.real(a)
    kernel = r.attribute("kernel_shape", None) or list(x.shape[2:])
    ceil = bool(r.attribute("ceil_mode", 0))
    r.need(not ceil or r.node.kind == "MaxPool", "rounds the number of windows up")
    windows = _windows(r, x.ids, kernel, ceil)
    shape = windows.shape[: 2 + len(kernel)]
    groups = windows.reshape(math.prod(shape), -1)
    if r.node.kind != "MaxPool":
        counted = r.attribute("count_include_pad", 0)
        counts = np.full(len(groups), groups.shape[1]) if counted else (groups >= 0).sum(1)
        found = r.divided(r.summed(x, groups), counts.astype(np.float64))
        return RealTensor(found, shape, x.type)
    r.need(len(r.node.outputs) == 1, "returns places")
    r.need(bool((groups >= 0).any(1).all()), "has a window without elements")
    first = groups.max(1)  # an index that is not padding
    groups = np.where(groups >= 0, groups, first[:, None])
    return RealTensor(_largest(r, x, groups), shape, x.type)


def _largest(r: R, x: RealTensor, groups: NDArray[Any]) -> Affine:
    """Return the maximum of groups [n, k] of elements, by pairs."""
    parts = [x.affine.rows(column) for column in groups.T]
    while len(parts) > 1:
        pairs = itertools.zip_longest(parts[::2], parts[1::2])
        parts = [one if two is None else r.maximum(one, two) for one, two in pairs]
    return parts[0]


def _axis(r: R, axis: int, rank: int) -> int:
    r.need(-rank <= axis < rank, "has no such dimension")
    return axis % rank


def _reduce(r: R, a: Operand, axes: Operand = None) -> RealTensor:
    assert r.node is not None
    x, kind = r.real(a), r.node.kind
    given = r.attribute("axes", None) if axes is None else np.asarray(axes).reshape(-1).tolist()
    if not given and r.attribute("noop_with_empty_axes", 0):
        return x
    rank = len(x.shape)
    r.need(rank > 0, "has no dimension")
    over = sorted({_axis(r, int(d), rank) for d in given or range(rank)})
    kept = [d for d in range(rank) if d not in over]
    sizes = [x.shape[d] for d in kept]
    groups = x.ids.transpose(*kept, *over).reshape(math.prod(sizes), -1)
    r.need(groups.shape[1] > 0, "reduces nothing")
    if r.attribute("keepdims", 1):
        sizes = [1 if d in over else n for d, n in enumerate(x.shape)]
    if kind in ("ReduceMax", "ReduceMin"):
        signs = np.full(x.affine.size, 1.0 if kind == "ReduceMax" else -1.0)
        turned = r.like(x, r.program.times(x.affine, signs))
        found = r.program.times(_largest(r, turned, groups), signs[: len(groups)])
    else:
        found = r.summed(x, groups)
        if kind == "ReduceMean":
            found = r.divided(found, np.full(len(groups), float(groups.shape[1])))
    return RealTensor(found, tuple(sizes), x.type)


def _norm(r: R, a: Operand, *parameters: Operand) -> RealTensor:
    x = r.real(a)
    r.need(not r.attribute("training_mode", 0) and len(parameters) == 4, "trains")
    r.need(r.attribute("spatial", 1) == 1, "has numbers of its own for each place")
    epsilon = float(np.float32(r.attribute("epsilon", 1e-5)))
    shape = (1, -1, *(1,) * (len(x.shape) - 2))
    scale, bias, mean, variance = (
        np.broadcast_to(r.numbers(p, "a parameter").reshape(shape), x.shape).reshape(-1)
        for p in parameters
    )
    under = [Fraction(float(v)) + Fraction(epsilon) for v in variance]
    r.need(min(under, default=Fraction(1)) > 0, "takes the root of a number below 0")
    factors = tuple(Scaled(Fraction(float(s)), v) for s, v in zip(scale, under, strict=True))
    centred = r.program.plus(x.affine, constant(mean), -1.0)
    found = r.program.add("factor", centred, value=factors)
    return r.like(x, r.program.plus(found, constant(bias)))


@dataclass(frozen=True, slots=True)
class Scaled:
    """The number `scale` / sqrt(`under`)."""

    scale: Fraction
    under: Fraction

    @property
    def exact(self) -> Fraction | None:
        """Return the number; None if it is irrational."""
        top, bottom = math.isqrt(self.under.numerator), math.isqrt(self.under.denominator)
        if top**2 != self.under.numerator or bottom**2 != self.under.denominator:
            return None
        return self.scale * Fraction(bottom, top)


def _softmax(r: R, a: Operand) -> RealTensor:
    x = r.real(a)
    axis = _axis(r, int(r.attribute("axis", -1 if r.file.opset >= 13 else 1)), len(x.shape))
    ids = np.moveaxis(x.ids, axis, -1)
    r.need(r.file.opset >= 13 or axis == len(x.shape) - 1, "is over several dimensions")
    n = x.shape[axis]
    r.need(n <= 64, "has more than 64 elements")
    if n == 1:
        return r.like(x, constant(np.ones(x.affine.size)))
    # p_i = 1 / (1 + Σ exp(x_j - x_i)) over the other j: each difference occurs once
    rows = ids.reshape(-1, n)
    if n == 2:  # the second is 1 minus the first
        rows = rows[:, :1]
        others = ids.reshape(-1, 2)[:, 1:]
    else:
        others = np.stack([np.delete(ids.reshape(-1, n), i, 1) for i in range(n)], 1)
        others = others.reshape(-1, n - 1)
    own = np.broadcast_to(rows.reshape(-1, 1), others.shape)
    away = r.program.plus(x.affine.rows(others.reshape(-1)), x.affine.rows(own.reshape(-1)), -1.0)
    powers = RealTensor(r.program.add("exp", away), others.shape, x.type)
    found = r.program.add("share", r.summed(powers, powers.ids))
    if n == 2:
        rest = r.program.plus(constant(np.ones(found.size)), found, -1.0)
        pairs = np.arange(2 * found.size).reshape(2, -1).T
        found = joined([found, rest]).rows(pairs.reshape(-1))
    back = np.empty(x.affine.size, dtype=np.int64)
    back[ids.reshape(-1)] = np.arange(ids.size)
    return r.like(x, found.rows(back))


def _concat(r: R, *operands: Operand) -> RealTensor:
    parts = [r.real(o) for o in operands]
    starts = np.cumsum([0, *(p.affine.size for p in parts)])
    ids = [p.ids + start for p, start in zip(parts, starts, strict=False)]
    axis = int(r.attribute("axis", 0))
    whole = RealTensor(joined([p.affine for p in parts]), (int(starts[-1]),), parts[0].type)
    return whole.taken(np.concatenate(ids, axis))


def _pad(
    r: R, a: Operand, pads: Operand, value: Operand = None, axes: Operand = None
) -> RealTensor:
    x = r.real(a)
    given = r.numbers(pads, "a padding").astype(int).reshape(2, -1)
    r.need(axes is None and r.attribute("mode", "constant") == "constant", "has such a padding")
    r.need(bool((given >= 0).all()), "takes elements away")
    fill = 0.0 if value is None else float(r.numbers(value, "a value").reshape(()))
    more = joined([x.affine, constant(np.asarray([fill]))])
    ids = np.pad(x.ids, list(zip(*given.tolist(), strict=True)), constant_values=x.affine.size)
    return RealTensor(more.rows(ids.reshape(-1)), ids.shape, x.type)


def _compare(r: R, a: Operand, b: Operand) -> RealTensor:
    assert r.node is not None
    x, y = r.both(a, b)
    kind, program = r.node.kind, r.program
    if kind in ("Less", "GreaterOrEqual"):
        x, y = y, x
    away = program.plus(x.affine, y.affine, -1.0)
    if kind == "Equal":
        return r.like(x, program.add("zero", away), TensorProto.BOOL)
    found = program.add("positive", away)  # x > y, or y < x
    if kind in ("GreaterOrEqual", "LessOrEqual"):
        found = program.plus(constant(np.ones(found.size)), found, -1.0)
    return r.like(x, found, TensorProto.BOOL)


def _logic(r: R, a: Operand, b: Operand = None) -> RealTensor:
    assert r.node is not None
    if r.node.kind == "Not":
        x = r.real(a)
        return r.like(x, r.program.plus(constant(np.ones(x.affine.size)), x.affine, -1.0))
    x, y = r.both(a, b)
    both = r.product(x, y).affine
    if r.node.kind == "And":
        return r.like(x, both, TensorProto.BOOL)
    either = r.program.plus(r.program.plus(x.affine, y.affine), both, -1.0)
    return r.like(x, either, TensorProto.BOOL)


def _where(r: R, c: Operand, a: Operand, b: Operand) -> RealTensor:
    x, y = r.both(a, b)
    if isinstance(c, np.ndarray):
        picks, ids = np.broadcast_arrays(np.asarray(c, dtype=bool), x.ids)
        both = joined([x.affine, y.affine])
        found = np.where(picks, ids, ids + x.affine.size)
        return RealTensor(both.rows(found.reshape(-1)), found.shape, x.type)
    chosen, x = r.both(c, x)
    x, y = r.both(x, y)
    return r.like(x, r.program.add("select", chosen.affine, x.affine, y.affine))


def _cast(r: R, a: Operand) -> RealTensor:
    x, to = r.real(a), int(r.attribute("to", 0))
    if to == TensorProto.BOOL and x.type != TensorProto.BOOL:
        zero = r.program.add("zero", x.affine)
        return r.like(x, r.program.plus(constant(np.ones(zero.size)), zero, -1.0), to)
    if to in _WHOLE and x.type in FLOATS:
        return r.like(x, r.program.add("truncate", x.affine), to)
    r.need(to in (*FLOATS, *_WHOLE, TensorProto.BOOL), "casts to a type without a meaning here")
    return r.like(x, x.affine, to)


OPERATORS: Mapping[str, Callable[..., RealTensor]] = {
    **dict.fromkeys(_SCALARS, _scalar),
    "Add": _add,
    "Sub": _sub,
    "Mul": _mul,
    "Div": _div,
    "Neg": _neg,
    "Abs": _abs,
    "LeakyRelu": _leaky,
    "PRelu": _leaky,
    "Clip": _clip,
    "Max": _extreme,
    "Min": _extreme,
    "Pow": _pow,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalAveragePool": _pool,
    "BatchNormalization": _norm,
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"), _reduce),
    "Softmax": _softmax,
    "Concat": _concat,
    "Pad": _pad,
    "Where": _where,
    "Cast": _cast,
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), _compare),
    **dict.fromkeys(("And", "Or", "Not"), _logic),
}
"""The operators that compute; `_MOVES` move elements."""


def operators() -> list[str]:
    """Return the names of all supported operators."""
    more: Iterable[str] = ("Constant", "ConstantOfShape", "Dropout", "Shape", "Size")
    return sorted({*OPERATORS, *_MOVES, *more})
