"""Check properties of every finding: its places, and its rendering in every format."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from io import StringIO
from itertools import pairwise

from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.diagnostics.model import Diagnostic, Suppressed
from kcdsl.diagnostics.render import Checked, LintRun, render
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.lsp.text.positions import Lines
from tests.fuzz.promise import expect

_MOST_PLACES = 200
"""The largest number of offsets per file that are converted to editor positions and back."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GITHUB = re.compile(r"::(?:error|warning|notice) [^\n]*::[^\n]+")


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def check_spans(found: tuple[Diagnostic, ...], source: SourceFile | None) -> None:
    """Check that every finding is inside its file and maps to editor positions and back.

    The edits of a fix do not overlap.
    """
    offsets: dict[SourceFile, set[int]] = {}
    for item in found:
        expect(bool(item.message.strip()), f"empty message: {item.code.id}")
        if source is None and item.source is None:
            continue
        expect(item.source is not None and item.span is not None, f"no place: {item.code.id}")
        assert item.source is not None
        spans = [item.span, *(label.span for label in item.labels)]
        spans += [edit.span for edit in item.fix.edits] if item.fix is not None else []
        for span in spans:
            assert span is not None
            inside = 0 <= span.start <= span.end <= len(item.source.text)
            expect(inside, f"place outside the file: {item.code.id} {span}")
            offsets.setdefault(item.source, set()).update((span.start, span.end))
        if item.fix is not None:
            places = sorted(edit.span for edit in item.fix.edits)
            apart = all(a.end <= b.start for a, b in pairwise(places))
            expect(apart, f"edits of one fix overlap: {item.code.id} {places}")
    for file, known in offsets.items():
        _check_places(Lines(file.text), sorted(known))


def _check_places(lines: Lines, offsets: list[int]) -> None:
    """Check that offsets survive the conversion to editor positions and back."""
    for offset in offsets[:: 1 + len(offsets) // _MOST_PLACES]:
        for encoding in Encoding:
            back = lines.offset(lines.place(offset, encoding), encoding)
            # Between the two characters of a line end there is no position.
            middle = lines.text[offset - 1 : offset + 1] == "\r\n" and back == offset - 1
            same = back == offset or middle
            expect(same, f"another place in {encoding}: {offset} as {back}")


def check_rendering(
    found: tuple[Diagnostic, ...], accepted: tuple[Suppressed, ...], name: str, file: str
) -> None:
    """Check that a format prints every finding once, and is well-formed."""
    run = LintRun(files=(Checked(file),), suppressed=accepted, docs_url="https://x.test/{code}")
    text = render(found, name, None, run)
    text.encode("utf-8")
    match name:
        case "json":
            records = json.loads(text)
            _count(name, found, accepted, [record["code"] for record in records])
        case "sarif":
            results = json.loads(text)["runs"][0]["results"]
            _count(name, found, accepted, [result["ruleId"] for result in results])
        case "junit":
            cases = "".join(ElementTree.fromstring(text).itertext())
            _count(name, found, (), re.findall(r"\b(?:error|warning|note)\[(KC\d+)\]", cases))
        case "concise":
            lines = text.split("\n") if text else []
            expect(len(lines) == len(found), "concise: not one line each")
            _plain(name, text)
        case "github":
            lines = text.split("\n") if text else []
            shaped = len(lines) == len(found) and all(_GITHUB.fullmatch(line) for line in lines)
            expect(shaped, "github: not one command each")
            _plain(name, text)
        case _:
            _plain(name, text)
            heads = re.findall(r"^(?:error|warning|note)\[(KC\d+)\]: ", text, re.MULTILINE)
            _count(name, found, (), heads)


def check_colours(found: tuple[Diagnostic, ...]) -> None:
    """Check that a terminal gets the same text with colours only."""
    text = _COLOUR.sub("", render(found, "text", _Terminal(), LintRun()))
    _plain("text", text)
    heads = re.findall(r"^(?:error|warning|note)\[(KC\d+)\]: ", text, re.MULTILINE)
    _count("text", found, (), heads)


def _count(
    name: str, found: tuple[Diagnostic, ...], accepted: tuple[Suppressed, ...], said: list[str]
) -> None:
    wanted = Counter(item.code.id for item in (*found, *(item.diagnostic for item in accepted)))
    said_more = all(Counter(said)[code] >= count for code, count in wanted.items())
    exact = Counter(said) == wanted
    expect(said_more if name == "junit" else exact, f"{name}: other findings than were made")


def _plain(name: str, text: str) -> None:
    """Check that text for terminals and logs has no control characters."""
    plain = not any((ord(char) < 32 and char not in "\n\t") or ord(char) == 127 for char in text)
    expect(plain, f"{name}: control characters")
