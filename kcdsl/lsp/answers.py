"""The handler of each request: calls a feature and converts the result to protocol types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lsprotocol import types as lsp
from lsprotocol.types import PositionEncodingKind as Encoding
from pygls.capabilities import get_capability

from kcdsl.lsp.features import decorations
from kcdsl.lsp.features.actions import (
    EXPLAIN,
    FIX_ALL,
    QUICK_FIX,
    Action,
    actions,
    formatting,
)
from kcdsl.lsp.features.completion import complete, completion_item
from kcdsl.lsp.features.findings import diagnostics, result_id
from kcdsl.lsp.features.hover import hover
from kcdsl.lsp.features.navigation import (
    definition,
    outline,
    references,
    with_open_texts,
)
from kcdsl.lsp.features.rename import prepare, rename
from kcdsl.lsp.text.documents import Snapshot
from kcdsl.lsp.text.positions import NOWHERE, OffsetMap, Ranges, markup


@dataclass(frozen=True)
class Question:
    """A request about a version of a document, by a client."""

    snapshot: Snapshot
    encoding: Encoding
    client: lsp.ClientCapabilities = field(default_factory=lsp.ClientCapabilities)

    @cached_property
    def ranges(self) -> Ranges:
        """Return the range converter of the current document."""
        return self.ranges_of(self.snapshot)

    def ranges_of(self, snapshot: Snapshot, way: OffsetMap = NOWHERE) -> Ranges:
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


def hover_text(question: Question, params: lsp.HoverParams) -> lsp.Hover | None:
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


def defined(question: Question, params: lsp.DefinitionParams) -> list[lsp.Location]:
    """Return the location of a declaration."""
    view, ranges, offset = question.at(params.position)
    found = definition(view, offset)
    return [ranges.location(target) for target in with_open_texts(found, question.snapshot)]


def reference_locations(question: Question, params: lsp.ReferenceParams) -> list[lsp.Location]:
    """Return the locations of the uses of a name."""
    view, ranges, offset = question.at(params.position)
    uri, declaration = question.snapshot.document.uri, params.context.include_declaration
    return [lsp.Location(uri, ranges.of(span)) for span in references(view, offset, declaration)]


def renamable(question: Question, params: lsp.PrepareRenameParams) -> Any:
    """Return the range of the name to be renamed."""
    span = prepare(question.snapshot, question.ranges.offset(params.position))
    name = question.snapshot.source.text[span.start : span.end]
    return lsp.PrepareRenamePlaceholder(question.ranges.of(span), name)


def renamed(question: Question, params: lsp.RenameParams) -> lsp.WorkspaceEdit:
    """Return the edits that rename all occurrences."""
    edits = rename(question.snapshot, question.ranges.offset(params.position), params.new_name)
    return question.ranges.workspace_edit(edits, question.versioned)


# --- the whole document --------------------------------------------------------------------------


def symbols(question: Question, params: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
    """Return the outline, as a tree."""
    view, ranges, _ = question.settled()
    return outline(view.analysis, ranges)


def formatted(question: Question, params: Any) -> list[lsp.TextEdit]:
    """Return the edits of the formatter."""
    return question.ranges.edits(formatting(question.snapshot.source))


def coloured(question: Question, params: lsp.SemanticTokensParams) -> lsp.SemanticTokens:
    """Return the tokens of every expression."""
    view, ranges, _ = question.settled()
    if ranges is not question.ranges:
        # Lines of an older text do not match; the editor keeps its tokens.
        return lsp.SemanticTokens([])
    found = decorations.tokens(view)
    lines = question.snapshot.document.lines
    return lsp.SemanticTokens(decorations.encode(found, lines, question.encoding))


def inlay_hints(question: Question, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    """Return the hints in a range."""
    span = question.ranges.span(params.range)
    view, ranges, _ = question.settled(question.snapshot.near(span))
    if ranges is not question.ranges:
        return []
    return decorations.hints(view, span, ranges)


def clause_commands(question: Question, params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
    """Return the commands above the clauses."""
    return decorations.lenses(question.snapshot, question.ranges)


_LEGEND = lsp.SemanticTokensLegend(list(decorations.TYPES), list(decorations.MODIFIERS))

NO_ANSWER = object()
"""Marks that a failure is reported as an error: it must not be taken for "nothing found"."""

FEATURES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    lsp.TEXT_DOCUMENT_DIAGNOSTIC: (
        pulled,
        NO_ANSWER,
        lsp.DiagnosticOptions(
            inter_file_dependencies=True, workspace_diagnostics=False, identifier="kcdsl"
        ),
    ),
    lsp.TEXT_DOCUMENT_HOVER: (hover_text, None, None),
    lsp.TEXT_DOCUMENT_COMPLETION: (
        completed,
        lsp.CompletionList(is_incomplete=True, items=[]),
        lsp.CompletionOptions(trigger_characters=["(", "[", ",", " ", ":", "/", "%"]),
    ),
    lsp.TEXT_DOCUMENT_CODE_ACTION: (
        code_actions,
        [],
        lsp.CodeActionOptions(code_action_kinds=[QUICK_FIX, FIX_ALL]),
    ),
    lsp.TEXT_DOCUMENT_DEFINITION: (defined, [], None),
    lsp.TEXT_DOCUMENT_REFERENCES: (reference_locations, [], None),
    lsp.TEXT_DOCUMENT_PREPARE_RENAME: (renamable, None, None),
    lsp.TEXT_DOCUMENT_RENAME: (renamed, None, None),
    lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL: (symbols, [], None),
    lsp.TEXT_DOCUMENT_FORMATTING: (formatted, [], None),
    lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL: (coloured, None, _LEGEND),
    lsp.TEXT_DOCUMENT_INLAY_HINT: (inlay_hints, [], None),
    lsp.TEXT_DOCUMENT_CODE_LENS: (clause_commands, [], lsp.CodeLensOptions(resolve_provider=False)),
}
"""Method -> its handler, the answer if it fails, and its options."""
