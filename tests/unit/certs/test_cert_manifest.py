"""Checkpoint manifests bind names, contents and the files that were read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import build_manifest
from kcdsl_certs.statement.manifest import files_of, storage_manifest
from kcdsl_certs.statement.weights import ADAPTER, INDEX, LARGEST_INDEX


def _tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


_FILES = {"B": b"1", "a/b": b"2", "a-b": b"3", "a.b": b"4"}


def test_order_and_root_digest_equal_openssf_model_signing(
    tmp_path: Path,
) -> None:
    manifest = build_manifest(_tree(tmp_path / "m", _FILES))
    assert [r.name for r in manifest.resources] == ["B", "a/b", "a-b", "a.b"]
    joined = b"".join(hashlib.sha256(data).digest() for data in (b"1", b"2", b"3", b"4"))
    assert manifest.root_digest == hashlib.sha256(joined).hexdigest()


def test_rename_that_keeps_the_order_changes_only_the_manifest(tmp_path: Path) -> None:
    one = build_manifest(_tree(tmp_path / "one", _FILES))
    renamed = {("a-c" if name == "a-b" else name): data for name, data in _FILES.items()}
    other = build_manifest(_tree(tmp_path / "other", renamed))
    assert other.root_digest == one.root_digest
    assert other.digest != one.digest


@pytest.mark.parametrize(
    "change",
    [
        {"a/b": b"3", "a-b": b"2"},
        {"a/b": b"x"},
        {"extra": b""},
        {".git/config": b"x"},
        {".gitignore": b""},
        {"a/b": b"2\0"},
    ],
)
def test_every_change_of_files_changes_both_digests(
    tmp_path: Path, change: dict[str, bytes]
) -> None:
    one = build_manifest(_tree(tmp_path / "one", _FILES))
    other = build_manifest(_tree(tmp_path / "other", {**_FILES, **change}))
    assert other.root_digest != one.root_digest
    assert other.digest != one.digest


def test_single_file_is_its_own_manifest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    (resource,) = build_manifest(path).resources
    assert (resource.name, resource.size) == ("model.safetensors", 7)
    sparse = tmp_path / "sparse" / "model.safetensors"
    sparse.parent.mkdir()
    with sparse.open("wb") as file:
        file.truncate(1 << 20)
    dense = tmp_path / "dense" / "model.safetensors"
    dense.parent.mkdir()
    dense.write_bytes(bytes(1 << 20))
    assert build_manifest(sparse).digest == build_manifest(dense).digest


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "m", _FILES)
    cases: dict[str, Callable[[], object]] = {
        "checkpoint/symlink": lambda: (tree / "odd").symlink_to(tree / "B"),
        "checkpoint/hardlink": lambda: os.link(tree / "B", tree / "odd"),
        "checkpoint/special-file": lambda: os.mkfifo(tree / "odd"),
    }
    for reason, make in cases.items():
        make()
        with pytest.raises(Rejected) as caught:
            build_manifest(tree)
        assert caught.value.reason == reason
        (tree / "odd").unlink()
    (tree / "folder").symlink_to(tree / "a", target_is_directory=True)
    with pytest.raises(Rejected, match="checkpoint/symlink"):
        build_manifest(tree)


def test_symlinked_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(Rejected, match="checkpoint/symlink"):
        build_manifest(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Rejected, match="checkpoint/symlink"):
        build_manifest(tmp_path / "dangling")


def test_empty_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Rejected, match="checkpoint/empty"):
        build_manifest(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        build_manifest(tmp_path / "missing")


def test_file_changed_during_reading_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"x" * 100)

    plain = hashlib.sha256

    class Growing:
        def __init__(self) -> None:
            self.digest = plain()

        def update(self, chunk: bytes) -> None:
            self.digest.update(chunk)
            with path.open("ab") as file:
                file.write(b"y" * (200 if path.stat().st_size < 300 else 0))

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr("kcdsl_certs.statement.manifest.hashlib.sha256", Growing)
    with pytest.raises(Rejected, match="checkpoint/changed"):
        build_manifest(path)


def test_hashing_reports_progress(tmp_path: Path) -> None:
    size = (1 << 20) + 5
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * size)
    heard: list[tuple[int, int]] = []
    told = build_manifest(tmp_path, lambda done, total: heard.append((done, total)))
    assert told == build_manifest(tmp_path)
    assert {total for _, total in heard} == {2 * size}
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert heard[-1] == (2 * size, 2 * size)
    assert len(heard) == 4


# --- checkpoints in shards ------------------------------------------------------------------------

_SHARDS = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")


def _sharded(folder: Path, index: object = None) -> Path:
    """Write two shards, an index and a file that is not of the weights; return the folder."""
    names = dict(zip("ab", _SHARDS, strict=True))
    written = {"weight_map": names} if index is None else index
    text = written if isinstance(written, str) else json.dumps(written)
    files = {_SHARDS[0]: b"1", _SHARDS[1]: b"2", "README.md": b"3", INDEX: text.encode()}
    return _tree(folder, files)


def test_index_and_its_shards_are_the_checkpoint(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "m")
    found = build_manifest(folder)
    assert [r.name for r in found.resources] == [*_SHARDS, INDEX]
    assert build_manifest(folder / INDEX) == found
    (folder / "README.md").write_bytes(b"4")
    assert build_manifest(folder) == found
    (folder / _SHARDS[1]).write_bytes(b"4")
    assert build_manifest(folder).digest != found.digest


@pytest.mark.parametrize(
    "index",
    [
        "", "[]", "{}", "[" * 100_000, '{"weight_map": {}}', '{"weight_map": []}',
        '{"weight_map": {"a": "model-1-of-2.safetensors", "a": "model-2-of-2.safetensors"}}',
        *(
            {"weight_map": {"a": name}}
            for name in (
                "../model-1-of-2.safetensors", "/model-1-of-2.safetensors", "a\\b.safetensors",
                "C:b.safetensors", "a\n.safetensors", "model-1-of-2.bin", 1, None,
            )
        ),
    ],
    ids=lambda index: str(index)[:60],
)  # fmt: skip
def test_index_that_names_no_files_beside_it_is_refused(tmp_path: Path, index: object) -> None:
    folder = _sharded(tmp_path / "m", index)
    for read in (build_manifest, storage_manifest):
        with pytest.raises(Rejected) as rejected:
            read(folder)
        assert rejected.value.reason == "checkpoint/index"


def test_large_index_is_refused(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "m")
    with open(folder / INDEX, "ab") as file:
        file.truncate(LARGEST_INDEX + 1)
    with pytest.raises(Rejected, match="bytes"):
        build_manifest(folder)


def test_shards_beside_a_single_file_are_refused(tmp_path: Path) -> None:
    """Loaders differ in which of the two they read."""
    folder = _tree(_sharded(tmp_path / "m"), {"model.safetensors": b"1"})
    with pytest.raises(Rejected) as rejected:
        build_manifest(folder)
    assert rejected.value.reason == "checkpoint/ambiguous"


@pytest.mark.parametrize("name", ["more.safetensors", "consolidated.safetensors", ADAPTER])
def test_further_weights_beside_a_single_file_are_refused(tmp_path: Path, name: str) -> None:
    """Without an index, servers load every file of safetensors; transformers adds an adapter."""
    folder = _tree(tmp_path / "m", {"model.safetensors": b"1", "README.md": b"2"})
    found = build_manifest(folder)
    _tree(folder, {name: b"3"})
    for read in (build_manifest, storage_manifest):
        with pytest.raises(Rejected, match="checkpoint/ambiguous"):
            read(folder)
    assert build_manifest(folder / "model.safetensors") == found


def test_adapter_beside_shards_is_refused_and_weights_outside_of_the_index_are_not(
    tmp_path: Path,
) -> None:
    """Loaders read the shards that an index names."""
    folder = _sharded(tmp_path / "m")
    found = build_manifest(folder)
    assert build_manifest(_tree(folder, {"consolidated.safetensors": b"3"})) == found
    with pytest.raises(Rejected, match="checkpoint/ambiguous"):
        build_manifest(_tree(folder, {ADAPTER: b"{}"}))


def test_links_and_missing_shards_are_refused(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "m")
    (folder / _SHARDS[0]).rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=_SHARDS[0]):
        build_manifest(folder)
    (folder / _SHARDS[0]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Rejected) as rejected:
        build_manifest(folder)
    assert rejected.value.reason == "checkpoint/symlink"
    (folder / _SHARDS[0]).unlink()
    os.mkfifo(folder / _SHARDS[0])
    with pytest.raises(Rejected, match=f"checkpoint/special-file: {_SHARDS[0]} is no regular"):
        files_of(folder)
    (folder / INDEX).rename(tmp_path / "index")
    (folder / INDEX).symlink_to(tmp_path / "index")
    with pytest.raises(Rejected):
        build_manifest(folder)


def test_configurations_of_storage_are_hashed_beside_weights(tmp_path: Path) -> None:
    folder = _tree(_sharded(tmp_path / "m"), {"config.json": b"{}"})
    found = storage_manifest(folder)
    assert [r.name for r in found.resources] == ["config.json", *_SHARDS, INDEX]
    with pytest.raises(Rejected) as rejected:
        storage_manifest(_tree(tmp_path / "empty", {"config.json": b"{}"}))
    assert rejected.value.reason == "checkpoint/empty"
