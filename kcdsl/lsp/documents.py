"""Open documents, and what is known of each version of them.

A `Document` is what the client described. A `Snapshot` adds the findings and the analysis; both are
values that never change, so that a request is answered about the text it was asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.layout import blank, layout
from kcdsl.check.sections.libraries import Texts as Texts
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Clause, Quantified
from kcdsl.ir.walk import walk
from kcdsl.lsp.mending import mend
from kcdsl.lsp.positions import Lines
from kcdsl.lsp.reports import Verdict, verdicts
from kcdsl.lsp.symbols import Occurrence, occurrences
from kcdsl.route.catalogue import BackendSpec, catalogue
from kcdsl.route.router import Route, route

LARGE = 60_000
"""Characters of a document beyond which one question is answered from a part of it."""


def path_of(uri: str) -> Path | None:
    """Return the path of a file URI; None for any other document, and for what no path can be."""
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
        """Return where the document lies; None where it is not a file."""
        return path_of(self.uri)

    @property
    def folder(self) -> Path | None:
        """Return the folder that the files it names are relative to."""
        return None if self.path is None else self.path.parent

    @cached_property
    def lines(self) -> Lines:
        """Return its lines."""
        return Lines(self.source.text)


def document(uri: str, text: str, version: int | None = None) -> Document:
    """Return a document; it is reported under its path where it has one."""
    path = path_of(uri)
    return Document(uri, SourceFile(uri if path is None else str(path), text), version)


@dataclass(frozen=True, slots=True)
class Carry:
    """Takes places of one text to those of another that differs from it in one stretch."""

    start: int
    here: int
    there: int

    def offset(self, offset: int) -> int | None:
        """Return the place before the same character; None inside the stretch that differs."""
        if offset >= self.here:
            return offset + self.there - self.here
        return offset if offset <= self.start else None

    def span(self, span: Span) -> Span:
        """Return the range of the same characters, and of the stretch if it lies among them."""
        start, end = self.offset(span.start), self.offset(span.end)
        if span.end <= self.start:
            end = span.end
        first = self.start if start is None else start
        return Span(first, max(first, self.there if end is None else end))

    @property
    def back(self) -> Carry:
        """Return the way from the other text to this one."""
        return Carry(self.start, self.there, self.here)


NOWHERE = Carry(0, 0, 0)
"""Between a text and itself."""


def carry(here: str, there: str) -> Carry:
    """Return how places of `here` become places of `there`."""
    shortest = min(len(here), len(there))
    start = _common(here, there, shortest)
    tail = _common(here[start:][::-1], there[start:][::-1], shortest - start)
    return Carry(start, len(here) - tail, len(there) - tail)


def _common(one: str, other: str, most: int) -> int:
    """Return the length of the common beginning, at most `most`, by halving."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@cache
def _backends() -> tuple[BackendSpec, ...]:
    """Return the installed backends, looked for once; none of them is imported."""
    return catalogue()


@dataclass(frozen=True)
class Snapshot:
    """A version of a document with its findings; the analysis is made when it is asked for.

    `whole` is False for a part of a document: its context and some clauses, at their places.
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
        """Return what is known of the document."""
        return self.make()

    @property
    def source(self) -> SourceFile:
        """Return the text."""
        return self.document.source

    @cached_property
    def settled(self) -> tuple[Snapshot, Carry]:
        """Return a snapshot that is YAML, with the way to its places from those of this one.

        That is this one; or else one in which what cannot be read is blank; or else the last that
        was YAML. Where there is none, it is this one after all.
        """
        if self.analysis.root is not None:
            return self, NOWHERE
        mended = mend(self.source)
        if mended is not None:
            return self._of(mended), NOWHERE
        if self.good is not None:
            return self.good, carry(self.source.text, self.good.source.text)
        return self, NOWHERE

    def near(self, span: Span, reduce: bool = False) -> Snapshot:
        """Return a snapshot that knows what stands in a range: of a large document, a part.

        What is known of the whole already is taken, unless a part is asked for by `reduce`.
        """
        known = "analysis" in self.__dict__ and not reduce
        if len(self.source.text) <= LARGE or known or not self.whole:
            return self
        found = layout(self.source.text)
        if found is None:
            return self
        pieces = [self.source.text[: found.clauses[0].start]]
        for clause in found.clauses:
            piece = self.source.text[clause.start : clause.end]
            near = clause.start <= span.end and span.start <= clause.end
            pieces.append(piece if near else blank(piece))
        pieces.append(self.source.text[found.clauses[-1].end :])
        reduced = SourceFile(self.source.name, "".join(pieces))
        return replace(self._of(reduced), whole=False)

    def _of(self, source: SourceFile) -> Snapshot:
        """Return a snapshot of a text that has the same places."""
        return replace(
            self,
            document=replace(self.document, source=source),
            make=lambda: self.read(source, Sink()),
            findings=(),
        )

    def read(self, source: SourceFile, sink: Sink) -> Analysis:
        """Check another text as if it stood in place of the document."""
        return analyse(source, sink, self.document.folder, self.texts)

    def importing(self, texts: Texts) -> Snapshot:
        """Return the snapshot with other texts in place of files that it may import."""
        return replace(self, texts={**self.texts, **texts})

    @cached_property
    def digest(self) -> str | None:
        """Return the digest of the contract, in hexadecimal digits; None where it has errors."""
        return None if self.analysis.program is None else digest(self.analysis.program)

    @cached_property
    def _premises(self) -> tuple[Clause, ...]:
        """Return the clauses from which others may follow: those with a quantifier."""
        program = self.analysis.draft
        clauses = program.clauses if program is not None else ()
        return tuple(c for c in clauses if any(isinstance(p, Quantified) for p in walk(c.require)))

    def route(self, clause: str) -> Route | None:
        """Return the route of a clause; None where it is in error, or not all of them are known.

        A route follows from the clause and those that it may follow from, which are few.
        """
        program = self.analysis.draft
        if program is None or not self.whole:
            return None
        own = tuple(c for c in program.clauses if c.id == clause and c not in self._premises)
        few = replace(program, clauses=(*self._premises, *own))
        return next((r for r in route(few, _backends()) if r.clause_id == clause), None)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Return what the reports beside the contract say, as of the first time it is asked."""
        raw = self.analysis.raw
        if raw is None or raw.name is None or not self.whole:
            return ()
        return verdicts(self.document.folder, raw.name.text)

    @cached_property
    def occurrences(self) -> tuple[Occurrence, ...]:
        """Return every occurrence of a name, in the order of the document."""
        return occurrences(self.analysis)
