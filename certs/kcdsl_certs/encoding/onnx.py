"""Tensors of ONNX files, read from the wire format of protobuf.

https://protobuf.dev/programming-guides/encoding and onnx.proto define the numbers of fields. A
repeated singular field is refused, because readers treat it differently. So are a known field in
another wire type, which protobuf skips, and numbers of fields and members of enumerations beyond
their ranges, which it truncates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kcdsl_certs.encoding.rejected import Rejected

LARGEST = 1 << 31
"""The largest file in bytes."""
_KINDS = {
    1: ("F32", 4),
    10: ("F16", 2),
    16: ("BF16", 2),
    2: ("U8", 1),
    3: ("I8", 1),
    6: ("I32", 4),
    17: ("F8_E4M3", 1),
    19: ("F8_E5M2", 1),
}
_GRAPH, _NODE, _INITIALIZER, _SPARSE = 7, 1, 5, 15
_INPUTS, _OUTPUTS, _OPERATOR, _ATTRIBUTES, _DOMAIN = 1, 2, 4, 5, 7
_DIMS, _TYPE, _FLOATS, _INTEGERS, _NAME, _RAW, _EXTERNAL, _LOCATION = 1, 2, 4, 5, 8, 9, 13, 14
_DATA = frozenset({_FLOATS, _INTEGERS, 6, 7, _RAW, 10, 11})
_ONCE = frozenset({_TYPE, 3, _NAME, _RAW, _LOCATION})
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_DIMS = 64

_Value = int | bytes | memoryview
"""The value of a field: a varint, 4 or 8 bytes of a fixed size, or bytes with a length."""


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """A tensor of a file: its bytes, or the external file with their offset and length.

    `dtype` is the safetensors name of the type; "" for unsupported types: all except floats of 32,
    16 and 8 bits, and integers of 32 and 8 bits.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    location: str = ""
    offset: int = 0
    length: int = -1


@dataclass(frozen=True, slots=True)
class OnnxCodes:
    """A node DequantizeLinear of a file, or the weight of MatMulInteger: the tensors of its codes,
    scales and zero points ("": none), and the dimension along which scales differ."""

    codes: str
    scale: str
    zero_point: str
    axis: int


def tensors_of(data: bytes) -> dict[str, OnnxTensor]:
    """Return the tensors in the bytes of an ONNX file, by name.

    Raises Rejected `checkpoint/format` for damaged or ambiguous data.
    """
    found: dict[str, OnnxTensor] = {}
    for number, _, value in _fields(_graph(data)):
        if number == _SPARSE:
            raise _bad("it has sparse tensors")
        if number == _INITIALIZER:
            name, tensor = _tensor(_message(value))
            if name in found:
                raise _bad(f"the tensor {name[:80]!a} occurs twice")
            found[name] = tensor
    return found


def codes_of(data: bytes, tensors: Mapping[str, OnnxTensor]) -> dict[str, OnnxCodes]:
    """Return the dequantisation of tensors of codes, by the names of the results of
    DequantizeLinear, of MatMulInteger with a scale of the file, and of lookups in codes or their
    transpose with a single scale.

    Raises Rejected `checkpoint/format` for damaged or ambiguous data.
    """
    found: dict[str, OnnxCodes] = {}
    sums = _IntegerSums(frozenset(tensors))
    made = set(tensors)
    moved: dict[str, str] = {}
    for number, _, value in _fields(_graph(data)):
        if number != _NODE:
            continue
        inputs, outputs, operator, attributes = _node(_message(value))
        for name in filter(None, outputs):
            if name in made:
                raise _bad(f"{name[:80]!a} is computed twice, or is a tensor of the file")
            made.add(name)
        if len(outputs) >= 1:
            found |= sums.coded(operator, (*inputs, "", "", "", "")[:4], outputs[0])
        if operator in ("Gather", "Transpose") and outputs and inputs and inputs[0] in tensors:
            moved[outputs[0]] = inputs[0]
        dequantised = operator == "DequantizeLinear" and len(outputs) == 1
        if not dequantised or not 2 <= len(inputs) <= 3 or set(inputs[1:]) - {""} - set(tensors):
            continue
        source, result = inputs[0], outputs[0]
        if source in moved and math.prod(tensors[inputs[1]].shape) == 1:
            source, result = moved[source], source
        if source not in tensors:
            continue
        odd = attributes.keys() - {"axis"}
        if any(attributes[name] for name in odd - {"output_dtype"}) or attributes.get(
            "output_dtype", 0
        ) not in (0, 1):
            continue  # blocks and result types other than float32 make no parameter
        zero_point = inputs[2] if len(inputs) == 3 else ""
        found[result] = OnnxCodes(source, inputs[1], zero_point, attributes.get("axis", 1))
    return found


