"""Block graphs as a proof carries them: parsing, canonical digest, wiring."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs import strict_json
from kcdsl_certs.recheck.graphs.strict_json import Reader, integer

GRAPH_SCHEMA = "kcdsl.block-graph/3"
MOST_NODES = 100_000
MOST_ELEMENTS = 2**26
MOST_DIMENSIONS = 8
_PINNED = ("", "float64", "float32", "float16", "bfloat16")
_FORMS = ("rms_norm", "layer_norm", "silu", "rope")
_UNSTORED = ("input", "param", "embedding")
_ROLES = ("", "scores", "probabilities", "context")
_BYTES = {"float64": 8, "float32": 4, "bool": 1, "int64": 8}


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the proof: dtype name, shape and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of "dtype|shape|" and the bytes."""
        return array_digest(self.dtype, self.shape, self.data)


def array_digest(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> str:
    """Return the sha256 (hex) of "dtype|shape|" and little-endian bytes."""
    found = array_hash(dtype, shape)
    found.update(data)
    return found.hexdigest()


def array_hash(dtype: str, shape: tuple[int, ...]) -> hashlib._Hash:
    """Return a sha256 object fed with "dtype|shape|", to be updated with little-endian bytes."""
    return hashlib.sha256(f"{dtype}|{','.join(map(str, shape))}|".encode())


@dataclass(frozen=True, slots=True)
class Node:
    """One operation; `attrs` reads the attributes strictly. `format` names the format in which the
    result is stored, "" for the kernel's own. `written`: the program writes the operation out as
    several, a norm with the formats of its `parts`, by their names."""

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    attrs: Reader
    role: str
    format: str = ""
    written: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """A block graph with its constants. The order of nodes is checked, the operations are not."""

    name: str
    nodes: tuple[Node, ...]
    output: str
    constants: Mapping[str, Array]
    input_shape: tuple[int, ...] | None

    @cached_property
    def named(self) -> Mapping[str, Node]:
        """Return the nodes by their names."""
        return {node.name: node for node in self.nodes}

    @property
    def weights(self) -> frozenset[str]:
        """Return the param nodes that are read only as weights of linears."""
        weights: set[str] = set()
        plain: set[str] = set()
        for node in self.nodes:
            for place, name in enumerate(node.inputs):
                (weights if node.op == "linear" and place == 1 else plain).add(name)
        return frozenset(weights - plain)

    @property
    def parameters(self) -> frozenset[str]:
        """Return the checkpoint keys that the block reads."""
        return frozenset(n.attrs.text("key") for n in self.nodes if n.op == "param")

    @property
    def transposed(self) -> frozenset[str]:
        """Return the checkpoint keys of matrices that the block reads transposed.

        Raises Rejected "graph/field" where one is read both ways, or the attribute is not true.
        """
        read: dict[str, bool] = {}
        for node in self.nodes:
            if node.op == "param":
                key, turned = node.attrs.text("key"), node.attrs.has("transposed")
                if turned and node.attrs.raw("transposed") is not True:
                    raise node.attrs.fail("'transposed' must be true or absent")
                if read.setdefault(key, turned) != turned:
                    raise node.attrs.fail(f"{key[:80]!r} is read transposed and as it is")
        return frozenset(key for key, turned in read.items() if turned)


def parse_block(digest: str, record: Reader, constants: Mapping[str, Array]) -> Block:
    """Return the block of a graph record whose canonical JSON has this digest.

    Raises Rejected "graph/digest", "graph/constant-digest", "graph/field", "graph/order" or
    "graph/size".
    """
    place = f"graph {digest[:12]}"
    value = record.raw("graph")
    graph = Reader(value, place, "graph/field").exactly(
        "schema", "block", "nodes", "output", "constants", "input_shape"
    )
    graph.choice("schema", (GRAPH_SCHEMA,))
    if hashlib.sha256(strict_json.canonical(value)).hexdigest() != digest:
        raise Rejected("graph/digest", f"{place} does not have the digest that is its key")
    _check_constants(graph, constants)
    nodes = tuple(_node(item, place) for item in graph.items("nodes"))
    output = graph.text("output")
    shape = graph.raw("input_shape")
    block = Block(
        name=graph.text("block"),
        nodes=nodes,
        output=output,
        constants=constants,
        input_shape=None if shape is None else graph.integers("input_shape", 1),
    )
    _check_order(block, graph)
    return block


def parse_array(value: object, place: str) -> Array:
    """Return an array record; refuse a wrong number of bytes and bool bytes other than 0 and 1.

    Raises Rejected "document/array".
    """
    record = Reader(value, place, "document/array").exactly("dtype", "shape", "data")
    dtype = record.choice("dtype", tuple(_BYTES))
    shape = record.integers("shape", 0)
    data = base64_of(record, record.text("data"))
    if len(shape) > MOST_DIMENSIONS or len(data) != math.prod(shape) * _BYTES[dtype]:
        raise record.fail("has data of a size other than its shape")
    if dtype == "bool" and data.translate(None, b"\x00\x01"):
        raise record.fail("has bool bytes other than 0 and 1")
    return Array(dtype, shape, data)


def base64_of(record: Reader, text: object) -> bytes:
    """Return the bytes of a canonical base64 text in a record."""
    import base64
    import binascii

    if not isinstance(text, str):
        raise record.fail("has data that is no text")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise record.fail("has data that is not base64") from None
    if base64.b64encode(data).decode() != text:
        raise record.fail("has data that is not canonical base64")
    return data


def _check_constants(graph: Reader, constants: Mapping[str, Array]) -> None:
    digests = graph.entries("constants")
    if set(digests) != set(constants):
        raise Rejected("graph/constant-digest", f"{graph.place}: constants missing or unknown")
    for key, array in constants.items():
        if digests[key] != array.digest:
            raise Rejected("graph/constant-digest", f"{graph.place}: constant {key!r}")


def _node(value: object, place: str) -> Node:
    record = Reader(value, f"{place} node", "graph/field").exactly(
        "name", "op", "inputs", "shape", "attrs", "role", "format"
    )
    name = record.text("name")
    record.place = f"{place} node {name[:80]!r}"
    if "\0" in name:  # separates the parts of the names of readings (affine/form.py)
        raise record.fail("must have a name without NUL")
    inputs = record.items("inputs")
    if not all(isinstance(i, str) for i in inputs):
        raise record.fail("'inputs' must be a list of names")
    shape = record.integers("shape", 1)
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) > MOST_ELEMENTS:
        raise Rejected("graph/size", f"{record.place} has shape {list(shape)[:10]}")
    op, format = record.text("op"), record.choice("format", _PINNED)
    if format and op in _UNSTORED:
        raise record.fail(f"{op!r} stores nothing, in no format")
    attrs = record.reader("attrs")
    written, parts = _form(op, format, len(inputs), attrs)
    plain = {k: v for k, v in attrs.value.items() if not (op in _FORMS and k in ("form", "parts"))}
    return Node(
        name=name,
        op=op,
        inputs=tuple(inputs),
        shape=shape,
        attrs=Reader(plain, attrs.place, attrs.reason),
        role=record.choice("role", _ROLES),
        format=format,
        written=written,
        parts=parts,
    )


