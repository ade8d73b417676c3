"""The layout of scalars: verbatim, except for expressions, which have one spelling.

The output is decoded again; if the text differs, it is written in double quotation marks with
escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.scalar_map import map_scalar
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax.parser import ParseNode, Token, parse

STARTS = {"require": "requirement", "where": "predicate", "budget": "budget"}
"""The fields that hold expressions, with the rule of the grammar that reads each."""
_HEADER = re.compile(r"([|>])([-+0-9]*)[ \t]*(#[^\r\n]*)?(?:\r\n|\r|\n|$)")
_UNSAFE_START = re.compile(r"[-?:,\[\]{}#&*!|>'\"%@` ]")
_UNSAFE = re.compile(r":(?: |$)| #|\s$")
_FLOW = re.compile(r"[,\[\]{}]")
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}


@dataclass(frozen=True, slots=True)
class ScalarLines:
    """A scalar in lines: the first follows its key, the others are indented below it. A block
    scalar has its header as the first line; `keeps`: empty lines after it would belong to it."""

    first: str
    rest: tuple[str, ...] = ()
    block: bool = False
    keeps: bool = False


def written(
    source: SourceFile,
    scalar: Scalar,
    field: str,
    flow: bool,
    *,
    careful: bool = False,
    room: int | None = None,
) -> ScalarLines:
    """Return the layout of a scalar under a field, on one line inside `{}` or `[]` (`flow`);
    `careful` puts every text in quotation marks. An expression of several
    lines becomes one line where that has at most `room` characters."""
    raw = source.text[scalar.span.start : scalar.span.end].replace("\r\n", "\n").replace("\r", "\n")
    start = STARTS.get(field)
    is_text = isinstance(scalar.value, str) and not scalar.broken
    if scalar.style in {"|", ">"} and not (flow or careful):
        return _block(raw, scalar, start if is_text else None)
    comment = comment_of(raw) if scalar.style in {"|", ">"} else ""
    spelled = canonical_spelling(scalar.text, start) if start is not None and is_text else None
    if spelled is not None:
        line = quoted(spelled, '"' if careful else scalar.style, flow)
        if room is not None and len(line) > room and not (flow or careful) and start is not None:
            return _broken(source, scalar, start, line)
        return ScalarLines(line + comment)
    if comment or scalar.style in {"|", ">"}:
        return ScalarLines(in_double(scalar.text) + comment)
    if is_text and careful:
        return ScalarLines(in_double(scalar.text))
    cut = not _balanced(raw) or raw.endswith(":")
    if flow and scalar.style == "plain" and is_text and cut:
        return ScalarLines(in_double(scalar.text))
    if "\n" not in raw:
        return ScalarLines(raw)
    lines = tuple(line.strip(" \t") for line in raw.split("\n"))
    if flow:
        return _checked((" ".join(lines),), scalar)
    return _checked(lines, scalar)


def _broken(source: SourceFile, scalar: Scalar, start: str, line: str) -> ScalarLines:
    """Return an expression with its original line breaks, given its spelling on one line."""
    pieces = map_scalar(source, scalar).pieces
    if pieces is None:
        return ScalarLines(line)
    text = "".join(
        "\n" if source.text[begin] in "\r\n" else char
        for char, (begin, _) in zip(scalar.text, pieces, strict=True)
    )
    lines = spell_lines(text, start) or []
    mark = line[0] if line[0] in _WRITTEN else ""
    if len(lines) < 2 or not all(text.isprintable() for text in lines):
        return ScalarLines(line)
    first, *inner, last = (_WRITTEN[mark](text) for text in lines)
    return ScalarLines(mark + first, (*inner, last + mark))


_WRITTEN: dict[str, Callable[[str], str]] = {
    "": lambda text: text,
    "'": lambda text: text.replace("'", "''"),
    '"': lambda text: in_double(text)[1:-1],
}
"""The form of a text in quotation marks."""


def _checked(lines: tuple[str, ...], scalar: Scalar) -> ScalarLines:
    """Return the lines of a scalar if they are read as its text, or its text with escapes."""
    first, *rest = lines
    raw = "\n".join((first, *(f"  {line}" if line else "" for line in rest)))
    return (
        ScalarLines(first, tuple(rest))
        if _reads(raw, scalar)
        else ScalarLines(in_double(scalar.text))
    )


def _reads(raw: str, scalar: Scalar) -> bool:
    """Return whether a written scalar is read as its text."""
    again = scalar._replace(span=Span(0, len(raw)))
    return map_scalar(SourceFile("", raw), again).pieces is not None


def _balanced(text: str) -> bool:
    """Return whether all parentheses are closed, so that no outer comma seems to be an inner
    one."""
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            return False
    return depth == 0


def quoted(text: str, style: str, flow: bool) -> str:
    """Return a text as a scalar that every YAML reader decodes to it, in its own style if
    possible."""
    if not text.isprintable():
        return in_double(text)
    unsafe = _UNSAFE_START.match(text) or _UNSAFE.search(text) or (flow and _FLOW.search(text))
    if style == "plain" and not unsafe:
        return text
    if style == "'" or (style == "plain" and '"' in text and "'" not in text):
        return "'" + text.replace("'", "''") + "'"
    return in_double(text)


def in_double(text: str) -> str:
    """Return a text in double quotation marks on one line, with escapes where they are needed."""
    return '"' + "".join(_SHORT.get(char) or _escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    code = ord(char)
    if char.isprintable():
        return char
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _block(raw: str, scalar: Scalar, start: str | None) -> ScalarLines:
    """Return a block scalar: its header, and its lines without their common indentation."""
    header = _HEADER.match(raw)
    assert header is not None
    body = raw[header.end() :].split("\n")
    comment = comment_of(raw)
    chomp = "".join(char for char in header[2] if char in "+-")
    given = "\n".join(line.rstrip() for line in body if line.strip())
    if start is not None and (spelled := spell_lines(given, start)) is not None:
        lines = _placed(spelled, given)
        return ScalarLines(header[1] + chomp + comment, lines, True, chomp == "+")
    if body and not body[-1]:
        body.pop()
    while body and not body[-1].strip(" ") and chomp != "+":
        body.pop()
    if not scalar.text.strip("\n"):
        body = [""] * len(body)
    depths = {len(line) - len(line.lstrip(" ")) for line in body if line.strip(" ")}
    taken = max(0, _depth(body) - _depth(scalar.text.split("\n")))
    for depth in sorted({*depths, taken, 0}, reverse=True):
        kept = tuple(line[depth:] if len(line) > depth else "" for line in body)
        # With a digit the reader takes two spaces off, and the others belong to the text.
        deep = _depth(kept) == _depth(scalar.text.split("\n"))
        for digits in ("", "2") if deep else ("",):
            first = header[1] + digits + chomp
            text = "\n".join((first, *(f"  {line}" if line else "" for line in kept))) + "\n"
            if _reads(text, scalar):
                return ScalarLines(first + comment, kept, True, chomp == "+")
    return ScalarLines(in_double(scalar.text) + comment)


def _depth(lines: Sequence[str]) -> int:
    """Return the indentation of the first line that is not blank."""
    first = next((line for line in lines if line.strip(" ")), "")
    return len(first) - len(first.lstrip(" "))


def comment_of(raw: str) -> str:
    """Return the comment behind the sign of a block scalar, with white space before it."""
    header = _HEADER.match(raw)
    return "  " + header[3].rstrip(" \t") if header is not None and header[3] else ""


def _placed(lines: list[str], given: str) -> tuple[str, ...]:
    """Indent the lines of an expression after the first by two for each level they had."""
    depths = [len(line) - len(line.lstrip()) for line in given.split("\n")]
    levels = sorted({depth for depth in depths if depth > depths[0]})
    steps = {depth: "  " * number for number, depth in enumerate(levels, start=1)}
    return tuple(steps.get(depth, "") + line for depth, line in zip(depths, lines, strict=True))


# --- expressions ----------------------------------------------------------------------------------


_TIGHT_BEFORE = {"RPAR", "RSQB", "COMMA", "COLON"}
_TIGHT_AFTER = {"LPAR", "LSQB"}


def canonical_spelling(text: str, start: str) -> str | None:
    """Return the canonical spelling on one line; None if the text is not such an expression."""
    pieces = _pieces(text, start)
    return None if pieces is None else "".join(gap + token.text for token, gap in pieces)


def spell_lines(text: str, start: str) -> list[str] | None:
    """Return the canonical spelling line by line, broken where the text is broken."""
    pieces = _pieces(text, start)
    if pieces is None:
        return None
    lines = [""]
    end = 0
    for token, gap in pieces:
        if "\n" in text[end : token.start] and lines[-1]:
            lines.append(token.text)
        else:
            lines[-1] += gap + token.text if lines[-1] else token.text
        end = token.end
    return lines


def _pieces(text: str, start: str) -> list[tuple[Token, str]] | None:
    """Return the tokens, each with the white space that belongs before it."""
    root = parse(text, start)
    if root is None:
        return None
    calls: set[int] = set()
    unary: set[int] = set()
    tokens: list[Token] = []
    waiting: list[ParseNode | Token] = [root]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Token):
            tokens.append(here)
            continue
        first = here.children[0]
        if isinstance(first, Token):
            if here.rule == "call":
                calls.add(here.children[1].start)
            elif here.rule in {"minus", "quantity"} and first.type == "MINUS":
                unary.add(first.start)
        waiting.extend(reversed(here.children))
    return [(token, _gap(tokens, i, calls, unary)) for i, token in enumerate(tokens)]


def _gap(tokens: list[Token], i: int, calls: set[int], unary: set[int]) -> str:
    if i == 0:
        return ""
    before, token = tokens[i - 1], tokens[i]
    if token.type in _TIGHT_BEFORE or before.type in _TIGHT_AFTER:
        return ""
    if token.start in calls or before.start in unary:
        return ""
    return "" if token.text == "%" else " "
