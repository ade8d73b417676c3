"""Diagnostics as values: the message, its place, and a remedy."""

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
    """The severity of a diagnostic."""

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
    """Edits that correct the cause of a diagnostic, all in its own file.

    A `safe` fix keeps or restores the author's intent and is applied by `kcdsl lint --fix`; an
    unsafe one is a guess that a person should review. `title` is a short description.
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
    """A finding that a comment accepts, with the reason and the line (from 1) of the comment."""

    diagnostic: Diagnostic
    reason: str
    line: int


ERRORS = 200
FINDINGS = 2000


@dataclass(slots=True)
class Sink:
    """Collects diagnostics, so that a pass reports everything it finds and not only the first.

    It takes at most `ERRORS` errors and `FINDINGS` in all: files with more are not written by hand,
    and reporting all of their findings could take hours.
    """

    found: list[Diagnostic] = field(default_factory=list)
    _seen: set[Diagnostic] = field(default_factory=set)
    _errors: int = 0

    def add(self, diagnostic: Diagnostic) -> None:
        """Add a diagnostic unless it is already there. Raises TooManyFindings."""
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
        """Return whether any diagnostic is an error."""
        return any(d.severity is Severity.ERROR for d in self.found)


class Refusal(Exception):
    """Raised if a command cannot continue, with diagnostics of the cause (exit code 2)."""

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        items = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        self.diagnostics: tuple[Diagnostic, ...] = items
        super().__init__("; ".join(d.message for d in items))


class TooManyFindings(Refusal):
    """Raised by a full sink, with the diagnostics that it holds."""

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
    """Return a Refusal with one error, to be raised by the caller."""
    return Refusal(Diagnostic(code, message, source, span, notes=notes, help=help))


@contextmanager
def at(span: Span) -> Iterator[None]:
    """Add this span of the contract to refusals without a place; the text is not available."""
    try:
        yield
    except Refusal as refusal:
        refusal.diagnostics = tuple(
            replace(d, span=span) if d.source is None and d.span is None else d
            for d in refusal.diagnostics
        )
        raise
