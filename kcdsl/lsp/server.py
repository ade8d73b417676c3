"""The language server: connects the protocol with the features."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from lsprotocol.types import PositionEncodingKind as Encoding
from pygls.capabilities import get_capability
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method

from kcdsl import __version__
from kcdsl.diagnostics.codes import find as find_code
from kcdsl.lsp import answers
from kcdsl.lsp.answers import Question
from kcdsl.lsp.features.hover import code_text
from kcdsl.lsp.features.rename import CannotRename
from kcdsl.lsp.session import (
    Session,
    Threads,
    arguments,
    read_document,
    run,
)
from kcdsl.lsp.text.documents import Document, path_of

_log = logging.getLogger(__name__)
_DEBOUNCE = 0.02
"""Seconds of silence after an edit before the document is checked."""
_REQUEST_FAILED = -32803
_WATCHED = ("**/*.kc.{yaml,yml}", "**/contract.yaml", "**/{kcdsl,pyproject}.toml", "**/*.py")


class _Protocol(LanguageServerProtocol):
    """The protocol of pygls without its documents, which have other line separators."""

    @lsp_method(lsp.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: lsp.DidOpenTextDocumentParams) -> None:
        self.fm.features[lsp.TEXT_DOCUMENT_DID_OPEN](params)

    @lsp_method(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: lsp.DidChangeTextDocumentParams) -> None:
        self.fm.features[lsp.TEXT_DOCUMENT_DID_CHANGE](params)

    @lsp_method(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: lsp.DidCloseTextDocumentParams) -> None:
        self.fm.features[lsp.TEXT_DOCUMENT_DID_CLOSE](params)


class Server(LanguageServer):
    """One server for one client."""

    def __init__(self) -> None:
        super().__init__("kcdsl", __version__, protocol_cls=_Protocol)
        self.session = Session()
        self.work = Threads()
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._decisions: set[asyncio.Task[Any]] = set()
        self._one_decision = asyncio.Lock()

    # --- what the client can do ------------------------------------------------------------------

    def began(self, params: lsp.InitializeParams) -> None:
        """Store the negotiated options; called before the answer of `initialize`."""
        chosen = self.workspace.position_encoding
        self.session.encoding = Encoding(str(getattr(chosen, "value", chosen)))

    @property
    def pulls(self) -> bool:
        """Return whether the client pulls diagnostics, so that they need not be pushed."""
        return get_capability(self.client_capabilities, "text_document.diagnostic") is not None

    # --- findings --------------------------------------------------------------------------------

    def changed(self, document: Document) -> None:
        """Schedule a check of a document and its possible importers after a short delay."""
        others = self.session.importers(document)
        for item in (document, *others):
            if not self.pulls:
                self._schedule(item.uri)
        if self.pulls and others:
            self._refresh()

    def changed_on_disk(self) -> None:
        """Check every open document again, since files that it names may have changed."""
        task = asyncio.ensure_future(self.work.forget())
        task.add_done_callback(lambda _: self._check_all())

    def _check_all(self) -> None:
        for document in self.session:
            if not self.pulls:
                self._schedule(document.uri)
        if self.pulls:
            self._refresh()

    def _refresh(self) -> None:
        if get_capability(self.client_capabilities, "workspace.diagnostics.refresh_support"):
            self.workspace_diagnostic_refresh(None)

    def closed(self, uri: str) -> None:
        """Remove the findings of a closed document."""
        task = self._pending.pop(uri, None)
        if task is not None:
            task.cancel()
        if not self.pulls:
            self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, []))
        asyncio.ensure_future(self.work.forget(uri))  # noqa: RUF006

    def _schedule(self, uri: str) -> None:
        task = self._pending.get(uri)
        if task is not None:
            task.cancel()
        self._pending[uri] = asyncio.ensure_future(self._publish(uri))

    async def _publish(self, uri: str) -> None:
        """Publish the findings of the newest version; an older one is never published after it."""
        await asyncio.sleep(_DEBOUNCE)
        document = self.session.get(uri)
        if document is None:
            return
        try:
            snapshot = await self.work.snapshot(document, self.session.texts(document))
            found = answers.pushed(Question(snapshot, self.session.encoding))
        except Exception as error:
            self.log(error, "publishing diagnostics")
            return
        if self.session.get(uri) == document:
            self.text_document_publish_diagnostics(
                lsp.PublishDiagnosticsParams(uri, found, document.version)
            )

    # --- questions -------------------------------------------------------------------------------

    async def ask(self, uri: str, feature: Callable[..., Any], params: Any, empty: Any) -> Any:
        """Return the answer of a feature about an open document. If the feature fails, return
        `empty`, or an error for `NO_ANSWER`."""
        document = self.session.get(uri)
        if document is None and empty is not answers.NO_ANSWER:
            return empty
        try:
            if document is None:
                raise LookupError(f"{uri} is not open")
            snapshot = await self.work.snapshot(document, self.session.texts(document))
            question = Question(snapshot, self.session.encoding, self.client_capabilities)
            return await self.work.answer(partial(feature, question, params))
        except CannotRename as refusal:
            raise JsonRpcException(str(refusal), _REQUEST_FAILED) from refusal
        except Exception as error:
            self.log(error, feature.__name__)
            if empty is answers.NO_ANSWER:
                raise JsonRpcException(f"{feature.__name__} failed", _REQUEST_FAILED) from error
            return empty

    def log(self, error: Exception, doing: str) -> None:
        """Write a failure to the client's log."""
        _log.error("%s failed", doing, exc_info=error)
        text = f"{doing} failed: {type(error).__name__}: {error}"
        self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, text))

    # --- commands --------------------------------------------------------------------------------

    async def decide(self, command: str, uri: str, clause: str) -> dict[str, Any]:
        """Decide a clause in a separate process, and report the outcome."""
        path, document = path_of(uri), self.session.get(uri)
        if path is None:
            raise JsonRpcException("save the contract to a file first", _REQUEST_FAILED)
        if document is not None and not _is_saved(document, path):
            raise JsonRpcException("save the contract first: files are decided", _REQUEST_FAILED)
        subject = f"clause {clause}" if command == "verify" else f"contract {path.name}"
        async with self._one_decision:
            task = asyncio.ensure_future(run(arguments(command, path, clause), path.parent))
            self._decisions.add(task)
            task.add_done_callback(self._decisions.discard)
            finished = await task
        severity = lsp.MessageType.Info if finished.code == 0 else lsp.MessageType.Warning
        self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Log, finished.output))
        self.window_show_message(lsp.ShowMessageParams(severity, finished.message(subject)))
        if get_capability(self.client_capabilities, "workspace.code_lens") is not None:
            self.workspace_code_lens_refresh(None)
        return {"status": finished.code, "output": finished.output}

    def explain(self, code: str) -> str:
        """Show the page of a code, if the client supports it, and return its text."""
        text, found = code_text(code), find_code(code)
        page = found.uri if found is not None else None
        able = get_capability(self.client_capabilities, "window.show_document.support")
        if page is not None and able:
            self.window_show_document(lsp.ShowDocumentParams(page))
        else:
            self.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
        return text

    def end(self) -> None:
        """Stop running work."""
        for task in (*self._pending.values(), *self._decisions):
            task.cancel()
        self.work.close()


