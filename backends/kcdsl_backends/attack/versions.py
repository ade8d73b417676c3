"""Results that a run has in several versions (relational-interval.md, section 2, Readings).

Where casts are free, what a sum forms is rounded by each of its readers in its own way, and any
other operation is computed again for each of its readings, from readings of its own of the
operands. A norm and a softmax read their first operand once for the sums over its rows and again
for every result; a silu that is written out reads it for its sigmoid and for the product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.drift.boxes.rounding import ONCE, STATISTICS, reads_twice

MOST = 8
"""Versions that a result has beside what is stored; further readers share the first."""
_GIVEN = frozenset({"param", "constant"})

_Path = tuple[tuple[str, int | str], ...]
"""How a reading is reached: readers and their operands, the last of them next to what is read; from
where it was stored (nothing), or from the sums over the rows of a norm or a softmax."""
_STORED: _Path = ()
_ROWS, _AGAIN, _SIGMOID = "rows", "again", "sigmoid"


@dataclass(frozen=True, slots=True)
class Version:
    """One version of the result of a node.

    `name` stands in the names of its symbols: that of the node, followed by /2, /3, ... but for the
    first version. `reads` are the versions of its operands, `rows` that of the first operand which
    the sums over its rows, or the sigmoid, are of.
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
    """Return all versions of what the output is made of, operands first; no parameters and
    constants.

    Args:
        graph: the block.
        several: names of nodes that may have more than one version.
        rounded: whether two versions of a result differ although they are of the same operands.
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
    """Return the paths by which every result is read for the output; at most `MOST`, or one more
    where it is stored."""
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
    """Return how the sums of a norm or a softmax, which are formed once, read its first operand;
    or how the sigmoid of a silu does, which is formed for each of its versions."""
    return ((node.name, _ROWS),) if node.op in STATISTICS else (*path, (node.name, _SIGMOID))


def _path(graph: BlockGraph, several: Collection[str], name: str, path: _Path) -> _Path:
    """Return the path that stands for a reading: all readings by one norm or softmax of what is
    computed once are the same."""
    if name not in several:
        return _STORED
    if graph.node(name).op in ONCE:
        for place in reversed(range(len(path))):
            reader, how = path[place]
            if how in (_ROWS, _AGAIN):
                return ((reader, _ROWS), *path[place + 1 :])
    return path
