"""Results that a kernel with free casts may read in more than one version (section 2, Readings)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from kcdsl_certs.recheck.block import Block, Node
from kcdsl_certs.recheck.box import Floats

SUMMED = ("linear", "matmul")  # computed once, from operands as they are stored
BY_ROW = ("softmax", "rms_norm", "layer_norm")  # read what they normalise twice
_FIXED = ("input", "param", "constant", "embedding")

Own = Floats | None
"""How far a reading may be from what all readings are versions of; None: no way."""


def twice(node: Node) -> bool:
    """Return whether an operation reads its first operand twice: in sums over a row and beside, or
    in the sigmoid and the product of a silu that is written out."""
    return node.op in BY_ROW or (node.op == "silu" and node.written)


def several(block: Block, *, followed: bool = False) -> frozenset[str]:
    """Return the nodes of which there may be several versions; one is the output of a block that
    another block of a chain follows."""
    whole: Counter[str] = Counter()
    near: Counter[str] = Counter()
    for name in {name for node in block.nodes if node.op in SUMMED for name in node.inputs}:
        whole[name] = near[name] = 1
    whole[block.output] = near[block.output] = 2 if followed else 1
    for node in reversed(block.nodes):
        if node.op in SUMMED:
            continue
        made, handed = (min(max(count[node.name], 1), 2) for count in (whole, near))
        for place, name in enumerate(node.inputs):
            by_row = node.op in BY_ROW
            written = node.written and node.op != "rope" and place == 0
            whole[name] += made + int(twice(node) and place == 0)
            near[name] += (1 if by_row else handed) + int(written)
    found = set()
    for node in block.nodes:
        count = near if node.op in SUMMED else whole
        if node.op not in _FIXED and count[node.name] > 1:
            found.add(node.name)
    return frozenset(found)


def plus(*parts: Own) -> Own:
    """Return the sum of what readings are apart by several causes."""
    named = [part for part in parts if part is not None]
    return _sum(named) if named else None


def _sum(parts: Iterable[Floats]) -> Floats:
    total: Floats = np.zeros(())
    for part in parts:
        total = total + part
    return np.asarray(total * (1 + 2.0**-48))


def by(part: Own, factor: Floats | float) -> Own:
    """Return what readings of a product are apart, `factor` ≥ |the other factor|."""
    return None if part is None else np.asarray(part * factor * (1 + 2.0**-48) + 2.0**-1000)
