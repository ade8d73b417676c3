"""Open documents, and the analysis of their versions.

A `Document` is the text from the client. A `Snapshot` adds the findings and the analysis. Both are
immutable, so that a request is answered for the version it was made for. Only a `Checker` runs
the checks of the language and makes snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.incremental import Incremental
from kcdsl.check.layout import layout, reduced
from kcdsl.check.sections.libraries import Texts as Texts
from kcdsl.diagnostics.codes import INTERNAL, TOO_LARGE
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.canonical import digest
from kcdsl.ir.formulas import walk
from kcdsl.ir.terms import Clause, Quantified
from kcdsl.lsp.text.cursor import repaired_yaml
from kcdsl.lsp.text.nodes import Occurrence, occurrences
from kcdsl.lsp.text.positions import NOWHERE, Lines, OffsetMap, offset_map
from kcdsl.lsp.text.reports import Verdict, verdicts
from kcdsl.route.catalogue import BackendSpec, catalogue
from kcdsl.route.router import Route, route
from kcdsl.source.files import SIZE_LIMIT

LARGE = 60_000
"""The size in characters above which a request uses only a part of a document."""


def path_of(uri: str) -> Path | None:
    """Return the path of a file URI; None for any other document and for invalid paths."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    if parts.scheme != "file" or "\0" in unquote(parts.path):
        return None
    return Path(url2pathname(unquote(parts.path)))


@dataclass(frozen=True)
class Document:
    """The text of a document; `version` is None for one that was read from disk."""

    uri: str
    source: SourceFile
    version: int | None = None

    @cached_property
    def path(self) -> Path | None:
        """Return the path of the document; None where it is not a file."""
        return path_of(self.uri)

    @property
    def folder(self) -> Path | None:
        """Return the folder for relative paths in the document."""
        return None if self.path is None else self.path.parent

    @cached_property
    def lines(self) -> Lines:
        """Return its lines."""
        return Lines(self.source.text)


def document(uri: str, text: str, version: int | None = None) -> Document:
    """Return a document, named by its path if it has one."""
    path = path_of(uri)
    return Document(uri, SourceFile(uri if path is None else str(path), text), version)


@cache
def _backends() -> tuple[BackendSpec, ...]:
    """Return the installed backends, cached; none of them is imported."""
    return catalogue()


