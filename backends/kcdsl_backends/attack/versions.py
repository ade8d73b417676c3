"""Versions of a result that differ by reader (relational-interval.md, section 2, Readings).

Where casts are free, each reader of a sum rounds it independently. Any other operation is computed
again for each of its readings, from separate readings of its operands. A norm and a softmax read
their first operand once for the row sums and again for every result; a silu composed of elementary
operations reads it for its sigmoid and for the product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.drift.boxes.rounding import ONCE, STATISTICS, reads_twice

MOST = 8
"""Limit of the versions of a result besides the stored one; further readers share the first."""
_GIVEN = frozenset({"param", "constant"})

_Path = tuple[tuple[str, int | str], ...]
"""Path of a reading: pairs of a reader and its operand, the direct reader last. It is empty for a
stored value and may start at the row sums of a norm or a softmax."""
_STORED: _Path = ()
_ROWS, _AGAIN, _SIGMOID = "rows", "again", "sigmoid"


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the result of a node.

    `name` is part of the names of its symbols: the node's name, with suffix /2, /3, ... from the
    second version on. `reads` are the versions of its operands, `rows` is the version of the first
    operand in its row sums or sigmoid.
    """

    node: Node
    name: str
    reads: tuple[str, ...]
    rows: str

    @property
    def first(self) -> bool:
        return self.name == self.node.name


def versions(
    graph: BlockGraph, several: Collection[str], rounded: Callable[[Node], bool]
) -> list[Version]:
    """Return all versions of nodes that the output depends on, operands first, without parameters
    and constants.

    Args:
        graph: the block.
        several: names of nodes that may have several versions.
        rounded: whether versions of a result with the same operands may differ.
    """
    wanted = _wanted(graph, several)
    known: dict[tuple[str, _Path], str] = {}
    found: list[Version] = []

    def version(name: str, path: _Path) -> str:
        return known.get((name, _path(graph, several, name, path)), name)

    for node in graph.nodes:
        if node.op in _GIVEN or node.name not in wanted:
            continue
        made: dict[object, str] = {}
        for path in sorted(wanted[node.name], key=bool):
            if node.op in ONCE:
                reads = tuple(version(name, _STORED) for name in node.inputs)
            else:
                places = [
                    (node.name, _AGAIN if node.op in STATISTICS and index == 0 else index)
                    for index in range(len(node.inputs))
                ]
                pairs = zip(node.inputs, places, strict=True)
                reads = tuple(version(name, (*path, place)) for name, place in pairs)
            rows = version(node.inputs[0], _rows(node, path)) if reads_twice(node) else ""
            same = (path if rounded(node) else None, reads, rows)
            if same not in made:
                made[same] = f"{node.name}/{len(made) + 1}" if made else node.name
                found.append(Version(node, made[same], reads, rows))
            known[node.name, path] = made[same]
    return found


def _wanted(graph: BlockGraph, several: Collection[str]) -> dict[str, dict[_Path, None]]:
    """Return the paths by which the output reads each result: at most `MOST`, and one more if it
    is stored."""
    found: dict[str, dict[_Path, None]] = {}

    def want(name: str, path: _Path) -> None:
        paths, known = found.setdefault(name, {}), _path(graph, several, name, path)
        if len(paths) < MOST or known == _STORED:
            paths[known] = None

    want(graph.output, _STORED)
    for node in reversed(graph.nodes):
        for path in tuple(found.get(node.name, ())):
            if node.op in ONCE:
                for name in node.inputs:
                    want(name, _STORED)
                continue
            if reads_twice(node):
                want(node.inputs[0], _rows(node, path))
            for index, name in enumerate(node.inputs):
                again = node.op in STATISTICS and index == 0
                want(name, (*path, (node.name, _AGAIN if again else index)))
    return found


def _rows(node: Node, path: _Path) -> _Path:
    """Return the path by which row sums (one for all versions) or the sigmoid of a silu (one for
    each version) read the first operand."""
    return ((node.name, _ROWS),) if node.op in STATISTICS else (*path, (node.name, _SIGMOID))


def _path(graph: BlockGraph, several: Collection[str], name: str, path: _Path) -> _Path:
    """Return the canonical path of a reading: a norm or softmax has one reading of a result that is
    computed once."""
    if name not in several:
        return _STORED
    if graph.node(name).op in ONCE:
        for place in reversed(range(len(path))):
            reader, how = path[place]
            if how in (_ROWS, _AGAIN):
                return ((reader, _ROWS), *path[place + 1 :])
    return path
