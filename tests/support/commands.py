"""Run the command line in this process, for tests and for examples in the documentation."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

# The terminal of a command: none, 100 columns wide, without colour.
PLAIN_TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
ANNOTATING = ("GITHUB_ACTIONS", "FORCE_COLOR")


@dataclass(frozen=True, slots=True)
class Ran:
    """Exit code and output of one run of the command line."""

    code: int
    stdout: str
    stderr: str


def run_here(
    *arguments: str | os.PathLike[str],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Run `kcdsl ARGUMENTS…` in this process, in a folder and with extra environment variables."""
    from kcdsl.cli import main

    out, err = _Captured(), _Captured()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name in ANNOTATING:
            patch.delenv(name, raising=False)
        for name, value in {**PLAIN_TERMINAL, **(env or {})}.items():
            patch.setenv(name, value)
        if cwd is not None:
            stack.enter_context(contextlib.chdir(cwd))
        patch.setattr(sys, "stdin", io.StringIO())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = _status(main, [os.fspath(a) for a in arguments])
    return Ran(code, out.text, err.text)


class _Captured(io.TextIOWrapper):
    """An in-memory text stream with a byte buffer, as a real stream has."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="", write_through=True)

    @property
    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode("utf-8")


def _status(main: object, arguments: Sequence[str]) -> int:
    """Return the process status of `main(arguments)`."""
    assert callable(main)
    try:
        status = main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    if status is None:
        return 0
    return status if isinstance(status, int) else 1