def _form(op: str, format: str, inputs: int, attrs: Reader) -> tuple[bool, Mapping[str, str]]:
    """Return whether an operation is written out, and the formats of its parts.

    Raises Rejected "graph/field" unless the parts are those of one of `_ways`.
    """
    norm = op in ("rms_norm", "layer_norm")
    stated = op in _FORMS and attrs.has("form")
    written = stated and attrs.choice("form", ("fused", "written")) == "written"
    if not (written and norm):
        if op in _FORMS and attrs.has("parts"):
            raise attrs.fail("has parts that nothing reads")
        return written, {}
    parts: dict[str, str] = {}
    for item in attrs.items("parts"):
        if not isinstance(item, list) or len(item) != 2 or item[1] not in _PINNED:
            raise attrs.fail("'parts' must be pairs of a part and its format")
        parts[str(item[0])] = item[1]
    if len(parts) != len(attrs.items("parts")) or tuple(parts) not in _ways(op, inputs):
        raise attrs.fail(f"'parts' are not those of a {op}: {', '.join(parts)[:200]}")
    if parts[list(parts)[-1]] != format:
        raise attrs.fail("the last of 'parts' is the result, and has another format")
    return True, parts


def _ways(op: str, inputs: int) -> list[tuple[str, ...]]:
    """Return the orders of parts in which a norm may be written out."""
    squares: list[tuple[str, ...]] = [("square", "mean")]
    if op == "layer_norm":
        squares = [
            ("mean", "centred", "square", "mean2"),
            ("mean", "centred", "variance"),
            ("mean", "variance", "centred"),
            ("variance", "mean", "centred"),
        ]
    roots: tuple[tuple[str, ...], ...] = (
        ("root", "normed"),
        ("sqrt", "quotient"),
        ("sqrt", "reciprocal", "normed"),
    )
    last = ("weighted", "biased")[: max(0, inputs - 1)]
    return [(*square, "shift", *root, *last) for square in squares for root in roots]


