"""From values of the features to those of the protocol. Ranges are converted here and only here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

from lsprotocol import types as lsp
from lsprotocol.converters import get_converter

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Diagnostic, Edit, Severity
from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.completion import Item, ItemKind
from kcdsl.lsp.documents import Carry, Document
from kcdsl.lsp.navigation import Target
from kcdsl.lsp.outline import Fold, Symbol, SymbolKind
from kcdsl.lsp.positions import Change, Encoding, Lines, Place
from kcdsl.lsp.signatures import Signature
from kcdsl.lsp.words import describe_function

SOURCE = "kcdsl"
_converter = cache(get_converter)  # a new one takes milliseconds
_SEVERITIES = {
    Severity.ERROR: lsp.DiagnosticSeverity.Error,
    Severity.WARNING: lsp.DiagnosticSeverity.Warning,
    Severity.NOTE: lsp.DiagnosticSeverity.Information,
}
_ITEM_KINDS = {
    ItemKind.FIELD: lsp.CompletionItemKind.Property,
    ItemKind.VALUE: lsp.CompletionItemKind.Value,
    ItemKind.FUNCTION: lsp.CompletionItemKind.Function,
    ItemKind.METRIC: lsp.CompletionItemKind.Variable,
    ItemKind.SLICE: lsp.CompletionItemKind.Module,
    ItemKind.TABLE: lsp.CompletionItemKind.Class,
    ItemKind.BLOCK: lsp.CompletionItemKind.Class,
    ItemKind.VARIABLE: lsp.CompletionItemKind.Variable,
    ItemKind.KEYWORD: lsp.CompletionItemKind.Keyword,
    ItemKind.OPERATOR: lsp.CompletionItemKind.Operator,
    ItemKind.UNIT: lsp.CompletionItemKind.Unit,
    ItemKind.SNIPPET: lsp.CompletionItemKind.Snippet,
    ItemKind.FILE: lsp.CompletionItemKind.File,
    ItemKind.CODE: lsp.CompletionItemKind.Constant,
    ItemKind.CLAUSE: lsp.CompletionItemKind.Struct,
}
_SYMBOL_KINDS = {
    SymbolKind.SECTION: lsp.SymbolKind.Namespace,
    SymbolKind.SLICE: lsp.SymbolKind.Module,
    SymbolKind.TABLE: lsp.SymbolKind.Array,
    SymbolKind.CLAUSE: lsp.SymbolKind.Property,
    SymbolKind.KERNEL: lsp.SymbolKind.Object,
    SymbolKind.IMPORT: lsp.SymbolKind.File,
    SymbolKind.CONSTANT: lsp.SymbolKind.Constant,
}


def changes(params: lsp.DidChangeTextDocumentParams) -> list[Change]:
    """Return the changes of a notification."""
    found = []
    for item in params.content_changes:
        if isinstance(item, lsp.TextDocumentContentChangePartial):
            found.append(Change(item.text, _place(item.range.start), _place(item.range.end)))
        else:
            found.append(Change(item.text))
    return found


def _place(position: lsp.Position) -> Place:
    return Place(position.line, position.character)


_MARKS = re.compile(r"^```\w*\n?|`|\*\*|^---$", re.MULTILINE)


def markup(text: str, formats: Collection[lsp.MarkupKind | str] | None) -> lsp.MarkupContent | str:
    """Return Markdown, or its words alone for a client that shows no Markdown."""
    if lsp.MarkupKind.Markdown in (formats or ()):
        return lsp.MarkupContent(lsp.MarkupKind.Markdown, text)
    return _MARKS.sub("", text)


def page_uri(code: codes.Code) -> str | None:
    """Return where the page of a code lies, as a URI; None where it has none."""
    page = files("kcdsl.diagnostics") / "pages" / f"{code.id}.md"
    return page.as_uri() if isinstance(page, Path) and page.is_file() else None


class Wire:
    """Converts values about one document, for one client."""

    def __init__(self, document: Document, encoding: Encoding, way: Carry | None = None) -> None:
        """`way` leads from the places of the values to those of the document."""
        self.document = document
        self.encoding = encoding
        self._way = way

    def offset(self, position: lsp.Position) -> int:
        """Return the offset of a position."""
        return self.document.lines.offset(_place(position), self.encoding)

    def span(self, range: lsp.Range) -> Span:
        """Return the span of a range."""
        start, end = self.offset(range.start), self.offset(range.end)
        return Span(min(start, end), max(start, end))

    def range(self, span: Span, lines: Lines | None = None) -> lsp.Range:
        """Return the range of a span, of another text where its lines are given."""
        if self._way is not None and lines is None:
            span = self._way.span(span)
        start_place, end_place = (lines or self.document.lines).places(span, self.encoding)
        return lsp.Range(
            lsp.Position(start_place.line, start_place.character),
            lsp.Position(end_place.line, end_place.character),
        )

    def location(self, target: Target) -> lsp.Location:
        """Return where a target lies."""
        if target.path is None:
            return lsp.Location(self.document.uri, self.range(target.span))
        text = target.source.text if target.source is not None else ""
        return lsp.Location(target.path.as_uri(), self.range(target.span, Lines(text)))

    # --- diagnostics -----------------------------------------------------------------------------

    def diagnostics(self, found: Iterable[Diagnostic]) -> list[lsp.Diagnostic]:
        """Return findings as diagnostics."""
        return [self.diagnostic(finding) for finding in found]

    def diagnostic(self, finding: Diagnostic) -> lsp.Diagnostic:
        """Return a finding; its way out stands below the message, its fix in `data`."""
        uri, href = self.document.uri, page_uri(finding.code)
        tail = [*(f"note: {note}" for note in finding.notes)]
        tail += [f"help: {finding.help}"] if finding.help else []
        related = [
            lsp.DiagnosticRelatedInformation(lsp.Location(uri, self.range(label.span)), label.text)
            for label in finding.labels
        ]
        return lsp.Diagnostic(
            range=self.range(finding.span or Span(0, 0)),
            message="\n".join([finding.message, *tail]),
            severity=_SEVERITIES[finding.severity],
            code=finding.code.id,
            code_description=None if href is None else lsp.CodeDescription(href),
            source=SOURCE,
            related_information=related or None,
            tags=_tags(finding.code) or None,
            data=self._fix(finding),
        )

    def _fix(self, finding: Diagnostic) -> dict[str, object] | None:
        if finding.fix is None:
            return None
        edits = [
            {"range": _converter().unstructure(self.range(e.span)), "newText": e.text}
            for e in finding.fix.edits
        ]
        return {"title": finding.fix.title, "safe": finding.fix.safe, "edits": edits}

    # --- edits -----------------------------------------------------------------------------------

    def edits(self, found: Iterable[Edit]) -> list[lsp.TextEdit]:
        """Return edits of the document."""
        return [lsp.TextEdit(self.range(edit.span), edit.text) for edit in found]

    def workspace_edit(self, found: Iterable[Edit], versioned: bool) -> lsp.WorkspaceEdit:
        """Return edits of the document, of this version alone where the client can tell."""
        uri, version = self.document.uri, self.document.version
        if not versioned:
            return lsp.WorkspaceEdit(changes={uri: self.edits(found)})
        identifier = lsp.OptionalVersionedTextDocumentIdentifier(uri, version)
        return lsp.WorkspaceEdit(
            document_changes=[lsp.TextDocumentEdit(identifier, list(self.edits(found)))]
        )

    # --- completion and outline ------------------------------------------------------------------

    def item(self, item: Item, able: lsp.ClientCompletionItemOptions | None) -> lsp.CompletionItem:
        """Return a completion as the client is able to show it: without snippets the places to
        fill in are left out."""
        snippets = able is not None and bool(able.snippet_support)
        formats = able.documentation_format if able is not None else None
        insert = item.insert if snippets or not item.snippet else plain(item.insert)
        rich = item.snippet and snippets
        return lsp.CompletionItem(
            label=item.label,
            kind=_ITEM_KINDS[item.kind],
            detail=item.detail or None,
            documentation=markup(item.documentation, formats) if item.documentation else None,
            sort_text=f"{item.order:04d}{item.label}",
            filter_text=item.label,
            insert_text_format=(
                lsp.InsertTextFormat.Snippet if rich else lsp.InsertTextFormat.PlainText
            ),
            text_edit=lsp.TextEdit(self.range(item.span), insert),
        )

    def symbol(self, symbol: Symbol) -> lsp.DocumentSymbol:
        """Return a symbol with what it holds."""
        return lsp.DocumentSymbol(
            name=symbol.name,
            detail=symbol.detail or None,
            kind=_SYMBOL_KINDS[symbol.kind],
            range=self.range(symbol.span),
            selection_range=self.range(symbol.name_span),
            children=[self.symbol(child) for child in symbol.children] or None,
        )

    def flat_symbols(
        self, symbols: Iterable[Symbol], container: str | None = None
    ) -> list[lsp.SymbolInformation]:
        """Return symbols as a list, for clients without a tree and for the workspace."""
        found = []
        for symbol in symbols:
            location = lsp.Location(self.document.uri, self.range(symbol.name_span))
            kind = _SYMBOL_KINDS[symbol.kind]
            found.append(
                lsp.SymbolInformation(location, symbol.name, kind, container_name=container)
            )
            found += self.flat_symbols(symbol.children, symbol.name)
        return found


def joined(found: Iterable[lsp.WorkspaceEdit]) -> lsp.WorkspaceEdit:
    """Return edits of several documents as one; all of them are versioned, or none."""
    together = lsp.WorkspaceEdit()
    for item in found:
        if item.document_changes is not None:
            together.document_changes = [*(together.document_changes or ()), *item.document_changes]
        if item.changes is not None:
            together.changes = {**(together.changes or {}), **item.changes}
    return together


_UNNECESSARY = {codes.UNUSED_VARIABLE, codes.UNUSED_IMPORT, codes.UNUSED_TABLE}


def _tags(code: codes.Code) -> list[lsp.DiagnosticTag]:
    """Return the tags of a code: what is unused is shown faded."""
    if code in _UNNECESSARY or code.title.startswith("unused"):
        return [lsp.DiagnosticTag.Unnecessary]
    return [lsp.DiagnosticTag.Deprecated] if "deprecated" in code.title else []


def plain(snippet: str) -> str:
    """Return the text of a snippet without its places to fill in."""
    text, at = "", 0
    while at < len(snippet):
        if snippet.startswith("${", at):
            end = snippet.index("}", at)
            text += snippet[at:end].partition(":")[2]
            at = end + 1
        elif snippet[at] == "$" and snippet[at + 1 : at + 2].isdigit():
            at += 2
        else:
            text += snippet[at]
            at += 1
    return text


def result_id(found: list[lsp.Diagnostic]) -> str:
    """Return what tells two lists of diagnostics apart."""
    text = json.dumps(_converter().unstructure(found), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def signature_help(
    found: Signature, formats: Collection[lsp.MarkupKind | str] | None
) -> lsp.SignatureHelp:
    """Return the signature of a call, with the parameter at the cursor."""
    function = found.function
    label = function.signature
    parameters = []
    at = label.index("(") + 1
    for parameter in function.parameters:
        name = f"{parameter.name}?" if parameter.optional else parameter.name
        begin = label.index(name, at)
        at = begin + len(name)
        about = markup(parameter.meaning, formats)
        parameters.append(lsp.ParameterInformation((begin, at), about))
    information = lsp.SignatureInformation(
        label, markup(describe_function(function), formats), parameters, found.parameter
    )
    return lsp.SignatureHelp([information], 0, found.parameter)


def fold(found: Fold) -> lsp.FoldingRange:
    """Return lines that fold together."""
    kind = lsp.FoldingRangeKind.Comment if found.comment else lsp.FoldingRangeKind.Region
    return lsp.FoldingRange(start_line=found.first, end_line=found.last, kind=kind)
