"""The page on the intermediate representation shows the program's output."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "reference" / "ir.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    """Return the blocks of a kind on the page."""
    return [
        text for found, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if found == kind
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the contract of the page."""
    (contract,) = blocks("yaml")
    (tmp_path / "contract.yaml").write_text(contract, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a block with its output."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


@pytest.mark.full
def test_command_outputs_equal_the_page(folder: Path) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    seen = 0
    for block in blocks("console"):
        for command, output in runs(block):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env={**os.environ, "PATH": tools},
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout == output, command
            seen += 1
    assert seen == 4


def test_expression_values_equal_the_page(folder: Path) -> None:
    """Evaluate the whole page in one session."""
    session = "\n".join(blocks("python"))
    test = doctest.DocTestParser().get_doctest(session, {}, "ir.md", str(PAGE), 0)
    assert len(test.examples) > 20
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert failed == 0, "".join(said)
