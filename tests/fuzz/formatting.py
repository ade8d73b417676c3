"""Check properties of a document and the output of `kcdsl fmt`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff

from kcdsl.check.compile import Analysis
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.format import edits, format_text
from kcdsl.format.layout import Printer
from kcdsl.ir.canonical import digest, library_digest
from kcdsl.source.comments import find_comments
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode, parse_yaml, scalars
from tests.fuzz.promise import expect

_LAYOUT_ALONE = {"KC015"}
"""Codes of findings about the layout, which formatting may mend."""


def check_format(source: SourceFile) -> str | None:
    """Check that formatting is idempotent and keeps the order and places of comments.

    Returns the formatted text; None where the document is not YAML.
    """
    sink = Sink()
    text = format_text(source, sink)
    if text is None:
        expect(sink.has_errors, "not formatted, without an error")
        expect(all(d.code.id != "KC701" for d in sink), "refused to format")
        return None
    expect(text == _first_try(source), "everything had to be quoted")
    new = SourceFile(source.name, text)
    again = Sink()
    twice = format_text(new, again)
    expect(twice is not None, f"formatted once and not twice: {[d.message for d in again]}")
    assert twice is not None
    difference = "\n".join(unified_diff(text.splitlines(), twice.splitlines(), lineterm=""))
    expect(twice == text, f"formatted twice is another text:\n{difference}")
    expect("\r" not in text and text.endswith("\n"), "line ends")
    expect(_applied(source.text, text), "the edits lead to another text")
    _check_notes(_notes(source), _notes(new))
    return text


def _first_try(source: SourceFile) -> str | None:
    """Return the layout that keeps the author's quotation marks."""
    root = parse_yaml(source, Sink())
    return None if root is None else Printer(source, root).text()


def _applied(old: str, new: str) -> bool:
    text = old
    for edit in reversed(edits(old, new)):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text == new


@dataclass(frozen=True, slots=True)
class _Note:
    """A comment, the number of scalars before it, and other places that it may move to."""

    text: str
    at: int
    also: frozenset[int]
    last: bool
    """True if it is behind a closing bracket."""


def _check_notes(before: list[_Note], after: list[_Note]) -> None:
    """Check that every comment is at an admitted place, in the same order.

    Comments behind closing brackets may move to the beginning of the closed collection.
    """
    same = Counter(note.text for note in before) == Counter(note.text for note in after)
    expect(same, "a comment too many or too few")
    passing = {note.text for note in before if note.last}
    places: dict[str, set[int]] = {}
    for note in before:
        places.setdefault(note.text, set()).update((note.at, *note.also))
    for note in after:
        expect(note.at in places[note.text], f"a comment moved: {note.text!r} to {note.at}")
    staying = [[n for n in notes if n.text not in passing] for notes in (before, after)]
    for old, new in zip(*staying, strict=True):
        kept = old.text == new.text and new.at in {old.at, *old.also}
        expect(kept, f"a comment moved: {old} to {new}")


def _notes(source: SourceFile) -> list[_Note]:
    """Return the comments of a document in order.

    One between a key and its value may move above the key.
    """
    root = parse_yaml(source, Sink())
    if root is None:
        return []
    ordered = list(_in_order(root))
    closed: dict[int, set[int]] = {}
    for span in _collections(root):
        if source.text[span.start] not in "{[":
            continue
        begun = sum(place.start < span.start for place, _ in ordered)
        closed.setdefault(source.position(span.end).line, set()).update((begun, max(0, begun - 1)))
    found: list[_Note] = []
    at = 0
    for start, text in sorted((*_comments(source, root), *_comments_of_blocks(source, root))):
        while at < len(ordered) and ordered[at][0].start < start:
            at += 1
        also = {at - 1} if at and ordered[at - 1][1] else set()
        ends = closed.get(source.position(start).line, set())
        found.append(_Note(text, at, frozenset(also | ends), bool(ends)))
    return found


def _collections(node: Node) -> Iterator[Span]:
    """Yield the place of every list and mapping."""
    match node:
        case SequenceNode(items=items):
            yield node.span
            for item in items:
                yield from _collections(item)
        case Mapping(entries=entries):
            yield node.span
            for entry in entries:
                yield from _collections(entry.value)


def _comments(source: SourceFile, root: Node) -> Iterator[tuple[int, str]]:
    for comment in find_comments(source, root):
        yield comment.start, comment.text


def _comments_of_blocks(source: SourceFile, root: Node) -> Iterator[tuple[int, str]]:
    """Yield the comments behind block scalar indicators, with their places."""
    for scalar in scalars(root):
        if scalar.style in {"|", ">"}:
            first = source.text[scalar.span.start : scalar.span.end].partition("\n")[0]
            sign = first.find("#")
            if sign >= 0:
                yield scalar.span.start + sign, first[sign:].rstrip(" \t\r")


def _in_order(node: Node) -> Iterator[tuple[Span, bool]]:
    """Yield the place of every scalar that is not empty, and whether it is a key."""
    match node:
        case Scalar(span=span):
            if span.start < span.end:
                yield span, False
        case SequenceNode(items=items):
            for item in items:
                yield from _in_order(item)
        case Mapping(entries=entries):
            for entry in entries:
                yield entry.key.span, True
                yield from _in_order(entry.value)


def check_meaning(
    source: SourceFile, before: Analysis, old: Sink, after: Analysis, new: Sink
) -> None:
    """Check that the formatted document has the same meaning and the same findings.

    Programs are compared as values and by their digests. A comment that accepts findings may cover
    more than before, where lines were joined.
    """
    expect((before.program is None) == (after.program is None), "accepted before or after alone")
    expect((before.library is None) == (after.library is None), "accepted before or after alone")
    if before.program is not None and after.program is not None:
        same = before.program == after.program
        same = same and digest(before.program) == digest(after.program)
        expect(same, "formatted means something else")
    if before.library is not None and after.library is not None:
        same = before.library == after.library
        same = same and library_digest(before.library) == library_digest(after.library)
        expect(same, "formatted means something else")
    codes = [
        Counter(d.code.id for d in sink if d.code.id not in _LAYOUT_ALONE) for sink in (old, new)
    ]
    accepting = "kcdsl:" in source.text and not codes[1] - codes[0]
    expect(
        codes[0] == codes[1] or accepting,
        f"other findings after formatting: {codes[0] - codes[1]} then {codes[1] - codes[0]}",
    )
