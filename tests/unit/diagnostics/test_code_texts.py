"""Codes and their index: every declared code is used, and every named code is declared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.codes import FAMILIES, Code, all_codes
from kcdsl.diagnostics.model import Diagnostic
from kcdsl.diagnostics.pages import Page
from kcdsl.diagnostics.render import LintRun
from kcdsl.diagnostics.render.documents import render_sarif

if TYPE_CHECKING:
    from tests.conftest import Cli

INDEX = "docs/reference/codes.md"
NO_CODES = {
    "KC000": "kcdsl/lsp/features/completion.py",  # a snippet has it where the author writes a code
    "KC799": "kcdsl/diagnostics/pages/KC902.md",  # the page of the unknown code
}
PROGRAMS = ("kcdsl", "backends", "certs", "grammar", "examples")


def test_each_code_has_a_text() -> None:
    for code in all_codes():
        assert len(code.summary) > 20, code


def index() -> str:
    """Return the expected text of the index of codes."""
    lines = [
        "# Diagnostic codes",
        "",
        "A code keeps its meaning; a number is never used again. `kcdsl explain KC203` "
        "prints the page of a code.",
    ]
    for family, words in FAMILIES.items():
        lines += [
            "",
            f"## {family}: {words}",
            "",
            "| code | title | what it means |",
            "|---|---|---|",
        ]
        for code in all_codes():
            if code.id.startswith(family):
                link = f"[{code.id}](../../kcdsl/diagnostics/pages/{code.id}.md)"
                text = code.summary.rstrip(".").replace("|", "\\|")
                lines.append(f"| {link} | {code.title} | {text} |")
    return "\n".join(lines) + "\n"


def test_index_equals_the_declared_codes(repository: Path) -> None:
    assert (repository / INDEX).read_text(encoding="utf-8") == index(), "run `make pages`"


def test_every_code_belongs_to_a_family() -> None:
    assert all(code.id[:3] in FAMILIES for code in all_codes())


def test_outputs_use_the_page_of_a_code(repository: Path, cli: Cli) -> None:
    folder = repository / "kcdsl" / "diagnostics" / "pages"
    pages = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    explained = {
        c["code"]: c for c in json.loads(cli("explain", "--format", "json").stdout)["codes"]
    }
    run = LintRun(docs_url="https://example.org/codes")
    document = json.loads(render_sarif([Diagnostic(code, "x") for code in all_codes()], run))
    rules = {rule["id"]: rule for rule in document["runs"][0]["tool"]["driver"]["rules"]}
    assert set(pages) == set(explained) == set(rules)
    for code in all_codes():
        written = Page(pages[code.id])
        assert explained[code.id]["markdown"] == written.markdown
        assert explained[code.id]["explanation"] == written.summary
        assert rules[code.id]["help"]["markdown"] == written.markdown
        assert rules[code.id]["fullDescription"]["text"] == written.summary
        assert rules[code.id]["helpUri"] == f"https://example.org/codes/{code.id}.md"
        assert code.uri == (folder / f"{code.id}.md").as_uri()  # the link of the language server


# --- declared and raised -------------------------------------------------------------------------


@pytest.fixture
def programs(repository: Path, project_files: tuple[Path, ...]) -> dict[str, str]:
    """Return the sources that may raise a code, without the declarations."""
    folders = tuple(repository / name for name in PROGRAMS)
    found = [
        path
        for path in project_files
        if path.suffix == ".py" and any(path.is_relative_to(folder) for folder in folders)
    ]
    texts = {p.relative_to(repository).as_posix(): p.read_text(encoding="utf-8") for p in found}
    del texts["kcdsl/diagnostics/codes.py"]
    return texts


def _without_imports(text: str) -> str:
    return re.sub(r"^ *from [^(\n]+ import (\([^)]*\)|[^(\n]+\n)", "", text, flags=re.MULTILINE)


def test_each_declared_code_is_used(programs: dict[str, str]) -> None:
    """The bad example of its page tests that it is reported."""
    used = {
        word
        for text in programs.values()
        for word in re.findall(r"\b[A-Z][A-Z0-9_]+\b", _without_imports(text))
    }
    named = {name: code for name, code in vars(codes).items() if isinstance(code, Code)}
    assert set(named.values()) == set(all_codes())
    assert {name for name in named if name not in used} == set()


def test_imports_do_not_count_as_uses() -> None:
    text = "from a import (\n    ONE,\n    TWO,\n)\nfrom b import THREE\nraise refuse(FOUR)\n"
    assert _without_imports(text).split() == ["raise", "refuse(FOUR)"]


def test_codes_are_constructed_only_in_declarations(programs: dict[str, str]) -> None:
    makers = [
        n for n, text in programs.items() if re.search(r"(?<![\w.])Code\(|\._declare\(", text)
    ]
    assert makers == []


def _numbers(text: str) -> Iterator[str]:
    yield from re.findall(r"\bKC[0-9]{3}\b", text)


def test_each_named_number_is_declared(
    repository: Path, project_files: tuple[Path, ...], programs: dict[str, str]
) -> None:
    known = {code.id for code in all_codes()}
    pages = {
        path.relative_to(repository).as_posix(): path.read_text(encoding="utf-8")
        for path in project_files
        if path.suffix == ".md"
    }
    named = {(n, where) for where, text in (programs | pages).items() for n in _numbers(text)}
    assert len(named) > 300
    assert {pair for pair in named if pair[0] not in known} == set(NO_CODES.items())
