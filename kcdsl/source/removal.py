"""Edits that remove entries of a mapping or items of a list from the text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kcdsl.diagnostics.model import Edit, Fix
from kcdsl.diagnostics.report import insertion
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.yaml_nodes import Mapping, MappingEntry, Scalar, SequenceNode

SpanOf = Callable[[int], Span]
"""Returns the span of a part by index; lazy, since a collection may have many parts."""


def remove_entry(source: SourceFile, mapping: Mapping, entry: MappingEntry) -> Edit:
    """Return the edit that removes an entry; in block style its whole lines, but no comments above
    it. The mapping must have other entries."""
    index = next(i for i, other in enumerate(mapping.entries) if other is entry)
    (edit,) = remove_parts(source, mapping, {index})
    return edit


def remove_parts(
    source: SourceFile, node: Mapping | SequenceNode, chosen: Collection[int]
) -> tuple[Edit, ...]:
    """Return the edits that remove the chosen entries or items; at least one must remain."""
    if isinstance(node, Mapping):
        spans = [entry.key.span.hull(entry.value.span) for entry in node.entries]
    else:
        spans = [item.span for item in node.items]
    return remove_spans(source, node.span, len(spans), spans.__getitem__, chosen)


def remove_spans(
    source: SourceFile, whole: Span, count: int, span: SpanOf, chosen: Collection[int]
) -> tuple[Edit, ...]:
    """Return the edits that remove the chosen parts of a collection with `count` parts."""
    if source.text[whole.start : whole.start + 1] in {"{", "["}:
        return tuple(_from_flow(count, span, chosen))
    return tuple(_from_block(source, whole, count, span, index) for index in sorted(chosen))


def _from_flow(count: int, span: SpanOf, chosen: Collection[int]) -> list[Edit]:
    """Remove each part with the comma after it, and those at the end with the comma before."""
    last = next(index for index in reversed(range(count)) if index not in chosen)
    inner = [i for i in sorted(chosen) if i < last]
    edits = [Edit(Span(span(i).start, span(i + 1).start), "") for i in inner]
    if last + 1 < count:
        edits.append(Edit(Span(span(last).end, span(count - 1).end), ""))
    return edits


def _from_block(source: SourceFile, whole: Span, count: int, span: SpanOf, index: int) -> Edit:
    text = source.text
    start, end = span(index).start, _line_after(text, span(index).end)
    before = source.line_start(source.position(start).line)
    lead = text[before:start].strip()
    if not lead or (lead == "-" and text[whole.start] == "-"):
        return Edit(Span(before, end), "")
    # The first entry of a list item is after the dash.
    return Edit(Span(start, span(index + 1).start if index + 1 < count else end), "")


def _line_after(text: str, end: int) -> int:
    """Return the start of the line after the one with the last character before `end`."""
    if end > 0 and text[end - 1] == "\n":
        return end
    found = text.find("\n", end)
    return len(text) if found < 0 else found + 1


def add_field(
    source: SourceFile, node: Mapping | None, after: str, line: str, safe: bool = False
) -> Fix | None:
    """Return the fix that adds `line` (`field: value`) after a field with a scalar value."""
    entry = next((e for e in node.entries if e.key.text == after), None) if node else None
    if node is None or entry is None or not isinstance(entry.value, Scalar):
        return None
    if source.text[node.span.start] == "{":
        return insertion(entry.value.span.end, f", {line}", safe)
    indent = " " * (source.position(entry.key.span.start).column - 1)
    if entry.value.style in "|>":
        return None
    return insertion(entry.value.span.end, f"\n{indent}{line}", safe)


def without(
    source: SourceFile,
    node: Mapping | SequenceNode | None,
    indices: Iterable[int],
    safe: bool = False,
) -> Fix | None:
    """Return the fix that removes entries of a mapping or items of a list; None where none or all
    would be removed."""
    chosen = set(indices)
    if node is None or not chosen:
        return None
    parts = [e.key for e in node.entries] if isinstance(node, Mapping) else list(node.items)
    if len(chosen) == len(parts):
        return None
    names = [p.text for i, p in enumerate(parts) if i in chosen and isinstance(p, Scalar)]
    title = f"remove `{'` and `'.join(names)}`" if names else "remove it"
    return Fix(title, remove_parts(source, node, chosen), safe)
