"""ONNX files: their nodes, tensors and digests, read by the `onnx` package; nothing is run.

External data is read only from files beside the ONNX file. The hashed bytes are the used bytes: the
digest of a file covers both its program and its weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.source.files import excerpt, read_bytes, shown
from kcdsl_certs.statement.manifest import Manifest, Resource

FIRST_OPSET = 13
"""The first operator set version whose attributes are supported."""
_DOMAINS = ("", "ai.onnx")
_LARGEST = 1 << 31
_MOST_NODES = 200_000
_MOST_ELEMENTS = 1 << 32
KINDS = {TensorProto.FLOAT: "F32", TensorProto.FLOAT16: "F16", TensorProto.BFLOAT16: "BF16"}
"""Types of weights, by their safetensors names."""

_OTHER_FORMAT = "quantise with `quantize_static(..., quant_format=QuantFormat.QDQ)`"

Array = NDArray[Any]


def type_name(kind: int) -> str:
    """Return the name of an ONNX type of elements; its number if it has no name."""
    known = kind in TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(kind)) if known else f"of type {kind}"


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One operation of an ONNX graph; an input "" is omitted."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Return the description of the node in messages."""
        return f"{self.kind} of node {excerpt(self.name or self.outputs[0])}"


@dataclass(frozen=True, slots=True)
class OnnxInput:
    """An input of a graph: its ONNX type, and its sizes, None where they vary."""

    name: str
    type: int
    sizes: tuple[int | None, ...] | None


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """An ONNX file: its graph and its tensors.

    `own` is the ONNX type of the weights, in which the program computes. `manifest` has the digests
    of the file and of its external data.
    """

    path: Path
    nodes: tuple[OnnxNode, ...]
    tensors: Mapping[str, Array]
    types: Mapping[str, int]
    inputs: tuple[OnnxInput, ...]
    outputs: tuple[str, ...]
    opset: int
    own: int
    manifest: Manifest

    def refusal(self, what: str, help: str | None = None) -> Refusal:
        """Build the refusal of this file."""
        return _bad(self.path, what, help)


def _bad(path: Path, what: str, help: str | None = None) -> Refusal:
    return refuse(codes.ONNX_FILE, f"{shown(path)}: {what}", help=help)


def newest_opset() -> int:
    """Return the newest supported operator set version."""
    return int(onnx.defs.onnx_opset_version())


