"""Signature help inside a call: the parameters, and the one at the cursor."""

from __future__ import annotations

from dataclasses import dataclass

from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.cursor import locate
from kcdsl.lsp.lexemes import Role, lexemes, open_frames
from kcdsl.lsp.nodes import language
from kcdsl.lsp.words import Function, find_function
from kcdsl.source.yaml_nodes import Scalar


@dataclass(frozen=True, slots=True)
class Signature:
    """A function with the number of the parameter at the cursor."""

    function: Function
    parameter: int


def signature(source: SourceFile, offset: int) -> Signature | None:
    """Return the function whose call holds the cursor, the innermost one."""
    cursor = locate(source, offset)
    if cursor is None or cursor.is_key:
        return None
    scalar = Scalar(None, cursor.before, "plain", Span(offset, offset))
    start = language(cursor.path, scalar)
    if start is None:
        return None
    words = lexemes(cursor.before, start)
    if words and words[-1].role is Role.TEXT and words[-1].end == len(cursor.before):
        words = words[:-1]
    for frame in reversed(open_frames(words)):
        function = find_function(frame.opener)
        if function is not None:
            last = len(function.parameters) - 1
            return Signature(function, min(frame.argument, last))
    return None
