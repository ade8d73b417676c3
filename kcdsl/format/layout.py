"""The layout: two spaces of indentation, one space in flow collections, comments where they were.

The tree is printed in its own order. Comments are taken from a queue as the printing passes their
place: those above an entry are printed above it, those after a value behind it, and those at the
end of a block, as deep as its entries, at its end.
"""

from __future__ import annotations

from kcdsl.format.comments import Comment, find_comments
from kcdsl.format.scalar import written
from kcdsl.source.text import SourceFile
from kcdsl.source.yaml_nodes import Entry, Mapping, Node, Scalar, Sequence

WIDTH = 100
STEP = 2


class Printer:
    """Prints one document."""

    def __init__(self, source: SourceFile, root: Node) -> None:
        self._source = source
        self._root = root
        self._comments = list(find_comments(source, root))
        self._lines: list[str] = []
        self._noted = 0
        """The number of the line that a comment was put behind last."""

    def text(self) -> str:
        """Return the document in the house layout, with a line end at its end."""
        if isinstance(self._root, Mapping) and self._root.entries and not self._is_flow(self._root):
            self._mapping(self._root, 0, outermost=True)
        else:
            self._above(self._root.span.start, 0)
            self._value("", self._root, 0, "")
        self._remaining(0)
        while self._lines and not self._lines[-1]:
            self._lines.pop()
        return "\n".join(self._lines) + "\n"

    # --- lines ------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._lines.append(text.rstrip())

    def _space(self) -> None:
        """Leave one empty line, except at the beginning."""
        if self._lines and self._lines[-1]:
            self._lines.append("")

    # --- comments ---------------------------------------------------------------------------------

    def _above(self, offset: int, indent: int) -> None:
        """Print the comments before a place on lines of their own."""
        while self._comments and self._comments[0].start < offset:
            comment = self._comments.pop(0)
            if comment.after_blank:
                self._space()
            self._line(" " * indent + comment.text)

    def _behind(self, offset: int) -> None:
        """Put the comments that follow a place on its line behind what was printed last."""
        line = self._source.position(offset).line - 1
        while self._comments and not self._comments[0].alone and self._comments[0].line == line:
            self._append(self._comments.pop(0))

    def _append(self, comment: Comment) -> None:
        """Put a comment behind the last line, or below it where that ends in a comment already."""
        last = self._lines[-1] if self._lines else ""
        if not last:
            self._line(comment.text)
        elif len(self._lines) == self._noted or last.lstrip().startswith("#"):
            self._line(last[: len(last) - len(last.lstrip())] + comment.text)
        else:
            self._lines[-1] = f"{last}  {comment.text}"
            self._noted = len(self._lines)

    def _end_of_block(self, column: int, indent: int, until: int) -> None:
        """Print the comments that close a block: as deep as its entries, before what follows."""
        while self._comments and self._comments[0].start < until:
            comment = self._comments[0]
            if not comment.alone or comment.column < column:
                return
            self._comments.pop(0)
            if comment.after_blank:
                self._space()
            self._line(" " * indent + comment.text)

    def _remaining(self, indent: int) -> None:
        self._above(len(self._source.text) + 1, indent)

    # --- nodes ------------------------------------------------------------------------------------

    def _is_flow(self, node: Node) -> bool:
        return not isinstance(node, Scalar) and self._source.text[node.span.start] in "{["

    def _column(self, offset: int) -> int:
        return self._source.position(offset).column - 1

    def _blank_above(self, offset: int) -> bool:
        line = self._source.position(offset).line
        return line > 1 and not self._source.line(line - 1).strip()

    def _mapping(self, node: Mapping, indent: int, outermost: bool = False, lead: str = "") -> None:
        """Print a mapping in block form; `lead` is what stands before its first key."""
        flow = self._is_flow(node)
        column = self._column(node.entries[0].key.span.start)
        for number, entry in enumerate(node.entries):
            first = number == 0
            if not (first and lead):
                self._before(node.entries, number, outermost, indent, flow)
            prefix = lead if first and lead else " " * indent
            following = node.entries[number + 1 :]
            until = following[0].key.span.start if following else node.span.end
            self._entry(prefix, entry, indent, until)
        if not flow:
            end = len(self._source.text) + 1 if outermost else self._next_token(node.span.end)
            self._end_of_block(column, indent, end)

    def _before(
        self, entries: tuple[Entry, ...], number: int, outermost: bool, indent: int, flow: bool
    ) -> None:
        """Print the comments and the empty line above an entry."""
        key = entries[number].key
        first = self._comments[0] if self._comments else None
        commented = first is not None and first.start < key.span.start
        apart = bool(number) and outermost and self._tall(entries[number - 1], entries[number])
        kept = bool(number) and not flow and not commented and self._blank_above(key.span.start)
        if apart or kept:
            self._space()
        self._above(key.span.start, indent)
        if commented and not flow and self._blank_above(key.span.start):
            self._space()

    def _tall(self, before: Entry, after: Entry) -> bool:
        """Say whether one of two sections takes several lines."""
        return any(
            not isinstance(e.value, Scalar)
            and not self._fits(f"{e.key.text}: ", e.value, e.key.text)
            for e in (before, after)
        )

    def _fits(self, lead: str, node: Mapping | Sequence, field: str) -> bool:
        """Say whether a collection stays in its flow form, on the line that `lead` begins."""
        if not self._is_flow(node) or self._holds_comment(node):
            return self._is_flow(node) and not _parts(node)
        return not _parts(node) or len(lead + self._flow(node, field)) <= WIDTH

    def _next_token(self, offset: int) -> int:
        """Return where the next thing that is no comment begins, at or after a place."""
        text, at = self._source.text, offset
        while at < len(text):
            if text[at] == "#":
                stop = text.find("\n", at)
                at = len(text) if stop < 0 else stop
            elif text[at].isspace():
                at += 1
            else:
                return at
        return len(text) + 1

    def _entry(self, prefix: str, entry: Entry, indent: int, until: int) -> None:
        key = written(self._source, entry.key, "", False).first
        self._between(entry, indent)
        self._value(f"{prefix}{key}:", entry.value, indent, entry.key.text)
        if isinstance(entry.value, Scalar) and entry.value.span.end == entry.value.span.start:
            self._behind(entry.key.span.end)
        if self._comments and self._comments[0].start < until:
            self._behind(max(entry.key.span.end, entry.value.span.end))

    def _between(self, entry: Entry, indent: int) -> None:
        """Print comments between a key and a scalar or flow value above the key."""
        value = entry.value
        if isinstance(value, Scalar) or self._is_flow(value):
            own = [c for c in self._comments if entry.key.span.end <= c.start < value.span.start]
            for comment in own:
                self._comments.remove(comment)
                self._line(" " * indent + comment.text)

    def _value(self, lead: str, node: Node, indent: int, field: str) -> None:
        """Print a value behind `lead`, a key with its colon or the dash of an item."""
        space = " " if lead else ""
        match node:
            case Scalar():
                self._scalar(lead + space, node, indent, field)
                if node.style not in {"|", ">"}:
                    self._behind(node.span.end)
            case Mapping() | Sequence() if self._fits(lead + space, node, field):
                self._line(lead + space + self._flow(node, field))
                self._above(node.span.end, indent)
                self._behind(node.span.end)
            case Mapping() | Sequence():
                self._blocked(lead, node, indent, field)
                if self._is_flow(node):
                    self._behind(node.span.end)

    def _blocked(self, lead: str, node: Mapping | Sequence, indent: int, field: str) -> None:
        """Print a collection in block form below a key, or behind the dash of an item."""
        if lead.endswith("-"):
            if isinstance(node, Mapping):
                self._mapping(node, indent, lead=f"{lead} ")
            else:
                self._line(lead)
                self._sequence(node, indent, field)
            return
        if lead:
            self._line(lead)
            first = _parts(node)[0].span.start
            comment = self._comments[0] if self._comments else None
            if comment is not None and not comment.alone and comment.start < first:
                self._append(self._comments.pop(0))
        inner = indent + STEP if lead else indent
        if isinstance(node, Mapping):
            self._mapping(node, inner)
        else:
            self._sequence(node, inner, field)

    def _sequence(self, node: Sequence, indent: int, field: str) -> None:
        flow = self._is_flow(node)
        column = self._column(node.span.start)
        for number, item in enumerate(node.items):
            commented = bool(self._comments) and self._comments[0].start < item.span.start
            if not flow and not commented and number and self._blank_above(item.span.start):
                self._space()
            self._above(item.span.start, indent)
            self._value(" " * indent + "-", item, indent + STEP, field)
        if not flow:
            self._end_of_block(column, indent, self._next_token(node.span.end))

    def _scalar(self, lead: str, node: Scalar, indent: int, field: str) -> None:
        lines = written(self._source, node, field, False)
        self._line(lead + lines.first)
        deeper = " " * (indent + STEP)
        for line in lines.rest:
            self._line(deeper + line if line else "")

    def _flow(self, node: Node, field: str) -> str:
        """Return a value on one line."""
        match node:
            case Scalar():
                lines = written(self._source, node, field, True)
                return " ".join((lines.first, *lines.rest)).strip()
            case Sequence(items=items):
                return "[" + ", ".join(self._flow(item, field) for item in items) + "]"
            case Mapping(entries=entries):
                return "{" + ", ".join(self._pair(entry) for entry in entries) + "}"

    def _pair(self, entry: Entry) -> str:
        key = written(self._source, entry.key, "", True).first
        value = self._flow(entry.value, entry.key.text)
        return f"{key}: {value}" if value else f"{key}:"

    def _holds_comment(self, node: Node) -> bool:
        return any(node.span.start < c.start < node.span.end for c in self._comments)


def _parts(node: Mapping | Sequence) -> tuple[Node, ...]:
    """Return the keys of a mapping, or the items of a list."""
    if isinstance(node, Mapping):
        return tuple(entry.key for entry in node.entries)
    return node.items
