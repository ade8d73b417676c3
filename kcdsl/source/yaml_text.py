"""Textual processing of YAML: masking of unquoted expressions, properties of nodes, and diagnostics
of syntax errors.

`require: forall x in points(all): ...` and `{require: quantile(0.999, kl) <= 0.02, level: L2}`
are natural to write, but a YAML parser interprets the colon after the region, and in a flow mapping
the commas and square brackets inside calls. Before parsing, exactly those characters are replaced
one for one by unused characters, which are restored in the decoded scalars: offsets stay exact, and
quoted text, block scalars and comments are unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import yaml

from kcdsl.diagnostics.codes import NOT_YAML
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label
from kcdsl.diagnostics.spans import SourceFile, Span

_QUANTIFIER = re.compile(
    r"\b(?:forall|exists)[ \t]+\w+[ \t]+in[ \t]+\w+\([^()\r\n]*\)[ \t]*(:)(?!\S)"
)
_TOKEN = re.compile(r"(?<![\w\"'])[A-Za-z_]\w*\(|[(),\[\]\"'{}#\r\n]")
_ESCAPED = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
_SPECIAL = ":,[]"
_PRIVATE = range(0xE000, 0xF900)
"""Candidates for unused characters; a text that contains all of them is not masked."""


class Masked(NamedTuple):
    """The text for the YAML parser, and the table that undoes the replacement."""

    text: str
    back: dict[int, int]

    def restore(self, text: str) -> str:
        """Return a decoded scalar with the original characters."""
        return text.translate(self.back) if self.back else text

    def matters(self, text: str, flow: bool) -> bool:
        """Return whether YAML would misinterpret this plain scalar without masking."""
        own = {self.back.get(ord(char)) for char in text} - {None} if self.back else set()
        return bool(own) if flow else ord(":") in own


def mask_expressions(text: str) -> Masked:
    """Replace the characters inside unquoted expressions that YAML would interpret."""
    places = [match.start(1) for match in _QUANTIFIER.finditer(text)]
    places += _inside_calls(text)
    if not places:
        return Masked(text, {})
    taken = {ord(char) for char in set(text)}
    taken.update(int(found[1] or found[2], 16) for found in _ESCAPED.finditer(text))
    unused = list(islice((code for code in _PRIVATE if code not in taken), len(_SPECIAL)))
    if len(unused) < len(_SPECIAL):
        return Masked(text, {})
    forward = {char: chr(code) for char, code in zip(_SPECIAL, unused, strict=True)}
    chars = list(text)
    for i in places:
        chars[i] = forward[chars[i]]
    return Masked("".join(chars), {ord(new): ord(old) for old, new in forward.items()})


def _inside_calls(text: str) -> list[int]:
    """Return the offsets of commas and square brackets inside calls closed on their line.

    Quotation marks, braces and comment signs end the search: such expressions must be quoted.
    """
    places: list[int] = []
    waiting: list[int] = []
    frames: list[tuple[bool, int]] = []  # whether it is a call, and the earlier pending count
    for token in _TOKEN.finditer(text):
        char = token[0][-1]
        if char == "(":
            frames.append((len(token[0]) > 1, len(waiting)))
        elif char == ")" and frames:
            is_call, before = frames.pop()
            if is_call:
                places += waiting[before:]
            if is_call or not frames:
                del waiting[before:]
        elif char in ",[]" and frames:
            waiting.append(token.start())
        elif char not in "),[]":
            frames.clear()
            waiting.clear()
    return places


_PROPERTY = re.compile(
    r"(?:&(?P<anchor>[0-9A-Za-z_-]+)|!(?:<[^>\s]*>|[^\s,\[\]{}]*))"
    r"(?P<gap>(?:[ \t\r\n]++(?:#[^\r\n]*+)?)*+)"
)


class Properties(NamedTuple):
    """The spans of an anchor with its `&` and a tag with its `!`, and the start of the node."""

    anchor: Span | None
    tag: Span | None
    end: int


def properties(text: str, whole: Span) -> Properties:
    """Return the properties of the node in a span that includes them."""
    anchor = tag = None
    at = whole.start
    while (found := _PROPERTY.match(text, at)) is not None:
        place = Span(found.start(), found.start("gap"))
        if found["anchor"] is not None:
            anchor = place
        else:
            tag = place
        at = found.end()
    return Properties(anchor, tag, min(at, whole.end))


NO_CHARACTER = "write one escape for the whole character, as in `\\U0001f600`"
_LEAD = re.compile(r"[ \t]*")
_LINE = re.compile(r"^([ \t]*+)([^\r\n])", re.MULTILINE)


def syntax_error(
    source: SourceFile, error: yaml.MarkedYAMLError, place: Callable[[int], int]
) -> Diagnostic:
    """Return the diagnostic of a syntax error; `place` converts an index of the parser's text to an
    offset of the file."""
    mark = error.problem_mark or error.context_mark
    at = place(mark.index) if mark is not None else 0
    labels: tuple[Label, ...] = ()
    if error.context_mark is not None and error.problem_mark is not None:
        begin = place(error.context_mark.index)
        if begin != at:
            labels = (Label(Span(begin, begin + 1), error.context or "started here"),)
    problem = error.problem or "unreadable"
    return Diagnostic(
        NOT_YAML,
        f"not YAML: {problem}",
        source,
        Span(at, min(at + 1, len(source.text))),
        labels=labels,
        help=_advice(problem, source.text[at : at + 1]),
        fix=_without_tabs(source.text, at),
    )


def _without_tabs(text: str, at: int) -> Fix | None:
    """Return the fix that replaces tabs in indentation: by two spaces per tab in sections that are
    indented only by tabs; else in one line, by the indentation of the line above, plus two after a
    key without a value."""
    start = text.rfind("\n", 0, at) + 1
    lead = _LEAD.match(text, start)
    assert lead is not None
    if text[at : at + 1] != "\t" or at >= lead.end():
        return None
    leads = _by_tabs(text)
    if start in leads:
        edits = (
            Edit(Span(begin, end), text[begin:end].replace("\t", "  "))
            for begin, end in leads.items()
        )
        return Fix("indent with spaces", tuple(edits), safe=False)
    above = next((line for line in reversed(text[:start].split("\n")) if line.strip()), "")
    indent = len(above) - len(above.lstrip(" "))
    indent += 2 if above.rstrip().endswith(":") else 0
    return Fix("indent with spaces", (Edit(Span(start, lead.end()), " " * indent),), safe=False)


def _by_tabs(text: str) -> dict[int, int]:
    """Return the range of each indentation in the sections that are indented only by tabs."""
    sections: list[list[re.Match[str]]] = [[]]
    for line in _LINE.finditer(text):
        if line[1]:
            sections[-1].append(line)
        elif line[2] != "#":
            sections.append([])
    return {
        line.start(1): line.end(1)
        for lines in sections
        if all(line[1][0] == "\t" or line[2] == "#" for line in lines)
        for line in lines
        if "\t" in line[1]
    }


def _advice(problem: str, char: str) -> str | None:
    if char == "\t":
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "put the text in quotation marks: an unquoted text may not hold `: `"
    if char in {"%", "@", "`"}:
        return f"put the text in quotation marks: it may not begin with `{char}`"
    if "Unicode character escape" in problem:
        return NO_CHARACTER
    return None
