"""What the server answers to each request: features called, their values put in protocol form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lsprotocol import types as lsp

from kcdsl.diagnostics.model import Diagnostic
from kcdsl.diagnostics.spans import Span
from kcdsl.lsp import tokens as tokens_feature
from kcdsl.lsp.across import references_across, rename_across
from kcdsl.lsp.actions import EXPLAIN, FIX_ALL, QUICK_FIX, REWRITE, Action, actions
from kcdsl.lsp.completion import complete
from kcdsl.lsp.documents import NOWHERE, Snapshot
from kcdsl.lsp.formatting import formatting
from kcdsl.lsp.hints import hints
from kcdsl.lsp.hover import hover
from kcdsl.lsp.lenses import lenses
from kcdsl.lsp.navigation import (
    definition,
    highlights,
    links,
    references,
    with_open_texts,
)
from kcdsl.lsp.outline import folds, outline, selection
from kcdsl.lsp.positions import Encoding
from kcdsl.lsp.rename import prepare
from kcdsl.lsp.signatures import signature
from kcdsl.lsp.wire import Wire, fold, joined, markup, result_id, signature_help


@dataclass(frozen=True)
class Question:
    """A request about a version of a document, by a client."""

    snapshot: Snapshot
    encoding: Encoding
    client: lsp.ClientCapabilities = field(default_factory=lsp.ClientCapabilities)
    others: tuple[Snapshot, ...] = ()
    """The other documents of the workspace that import or are imported, for those of `ACROSS`."""

    @cached_property
    def wire(self) -> Wire:
        """Return what converts ranges of the document as it is."""
        return Wire(self.snapshot.document, self.encoding)

    def settled(self, at: Snapshot | None = None) -> tuple[Snapshot, Wire, Callable[[int], int]]:
        """Return a readable version, what converts its ranges, and the way of an offset to it."""
        view, way = (at or self.snapshot).settled
        if way is NOWHERE:
            return view, self.wire, lambda offset: offset

        def there(offset: int) -> int:
            found = way.offset(offset)
            return way.start if found is None else found

        return view, Wire(self.snapshot.document, self.encoding, way.back), there


# --- findings ------------------------------------------------------------------------------------


def pushed(question: Question) -> list[lsp.Diagnostic]:
    """Return the diagnostics of a document."""
    return question.wire.diagnostics(question.snapshot.findings)


def pulled(question: Question, params: lsp.DocumentDiagnosticParams) -> Any:
    """Return the diagnostics of a document, or that they are those the client has."""
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
    """Return what can be done in a range."""
    span = question.wire.span(params.range)
    only = params.context.only
    kinds = None if only is None else [str(getattr(kind, "value", kind)) for kind in only]
    return [_action(question, item) for item in actions(question.snapshot, span, kinds)]


def _action(question: Question, item: Action) -> lsp.CodeAction:
    workspace = question.client.workspace
    about = workspace.workspace_edit if workspace is not None else None
    versioned = about is not None and bool(about.document_changes)
    command = None
    if item.explains is not None:
        command = lsp.Command(item.title, EXPLAIN, arguments=[item.explains])
    edit = question.wire.workspace_edit(item.edits, versioned) if item.edits else None
    found: list[Diagnostic] = list(item.findings)
    return lsp.CodeAction(
        title=item.title,
        kind=item.kind,
        diagnostics=question.wire.diagnostics(found) or None,
        is_preferred=item.preferred or None,
        edit=edit,
        command=command,
    )


# --- at a place ----------------------------------------------------------------------------------


def hovered(question: Question, params: lsp.HoverParams) -> lsp.Hover | None:
    """Return what there is to say about a place."""
    view, wire, there = question.settled()
    found = hover(view, there(question.wire.offset(params.position)))
    if found is None:
        return None
    about = question.client.text_document
    formats = about.hover.content_format if about is not None and about.hover else None
    return lsp.Hover(markup(found.text, formats), wire.range(found.span))


def completed(question: Question, params: lsp.CompletionParams) -> lsp.CompletionList:
    """Return what may stand at the cursor."""
    about = question.client.text_document
    item = about.completion.completion_item if about is not None and about.completion else None
    found = complete(question.snapshot, question.wire.offset(params.position))
    return lsp.CompletionList(
        is_incomplete=False, items=[question.wire.item(one, item) for one in found]
    )


def signed(question: Question, params: lsp.SignatureHelpParams) -> lsp.SignatureHelp | None:
    """Return the signature of the call around the cursor."""
    found = signature(question.snapshot.source, question.wire.offset(params.position))
    if found is None:
        return None
    about = question.client.text_document
    able = about.signature_help if about is not None else None
    information = able.signature_information if able is not None else None
    formats = information.documentation_format if information is not None else None
    return signature_help(found, formats)


def defined(question: Question, params: lsp.DefinitionParams) -> list[lsp.Location]:
    """Return where a name is declared."""
    view, wire, there = question.settled()
    found = definition(view, there(question.wire.offset(params.position)))
    return [wire.location(target) for target in with_open_texts(found, question.snapshot)]


def referred(question: Question, params: lsp.ReferenceParams) -> list[lsp.Location]:
    """Return where a name is used."""
    view, wire, there = question.settled()
    offset = there(question.wire.offset(params.position))
    uri, declaration = question.snapshot.document.uri, params.context.include_declaration
    found = [lsp.Location(uri, wire.range(span)) for span in references(view, offset, declaration)]
    for item, span in references_across(view, offset, question.others, declaration):
        there_wire = wire if item is view else Wire(item.document, question.encoding)
        found.append(lsp.Location(item.document.uri, there_wire.range(span)))
    return [place for number, place in enumerate(found) if place not in found[:number]]


def highlighted(
    question: Question, params: lsp.DocumentHighlightParams
) -> list[lsp.DocumentHighlight]:
    """Return the places of the name under the cursor."""
    view, wire, there = question.settled()
    kinds = {True: lsp.DocumentHighlightKind.Write, False: lsp.DocumentHighlightKind.Read}
    return [
        lsp.DocumentHighlight(wire.range(span), kinds[declares])
        for span, declares in highlights(view, there(question.wire.offset(params.position)))
    ]


def renamable(question: Question, params: lsp.PrepareRenameParams) -> Any:
    """Return the range of the name that would be changed."""
    span = prepare(question.snapshot, question.wire.offset(params.position))
    name = question.snapshot.source.text[span.start : span.end]
    return lsp.PrepareRenamePlaceholder(question.wire.range(span), name)


def renamed(question: Question, params: lsp.RenameParams) -> lsp.WorkspaceEdit:
    """Return the edits that change a name everywhere."""
    offset = question.wire.offset(params.position)
    found = rename_across(question.snapshot, offset, params.new_name, question.others)
    workspace = question.client.workspace
    about = workspace.workspace_edit if workspace is not None else None
    versioned = about is not None and bool(about.document_changes)
    return joined(
        [
            Wire(item.document, question.encoding).workspace_edit(edits, versioned)
            for item, edits in found
        ]
    )


# --- the whole document --------------------------------------------------------------------------


def symbols(question: Question, params: lsp.DocumentSymbolParams) -> list[Any]:
    """Return the outline, as a tree where the client shows trees."""
    view, wire, _ = question.settled()
    about = question.client.text_document
    tree = about.document_symbol if about is not None else None
    found = outline(view.analysis)
    if tree is not None and tree.hierarchical_document_symbol_support:
        return [wire.symbol(symbol) for symbol in found]
    return list(wire.flat_symbols(found))


def workspace_symbols(
    question: Question, params: lsp.WorkspaceSymbolParams
) -> list[lsp.SymbolInformation]:
    """Return the symbols of one document whose names hold the letters asked for, in their order."""
    view, wire, _ = question.settled()
    found = wire.flat_symbols(outline(view.analysis))
    return [item for item in found if item.container_name and _matches(item.name, params.query)]


def _matches(name: str, query: str) -> bool:
    letters = iter(name.lower())
    return all(letter in letters for letter in query.lower())


def folded(question: Question, params: lsp.FoldingRangeParams) -> list[lsp.FoldingRange]:
    """Return the lines that fold together; none while the document cannot be read."""
    view, _, _ = question.settled()
    if view.source.text.count("\n") != question.snapshot.source.text.count("\n"):
        return []
    return [fold(item) for item in folds(view.analysis, view.document.lines)]


def selected(question: Question, params: lsp.SelectionRangeParams) -> list[lsp.SelectionRange]:
    """Return the ranges around each place, the smallest first."""
    view, wire, there = question.settled()
    found = []
    for position in params.positions:
        chain: lsp.SelectionRange | None = None
        for span in reversed(selection(view.analysis, there(question.wire.offset(position)))):
            chain = lsp.SelectionRange(wire.range(span), chain)
        empty = lsp.SelectionRange(lsp.Range(position, position))
        found.append(chain or empty)
    return found


def formatted(question: Question, params: Any) -> list[lsp.TextEdit]:
    """Return the edits of the formatter; a range is formatted with the whole document."""
    return question.wire.edits(formatting(question.snapshot.source))


def coloured(question: Question, params: lsp.SemanticTokensParams) -> lsp.SemanticTokens:
    """Return the tokens of every expression."""
    return _tokens(question, None)


def coloured_range(question: Question, params: lsp.SemanticTokensRangeParams) -> lsp.SemanticTokens:
    """Return the tokens of the expressions in a range."""
    return _tokens(question, question.wire.span(params.range))


def _tokens(question: Question, within: Span | None) -> lsp.SemanticTokens:
    at = question.snapshot if within is None else question.snapshot.near(within)
    view, wire, _ = question.settled(at)
    if wire is not question.wire:
        # Of an older text the lines do not fit; the editor keeps the tokens that it has.
        return lsp.SemanticTokens([])
    found = tokens_feature.tokens(view, within)
    lines = question.snapshot.document.lines
    return lsp.SemanticTokens(tokens_feature.encode(found, lines, question.encoding))


def hinted(question: Question, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    """Return the hints in a range."""
    span = question.wire.span(params.range)
    view, wire, _ = question.settled(question.snapshot.near(span))
    if wire is not question.wire:
        return []
    kind = lsp.InlayHintKind.Type
    return [
        lsp.InlayHint(
            wire.range(Span(hint.offset, hint.offset)).start, hint.text, kind, tooltip=hint.about
        )
        for hint in hints(view, span)
    ]


def lensed(question: Question, params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
    """Return the commands above the clauses."""
    uri = question.snapshot.document.uri
    return [
        lsp.CodeLens(
            question.wire.range(lens.span),
            lsp.Command(lens.title, f"kcdsl.{lens.command}", arguments=[uri, lens.clause]),
        )
        for lens in lenses(question.snapshot)
    ]


def linked(question: Question, params: lsp.DocumentLinkParams) -> list[lsp.DocumentLink]:
    """Return the files that the document names."""
    view, wire, _ = question.settled()
    return [
        lsp.DocumentLink(wire.range(link.span), target=link.path.as_uri()) for link in links(view)
    ]


_LEGEND = lsp.SemanticTokensLegend(list(tokens_feature.TYPES), list(tokens_feature.MODIFIERS))

ACROSS = frozenset({lsp.TEXT_DOCUMENT_REFERENCES, lsp.TEXT_DOCUMENT_RENAME})
"""Methods whose answers depend on the other documents of the workspace."""

NO_ANSWER = object()
"""In place of an empty answer: a failure to check must not read as "nothing found"."""

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
"""Method -> the function that answers, what is answered where it fails, and its options."""
