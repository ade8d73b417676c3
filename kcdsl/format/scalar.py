"""How a scalar is written: verbatim, except for expressions, which have one spelling."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kcdsl.format.expression import spell, spell_lines
from kcdsl.source.text import SourceFile
from kcdsl.source.yaml_nodes import Scalar

STARTS = {"require": "requirement", "where": "predicate", "budget": "budget"}
"""The fields that hold expressions, with the rule of the grammar that reads each."""
_HEADER = re.compile(r"([|>])([-+0-9]*)[ \t]*(#[^\r\n]*)?(?:\r\n|\r|\n|$)")
_UNSAFE_START = re.compile(r"[-?:,\[\]{}#&*!|>'\"%@` ]")
_UNSAFE = re.compile(r":(?: |$)| #|\s$")
_FLOW = re.compile(r"[,\[\]{}]")


@dataclass(frozen=True, slots=True)
class Lines:
    """A scalar in lines: the first follows its key, the others are indented below it by what they
    say. A block scalar has its header as the first line."""

    first: str
    rest: tuple[str, ...] = ()
    block: bool = False


def written(source: SourceFile, scalar: Scalar, field: str, flow: bool) -> Lines:
    """Return how a scalar is written under a field; `flow` says that it is inside `{}` or `[]`."""
    raw = source.text[scalar.span.start : scalar.span.end].replace("\r\n", "\n").replace("\r", "\n")
    start = STARTS.get(field)
    is_text = isinstance(scalar.value, str) and not scalar.broken
    if scalar.style in {"|", ">"}:
        return _block(raw, scalar, start if is_text else None)
    spelled = spell(scalar.text, start) if start is not None and is_text else None
    if spelled is not None:
        return Lines(quoted(spelled, scalar.style, flow))
    first, *rest = (line.strip(" \t") for line in raw.split("\n"))
    return Lines(first, tuple(rest))


def quoted(text: str, style: str, flow: bool) -> str:
    """Return a text as a scalar that every YAML reader takes for it, in its own style if it may."""
    unsafe = _UNSAFE_START.match(text) or _UNSAFE.search(text) or (flow and _FLOW.search(text))
    if style == "plain" and not unsafe:
        return text
    if style == "'" or (style == "plain" and '"' in text and "'" not in text):
        return "'" + text.replace("'", "''") + "'"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _block(raw: str, scalar: Scalar, start: str | None) -> Lines:
    """Return a block scalar: its header, and its lines without their common indentation."""
    header = _HEADER.match(raw)
    assert header is not None
    body = raw[header.end() :].split("\n")
    comment = f"  {header[3].rstrip()}" if header[3] else ""
    chomp = "".join(char for char in header[2] if char in "+-")
    given = "\n".join(line.rstrip() for line in body if line.strip())
    if start is not None and (lines := spell_lines(given, start)) is not None:
        return Lines(header[1] + chomp + comment, _placed(lines, given), block=True)
    digits = "".join(char for char in header[2] if char.isdigit())
    indents = [len(line) - len(line.lstrip(" ")) for line in body if line.strip(" ")]
    depth = min(indents, default=0)
    if digits or (body and body[0].strip(" ") == "" and scalar.text[:1] in {" ", "\n"}):
        depth = _explicit(body, scalar, depth)
        digits = "2" if scalar.text[:1] in {" ", "\n"} else ""
    lines = [line[depth:] if line.strip(" ") else "" for line in body]
    while lines and not lines[-1] and "+" not in chomp:
        lines.pop()
    if "+" in chomp and lines and not lines[-1]:
        lines.pop()
    return Lines(header[1] + digits + chomp + comment, tuple(lines), block=True)


def _explicit(body: list[str], scalar: Scalar, depth: int) -> int:
    """Return the indentation that the reader took off, where a line starts with spaces."""
    first = next((line for line in body if line.strip(" ")), "")
    text = next((line for line in scalar.text.split("\n") if line.strip(" ")), "")
    found = len(first) - len(first.lstrip(" ")) - (len(text) - len(text.lstrip(" ")))
    return found if found >= 0 else depth


def _placed(lines: list[str], given: str) -> tuple[str, ...]:
    """Indent the lines of an expression after the first by two, if one of them was deeper."""
    depths = [len(line) - len(line.lstrip()) for line in given.split("\n")]
    deeper = any(depth > depths[0] for depth in depths[1:])
    return (lines[0], *(f"  {line}" if deeper else line for line in lines[1:]))
