"""Files are written whole; what is no file of its own stays what it is."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl.source.writing import write_bytes


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out.json"
    write_bytes(target, b"one")
    write_bytes(target, b"two")
    assert target.read_bytes() == b"two"
    assert os.listdir(target.parent) == ["out.json"]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    real, link = tmp_path / "store" / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    write_bytes(link, b"one")
    assert link.is_symlink()
    assert real.read_bytes() == b"one"
    assert os.listdir(tmp_path / "store") == ["real.json"]


def test_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "a"
    link.symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(link)
    with pytest.raises(Refusal):
        write_bytes(link, b"one")
    assert link.is_symlink()


def test_what_is_no_file_takes_the_data_and_stays(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_bytes(pipe, b"data")
    reader.join(10)
    assert read == [b"data"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="is a folder"):
        write_bytes(tmp_path, b"one")
