"""Report findings of a file: the reporter, common fixes, and suggestions for misspelt names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label, Severity, Sink, refuse
from kcdsl.diagnostics.spans import SourceFile, Span

_NAME = re.compile(r"""([\"']?)[^\s"'()]+\1""")


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
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Report an error at a place; a name that `help` suggests also becomes a fix."""
        fix = fix or _suggested(self.source, help, span)
        self.sink.add(
            Diagnostic(code, message, self.source, span, labels, notes, help, severity, fix)
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
        """Report a warning as `error` does."""
        self.error(code, message, span, help, labels, fix=fix, severity=Severity.WARNING)

    def note(self, code: Code, message: str, span: Span, help: str | None = None) -> None:
        """Report a note at a place."""
        self.sink.add(Diagnostic(code, message, self.source, span, (), (), help, Severity.NOTE))


def replacement(span: Span, text: str, safe: bool = False) -> Fix:
    """Return the fix that writes `text` in place of a span."""
    return Fix(f"write `{text}`", (Edit(span, text),), safe)


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that `name` most probably means, or None.

    A name with one or two letters changed is taken for a typing error. Of the others, one with the
    same first word precedes one with the same last word: `kl_divergence` is `kl`.
    """
    names = list(allowed)
    for candidate in names:
        if candidate.lower() == name.lower():
            return candidate
    from difflib import get_close_matches

    close = get_close_matches(name, names, n=1, cutoff=0.85)
    first, *more = name.split("_")
    if not close and more:
        alike = [candidate for candidate in names if candidate.split("_")[0] == first]
        close = [first] if first in alike else get_close_matches(name, alike, n=1, cutoff=0.0)
    close = close or get_close_matches(name, names, n=1, cutoff=0.6)
    return close[0] if close else None


def insertion(at: int, text: str, safe: bool = False) -> Fix:
    """Return the fix that writes `text` at an offset."""
    return Fix(f"add `{text.strip(', ' + chr(10))}`", (Edit(Span(at, at), text),), safe)


def wrapped(span: Span, function: str) -> Fix:
    """Return the fix that wraps the text of a span in a function call."""
    edits = (
        Edit(Span(span.start, span.start), f"{function}("),
        Edit(Span(span.end, span.end), ")"),
    )
    return Fix(f"write `{function}(...)`", edits, False)


class Suggestion(str):
    """A help text that suggests a name, which is its `nearest`."""

    nearest: str
    same: bool = False
    """Whether only the case of letters differs."""

    def __add__(self, more: str) -> Suggestion:
        """Return the help with more words; it suggests the same name."""
        longer = Suggestion(f"{self}{more}")
        longer.nearest, longer.same = self.nearest, self.same
        return longer


def suggest(name: str, allowed: Iterable[str], listed: str = "allowed") -> str:
    """Return "did you mean …?" if a name is close, otherwise the allowed names."""
    names = list(allowed)
    close = nearest(name, names)
    if close is not None:
        text = did_you_mean(close, f"did you mean `{close}`?")
        text.same = close.lower() == name.lower()
        return text
    return f"{listed}: {', '.join(names)}" if names else f"{listed}: none"


def refuse_unknown(
    names: Iterable[str], known: Collection[str], code: Code, said: str, listed: str
) -> None:
    """Return the refusal of an unknown name; `said` precedes the name in its message."""
    for name in names:
        if name not in known:
            raise refuse(code, f"{said} {name[:80]!r}", help=suggest(name, known, listed))


def did_you_mean(name: str, text: str) -> Suggestion:
    """Return a help text that suggests a name."""
    found = Suggestion(text)
    found.nearest = name
    return found


def _suggested(source: SourceFile, help: str | None, span: Span) -> Fix | None:
    """Return the fix of a suggestion: unsafe, because another name may have been meant, unless only
    the case of letters differs. None if the place is longer than a name."""
    if not isinstance(help, Suggestion) or not _NAME.fullmatch(source.text, span.start, span.end):
        return None
    return replacement(span, help.nearest, help.same)