def _check_order(block: Block, graph: Reader) -> None:
    if not 0 < len(block.nodes) <= MOST_NODES:
        raise Rejected("graph/size", f"{graph.place} has {len(block.nodes)} nodes")
    seen: set[str] = set()
    for node in block.nodes:
        absent = [name for name in node.inputs if name not in seen]
        if absent:
            raise Rejected(
                "graph/order", f"{graph.place}: node {node.name!r} reads {absent[0]!r} too early"
            )
        if node.name in seen:
            raise Rejected("graph/order", f"{graph.place}: two nodes are named {node.name!r}")
        seen.add(node.name)
    if block.output not in seen:
        raise Rejected("graph/order", f"{graph.place}: the output is not a node")
    if not block.named[block.output].shape:
        raise graph.fail("has an output without dimensions")


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """The steps of a view: reshape an operand from shape `before` to `split`, take the `ranges`
    (start, stop and step for each dimension of `split`), permute the dimensions to `order`, repeat
    elements to `sizes`, and reshape to `shape`.
    """

    before: Shape
    split: Shape
    ranges: tuple[tuple[int, int, int], ...]
    order: tuple[int, ...]
    sizes: Shape
    shape: Shape

    @classmethod
    def of(cls, node: Node, before: Shape) -> View:
        """Return the view of a node. Raises Rejected "graph/field" or "graph/shape"."""
        attrs = node.attrs.exactly("split", optional=("ranges", "order", "sizes"))
        split = attrs.integers("split", 1)
        ranges = tuple((0, size, 1) for size in split)
        order = tuple(range(len(split)))
        if len(split) > MOST_DIMENSIONS or math.prod(split) != math.prod(before):
            raise Rejected("graph/shape", f"{list(split)[:10]} is no shape of the operand")
        if attrs.has("ranges"):
            ranges = tuple(_range(item) for item in attrs.items("ranges"))
            if len(ranges) != len(split):
                raise attrs.fail("'ranges' must have one for each dimension")
        if any(stop > size for (_, stop, _), size in zip(ranges, split, strict=True)):
            raise attrs.fail("'ranges' end beyond the dimensions")
        if attrs.has("order"):
            order = attrs.integers("order", 0)
            if sorted(order) != list(range(len(split))):
                raise attrs.fail("'order' must be an order of the dimensions")
        found = cls(before, split, ranges, order, (), node.shape)
        sizes = attrs.integers("sizes", 1) if attrs.has("sizes") else found.turned
        if len(sizes) != len(split) or any(
            size not in (1, many) for size, many in zip(found.turned, sizes, strict=True)
        ):
            raise Rejected("graph/shape", "'sizes' are not those of copies of the elements")
        if math.prod(sizes) != math.prod(node.shape):
            raise Rejected("graph/shape", "'sizes' do not fit the shape of the node")
        found = cls(before, split, ranges, order, sizes, node.shape)
        if found.takes_all and order == tuple(range(len(split))) and split != node.shape:
            raise Rejected("graph/shape", "'split' of a reshape must be the shape of the node")
        return found

    @property
    def turned(self) -> Shape:
        """Return the shape before elements are repeated."""
        return tuple(len(range(*self.ranges[axis])) for axis in self.order)

    @property
    def copies(self) -> int:
        """Return the number of copies of each selected element in the result."""
        return math.prod(self.sizes) // math.prod(self.turned)

    @property
    def takes_all(self) -> bool:
        """Return whether every element is in the result exactly once."""
        whole = tuple((0, size, 1) for size in self.split)
        return self.ranges == whole and self.sizes == self.turned

    def moved(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the elements [before] as the view moves them [shape]."""
        taken = values.reshape(self.split)[tuple(slice(*each) for each in self.ranges)]
        repeated = np.broadcast_to(taken.transpose(self.order), self.sizes)
        return np.ascontiguousarray(repeated).reshape(self.shape)


def _range(value: object) -> tuple[int, int, int]:
    wrong = Rejected("graph/field", "'ranges' must be lists of start, stop and step")
    if not isinstance(value, list) or len(value) != 3:
        raise wrong
    start, stop, step = integer(value[0], 0, wrong), value[1], integer(value[2], 1, wrong)
    return start, integer(stop, start + 1, wrong), step