@dataclass(slots=True)
class _IntegerSums:
    """Tracks sums of codes to the scales that multiply them, in the order of nodes."""

    tensors: frozenset[str]
    scales: dict[str, str] = field(default_factory=dict)
    """The scale of an input, by the name of its codes."""
    sums: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a sum and scale of its input, by each alias of the sum."""
    weights: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Codes and zero points of the weight of a sum."""
    products: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The factors of any other binary product."""

    def coded(self, operator: str, inputs: tuple[str, ...], result: str) -> dict[str, OnnxCodes]:
        """Process a node; return the weight of a sum that it multiplies by the weight's scale."""
        first, second, _, zero_point = inputs
        match operator:
            case "QuantizeLinear":
                self.scales[result] = second
            case "MatMulInteger" if second in self.tensors and zero_point in {"", *self.tensors}:
                self.sums[result] = result, self.scales.get(first, "")
                self.weights[result] = second, zero_point
            case "Cast" if first in self.sums:
                self.sums[result] = self.sums[first]
            case "Mul" if first in self.sums or second in self.sums:
                total, other = (first, second) if first in self.sums else (second, first)
                name, own = self.sums[total]
                factors = self.products.get(other, (other,))
                (scale, *more) = [f for f in factors if f in self.tensors and f != own] or [""]
                if not scale:
                    self.sums[result] = name, own
                elif not more:
                    return {name: OnnxCodes(self.weights[name][0], scale, self.weights[name][1], 1)}
            case "Mul":
                self.products[result] = first, second
        return {}


def _graph(data: bytes) -> memoryview:
    graphs = [value for number, kind, value in _fields(memoryview(data)) if number == _GRAPH]
    if len(graphs) != 1 or not isinstance(graphs[0], memoryview):
        raise _bad("it does not have one graph")
    return graphs[0]


def _node(message: memoryview) -> tuple[list[str], list[str], str, dict[str, int]]:
    """Return the inputs, the outputs, the operator ("" of another domain than that of ONNX) and the
    integers among the attributes of a node; any other attribute is 1."""
    inputs: list[str] = []
    outputs: list[str] = []
    once: dict[int, str] = {}
    attributes: dict[str, int] = {}
    for number, _, value in _fields(message):
        if number in (_INPUTS, _OUTPUTS):
            (inputs if number == _INPUTS else outputs).append(_text(_message(value)))
        elif number in (_OPERATOR, _DOMAIN):
            if number in once:
                raise _bad(f"field {number} of a node occurs twice")
            once[number] = _text(_message(value))
        elif number == _ATTRIBUTES:
            name, one = _attribute(_message(value))
            if name in attributes:
                raise _bad(f"the attribute {name[:80]!a} occurs twice")
            attributes[name] = one
    own = once.get(_DOMAIN, "") in ("", "ai.onnx")
    return inputs, outputs, once.get(_OPERATOR, "") if own else "", attributes


def _attribute(message: memoryview) -> tuple[str, int]:
    """Return the name of an attribute and its integer; 1 for other types."""
    found: dict[int, _Value] = {}
    for number, _, value in _fields(message):
        if number in (1, 3, 20) and number in found:
            raise _bad(f"field {number} of an attribute occurs twice")
        found[number] = value
    name = _text(_message(found.get(1, memoryview(b""))))
    integer = _member(found.get(20, 2)) == 2
    return name, _integer(found.get(3, 0)) if integer else 1


