"""Attacks on the manifest of a checkpoint: names, sparse files, files replaced during reading."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kcdsl_certs.encoding.files import open_regular, plain_path
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import build_manifest


def refused(path: Path) -> str:
    with pytest.raises(Rejected) as caught:
        build_manifest(path)
    return caught.value.reason


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "a\u202eb", "a\x85b"])
def test_names_with_control_characters_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert refused(tmp_path) == "checkpoint/name"


@pytest.mark.parametrize("pair", [("W.bin", "w.BIN"), ("\u00e9", "e\u0301"), ("a/x", "A/x")])
def test_names_equal_on_some_systems_are_refused(tmp_path: Path, pair: tuple[str, str]) -> None:
    for number, name in enumerate(pair):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"%d" % number)
    assert refused(tmp_path) == "checkpoint/name"


def test_sparse_file_is_refused_at_once(tmp_path: Path) -> None:
    with (tmp_path / "w").open("wb") as file:
        file.write(b"x" * 4096)
        file.truncate(1 << 42)
    assert refused(tmp_path / "w") == "checkpoint/sparse"


Swap = Callable[[Path, Path], object]


def rename(path: Path, other: Path) -> None:
    os.replace(other, path)


def link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def rewrite(path: Path, other: Path) -> None:
    """Write in place, and restore the modification time."""
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("swap", [rename, link, rewrite])
def test_file_replaced_during_hashing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: Swap
) -> None:
    path, other = tmp_path / "w", tmp_path.parent / f"{tmp_path.name}-other"
    path.write_bytes(b"x" * 4096)
    os.utime(path, ns=(1, 1))
    other.write_bytes(b"y" * 4096)
    plain = hashlib.sha256

    def swapping() -> object:
        if path.read_bytes() == b"x" * 4096:
            swap(path, other)
        return plain()

    monkeypatch.setattr("kcdsl_certs.statement.manifest.hashlib.sha256", swapping)
    assert refused(path) == "checkpoint/changed"


def test_file_added_during_hashing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w").write_bytes(b"x")
    plain = hashlib.sha256

    def adding() -> object:
        (tmp_path / "late").write_bytes(b"y")
        return plain()

    monkeypatch.setattr("kcdsl_certs.statement.manifest.hashlib.sha256", adding)
    assert refused(tmp_path) == "checkpoint/changed"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "odd")
    with pytest.raises(Rejected) as caught:
        open_regular(tmp_path / "odd", "proof/missing")
    assert caught.value.reason == "proof/missing"


def test_folder_that_the_system_does_not_open_is_no_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr("kcdsl_certs.encoding.files.os.open", denied)  # as on Windows
    with pytest.raises(Rejected, match=r"proof/missing: .* is no regular file"):
        open_regular(tmp_path, "proof/missing")
    with pytest.raises(PermissionError):
        open_regular(tmp_path / "absent", "proof/missing")


def test_paths_are_resolved_by_the_system(tmp_path: Path) -> None:
    (tmp_path / "deep" / "inner").mkdir(parents=True)
    (tmp_path / "d").symlink_to("deep/inner")
    assert plain_path(tmp_path / "d" / ".." / "w") == tmp_path / "deep" / "w"
