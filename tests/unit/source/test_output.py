"""Files are replaced whole; links, pipes and devices are written through."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.source.output import NewFile, refuse_targets, write_bytes, write_together


def test_file_is_replaced_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out.json"
    write_bytes(target, b"one")
    write_bytes(target, b"two")
    assert target.read_bytes() == b"two"
    assert os.listdir(target.parent) == ["out.json"]


def test_symlink_is_kept_and_its_target_written(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    real, link = tmp_path / "store" / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    write_bytes(link, b"one")
    assert link.is_symlink()
    assert real.read_bytes() == b"one"
    assert os.listdir(tmp_path / "store") == ["real.json"]


def test_circular_symlink_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "a"
    link.symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(link)
    with pytest.raises(Refusal):
        write_bytes(link, b"one")
    assert link.is_symlink()


def test_special_file_receives_the_data_and_is_kept(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_bytes(pipe, b"data")
    reader.join(10)
    assert read == [b"data"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_full_device_is_refused() -> None:
    with pytest.raises(Refusal, match="/dev/full cannot be written: No space left"):
        write_bytes(Path("/dev/full"), b"data")


def test_folder_as_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="is a folder"):
        write_bytes(tmp_path, b"one")


def test_symlink_to_a_pipe_receives_the_data(tmp_path: Path) -> None:
    """As for the shell's >(command), where a name below /dev/fd leads to an unnamed pipe."""
    reading, writing = os.pipe()
    try:
        write_bytes(Path(f"/dev/fd/{writing}"), b"data")
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        assert stream.read() == b"data"


def test_links_and_pipes_among_several_files_are_kept(tmp_path: Path) -> None:
    real, link, pipe, read = tmp_path / "real", tmp_path / "link", tmp_path / "pipe", []
    link.symlink_to(real)
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_together([NewFile(link, b"one", 0o644), NewFile(pipe, b"two", 0o644)], replace=True)
    reader.join(10)
    assert link.is_symlink()
    assert real.read_bytes() == b"one"
    assert read == [b"two"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "real"]


@pytest.mark.parametrize("second", ["a", "./b/../a", "link"])
def test_duplicate_targets_are_refused(tmp_path: Path, second: str) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    files = [NewFile(tmp_path / name, b"x", 0o644) for name in ("a", second)]
    with pytest.raises(Refusal, match="written twice"):
        write_together(files, replace=True)
    assert not (tmp_path / "a").exists()


def test_targets_are_checked_before_writing(tmp_path: Path) -> None:
    refuse_targets([tmp_path / "a", tmp_path / "new" / "b"], made=[tmp_path / "new"])
    for wrong in (tmp_path, tmp_path / "new" / "b"):
        with pytest.raises(Refusal, match="folder"):
            refuse_targets([tmp_path / "a", wrong])
