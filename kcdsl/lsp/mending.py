"""A readable version of a document that is not YAML while someone is typing.

Clauses or lines that cannot be read become blank, which moves no character of the others.
"""

from __future__ import annotations

from kcdsl.check.layout import blank, layout, stands_alone
from kcdsl.diagnostics.codes import NOT_YAML
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.yaml_nodes import parse_yaml

_ROUNDS = 4
"""Lines that are given up before nothing is."""
_LONGEST = 2**18
"""Characters of a document beyond which it is not mended: each line given up reads it anew."""


def mend(source: SourceFile) -> SourceFile | None:
    """Return a text of the same length that is YAML; None where few blank lines do not help, and
    for a document that is too long to try."""
    if len(source.text) > _LONGEST:
        return None
    for text in dict.fromkeys((_without_broken_clauses(source.text), source.text)):
        current, error = text, _error(text)
        for _ in range(_ROUNDS):
            if error is None:
                return SourceFile(source.name, current)
            tried = [_without_line(current, at) for at in _suspects(current, error)]
            found = [(other, _error(other)) for other in dict.fromkeys(tried)]
            readable = [other for other, problem in found if problem is None]
            if readable:
                return SourceFile(source.name, readable[0])
            # Go on from the text that can be read furthest.
            current, error = max(found, key=lambda item: _place(item[1]))
    return None


def _error(text: str) -> Diagnostic | None:
    """Return what keeps a text from being YAML; None where it is."""
    sink = Sink()
    if parse_yaml(SourceFile("", text), sink) is not None:
        return None
    return sink.found[0] if sink.found else Diagnostic(NOT_YAML, "")


def _place(error: Diagnostic | None) -> int:
    return error.span.start if error is not None and error.span is not None else 0


def _without_broken_clauses(text: str) -> str:
    found = layout(text)
    if found is None:
        return text
    pieces = [text[span.start : span.end] for span in found.clauses]
    kept = [
        piece if stands_alone(piece, name) else blank(piece)
        for piece, name in zip(pieces, found.names, strict=True)
    ]
    return text[: found.clauses[0].start] + "".join(kept) + text[found.clauses[-1].end :]


def _suspects(text: str, error: Diagnostic) -> list[int]:
    """Return places of lines that may have caused an error: where it was noticed, the line before,
    and where what it is about began."""
    at = min(_place(error), len(text))
    before = len(text[: text.rfind("\n", 0, at) + 1].rstrip())
    return [at, before, *(label.span.start for label in error.labels)]


def _without_line(text: str, at: int) -> str:
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    end = len(text) if end < 0 else end
    return text[:start] + blank(text[start:end]) + text[end:]
