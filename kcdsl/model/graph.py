"""Block graphs: operations on named tensors, the form in which a block is verified.

A graph has no batch dimension: the block input is one sequence, shape [T, D]. Shapes are static.
The leaves are the block input, parameters (named by their checkpoint key), constants (tables,
masks) and token ids. Nodes are in topological order.

| op | inputs | attrs | value |
|---|---|---|---|
| input | – | – | the block input, float, [T, D] |
| param | – | key, transposed (optional: true) | a checkpoint tensor, or its transpose |
| constant | – | key | an array of `constants` (float32, or bool for masks) |
| cast | x | – | x, in the node's format |
| cache | x | part, source | x: keys or values, stored and read back by a kernel with a kv_cache |
| quantise | x | tensor | x: a tensor of the program, which a kernel may quantise |
| embedding | weight | ids (list of int) | weight[ids] |
| linear | x, weight[, bias] | – | x @ weight.T + bias |
| matmul | a, b | – | a @ b over the last two dimensions, leading dimensions broadcast |
| add, sub, mul | a, b | – | elementwise, broadcast |
| scale | x | factor | x * factor |
| divide | x | divisor | x / divisor |
| shift | x | offset | x + offset |
| neg, relu, tanh, silu | x | – | elementwise |
| gelu | x | approximate: "tanh" (optional) | the erf form, or that by tanh |
| view | x | split, ranges, order, sizes | x as `split`, [ranges].permute(order).expand(sizes) |
| concat | x… | dim | |
| softmax | scores[, mask] | – | last dimension; mask is a bool constant, False = masked out |
| rms_norm | x[, weight] | eps, form, parts | x / sqrt(mean(x²) + eps) * weight, last dimension |
| layer_norm | x[, weight, bias] | eps, form, parts | (x - mean) / sqrt(var + eps) * weight + bias |
| route | logits [T, E] | experts | logits: those of a router that chooses these experts |
| rope | x, cos, sin | – | x * cos + concat(-x[…, h:], x[…, :h]) * sin, h = half the last dim |

`view` moves elements (`View`) and reads the result in the shape of the node. `ranges` has a
[start, stop, step] for each dimension of `split`; `ranges`, `order` and `sizes` are left out where
they change nothing.

`experts` has a list of k numbers in ascending order for each position. A bound assumes that both
kernels choose them for every input; prover and checker both derive that.

`role` marks the parts of an attention pattern, to which numerics specifications refer:
"scores" (the product q·kᵀ and every op between it and the softmax), "probabilities" (the softmax),
"context" (the product with the values); otherwise "".

`format` is the format of the stored result: "" is the kernel's own for that operation
(`Numerics.stored_format`); float64, float32, float16 or bfloat16 is *pinned*: the program computes
and stores the result in that format, whatever the compute format of the kernel is
(`Numerics.pinned`). A constant of format "" is rounded to the kernel's compute format, a pinned one
is exact. Operations that only move elements store nothing, nor do neg, relu and quantise: their
format is not read. Parameters, embeddings and inputs have none.

`form` "fused" (or absent) is one operation that rounds its result once; "written" is a sequence of
operations that each store a result: `parts` lists [part, format] in the order of the program, the
format as above (docs/proofs/relational-interval.md, section 6). silu and rope may be written too,
without parts: their sigmoid and their products are stored in the format of the node.

`cache` precedes a product that reads keys (part "keys", [.., d, T]) or values ("values",
[.., T, d]), if one of two kernels has a quantised cache; `source` is the key of the weight of the
only linear that computes them, or "".

`quantise` has the program's name of a tensor. A kernel with a quantiser of that name quantises the
tensor once, and all readers use the dequantised codes.

Float attributes are exact doubles. A kernel may round a factor, a divisor or an offset to the
format of the result first, or not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import rfc8785
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.model.lowering.drafts import DraftNode

PINNED = ("float64", "float32", "float16", "bfloat16")
"""Formats that a node may name."""

GRAPH_SCHEMA = "kcdsl.block-graph/3"


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `attrs` is plain JSON data (floats allowed)."""

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    role: str = ""
    format: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; floats become hexadecimal strings, which are exact."""
        return {
            "name": self.name,
            "op": self.op,
            "inputs": list(self.inputs),
            "shape": list(self.shape),
            "attrs": {k: v.hex() if isinstance(v, float) else v for k, v in self.attrs.items()},
            "role": self.role,
            "format": self.format,
        }


@dataclass(frozen=True)
class BlockGraph:
    """A block: its nodes in order, its output and its constants.

    `input_shape` is [T, D] for a block on hidden states and None for a block on token ids.
    """

    block: str
    nodes: tuple[Node, ...]
    output: str
    constants: Mapping[str, NDArray[Any]]
    input_shape: tuple[int, ...] | None

    def node(self, name: str) -> Node:
        """Return the node of this name."""
        return next(n for n in self.nodes if n.name == name)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the checkpoint keys that the block reads, sorted."""
        return tuple(sorted({n.attrs["key"] for n in self.nodes if n.op == "param"}))

    def to_json(self) -> dict[str, Any]:
        """Return JSON data with each constant replaced by its digest."""
        return {
            "schema": GRAPH_SCHEMA,
            "block": self.block,
            "nodes": [n.to_json() for n in self.nodes],
            "output": self.output,
            "constants": {k: array_digest(self.constants[k]) for k in sorted(self.constants)},
            "input_shape": list(self.input_shape) if self.input_shape is not None else None,
        }

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the canonical JSON."""
        return hashlib.sha256(rfc8785.dumps(self.to_json())).hexdigest()


def weight_of(node: Node, nodes: Mapping[str, Node]) -> str:
    """Return the checkpoint key of the weight of a linear, "" for any other node."""
    if node.op != "linear" or nodes[node.inputs[1]].op != "param":
        return ""
    return str(nodes[node.inputs[1]].attrs["key"])


def array_digest(array: NDArray[Any]) -> str:
    """Return the sha256 (hex) of "dtype|shape|" and the little-endian bytes of an array."""
    shape = ",".join(str(n) for n in array.shape)
    data = np.ascontiguousarray(array)
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    digest = hashlib.sha256(f"{data.dtype.name}|{shape}|".encode())
    digest.update(little.data)
    return digest.hexdigest()


# --- views: the operation `view`, which moves elements and rounds nothing -------------------------

Range = tuple[int, int, int]
"""Start, stop and step along one dimension."""


@dataclass(frozen=True, slots=True)
class View:
    """x.reshape(split)[ranges].permute(order).expand(sizes).reshape(shape): any single
    rearrangement of one operand, and many sequences of rearrangements.

    `ranges` has one range for each dimension of `split`.
    """

    split: tuple[int, ...]
    ranges: tuple[Range, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, node: Node | DraftNode) -> View:
        """Read the attributes of a node `view`; missing ones are the identity."""
        found, attrs = cls.reshaped(node.attrs["split"]), node.attrs
        if "ranges" in attrs:
            found = found._cut(attrs["ranges"])
        if "order" in attrs:
            found = found._permuted(attrs["order"])
        sizes = tuple(attrs["sizes"]) if "sizes" in attrs else found.sizes
        return replace(found, sizes=sizes, shape=node.shape)

    @classmethod
    def reshaped(cls, shape: Sequence[int]) -> View:
        """Return the view that reads x in another shape."""
        shape = tuple(shape)
        whole = tuple((0, size, 1) for size in shape)
        return cls(shape, whole, tuple(range(len(shape))), shape, shape)

    @classmethod
    def permuted(cls, shape: Sequence[int], dims: Sequence[int]) -> View:
        """Return the view of x of this shape with its dimensions in another order."""
        return cls.reshaped(shape)._permuted([d % len(shape) for d in dims])

    @classmethod
    def expanded(cls, shape: Sequence[int], sizes: Sequence[int]) -> View:
        """Return the view of x of this shape, broadcast to `sizes`."""
        split = (1,) * (len(sizes) - len(shape)) + tuple(shape)
        return replace(cls.reshaped(split), sizes=tuple(sizes), shape=tuple(sizes))

    @classmethod
    def sliced(cls, shape: Sequence[int], dim: int, start: int, stop: int, step: int = 1) -> View:
        """Return the view of start:stop:step along one dimension of x of this shape."""
        ranges = [(0, size, 1) for size in shape]
        ranges[dim] = (start, stop, step)
        return cls.reshaped(shape)._cut(ranges)

    def _cut(self, ranges: Sequence[Sequence[int]]) -> View:
        taken = tuple(len(range(*each)) for each in ranges)
        chosen = tuple((int(a), int(b), int(c)) for a, b, c in ranges)
        return replace(self, ranges=chosen, sizes=taken, shape=taken)

    def _permuted(self, order: Sequence[int]) -> View:
        sizes = tuple(self.sizes[d] for d in order)
        return replace(self, order=tuple(order), sizes=sizes, shape=sizes)

    @property
    def turned(self) -> tuple[int, ...]:
        """Return the shape before elements are repeated."""
        return tuple(len(range(*self.ranges[d])) for d in self.order)

    @property
    def copies(self) -> int:
        """Return the number of copies in the result of each element that is read."""
        return math.prod(self.sizes) // max(1, math.prod(self.turned))

    @property
    def cuts(self) -> bool:
        """Return whether some elements of x are left out."""
        return any(each != (0, size, 1) for each, size in zip(self.ranges, self.split, strict=True))

    @property
    def keeps_order(self) -> bool:
        """Return whether the view changes at most the shape."""
        return self == replace(View.reshaped(self.split), shape=self.shape)

    @property
    def attrs(self) -> dict[str, Any]:
        """Return the attributes of a node without those that are the identity."""
        found: dict[str, Any] = {"split": list(self.split)}
        if self.cuts:
            found["ranges"] = [list(each) for each in self.ranges]
        if self.order != tuple(range(len(self.order))):
            found["order"] = list(self.order)
        if self.sizes != self.turned:
            found["sizes"] = list(self.sizes)
        return found if len(found) > 1 else {"split": list(self.shape)}

    def after(self, first: View) -> View | None:
        """Return the composition of `first` and then this view; None where it is no single view."""
        if first.keeps_order:
            return self
        return replace(first, shape=self.shape) if self.keeps_order else None

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index of x in the shape `split`."""
        return tuple(slice(*each) for each in self.ranges)

    def moved(self, x: Tensor, front: int = 0) -> Tensor:
        """Return x rearranged by the view.

        Args:
            x: the operand, with `front` leading dimensions that the view does not move.
            front: the number of leading dimensions.
        """
        lead = x.shape[:front]
        whole = (slice(None),) * front
        x = x.reshape(*lead, *self.split)[(*whole, *self.slices)]
        x = x.permute(*range(front), *(front + d for d in self.order))
        return x.expand(*lead, *self.sizes).reshape(*lead, *self.shape).contiguous()
