"""The strict reader of ONNX files, on files that no library writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl_certs.encoding.onnx import codes_of, tensors_of
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement.weights import read_onnx

FOUR = b"abcd"


def varint(value: int) -> bytes:
    """Return a varint; negative numbers have ten bytes."""
    left, found = value % (1 << 64), b""
    while left >= 128:
        found, left = found + bytes([left % 128 | 128]), left >> 7
    return found + bytes([left])


def field(number: int, value: int | bytes | str) -> bytes:
    """Return a field with a varint, or with bytes and their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fixed(number: int, data: bytes) -> bytes:
    """Return a field of four or eight bytes."""
    return varint(number << 3 | (5 if len(data) == 4 else 1)) + data


def tensor(*parts: bytes, kind: int = 1, dims: tuple[int, ...] = (1,), name: str = "w") -> bytes:
    """Return an initializer with the tensor's type, name and dimensions, and further parts."""
    sizes = b"".join(field(1, size) for size in dims)
    return field(5, sizes + field(2, kind) + field(8, name) + b"".join(parts))


def node(*parts: bytes) -> bytes:
    """Return a DequantizeLinear of `codes` and `scale` to `y`, with further parts."""
    ends = field(1, "codes") + field(1, "scale") + field(2, "y")
    return field(1, ends + field(4, "DequantizeLinear") + b"".join(parts))


def graph(*parts: bytes) -> bytes:
    return field(7, b"".join(parts))


def said(key: str, value: str) -> bytes:
    """Return an entry on external data."""
    return field(13, field(1, key) + field(2, value))


