"""Whether output is coloured: what the option or the configuration says is said to the environment,
which every printer reads (`NO_COLOR`, `FORCE_COLOR`), for as long as a command runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kcdsl.config import COLOURS, read_config
from kcdsl.diagnostics import Sink

_NAMES = ("NO_COLOR", "FORCE_COLOR")


def wanted(words: Sequence[str]) -> str:
    """Return `auto`, `always` or `never`: by the words of the command line, else KCDSL_COLOR, else
    NO_COLOR and FORCE_COLOR, which `auto` leaves as they are, else the configuration."""
    found = _option(words) or os.environ.get("KCDSL_COLOR")
    if found in COLOURS:
        return found
    if any(os.environ.get(name) for name in _NAMES):
        return "auto"
    try:
        return read_config(Path(), Sink()).color
    except OSError:
        return "auto"


def _option(words: Sequence[str]) -> str | None:
    """Return the value of the last `--color`; argparse refuses it where it is none."""
    found = None
    for number, word in enumerate(words):
        if word == "--":
            break
        if word == "--color" and number + 1 < len(words):
            found = words[number + 1]
        elif word.startswith("--color="):
            found = word.partition("=")[2]
    return found


@contextmanager
def coloured(choice: str) -> Iterator[None]:
    """Let the environment say what was chosen; it is as before afterwards."""
    if choice == "auto":
        yield
        return
    before = {name: os.environ.get(name) for name in _NAMES}
    for name, on in zip(_NAMES, (choice == "never", choice == "always"), strict=True):
        _set(name, "1" if on else None)
    try:
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
