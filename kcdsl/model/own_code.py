"""A contract's own Python code: compiled from its source, and identified by digests.

`module: package.module:factory` and the modules of metrics may import further modules. After the
first import, all their source files are compiled here, also files loaded by path: the compiled
bytes are the hashed bytes, and no cache of compiled code is read or written.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from kcdsl.model.files import MODULE, Artefacts, file_digest
from kcdsl.source.modules import is_file_name

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_NOT_OWN = frozenset({"kcdsl", "kcdsl_backends", "kcdsl_certs", "__main__", "__mp_main__"})
_SEVERAL = "several"
"""In place of a digest: the file had changed when it was loaded again."""


class _Loaded(NamedTuple):
    """A file that was compiled or loaded: the name of the module, its path before and after links
    are followed, and the sha256 (hex) of the compiled bytes."""

    module: str
    places: tuple[Path, Path]
    sha256: str


class _Finder(MetaPathFinder):
    """Finds modules as the import system does, before other finders can attach another loader."""

    def __init__(self) -> None:
        self.roots: dict[Path, set[Path]] = {}
        self.loaded: dict[Path, _Loaded] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module below a root; None for any other."""
        if fullname.partition(".")[0] in _NOT_OWN:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not spec.has_location:
            return None
        places = _places(spec.origin)
        if not self.owns(fullname, places):
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.cached = None
        else:
            self.record(fullname, places, file_digest(places[0]))
        return spec

    def owns(self, module: str, places: tuple[Path, Path]) -> bool:
        """Return whether a module at these paths is a contract's own."""
        found = any(_is_below(places, roots) for roots in self.roots.values())
        return found and module.partition(".")[0] not in _NOT_OWN

    def record(self, module: str, places: tuple[Path, Path], sha256: str) -> None:
        """Record the digest of a file that is about to be run."""
        before = self.loaded.get(places[1])
        same = before is None or before.sha256 == sha256
        self.loaded[places[1]] = _Loaded(module, places, sha256 if same else _SEVERAL)


_FINDER = _Finder()
_CODE_OF_PYTHON = SourceFileLoader.get_code


def _code_of(loader: SourceFileLoader, fullname: str) -> CodeType | None:
    """Return the code of a module; own modules are compiled from their current source."""
    path = loader.get_filename(fullname)
    places = _places(path)
    if not _FINDER.owns(fullname, places):
        return _CODE_OF_PYTHON(loader, fullname)
    data = loader.get_data(path)
    _FINDER.record(fullname, places, hashlib.sha256(data).hexdigest())
    code: CodeType = loader.source_to_code(data, path)
    return code


def _places(origin: str) -> tuple[Path, Path]:
    return Path(os.path.abspath(origin)), Path(os.path.realpath(origin))


def _is_below(places: tuple[Path, Path], roots: Collection[Path]) -> bool:
    """Return whether a file, or its link, lies below a root and in no installed package."""
    return any(
        place.is_relative_to(root) and not _INSTALLED & set(place.relative_to(root).parts)
        for root in roots
        for place in places
    )


def record_imports(name: str, source: Path | None, base: Path) -> None:
    """Import a module and its contract's other own modules from source from now on, and record
    them.

    Own modules are those below the contract's folder `base`, a folder of PYTHONPATH, or the folder
    of the outermost package; of an installed package, the package; and see `importing`. Unload
    modules that changed since their import, modules of other contracts, and packages in the
    contract's folder that were imported elsewhere: the content of their files at import is unknown.
    """
    roots = _FINDER.roots.setdefault(base.resolve(), {base.resolve(), Path(os.path.abspath(base))})
    roots.update(_added_folders())
    if source is not None:
        roots.add(_root_of(name, source.resolve()))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    # code may load a file by path with Python's own loader, without a finder
    SourceFileLoader.get_code = _code_of  # type: ignore[method-assign, assignment]
    loaded = _FINDER.loaded
    if any(not path.is_file() or file_digest(path) != loaded[path].sha256 for path in loaded):
        for one in loaded.values():  # unchanged modules may refer to changed ones
            sys.modules.pop(one.module, None)
        loaded.clear()
    for one in loaded.values():  # modules of other contracts may have the same names
        if not _is_below(one.places, roots):
            sys.modules.pop(one.module, None)
    for module, places in _modules():
        same_package = module.partition(".")[0] == name.partition(".")[0]
        if same_package and places[1] not in loaded and _is_below(places, (base.resolve(),)):
            del sys.modules[module]
    invalidate_caches()


@contextmanager
def importing(base: Path) -> Iterator[None]:
    """Count the files that are imported in this context as the contract's own, wherever its code
    found them, for example in a folder that it added to `sys.path`; not those of Python and of
    installed packages."""
    before = set(sys.modules)
    yield
    _FINDER.roots[base.resolve()].update(
        places[1]
        for name, places in _modules()
        if name not in before
        and name.partition(".")[0] not in sys.stdlib_module_names
        and not _INSTALLED & set(places[1].parts)
    )


def _added_folders() -> Iterator[Path]:
    """Yield the folders of PYTHONPATH that hold no installed packages."""
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        folder = Path(os.path.realpath(entry))
        if os.path.isabs(entry) and not _INSTALLED & set(folder.parts):
            yield folder


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


def _modules() -> Iterator[tuple[str, tuple[Path, Path]]]:
    """Yield the names and paths of the modules that are imported from files."""
    for name, module in tuple(sys.modules.items()):
        origin: Any = getattr(getattr(module, "__spec__", None), "origin", None)
        if name.partition(".")[0] in _NOT_OWN or not isinstance(origin, str):
            continue
        if os.path.isfile(origin):
            yield name, _places(origin)


def compiled_digest(source: Path) -> str | None:
    """Return the sha256 (hex) of a source when it was compiled; None where it was not."""
    found = _FINDER.loaded.get(source.resolve())
    return None if found is None else found.sha256


def imported_code(files: Artefacts) -> dict[Path, tuple[str, str]]:
    """Return the files of the own modules that were imported, here or by a worker, each with its
    name in a statement and the sha256 of the compiled or loaded bytes.

    The name is the path below the contract's folder, or else the name of the module. A module
    that was imported elsewhere before is identified by its current file.

    Raises Refusal where a file has changed.
    """
    roots = _FINDER.roots.get(files.base.resolve(), set())
    found = {Path(path): item for path, item in files.code.items()}
    own = [one for one in _FINDER.loaded.values() if _is_below(one.places, roots)]
    for name, places in _modules():
        if places[1] not in _FINDER.loaded and places[1] not in found and _is_below(places, roots):
            own.append(_Loaded(name, places, file_digest(places[1])))
    for module, (_, path), sha256 in own:
        inside = path.is_relative_to(files.base)
        name = path.relative_to(files.base).as_posix() if inside else f"{MODULE}{module}"
        found[path] = (name, sha256)
        files.record_code({str(path): found[path]})
    return dict(sorted(found.items()))


def compiled_files() -> int:
    """Return the number of own files compiled or loaded so far in this process."""
    return len(_FINDER.loaded)
