"""Diagnostics are values: what is wrong, where, and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kcdsl.diagnostics.codes import Code
from kcdsl.source.text import SourceFile, Span


class Severity(StrEnum):
    """How serious a diagnostic is."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Label:
    """A secondary place with a few words, such as "declared here"."""

    span: Span
    text: str


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


@dataclass(slots=True)
class Sink:
    """Collects diagnostics, so that a pass reports everything it finds and not only the first."""

    found: list[Diagnostic] = field(default_factory=list)

    def add(self, diagnostic: Diagnostic) -> None:
        """Keep one diagnostic; the same one twice is kept once."""
        if diagnostic not in self.found:
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
