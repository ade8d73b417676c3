"""Completion scripts, asked in the shells that they are for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.cli import COMMANDS

if TYPE_CHECKING:
    from tests.conftest import Cli

BASH = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kcdsl; printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """compdef() { : }
compadd() { shift; print -l -- ${(M)@:#$PREFIX*} }
_files() { print -l -- $PREFIX*(N) }
source "$1"; shift
words=("$@"); CURRENT=$#; PREFIX=$words[-1]; _kcdsl
"""


def complete(cli: Cli, folder: Path, shell: str, *words: str) -> set[str]:
    """Return what a shell offers for the last word of a command line."""
    script = folder / f"completion.{shell}"
    ran = cli("completion", shell)
    assert ran.code == 0
    script.write_text(ran.stdout, encoding="utf-8")
    match shell:
        case "bash":
            command = ["bash", "--norc", "-c", BASH, "bash", str(script), *words]
        case "zsh":
            command = ["zsh", "-f", "-c", ZSH, "zsh", str(script), *words]
        case _:
            line = " ".join(words)
            command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_options_values_and_files(cli: Cli, tmp_path: Path, shell: str) -> None:
    (tmp_path / "some.kc.yaml").touch()
    assert set(COMMANDS) <= complete(cli, tmp_path, shell, "kcdsl", "")
    assert complete(cli, tmp_path, shell, "kcdsl", "comp") == {"compile", "completion"}
    assert "--fail-on" in complete(cli, tmp_path, shell, "kcdsl", "lint", "--fa")
    values = complete(cli, tmp_path, shell, "kcdsl", "lint", "--fail-on", "")
    assert values == {"error", "warning", "note"}
    assert complete(cli, tmp_path, shell, "kcdsl", "completion", "") == {"bash", "zsh", "fish"}
    assert "some.kc.yaml" in complete(cli, tmp_path, shell, "kcdsl", "lint", "so")


def test_an_unknown_shell(cli: Cli) -> None:
    assert cli("completion", "tcsh").code == 2
