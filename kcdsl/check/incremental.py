"""Incremental check of a contract after an edit.

A clause without findings whose text and context did not change still has none. So the document is
*reduced*: such clauses are replaced by blank lines, which keeps the offsets of the others, and the
reduced document is checked by the usual passes. These clauses are kept: those that changed, those
with findings, those near a comment that may accept a finding, those about traces, with which others
are compared, and for each name of the other sections one clause that uses it.

A document that cannot be split safely is checked in full: if a clause alone is not YAML, `clauses`
has another layout, clauses share a name, the context changed, or there are libraries, which may
change separately. So is a document whose clauses about traces changed or lack fields, or in which
other tables than before seem unused, because these findings concern all clauses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.layout import Layout, is_separate_yaml, layout, reduced
from kcdsl.check.sections.libraries import Texts
from kcdsl.diagnostics.codes import UNCOVERED_TRACE, UNUSED_TABLE
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.terms import Family

_WORD = re.compile(r"[A-Za-z_]\w*")
_IMPORTS = re.compile(r"^[\"']?imports\b", re.MULTILINE)
_NEVER_CLEAN = "kcdsl:"
"""Clauses with such a comment are kept, and those after them, because the comment may accept a
finding of either."""


class Incremental:
    """Checks successive versions of one document."""

    def __init__(self) -> None:
        self._context: tuple[str, Path | None, str] | None = None
        self._clean: set[str] = set()
        self._observing: set[str] = set()
        self._unused: set[str] = set()

    def analyse(
        self, source: SourceFile, folder: Path | None = None, texts: Texts | None = None
    ) -> tuple[Callable[[], Analysis], Sink]:
        """Return the same findings of a version as `analyse`, in the same order.

        The analysis itself is made on demand. `texts` must be the same for all versions.
        """
        found = layout(source.text)
        if found is None or len(set(found.names)) < len(found.names) or _imports(found):
            self._context = None
            return self._in_full(source, folder, texts, None)
        context = (found.context, folder, source.name)
        if context != self._context:
            self._context, self._clean = context, set()
            return self._in_full(source, folder, texts, found)
        sink = self._reduced(source, folder, texts, found)
        if sink is None:
            return self._in_full(source, folder, texts, found)
        self._remember(source, found, sink)
        return cache(lambda: analyse(source, Sink(), folder, texts)), sink

    def _in_full(
        self, source: SourceFile, folder: Path | None, texts: Texts | None, found: Layout | None
    ) -> tuple[Callable[[], Analysis], Sink]:
        sink = Sink()
        analysis = analyse(source, sink, folder, texts)
        if analysis.root is None or analysis.scope.metrics.own:
            # The clauses of a document that is not YAML are unknown; files with the user's metrics
            # may change separately.
            self._context = None
        elif found is not None:
            self._observing = _observing(analysis, found)
            self._unused = _unused(analysis, sink)
            self._remember(source, found, sink)
        return lambda: analysis, sink

    def _remember(self, source: SourceFile, found: Layout, sink: Sink) -> None:
        """Record the text of every clause without findings; none if a finding concerns all
        clauses."""
        touched = {found.at(place) for d in sink for place in _places(d)}
        texts = [source.text[span.start : span.end] for span in found.clauses]
        self._clean = set()
        if not any(d.code == UNCOVERED_TRACE for d in sink):
            doubtful = touched | _near_comments(texts)
            self._clean = {t for i, t in enumerate(texts) if i not in doubtful}

    def _reduced(
        self, source: SourceFile, folder: Path | None, opened: Texts | None, found: Layout
    ) -> Sink | None:
        """Return the findings of the reduced document; None where they may be incomplete."""
        texts = [source.text[span.start : span.end] for span in found.clauses]
        kept = {i for i, t in enumerate(texts) if t not in self._clean or t in self._observing}
        kept |= _near_comments(texts)
        if not all(is_separate_yaml(texts[i], found.names[i]) for i in kept):
            return None
        kept |= _witnesses(found.context, texts)
        part, sink = SourceFile(source.name, reduced(source.text, found, kept)), Sink()
        analysis = analyse(part, sink, folder, opened)
        if analysis.root is None or _observing(analysis, found) != self._observing:
            return None
        if any(d.code == UNCOVERED_TRACE for d in sink):
            return None
        if _unused(analysis, sink) != self._unused:
            return None
        return _of(source, part, sink)


def _observing(analysis: Analysis, found: Layout) -> set[str]:
    """Return the texts of the clauses about traces."""
    known = (c for c in analysis.clauses if c is not None and c.family is Family.OBSERVABILITY)
    places = (found.at(clause.span.start) for clause in known)
    spans = (found.clauses[i] for i in places if i is not None)
    return {analysis.source.text[span.start : span.end] for span in spans}


def _unused(analysis: Analysis, sink: Sink) -> set[str]:
    """Return the findings that a table is unused, accepted ones included, as text."""
    found = [*sink, *(accepted.diagnostic for accepted in analysis.suppressed)]
    return {d.message for d in found if d.code == UNUSED_TABLE}


def _near_comments(texts: list[str]) -> set[int]:
    """Return the clauses with a comment that may accept a finding, and those after them."""
    own = {i for i, text in enumerate(texts) if _NEVER_CLEAN in text}
    return own | {i + 1 for i in own if i + 1 < len(texts)}


def _imports(found: Layout) -> bool:
    return _IMPORTS.search(found.context) is not None


def _places(diagnostic: Diagnostic) -> Iterable[int]:
    if diagnostic.span is not None:
        yield diagnostic.span.start
    for label in diagnostic.labels:
        yield label.span.start


def _witnesses(context: str, texts: list[str]) -> set[int]:
    """Return the first clause and, for each word of the context, the first clause with it, so that
    hardly any used name seems unused.
    """
    wanted = set(_WORD.findall(context))
    found = {0}
    for number, text in enumerate(texts):
        if not wanted:
            break
        words = wanted.intersection(_WORD.findall(text))
        if words:
            found.add(number)
            wanted -= words
    return found


def _of(source: SourceFile, reduced: SourceFile, sink: Sink) -> Sink:
    """Return the findings of a reduced document as findings of the document; spans are equal."""
    own = Sink()
    for found in sink:
        own.add(replace(found, source=source) if found.source == reduced else found)
    return own
