"""Fixes that take comments with them: none of them is safe, because only a person knows whether
what a comment says is still wanted."""

from __future__ import annotations

from dataclasses import replace

from kcdsl.diagnostics.codes import UNUSED_SUPPRESSION
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.yaml_nodes import Node


def spare_comments(source: SourceFile, root: Node | None, sink: Sink) -> None:
    """Make those fixes of a document unsafe that remove a comment, other than the one that their
    finding is about."""
    doubtful = [i for i, found in enumerate(sink.found) if _removes(source, found, "#")]
    if root is None or not doubtful:
        return
    from kcdsl.format.comments import find_comments

    comments = find_comments(source, root)
    for index in doubtful:
        found = sink.found[index]
        lost = any(_removes(source, found, comment.text, comment.start) for comment in comments)
        if lost and found.fix is not None:
            sink.found[index] = replace(found, fix=replace(found.fix, safe=False))


def _removes(source: SourceFile, found: Diagnostic, text: str, at: int | None = None) -> bool:
    """Say whether the safe fix of a finding removes a text, at an offset or anywhere."""
    if found.fix is None or not found.fix.safe or found.code == UNUSED_SUPPRESSION:
        return False
    if found.source is None or found.source.name != source.name:
        return False
    return any(
        text not in edit.text
        and (
            text in source.text[edit.span.start : edit.span.end]
            if at is None
            else edit.span.start <= at and at + len(text) <= edit.span.end
        )
        for edit in found.fix.edits
    )
