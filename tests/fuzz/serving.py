"""Check properties of the language server's answers at every cursor position."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from lsprotocol.converters import get_converter
from lsprotocol.types import Position as Place
from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.answers import FEATURES, Question
from kcdsl.lsp.features.rename import CannotRename
from kcdsl.lsp.text.documents import Checker, Snapshot, document
from kcdsl.lsp.text.positions import Lines
from tests.fuzz.promise import expect

CURSORS = 5
"""The largest number of cursor positions."""
_CONVERTER = get_converter()
_WORD_END = re.compile(r"(?<=\w)(?!\w)|(?<=[(\[{:,])")
NEW_NAME = "new_name"
"""The new name in renames."""


def asked(source: SourceFile, before: str | None, folder: Path) -> Question:
    """Return a request context for an open document whose previous text was `before`."""
    uri, checker = (folder / source.name).absolute().as_uri(), Checker()
    if before is not None:
        checker.snapshot(document(uri, before, 1), {})
    snapshot = checker.snapshot(document(uri, source.text, 2), {})
    return Question(snapshot, (Encoding.Utf16, Encoding.Utf8)[len(source.text) % 2])


def cursors(text: str) -> list[int]:
    """Return a few offsets in a text, at the ends of words and behind signs."""
    ends = [found.start() for found in _WORD_END.finditer(text)] or [0]
    return sorted({ends[len(ends) * n // CURSORS] for n in range(CURSORS)} | {len(text)})


def requests(question: Question) -> Iterator[tuple[str, Any, int]]:
    """Yield every method with its parameters about a document, and the cursor."""
    document, lines = question.snapshot.document, question.snapshot.document.lines
    identifier = lsp.TextDocumentIdentifier(document.uri)
    whole = _range(lines, Span(0, len(lines.text)), question.encoding)
    options = lsp.FormattingOptions(2, True)
    yield lsp.TEXT_DOCUMENT_DIAGNOSTIC, lsp.DocumentDiagnosticParams(identifier), 0
    yield lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL, lsp.DocumentSymbolParams(identifier), 0
    yield lsp.TEXT_DOCUMENT_FORMATTING, lsp.DocumentFormattingParams(identifier, options), 0
    yield lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL, lsp.SemanticTokensParams(identifier), 0
    yield lsp.TEXT_DOCUMENT_INLAY_HINT, lsp.InlayHintParams(identifier, whole), 0
    yield lsp.TEXT_DOCUMENT_CODE_LENS, lsp.CodeLensParams(identifier), 0
    for offset in cursors(lines.text):
        here = _range(lines, Span(offset, offset), question.encoding)
        at, context = here.start, lsp.CodeActionContext([])
        yield lsp.TEXT_DOCUMENT_HOVER, lsp.HoverParams(identifier, at), offset
        yield lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionParams(identifier, at), offset
        yield lsp.TEXT_DOCUMENT_CODE_ACTION, lsp.CodeActionParams(identifier, here, context), offset
        yield lsp.TEXT_DOCUMENT_DEFINITION, lsp.DefinitionParams(identifier, at), offset
        with_declaration = lsp.ReferenceContext(include_declaration=True)
        references = lsp.ReferenceParams(with_declaration, identifier, at)
        yield lsp.TEXT_DOCUMENT_REFERENCES, references, offset
        yield lsp.TEXT_DOCUMENT_PREPARE_RENAME, lsp.PrepareRenameParams(identifier, at), offset
        yield lsp.TEXT_DOCUMENT_RENAME, lsp.RenameParams(identifier, at, NEW_NAME), offset


def _range(lines: Lines, span: Span, encoding: Encoding) -> lsp.Range:
    return lsp.Range(lines.place(span.start, encoding), lines.place(span.end, encoding))


def check_answer(question: Question, method: str, params: Any, offset: int) -> None:
    """Check that an answer can be serialised, and that its ranges lie in the document.

    A rename keeps a valid document valid.
    """
    feature, _, _ = FEATURES[method]
    try:
        answer = feature(question, params)
    except CannotRename as refusal:
        expect(bool(str(refusal)), "a rename without a reason")
        return
    sent = _CONVERTER.unstructure(answer)
    json.dumps(sent, ensure_ascii=False).encode("utf-8")
    snapshot, encoding = question.snapshot, question.encoding
    lines = snapshot.document.lines
    for found in _ranges(sent, snapshot.document.uri):
        places = [_place(found[name]) for name in ("start", "end")]
        known = [lines.place(lines.offset(place, encoding), encoding) for place in places]
        expect(places == known and places[0] <= places[1], f"a range outside of {method}: {found}")
    if method == lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL:
        _check_tokens(sent["data"], lines, encoding)
    elif method == lsp.TEXT_DOCUMENT_COMPLETION:
        _check_completion(sent["items"], lines.place(offset, encoding))
    elif method == lsp.TEXT_DOCUMENT_RENAME:
        _check_rename(question, sent)


def _ranges(sent: Any, uri: str) -> Iterator[dict[str, Any]]:
    """Yield the ranges of an answer that are in the document."""
    if isinstance(sent, list):
        for item in sent:
            yield from _ranges(item, uri)
    if not isinstance(sent, dict) or sent.get("uri", uri) != uri:
        return
    if sent.keys() == {"start", "end"}:
        yield sent
        return
    for name, value in sent.items():
        if name != "changes":
            yield from _ranges(value, uri)
            continue
        yield from _ranges(value.get(uri, []), uri)


def _place(sent: dict[str, int]) -> Place:
    return Place(sent["line"], sent["character"])


def _check_tokens(data: list[int], lines: Lines, encoding: Encoding) -> None:
    """Check that tokens are in document order and end on their line."""
    expect(
        len(data) % 5 == 0 and all(number >= 0 for number in data),
        "tokens that are not five numbers each",
    )
    line = character = end = 0
    for down, right, length, *_ in zip(*[iter(data)] * 5, strict=True):
        line, character = line + down, right if down else character + right
        expect(bool(down) or character >= end, "a token in another")
        end = character + length
        last = lines.place(lines.span(line).end, encoding).character if line < len(lines) else -1
        expect(length > 0 and end <= last, "a token beyond its line")


def _check_completion(items: list[dict[str, Any]], cursor: Place) -> None:
    """Check that each completion replaces a range of the cursor's line that contains the cursor."""
    for item in items:
        edit = item.get("textEdit")
        expect(edit is not None, f"an offer without an edit: {item['label']}")
        assert edit is not None
        start, end = (_place(edit["range"][name]) for name in ("start", "end"))
        holds = start.line == end.line and start <= cursor <= end
        expect(holds, f"an offer that is not at the cursor: {item['label']}")


def _check_rename(question: Question, sent: dict[str, Any]) -> None:
    """Check that edits do not overlap, and that a contract without errors stays without errors."""
    snapshot, encoding = question.snapshot, question.encoding
    lines = snapshot.document.lines
    edits = [
        tuple(lines.offset(_place(edit["range"][name]), encoding) for name in ("start", "end"))
        for edit in (sent.get("changes") or {}).get(snapshot.document.uri, [])
    ]
    edits.sort()
    expect(all(a[1] <= b[0] for a, b in pairwise(edits)), "edits of a rename overlap")
    text = snapshot.source.text
    for start, end in reversed(edits):
        text = text[:start] + NEW_NAME + text[end:]
    if snapshot.analysis.program is not None:
        after = snapshot.read(SourceFile(snapshot.source.name, text), Sink())
        expect(after.program is not None, "a rename makes errors")


def same_findings(snapshot: Snapshot, sink: Sink, name: str) -> bool:
    """Return whether a server and a check report the same findings."""
    here = [(d.code.id, d.span) for d in snapshot.findings if d.source == snapshot.source]
    there = [(d.code.id, d.span) for d in sink if d.source is not None and d.source.name == name]
    return here == there
