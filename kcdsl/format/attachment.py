"""Attach each comment of a document to the part that it belongs to.

A *part* is an entry of a mapping or an item of a list; the root is one too. A comment stands above
a part, between its key (or dash) and its value, behind it, or at the end of a collection.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.comments import Comment, find_comments
from kcdsl.source.yaml_nodes import Mapping, MappingEntry, Node, Scalar, SequenceNode

Part = MappingEntry | Node


@dataclass(slots=True)
class Notes:
    """The comments of one part."""

    above: list[Comment] = field(default_factory=list)
    head: list[Comment] = field(default_factory=list)
    """Between the key or the dash and the value, and in an empty collection."""
    behind: list[Comment] = field(default_factory=list)
    """On the line where the part ends."""
    ending: list[Comment] = field(default_factory=list)
    """At the end of the collection that is its value."""


class Attachment:
    """The comments of a document by their parts; `rest` are those after its end."""

    def __init__(self, source: SourceFile, root: Node) -> None:
        self._source = source
        self._root = root
        self.comments = find_comments(source, root)
        self._starts = [comment.start for comment in self.comments]
        self._waiting = list(reversed(self.comments))
        self._notes: dict[int, Notes] = {}
        end = len(source.text) + 1
        self._value(root, root, False, end)
        self._behind(root, root, end)
        self.rest = self._until(end)

    def of(self, part: Part) -> Notes:
        """Return the comments of a part."""
        return self._notes.setdefault(id(part), Notes())

    def inside(self, node: Node) -> bool:
        """Return whether there is a comment between the first and the last character of a node."""
        first = bisect_right(self._starts, node.span.start)
        return first < len(self._starts) and self._starts[first] < node.span.end

    def _until(self, offset: int) -> list[Comment]:
        """Take the comments that start before a place."""
        taken: list[Comment] = []
        while self._waiting and self._waiting[-1].start < offset:
            taken.append(self._waiting.pop())
        return taken

    def _line(self, offset: int) -> int:
        return self._source.position(offset).line - 1

    def _column(self, offset: int) -> int:
        return self._source.position(offset).column - 1

    def _value(self, part: Part, node: Node, flow: bool, limit: int) -> None:
        """Attach the comments between a part's key and its value, and those inside the value.

        `flow` says that the value stands inside brackets or braces, `limit` where the next part
        begins.
        """
        notes = self.of(part)
        if isinstance(node, Scalar):
            if node is self._root and node.span.start == node.span.end:
                notes.head += self._until(limit)
            elif self._has_place(node):
                notes.head += self._until(node.span.start)
            return
        parts, flow = parts_of(node), flow or is_flow(self._source, node)
        if flow or not parts:
            notes.head += self._until(node.span.start if parts else node.span.end)
        elif isinstance(part, MappingEntry):
            first = self._waiting[-1] if self._waiting else None
            if first is not None and not first.alone and first.start < start_of(parts[0]):
                notes.head.append(self._waiting.pop())
        for number, inner in enumerate(parts):
            begin = start_of(inner)
            gap = self._until(begin)
            if flow and number == 0 and not notes.head and gap and not gap[0].alone:
                notes.head.append(gap.pop(0))
            self.of(inner).above += gap
            following = parts[number + 1] if number + 1 < len(parts) else None
            until = start_of(following) if following is not None else limit
            if following is None and flow:
                until = node.span.end
            self._value(inner, value_of(inner), flow, until)
            self._behind(inner, value_of(inner), until)
        if parts:
            self._close(part, node, flow, limit)

    def _behind(self, part: Part, value: Node, until: int) -> None:
        """Attach the comment on the line where a part ends."""
        first = self._waiting[-1] if self._waiting else None
        if first is None or first.alone or first.start >= until:
            return
        away = isinstance(part, MappingEntry) and not self._has_place(value)
        end = part.key.span.end if isinstance(part, MappingEntry) and away else value.span.end
        if first.line == self._line(max(end - 1, 0)):
            self.of(part).behind.append(self._waiting.pop())

    def _has_place(self, node: Node) -> bool:
        """Return whether the position of a node is reliable: an empty node has one only after its
        colon; elsewhere it is the position of the reader."""
        start = node.span.start
        return start < node.span.end or not self._source.text[max(start - 1, 0) : start].isspace()

    def _close(self, owner: Part, node: Mapping | SequenceNode, flow: bool, limit: int) -> None:
        """Attach the comments at the end of a collection: in a block those as deep as its parts."""
        if flow:
            self.of(owner).ending += self._until(node.span.end)
            return
        column = self._column(node.span.start)
        shallow = isinstance(owner, MappingEntry) and self._column(owner.key.span.start) == column
        while self._waiting and self._waiting[-1].start < limit:
            comment = self._waiting[-1]
            if comment.alone and (comment.column < column or shallow):
                return
            self.of(owner).ending.append(self._waiting.pop())


def is_flow(source: SourceFile, node: Node) -> bool:
    """Return whether a collection is written in brackets or braces."""
    start = node.span.start
    return not isinstance(node, Scalar) and source.text[start : start + 1] in {"{", "["}


def parts_of(node: Mapping | SequenceNode) -> tuple[Part, ...]:
    """Return the entries of a mapping, or the items of a list."""
    return node.entries if isinstance(node, Mapping) else node.items


def value_of(part: Part) -> Node:
    """Return the value of an entry; an item is its own."""
    return part.value if isinstance(part, MappingEntry) else part


def start_of(part: Part) -> int:
    """Return the beginning of a part: that of its key, or of its value (after the dash)."""
    return part.key.span.start if isinstance(part, MappingEntry) else part.span.start