def read_onnx(
    path: Path,
    admitted: Callable[[Path], Path] = lambda path: path,
    *,
    oldest: int = FIRST_OPSET,
    mixed: bool = False,
) -> OnnxFile:
    """Read an ONNX file and its external data; `admitted` returns the path of a data file that may
    be read.

    `oldest` is the first supported operator set version; `mixed`: weights may have several types,
    and `own` is then float32.

    Refuse damaged and too large files, graphs out of order, operators of other domains, functions,
    nested graphs, and external data that is not beside the file.
    """
    data = read_bytes(path, _LARGEST + 1)
    if len(data) > _LARGEST:
        raise _bad(path, f"it is larger than {_LARGEST} bytes")
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception as error:  # of the protobuf library
        raise _bad(path, f"it is no ONNX file: {type(error).__name__}") from None
    beside: dict[str, bytes] = {}
    try:
        found = _read(path, model, oldest, lambda name: _external(path, name, admitted, beside))
    except (ValueError, TypeError, KeyError, RuntimeError, AssertionError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise _bad(path, f"it is damaged: {type(error).__name__}: {excerpt(first)}") from None
    nodes, tensors, types, opset = found
    files = [(path.name, data), *sorted(beside.items())]
    every = [Resource(n, len(held), hashlib.sha256(held).hexdigest()) for n, held in files]
    graph = model.graph
    inputs = tuple(read_input(value) for value in graph.input if value.name not in tensors)
    _refuse_disorder(path, nodes, {*tensors, *(one.name for one in inputs)}, graph)
    return OnnxFile(
        path,
        nodes,
        tensors,
        types,
        inputs,
        tuple(value.name for value in graph.output),
        opset,
        int(TensorProto.FLOAT) if mixed else _own(path, tensors, types),
        Manifest(tuple(sorted(every, key=lambda one: one.name))),
    )


def _read(
    path: Path, model: Any, oldest: int, external: Callable[[str], bytes]
) -> tuple[tuple[OnnxNode, ...], dict[str, Array], dict[str, int], int]:
    graph = model.graph
    opsets = {int(one.version) for one in model.opset_import if one.domain in _DOMAINS}
    if len(opsets) > 1:
        raise ValueError(f"its operators are of {len(opsets)} versions")
    opset = max(opsets, default=0)
    newest = newest_opset()
    if not oldest <= opset <= newest:
        raise _bad(
            path,
            f"its operators are of version {opset}; known: {oldest} to {newest}",
            "convert it: onnx.version_converter.convert_version(model, 18)",
        )
    if model.functions:
        raise _bad(
            path,
            f"it defines functions of its own: {excerpt(model.functions[0].name)}",
            "inline them: onnx.inliner.inline_local_functions(model)",
        )
    if len(graph.node) > _MOST_NODES or graph.sparse_initializer:
        raise _bad(path, f"it has more than {_MOST_NODES} nodes, or sparse tensors")
    tensors: dict[str, Array] = {}
    types: dict[str, int] = {}
    for held in graph.initializer:
        if held.name in tensors:
            raise ValueError(f"the tensor {held.name!r} occurs twice")
        tensors[held.name] = _array(held, external)
        types[held.name] = held.data_type
    names = [value.name for value in graph.input]
    if len(set(names)) < len(names) or "" in {*names, *tensors}:
        raise ValueError("an input occurs twice, or a tensor has no name")
    nodes = tuple(_node(path, node, opset) for node in graph.node)
    return nodes, tensors, types, opset


def _node(path: Path, node: Any, opset: int) -> OnnxNode:
    attributes: dict[str, Any] = {}
    if node.domain not in _DOMAINS:
        raise refuse(
            codes.OPERATION_UNSUPPORTED,
            f"{shown(path)}: {excerpt(node.op_type)} of node {excerpt(node.name)} is an operator of"
            f" the domain {excerpt(node.domain)}",
            help=_OTHER_FORMAT
            if node.op_type.startswith("QLinear")
            else "export with the operators of ONNX itself, before a runtime optimises the graph",
        )
    for one in node.attribute:
        if one.type == onnx.AttributeProto.TENSOR:
            attributes[one.name] = _array(one.t, _nowhere)
            continue
        value = helper.get_attribute_value(one)
        kinds = (bytes, int, float, list)
        flat = value if isinstance(value, list) else [value]
        if not isinstance(value, kinds) or not all(
            isinstance(v, bytes | int | float) for v in flat
        ):
            raise refuse(
                codes.OPERATION_UNSUPPORTED,
                f"{shown(path)}: {excerpt(node.op_type)} of node {excerpt(node.name)} has a graph"
                f" or another structure in its attribute {excerpt(one.name)}",
                help="export a program without branches and loops",
            )
        attributes[one.name] = value.decode() if isinstance(value, bytes) else value
    outputs = tuple(node.output)
    if not outputs or not outputs[0]:
        raise ValueError(f"the node {node.name!r} has no output")
    if not onnx.defs.has(node.op_type):
        raise refuse(
            codes.OPERATION_UNSUPPORTED,
            f"{shown(path)}: {excerpt(node.op_type)} of node {excerpt(node.name or outputs[0])} is"
            " no operator of ONNX",
            help="export with the operators of ONNX itself",
        )
    if onnx.defs.has(node.op_type, opset):
        _refuse_unlike(node, onnx.defs.get_schema(node.op_type, opset))
    return OnnxNode(node.name, node.op_type, tuple(node.input), outputs, attributes)


def _refuse_unlike(node: Any, schema: Any) -> None:
    """Raise ValueError for operands and attributes that are not in the schema of an operator."""
    many = schema.min_input <= len(node.input) <= schema.max_input
    if not many or len(node.output) > schema.max_output:
        raise ValueError(f"{node.op_type} has another number of operands")
    known = {name: one.type.value for name, one in schema.attributes.items()}
    for one in node.attribute:
        if known.pop(one.name, None) != one.type:
            raise ValueError(f"{node.op_type} has no such attribute {one.name!r}, or it twice")


def _array(tensor: Any, external: Callable[[str], bytes]) -> Array:
    """Return a tensor; ValueError where its bytes do not fit its type and its shape."""
    shape = tuple(int(n) for n in tensor.dims)
    if min(shape, default=0) < 0 or math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"the tensor {tensor.name!r} has the shape {shape}")
    if tensor.data_type in (TensorProto.STRING, TensorProto.UNDEFINED):
        raise ValueError(f"the tensor {tensor.name!r} holds no numbers")
    if tensor.data_location == TensorProto.EXTERNAL:
        told = {entry.key: entry.value for entry in tensor.external_data}
        held = external(told.get("location", ""))
        start = _count(told.get("offset", "0"))
        length = _count(told.get("length", str(len(held) - start)))
        if start + length > len(held):
            raise ValueError(f"the tensor {tensor.name!r} lies outside of its file")
        inline = TensorProto()
        inline.CopyFrom(tensor)
        inline.ClearField("external_data")
        inline.data_location = TensorProto.DEFAULT
        inline.raw_data = held[start : start + length]
        tensor = inline
    found = np.asarray(numpy_helper.to_array(tensor))
    if found.shape != shape:
        raise ValueError(f"the tensor {tensor.name!r} does not have the shape that it states")
    return found


