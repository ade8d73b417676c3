"""The text speaks of the project alone: no paths of a machine, no place to install from."""

from __future__ import annotations

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


def findings(text: str) -> list[str]:
    """Return what the patterns find, line by line."""
    return [
        f"line {number}: {what}: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in PATTERNS.items()
        if (found := pattern.search(line))
    ]


def test_files_of_the_project(repository: Path, project_files: tuple[Path, ...]) -> None:
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
def test_each_pattern_finds(text: str) -> None:
    assert len(findings(text)) == 1


@pytest.mark.parametrize(
    "text", ["tmp_path / 'a'", "a/tmp/b", "#!/usr/bin/env bash", "1/2 work/hour"]
)
def test_innocent_text_passes(text: str) -> None:
    assert findings(text) == []
