"""YAML as a frozen tree of nodes with exact spans.

PyYAML supplies events with marks in code points; the tree, the resolution of plain scalars (YAML
1.2 core schema) and all restrictions are implemented here. No objects are constructed from tags.
Anchors, aliases, merge keys, tags, several documents, duplicate keys and scalars on which YAML
1.1 and 1.2 disagree are diagnosed, each at its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import yaml

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label, Severity, Sink, TooManyFindings
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.numbers import (
    CORE_BOOL,
    CORE_FLOAT,
    CORE_INT,
    CORE_NULL,
    NOT_FINITE,
    ambiguity,
    exact,
)
from kcdsl.source.yaml_text import NO_CHARACTER, Masked, mask_expressions, properties, syntax_error

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEPTH_LIMIT = 40
NODES = 30_000
"""The largest number of keys, values and collections of a document."""

LONGEST = 2**16
"""The largest number of characters of a key or a value."""

Value = str | int | Fraction | bool | None


class _Broken(Enum):
    """The value of a scalar with a reported error."""

    BROKEN = "broken"


_BROKEN = _Broken.BROKEN


class Scalar(NamedTuple):
    """A scalar: its resolved value, its decoded text, and its style
    (`plain`, `'`, `"`, `|` or `>`). `broken`: an error was reported, so later passes report
    nothing about it."""

    value: Value
    text: str
    style: str
    span: Span
    broken: bool = False

    @property
    def kind(self) -> str:
        """Return the kind in words."""
        match self.value:
            case None:
                return "nothing"
            case bool():
                return "a truth value"
            case int() | Fraction():
                return "a number"
            case _:
                return "a text"


class SequenceNode(NamedTuple):
    """A list of nodes."""

    items: tuple[Node, ...]
    span: Span

    @property
    def kind(self) -> str:
        """Return the kind in words."""
        return "a list"


class MappingEntry(NamedTuple):
    """One `key: value` of a mapping."""

    key: Scalar
    value: Node


class Mapping(NamedTuple):
    """A mapping in document order; keys are distinct texts."""

    entries: tuple[MappingEntry, ...]
    span: Span

    @property
    def kind(self) -> str:
        """Return the kind in words."""
        return "a mapping"

    def get(self, key: str) -> Node | None:
        """Return the value under a key, or None."""
        return next((entry.value for entry in self.entries if entry.key.text == key), None)


Node = Scalar | SequenceNode | Mapping


def scalars(node: Node) -> Iterator[Scalar]:
    """Yield every scalar of a tree in the order of the document."""
    match node:
        case Scalar():
            yield node
        case SequenceNode(items=items):
            for item in items:
                yield from scalars(item)
        case Mapping(entries=entries):
            for entry in entries:
                yield entry.key
                yield from scalars(entry.value)


@dataclass(slots=True)
class _Open:
    """A collection under construction; keys and values alternate in `parts` of a mapping."""

    is_mapping: bool
    flow: bool
    start: int
    end: int
    parts: list[Node] = field(default_factory=list)


_ALIAS = re.compile(r"\*([0-9A-Za-z_-]+)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FORBIDDEN = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff"
    "\ufffe\uffff]"
)
_BREAKS = {"\r": "\\r", "\x85": "\\N", "\u2028": "\\L", "\u2029": "\\P"}
"""Characters that end a line, even a comment, for some readers and editors and not for others, and
their escapes in quotation marks."""


def parse_yaml(source: SourceFile, sink: Sink) -> Node | None:
    """Return the root node of the only document, or None after a fatal error in the sink."""
    try:
        return _Builder(source, sink).build()
    except TooManyFindings as many:
        sink.found[:] = many.diagnostics
        return None


def _in_quotes(text: str) -> str:
    """Return a text as a quoted scalar of one line."""
    if '"' in text and "'" not in text and "\n" not in text:
        return f"'{text}'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class _Builder:
    """Builds the tree from the stream of events, with bounded depth and without recursion."""

    def __init__(self, source: SourceFile, sink: Sink) -> None:
        self._source = source
        self._sink = sink
        self._shift = 1 if source.text.startswith("\ufeff") else 0
        self._open: list[_Open] = []
        self._root: Node | None = None
        self._documents = self._nodes = 0
        self._anchored: dict[str, str] = {}
        self._masked: Masked = mask_expressions(source.text[self._shift :])

    def build(self) -> Node | None:
        text = self._source.text[self._shift :]
        bad = _FORBIDDEN.search(text)
        if bad is not None:
            at = bad.start() + self._shift
            name, escape = f"U+{ord(bad[0]):04X}", _BREAKS.get(bad[0])
            message, help = f"the character {name} may not occur in YAML", None
            if "\u202a" <= bad[0] <= "\u202e" or "\u2066" <= bad[0] <= "\u2069":
                message = f"the character {name} changes the order in which a line is shown"
                help = f"remove it, or write `\\u{ord(bad[0]):04x}` in double quotation marks"
            if escape is not None:
                message = f"the character {name} ends a line for some readers and not for others"
                help = f"remove it, or write `{escape}` in a text in double quotation marks"
            self._error(codes.NOT_YAML, message, Span(at, at + 1), help)
            return None
        try:
            for event in yaml.parse(self._masked.text, Loader=_LOADER):
                if not self._take(event):
                    return None
        except yaml.MarkedYAMLError as error:
            self._sink.add(syntax_error(self._source, error, self._place))
            return None
        except yaml.YAMLError as error:
            self._error(codes.NOT_YAML, f"the document is not YAML: {error}", Span(0, 0))
            return None
        if self._root is None:
            help = "a contract begins with `kcdsl: 1`"
            self._error(codes.EMPTY_DOCUMENT, "the file holds no document", Span(0, 0), help)
        return self._root

    @cached_property
    def _aliases(self) -> frozenset[str]:
        return frozenset(_ALIAS.findall(self._source.text))

    @property
    def _in_flow(self) -> bool:
        return bool(self._open) and self._open[-1].flow

    def _place(self, index: int) -> int:
        return min(index + self._shift, len(self._source.text))

    def _span(self, event: yaml.Event) -> Span:
        start, end = event.start_mark, event.end_mark
        assert start is not None
        assert end is not None
        return Span(self._place(start.index), self._place(end.index))

    def _error(
        self, code: Code, message: str, span: Span, help: str | None = None, fix: Fix | None = None
    ) -> None:
        self._sink.add(Diagnostic(code, message, self._source, span, help=help, fix=fix))

    def _take(self, event: yaml.Event) -> bool:
        """Process one event; return False to stop."""
        if isinstance(event, yaml.NodeEvent):
            self._nodes += 1
            if self._nodes > NODES:
                message = f"the document has more than {NODES} keys and values"
                self._error(
                    codes.TOO_LARGE, message, self._span(event), "split it into several files"
                )
                return False
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    self._error(
                        codes.SEVERAL_DOCUMENTS,
                        "a second document starts here",
                        self._span(event),
                        "give each contract a file of its own",
                    )
                    return False
            case yaml.AliasEvent():
                self._error(
                    codes.ANCHOR,
                    f"the alias `*{event.anchor}` is not allowed",
                    self._span(event),
                    "write the value out",
                    self._written_out(event),
                )
                span = self._span(event)
                written = self._source.text[span.start : span.end]
                self._attach(Scalar(None, written, "plain", span, broken=True))
            case yaml.ScalarEvent():
                if len(event.value) > LONGEST:
                    message = f"a text of more than {LONGEST} characters"
                    self._error(codes.TOO_LARGE, message, self._span(event))
                    return False
                if "\0" in event.value:
                    message = "the character U+0000 may not occur, written by an escape neither"
                    help = "remove its escape: no path, name or expression has it"
                    self._error(codes.NOT_YAML, message, self._span(event), help)
                    return False
                scalar = self._scalar(event, self._without_properties(event))
                if event.anchor is not None:
                    written = self._source.text[scalar.span.start : scalar.span.end].strip()
                    if written and "\n" not in written and written[0] not in "|>":
                        self._anchored[event.anchor] = written
                self._attach(scalar)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                span = self._without_properties(event)
                if len(self._open) >= DEPTH_LIMIT:
                    self._error(codes.TOO_DEEP, f"more than {DEPTH_LIMIT} nested levels", span)
                    return False
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                flow = self._in_flow or bool(event.flow_style)
                self._open.append(_Open(is_mapping, flow, span.start, span.end))
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self._close(event)
        return True

    def _without_properties(self, event: yaml.NodeEvent) -> Span:
        """Report the anchor and the tag of a node; return its span without them."""
        span = self._span(event)
        tag = getattr(event, "tag", None)
        if event.anchor is None and tag is None:
            return span
        text = self._source.text
        found = properties(text, span)
        if event.anchor is not None:
            place = found.anchor or span
            # An anchor with aliases is kept; a later round of fixes removes it.
            needed = event.anchor in self._aliases
            fix = None if needed or found.anchor is None else self._removed(place, safe=True)
            help = "write the value out where its aliases stand, then remove it" if needed else None
            message = f"the anchor `&{event.anchor}` is not allowed"
            self._error(codes.ANCHOR, message, place, help or "remove it", fix)
        if tag is not None:
            place = found.tag or span
            spelled = text[place.start : place.end]
            fix = None if found.tag is None else self._removed(place, safe=False)
            self._error(
                codes.CUSTOM_TAG, f"the tag `{spelled}` is not allowed", place, "remove it", fix
            )
        return Span(found.end, span.end)

    def _removed(self, place: Span, *, safe: bool) -> Fix:
        """Return the fix that removes a property with the white space after it."""
        text, end = self._source.text, place.end
        while text[end : end + 1] in {" ", "\t"}:
            end += 1
        start = place.start
        if text[end : end + 1] in {"", "\n", "\r"}:
            while text[start - 1 : start] in {" ", "\t"}:
                start -= 1
        return Fix(f"remove `{text[place.start : place.end]}`", (Edit(Span(start, end), ""),), safe)

    def _written_out(self, event: yaml.AliasEvent) -> Fix | None:
        """Return the fix that replaces an alias by its value, if that is a short scalar."""
        value = self._anchored.get(event.anchor or "")
        if value is None:
            return None
        return Fix(f"write `{value}`", (Edit(self._span(event), value),))

    def _attach(self, node: Node) -> None:
        if self._open:
            self._open[-1].parts.append(node)
            self._open[-1].end = max(self._open[-1].end, node.span.end)
        else:
            self._root = node

    def _close(self, event: yaml.Event) -> None:
        opened = self._open.pop()
        end = opened.end
        if self._span(event).end > self._span(event).start:
            end = self._span(event).end
        span = Span(opened.start, max(opened.start, end))
        if not opened.is_mapping:
            self._attach(SequenceNode(tuple(opened.parts), span))
            return
        self._attach(Mapping(self._entries(opened.parts, span), span))

    def _entries(self, parts: list[Node], whole: Span) -> tuple[MappingEntry, ...]:
        entries: list[MappingEntry] = []
        seen: dict[str, MappingEntry] = {}
        said: dict[str, str] = {}
        written = list(zip(parts[::2], parts[1::2], strict=True))

        def place(number: int) -> Span:
            return written[number][0].span.hull(written[number][1].span)

        for number, (key, value) in enumerate(written):
            if not isinstance(key, Scalar):
                self._error(codes.WRONG_KIND, f"a key is {key.kind}, not a text", key.span)
            elif key.text == "<<" and key.style == "plain":
                self._error(
                    codes.MERGE_KEY, "the merge key `<<` is not allowed", key.span, "write it out"
                )
            elif key.text in seen:
                first = seen[key.text]
                if key.text not in said:
                    said[key.text] = self._written(first.value)
                fix = None
                if self._written(value) == said[key.text]:
                    from kcdsl.source.removal import remove_spans

                    edits = remove_spans(self._source, whole, len(written), place, {number})
                    fix = Fix("remove the second", edits)
                self._sink.add(
                    Diagnostic(
                        codes.DUPLICATE_KEY,
                        f"the key `{key.text}` occurs twice in one mapping",
                        self._source,
                        key.span,
                        labels=(Label(first.key.span, "first here"),),
                        help="remove or rename one of them",
                        fix=fix,
                    )
                )
            else:
                seen[key.text] = MappingEntry(key, value)
                entries.append(seen[key.text])
        return tuple(entries)

    def _written(self, node: Node) -> str:
        return self._source.text[node.span.start : node.span.end].strip()

    def _scalar(self, event: yaml.ScalarEvent, span: Span) -> Scalar:
        text = self._masked.restore(event.value)
        style = event.style or "plain"
        if style == "plain" and self._masked.matters(event.value, self._in_flow):
            self._sink.add(
                Diagnostic(
                    codes.UNQUOTED_EXPRESSION,
                    "other YAML readers cannot read this expression without quotation marks",
                    self._source,
                    span,
                    severity=Severity.NOTE,
                    fix=Fix("put it in quotation marks", (Edit(span, _in_quotes(text)),)),
                )
            )
        if style == '"' and _SURROGATE.search(text):
            self._error(codes.NOT_YAML, "half a surrogate pair is no character", span, NO_CHARACTER)
            return Scalar(text, text, style, span, broken=True)
        if style != "plain":
            return Scalar(text, text, style, span)
        value = self._resolve(text, span)
        return Scalar(text if value is _BROKEN else value, text, style, span, value is _BROKEN)

    def _resolve(self, text: str, span: Span) -> Value | _Broken:
        if text in CORE_NULL:
            return None
        if text in CORE_BOOL:
            return CORE_BOOL[text]
        reason = ambiguity(text)
        if reason is not None:
            self._error(
                codes.AMBIGUOUS_SCALAR,
                f"`{text}` is ambiguous: {reason}",
                span,
                f'write "{text}" if the text is meant',
                Fix("put it in quotation marks", (Edit(span, _in_quotes(text)),), safe=False),
            )
            return _BROKEN
        if NOT_FINITE.fullmatch(text):
            self._error(codes.BAD_NUMBER, f"`{text}` is not a finite number", span)
            return _BROKEN
        if not CORE_FLOAT.fullmatch(text):
            return text
        value = exact(text)
        if value is None:
            self._error(codes.BAD_NUMBER, "the number is too long, too large or too small", span)
            return _BROKEN
        return int(value) if CORE_INT.fullmatch(text) else value
