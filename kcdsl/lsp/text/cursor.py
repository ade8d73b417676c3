"""The cursor in an unfinished document: its path, and a parsable form of the text.

`locate` inserts a unique word at the cursor and finds it in the parsed YAML. If the text around is
unfinished, the rest of it is left out and open quotes and brackets on the line are closed.
`repaired_yaml` blanks clauses or lines that cannot be parsed, which keeps all offsets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kcdsl.check.layout import blank, is_separate_yaml, layout, reduced
from kcdsl.diagnostics.codes import NOT_YAML
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.lsp.text.nodes import Path, fields
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, parse_yaml

_WORD_BEFORE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
_QUOTES = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'|#[^\n]*")
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_INDENT = re.compile(r"[ ]*(?:- +)?")
_EFFORT = 2**21
"""The total number of characters to parse to locate the cursor; the last text may exceed it."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The location of the cursor: the path of the value or key at it.

    `before` is the decoded text of the scalar before the cursor, and `siblings` are the keys of the
    enclosing mapping. `node` is the tree in which the path was found.
    """

    path: Path
    is_key: bool
    before: str
    siblings: tuple[str, ...]
    style: str
    root: Node


def comment_before(text: str, offset: int) -> str | None:
    """Return the comment on the line before the cursor; None outside comments."""
    start = text.rfind("\n", 0, offset) + 1
    line = text[start:offset]
    plain = _QUOTES.sub(lambda m: m[0] if m[0][0] == "#" else "_" * len(m[0]), line)
    at = next((m.start() for m in re.finditer("#", plain) if _begins_comment(plain, m.start())), -1)
    return line[at:] if at >= 0 else None


def _begins_comment(line: str, at: int) -> bool:
    return at == 0 or line[at - 1] in " \t"


def locate(source: SourceFile, offset: int) -> Cursor | None:
    """Return the location of the cursor; None where no candidate text is YAML."""
    text, offset = _local(source.text, offset)
    marker, left = _unused(text), _EFFORT
    for candidate in _candidates(text, offset, marker):
        if left <= 0:
            return None
        left -= len(candidate)
        root = parse_yaml(SourceFile(source.name, candidate), Sink())
        if root is None:
            continue
        found = _find(root, marker)
        if found is not None:
            return found
    return None


def _unused(text: str) -> str:
    marker = "cursor"
    while marker in text:
        marker += "x"
    return marker


def _local(text: str, offset: int) -> tuple[str, int]:
    """Blank the clauses other than that of the cursor, so that long documents are cheap."""
    found = layout(text)
    if found is None:
        return text, offset
    near = [i for i, span in enumerate(found.clauses) if span.holds(offset)]
    if not near:
        # The first clause is kept, so that the section remains a mapping.
        near = [0]
    return reduced(text, found, near), offset


def _candidates(text: str, offset: int, marker: str) -> Iterator[str]:
    """Yield texts with the marker at the cursor, the least changed first."""
    before, after = text[:offset], text[offset:]
    line_end = len(after) if "\n" not in after else after.index("\n")
    rest_of_line, rest = after[:line_end], after[line_end:]
    opened = _open_brackets(before)
    rounds = "".join(_CLOSES[c] for c in reversed(opened) if c == "(")
    closers = "".join(_CLOSES[c] for c in reversed(opened))
    quote = _open_quote(before)
    middle = f"{before}{marker}"
    if rounds and not quote and rounds not in rest_of_line:
        yield f"{middle}{rounds}{after}"
    yield f"{middle}{after}"
    # A key that has no colon yet, or an empty line where one would stand.
    yield f"{middle}:{after}"
    # Nothing after the cursor on its line; what is open is closed.
    for end in (f"{quote}{closers}", f"{quote}", f":{closers}", ""):
        yield f"{middle}{end}{rest}"
    indent = len(_INDENT.match(before[before.rfind("\n") + 1 :])[0])  # type: ignore[index]
    outer = _next_outer(rest, indent)
    for end in (f"{quote}{closers}", ":", f":{closers}", ""):
        yield f"{middle}{end}{outer}"
        yield f"{middle}{end}\n"


def _next_outer(rest: str, indent: int) -> str:
    """Blank the following lines that are indented more than the line of the cursor."""
    lines = rest.split("\n")
    for number, line in enumerate(lines[1:], 1):
        if line.strip() and len(line) - len(line.lstrip(" ")) < max(indent, 1):
            return "\n" * number + "\n".join(lines[number:])
    return "\n"


def _open_brackets(before: str) -> list[str]:
    """Return the brackets that are open before the cursor."""
    start = before.rfind("\n") + 1
    # A flow mapping may have begun on an earlier line.
    opened = _scan(before[start:])
    while start > 0 and (not opened or opened[0] == "("):
        earlier = before.rfind("\n", 0, start - 1) + 1
        if not re.search(r"[\[{(,]\s*(?:#[^\n]*)?\Z", before[earlier : start - 1]):
            break
        start = earlier
        opened = _scan(before[start:])
    return opened


def _scan(text: str) -> list[str]:
    opened: list[str] = []
    for char in _QUOTES.sub("", text):
        if char in _CLOSES:
            opened.append(char)
        elif opened and char == _CLOSES[opened[-1]]:
            opened.pop()
    return opened


def _open_quote(before: str) -> str:
    """Return the quotation mark that is open on the line before the cursor, or ""."""
    line = _QUOTES.sub("", before[before.rfind("\n") + 1 :])
    for char in line:
        if char in "\"'":
            return char
    return ""


def _find(root: Node, marker: str) -> Cursor | None:
    for field in fields(root):
        key, value = field.key, field.value
        if key is not None and marker in key.text:
            before = key.text.partition(marker)[0]
            siblings = _keys(root, field.path[:-1], marker)
            return Cursor(field.path[:-1], True, before, siblings, key.style, root)
        if isinstance(value, Scalar) and marker in value.text:
            before = value.text.partition(marker)[0]
            return Cursor(field.path, False, before, (), value.style, root)
    if isinstance(root, Scalar) and marker in root.text:
        return Cursor((), True, root.text.partition(marker)[0], (), root.style, root)
    return None


def _keys(root: Node, path: Path, marker: str) -> tuple[str, ...]:
    node: Node | None = root
    for step in path:
        if isinstance(node, Mapping) and isinstance(step, str):
            node = node.get(step)
        elif not isinstance(node, Mapping | Scalar) and node is not None and isinstance(step, int):
            node = node.items[step]
    if not isinstance(node, Mapping):
        return ()
    return tuple(e.key.text for e in node.entries if marker not in e.key.text)


def word_before(text: str, offset: int) -> int:
    """Return the start of the word that ends at the cursor."""
    found = _WORD_BEFORE.search(text, max(0, offset - 200), offset)
    return found.start() if found is not None else offset


# --- mending --------------------------------------------------------------------------------------


_ROUNDS = 4
"""The largest number of lines to blank."""
_LONGEST = 2**18
"""The largest document to mend, in characters: each blanked line needs a new parse."""


def repaired_yaml(source: SourceFile) -> SourceFile | None:
    """Return a text of the same length that is YAML; None where a few blank lines are not enough,
    and for a too long document."""
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
            # Continue with the text whose error is furthest.
            current, error = max(found, key=lambda item: _place(item[1]))
    return None


def _error(text: str) -> Diagnostic | None:
    """Return the YAML error of a text; None where it is valid."""
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
    kept = {
        number
        for number, (span, name) in enumerate(zip(found.clauses, found.names, strict=True))
        if is_separate_yaml(text[span.start : span.end], name)
    }
    return reduced(text, found, kept)


def _suspects(text: str, error: Diagnostic) -> list[int]:
    """Return offsets in the lines that may have caused an error: the line of the error, the line
    before, and the start of the reported construct."""
    at = min(_place(error), len(text))
    before = len(text[: text.rfind("\n", 0, at) + 1].rstrip())
    return [at, before, *(label.span.start for label in error.labels)]


def _without_line(text: str, at: int) -> str:
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    end = len(text) if end < 0 else end
    return text[:start] + blank(text[start:end]) + text[end:]
