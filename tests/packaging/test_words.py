"""Text of the project contains no machine paths and no package indexes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

# Each pattern has a bracket in the middle, so that this file does not match itself.
PATTERNS = {
    "a path of one machine": re.compile(
        r"(?<![\w.])/(?:w[o]rk|r[o]ot|h[o]me|t[m]p|U[s]ers|o[p]t)/[A-Za-z.]"
    ),
    "a registry host": re.compile(r"(?:p[y]pi|pythonh[o]sted|n[p]mjs)\.(?:org|com)"),
    "unfinished work": re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b"),
    "a test that does not run": re.compile(r"pytest\.s[k]ip\(|mark\.(?:s[k]ip|x[f]ail)"),
}
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".json",
    ".lark",
    ".sh",
    ".cfg",
    ".steps",
    "",
}


QUESTIONS = {"What", "How", "Where", "Which", "Whether", "Why", "When", "Who"}
"""Words that must not begin the docstring of a module or a class, which names its subject."""


def openings(text: str) -> set[str]:
    """Return the first words of the docstrings of a module and its classes."""
    documented = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef)]
    words = [(ast.get_docstring(node) or "").split() for node in documented]
    return {each[0].strip("`,:") for each in words if each}


def findings(text: str) -> list[str]:
    """Return the matches of the patterns, line by line."""
    return [
        f"line {number}: {what}: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in PATTERNS.items()
        if (found := pattern.search(line))
    ]


def test_project_files_match_no_forbidden_pattern(
    repository: Path, project_files: tuple[Path, ...]
) -> None:
    files = [path for path in project_files if path.suffix in TEXT]
    assert repository / "pyproject.toml" in files
    assert repository / ".ci" / "run" in files
    bad = {
        str(path.relative_to(repository)): found
        for path in files
        if path.stat().st_size < 1_000_000
        and (found := findings(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert bad == {}


def test_docstrings_do_not_begin_with_a_question(
    repository: Path, project_files: tuple[Path, ...]
) -> None:
    modules = [path for path in project_files if path.suffix == ".py"]
    assert repository / "kcdsl" / "units.py" in modules
    bad = [p for p in modules if openings(p.read_text(encoding="utf-8")) & QUESTIONS]
    assert [path.relative_to(repository).as_posix() for path in bad] == []


def test_docstring_that_begins_with_a_question_is_found() -> None:
    assert openings('"""What a thing is."""') <= QUESTIONS
    assert openings('class A:\n    """Which: one."""') == {"Which"}
    assert not openings('"""Things."""') & QUESTIONS
    assert openings("x = 1") == set()


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "work/main/x.py",
        "open('/" + "tmp/a')",
        "https://" + "py" + "pi.org/simple",
        "# TO" + "DO later",
        "@pytest.mark.sk" + "ip",
    ],
)
def test_each_pattern_matches_its_example(text: str) -> None:
    assert len(findings(text)) == 1


@pytest.mark.parametrize(
    "text", ["tmp_path / 'a'", "a/tmp/b", "#!/usr/bin/env bash", "1/2 work/hour"]
)
def test_harmless_text_matches_no_pattern(text: str) -> None:
    assert findings(text) == []
