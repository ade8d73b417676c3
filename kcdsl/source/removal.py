"""Removing entries of a mapping or items of a list from the text, and nothing else."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Several

from kcdsl.diagnostics.model import Edit
from kcdsl.source.text import SourceFile, Span
from kcdsl.source.yaml_nodes import Entry, Mapping, Sequence


def remove_entry(source: SourceFile, mapping: Mapping, entry: Entry) -> Edit:
    """Return the edit that removes an entry; in block style its whole lines, comments above it
    excepted. The mapping must have other entries."""
    (edit,) = remove_parts(source, mapping, {mapping.entries.index(entry)})
    return edit


def remove_parts(
    source: SourceFile, node: Mapping | Sequence, chosen: Collection[int]
) -> tuple[Edit, ...]:
    """Return the edits that remove the chosen entries or items; others must be left."""
    if isinstance(node, Mapping):
        spans = [entry.key.span.hull(entry.value.span) for entry in node.entries]
    else:
        spans = [item.span for item in node.items]
    return remove_spans(source, node.span, spans, chosen)


def remove_spans(
    source: SourceFile, whole: Span, spans: Several[Span], chosen: Collection[int]
) -> tuple[Edit, ...]:
    """Return the edits that remove the chosen parts of a collection, by the spans of all parts."""
    if source.text[whole.start : whole.start + 1] in {"{", "["}:
        return tuple(_from_flow(spans, chosen))
    return tuple(_from_block(source, whole, spans, index) for index in sorted(chosen))


def _from_flow(spans: Several[Span], chosen: Collection[int]) -> list[Edit]:
    """Remove each part with the comma after it, and those at the end with the comma before."""
    last = max(index for index in range(len(spans)) if index not in chosen)
    inner = [i for i in sorted(chosen) if i < last]
    edits = [Edit(Span(spans[i].start, spans[i + 1].start), "") for i in inner]
    if last + 1 < len(spans):
        edits.append(Edit(Span(spans[last].end, spans[-1].end), ""))
    return edits


def _from_block(source: SourceFile, whole: Span, spans: Several[Span], index: int) -> Edit:
    text = source.text
    start, end = spans[index].start, _line_after(text, spans[index].end)
    before = source.line_start(source.position(start).line)
    lead = text[before:start].strip()
    if not lead or (lead == "-" and text[whole.start] == "-"):
        return Edit(Span(before, end), "")
    # The first entry of a list item stands behind its dash.
    return Edit(Span(start, spans[index + 1].start if index + 1 < len(spans) else end), "")


def _line_after(text: str, end: int) -> int:
    """Return where the line after the one that holds the last character before `end` begins."""
    if end > 0 and text[end - 1] == "\n":
        return end
    found = text.find("\n", end)
    return len(text) if found < 0 else found + 1
