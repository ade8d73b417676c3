"""Sessions with the real language server, with the requests that editors send."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from lsprotocol import types as lsp
from pytest_lsp import ClientServerConfig, LanguageClient, client_capabilities

HEAD = """\
kcdsl: 1
contract: demo
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels:
  train: {run: torch.eager}
  infer: {run: torch.sdpa, numerics: {preset: torch-sdpa-flash}}
data: prompts.jsonl
slices:
  all: {}
  long: {where: "length > 128"}
"""
"""A contract without clauses."""

ENTRY = "import sys; sys.argv[0] = 'kcdsl'; from kcdsl.cli import main; sys.exit(main())"
NEOVIM, VSCODE, EMACS = "neovim@v0.11.0", "visual_studio_code@v1.65.2", "emacs@v29.1"
EDITORS = (NEOVIM, VSCODE, EMACS)
WAIT = 20.0


class Start(Protocol):
    """Start a session in a folder of this test, or reuse one of the same kind."""

    def __call__(
        self, editor: str = VSCODE, encoding: str | None = None, pulls: bool = False
    ) -> Awaitable[Editor]: ...


async def connect(
    root: Path,
    editor: str = VSCODE,
    encoding: str | None = None,
    pulls: bool = False,
    command: list[str] | None = None,
) -> tuple[LanguageClient, Editor]:
    """Start a server for an editor that works in the folder `root`."""
    words = command or [sys.executable, "-c", ENTRY, "lsp"]
    client = await ClientServerConfig(server_command=words).start()
    assert isinstance(client, LanguageClient)
    capabilities = client_capabilities(editor)
    about = capabilities.text_document
    assert about is not None
    about.diagnostic = lsp.DiagnosticClientCapabilities() if pulls else None
    if encoding is not None:
        general = capabilities.general or lsp.GeneralClientCapabilities()
        general.position_encodings = [lsp.PositionEncodingKind(encoding)]
        capabilities.general = general
    answered = await client.initialize_session(
        lsp.InitializeParams(
            capabilities=capabilities,
            root_uri=root.as_uri(),
            workspace_folders=[lsp.WorkspaceFolder(root.as_uri(), "folder")],
        )
    )
    chosen = answered.capabilities.position_encoding
    session = Editor(client, root, str(getattr(chosen, "value", chosen)), pulls)
    session.capabilities = answered.capabilities

    def note(params: lsp.PublishDiagnosticsParams) -> None:
        session.notified.setdefault(params.uri, []).append(params)

    client.protocol.fm.features.pop(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS, None)
    client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(note)
    return client, session


async def disconnect(client: LanguageClient) -> None:
    """End a session by the shutdown sequence of the protocol."""
    await client.shutdown_session()
    stop: Any = client.stop
    await stop()


class Editor:
    """A session with the server: opens documents and sends requests about them."""

    capabilities: lsp.ServerCapabilities

    def __init__(self, client: LanguageClient, folder: Path, encoding: str, pulls: bool) -> None:
        self.client = client
        self.folder = folder
        self.encoding = encoding
        self.pulls = pulls
        self.notified: dict[str, list[lsp.PublishDiagnosticsParams]] = {}
        self._versions: dict[str, int] = {}

    # --- places ----------------------------------------------------------------------------------

    def units(self, text: str) -> int:
        """Return the length of a text in the session's position encoding, by Python's codecs."""
        if self.encoding == "utf-8":
            return len(text.encode("utf-8"))
        if self.encoding == "utf-16":
            return len(text.encode("utf-16-le")) // 2
        return len(text)

    def position(self, text: str, offset: int) -> lsp.Position:
        """Return the position of an offset in a text."""
        before = text[:offset].replace("\r\n", "\n").split("\n")
        return lsp.Position(len(before) - 1, self.units(before[-1]))

    def range(self, text: str, piece: str, occurrence: int = 0) -> lsp.Range:
        """Return the range of a piece of a text."""
        start = -1
        for _ in range(occurrence + 1):
            start = text.index(piece, start + 1)
        return lsp.Range(self.position(text, start), self.position(text, start + len(piece)))

    def whole(self, text: str) -> lsp.Range:
        """Return the range of a whole text."""
        return lsp.Range(lsp.Position(0, 0), self.position(text, len(text)))

    def edited(self, text: str, edits: list[lsp.TextEdit]) -> str:
        """Return a text after edits, applied as an editor does."""

        def offset(position: lsp.Position) -> int:
            lines = text.split("\n")
            start = sum(len(line) + 1 for line in lines[: position.line])
            line = lines[position.line] if position.line < len(lines) else ""
            taken = 0
            while self.units(line[:taken]) < position.character:
                taken += 1
            return start + taken

        for edit in sorted(edits, key=lambda e: offset(e.range.start), reverse=True):
            text = text[: offset(edit.range.start)] + edit.new_text + text[offset(edit.range.end) :]
        return text

    # --- documents -------------------------------------------------------------------------------

    def open(self, text: str, name: str = "c.kc.yaml") -> str:
        """Open a document of the folder and return its URI."""
        uri = (self.folder / name).as_uri()
        self._versions[uri] = 1
        item = lsp.TextDocumentItem(uri, "kernel-contract", 1, text)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        return uri

    def change(self, uri: str, *changes: Any) -> int:
        """Send changes, and return the new version."""
        self._versions[uri] += 1
        version = self._versions[uri]
        self.client.text_document_did_change(
            lsp.DidChangeTextDocumentParams(
                lsp.VersionedTextDocumentIdentifier(version, uri), list(changes)
            )
        )
        return version

    def replace(self, uri: str, text: str) -> int:
        """Send a whole new text."""
        return self.change(uri, lsp.TextDocumentContentChangeWholeDocument(text))

    def change_unknown(self, uri: str) -> None:
        """Send a change of a document that was never opened."""
        self.client.text_document_did_change(
            lsp.DidChangeTextDocumentParams(
                lsp.VersionedTextDocumentIdentifier(7, uri),
                [lsp.TextDocumentContentChangeWholeDocument("text")],
            )
        )

    def close(self, uri: str) -> None:
        """Close a document."""
        self._versions.pop(uri, None)
        self.client.text_document_did_close(lsp.DidCloseTextDocumentParams(self.document(uri)))

    def close_all(self) -> None:
        """Close every document."""
        for uri in tuple(self._versions):
            self.close(uri)

    def document(self, uri: str) -> lsp.TextDocumentIdentifier:
        """Return the identifier of a document."""
        return lsp.TextDocumentIdentifier(uri)

    # --- findings --------------------------------------------------------------------------------

    async def published(self, uri: str, version: int | None) -> list[lsp.Diagnostic]:
        """Return what is published for a version."""
        async with asyncio.timeout(WAIT):
            while True:
                found = [p for p in self.notified.get(uri, []) if p.version == version]
                if found:
                    return list(found[-1].diagnostics)
                await asyncio.sleep(0.005)

    async def findings(self, uri: str) -> list[lsp.Diagnostic]:
        """Return the diagnostics of the newest version, pushed or pulled."""
        if not self.pulls:
            return await self.published(uri, self._versions[uri])
        report = await self.pull(uri)
        assert isinstance(report, lsp.RelatedFullDocumentDiagnosticReport)
        return list(report.items)

    async def pull(self, uri: str, previous: str | None = None) -> Any:
        """Ask for diagnostics."""
        return await self.client.text_document_diagnostic_async(
            lsp.DocumentDiagnosticParams(self.document(uri), previous_result_id=previous)
        )
