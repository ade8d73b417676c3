"""Completion scripts, tested in their shells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.cli import COMMANDS
from kcdsl.cli.commands import load
from kcdsl.cli.commands.settings import SCRIPTS, offered

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
PRESENT = ("bash", *(pytest.param(name, marks=pytest.mark.programs) for name in ("zsh", "fish")))


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the script of each shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell, text in SCRIPTS.items():
        (folder / shell).write_text(text, encoding="utf-8")
    return folder


def complete(scripts: Path, folder: Path, shell: str, *words: str) -> set[str]:
    """Return the completions of a shell for the last word of a command line."""
    script = str(scripts / shell)
    match shell:
        case "bash":
            command = ["bash", "--norc", "-c", BASH, "bash", script, *words]
        case "zsh":
            command = ["zsh", "-f", "-c", ZSH, "zsh", script, *words]
        case _:
            line = " ".join(words)
            command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": tools}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line.strip()}


def words_for(*words: str) -> set[str]:
    """Return the offered words for the last word, without the help."""
    _, *found = offered(words)
    return {line.partition("\t")[0] for line in found}


def files_for(*words: str) -> str:
    """Return the offered files for the last word."""
    return next(offered(words))


def test_completions_of_commands_options_and_values() -> None:
    assert words_for("") == set(COMMANDS)
    assert words_for("comp") == {"companions", "compare", "compile", "completion"}
    assert words_for("--color", "never", "comp") == {
        "companions",
        "compare",
        "compile",
        "completion",
    }
    assert words_for("--ver") == {"--version"}
    assert words_for("--color", "") == {"auto", "always", "never"}
    assert words_for("lint", "--fa") == {"--fail-on"}
    assert words_for("lint", "--fail-on", "") == {"error", "warning", "note"}
    assert words_for("lint", "--color", "al") == {"always"}
    assert "sarif" in words_for("lint", "--format", "")
    assert words_for("lint", "--select", "KC90") >= {"KC900", "KC906"}
    assert words_for("explain", "KC20") >= {"KC201", "KC203"}
    assert words_for("completion", "") == set(SCRIPTS)
    assert words_for("config", "") == {"show"}
    assert words_for("config", "show", "--fo") == {"--format"}
    assert words_for("config", "show", "--format", "") == {"text", "json"}
    assert words_for("--color", "never", "lint", "--fail-on", "e") == {"error"}
    assert words_for("nothing", "") == set()


def test_completions_of_files_and_folders() -> None:
    assert files_for("lint", "so") == files_for("lint", "-o", "so") == "files:"
    assert files_for("evaluate", "-o", "so") == files_for("config", "show", "so") == "folders:"
    assert files_for("compile", "--timeout", "so") == files_for("doctor", "so") == ":"


def test_completion_of_a_value_after_an_equals_sign() -> None:
    assert words_for("lint", "--fail-on=wa") == {"warning"}
    assert words_for("lint", "--fail-on", "=", "wa") == {"warning"}
    assert words_for("lint", "--fail-on", "=") == {"error", "warning", "note"}


@pytest.mark.full
@pytest.mark.parametrize("shell", PRESENT)
def test_shells_offer_the_declared_words(scripts: Path, tmp_path: Path, shell: str) -> None:
    (tmp_path / "some.kc.yaml").touch()
    (tmp_path / "somewhere").mkdir()

    def shown(*words: str) -> set[str]:
        return {word.rstrip("/") for word in complete(scripts, tmp_path, shell, "kcdsl", *words)}

    assert shown("comp") == {"companions", "compare", "compile", "completion"}
    assert shown("lint", "--fa") == {"--fail-on"}
    assert shown("lint", "--fail-on", "e") == {"error"}
    assert shown("lint", "so") == {"some.kc.yaml", "somewhere"}
    assert shown("evaluate", "-o", "so") == {"somewhere"}
    assert shown("doctor", "so") == set()
    words = ["--fail-on=wa"] if shell != "bash" else ["--fail-on", "=", "wa"]
    found = shown("lint", *words)
    assert {word.removeprefix("--fail-on=") for word in found} == {"warning"}


def test_help_and_completion_name_every_option(cli: Cli) -> None:
    for command in COMMANDS:
        shown = cli(command, "--help").stdout
        names = {name for _, option in load(command).options() for name in option.names}
        assert words_for(command, "-") == names | {"-h", "--help", "--traceback", "--color"}
        for name in names:
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown), (command, name)
        assert all(option.help for _, option in load(command).options()), command


def test_completion_script_is_printed(cli: Cli) -> None:
    for shell, text in SCRIPTS.items():
        assert cli("completion", shell).stdout == text


def test_unknown_shell_is_refused(cli: Cli) -> None:
    assert cli("completion", "tcsh").code == 2
