"""Progress bars: only on terminals, only on stderr."""

from __future__ import annotations

import io
import time

import pytest

import kcdsl.cli.common.output
from kcdsl.cli.common.output import long_progress, progress_bars


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_one_bar_per_stage(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream)
    with progress_bars() as progress:
        progress("N-KL [all]", 0, 3)
        progress("N-KL [all]", 3, 3)
        progress("other", 1, 2)
    shown = stream.getvalue()
    if stream.isatty():
        assert "N-KL [all]" in shown
        assert "3/3" in shown
        assert "other" in shown
    else:
        assert shown == ""
    assert capsys.readouterr().out == ""


def test_progress_is_shown_for_long_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream)
    with long_progress() as progress:
        progress("MiB hashed", 1, 2)
        assert stream.getvalue() == ""
        progress("MiB hashed", 1, 4096)
        progress("MiB hashed", 4096, 4096)
    assert "MiB hashed" in stream.getvalue()
    assert "4096/4096" in stream.getvalue()


def test_lines_name_the_stage_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kcdsl.cli.common.output, "_EVERY", 0.01)

    def next_line() -> str:
        capsys.readouterr()
        deadline, text = time.monotonic() + 60, ""
        while text.count("\n") < 2 and time.monotonic() < deadline:  # the first may be older
            time.sleep(0.01)
            text += capsys.readouterr().err
        return text.splitlines()[1]

    with progress_bars() as progress:
        progress("N", 1, 1)
        progress("N: check", 0, 2)
        assert ", N: check: 0 of 2 for " in next_line()
        time.sleep(1)
        progress("N: check", 1, 2)
        assert ", N: check: 1 of 2, about " in next_line()
        progress("N: check", 2, 2)
        assert next_line().endswith(", N: check: 2 of 2")
