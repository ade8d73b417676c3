"""Format a whole document, and prove that nothing but its layout changed."""

from __future__ import annotations

from kcdsl.diagnostics.codes import FORMAT_REFUSED
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.format.expression import spell
from kcdsl.format.layout import Printer
from kcdsl.format.scalar import STARTS, comment_of
from kcdsl.source.comments import find_comments, scalars
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, Sequence, parse_yaml


def format_text(source: SourceFile, sink: Sink) -> str | None:
    """Return a document in the house layout; None where it is not YAML, which the sink then says.

    The result is read again: it has the same tree, the same expressions and the same comments, or
    it is refused with its own code.
    """
    root = parse_yaml(source, sink)
    if root is None or sink.has_errors:
        return None
    for careful in (False, True):
        text = Printer(source, root, careful=careful).text()
        if _keeps(source, root, SourceFile(source.name, text)):
            return text
    message = "the layout of this document cannot be changed without changing what it says"
    sink.add(Diagnostic(FORMAT_REFUSED, message, source, help="please report it with the document"))
    return None


def _keeps(source: SourceFile, root: Node, again: SourceFile) -> bool:
    """Say whether a formatted document has the tree and the comments of the document."""
    sink = Sink()
    read = parse_yaml(again, sink)
    if read is None or sink.has_errors:
        return False
    return _same(root, read, "") and _notes(source, root) == _notes(again, read)


def _notes(source: SourceFile, root: Node) -> list[str]:
    """Return the texts of all comments, those behind the sign of a block scalar too."""
    found = [comment.text for comment in find_comments(source, root)]
    blocks = [scalar for scalar in scalars(root) if scalar.style in {"|", ">"}]
    found += [comment_of(source.text[s.span.start : s.span.end]).strip() for s in blocks]
    return sorted(text for text in found if text)


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
                _same(a, b, "") for a, b in zip(left, right, strict=True)
            )
        case Mapping(entries=first), Mapping(entries=second):
            return len(first) == len(second) and all(
                a.key.value == b.key.value and _same(a.value, b.value, a.key.text)
                for a, b in zip(first, second, strict=True)
            )
        case _:
            return False
