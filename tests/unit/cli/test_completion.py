"""Completion scripts, asked in the shells that they are for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.cli import COMMANDS, completion

if TYPE_CHECKING:
    from tests.conftest import Cli

BASH = """source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kcdsl; printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """compdef() { : }
compset() { PREFIX=${PREFIX#*=} }
_describe() { local -a all; all=(${(P)@[-1]}); print -l -- ${(M)${all%%:*}:#$PREFIX*} }
_files() { [[ $1 == -/ ]] && print -l -- $PREFIX*(N/) || print -l -- $PREFIX*(N) }
source "$1"; shift
words=("$@"); CURRENT=$#; PREFIX=$words[-1]; _kcdsl
"""
SHELLS = ("bash", "zsh", "fish")
PRESENT = ("bash", *(pytest.param(name, marks=pytest.mark.programs) for name in SHELLS[1:]))


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        text = completion.SHELLS[shell](completion.commands())
        (folder / shell).write_text(text, encoding="utf-8")
    return folder


def complete(scripts: Path, folder: Path, shell: str, *words: str) -> set[str]:
    """Return what a shell offers for the last word of a command line."""
    script = str(scripts / shell)
    match shell:
        case "bash":
            command = ["bash", "--norc", "-c", BASH, "bash", script, *words]
        case "zsh":
            command = ["zsh", "-f", "-c", ZSH, "zsh", script, *words]
        case _:
            line = " ".join(words)
            command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize("shell", PRESENT)
def test_commands_options_values_and_files(scripts: Path, tmp_path: Path, shell: str) -> None:
    (tmp_path / "some.kc.yaml").touch()
    (tmp_path / "somewhere").mkdir()

    def offered(*words: str) -> set[str]:
        return {word.rstrip("/") for word in complete(scripts, tmp_path, shell, "kcdsl", *words)}

    assert offered("") == set(COMMANDS)
    assert offered("comp") == {"compile", "completion"}
    assert offered("--color", "never", "comp") == {"compile", "completion"}
    assert offered("--ver") == {"--version"}
    assert offered("--color", "") == {"auto", "always", "never"}
    assert offered("lint", "--fa") == {"--fail-on"}
    assert offered("lint", "--fail-on", "") == {"error", "warning", "note"}
    assert offered("lint", "--color", "al") == {"always"}
    assert "sarif" in offered("lint", "--format", "")
    assert offered("lint", "--select", "KC90") >= {"KC900", "KC906"}
    assert offered("explain", "KC20") >= {"KC201", "KC203"}
    assert offered("completion", "") == set(SHELLS)
    assert offered("config", "") == {"show"}
    assert offered("config", "show", "--fo") == {"--format"}
    assert offered("config", "show", "--format", "") == {"table", "json"}
    assert offered("--color", "never", "lint", "--fail-on", "e") == {"error"}
    assert offered("lint", "so") == {"some.kc.yaml", "somewhere"}
    assert offered("lint", "-o", "so") == {"some.kc.yaml", "somewhere"}
    assert offered("evaluate", "-o", "so") == {"somewhere"}
    assert offered("config", "show", "so") == {"somewhere"}
    assert offered("compile", "--timeout", "so") == set()
    assert offered("doctor", "so") == set()


@pytest.mark.parametrize("shell", PRESENT)
def test_a_value_behind_an_equals_sign(scripts: Path, tmp_path: Path, shell: str) -> None:
    words = ["--fail-on=wa"] if shell != "bash" else ["--fail-on", "=", "wa"]
    found = complete(scripts, tmp_path, shell, "kcdsl", "lint", *words)
    assert {word.removeprefix("--fail-on=") for word in found} == {"warning"}
    if shell == "bash":
        assert "error" in complete(scripts, tmp_path, shell, "kcdsl", "lint", "--fail-on", "=")


@pytest.mark.parametrize("shell", PRESENT)
def test_exactly_the_options_that_there_are(scripts: Path, tmp_path: Path, shell: str) -> None:
    for command in completion.commands():
        words = command.name.split()
        found = complete(scripts, tmp_path, shell, "kcdsl", *words, "-")
        if shell == "fish":  # which offers the longest name of an option
            found |= complete(scripts, tmp_path, shell, "kcdsl", *words, "--")
            wanted = {name for name in command.names if name.startswith("--")}
            assert {name for name in found if name.startswith("--")} == wanted
        else:
            assert found == set(command.names), command.name


def test_the_help_names_every_option(cli: Cli) -> None:
    known = completion.commands()
    assert {command.name.split()[0] for command in known if command.name} == set(COMMANDS)
    for command in known:
        shown = cli(*command.name.split(), "--help").stdout
        for name in command.names:
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown), (command.name, name)
        assert all(option.help for option in command.options), command.name


def test_the_script_is_printed(cli: Cli, scripts: Path) -> None:
    for shell in SHELLS:
        assert cli("completion", shell).stdout == (scripts / shell).read_text(encoding="utf-8")


def test_an_unknown_shell(cli: Cli) -> None:
    assert cli("completion", "tcsh").code == 2
