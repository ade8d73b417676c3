"""The Python code of a contract's own: compiled from its source, and known by its digests.

`module: package.module:factory` and the modules of metrics import what else they need. While such
code is imported, now or later, its files are read by the loader here: the bytes that are compiled
are the bytes that are hashed, and no cache of compiled code is read or written.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib import invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from kcdsl.model.files import MODULE, Artefacts, file_digest
from kcdsl.source.modules import is_file_name

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_NOT_OWN = frozenset({"kcdsl", "kcdsl_backends", "kcdsl_certs"})


class SourceOnly(SourceFileLoader):
    """Compiles a module from its source, and records the digest of that."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the source as it is now."""
        path = self.get_filename(fullname)
        data = self.get_data(path)
        _FINDER.digests[Path(path).resolve()] = hashlib.sha256(data).hexdigest()
        code: CodeType = self.source_to_code(data, path)
        return code


class _Finder(MetaPathFinder):
    """Finds modules where the import system would, and gives those of a contract their loader."""

    def __init__(self) -> None:
        self.roots: dict[Path, set[Path]] = {}
        self.digests: dict[Path, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that lies below a root; None for any other."""
        if fullname.partition(".")[0] in _NOT_OWN:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not spec.has_location:
            return None
        place = Path(spec.origin).resolve()
        if not any(_is_below(place, root) for roots in self.roots.values() for root in roots):
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = SourceOnly(fullname, spec.origin)
            spec.cached = None
        else:
            self.digests[place] = file_digest(place)
        return spec


_FINDER = _Finder()


def _is_below(path: Path, root: Path) -> bool:
    return path.is_relative_to(root) and not _INSTALLED & set(path.relative_to(root).parts)


def watch(name: str, source: Path | None, base: Path) -> None:
    """From now on, import a module and what else is its own from their sources, and record that.

    Its own is what lies below the contract's folder `base`, or below the folder that its outermost
    package lies in; of an installed package, the package. What was imported before and has changed
    since is forgotten.
    """
    roots = _FINDER.roots.setdefault(base.resolve(), {base.resolve()})
    if source is not None:
        roots.add(_root_of(name, source.resolve()))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    known = _imported()
    if any(not path.is_file() or file_digest(path) != _FINDER.digests[path] for path, _ in known):
        for _, module in known:  # those that did not change hold on to what did
            del sys.modules[module]
    invalidate_caches()


def _root_of(name: str, source: Path) -> Path:
    root = source.parent
    if is_file_name(name):
        return root
    for _ in range(name.count(".") + (source.name == "__init__.py")):
        root = root.parent
    outermost = name.partition(".")[0]
    if outermost not in sys.stdlib_module_names and not _INSTALLED & set(root.parts):
        return root
    package = root / outermost
    return package if package.is_dir() else source


def _imported() -> tuple[tuple[Path, str], ...]:
    """Return the files of the modules that are imported and were recorded, with their names."""
    found: list[tuple[Path, str]] = []
    if not _FINDER.digests:
        return ()
    for name, module in tuple(sys.modules.items()):
        origin: Any = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(origin, str) and (path := Path(origin).resolve()) in _FINDER.digests:
            found.append((path, name))
    return tuple(found)


def compiled_digest(source: Path) -> str | None:
    """Return the sha256 (hex) of a source as it was compiled; None where it was not."""
    return _FINDER.digests.get(source.resolve())


def imported_code(files: Artefacts) -> dict[Path, tuple[str, str]]:
    """Return the files of the own modules that are imported now, here or by a worker, each with its
    name in a statement and the sha256 of what was compiled or loaded of it.

    The name is the path below the contract's folder; elsewhere, that of the module.
    """
    roots = _FINDER.roots.get(files.base.resolve(), set())
    found = {Path(path): item for path, item in files.code.items()}
    for path, module in _imported():
        if not any(_is_below(path, root) for root in roots):
            continue
        inside = path.is_relative_to(files.base)
        name = path.relative_to(files.base).as_posix() if inside else f"{MODULE}{module}"
        found[path] = (name, _FINDER.digests[path])
        files.record_code({str(path): found[path]})
    return dict(sorted(found.items()))


def compiled_files() -> int:
    """Return how many own files were compiled or loaded so far in this process."""
    return len(_FINDER.digests)