def _is_saved(document: Document, path: Path) -> bool:
    on_disk = read_document(path)
    return on_disk is not None and on_disk.source.text == document.source.text


def build() -> Server:
    """Return a server with every feature registered."""
    server = Server()
    _follow_documents(server)
    _answer_questions(server)
    _take_commands(server)
    return server


def _follow_documents(server: Server) -> None:
    @server.feature(lsp.INITIALIZE)
    def began(params: lsp.InitializeParams) -> None:
        server.began(params)

    @server.feature(lsp.INITIALIZED)
    def ready(params: lsp.InitializedParams) -> None:
        _watch_files(server)

    @server.feature(lsp.SHUTDOWN)
    def end(params: None) -> None:
        server.end()

    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: lsp.DidOpenTextDocumentParams) -> None:
        item = params.text_document
        server.changed(server.session.open(item.uri, item.version, item.text))

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: lsp.DidChangeTextDocumentParams) -> None:
        about = params.text_document
        document = server.session.change(about.uri, about.version, params.content_changes)
        if document is not None:
            server.changed(document)

    @server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: lsp.DidSaveTextDocumentParams) -> None:
        document = server.session.get(params.text_document.uri)
        if document is not None:
            server.changed(document)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: lsp.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        document = server.session.get(uri)
        server.session.close(uri)
        server.closed(uri)
        for other in server.session.importers(document) if document is not None else ():
            server.changed(other)

    @server.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def files_changed(params: lsp.DidChangeWatchedFilesParams) -> None:
        server.changed_on_disk()

    @server.feature(lsp.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def configured(params: lsp.DidChangeConfigurationParams) -> None:
        server.changed_on_disk()


def _watch_files(server: Server) -> None:
    able = "workspace.did_change_watched_files.dynamic_registration"
    if not get_capability(server.client_capabilities, able):
        return
    watchers = [lsp.FileSystemWatcher(pattern) for pattern in _WATCHED]
    options = lsp.DidChangeWatchedFilesRegistrationOptions(watchers)
    method = lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES
    server.client_register_capability(
        lsp.RegistrationParams([lsp.Registration("kcdsl-files", method, options)])
    )


def _handler(
    server: Server, feature: Callable[..., Any], empty: Any
) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    async def handle(params: Any) -> Any:
        return await server.ask(params.text_document.uri, feature, params, empty)

    return handle


def _answer_questions(server: Server) -> None:
    for method, (feature, empty, options) in answers.FEATURES.items():
        server.feature(method, options)(_handler(server, feature, empty))


def _take_commands(server: Server) -> None:
    @server.command("kcdsl.verify")
    async def verify(uri: str, clause: str) -> dict[str, Any]:
        return await server.decide("verify", uri, clause)

    @server.command("kcdsl.evaluate")
    async def evaluate(uri: str, clause: str) -> dict[str, Any]:
        return await server.decide("evaluate", uri, clause)

    @server.command("kcdsl.explain")
    def explain(code: str) -> str:
        return server.explain(code)


def serve() -> None:
    """Serve one client on standard input and output."""
    server = build()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    # Only protocol messages may be written to standard output.
    sys.stdout = sys.stderr
    server.start_io(stdin, stdout)
