"""The process of a command: its module search path, streams, and colours.

The working folder often has an untrusted contract, possibly with a `yaml.py` or a `libz3.so`. With
`python -m kcdsl`, or an empty or relative entry of `PYTHONPATH`, Python searches it first.
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
    """Remove the working folder from the search paths of modules and of the z3 library.

    Absolute entries of `PYTHONPATH` are kept, since the user set them, and so is the folder that
    kcdsl was imported from. Parts of the standard library are imported before this call; `python -P
    -m kcdsl` and the program `kcdsl` protect those imports, too.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = {entry for entry in given if os.path.isabs(entry)} | {_parent(kcdsl.__file__)}
    first = _library_of_python()
    sys.path[:first] = [e for e in sys.path[:first] if not _is_here(e) or e in kept]
    _find_z3_in_its_package()


def use_large_pages() -> None:
    """Let torch place large tensors in large pages of memory, unless the user chose otherwise: the
    system clears them many times faster."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _parent(file: str | None) -> str:
    return "" if file is None else str(Path(file).resolve().parent.parent)


def _library_of_python() -> int:
    """Return the number of entries before the standard library; those of `site` come after it."""
    library = os.path.dirname(os.__file__)
    return sys.path.index(library) if library in sys.path else len(sys.path)


def _is_here(entry: str) -> bool:
    try:
        return entry == "" or os.path.samefile(entry, os.curdir)
    except OSError:
        return False


def _find_z3_in_its_package() -> None:
    """Make z3 load the library of its own package instead of one in the working folder.

    `Z3_LIB_DIRS` replaces the folders that z3 searches by default.
    """
    spec = find_spec("z3")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    folders = [str(Path(root, inner)) for root in roots for inner in ("lib", ".")]
    vars(builtins)["Z3_LIB_DIRS"] = [*folders, os.path.join(sys.prefix, "lib")]


def raise_collection_threshold() -> None:
    """Collect cyclic garbage after 100,000 new objects, not 700: large contracts are trees, and a
    short command ends before."""
    gc.set_threshold(100_000)


def skip_final_collection() -> None:
    """Skip the garbage collection at the end of the process, which frees all memory anyway.

    Not with DuckDB, whose bindings print remaining objects at exit.
    """
    if "_duckdb" not in sys.modules:
        gc.freeze()


# --- streams -------------------------------------------------------------------------------------


def mend_streams() -> None:
    """Make both streams accept any text: a closed stream discards it, and characters missing in
    the encoding are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter does not fail again at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = None


# --- colours -------------------------------------------------------------------------------------


@contextmanager
def coloured(words: Sequence[str]) -> Iterator[None]:
    """Set the colour mode of the command line or configuration in the environment, for all
    printers."""
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
    """Return `auto`, `always` or `never`: from the command line, else KCDSL_COLOR, else `auto` if
    NO_COLOR or FORCE_COLOR is set, else the configuration."""
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
    """Return the value of the last `--color`; argparse refuses invalid values."""
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