def _nowhere(name: str) -> bytes:
    raise ValueError("a constant of a node lies in another file")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError(f"{text!r} is no count of bytes")
    return int(text)


def _external(
    path: Path, name: str, admitted: Callable[[Path], Path], held: dict[str, bytes]
) -> bytes:
    """Return the bytes of an external data file beside the ONNX file."""
    plain = name.isprintable() and not any(part in name for part in "/\\:\0")
    if not plain or name in ("", ".", "..", path.name):
        raise _bad(
            path,
            f"its external data lies in {excerpt(name)!r}, no name of a file in its folder",
            "save it again: onnx.save(model, PATH, save_as_external_data=True)",
        )
    if name not in held:
        held[name] = read_bytes(admitted(path.parent / name))
    return held[name]


def read_input(value: Any) -> OnnxInput:
    """Return an input of a graph, from its ValueInfoProto."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return OnnxInput(value.name, kind.elem_type, None)
    sizes = (int(d.dim_value) if d.HasField("dim_value") else None for d in kind.shape.dim)
    return OnnxInput(value.name, kind.elem_type, tuple(sizes))


def _refuse_disorder(path: Path, nodes: tuple[OnnxNode, ...], first: set[str], graph: Any) -> None:
    """Refuse a graph whose nodes are not in topological order, such as a cyclic one."""
    known = {"", *first}
    for node in nodes:
        for name in node.inputs:
            if name not in known:
                raise _bad(
                    path,
                    f"{node.place} reads {excerpt(name)!r}, which nothing before it computes",
                    "the nodes of a graph stand in the order of their data, without a cycle",
                )
        for name in filter(None, node.outputs):
            if name in known:
                raise _bad(path, f"{node.place} computes {excerpt(name)!r}, which is there already")
            known.add(name)
    for value in graph.output:
        if value.name not in known:
            raise _bad(path, f"nothing computes its output {excerpt(value.name)!r}")


def _own(path: Path, tensors: Mapping[str, Array], types: Mapping[str, int]) -> int:
    """Return the type of the weights: float32, float16 or bfloat16."""
    floats = {*KINDS, TensorProto.DOUBLE}
    found = {types[n] for n, held in tensors.items() if types[n] in floats and held.size > 1}
    if not found:
        return int(TensorProto.FLOAT)
    if len(found) > 1 or TensorProto.DOUBLE in found:
        names = ", ".join(sorted(map(type_name, found)))
        raise _bad(
            path,
            f"its weights are of the types {names}; all must be FLOAT, FLOAT16 or BFLOAT16",
            "export the model in one type",
        )
    return found.pop()
