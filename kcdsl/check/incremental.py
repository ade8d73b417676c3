"""Check a contract again after an edit, reading only the clauses that may have something to say.

A clause that had no finding, and whose text and context did not change, has none now either. So the
document is *reduced*: such clauses become blank lines, which moves no character of the others, and
the reduced document is checked by the passes that check every document. Kept are the clauses that
changed, those that had findings, those about traces, which the others are compared with, and for
each name of the other sections one clause that uses it.

Whatever cannot be cut safely (a clause that is not YAML by itself, other layouts of `clauses`,
clauses of one name, another context, libraries, which may change by themselves) is checked in full,
and so is a document whose clauses about traces changed or lack fields, a finding about all clauses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.layout import Layout, layout, reduced, stands_alone
from kcdsl.check.sections.libraries import Texts
from kcdsl.diagnostics.codes import UNCOVERED_TRACE
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.terms import Family

_WORD = re.compile(r"[A-Za-z_]\w*")
_IMPORTS = re.compile(r"^[\"']?imports\b", re.MULTILINE)
_NEVER_CLEAN = "kcdsl:"
"""A comment to kcdsl acts on findings, which a blank clause would not have."""


class Incremental:
    """Checks successive versions of one document; an edit of one clause costs little."""

    def __init__(self) -> None:
        self._context: tuple[str, Path | None, str] | None = None
        self._clean: set[str] = set()
        self._observing: set[str] = set()

    def analyse(
        self, source: SourceFile, folder: Path | None = None, texts: Texts | None = None
    ) -> tuple[Callable[[], Analysis], Sink]:
        """Return the findings of a version, those that `analyse` would report, in its order.

        The analysis itself is made when it is asked for. `texts` must be the same for all versions
        that one object checks.
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
            # A document that is not YAML says nothing about its clauses; the user's metrics are
            # declared in files that may change by themselves.
            self._context = None
        elif found is not None:
            self._observing = _observing(analysis, found)
            self._remember(source, found, sink)
        return lambda: analysis, sink

    def _remember(self, source: SourceFile, found: Layout, sink: Sink) -> None:
        """Keep the text of every clause that no finding speaks of; none if one speaks of all."""
        touched = {found.at(place) for d in sink for place in _places(d)}
        texts = (source.text[span.start : span.end] for span in found.clauses)
        self._clean = set()
        if not any(d.code == UNCOVERED_TRACE for d in sink):
            self._clean = {
                t for i, t in enumerate(texts) if i not in touched and _NEVER_CLEAN not in t
            }

    def _reduced(
        self, source: SourceFile, folder: Path | None, opened: Texts | None, found: Layout
    ) -> Sink | None:
        """Return the findings by the reduced document; None where it is not to be trusted."""
        texts = [source.text[span.start : span.end] for span in found.clauses]
        kept = {i for i, t in enumerate(texts) if t not in self._clean or t in self._observing}
        if not all(stands_alone(texts[i], found.names[i]) for i in kept):
            return None
        kept |= _witnesses(found.context, texts)
        part, sink = SourceFile(source.name, reduced(source.text, found, kept)), Sink()
        analysis = analyse(part, sink, folder, opened)
        if analysis.root is None or _observing(analysis, found) != self._observing:
            return None
        if any(d.code == UNCOVERED_TRACE for d in sink):
            return None
        return _of(source, part, sink)


def _observing(analysis: Analysis, found: Layout) -> set[str]:
    """Return the texts of the clauses about traces."""
    known = (c for c in analysis.clauses if c is not None and c.family is Family.OBSERVABILITY)
    places = (found.at(clause.span.start) for clause in known)
    spans = (found.clauses[i] for i in places if i is not None)
    return {analysis.source.text[span.start : span.end] for span in spans}


def _imports(found: Layout) -> bool:
    return _IMPORTS.search(found.context) is not None


def _places(diagnostic: Diagnostic) -> Iterable[int]:
    if diagnostic.span is not None:
        yield diagnostic.span.start
    for label in diagnostic.labels:
        yield label.span.start


def _witnesses(context: str, texts: list[str]) -> set[int]:
    """Return, for each word of the context, the first clause that uses it, and the first clause.

    So nothing that is used looks unused.
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
    """Return the same findings as ones of the document itself; places are equal in both."""
    own = Sink()
    for found in sink:
        own.add(replace(found, source=source) if found.source == reduced else found)
    return own
