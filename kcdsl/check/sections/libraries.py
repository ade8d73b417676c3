"""Libraries: documents of slices, kernels and tables that contracts import by digest."""

from __future__ import annotations

import os
import posixpath
import re
from collections import abc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kcdsl.check.sections.fields import StructureReader
from kcdsl.check.sections.kernels import read_kernel
from kcdsl.check.sections.structure import RawLibrary, is_library, read_library
from kcdsl.check.sections.tables import check_slice, check_table
from kcdsl.diagnostics.codes import DUPLICATE_IDENTIFIER, IMPORT_FILE
from kcdsl.diagnostics.model import Label, Refusal, Severity, Sink
from kcdsl.diagnostics.report import Reporter
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import library_digest
from kcdsl.source.files import is_file, is_folder, read_source
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, parse_yaml

FILE_LIMIT = 64
"""The largest number of libraries of a contract."""
DEPTH_LIMIT = 8
"""The largest depth of nested imports."""
OUTSIDE = "leads outside of the contract's folder"
SIZE_LIMIT = 2**20
"""Largest library in bytes."""
Texts = abc.Mapping[Path, SourceFile]
"""Texts that replace the files at their paths, such as open documents of an editor."""
_STEP = re.compile(r"[^\x00-\x1f\x7f/\\:]+")
_PACKAGE = "package:"


class Loaded(NamedTuple):
    """The file of an import; `library` is None if it is no library or has errors, with the reason
    in `problem`."""

    path: Path
    source: SourceFile | None
    library: ir.Library | None
    problem: str | None = None

    @property
    def digest(self) -> str | None:
        """Return the digest of the library's meaning."""
        return None if self.library is None else library_digest(self.library)


@dataclass(slots=True)
class Loader:
    """Reads libraries, each once; their findings go to the sink. They must lie below `folder`, that
    of the contract, unless the user allows other folders."""

    sink: Sink
    folder: Path | None = None
    known: dict[Path, Loaded] = field(default_factory=dict)
    stack: list[Path] = field(default_factory=list)
    texts: Texts = field(default_factory=dict)

    def load(self, path: Path) -> Loaded:
        """Read and check one library; the path must not be on the stack."""
        path = Path(os.path.normpath(path))
        if path not in self.known:
            self.known[path] = self._load(path)
        return self.known[path]

    def is_open(self, path: Path) -> bool:
        """Return whether a library is being read, so that importing it would be a cycle."""
        here = _identity(Path(os.path.normpath(path)))
        return any(_identity(other) == here for other in self.stack)

    def _load(self, path: Path) -> Loaded:
        if len(self.known) >= FILE_LIMIT or len(self.stack) >= DEPTH_LIMIT:
            limits = f"{FILE_LIMIT} files and {DEPTH_LIMIT} levels"
            return Loaded(path, None, None, f"is one too many: imports end at {limits}")
        source = self.texts.get(path)
        if source is None and self._is_outside(path):
            return Loaded(path, None, None, f"{OUTSIDE} (`kcdsl explain KC610`)")
        if source is None and not is_file(path):
            return Loaded(path, None, None, "is a folder" if is_folder(path) else "is not there")
        try:
            source = source or read_source(path, SIZE_LIMIT)
        except Refusal as refusal:
            return Loaded(path, None, None, f"is not readable: {refusal.diagnostics[0].message}")
        own = Sink()
        self.stack.append(path)
        try:
            root = parse_yaml(source, own)
            library = None
            if root is None or is_library(root):
                library = analyse_library(root, Reporter(source, own), path.parent, self).library
        finally:
            self.stack.pop()
        for diagnostic in own:
            self.sink.add(diagnostic)
        if root is not None and not is_library(root):
            return Loaded(path, source, None, "is not a library: it has no field `library`")
        failed = any(d.severity is Severity.ERROR for d in own)
        return Loaded(path, source, library, "has errors" if failed else None)

    def _is_outside(self, path: Path) -> bool:
        if self.folder is None:
            return False
        from kcdsl.model.files import Artefacts

        try:
            Artefacts.of(self.folder).admitted(path)
        except Refusal:
            return True
        return False


def _identity(path: Path) -> object:
    """Return the identity of a file, equal for all links to it."""
    try:
        found = path.stat()
    except OSError:
        return path
    return (found.st_dev, found.st_ino)


class LibraryAnalysis(NamedTuple):
    """The results of each pass over a library; `library` is None after any error."""

    raw: RawLibrary | None = None
    imports: tuple[Import, ...] = ()
    library: ir.Library | None = None


