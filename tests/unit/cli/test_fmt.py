"""`kcdsl fmt`: rewritten and skipped files, and exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Cli

UGLY = "kcdsl:   1   # first\nclauses: {A: {require: p99( kl )<=1,level: L1}}\r\n"
NEAT = "kcdsl: 1  # first\nclauses: {A: {require: p99(kl) <= 1, level: L1}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.kc.yaml").write_bytes(UGLY.encode())
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "contract.yaml").write_text(NEAT)
    (tmp_path / "below" / "other.yaml").write_text("a:   1\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "b.kc.yaml").write_bytes(UGLY.encode())
    return tmp_path


def test_files_are_rewritten(cli: Cli, folder: Path) -> None:
    ran = cli("fmt", ".", cwd=folder)
    assert (ran.code, ran.stdout) == (0, "")
    assert ran.stderr == "2 files: 1 changed\n"
    assert (folder / "a.kc.yaml").read_bytes() == NEAT.encode()
    assert (folder / "below" / "other.yaml").read_text() == "a:   1\n"
    assert (folder / ".hidden" / "b.kc.yaml").read_bytes() == UGLY.encode()
    assert cli("fmt", "--check", ".", cwd=folder).code == 0


def test_check_and_diff_write_nothing(cli: Cli, folder: Path) -> None:
    ran = cli("fmt", "--check", ".", cwd=folder)
    assert (ran.code, ran.stdout) == (1, "a.kc.yaml\n")
    shown = cli("fmt", "--diff", "a.kc.yaml", cwd=folder)
    assert shown.code == 1
    assert "+kcdsl: 1  # first\n" in shown.stdout
    assert (folder / "a.kc.yaml").read_bytes() == UGLY.encode()


def test_invalid_yaml_is_skipped_and_other_files_formatted(cli: Cli, folder: Path) -> None:
    (folder / "broken.kc.yaml").write_text("a: [1\n")
    ran = cli("fmt", ".", cwd=folder)
    assert ran.code == 2
    assert "KC001" in ran.stderr
    assert (folder / "broken.kc.yaml").read_text() == "a: [1\n"
    assert (folder / "a.kc.yaml").read_bytes() == NEAT.encode()


def test_folder_without_contracts(cli: Cli, tmp_path: Path) -> None:
    ran = cli("fmt", str(tmp_path), cwd=tmp_path)
    assert ran.code == 2
    assert "KC603" in ran.stderr


def test_file_mode_is_preserved(cli: Cli, folder: Path) -> None:
    (folder / "a.kc.yaml").chmod(0o640)
    cli("fmt", "a.kc.yaml", cwd=folder)
    assert (folder / "a.kc.yaml").stat().st_mode & 0o777 == 0o640


def test_unreadable_file_is_skipped_and_others_formatted(cli: Cli, folder: Path) -> None:
    (folder / "below" / "contract.yaml").write_bytes(b"a:  \xff\n")
    ran = cli("fmt", ".", cwd=folder)
    assert ran.code == 2
    assert "KC008" in ran.stderr
    assert ran.stderr.endswith("2 files: 1 changed, 1 left as it is\n")
    assert (folder / "a.kc.yaml").read_bytes() == NEAT.encode()


def test_standard_input_excludes_other_files(cli: Cli, folder: Path) -> None:
    command = [sys.executable, "-m", "kcdsl", "fmt", "-"]
    ran = subprocess.run(command, input=UGLY.encode(), capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, NEAT.encode())
    refused = cli("fmt", "-", "a.kc.yaml", cwd=folder)
    assert (refused.code, refused.stdout) == (2, "")
    assert "standard input is read alone" in refused.stderr


def test_excluded_files_are_skipped(cli: Cli, folder: Path) -> None:
    (folder / "kcdsl.toml").write_text('exclude = ["a.*"]\n')
    ran = cli("fmt", ".", cwd=folder)
    assert ran.stderr == "1 file: 0 changed\n"
    assert (folder / "a.kc.yaml").read_bytes() == UGLY.encode()
