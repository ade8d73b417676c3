"""A command ends with its own exit code for any state of stdout and stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kcdsl.cli import main

ENTRY = "import sys; from kcdsl.cli import main; sys.exit(main(sys.argv[1:]))"


def run(redirection: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run the command line through a shell that closes or redirects a stream."""
    line = f'exec "$0" -c "$1" {" ".join(arguments)} {redirection}'
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    return subprocess.run(
        ["sh", "-c", line, sys.executable, ENTRY],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=False,
        timeout=60,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("redirection", ["", ">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_closed_stream_does_not_change_the_exit_code(redirection: str, tmp_path: Path) -> None:
    listed = run(redirection, "explain", folder=tmp_path)
    assert listed.returncode == 0
    refused = run(redirection, "compile", "none.yaml", folder=tmp_path)
    assert refused.returncode == 2
    linted = run(redirection, "lint", "none.yaml", folder=tmp_path)
    assert linted.returncode == 2
    for ran in (listed, refused, linted):
        assert b"error[KC999]" not in ran.stdout + ran.stderr
    assert b"error" not in refused.stdout
    assert b"error" not in linted.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize("arguments", [("explain",), ("backends",), ("doctor",)])
def test_broken_pipe_is_not_an_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """As after `kcdsl check … | head -1`: plain prints and tables stay silent."""
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-c", ENTRY, *arguments],
        cwd=tmp_path,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (2, b"")


def test_full_disc_is_reported(tmp_path: Path) -> None:
    ran = run(">/dev/full", "explain", folder=tmp_path)
    assert ran.returncode == 2
    assert b"KC602" in ran.stderr


@pytest.mark.full
def test_unencodable_character_is_escaped(tmp_path: Path) -> None:
    refused = run("", "compile", "n\u00f6.yaml", folder=tmp_path)
    linted = run("", "lint", "n\u00f6.yaml", folder=tmp_path)
    for ran, told in ((refused, refused.stderr), (linted, linted.stdout)):
        assert ran.returncode == 2
        assert b"n\\xf6.yaml" in told or b"n\\udcc3" in told


def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'cryptography.x'", name="cryptography.x")

    monkeypatch.setattr("kcdsl.cli.commands.doctor.BackendsCommand.run", load)
    assert main(["backends"]) == 2
    told = capsys.readouterr().err
    assert "KC903" in told
    assert "cryptography.x" in told
    assert "kcdsl doctor" in told


def test_sys_exit_in_a_command_is_not_a_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(arguments: object) -> int:
        raise SystemExit(0)

    monkeypatch.setattr("kcdsl.cli.commands.doctor.BackendsCommand.run", leave)
    assert main(["backends"]) == 2
    assert "KC999" in capsys.readouterr().err
    assert main(["backends", "--help"]) == 0