def analyse_library(
    root: Node | None, reporter: Reporter, folder: Path | None, loader: Loader
) -> LibraryAnalysis:
    """Check a library; its imports are relative to `folder`."""
    from kcdsl.check.sections.imports import resolve_imports

    if not isinstance(root, Mapping):
        return LibraryAnalysis()
    raw = read_library(root, reporter)
    reader = StructureReader(reporter)
    local: dict[str, dict[str, Span]] = {
        "slices": {item.name.text: item.name.span for item in raw.slices},
        "tables": {item.name.text: item.name.span for item in raw.tables},
        "kernels": {name.text: name.span for name, _ in raw.kernels},
    }
    imports = resolve_imports(raw.imports, folder, local, reporter, loader)
    for scalar in (raw.data, *(item.data for item in raw.slices)):
        if scalar is not None:
            _check_path(scalar, "data", reporter)
    for _, kernel in raw.kernels:
        for name in ("folder", "checkpoint", "file"):
            node = kernel.node.get(name)
            if isinstance(node, Scalar) and not node.text.startswith("/"):
                _check_path(node, f"`{name}`", reporter)
    slices = [check_slice(item, reporter) for item in raw.slices]
    tables = [check_table(item, reporter) for item in raw.tables]
    kernels = [(name.text, read_kernel(kernel, reporter)) for name, kernel in raw.kernels]
    if not any((raw.slices, raw.tables, raw.kernels, raw.imports)):
        reader.fields(root, "a library", [e.key.text for e in root.entries], ("slices",))
    if reporter.sink.has_errors or raw.name is None or raw.version is None:
        return LibraryAnalysis(raw, imports)
    default = raw.data.text if raw.data is not None else None
    own = tuple(
        replace(item, data=plain_path(item.data or default)) for item in slices if item is not None
    )
    library = ir.Library(
        raw.name.text,
        raw.version.text,
        own + tuple(s for item in imports for s in item.slices),
        tuple((name, k) for name, k in kernels if k is not None)
        + tuple(pair for item in imports for pair in item.kernels),
        tuple(t for t in tables if t is not None)
        + tuple(t for item in imports for t in item.tables),
    )
    return LibraryAnalysis(raw, imports, library)


def _check_path(scalar: Scalar, what: str, reporter: Reporter) -> None:
    problem = path_problem(scalar.text)
    if problem is not None and not scalar.text.startswith(_PACKAGE):
        reporter.error(
            IMPORT_FILE,
            f"{what} of a library {problem}",
            scalar.span,
            "name it relative to the library",
        )


# --- paths ---------------------------------------------------------------------------------------


def path_problem(text: str) -> str | None:
    """Return why a text is no valid path of a library, or None.

    A path must be relative and normalised; `..` may only be at the start, so that links cannot
    change its meaning.
    """
    if text.startswith(("/", "~")) or re.match(r"[A-Za-z]:", text):
        return "needs a relative path"
    steps = text.removeprefix("./").split("/")
    while steps and steps[0] == "..":
        del steps[0]
    if not steps or not all(_STEP.fullmatch(step) for step in steps):
        return "needs a path of plain steps between `/`"
    if any(step in {".", ".."} for step in steps):
        return "goes up (`..`) after going down"
    return None


def plain_path(data: str | None) -> str | None:
    """Return a data path in its shortest form."""
    if data is None or data.startswith(_PACKAGE):
        return data
    return posixpath.normpath(data)


def rebase(data: str | None, file: str) -> str | None:
    """Return a path of a library relative to the importing file."""
    if data is None or data.startswith(_PACKAGE):
        return data
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), data))


class Import(NamedTuple):
    """A resolved import: its parts, with names, paths and spans of the importing file."""

    file: str
    span: Span
    loaded: Loaded | None
    slices: tuple[ir.Slice, ...] = ()
    kernels: tuple[tuple[str, ir.KernelRef], ...] = ()
    tables: tuple[ir.ThresholdTable, ...] = ()


def collide(what: str, name: Scalar, taken: dict[str, Span], reporter: Reporter) -> bool:
    """Report a name that is already declared; else add it to `taken`."""
    if name.text in taken:
        reporter.error(
            DUPLICATE_IDENTIFIER,
            f"the {what} `{name.text}` is imported and declared already",
            name.span,
            "import it under another name: {NEW: " + name.text + "}",
            (Label(taken[name.text], "declared here"),),
        )
        return True
    taken[name.text] = name.span
    return False
