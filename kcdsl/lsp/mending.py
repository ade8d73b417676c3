"""A readable version of a document that is not YAML while someone is typing.

Clauses or lines that cannot be read become blank, which moves no character of the others.
"""

from __future__ import annotations

from kcdsl.check.layout import blank, layout, stands_alone
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.source.text import SourceFile
from kcdsl.source.yaml_nodes import parse_yaml

_TRIES = 4


def mend(source: SourceFile) -> SourceFile | None:
    """Return a text of the same length that is YAML; None where few blank lines do not help."""
    for text in (_without_broken_clauses(source.text), source.text):
        for _ in range(_TRIES):
            sink = Sink()
            if parse_yaml(SourceFile(source.name, text), sink) is not None:
                return SourceFile(source.name, text)
            if not sink.found:
                break
            text = _without_line(text, sink.found[0])
    return None


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


def _without_line(text: str, error: Diagnostic) -> str:
    """Blank the line where the trouble began, as far as the error says it."""
    places = [label.span.start for label in error.labels]
    places += [error.span.start] if error.span is not None else []
    at = min(places, default=0)
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    end = len(text) if end < 0 else end
    if not text[start:end].strip():
        # The error is noticed after the line that caused it.
        before = text[:start].rstrip()
        start, end = before.rfind("\n") + 1, len(before)
    return text[:start] + blank(text[start:end]) + text[end:]
