"""From documents to snapshots: the only place that runs the checker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.incremental import Incremental
from kcdsl.diagnostics.codes import INTERNAL, TOO_LARGE
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.documents import Document, Snapshot, Texts
from kcdsl.source.files import SIZE_LIMIT


@dataclass(slots=True)
class _State:
    """What is kept of a document between its versions."""

    incremental: Incremental = field(default_factory=Incremental)
    latest: Snapshot | None = None
    good: Snapshot | None = None


@dataclass(slots=True)
class Checker:
    """Checks versions of documents; each version once. Not to be used by two threads at a time."""

    _states: dict[str, _State] = field(default_factory=dict)

    def snapshot(self, document: Document, texts: Texts) -> Snapshot:
        """Return what is known of a document; `texts` are the open documents it may import."""
        state = self._states.setdefault(document.uri, _State())
        latest = state.latest
        if latest is not None and latest.document == document and _same(latest.texts, texts):
            # A copy of a light one, so that an analysis made for it is not kept.
            return latest if document.version is not None else replace(latest)
        if latest is not None and not _same(latest.texts, texts):
            state.incremental = Incremental()
        found = self._check(document, texts, state)
        if document.version is None:
            return self._keep_lightly(found, state)
        state.latest = found
        if not any(d.code.id.startswith("KC00") for d in found.findings):
            # Without the one before it, which would hold the one before that.
            state.good = replace(found, good=None)
        return found

    def _keep_lightly(self, found: Snapshot, state: _State) -> Snapshot:
        """Keep the findings alone of a file that is not open: there may be hundreds."""
        source, folder, texts = found.source, found.document.folder, found.texts
        state.incremental = Incremental()
        state.latest = replace(found, make=lambda: analyse(source, Sink(), folder, texts))
        return found

    def forget(self, uri: str | None = None) -> None:
        """Forget a document, or all of them: files that they name may have changed."""
        if uri is None:
            self._states.clear()
        else:
            self._states.pop(uri, None)

    def _check(self, document: Document, texts: Texts, state: _State) -> Snapshot:
        source = document.source
        if len(source.text) > SIZE_LIMIT:
            message = f"the document is larger than {SIZE_LIMIT} bytes"
            finding = Diagnostic(TOO_LARGE, message, source, Span(0, 0))
            return Snapshot(document, (finding,), lambda: Analysis(source), texts)
        try:
            make, sink = state.incremental.analyse(source, document.folder, texts)
        except Exception as error:  # a defect of a pass must not read as "nothing found"
            finding = Diagnostic(
                INTERNAL,
                f"the document could not be checked: {type(error).__name__}: {error}",
                source,
                Span(0, 0),
                help="`kcdsl lint --traceback` shows where; please report it",
            )
            state.incremental = Incremental()
            return Snapshot(document, (finding,), lambda: Analysis(source), texts)
        return Snapshot(document, tuple(_shown(sink, source)), make, texts, state.good)


def _shown(sink: Sink, source: SourceFile) -> Iterator[Diagnostic]:
    """Yield the findings of a document. Those in files that it depends on stand at its beginning;
    libraries are documents too, and an import of one with errors is reported itself."""
    for found in sink:
        if found.source is None or found.source.name == source.name:
            yield found
        elif not found.source.name.endswith((".yaml", ".yml")):
            at = found.source.position(found.span.start if found.span is not None else 0)
            message = f"{found.source.name}:{at.line}: {found.message}"
            yield replace(
                found, message=message, source=source, span=Span(0, 0), labels=(), fix=None
            )


def _same(one: Texts, other: Texts) -> bool:
    return one.keys() == other.keys() and all(one[p].text == other[p].text for p in one)
