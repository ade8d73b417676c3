"""Which results a kernel with free casts may hold in several versions (section 2, Readings).

A fused kernel keeps a result in registers for one reader, stores it for another, and recomputes it
for a third: each reads it rounded in its own way, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node

ONCE = frozenset({"linear", "matmul"})
"""Operations that are computed once, and whose operands are read where they are stored."""
STATISTICS = frozenset({"softmax", "rms_norm", "layer_norm"})
"""Operations that read their first operand once for sums of rows, and again for the result."""
_GIVEN = frozenset({"input", "param", "constant", "embedding"})

Apart = Tensor | None
"""How far a reading may be from the value of which all readings are versions; None: not at all."""


@dataclass(frozen=True, slots=True)
class Between:
    """How a link stands in its chain: `entering` bounds how far a reading of the input may be from
    the value of which all are versions, in training and inference; `followed` says that another
    link reads the output, as often as it likes."""

    entering: tuple[Apart, Apart] = (None, None)
    followed: bool = False


ALONE = Between()
"""A block that is no link: its input has one reading, and so has its output."""


def reads_twice(node: Node) -> bool:
    """Say whether an operation reads its first operand twice: for a sum of rows and for the result,
    or for the sigmoid and the product of a silu that is written out."""
    return node.op in STATISTICS or _written(node)


def _written(node: Node) -> bool:
    return node.attrs.get("form", "fused") == "written" and node.op != "rope"


def several(graph: BlockGraph, *, followed: bool = False) -> frozenset[str]:
    """Return the nodes that are read more than once, or computed again for several readings; with
    `followed` the output is one of them.

    What is computed once is read unrounded only by what is computed with it, element by element,
    before any sum over a row: all readings by one norm or softmax are the same.
    """
    stored = {graph.output}
    for node in graph.nodes:
        if node.op in ONCE:
            stored.update(node.inputs)
    every, direct = dict.fromkeys(stored, 1), dict.fromkeys(stored, 1)
    if followed:
        every[graph.output] = direct[graph.output] = 2
    for node in reversed(graph.nodes):
        if node.op in ONCE:
            continue
        rows = node.op in STATISTICS
        again, times = min(2, every.get(node.name, 0)), min(2, direct.get(node.name, 0))
        for position, name in enumerate(node.inputs):
            first = position == 0
            every[name] = every.get(name, 0) + max(1, again) + (first and reads_twice(node))
            direct[name] = direct.get(name, 0) + (1 if rows else max(1, times))
            direct[name] += first and _written(node)
    return frozenset(
        node.name
        for node in graph.nodes
        if node.op not in _GIVEN and (direct if node.op in ONCE else every).get(node.name, 0) > 1
    )


def added(*parts: Apart) -> Apart:
    """Return the sum of such bounds."""
    found: Apart = None
    for part in parts:
        if part is not None:
            found = part if found is None else (found + part) * (1.0 + 2.0**-50)
    return found


def times(part: Apart, factor: Tensor | float) -> Apart:
    """Return the bound of a multiple, whose factor is at most `factor`."""
    return None if part is None else part * factor * (1.0 + 2.0**-50) + 2.0**-1000
