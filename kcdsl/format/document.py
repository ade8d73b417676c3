"""Format a whole document, and compare the result with it: only the layout may change.

`edits` finds the changed lines in linear time: lines that occur once in both texts, in the same
order, are matched, and so are equal lines next to those; the lines between them are replaced.
`difflib` takes minutes for a contract with thousands of equal lines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kcdsl.diagnostics.codes import FORMAT_REFUSED
from kcdsl.diagnostics.model import Diagnostic, Edit, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.format.layout import Printer
from kcdsl.format.scalar import STARTS, canonical_spelling, comment_of
from kcdsl.source.comments import find_comments
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode, parse_yaml, scalars


def format_text(source: SourceFile, sink: Sink) -> str | None:
    """Return a document in the standard layout; None if it is not YAML, which is reported to the
    sink.

    The result is read again: if its tree, expressions or comments differ, it is refused with a
    separate code.
    """
    root = parse_yaml(source, sink)
    if root is None or sink.has_errors:
        return None
    for careful in (False, True):
        text = Printer(source, root, careful=careful).text()
        if _keeps(source, root, SourceFile(source.name, text)):
            return text
    message = "the layout of this document cannot be changed without changing its meaning"
    sink.add(Diagnostic(FORMAT_REFUSED, message, source, help="please report it with the document"))
    return None


def _keeps(source: SourceFile, root: Node, again: SourceFile) -> bool:
    """Return whether a formatted document has the tree and the comments of the document."""
    sink = Sink()
    read = parse_yaml(again, sink)
    if read is None or sink.has_errors:
        return False
    return _same(root, read, "") and _notes(source, root) == _notes(again, read)


def _notes(source: SourceFile, root: Node) -> list[str]:
    """Return the texts of all comments, including those behind the sign of a block scalar."""
    found = [comment.text for comment in find_comments(source, root)]
    blocks = [scalar for scalar in scalars(root) if scalar.style in {"|", ">"}]
    found += [comment_of(source.text[s.span.start : s.span.end]).strip() for s in blocks]
    return sorted(text for text in found if text)


def _same(one: Node, other: Node, field: str) -> bool:
    """Return whether two trees are equal, expressions compared by their canonical spelling."""
    match one, other:
        case Scalar(), Scalar():
            if one.value == other.value and type(one.value) is type(other.value):
                return True
            start = STARTS.get(field)
            if start is None or not isinstance(one.value, str) or not isinstance(other.value, str):
                return False
            spelled = canonical_spelling(one.text, start)
            return spelled is not None and spelled == canonical_spelling(other.text, start)
        case SequenceNode(items=left), SequenceNode(items=right):
            return len(left) == len(right) and all(
                _same(a, b, "") for a, b in zip(left, right, strict=True)
            )
        case Mapping(entries=first), Mapping(entries=second):
            return len(first) == len(second) and all(
                a.key.value == b.key.value and _same(a.value, b.value, a.key.text)
                for a, b in zip(first, second, strict=True)
            )
        case _:
            return False


# --- edits ----------------------------------------------------------------------------------------


def edits(old: str, new: str) -> tuple[Edit, ...]:
    """Return edits of whole lines that turn one text into another."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    starts = [0]
    for line in before:
        starts.append(starts[-1] + len(line))
    return tuple(
        Edit(Span(starts[a], starts[b]), "".join(after[c:d]))
        for a, b, c, d in _changes(before, after)
    )


def _changes(before: list[str], after: list[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ranges `before[a:b]` that become `after[c:d]`, in their order."""
    a = c = 0
    for anchor, other in [*_anchors(before, after), (len(before), len(after))]:
        b, d = anchor, other
        while a < b and c < d and before[a] == after[c]:
            a, c = a + 1, c + 1
        while a < b and c < d and before[b - 1] == after[d - 1]:
            b, d = b - 1, d - 1
        if a < b or c < d:
            yield a, b, c, d
        a, c = anchor, other


def _anchors(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    """Return the line numbers of lines that occur once in both: a longest common subsequence."""
    here, there = _once(before), _once(after)
    pairs = [(number, there[line]) for line, number in here.items() if line in there]
    # Each entry: the least last line of a run of its length, and the pair before in that run.
    ends: list[int] = []
    runs: list[int] = []
    earlier: list[int] = []
    for index, (_, other) in enumerate(pairs):
        length = bisect_left(ends, other)
        earlier.append(runs[length - 1] if length else -1)
        ends[length : length + 1] = [other]
        runs[length : length + 1] = [index]
    found: list[tuple[int, int]] = []
    at = runs[-1] if runs else -1
    while at >= 0:
        found.append(pairs[at])
        at = earlier[at]
    return found[::-1]


def _once(lines: list[str]) -> dict[str, int]:
    """Return the lines that occur once, with their numbers, in their order."""
    seen: dict[str, int] = {}
    again: set[str] = set()
    for number, line in enumerate(lines):
        if line in seen:
            again.add(line)
        seen[line] = number
    return {line: number for line, number in seen.items() if line not in again}
