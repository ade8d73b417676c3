"""Keep the working folder out of what this process, and those that it starts, import.

A contract that came from elsewhere lies in the working folder as often as not, and beside it may be
a `yaml.py` or a `libz3.so`. `python -m kcdsl`, and an entry of `PYTHONPATH` that is empty or
relative, have Python look there first.
"""

from __future__ import annotations

import builtins
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import kcdsl


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
