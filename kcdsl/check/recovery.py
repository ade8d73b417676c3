"""Go on after clauses that are not YAML.

A YAML parser stops at its first error, and often far from the mistake: a quotation mark that is not
closed swallows the rest of the document. Where the clauses are a block mapping, each one is read by
itself instead: those that cannot be read are reported, every one at its own place, and the document
without them is checked as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kcdsl.check.layout import blank, layout, stands_alone
from kcdsl.diagnostics.model import Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.yaml_nodes import parse_yaml

Check = Callable[[SourceFile, Sink], object]
"""Checks a document into a sink."""


_MOST = 20
"""How many broken clauses are told apart; each is read with all that comes before it blank."""


def recover(source: SourceFile, first: Sink, check: Check) -> Sink:
    """Return the errors of a document that is not YAML, as many as can be told apart.

    `first` holds what the YAML parser said of the whole; it is returned where the text cannot be
    cut into clauses, or where its other parts are not YAML either. Warnings and notes are left out:
    what a clause that cannot be read would have used may look unused.
    """
    found = layout(source.text)
    if found is None:
        return first
    text = source.text
    pieces = [text[span.start : span.end] for span in found.clauses]
    broken = [i for i, piece in enumerate(pieces) if not stands_alone(piece, found.names[i])]
    if not broken:
        return first
    errors = Sink()
    for i in broken[:_MOST]:
        span = found.clauses[i]
        alone = SourceFile(source.name, blank(text[: span.start]) + text[span.start : span.end])
        _collect(parse_errors(alone), source, errors)
    if len(broken) < len(pieces):
        kept = [blank(piece) if i in broken else piece for i, piece in enumerate(pieces)]
        begin, end = found.clauses[0].start, found.clauses[-1].end
        rest, others = SourceFile(source.name, text[:begin] + "".join(kept) + text[end:]), Sink()
        if check(rest, others) is None:
            return first
        _collect(others, source, errors)
    return errors if errors.has_errors else first


def parse_errors(source: SourceFile) -> Sink:
    """Return what the YAML parser says of a text."""
    sink = Sink()
    parse_yaml(source, sink)
    return sink


def _collect(found: Sink, source: SourceFile, into: Sink) -> None:
    """Keep the errors; those of a reduced text become errors of the file, at the same places."""
    for item in found:
        if item.severity is not Severity.ERROR:
            continue
        of_the_file = item.source is not None and item.source.name == source.name
        into.add(replace(item, source=source) if of_the_file else item)
