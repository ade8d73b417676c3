"""Diagnostics are values: what is wrong, where, and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from kcdsl.diagnostics.codes import TOO_LARGE, Code
from kcdsl.diagnostics.spans import SourceFile, Span

FORMATS = ("text", "concise", "json", "github", "sarif", "junit")
"""The formats that `kcdsl.diagnostics.render` knows."""


class Severity(StrEnum):
    """How serious a diagnostic is."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Label(NamedTuple):
    """A secondary place with a few words, such as "declared here"."""

    span: Span
    text: str


class Edit(NamedTuple):
    """Replace the text of a span; an empty span inserts, an empty text deletes."""

    span: Span
    text: str


class Fix(NamedTuple):
    """Edits that mend what a diagnostic is about, all in its own file.

    A `safe` fix keeps or restores what the author meant and is applied by `kcdsl lint --fix`; an
    unsafe one is a guess that a person should look at. `title` says what it does in a few words.
    """

    title: str
    edits: tuple[Edit, ...]
    safe: bool = True


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding.

    `source` and `span` are None where no file is involved (a missing option, an absent package).
    """

    code: Code
    message: str
    source: SourceFile | None = None
    span: Span | None = None
    labels: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    help: str | None = None
    severity: Severity = Severity.ERROR
    fix: Fix | None = None


class Suppressed(NamedTuple):
    """A finding that a comment accepts: with its reason, on its line (from 1)."""

    diagnostic: Diagnostic
    reason: str
    line: int


ERRORS = 200
FINDINGS = 2000


@dataclass(slots=True)
class Sink:
    """Collects diagnostics, so that a pass reports everything it finds and not only the first.

    It takes `ERRORS` errors and `FINDINGS` in all: a file that has more is no work of a person, and
    telling of them all could take hours.
    """

    found: list[Diagnostic] = field(default_factory=list)
    _seen: set[Diagnostic] = field(default_factory=set)
    _errors: int = 0

    def add(self, diagnostic: Diagnostic) -> None:
        """Keep one diagnostic; the same one twice is kept once. Raises TooManyFindings."""
        if diagnostic in self._seen:
            return
        self._errors += diagnostic.severity is Severity.ERROR
        if self._errors > ERRORS or len(self._seen) >= FINDINGS:
            raise TooManyFindings(self.found, diagnostic.source)
        self._seen.add(diagnostic)
        self.found.append(diagnostic)

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self.found)

    @property
    def has_errors(self) -> bool:
        """Say whether any diagnostic is an error."""
        return any(d.severity is Severity.ERROR for d in self.found)


class Refusal(Exception):
    """Raised where a command cannot go on; carries the diagnostics that say why (exit code 2)."""

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        items = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        self.diagnostics: tuple[Diagnostic, ...] = items
        super().__init__("; ".join(d.message for d in items))


class TooManyFindings(Refusal):
    """Raised by a sink that takes no more; carries what it took."""

    def __init__(self, found: Iterable[Diagnostic], source: SourceFile | None) -> None:
        message = f"there are more than {ERRORS} errors, or {FINDINGS} findings; the rest is left"
        place = None if source is None else Span(0, 0)
        super().__init__(
            (
                *found,
                Diagnostic(
                    TOO_LARGE, message, source, place, help="correct the first ones and check again"
                ),
            )
        )


def refuse(
    code: Code,
    message: str,
    *,
    help: str | None = None,
    notes: tuple[str, ...] = (),
    source: SourceFile | None = None,
    span: Span | None = None,
) -> Refusal:
    """Build the refusal with one error, to be raised by the caller."""
    return Refusal(Diagnostic(code, message, source, span, notes=notes, help=help))


@contextmanager
def at(span: Span) -> Iterator[None]:
    """Give refusals without a place this span of the contract, whose text is not at hand."""
    try:
        yield
    except Refusal as refusal:
        refusal.diagnostics = tuple(
            replace(d, span=span) if d.source is None and d.span is None else d
            for d in refusal.diagnostics
        )
        raise