def _tensor(message: memoryview) -> tuple[str, OnnxTensor]:
    once: dict[int, _Value] = {}
    dims: list[int] = []
    parts: list[bytes] = []
    numbers: list[int] = []
    filled: set[int] = set()
    external: dict[str, str] = {}
    for number, kind, value in _fields(message):
        if number in _ONCE:
            if number in once:
                raise _bad(f"field {number} of a tensor occurs twice")
            once[number] = value
        if number in _DATA and (kind != _BYTES or len(_message(value))):
            filled.add(number)
        if number == _DIMS:
            dims += _varints(value) if kind == _BYTES else [_integer(value)]
        elif number == _FLOATS:
            one = isinstance(value, bytes) and len(value) == 4
            parts.append(bytes(value) if one else bytes(_message(value)))
        elif number == _INTEGERS:
            numbers += _varints(value) if kind == _BYTES else [_integer(value)]
        elif number == _EXTERNAL:
            key, said = _entry(_message(value))
            if key in external:
                raise _bad(f"external data says {key[:40]!a} twice")
            external[key] = said
    name = _text(_message(once.get(_NAME, memoryview(b""))))
    dtype, size = _KINDS.get(_member(once.get(_TYPE, 0)), ("", 0))
    shape = tuple(dims)
    if len(shape) > _MOST_DIMS or not all(0 <= dim <= 1 << 40 for dim in shape):
        raise _bad(f"the tensor {name[:80]!a} has the shape {list(shape)[:8]}")
    outside = _member(once.get(_LOCATION, 0)) == 1
    if not dtype:
        location = external.get("location", "") if outside else ""
        return name, OnnxTensor("", shape, memoryview(b""), location)
    wanted = math.prod(shape) * size
    if outside:
        if filled:
            raise _bad(f"the tensor {name[:80]!a} lies in the file and outside of it")
        offset = _count(external.get("offset", "0"))
        length = _count(external.get("length", str(wanted)))
        if length != wanted:
            raise _bad(f"the tensor {name[:80]!a} has {length} bytes, its shape needs {wanted}")
        place = external.get("location", "")
        return name, OnnxTensor(dtype, shape, memoryview(b""), place, offset, length)
    own = {_RAW, _FLOATS if dtype == "F32" else _INTEGERS}
    if external or len(filled) > 1 or not filled <= own:
        raise _bad(f"the tensor {name[:80]!a} has its numbers in no one place")
    raw = _message(once.get(_RAW, memoryview(b"")))
    parts += [(one % (1 << 8 * size)).to_bytes(size, "little") for one in numbers]
    content = raw if len(raw) else memoryview(b"".join(parts))
    if len(content) != wanted:
        raise _bad(f"the tensor {name[:80]!a} has {len(content)} bytes, its shape needs {wanted}")
    return name, OnnxTensor(dtype, shape, content)


def _fields(data: memoryview) -> Iterator[tuple[int, int, _Value]]:
    """Yield the number, the wire type and the value of every field of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise _bad(f"a field with the number {number}")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise _bad(f"wire type {kind}")
        if not 0 <= size <= len(data) - at:
            raise _bad("it is cut off")
        content = data[at : at + size]
        yield number, kind, content if kind == _BYTES else bytes(content)
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(data):
            raise _bad("it is cut off")
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            value &= (1 << 64) - 1
            return value - (1 << 64) if value >> 63 else value, at + place + 1
    raise _bad("a number of more than ten bytes")


def _varints(value: _Value) -> list[int]:
    data, found, at = _message(value), [], 0
    while at < len(data):
        one, at = _varint(data, at)
        found.append(one)
    return found


def _entry(message: memoryview) -> tuple[str, str]:
    found = {number: _text(_message(value)) for number, _, value in _fields(message)}
    return found.get(1, ""), found.get(2, "")


def _message(value: _Value) -> memoryview:
    if isinstance(value, memoryview):
        return value
    raise _bad("a number where a message or bytes belong")


def _integer(value: _Value) -> int:
    if isinstance(value, int):
        return value
    raise _bad("bytes where a number belongs")


def _member(value: _Value) -> int:
    """Return a member of an enumeration, of which protobuf keeps the last 32 bits."""
    number = _integer(value)
    if not 0 <= number < 1 << 31:
        raise _bad(f"{number} is in no enumeration")
    return number


def _text(value: memoryview) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        raise _bad("a name that is no UTF-8") from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise _bad(f"{text[:40]!a} is no count of bytes")
    return int(text)


def _bad(what: str) -> Rejected:
    return Rejected("checkpoint/format", what)
