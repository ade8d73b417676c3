"""Format a whole document, and prove that nothing but its layout changed."""

from __future__ import annotations

from difflib import SequenceMatcher

from kcdsl.diagnostics.codes import FORMAT_REFUSED
from kcdsl.diagnostics.model import Diagnostic, Edit, Sink
from kcdsl.format.comments import find_comments
from kcdsl.format.expression import spell
from kcdsl.format.layout import Printer
from kcdsl.format.scalar import STARTS
from kcdsl.source.text import SourceFile, Span
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, Sequence, parse_yaml


def format_text(source: SourceFile, sink: Sink) -> str | None:
    """Return a document in the house layout; None where it is not YAML, which the sink then says.

    The result is read again: it has the same tree, the same expressions and the same comments, or
    it is refused with its own code.
    """
    root = parse_yaml(source, sink)
    if root is None or sink.has_errors:
        return None
    text = Printer(source, root).text()
    again = SourceFile(source.name, text)
    read, errors = parse_yaml(again, reread := Sink()), reread.has_errors
    if (
        read is None
        or errors
        or not _same(root, read, "")
        or _notes(source, root) != _notes(again, read)
    ):
        message = "the layout of this document cannot be changed without changing what it says"
        sink.add(
            Diagnostic(FORMAT_REFUSED, message, source, help="please report it with the document")
        )
        return None
    return text


def _notes(source: SourceFile, root: Node) -> list[str]:
    return sorted(comment.text for comment in find_comments(source, root))


def _same(one: Node, other: Node, field: str) -> bool:
    """Say whether two trees hold the same, expressions compared by their canonical spelling."""
    match one, other:
        case Scalar(), Scalar():
            if one.value == other.value and type(one.value) is type(other.value):
                return True
            start = STARTS.get(field)
            if start is None or not isinstance(one.value, str) or not isinstance(other.value, str):
                return False
            spelled = spell(one.text, start)
            return spelled is not None and spelled == spell(other.text, start)
        case Sequence(items=left), Sequence(items=right):
            return len(left) == len(right) and all(
                _same(a, b, field) for a, b in zip(left, right, strict=True)
            )
        case Mapping(entries=first), Mapping(entries=second):
            return len(first) == len(second) and all(
                a.key.value == b.key.value and _same(a.value, b.value, a.key.text)
                for a, b in zip(first, second, strict=True)
            )
        case _:
            return False


def edits(old: str, new: str) -> tuple[Edit, ...]:
    """Return edits of whole lines that turn one text into another."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    starts = [0]
    for line in before:
        starts.append(starts[-1] + len(line))
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    return tuple(
        Edit(Span(starts[a], starts[b]), "".join(after[c:d]))
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    )
