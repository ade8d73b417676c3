"""What each comment of a document belongs to, decided from the document alone.

A *part* is an entry of a mapping or an item of a list. A comment stands above a part, behind its
key or dash, behind the part, or at the end of a collection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kcdsl.format.comments import Comment, find_comments
from kcdsl.source.text import SourceFile, Span
from kcdsl.source.yaml_nodes import Entry, Mapping, Node, Scalar, Sequence

Part = Entry | Node


@dataclass(slots=True)
class Notes:
    """The comments of one part."""

    above: list[Comment] = field(default_factory=list)
    head: list[Comment] = field(default_factory=list)
    """Between the key or the dash and the value."""
    behind: list[Comment] = field(default_factory=list)
    """On the line where the part ends; the others below it."""
    ending: list[Comment] = field(default_factory=list)
    """At the end of the collection that is its value."""


class Attachment:
    """The comments of a document by their parts; `rest` are those after its end."""

    def __init__(self, source: SourceFile, root: Node) -> None:
        self._source = source
        self._waiting = list(reversed(find_comments(source, root)))
        self._notes: dict[int, Notes] = {}
        self.comments = tuple(reversed(self._waiting))
        self._value(root, root, is_flow(source, root), None, len(source.text) + 1)
        notes = self.of(root)
        notes.above = [*notes.above, *notes.head]
        notes.head = []
        self.rest = self._until(len(source.text) + 1)

    def of(self, part: Part) -> Notes:
        """Return the comments of a part; the root is one, too."""
        return self._notes.setdefault(id(part), Notes())

    def _until(self, offset: int) -> list[Comment]:
        """Take the comments that start before a place."""
        taken: list[Comment] = []
        while self._waiting and self._waiting[-1].start < offset:
            taken.append(self._waiting.pop())
        return taken

    def _line(self, offset: int) -> int:
        return self._source.position(offset).line - 1

    def _value(self, part: Part, node: Node, flow: bool, key: Span | None, limit: int) -> None:
        """Attach what stands between a part's key and its value, and inside the value."""
        notes = self.of(part)
        if isinstance(node, Scalar):
            empty = node.span.start == node.span.end
            notes.head += [] if empty and key is not None else self._until(node.span.start)
            return
        parts = parts_of(node)
        if flow or not parts:
            notes.head += self._until(node.span.start)
        else:
            between = self._until(start_of(parts[0]))
            same_line = bool(between) and not between[0].alone and key is not None
            notes.head += between[:1] if same_line else []
            self.of(parts[0]).above += between[1:] if same_line else between
        if not parts:
            notes.behind += self._until(node.span.end)
            return
        self._inside(part, node, parts, flow, limit)

    def _inside(
        self, owner: Part, node: Mapping | Sequence, parts: tuple[Part, ...], flow: bool, limit: int
    ) -> None:
        end = node.span.end if flow else limit
        for number, part in enumerate(parts):
            following = parts[number + 1] if number + 1 < len(parts) else None
            begin = start_of(part)
            if number or flow:
                gap = self._until(begin)
                opened = not number and bool(gap) and not gap[0].alone
                opened = opened and gap[0].line == self._line(node.span.start)
                head = self.of(owner).head
                if opened and not head:
                    head.append(gap.pop(0))
                self.of(part).above += gap
            value = value_of(part)
            key = part.key.span if isinstance(part, Entry) else Span(begin, begin)
            until = end if following is None else start_of(following)
            self._value(part, value, flow or is_flow(self._source, value), key, until)
            self._behind(part, value, key, until)
        self._close(owner, node, parts[0], flow, end)

    def _behind(self, part: Part, value: Node, key: Span, until: int) -> None:
        """Attach the comment on the line where a part ends."""
        first = self._waiting[-1] if self._waiting else None
        if first is None or first.alone or first.start >= until:
            return
        if isinstance(value, Scalar) and value.style in {"|", ">"}:
            return
        end = key.end if value.span.start == value.span.end else value.span.end
        if first.line == self._line(max(end, key.end)):
            self.of(part).behind.append(self._waiting.pop())

    def _close(
        self, owner: Part, node: Mapping | Sequence, first: Part, flow: bool, end: int
    ) -> None:
        """Attach the comments at the end of a collection: in a block those as deep as its parts."""
        if flow:
            self.of(owner).ending += self._until(end)
            return
        column = self._source.position(start_of(first)).column - 1
        if isinstance(node, Sequence):
            column = self._source.position(node.span.start).column - 1
        while self._waiting and self._waiting[-1].start < end:
            comment = self._waiting[-1]
            outer = isinstance(owner, Entry) and self._column(owner) == column
            if comment.alone and (comment.column < column or outer):
                return
            self.of(owner).ending.append(self._waiting.pop())

    def _column(self, entry: Entry) -> int:
        return self._source.position(entry.key.span.start).column - 1


def is_flow(source: SourceFile, node: Node) -> bool:
    """Say whether a collection is written in brackets or braces."""
    return not isinstance(node, Scalar) and source.text[node.span.start : node.span.start + 1] in {
        "{",
        "[",
    }


def parts_of(node: Mapping | Sequence) -> tuple[Part, ...]:
    """Return the entries of a mapping, or the items of a list."""
    return node.entries if isinstance(node, Mapping) else node.items


def value_of(part: Part) -> Node:
    """Return the value of an entry; an item is its own."""
    return part.value if isinstance(part, Entry) else part


def start_of(part: Part) -> int:
    """Return where a part begins: its key, or its value (the dash stands before that)."""
    return part.key.span.start if isinstance(part, Entry) else part.span.start
