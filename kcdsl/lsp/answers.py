"""The handler of each request: calls a feature and converts the result to protocol types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lsprotocol import types as lsp
from lsprotocol.types import PositionEncodingKind as Encoding
from pygls.capabilities import get_capability

from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.features import decorations
from kcdsl.lsp.features.actions import (
    EXPLAIN,
    FIX_ALL,
    QUICK_FIX,
    REWRITE,
    Action,
    actions,
    formatting,
)
from kcdsl.lsp.features.completion import complete, completion_item
from kcdsl.lsp.features.findings import diagnostics, result_id
from kcdsl.lsp.features.hover import hover
from kcdsl.lsp.features.knowledge import describe_function
from kcdsl.lsp.features.navigation import (
    definition,
    folds,
    highlights,
    links,
    outline,
    references,
    selection,
    with_open_texts,
)
from kcdsl.lsp.features.rename import prepare, references_across, rename_across
from kcdsl.lsp.text.cursor import Signature, signature
from kcdsl.lsp.text.documents import Snapshot
from kcdsl.lsp.text.positions import NOWHERE, Carry, Ranges, markup


@dataclass(frozen=True)
class Question:
    """A request about a version of a document, by a client."""

    snapshot: Snapshot
    encoding: Encoding
    client: lsp.ClientCapabilities = field(default_factory=lsp.ClientCapabilities)
    others: tuple[Snapshot, ...] = ()
    """Other documents of the workspace that import or are imported, for methods of `ACROSS`."""

    @cached_property
    def ranges(self) -> Ranges:
        """Return the range converter of the current document."""
        return self.ranges_of(self.snapshot)

    def ranges_of(self, snapshot: Snapshot, way: Carry = NOWHERE) -> Ranges:
        """Return the range converter of a document for this client."""
        document = snapshot.document
        return Ranges(document.uri, document.version, document.lines, self.encoding, way)

    def settled(self, at: Snapshot | None = None) -> tuple[Snapshot, Ranges, Callable[[int], int]]:
        """Return a parsable version, its range converter, and a map of offsets to it."""
        view, way = (at or self.snapshot).settled
        if way is NOWHERE:
            return view, self.ranges, lambda offset: offset

        def there(offset: int) -> int:
            found = way.offset(offset)
            return way.start if found is None else found

        return view, self.ranges_of(self.snapshot, way.back), there

    def at(self, position: lsp.Position) -> tuple[Snapshot, Ranges, int]:
        """Return a parsable version, its range converter, and an offset in it."""
        view, ranges, there = self.settled()
        return view, ranges, there(self.ranges.offset(position))

    @property
    def versioned(self) -> bool:
        """Return whether the client supports versioned edits."""
        return bool(self.able("workspace.workspace_edit.document_changes"))

    def able(self, what: str) -> Any:
        """Return a capability of the client, by its path."""
        return get_capability(self.client, what)


# --- findings ------------------------------------------------------------------------------------


def pushed(question: Question) -> list[lsp.Diagnostic]:
    """Return the diagnostics of a document."""
    return diagnostics(question.snapshot.findings, question.ranges)


def pulled(question: Question, params: lsp.DocumentDiagnosticParams) -> Any:
    """Return the diagnostics of a document, or an "unchanged" report."""
    found = pushed(question)
    name = result_id(found)
    if params.previous_result_id == name:
        return lsp.RelatedUnchangedDocumentDiagnosticReport(name)
    return lsp.RelatedFullDocumentDiagnosticReport(found, result_id=name)


def workspace_report(question: Question, params: lsp.WorkspaceDiagnosticParams) -> list[Any]:
    """Return the diagnostics of one document of the workspace."""
    document, found = question.snapshot.document, pushed(question)
    name = result_id(found)
    if any(p.uri == document.uri and p.value == name for p in params.previous_result_ids):
        return [
            lsp.WorkspaceUnchangedDocumentDiagnosticReport(document.uri, name, document.version)
        ]
    return [
        lsp.WorkspaceFullDocumentDiagnosticReport(
            document.uri, found, version=document.version, result_id=name
        )
    ]


def code_actions(question: Question, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    """Return the code actions for a range."""
    span = question.ranges.span(params.range)
    only = params.context.only
    kinds = None if only is None else [str(getattr(kind, "value", kind)) for kind in only]
    return [_action(question, item) for item in actions(question.snapshot, span, kinds)]


def _action(question: Question, item: Action) -> lsp.CodeAction:
    command = None
    if item.explains is not None:
        command = lsp.Command(item.title, EXPLAIN, arguments=[item.explains])
    edit = question.ranges.workspace_edit(item.edits, question.versioned) if item.edits else None
    return lsp.CodeAction(
        title=item.title,
        kind=item.kind,
        diagnostics=diagnostics(item.findings, question.ranges) or None,
        is_preferred=item.preferred or None,
        edit=edit,
        command=command,
    )


# --- at a place ----------------------------------------------------------------------------------


def hovered(question: Question, params: lsp.HoverParams) -> lsp.Hover | None:
    """Return the hover text at a position."""
    view, ranges, offset = question.at(params.position)
    found = hover(view, offset)
    if found is None:
        return None
    formats = question.able("text_document.hover.content_format")
    return lsp.Hover(markup(found.text, formats), ranges.of(found.span))


def completed(question: Question, params: lsp.CompletionParams) -> lsp.CompletionList:
    """Return the completions at the cursor."""
    item = question.able("text_document.completion.completion_item")
    found = complete(question.snapshot, question.ranges.offset(params.position))
    return lsp.CompletionList(
        is_incomplete=False, items=[completion_item(one, question.ranges, item) for one in found]
    )


def signed(question: Question, params: lsp.SignatureHelpParams) -> lsp.SignatureHelp | None:
    """Return the signature of the call around the cursor."""
    found = signature(question.snapshot.source, question.ranges.offset(params.position))
    if found is None:
        return None
    able = "text_document.signature_help.signature_information.documentation_format"
    return signature_help(found, question.able(able))


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


def defined(question: Question, params: lsp.DefinitionParams) -> list[lsp.Location]:
    """Return the location of a declaration."""
    view, ranges, offset = question.at(params.position)
    found = definition(view, offset)
    return [ranges.location(target) for target in with_open_texts(found, question.snapshot)]


def referred(question: Question, params: lsp.ReferenceParams) -> list[lsp.Location]:
    """Return the locations of the uses of a name."""
    view, ranges, offset = question.at(params.position)
    uri, declaration = question.snapshot.document.uri, params.context.include_declaration
    found = [lsp.Location(uri, ranges.of(span)) for span in references(view, offset, declaration)]
    for item, span in references_across(view, offset, question.others, declaration):
        there = ranges if item is view else question.ranges_of(item)
        found.append(lsp.Location(item.document.uri, there.of(span)))
    return [place for number, place in enumerate(found) if place not in found[:number]]


def highlighted(
    question: Question, params: lsp.DocumentHighlightParams
) -> list[lsp.DocumentHighlight]:
    """Return the ranges of the name under the cursor."""
    view, ranges, offset = question.at(params.position)
    kinds = {True: lsp.DocumentHighlightKind.Write, False: lsp.DocumentHighlightKind.Read}
    return [
        lsp.DocumentHighlight(ranges.of(span), kinds[declares])
        for span, declares in highlights(view, offset)
    ]


def renamable(question: Question, params: lsp.PrepareRenameParams) -> Any:
    """Return the range of the name to be renamed."""
    span = prepare(question.snapshot, question.ranges.offset(params.position))
    name = question.snapshot.source.text[span.start : span.end]
    return lsp.PrepareRenamePlaceholder(question.ranges.of(span), name)


def renamed(question: Question, params: lsp.RenameParams) -> lsp.WorkspaceEdit:
    """Return the edits that rename all occurrences."""
    offset = question.ranges.offset(params.position)
    found = rename_across(question.snapshot, offset, params.new_name, question.others)
    return _joined(
        [
            question.ranges_of(item).workspace_edit(edits, question.versioned)
            for item, edits in found
        ]
    )


def _joined(found: Iterable[lsp.WorkspaceEdit]) -> lsp.WorkspaceEdit:
    """Return the combined edits of several documents; all of them are versioned, or none."""
    together = lsp.WorkspaceEdit()
    for item in found:
        if item.document_changes is not None:
            together.document_changes = [*(together.document_changes or ()), *item.document_changes]
        if item.changes is not None:
            together.changes = {**(together.changes or {}), **item.changes}
    return together


# --- the whole document --------------------------------------------------------------------------


def symbols(question: Question, params: lsp.DocumentSymbolParams) -> list[Any]:
    """Return the outline, as a tree if the client supports it."""
    view, ranges, _ = question.settled()
    found = outline(view.analysis, ranges)
    if question.able("text_document.document_symbol.hierarchical_document_symbol_support"):
        return found
    return _flat_symbols(found, ranges.uri)


def _flat_symbols(
    symbols: Iterable[lsp.DocumentSymbol], uri: str, container: str | None = None
) -> list[lsp.SymbolInformation]:
    """Return symbols as a flat list, for clients without trees and for the workspace."""
    found = []
    for symbol in symbols:
        place = lsp.Location(uri, symbol.selection_range)
        found.append(
            lsp.SymbolInformation(place, symbol.name, symbol.kind, container_name=container)
        )
        found += _flat_symbols(symbol.children or (), uri, symbol.name)
    return found


def workspace_symbols(
    question: Question, params: lsp.WorkspaceSymbolParams
) -> list[lsp.SymbolInformation]:
    """Return the symbols of one document whose names contain the query as a subsequence."""
    view, ranges, _ = question.settled()
    found = _flat_symbols(outline(view.analysis, ranges), ranges.uri)
    return [item for item in found if item.container_name and _matches(item.name, params.query)]


def _matches(name: str, query: str) -> bool:
    letters = iter(name.lower())
    return all(letter in letters for letter in query.lower())


def folded(question: Question, params: lsp.FoldingRangeParams) -> list[lsp.FoldingRange]:
    """Return the folding ranges; empty while the document cannot be parsed."""
    view, _, _ = question.settled()
    if view.source.text.count("\n") != question.snapshot.source.text.count("\n"):
        return []
    return folds(view.analysis, view.document.lines)


def selected(question: Question, params: lsp.SelectionRangeParams) -> list[lsp.SelectionRange]:
    """Return the enclosing ranges of each position, the smallest first."""
    view, ranges, there = question.settled()
    found = []
    for position in params.positions:
        chain: lsp.SelectionRange | None = None
        for span in reversed(selection(view.analysis, there(question.ranges.offset(position)))):
            chain = lsp.SelectionRange(ranges.of(span), chain)
        empty = lsp.SelectionRange(lsp.Range(position, position))
        found.append(chain or empty)
    return found


def formatted(question: Question, params: Any) -> list[lsp.TextEdit]:
    """Return the edits of the formatter; a range is formatted with the whole document."""
    return question.ranges.edits(formatting(question.snapshot.source))


def coloured(question: Question, params: lsp.SemanticTokensParams) -> lsp.SemanticTokens:
    """Return the tokens of every expression."""
    return _tokens(question, None)


def coloured_range(question: Question, params: lsp.SemanticTokensRangeParams) -> lsp.SemanticTokens:
    """Return the tokens of the expressions in a range."""
    return _tokens(question, question.ranges.span(params.range))


def _tokens(question: Question, within: Span | None) -> lsp.SemanticTokens:
    at = question.snapshot if within is None else question.snapshot.near(within)
    view, ranges, _ = question.settled(at)
    if ranges is not question.ranges:
        # Lines of an older text do not match; the editor keeps its tokens.
        return lsp.SemanticTokens([])
    found = decorations.tokens(view, within)
    lines = question.snapshot.document.lines
    return lsp.SemanticTokens(decorations.encode(found, lines, question.encoding))


def hinted(question: Question, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    """Return the hints in a range."""
    span = question.ranges.span(params.range)
    view, ranges, _ = question.settled(question.snapshot.near(span))
    if ranges is not question.ranges:
        return []
    return decorations.hints(view, span, ranges)


def lensed(question: Question, params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
    """Return the commands above the clauses."""
    return decorations.lenses(question.snapshot, question.ranges)


def linked(question: Question, params: lsp.DocumentLinkParams) -> list[lsp.DocumentLink]:
    """Return the files that the document names."""
    view, ranges, _ = question.settled()
    return [
        lsp.DocumentLink(ranges.of(link.span), target=link.path.as_uri()) for link in links(view)
    ]


_LEGEND = lsp.SemanticTokensLegend(list(decorations.TYPES), list(decorations.MODIFIERS))

ACROSS = frozenset({lsp.TEXT_DOCUMENT_REFERENCES, lsp.TEXT_DOCUMENT_RENAME})
"""Methods whose answers depend on the other documents of the workspace."""

NO_ANSWER = object()
"""Marks that a failure is reported as an error: it must not be taken for "nothing found"."""

FEATURES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    lsp.TEXT_DOCUMENT_DIAGNOSTIC: (
        pulled,
        NO_ANSWER,
        lsp.DiagnosticOptions(
            inter_file_dependencies=True, workspace_diagnostics=True, identifier="kcdsl"
        ),
    ),
    lsp.TEXT_DOCUMENT_HOVER: (hovered, None, None),
    lsp.TEXT_DOCUMENT_COMPLETION: (
        completed,
        lsp.CompletionList(is_incomplete=True, items=[]),
        lsp.CompletionOptions(trigger_characters=["(", "[", ",", " ", ":", "/", "%"]),
    ),
    lsp.TEXT_DOCUMENT_SIGNATURE_HELP: (
        signed,
        None,
        lsp.SignatureHelpOptions(trigger_characters=["(", ","]),
    ),
    lsp.TEXT_DOCUMENT_CODE_ACTION: (
        code_actions,
        [],
        lsp.CodeActionOptions(code_action_kinds=[QUICK_FIX, REWRITE, FIX_ALL]),
    ),
    lsp.TEXT_DOCUMENT_DEFINITION: (defined, [], None),
    lsp.TEXT_DOCUMENT_REFERENCES: (referred, [], None),
    lsp.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT: (highlighted, [], None),
    lsp.TEXT_DOCUMENT_PREPARE_RENAME: (renamable, None, None),
    lsp.TEXT_DOCUMENT_RENAME: (renamed, None, None),
    lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL: (symbols, [], None),
    lsp.TEXT_DOCUMENT_FOLDING_RANGE: (folded, [], None),
    lsp.TEXT_DOCUMENT_SELECTION_RANGE: (selected, [], None),
    lsp.TEXT_DOCUMENT_FORMATTING: (formatted, [], None),
    lsp.TEXT_DOCUMENT_RANGE_FORMATTING: (formatted, [], None),
    lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL: (coloured, None, _LEGEND),
    lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_RANGE: (coloured_range, None, _LEGEND),
    lsp.TEXT_DOCUMENT_INLAY_HINT: (hinted, [], None),
    lsp.TEXT_DOCUMENT_CODE_LENS: (lensed, [], lsp.CodeLensOptions(resolve_provider=False)),
    lsp.TEXT_DOCUMENT_DOCUMENT_LINK: (linked, [], None),
}
"""Method -> its handler, the answer if it fails, and its options."""