@dataclass(frozen=True)
class Snapshot:
    """A version of a document with its findings; the analysis is made on demand.

    `whole` is False for a part of a document: its context and some clauses, at their offsets.
    `good` is the last version that was YAML.
    """

    document: Document
    findings: tuple[Diagnostic, ...]
    make: Callable[[], Analysis] = field(repr=False)
    texts: Texts = field(default_factory=dict, repr=False)
    good: Snapshot | None = field(default=None, repr=False)
    whole: bool = True

    @cached_property
    def analysis(self) -> Analysis:
        """Return the analysis of the document."""
        return self.make()

    @property
    def source(self) -> SourceFile:
        """Return the text."""
        return self.document.source

    @cached_property
    def settled(self) -> tuple[Snapshot, OffsetMap]:
        """Return a snapshot that is YAML, with a map of offsets from this one to it.

        That is this one, or else one with invalid parts blanked, or else the last one that was
        YAML. If there is none, it is this one.
        """
        if self.analysis.root is not None:
            return self, NOWHERE
        mended = repaired_yaml(self.source)
        if mended is not None:
            return self._of(mended), NOWHERE
        if self.good is not None:
            return self.good, offset_map(self.source.text, self.good.source.text)
        return self, NOWHERE

    def near(self, span: Span, reduce: bool = False) -> Snapshot:
        """Return a snapshot with the analysis of a range: a part of a large document.

        An existing analysis of the whole is used, unless `reduce` demands a part.
        """
        known = "analysis" in self.__dict__ and not reduce
        if len(self.source.text) <= LARGE or known or not self.whole:
            return self
        found = layout(self.source.text)
        if found is None:
            return self
        near = {number for number, clause in enumerate(found.clauses) if clause.touches(span)}
        part = SourceFile(self.source.name, reduced(self.source.text, found, near))
        return replace(self._of(part), whole=False)

    def _of(self, source: SourceFile) -> Snapshot:
        """Return a snapshot of a text with the same offsets."""
        return replace(
            self,
            document=replace(self.document, source=source),
            make=lambda: self.read(source, Sink()),
            findings=(),
        )

    def read(self, source: SourceFile, sink: Sink) -> Analysis:
        """Check another text in place of the document."""
        return analyse(source, sink, self.document.folder, self.texts)

    @cached_property
    def digest(self) -> str | None:
        """Return the digest of the contract, in hexadecimal digits; None where it has errors."""
        return None if self.analysis.program is None else digest(self.analysis.program)

    @cached_property
    def _premises(self) -> tuple[Clause, ...]:
        """Return the clauses that may imply others: those with a quantifier."""
        program = self.analysis.draft
        clauses = program.clauses if program is not None else ()
        return tuple(c for c in clauses if any(isinstance(p, Quantified) for p in walk(c.require)))

    def route(self, clause: str) -> Route | None:
        """Return the route of a clause; None where it has errors or some clauses are unknown.

        A route depends on the clause and its possible premises, which are few.
        """
        program = self.analysis.draft
        if program is None or not self.whole:
            return None
        own = tuple(c for c in program.clauses if c.id == clause and c not in self._premises)
        few = replace(program, clauses=(*self._premises, *own))
        return next((r for r in route(few, _backends()) if r.clause_id == clause), None)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts of the reports beside the contract, cached at the first call."""
        raw = self.analysis.raw
        if raw is None or raw.name is None or not self.whole:
            return ()
        return verdicts(self.document.folder, raw.name.text)

    @cached_property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """Return every occurrence of a name, in the order of the document."""
        return occurrences(self.analysis)


# --- checking -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """The state of a document across its versions."""

    incremental: Incremental = field(default_factory=Incremental)
    latest: Snapshot | None = None
    good: Snapshot | None = None


@dataclass(slots=True)
class Checker:
    """Checks each version of a document once. Not thread-safe."""

    _states: dict[str, _State] = field(default_factory=dict)

    def snapshot(self, document: Document, texts: Texts) -> Snapshot:
        """Return the snapshot of a document; `texts` are the open documents it may import."""
        state = self._states.setdefault(document.uri, _State())
        latest = state.latest
        if latest is not None and latest.document == document and _same(latest.texts, texts):
            # Return a copy for files on disk, so that its analysis is not kept.
            return latest if document.version is not None else replace(latest)
        if latest is not None and not _same(latest.texts, texts):
            state.incremental = Incremental()
        found = self._check(document, texts, state)
        if document.version is None:
            return self._keep_lightly(found, state)
        state.latest = found
        if not any(d.code.id.startswith("KC00") for d in found.findings):
            # Drop its predecessor, which would keep all earlier versions alive.
            state.good = replace(found, good=None)
        return found

    def _keep_lightly(self, found: Snapshot, state: _State) -> Snapshot:
        """Keep only the findings of files that are not open, since there may be hundreds."""
        source, folder, texts = found.source, found.document.folder, found.texts
        state.incremental = Incremental()
        state.latest = replace(found, make=lambda: analyse(source, Sink(), folder, texts))
        return found

    def forget(self, uri: str | None = None) -> None:
        """Drop the state of a document, or of all, since files that they name may have changed."""
        if uri is None:
            self._states.clear()
        else:
            self._states.pop(uri, None)

    def _check(self, document: Document, texts: Texts, state: _State) -> Snapshot:
        source = document.source
        if len(source.text) > SIZE_LIMIT:
            message = f"the document is larger than {SIZE_LIMIT} bytes"
            finding = Diagnostic(
                TOO_LARGE,
                message,
                source,
                Span(0, 0),
                help="split the contract: `imports` takes slices, kernels and tables of "
                "other files",
            )
            return Snapshot(document, (finding,), lambda: Analysis(source), texts)
        try:
            make, sink = state.incremental.analyse(source, document.folder, texts)
        except Exception as error:  # a defect of a pass must not look like "no findings"
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
    """Yield the findings of a document. Findings in other files are placed at its beginning, except
    those in libraries, which are documents themselves."""
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
