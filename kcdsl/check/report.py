"""What every checking pass needs: a place to report, and suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label, Severity, Sink
from kcdsl.source.text import SourceFile, Span


@dataclass(frozen=True, slots=True)
class Reporter:
    """Adds diagnostics of one file to a sink."""

    source: SourceFile
    sink: Sink

    def error(
        self,
        code: Code,
        message: str,
        span: Span,
        help: str | None = None,
        labels: tuple[Label, ...] = (),
        notes: tuple[str, ...] = (),
        fix: Fix | None = None,
    ) -> None:
        """Report an error at a place; a name suggested as `help` is a fix of the place too."""
        fix = fix or _suggested(help, span)
        self.sink.add(
            Diagnostic(code, message, self.source, span, labels, notes, help, Severity.ERROR, fix)
        )

    def warning(
        self,
        code: Code,
        message: str,
        span: Span,
        help: str | None = None,
        labels: tuple[Label, ...] = (),
        fix: Fix | None = None,
    ) -> None:
        """Report a warning at a place; a name suggested as `help` is a fix of the place too."""
        fix = fix or _suggested(help, span)
        self.sink.add(
            Diagnostic(code, message, self.source, span, labels, (), help, Severity.WARNING, fix)
        )

    def note(
        self, code: Code, message: str, span: Span, help: str | None = None, fix: Fix | None = None
    ) -> None:
        """Report a note at a place."""
        self.sink.add(
            Diagnostic(code, message, self.source, span, (), (), help, Severity.NOTE, fix)
        )


def replacement(span: Span, text: str, safe: bool = False) -> Fix:
    """Return the fix that writes `text` in place of a span."""
    return Fix(f"write `{text}`", (Edit(span, text),), safe)


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that `name` most probably means, or None."""
    names = list(allowed)
    for candidate in names:
        if candidate.lower() == name.lower():
            return candidate
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    return close[0] if close else None


class Suggestion(str):
    """A help text that names what was probably meant; the name is its `nearest`."""

    nearest: str


def suggest(name: str, allowed: Iterable[str], listed: str = "allowed") -> str:
    """Return "did you mean …?" where a name is close, and the allowed names otherwise."""
    names = list(allowed)
    close = nearest(name, names)
    if close is not None:
        text = Suggestion(f"did you mean `{close}`?")
        text.nearest = close
        return text
    return f"{listed}: {', '.join(names)}" if names else f"{listed}: none"


def _suggested(help: str | None, span: Span) -> Fix | None:
    """Return the fix of a suggestion: unsafe, because another name may have been meant."""
    return replacement(span, help.nearest) if isinstance(help, Suggestion) else None
