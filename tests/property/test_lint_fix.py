"""`kcdsl lint --fix` on every intentionally wrong document.

Findings disappear, none appears, comments stay, and a second run changes nothing.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.codes import DATA_ABSENT, find
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.comments import find_comments
from kcdsl.source.files import read_source
from kcdsl.source.yaml_nodes import scalars
from tests.support.pages import blocks, completed, names, stand_in

if TYPE_CHECKING:
    from tests.conftest import Cli

CORPUS = Path(__file__).resolve().parents[2] / "grammar" / "corpus"


def wrong() -> Iterator[tuple[str, str]]:
    """Yield the documents whose findings have fixes: of the pages of codes, and of the corpus."""
    for name in names():
        code = find(name)
        assert code is not None
        for number, block in enumerate(blocks(code.page.text)):
            if block.language == "yaml" and block.kind == "bad":
                yield f"{name} {number}", completed(block.text)
    for path in sorted((CORPUS / "rejected").glob("*.kc.yaml")):
        yield path.stem, read_source(path).text


def commented(text: str) -> str | None:
    """Return a document with a comment above and behind each line; None where it is not YAML.

    Lines inside texts get none.
    """
    source = SourceFile("contract.yaml", text)
    root = analyse(source, Sink()).root
    if root is None:
        return None
    inside: set[int] = set()
    for scalar in scalars(root):
        first, last = (
            source.position(at).line for at in (scalar.span.start, max(scalar.span.end - 1, 0))
        )
        inside |= set(range(first, last + 1)) if last > first else set()
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.startswith(("%", "---", "...")) or "\r" in line:
            lines.append(line)
            continue
        if number not in inside or number - 1 not in inside:
            lines.append(f"{' ' * (len(line) - len(line.lstrip()))}# above {number}.")
        lines.append(line if number in inside else f"{line}  # behind {number}.")
    return "\n".join(lines)


def comments(text: str) -> list[str] | None:
    source = SourceFile("contract.yaml", text)
    root = analyse(source, Sink()).root
    return None if root is None else [found.text for found in find_comments(source, root)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the documents name, and the libraries of the corpus."""
    shutil.copytree(CORPUS / "libraries", tmp_path / "libraries")
    (tmp_path / "here").mkdir()
    stand_in(tmp_path / "here")
    return tmp_path / "here"


def linted(cli: Cli, folder: Path, *words: str) -> Counter[tuple[str, str]]:
    """Return code and severity of the findings of `kcdsl lint`, except for absent files."""
    ran = cli("lint", "contract.yaml", "--format", "json", *words, cwd=folder)
    assert ran.code in {0, 1}, ran
    found = json.loads(ran.stdout)
    return Counter((d["code"], d["severity"]) for d in found if d["code"] != DATA_ABSENT.id)


def errors(found: Counter[tuple[str, str]]) -> int:
    return sum(number for (_, severity), number in found.items() if severity == "error")


@pytest.mark.full
@pytest.mark.parametrize("guesses", [False, True], ids=["safe", "unsafe"])
def test_fixes_remove_findings_and_keep_comments(cli: Cli, folder: Path, guesses: bool) -> None:
    words = ("--fix", "--unsafe-fixes") if guesses else ("--fix",)
    path, mended = folder / "contract.yaml", 0
    for name, plain in wrong():
        text = commented(plain) or plain
        path.write_bytes(text.encode("utf-8"))
        before = linted(cli, folder)
        after = linted(cli, folder, *words)
        result = path.read_bytes().decode("utf-8")
        assert errors(after) <= errors(before), name
        if result == text:
            assert after == before, name
            continue
        mended += 1
        assert (errors(after), after.total()) < (errors(before), before.total()), name
        assert linted(cli, folder, *words) == after, name
        assert path.read_bytes().decode("utf-8") == result, name
        for comment in comments(text) or ():
            if "kcdsl: ignore" in comment or f"{comment}" in result:
                continue
            assert guesses, (name, comment)
            line = plain.split("\n")[int(comment.rstrip(".").split()[-1]) - 1]
            assert line not in result.split("\n"), (name, comment)
    assert mended > (60 if guesses else 10)
