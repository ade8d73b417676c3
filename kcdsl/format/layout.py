"""The layout: two spaces of indentation, one space in flow collections, comments where they were.

The tree is printed in its own order, each part with the comments that `attachment` gives it. The
output depends on the tree, the comments of its parts, the collections in flow form and the empty
lines. All of them are the same when the result is read, so formatting is idempotent.
"""

from __future__ import annotations

import re

from kcdsl.diagnostics.spans import SourceFile
from kcdsl.format.attachment import Attachment, Part, is_flow, parts_of, start_of, value_of
from kcdsl.format.scalar import comment_of, written
from kcdsl.source.comments import Comment
from kcdsl.source.yaml_nodes import Mapping, MappingEntry, Node, Scalar, SequenceNode

WIDTH = 100
STEP = 2
_LONGEST_KEY = 1000
"""A longer key needs a question mark before it (YAML says: beyond 1024 characters)."""
_NO_DASH = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")


class Printer:
    """Prints one document; `careful` puts every text in quotation marks."""

    def __init__(self, source: SourceFile, root: Node, *, careful: bool = False) -> None:
        self._source = source
        self._root = root
        self._careful = careful
        self._notes = Attachment(source, root)
        self._spoken_of = set() if careful else self._lines_spoken_of()
        self._flat: dict[tuple[int, str], bool] = {}
        self._lines: list[str] = []
        self._commented = 0
        """The number of the line that ends in a comment, if it is the last."""
        self._sealed = 0
        """The number of lines up to a block scalar that includes the empty lines after it."""

    def text(self) -> str:
        """Return the document in the standard layout, ending with a line end."""
        self._above(self._root, "", 0)
        self._value(self._root, self._root, "", 0)
        self._own_lines(self._notes.rest, 0)
        while len(self._lines) > self._sealed and not self._lines[-1]:
            self._lines.pop()
        return "\n".join(self._lines) + "\n"

    def _lines_spoken_of(self) -> set[int]:
        """Return the lines, from 0, that `kcdsl` comments refer to."""
        count = self._source.line_count
        following, after = [count - 1] * count, count - 1
        for line in range(count - 1, -1, -1):
            following[line] = after
            text = self._source.line(line + 1).strip()
            if text and not text.startswith("#"):
                after = line
        found: set[int] = set()
        for comment in self._notes.comments:
            if comment.speaks_of_lines:
                found.add(following[comment.line] if comment.alone else comment.line)
        return found

    # --- lines ------------------------------------------------------------------------------------

    def _space(self) -> None:
        """Leave one empty line, except at the beginning."""
        if self._lines and self._lines[-1] and len(self._lines) > self._sealed:
            self._lines.append("")

    def _own_lines(self, comments: list[Comment], indent: int) -> None:
        """Print comments on lines of their own."""
        for comment in comments:
            if comment.after_blank:
                self._space()
            self._lines.append(" " * indent + comment.text)
            self._commented = len(self._lines)

    def _behind(self, comments: list[Comment], indent: int) -> None:
        """Put comments behind the last line, or below it where that ends in a comment already."""
        for comment in comments:
            if self._commented == len(self._lines):
                self._lines.append(" " * indent + comment.text)
            else:
                self._lines[-1] += f"  {comment.text}"
            self._commented = len(self._lines)

    def _blank_above(self, offset: int) -> bool:
        line = self._source.position(offset).line
        return line > 1 and not self._source.line(line - 1).strip(" \t\ufeff")

    # --- parts ------------------------------------------------------------------------------------

    def _part(self, part: Part, lead: str, indent: int) -> None:
        """Print a part; its line begins with `lead`, and its key or dash is at column `indent`."""
        if isinstance(part, MappingEntry):
            self._value(part, part.value, lead + self._key(part, lead), indent)
        else:
            self._value(part, part, lead, indent)

    def _above(
        self, part: Part, lead: str, indent: int, *, apart: bool = False, blank: bool = False
    ) -> None:
        """Print the comments above a part, after an empty line if `apart`, and before one if
        `blank`."""
        above, head = self._comments_above(part, lead)
        if apart:
            self._space()
        self._own_lines(above, indent)
        if above and blank:
            self._space()
        self._own_lines(head, indent)

    def _comments_above(self, part: Part, lead: str) -> tuple[list[Comment], list[Comment]]:
        """Return the comments above a part, and those that move there from its key or dash."""
        notes, value = self._notes.of(part), value_of(part)
        if isinstance(part, MappingEntry):
            stays = self._is_block(value, lead + self._key(part, lead), part.key.text)
            head = [] if stays else self._outside(notes.head, value)
            return notes.above, [*self._of_key(part.key), *head]
        if isinstance(value, Scalar) or not self._is_block(value, lead, ""):
            return notes.above, self._outside(notes.head, value)
        own = [*notes.above, *notes.head, *self._of_whole(part)]
        if not lead:
            return own, []
        # Nothing can stand between the dash and its first part.
        first = f"{lead} " if isinstance(value, Mapping) else f"{' ' * len(lead)} -"
        above, head = self._comments_above(parts_of(value)[0], first)
        return [*own, *above], head

    def _of_key(self, key: Scalar) -> list[Comment]:
        """Return the comment behind the sign of a key that is a block scalar."""
        text = comment_of(self._raw(key)).strip()
        return [Comment(text, key.span.start, 0, 0, True, False)] if text else []

    def _raw(self, node: Scalar) -> str:
        return self._source.text[node.span.start : node.span.end]

    def _of_whole(self, part: Part) -> list[Comment]:
        """Return the comments behind a part, if they may move to its beginning."""
        value = value_of(part)
        alone = is_flow(self._source, value) and not self._notes.inside(value)
        return self._notes.of(part).behind if alone else []

    def _outside(self, head: list[Comment], value: Node) -> list[Comment]:
        """Return the comments before a value; a collection that keeps its lines prints those
        inside."""
        if not self._is_kept(value):
            return head
        return [comment for comment in head if comment.start < value.span.start]

    def _parts(self, node: Mapping | SequenceNode, indent: int, first: str) -> None:
        """Print the parts of a collection in block form; `first` is the beginning of the first
        line, if the lines above it are already printed."""
        flow = is_flow(self._source, node)
        parts = parts_of(node)
        pad = " " * indent + ("" if isinstance(node, Mapping) else "-")
        end = node.span.start
        for number, part in enumerate(parts):
            begin = start_of(part) if isinstance(part, MappingEntry) else self._dash(end)
            blank, end = self._blank_above(begin), value_of(part).span.end
            if number == 0 and first:
                self._part(part, first, indent)
                continue
            apart = number > 0 and not flow and blank and not self._notes.of(part).above
            if number and node is self._root and isinstance(node, Mapping):
                apart = apart or self._tall(parts[number - 1]) or self._tall(part)
            self._above(part, pad, indent, apart=apart, blank=blank)
            self._part(part, pad, indent)

    def _dash(self, offset: int) -> int:
        """Return where the dash of an item stands, at or after a place outside comments."""
        found = _NO_DASH.match(self._source.text, offset)
        assert found is not None
        return found.end()

    def _tall(self, part: Part) -> bool:
        """Return whether a section takes several lines."""
        assert isinstance(part, MappingEntry)
        return not isinstance(part.value, Scalar) and not self._on_one_line(
            part.value, self._key(part, ""), part.key.text
        )

    def _key(self, entry: MappingEntry, lead: str) -> str:
        """Return a key with its separator from the value."""
        key = self._key_text(entry.key, flow=False)
        if len(key) > _LONGEST_KEY:
            return f"? {key}\n{' ' * len(lead)}:"
        return f"{key}:"

    def _key_text(self, key: Scalar, *, flow: bool) -> str:
        raw = self._raw(key)
        one_line = flow or "\n" in raw or "\r" in raw
        text = written(self._source, key, "", one_line, careful=self._careful).first
        # A key of no character stands behind a question mark, which is not written.
        return text.removesuffix(comment_of(raw)) or "null"

    # --- values -----------------------------------------------------------------------------------

    def _is_block(self, node: Node, lead: str, field: str) -> bool:
        """Return whether a value is printed part by part."""
        return (
            not isinstance(node, Scalar)
            and not self._on_one_line(node, lead, field)
            and not self._is_kept(node)
        )

    def _on_one_line(self, node: Mapping | SequenceNode, lead: str, field: str) -> bool:
        """Return whether a collection stays in its flow form, on the line that `lead` begins."""
        key = (id(node), lead)
        if key not in self._flat:
            self._flat[key] = self._fits(node, lead, field)
        return self._flat[key]

    def _fits(self, node: Mapping | SequenceNode, lead: str, field: str) -> bool:
        if not parts_of(node):
            return True
        if not is_flow(self._source, node) or self._notes.inside(node) or self._is_kept(node):
            return False
        wide = len(f"{lead} {self._flow(node, field)}") > WIDTH
        return not wide or self._is_spoken_of(node)

    def _rows(self, node: Node) -> range:
        """Return the lines, from 0, that a node stands on."""
        position = self._source.position
        return range(position(node.span.start).line - 1, position(node.span.end).line)

    def _is_spoken_of(self, node: Node) -> bool:
        return bool(self._spoken_of) and not self._spoken_of.isdisjoint(self._rows(node))

    def _is_kept(self, node: Node) -> bool:
        """Return whether a flow collection keeps its lines, since a comment refers to one of
        them."""
        if not self._spoken_of or isinstance(node, Scalar) or not parts_of(node):
            return False
        several = len(self._rows(node)) > 1
        return several and is_flow(self._source, node) and self._is_spoken_of(node)

    def _value(self, part: Part, node: Node, lead: str, indent: int) -> None:
        """Print the value of a part behind `lead`: a key with its colon, a dash, or nothing."""
        field = part.key.text if isinstance(part, MappingEntry) else ""
        space = f"{lead} " if lead else ""
        if isinstance(node, Scalar):
            self._scalar(node, lead, indent, field)
        elif self._on_one_line(node, lead, field):
            self._lines.append(space + self._flow(node, field))
        elif self._is_kept(node):
            raw = self._source.text[node.span.start : node.span.end].replace("\r\n", "\n")
            first, *rest = raw.replace("\r", "\n").split("\n")
            self._lines.append(space + first.rstrip(" \t"))
            for line in rest:
                text = line.strip(" \t")
                self._lines.append(" " * (indent + STEP) + text if text else "")
        else:
            self._block(part, node, lead, indent)
            return
        self._behind(self._notes.of(part).behind, indent)

    def _block(self, part: Part, node: Mapping | SequenceNode, lead: str, indent: int) -> None:
        """Print a collection part by part: below a key, behind a dash, or from the margin.

        A comment behind the closing bracket refers to the whole collection and moves to its
        beginning, behind the key or above. With other comments inside it stays at the end, in its
        order.
        """
        notes = self._notes.of(part)
        inner = indent + STEP if lead else indent
        first = ""
        if isinstance(part, MappingEntry):
            self._lines.append(lead)
            head = [*notes.head, *self._of_whole(part)]
            self._behind(head[:1], inner)
            self._own_lines(head[1:], inner)
        elif lead and isinstance(node, Mapping):
            first = f"{lead} "
        elif lead:
            self._lines.append(lead)
            first = f"{' ' * inner}-"
        self._parts(node, inner, first)
        self._own_lines(notes.ending, inner)
        if not self._of_whole(part):
            self._behind(notes.behind, inner)

    def _scalar(self, node: Scalar, lead: str, indent: int, field: str) -> None:
        room = WIDTH - len(lead) - 1
        lines = written(self._source, node, field, False, careful=self._careful, room=room)
        first = lines.first if lead or lines.first else "null"
        self._lines.append(f"{lead} {first}" if lead and first else lead or first)
        deeper = " " * (indent + STEP)
        self._lines += [deeper + line if line else "" for line in lines.rest]
        if lines.keeps:
            self._sealed = len(self._lines)
        if not lines.rest and node.style in {"|", ">"} and comment_of(first):
            self._commented = len(self._lines)

    def _flow(self, node: Node, field: str) -> str:
        """Return a value on one line."""
        match node:
            case Scalar():
                return written(self._source, node, field, True, careful=self._careful).first
            case SequenceNode(items=items):
                return "[" + ", ".join(self._flow(item, "") for item in items) + "]"
            case Mapping(entries=entries):
                return "{" + ", ".join(self._pair(entry) for entry in entries) + "}"

    def _pair(self, entry: MappingEntry) -> str:
        key = self._key_text(entry.key, flow=True)
        value = self._flow(entry.value, entry.key.text)
        return f"? {key} : {value}" if len(key) > _LONGEST_KEY else f"{key}: {value}"
