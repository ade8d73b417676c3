"""Every error message has a `help` text with a way out."""

from __future__ import annotations

import ast
from pathlib import Path

HELP_AT = {"refuse": 99, "Diagnostic": 7, "error": 4}
"""The number of positional arguments of each error constructor whose last one is its help."""


def without_help(source: str) -> list[int]:
    """Return the lines that construct an error without `help`.

    Notes, warnings and errors with an empty text, which are only compared, need none.
    """
    found = []
    for call in ast.walk(ast.parse(source)):
        match call:
            case ast.Call(ast.Name("refuse" | "Diagnostic" as name)):
                pass
            case ast.Call(ast.Attribute(ast.Name("reporter") | ast.Attribute(_, "reporter"), name)):
                pass
            case _:
                continue
        given = {keyword.arg for keyword in call.keywords}
        empty = len(call.args) > 1 and ast.unparse(call.args[1]) == "''"
        if len(call.args) < HELP_AT.get(name, 0) and not given & {"help", "severity"} and not empty:
            found.append(call.lineno)
    return found


def test_every_error_has_help(repository: Path) -> None:
    for package in ("kcdsl", "backends/kcdsl_backends"):
        for path in (repository / package).rglob("*.py"):
            assert without_help(path.read_text(encoding="utf-8")) == [], path


def test_error_without_help_is_found() -> None:
    for made in ("refuse(C, 'no', notes=n)", "self.reporter.error(C, 'no', s)", "Diagnostic(C, m)"):
        assert without_help(made) == [1]
        assert without_help(made.replace(")", ", help=h)")) == []
