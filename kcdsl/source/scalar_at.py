"""Which scalar of a file a place lies in."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, parse_yaml


def scalar_at(source: SourceFile, offset: int) -> Scalar | None:
    """Return the scalar that holds a place; None outside, and in a file that is not YAML."""
    found = _scalars(source)
    number = bisect_right(found, offset, key=lambda scalar: scalar.span.start) - 1
    if number < 0 or offset > found[number].span.end:
        return None
    return found[number]


@lru_cache(maxsize=4)
def _scalars(source: SourceFile) -> tuple[Scalar, ...]:
    """Return the scalars of a file in their order; they are read again, which takes no longer than
    reading them did."""
    root = parse_yaml(source, Sink())
    found: list[Scalar] = []
    waiting: list[Node] = [] if root is None else [root]
    while waiting:
        match waiting.pop():
            case Scalar() as scalar:
                found.append(scalar)
            case Mapping(entries=entries):
                waiting += [part for entry in entries for part in (entry.key, entry.value)]
            case node:
                waiting += node.items
    return tuple(sorted(found, key=lambda scalar: (scalar.span.start, scalar.span.end)))
