"""The state of a session: the open documents, and what the client can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kcdsl.diagnostics.model import Refusal
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.lsp.documents import Document, Texts, document, path_of
from kcdsl.lsp.positions import Change, Encoding, apply_changes
from kcdsl.source.files import is_folder, read_source

_NAMES = (".kc.yaml", ".kc.yml")
_LEFT_OUT = {"node_modules", "__pycache__", "build", "dist"}
_MOST_FILES = 500


@dataclass(slots=True)
class Session:
    """The open documents. All changes come from one thread; the values handed out never change."""

    encoding: Encoding = Encoding.UTF16
    _documents: dict[str, Document] = field(default_factory=dict)

    def open(self, uri: str, version: int, text: str) -> Document:
        """Take a document that the client opened."""
        self._documents[uri] = document(uri, text, version)
        return self._documents[uri]

    def change(self, uri: str, version: int, changes: Iterable[Change]) -> Document | None:
        """Apply changes to an open document; None where the client has not opened it."""
        known = self._documents.get(uri)
        if known is None:
            return None
        text = apply_changes(known.source.text, changes, self.encoding)
        self._documents[uri] = Document(uri, SourceFile(known.source.name, text), version)
        return self._documents[uri]

    def close(self, uri: str) -> None:
        """Forget a document that the client closed."""
        self._documents.pop(uri, None)

    def get(self, uri: str) -> Document | None:
        """Return an open document."""
        return self._documents.get(uri)

    def __iter__(self) -> Iterator[Document]:
        return iter(tuple(self._documents.values()))

    def texts(self, of: Document) -> Texts:
        """Return the other open documents that a document may import, by their paths."""
        return {
            other.path: other.source
            for other in self
            if other.path is not None and _may_import(of, other)
        }

    def importers(self, of: Document) -> list[Document]:
        """Return the open documents that may import a document."""
        return [other for other in self if _may_import(other, of)]


def takes_part_in_imports(document: Document) -> bool:
    """Say whether a document may import others or be imported."""
    return "imports" in document.source.text or "library" in document.source.text


def _may_import(document: Document, other: Document) -> bool:
    """Say whether a document may depend on another: one that it names, or a library, which may be
    behind one that it names."""
    if other.path is None or other.uri == document.uri or "imports" not in document.source.text:
        return False
    return "library" in other.source.text or other.path.name in document.source.text


def read_document(path: Path) -> Document | None:
    """Return a document as it is on disk; None where it cannot be read."""
    try:
        return Document(path.as_uri(), read_source(path))
    except (Refusal, ValueError, OSError):
        return None


def contracts_below(folder: Path) -> list[Path]:
    """Return the contracts and libraries below a folder, hidden folders left out."""
    found: list[Path] = []
    waiting = [folder]
    while waiting and len(found) < _MOST_FILES:
        place = waiting.pop()
        try:
            entries = sorted(place.iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _LEFT_OUT:
                continue
            if entry.is_dir() and not entry.is_symlink():
                waiting.append(entry)
            elif entry.name.endswith(_NAMES) or entry.name == "contract.yaml":
                found.append(entry)
    return found[:_MOST_FILES]


def folder_of(uri: str) -> Path | None:
    """Return the folder that a client works in; None where it is none on this machine."""
    path = path_of(uri)
    return path if path is not None and is_folder(path) else None
