"""The state of a session: open documents, worker threads, and processes.

Checks have a separate thread, so that findings do not wait for other requests. Waiting requests
can be cancelled. `kcdsl verify` and `kcdsl evaluate` run in separate processes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lsprotocol import types as lsp
from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.diagnostics.model import Refusal
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.lsp.text.documents import Checker, Document, Snapshot, Texts, document
from kcdsl.lsp.text.positions import apply_changes
from kcdsl.source.files import read_source


@dataclass(slots=True)
class Session:
    """The open documents. Only one thread changes them; returned values are immutable."""

    encoding: Encoding = Encoding.Utf16
    _documents: dict[str, Document] = field(default_factory=dict)

    def open(self, uri: str, version: int, text: str) -> Document:
        """Add a document that the client opened."""
        self._documents[uri] = document(uri, text, version)
        return self._documents[uri]

    def change(
        self, uri: str, version: int, changes: Iterable[lsp.TextDocumentContentChangeEvent]
    ) -> Document | None:
        """Apply changes to an open document; None where the client has not opened it."""
        known = self._documents.get(uri)
        if known is None:
            return None
        text = apply_changes(known.source.text, changes, self.encoding)
        self._documents[uri] = Document(uri, SourceFile(known.source.name, text), version)
        return self._documents[uri]

    def close(self, uri: str) -> None:
        """Remove a document that the client closed."""
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


def _may_import(document: Document, other: Document) -> bool:
    """Return whether a document may depend on another: it names the other one, or the other one is
    a library, which may be imported indirectly."""
    if other.path is None or other.uri == document.uri or "imports" not in document.source.text:
        return False
    return "library" in other.source.text or other.path.name in document.source.text


def read_document(path: Path) -> Document | None:
    """Return a document from disk; None where it cannot be read."""
    try:
        return Document(path.as_uri(), read_source(path))
    except (Refusal, ValueError, OSError):
        return None


# --- threads --------------------------------------------------------------------------------------


Answer = TypeVar("Answer")


def _one_thread(name: str) -> Callable[[], ThreadPoolExecutor]:
    return lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)


@dataclass(slots=True)
class Threads:
    """Two threads: one for checks, one for answers."""

    checker: Checker = field(default_factory=Checker)
    _checks: ThreadPoolExecutor = field(default_factory=_one_thread("check"))
    _answers: ThreadPoolExecutor = field(default_factory=_one_thread("answer"))

    async def snapshot(self, document: Document, texts: Texts) -> Snapshot:
        """Return the snapshot of a document."""
        return await self._run(self._checks, lambda: self.checker.snapshot(document, texts))

    async def answer(self, question: Callable[[], Answer]) -> Answer:
        """Return the answer of a feature."""
        return await self._run(self._answers, question)

    async def forget(self, uri: str | None = None) -> None:
        """Forget a document, or all of them."""
        await self._run(self._checks, lambda: self.checker.forget(uri))

    def close(self) -> None:
        """Stop the threads; waiting work is dropped."""
        for pool in (self._checks, self._answers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(pool, work)


# --- processes ------------------------------------------------------------------------------------


_ENTRY = "import sys; sys.argv[0] = 'kcdsl'; from kcdsl.cli import main; sys.exit(main())"
_SAFE = "-P"
"""Python does not look for modules in the folder of the contract, where the command runs."""
_WORDS = {0: "holds", 1: "is violated", 2: "could not be decided: see the log", 3: "is undecided"}


@dataclass(frozen=True, slots=True)
class Finished:
    """The exit code and the output of a command."""

    code: int
    output: str

    def message(self, subject: str) -> str:
        """Return one sentence about the outcome."""
        return f"{subject} {_WORDS.get(self.code, f'ended with status {self.code}')}"


def arguments(command: str, contract: Path, clause: str) -> list[str]:
    """Return the command line that decides a clause; `evaluate` decides the whole contract."""
    words = [sys.executable, _SAFE, "-c", _ENTRY, command, str(contract)]
    return [*words, "--clause", clause] if command == "verify" else words


async def run(command: list[str], folder: Path) -> Finished:
    """Run a command in a folder; cancelling ends the process."""
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode is not None
    return Finished(process.returncode, output.decode("utf-8", "replace"))
