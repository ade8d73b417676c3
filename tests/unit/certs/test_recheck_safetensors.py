"""The strict readers of safetensors files, of shards and of ONNX files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval import tensors
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


ONE = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("named", "held", "message"),
    [
        ({"a": "1", "b": "2"}, {"1": "ab", "2": "b"}, "'b' lies in '1"),
        ({"a": "1", "b": "2"}, {"1": "b", "2": "a"}, "'b' lies in '1"),
        ({"a": "1", "b": "2"}, {"1": "ac", "2": "b"}, "'c' lies in '1"),
        ({"a": "1", "b": "2", "c": "2"}, {"1": "a", "2": "b"}, "'c' is in the index and in no"),
        ({"a": "1", "b": "2"}, {"1": "", "2": "b"}, "'a' is in the index and in no shard"),
    ],
)
@pytest.mark.parametrize("keys", [None, {"b"}])
def test_index_states_the_shard_of_every_tensor(
    tmp_path: Path, named: Mapping[str, str], held: Mapping[str, str], message: str, keys: Any
) -> None:
    """Even if another tensor is asked for."""
    for shard, names in held.items():
        (tmp_path / f"{shard}.safetensors").write_bytes(save(dict.fromkeys(names, ONE)))
    index = tmp_path / "model.safetensors.index.json"
    places = {name: f"{shard}.safetensors" for name, shard in named.items()}
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(Rejected, match=message) as found:
        read(index, keys)
    assert found.value.reason == "checkpoint/format"


@pytest.mark.parametrize(("grows", "message"), [(True, "it grew"), (False, "it became shorter")])
def test_file_that_changes_while_it_is_read_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool, message: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"a": np.zeros(1 << 16, dtype=np.float32)}))
    unchanged = tensors._stored

    def changed(header: bytes, size: int) -> Any:
        os.truncate(path, path.stat().st_size + (1 if grows else -(1 << 16)))
        return unchanged(header, size)

    monkeypatch.setattr(tensors, "_stored", changed)
    with pytest.raises(Rejected, match=message) as found:
        read(path)
    assert found.value.reason == "checkpoint/format"


def stored(path: Path, *held: onnx.TensorProto, nodes: Any = ()) -> Path:
    """Write an ONNX file with these tensors."""
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    graph = helper.make_graph(list(nodes), "g", [], [output], list(held))
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"location": "w.bin", "offset": "8"}, "outside of its file"),
        ({"location": "w.bin", "offset": "99"}, "outside of its file"),
        ({"offset": "0"}, "lies in no file"),
        ({"location": ""}, "lies in no file"),
    ],
)
def test_external_numbers_lie_in_their_file(
    tmp_path: Path, place: Mapping[str, str], message: str
) -> None:
    def written(said: Mapping[str, str]) -> Path:
        tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 2])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in said.items():
            tensor.external_data.add(key=key, value=value)
        return stored(tmp_path / "m.onnx", tensor)

    (tmp_path / "w.bin").write_bytes(bytes(20))
    assert read(written({"location": "w.bin", "offset": "4"})).tensors["w"].shape == (2, 2)
    with pytest.raises(Rejected, match=message) as found:
        read(written(place))
    assert found.value.reason == "checkpoint/format"


@pytest.mark.parametrize(
    ("axis", "scale", "zero", "message"),
    [
        (1, [3], [], "zero points"),
        (1, [3], [1], "zero points"),
        (0, [2], [1], "zero points"),
        (0, [2], [3], "zero points"),
        (-1, [3], [1, 3], "zero points"),
        (1, [], [3], "zero points"),
        (0, [1], [2], "zero points"),
        (0, [3], [3], "scales"),
        (2, [3], [3], "scales"),
        (-3, [2], [2], "scales"),
        (1, [1, 3], [1, 3], "scales"),
    ],
)
def test_scales_and_zero_points_fit_the_codes(
    tmp_path: Path, axis: int, scale: list[int], zero: list[int], message: str
) -> None:
    """Numpy would broadcast one zero point to all channels."""

    def written(axis: int, scale: list[int], zero: list[int]) -> Path:
        return stored(
            tmp_path / "m.onnx",
            helper.make_tensor("c", TensorProto.INT8, [2, 3], range(6)),
            helper.make_tensor(
                "s", TensorProto.FLOAT, scale, np.full(np.prod(scale, dtype=int), 2.0)
            ),
            helper.make_tensor("z", TensorProto.INT8, zero, np.ones(np.prod(zero, dtype=int), int)),
            nodes=[helper.make_node("DequantizeLinear", ["c", "s", "z"], ["w"], axis=axis)],
        )

    value = (np.arange(6, dtype=np.float32).reshape(2, 3) - 1) * 2
    for fits in ((1, [3], [3]), (0, [2], [2]), (1, [], []), (-1, [3], [3]), (0, [], [1])):
        assert bytes(read(written(*fits), {"w"}).tensors["w"].data) == value.tobytes()
    with pytest.raises(Rejected, match=f"the {message} of 'w' do not fit") as found:
        read(written(axis, scale, zero), {"w"})
    assert found.value.reason == "checkpoint/format"
