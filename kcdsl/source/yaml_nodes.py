"""YAML as a frozen tree of nodes with exact places.

The parser of PyYAML delivers events with marks in code points; the tree, the resolution of plain
scalars (YAML 1.2 core schema) and every restriction are ours. Nothing is constructed or executed.
Anchors, aliases, merge keys, tags, several documents, duplicate keys and scalars on which YAML
1.1 and 1.2 disagree are diagnosed, each at its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any

import yaml

from kcdsl.diagnostics.codes import (
    AMBIGUOUS_SCALAR,
    ANCHOR,
    BAD_NUMBER,
    CUSTOM_TAG,
    DUPLICATE_KEY,
    EMPTY_DOCUMENT,
    MERGE_KEY,
    NOT_YAML,
    SEVERAL_DOCUMENTS,
    TOO_DEEP,
    UNQUOTED_EXPRESSION,
    WRONG_KIND,
    Code,
)
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label, Severity, Sink
from kcdsl.source.masking import Masked, mask_expressions
from kcdsl.source.numbers import exact
from kcdsl.source.text import SourceFile, Span

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEPTH_LIMIT = 40

Value = str | int | Fraction | bool | None


class _Broken(Enum):
    """The value of a scalar that was reported."""

    BROKEN = "broken"


_BROKEN = _Broken.BROKEN


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar: its resolved value, its decoded text, and its style
    (`plain`, `'`, `"`, `|` or `>`). `broken` says that it was reported already, so that later
    passes stay silent about it."""

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


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list of nodes."""

    items: tuple[Node, ...]
    span: Span

    @property
    def kind(self) -> str:
        """Return the kind in words."""
        return "a list"


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of a mapping."""

    key: Scalar
    value: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping in document order; keys are distinct texts."""

    entries: tuple[Entry, ...]
    span: Span

    @property
    def kind(self) -> str:
        """Return the kind in words."""
        return "a mapping"

    def get(self, key: str) -> Node | None:
        """Return the value under a key, or None."""
        return next((entry.value for entry in self.entries if entry.key.text == key), None)


Node = Scalar | Sequence | Mapping


@dataclass(slots=True)
class _Open:
    """A collection under construction; keys and values alternate in `parts` of a mapping."""

    is_mapping: bool
    flow: bool
    start: int
    end: int
    parts: list[Node] = field(default_factory=list)


_CORE_NULL = {"", "~", "null", "Null", "NULL"}
_CORE_BOOL = {w: w.lower() == "true" for w in ("true", "True", "TRUE", "false", "False", "FALSE")}
_CORE_INT = re.compile(r"[-+]?[0-9]+")
_CORE_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_OLD_BOOL = re.compile(r"(?i:yes|no|on|off)")
_BASE_60 = re.compile(r"[-+]?[0-9]+(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt ].*)?")
_OCTAL = re.compile(r"[-+]?0[0-9]+")
_GROUPED = re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?")
_PREFIXED = re.compile(r"[-+]?0[xXoObB][0-9a-fA-F_]+")
_FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


def _ambiguity(text: str) -> str | None:
    """Say how other readers take a plain scalar that is not what it seems, or None."""
    if _OLD_BOOL.fullmatch(text):
        return "YAML 1.1 takes it for a truth value"
    if _BASE_60.fullmatch(text):
        return "YAML 1.1 takes it for a number in base 60"
    if _DATE.fullmatch(text):
        return "YAML 1.1 takes it for a date"
    if _OCTAL.fullmatch(text):
        return "YAML 1.1 takes it for an octal number"
    if _GROUPED.fullmatch(text):
        return "YAML 1.1 takes it for a number"
    if _PREFIXED.fullmatch(text):
        return "readers take it for a number in another base"
    return None


def parse_yaml(source: SourceFile, sink: Sink) -> Node | None:
    """Return the root node of the only document, or None after a fatal error in the sink."""
    return _Builder(source, sink).build()


def _in_quotes(text: str) -> str:
    """Return a text as a quoted scalar of one line."""
    if '"' in text and "'" not in text:
        return f"'{text}'"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class _Builder:
    """Turns the stream of events into the tree; depth is bounded, recursion is not used."""

    def __init__(self, source: SourceFile, sink: Sink) -> None:
        self._source = source
        self._sink = sink
        self._shift = 1 if source.text.startswith("\ufeff") else 0
        self._open: list[_Open] = []
        self._root: Node | None = None
        self._documents = 0
        self._anchored: dict[str, str] = {}
        self._masked: Masked = mask_expressions(source.text[self._shift :])

    def build(self) -> Node | None:
        text = self._source.text[self._shift :]
        bad = _FORBIDDEN.search(text)
        if bad is not None:
            at = bad.start() + self._shift
            name = f"U+{ord(bad[0]):04X}"
            self._error(NOT_YAML, f"the character {name} may not occur in YAML", Span(at, at + 1))
            return None
        try:
            for event in yaml.parse(self._masked.text, Loader=_LOADER):
                if not self._take(event):
                    return None
        except yaml.MarkedYAMLError as error:
            self._syntax_error(error)
            return None
        except yaml.YAMLError as error:
            self._error(NOT_YAML, f"the document is not YAML: {error}", Span(0, 0))
            return None
        if self._root is None:
            self._error(EMPTY_DOCUMENT, "the file holds no document", Span(0, 0))
        return self._root

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> None:
        mark = error.problem_mark or error.context_mark
        at = self._place(mark.index) if mark is not None else 0
        labels: tuple[Label, ...] = ()
        if error.context_mark is not None and error.problem_mark is not None:
            begin = self._place(error.context_mark.index)
            if begin != at:
                labels = (Label(Span(begin, begin + 1), error.context or "started here"),)
        end = min(at + 1, len(self._source.text))
        problem = error.problem or "unreadable"
        self._sink.add(
            Diagnostic(
                NOT_YAML,
                f"not YAML: {problem}",
                self._source,
                Span(at, max(at, end)),
                labels=labels,
                help=_advice(problem, self._source.text[at : at + 1]),
                fix=_without_tabs(self._source.text, at),
            )
        )

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
        """Process one event; False ends the reading."""
        match event:
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    self._error(
                        SEVERAL_DOCUMENTS, "a second document starts here", self._span(event)
                    )
                    return False
            case yaml.AliasEvent():
                self._error(
                    ANCHOR,
                    f"the alias `*{event.anchor}` is not allowed",
                    self._span(event),
                    "write the value out",
                    self._written_out(event),
                )
                self._attach(Scalar(None, "", "plain", self._span(event), broken=True))
            case yaml.ScalarEvent():
                self._refuse_properties(event)
                scalar = self._scalar(event)
                if event.anchor is not None:
                    written = self._source.text[scalar.span.start : scalar.span.end]
                    plain = written[written.find("&") :].partition(" ")[2].strip()
                    if plain and "\n" not in plain and plain[0] not in "|>!":
                        self._anchored[event.anchor] = plain
                self._attach(scalar)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self._refuse_properties(event)
                if len(self._open) >= DEPTH_LIMIT:
                    self._error(
                        TOO_DEEP, f"more than {DEPTH_LIMIT} nested levels", self._span(event)
                    )
                    return False
                span = self._span(event)
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                flow = self._in_flow or bool(event.flow_style)
                self._open.append(_Open(is_mapping, flow, span.start, span.end))
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self._close(event)
        return True

    def _refuse_properties(self, event: yaml.NodeEvent) -> None:
        span = self._span(event)
        text = self._source.text
        if event.anchor is not None:
            at = text.find(f"&{event.anchor}", span.start)
            place = Span(at, at + len(event.anchor) + 1) if at >= 0 else span
            # As long as an alias needs it, the anchor stays; a later round removes it.
            needed = f"*{event.anchor}" in text
            fix = None if needed or at < 0 else self._removed(place, safe=True)
            self._error(ANCHOR, f"the anchor `&{event.anchor}` is not allowed", place, None, fix)
        tag = getattr(event, "tag", None)
        if tag is not None:
            at = text.find("!", span.start)
            word = re.compile(r"![^\s,\[\]{}]*").match(text, at) if at >= 0 else None
            place = Span(word.start(), word.end()) if word is not None else span
            spelled = word[0] if word is not None else tag
            fix = self._removed(place, safe=False) if word is not None else None
            self._error(CUSTOM_TAG, f"the tag `{spelled}` is not allowed", place, "remove it", fix)

    def _removed(self, place: Span, *, safe: bool) -> Fix:
        """Return the fix that removes a property with the white space behind it."""
        text, end = self._source.text, place.end
        while text[end : end + 1] in {" ", "\t"}:
            end += 1
        start = place.start
        if text[end : end + 1] in {"", "\n", "\r"}:
            while text[start - 1 : start] in {" ", "\t"}:
                start -= 1
        return Fix(f"remove `{text[place.start : place.end]}`", (Edit(Span(start, end), ""),), safe)

    def _written_out(self, event: yaml.AliasEvent) -> Fix | None:
        """Return the fix that writes the value of an alias, where that is one short text."""
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
            self._attach(Sequence(tuple(opened.parts), span))
            return
        self._attach(Mapping(self._entries(opened.parts, span), span))

    def _entries(self, parts: list[Node], whole: Span) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        seen: dict[str, Scalar] = {}
        written = list(zip(parts[::2], parts[1::2], strict=True))
        for number, (key, value) in enumerate(written):
            if not isinstance(key, Scalar):
                self._error(WRONG_KIND, f"a key is {key.kind}, not a text", key.span)
            elif key.text == "<<" and key.style == "plain":
                self._error(MERGE_KEY, "the merge key `<<` is not allowed", key.span)
            elif key.text in seen:
                self._sink.add(
                    Diagnostic(
                        DUPLICATE_KEY,
                        f"the key `{key.text}` occurs twice in one mapping",
                        self._source,
                        key.span,
                        labels=(Label(seen[key.text].span, "first here"),),
                        help="remove or rename one of them",
                        fix=self._once(whole, written, number),
                    )
                )
            else:
                seen[key.text] = key
                entries.append(Entry(key, value))
        return tuple(entries)

    def _once(self, whole: Span, written: list[tuple[Node, Node]], number: int) -> Fix | None:
        """Return the fix that removes an entry which says what one before it says too."""
        from kcdsl.source.removal import remove_spans

        text = self._source.text
        key, value = written[number]
        same = (
            other
            for name, other in written[:number]
            if isinstance(name, Scalar) and isinstance(key, Scalar) and name.text == key.text
        )
        first = next(same)
        said, before = (text[node.span.start : node.span.end].strip() for node in (value, first))
        if said != before:
            return None
        spans = [name.span.hull(node.span) for name, node in written]
        return Fix("remove the second", remove_spans(self._source, whole, spans, {number}))

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        span, text = self._span(event), self._masked.restore(event.value)
        style = event.style or "plain"
        if style == "plain" and self._masked.matters(event.value, self._in_flow):
            self._sink.add(
                Diagnostic(
                    UNQUOTED_EXPRESSION,
                    "other YAML readers cannot read this expression without quotation marks",
                    self._source,
                    span,
                    severity=Severity.NOTE,
                    fix=Fix("put it in quotation marks", (Edit(span, _in_quotes(text)),)),
                )
            )
        if style != "plain":
            return Scalar(text, text, style, span)
        value = self._resolve(text, span)
        return Scalar(text if value is _BROKEN else value, text, style, span, value is _BROKEN)

    def _resolve(self, text: str, span: Span) -> Value | _Broken:
        if text in _CORE_NULL:
            return None
        if text in _CORE_BOOL:
            return _CORE_BOOL[text]
        reason = _ambiguity(text)
        if reason is not None:
            self._error(
                AMBIGUOUS_SCALAR,
                f"`{text}` is ambiguous: {reason}",
                span,
                f'write "{text}" if the text is meant',
                Fix("put it in quotation marks", (Edit(span, _in_quotes(text)),), safe=False),
            )
            return _BROKEN
        if _NOT_FINITE.fullmatch(text):
            self._error(BAD_NUMBER, f"`{text}` is not a finite number", span)
            return _BROKEN
        if not _CORE_FLOAT.fullmatch(text):
            return text
        value = exact(text)
        if value is None:
            self._error(BAD_NUMBER, "the number is too long, too large or too small", span)
            return _BROKEN
        return int(value) if _CORE_INT.fullmatch(text) else value


def _without_tabs(text: str, at: int) -> Fix | None:
    """Return the fix that indents a line by spaces, where a tab is the trouble: as the line above,
    and two more behind a key without a value."""
    start = text.rfind("\n", 0, at) + 1
    lead = re.compile(r"[ \t]*").match(text, start)
    assert lead is not None
    if text[at : at + 1] != "\t" or at >= lead.end():
        return None
    above = next((line for line in reversed(text[:start].split("\n")) if line.strip()), "")
    indent = len(above) - len(above.lstrip(" "))
    indent += 2 if above.rstrip().endswith(":") else 0
    return Fix("indent with spaces", (Edit(Span(start, lead.end()), " " * indent),), safe=False)


def _advice(problem: str, char: str) -> str | None:
    if char == "\t":
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "put the text in quotation marks: an unquoted text may not hold `: `"
    if char in {"%", "@", "`"}:
        return f"put the text in quotation marks: it may not begin with `{char}`"
    return None
