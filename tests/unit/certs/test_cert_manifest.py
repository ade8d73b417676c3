"""Checkpoint manifests bind names, contents and the files that were read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import build_manifest


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