OUTSIDE = field(14, 1) + said("location", "w.data")
AXIS = field(1, "axis") + field(3, 0)
CODES = tensor(field(9, FOUR), kind=3, dims=(2, 2), name="codes")
SCALE = tensor(field(9, 2 * FOUR), dims=(2,), name="scale")
ZERO = tensor(field(9, b"ab"), kind=3, dims=(2,), name="zero")
BAD = {
    "a field of number 0": (graph(field(0, 1)), "a field with the number 0"),
    "a number beyond 29 bits": (
        graph(tensor(field(9, FOUR)), field((1 << 29) + 5, b"")),
        "a field with the number 536870917",
    ),
    "a negative length": (varint(8 << 3 | 2) + varint(-1), "it is cut off"),
    "a length beyond the end": (graph(tensor(field(9, FOUR)))[:-1], "it is cut off"),
    "a varint without an end": (graph() + b"\x80", "it is cut off"),
    "a varint of eleven bytes": (b"\x08" + b"\x80" * 10 + b"\x00", "more than ten bytes"),
    "sparse tensors": (graph(field(15, b"")), "it has sparse tensors"),
    "a tensor twice": (graph(2 * tensor(field(9, FOUR))), "the tensor 'w' occurs twice"),
    "raw data twice": (graph(tensor(2 * field(9, FOUR))), "field 9 of a tensor occurs twice"),
    "a name twice": (graph(tensor(field(8, "v"))), "field 8 of a tensor occurs twice"),
    "a name of a fixed size": (
        graph(field(5, field(1, 1) + field(2, 1) + fixed(8, b"name") + field(9, FOUR))),
        "a number where",
    ),
    "floats of eight bytes": (graph(tensor(fixed(4, 2 * FOUR), dims=(2,))), "a number where"),
    "a type beyond 31 bits": (
        graph(tensor(field(9, FOUR), kind=(1 << 32) + 1)),
        "4294967297 is in no enumeration",
    ),
    "a place beyond 31 bits": (
        graph(tensor(field(9, FOUR), field(14, (1 << 32) + 1))),
        "4294967297 is in no enumeration",
    ),
    "negative dimensions": (graph(tensor(field(9, FOUR), dims=(-1, -1))), r"the shape \[-1, -1\]"),
    "a large dimension": (graph(tensor(dims=(1 << 41, 0))), r"the shape \[2199023255552, 0\]"),
    "many dimensions": (graph(tensor(field(9, FOUR), dims=(1,) * 65)), r"the shape \[1, 1"),
    "large dimensions": (graph(tensor(field(9, FOUR), dims=(1 << 40,) * 400)), "the shape"),
    "numbers of another type": (graph(tensor(field(5, b"\1"))), "in no one place"),
    "floats of integers": (graph(tensor(fixed(4, FOUR), kind=3, dims=(4,))), "in no one place"),
    "numbers in two places": (
        graph(tensor(field(9, FOUR), fixed(4, FOUR))),
        "has its numbers in no one place",
    ),
    "numbers inside with a file": (
        graph(tensor(field(9, FOUR), said("location", "w.data"))),
        "has its numbers in no one place",
    ),
    "numbers inside and outside": (
        graph(tensor(field(9, FOUR), OUTSIDE)),
        "lies in the file and outside of it",
    ),
    "few numbers": (graph(tensor(field(9, b"abc"))), "has 3 bytes, its shape needs 4"),
    "no numbers": (graph(tensor()), "has 0 bytes, its shape needs 4"),
    "a short part of a file": (
        graph(tensor(OUTSIDE, said("length", "3"))),
        "has 3 bytes, its shape needs 4",
    ),
    "a file twice": (
        graph(tensor(OUTSIDE, said("location", "v.data"))),
        "external data says 'location' twice",
    ),
    **{
        f"an offset of {text!r}": (
            graph(tensor(OUTSIDE, said("offset", text))),
            "is no count of bytes",
        )
        for text in ("", "-1", "+1", " 1", "1_0", "0x4", "\u0661", "1" * 19)
    },
    "two operators": (
        graph(CODES, SCALE, node(field(4, "Mul"))),
        "field 4 of a node occurs twice",
    ),
    "two domains": (
        graph(CODES, SCALE, node(2 * field(7, ""))),
        "field 7 of a node occurs twice",
    ),
    "an attribute twice": (
        graph(CODES, SCALE, node(2 * field(5, AXIS))),
        "the attribute 'axis' occurs twice",
    ),
    "an axis twice": (
        graph(CODES, SCALE, node(field(5, AXIS + field(3, 1)))),
        "field 3 of an attribute occurs twice",
    ),
    "the type of an axis beyond 31 bits": (
        graph(CODES, SCALE, node(field(5, AXIS + field(20, (1 << 32) + 2)))),
        "4294967298 is in no enumeration",
    ),
    "a zero point in four bytes": (
        graph(CODES, SCALE, ZERO, node(fixed(1, b"zero"))),
        "a number where",
    ),
    "a result twice": (graph(CODES, SCALE, node(), node()), "'y' is computed twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_ambiguous_and_damaged_files_are_rejected(name: str) -> None:
    data, words = BAD[name]
    with pytest.raises(Rejected, match=f"^checkpoint/format: .*{words}"):
        codes_of(data, tensors_of(data))


def test_accepted_neighbours_of_rejected_files() -> None:
    data = graph(
        tensor(fixed(4, FOUR), fixed(4, b"efgh"), dims=(2,)),
        tensor(OUTSIDE, said("offset", "8"), name="v"),
        *(CODES, SCALE, ZERO, node(field(5, AXIS + field(20, 2)), field(7, "ai.onnx"))),
    )
    found = tensors_of(data)
    assert bytes(found["w"].data) == b"abcdefgh"
    assert (found["v"].location, found["v"].offset, found["v"].length) == ("w.data", 8, 4)
    assert codes_of(data, found)["y"].axis == 0


def test_large_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.onnx"
    path.write_bytes(graph(tensor(field(9, FOUR))))
    assert read_onnx(path)[1].keys() == {"w"}
    monkeypatch.setattr("kcdsl_certs.encoding.onnx.LARGEST", path.stat().st_size - 1)
    with pytest.raises(Rejected, match="checkpoint/format: more than"):
        read_onnx(path)
