"""Apply the fixes of diagnostics to a text, and check the text again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Diagnostic, Edit, Severity, Sink
from kcdsl.source.text import SourceFile

_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text after its fixes: how many were applied, and what is left to say about it."""

    source: SourceFile
    applied: int
    left: tuple[Diagnostic, ...]


def fix(source: SourceFile, folder: Path | None, *, unsafe: bool = False) -> Fixed:
    """Apply the safe fixes (with `unsafe` the others too) until none is left.

    A round whose result has more errors than before is taken back, and ends the work; so does a
    text that was there already.
    """
    sink = _check(source, folder)
    seen, applied = {source.text}, 0
    for _ in range(_ROUNDS):
        chosen, count = _compatible(source, sink, unsafe)
        if not chosen:
            break
        mended = SourceFile(source.name, edited(source.text, chosen))
        again = _check(mended, folder)
        if _errors(again) > _errors(sink) or mended.text in seen:
            break
        seen.add(mended.text)
        source, sink, applied = mended, again, applied + count
    return Fixed(source, applied, tuple(sink))


def edited(text: str, edits: list[Edit]) -> str:
    """Return a text after edits that do not overlap."""
    for edit in sorted(edits, key=lambda e: e.span, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


def _check(source: SourceFile, folder: Path | None) -> Sink:
    sink = Sink()
    analyse(source, sink, folder)
    return sink


def _errors(sink: Sink) -> int:
    return sum(d.severity is Severity.ERROR for d in sink)


def _compatible(source: SourceFile, sink: Sink, unsafe: bool) -> tuple[list[Edit], int]:
    """Return the edits of as many fixes as do not touch each other, and their number."""
    chosen: list[Edit] = []
    count = 0
    for diagnostic in sink:
        fix = diagnostic.fix
        if fix is None or not (fix.safe or unsafe):
            continue
        if diagnostic.source is None or diagnostic.source.name != source.name:
            continue
        touching = any(
            edit.span.start <= other.span.end and other.span.start <= edit.span.end
            for edit in fix.edits
            for other in chosen
        )
        if not touching:
            chosen.extend(fix.edits)
            count += 1
    return chosen, count
