"""The strict safetensors reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval.tensors import parse, read


def file(header: Any, body: bytes = b"\0" * 8, length: int | None = None) -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return memoryview(size.to_bytes(8, "little") + text + body)


def entry(start: int = 0, stop: int = 8, dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    values: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(1.5, dtype=np.float64),
        "c": np.zeros((0, 4), dtype=np.float16),
        "d": np.arange(3, dtype=np.int64),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(values, {"format": "np"}))
    found = read(path).tensors
    assert set(found) == set(values)
    for name, value in values.items():
        assert found[name].shape == value.shape
        assert bytes(found[name].data) == value.tobytes()


def test_minimal_file_is_read() -> None:
    assert parse(file({"a": entry()}))["a"].shape == (2,)


BAD = {
    "empty": memoryview(b""),
    "header longer than the file": file({"a": entry()}, length=10_000),
    "header of no length": file({"a": entry()}, length=0),
    "header beyond every limit": file({"a": entry()}, length=2**63),
    "not JSON": file(b"{nonsense"),
    "not an object": file(b"[1, 2]"),
    "leading space": file(b' {"a": 1}'),
    "a name twice": file(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    ),
    "an unknown dtype": file({"a": entry(dtype="F4")}),
    "a negative offset": file({"a": entry(start=-8)}),
    "past the end": file({"a": entry(stop=16, shape=(4,))}),
    "reversed": file({"a": entry(8, 0)}),
    "three offsets": file({"a": {**entry(), "data_offsets": [0, 8, 8]}}),
    "a size that does not fit": file({"a": entry(shape=(3,))}),
    "a negative dimension": file({"a": entry(shape=(-2,))}),
    "a dimension that is true": file({"a": entry(stop=4, shape=(True,))}, b"\0" * 4),
    "overlapping tensors": file({"a": entry(), "b": entry(4, 8, shape=(1,))}),
    "a hole": file({"a": entry(4, 8, shape=(1,))}),
    "bytes left over": file({"a": entry(0, 4, shape=(1,))}),
    "an unknown field": file({"a": {**entry(), "x": 1}}),
    "metadata of numbers": file({"__metadata__": {"a": 1}, "a": entry()}),
    "a float": file(b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}'),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_files_are_rejected(name: str) -> None:
    with pytest.raises(Rejected) as found:
        parse(BAD[name])
    assert found.value.reason == "checkpoint/format"


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Rejected) as found:
        read(tmp_path / "none")
    assert found.value.reason == "checkpoint/unreadable"
