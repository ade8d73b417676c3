"""The process of a command: where it looks for modules, its streams, and its colours.

A contract that came from elsewhere lies in the working folder as often as not, and beside it may be
a `yaml.py` or a `libz3.so`. `python -m kcdsl`, and an entry of `PYTHONPATH` that is empty or
relative, have Python look there first.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path

import kcdsl

_COLOUR_VARIABLES = ("NO_COLOR", "FORCE_COLOR")


# --- modules -------------------------------------------------------------------------------------


def isolate() -> None:
    """Drop the working folder from where modules and the library of z3 are looked for.

    An absolute entry of `PYTHONPATH` stays: its user wrote it. So does the folder that kcdsl itself
    was imported from. Python has already imported parts of its own library by now: `python -P -m
    kcdsl`, and the program `kcdsl`, leave nothing to chance.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = {entry for entry in given if os.path.isabs(entry)} | {_parent(kcdsl.__file__)}
    first = _library_of_python()
    sys.path[:first] = [e for e in sys.path[:first] if not _is_here(e) or e in kept]
    _find_z3_in_its_package()


def _parent(file: str | None) -> str:
    return "" if file is None else str(Path(file).resolve().parent.parent)


def _library_of_python() -> int:
    """Return how many entries come before the library of Python: what `site` adds comes after."""
    library = os.path.dirname(os.__file__)
    return sys.path.index(library) if library in sys.path else len(sys.path)


def _is_here(entry: str) -> bool:
    try:
        return entry == "" or os.path.samefile(entry, os.curdir)
    except OSError:
        return False


def _find_z3_in_its_package() -> None:
    """Have z3 load the library of its own package: it looks in the working folder first.

    `Z3_LIB_DIRS` is what z3 has instead of the folders that it looks in by itself.
    """
    spec = find_spec("z3")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    folders = [str(Path(root, inner)) for root in roots for inner in ("lib", ".")]
    vars(builtins)["Z3_LIB_DIRS"] = [*folders, os.path.join(sys.prefix, "lib")]


def collect_seldom() -> None:
    """Look for cyclic garbage after 10,000 new objects, not 700: a large contract is all trees."""
    gc.set_threshold(10_000)


def leave_garbage() -> None:
    """Have the end of the process look for no cyclic garbage: it frees all memory anyway.

    DuckDB, whose bindings print whatever is left of their objects then, is excepted.
    """
    if "_duckdb" not in sys.modules:
        gc.freeze()


# --- streams -------------------------------------------------------------------------------------


def mend_streams() -> None:
    """Make both streams able to take any text: one that is closed takes it to nowhere, and one
    whose encoding lacks a character shows its escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def abandon_stdout() -> None:
    """Point stdout at nothing, so that the interpreter does not fail again on its way out."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = None


# --- colours -------------------------------------------------------------------------------------


@contextmanager
def coloured(words: Sequence[str]) -> Iterator[None]:
    """Tell every printer, by the environment, what the command line or the configuration says."""
    choice = _wanted(words)
    if choice == "auto":
        yield
        return
    before = {name: os.environ.get(name) for name in _COLOUR_VARIABLES}
    for name, on in zip(_COLOUR_VARIABLES, (choice == "never", choice == "always"), strict=True):
        _set(name, "1" if on else None)
    try:
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def _wanted(words: Sequence[str]) -> str:
    """Return `auto`, `always` or `never`: by the words of the command line, else KCDSL_COLOR, else
    NO_COLOR and FORCE_COLOR, which `auto` leaves as they are, else the configuration."""
    from kcdsl.diagnostics import Sink
    from kcdsl.source.config import Colour, read_config

    found = _color_option(words) or os.environ.get("KCDSL_COLOR")
    if found in tuple(Colour):
        return str(found)
    if any(os.environ.get(name) for name in _COLOUR_VARIABLES):
        return "auto"
    try:
        return read_config(Path(), Sink()).color
    except OSError:
        return "auto"


def _color_option(words: Sequence[str]) -> str | None:
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


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
