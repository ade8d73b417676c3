"""What the documentation shows of commands is what they print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.diagnostics.pages import parse
from tests.support.pages import FILES, consoles

if TYPE_CHECKING:
    from tests.conftest import Cli

PAGES = ("docs/lint.md",)


@pytest.mark.parametrize("name", PAGES)
def test_outputs_are_those_of_the_program(
    repository: Path, tmp_path: Path, cli: Cli, name: str
) -> None:
    for empty in FILES:
        (tmp_path / empty).touch()
    compared = 0
    for block in parse((repository / name).read_text(encoding="utf-8")).blocks:
        if block.language == "file":
            (tmp_path / (block.name or "")).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            for words, shown in consoles(block.text):
                ran = cli(*words[1:], cwd=tmp_path)
                assert ran.stdout + ran.stderr == shown, words
                compared += 1
    assert compared >= 2
