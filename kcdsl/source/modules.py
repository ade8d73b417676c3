"""Locating the files of user modules without running them.

`importlib.util.find_spec("a.b")` would run `a`, so the folders are searched here, in the order in
which the import system searches them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from kcdsl.source.files import is_file, is_folder


def find_file(named: str, folder: Path) -> Path | None:
    """Return the source of `package.module`, or of `file.py` beside the configuration.

    Modules in `folder` come before those installed. None where there is no such source file.
    """
    if is_file_name(named):
        path = folder / named
        return path if is_file(path) else None
    return find_module(named, [str(folder), *(entry for entry in sys.path if entry)])


def is_file_name(named: str) -> bool:
    """Return whether a name is that of a file, as opposed to a module."""
    return named.endswith(".py") or "/" in named


def plain_name(named: str) -> str:
    """Return the normalised name of the module: files without `./` and `x/../`."""
    return str(PurePosixPath(named)) if is_file_name(named) else named


def find_module(name: str, paths: Sequence[str]) -> Path | None:
    """Return the source file of a module, or None; neither it nor its packages are imported."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    where: Sequence[str] = paths
    for depth, part in enumerate(parts):
        found = _look(part, where)
        if found is None and depth == 0:
            found = _installed_in_place(part)
        if found is None:
            return None
        source, where = found
        if depth == len(parts) - 1:
            return source
    return None


_Found = tuple[Path | None, Sequence[str]]
"""The source of a module (None for a namespace package), and its search path of submodules."""


def _look(part: str, where: Sequence[str]) -> _Found | None:
    """Search folders as the import system does: package, module, and namespace last."""
    spaces: list[str] = []
    for folder in where:
        package = Path(folder) / part
        if is_file(package / "__init__.py"):
            return package / "__init__.py", [str(package)]
        module = Path(folder) / f"{part}.py"
        if is_file(module):
            return module, []
        if is_folder(package):
            spaces.append(str(package))
    return (None, spaces) if spaces else None


def _installed_in_place(part: str) -> _Found | None:
    """Search with the finders that editable installs add to the import system."""
    for finder in sys.meta_path:
        if finder is PathFinder or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(part, None)
        if spec is not None:
            source = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
            return source, list(spec.submodule_search_locations or ())
    return None
