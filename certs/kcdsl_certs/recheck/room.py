"""Refuse what cannot fit into memory before any of it is computed.

What is estimated lies below what a derivation takes, so that nothing that fits is refused.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from kcdsl_certs.recheck.block import Block
from kcdsl_certs.recheck.document import Proof
from kcdsl_certs.rejected import Rejected

# Operations that form new numbers: two ends of three boxes (interval), or reference and reach.
_FORMING = frozenset(
    (
        *("linear", "matmul", "add", "sub", "mul", "scale", "divide", "shift", "tanh", "silu"),
        *("gelu", "softmax", "rms_norm", "layer_norm", "rope"),
    )
)
_BOXES, _FORMS = 6 * 8, 2 * 8
_LIMIT_OF_GROUP = Path("/sys/fs/cgroup/memory.max")


def check_room(proof: Proof) -> None:
    """Refuse a proof one of whose cases needs more bytes than this machine has.

    Raises:
        Rejected: "graph/size".
    """
    there = available()
    for case in proof.cases:
        block = proof.graphs[case.graph]
        needed = boxes(block) if case.domain == "interval" else forms(block)
        if needed > there:
            raise Rejected(
                "graph/size",
                f"graph {case.graph[:12]} needs at least {needed / 2**30:.1f} GiB of memory, "
                f"{there / 2**30:.1f} GiB are there",
            )


def boxes(block: Block) -> int:
    """Return a lower bound of the bytes of the interval domain, where most nodes live at once."""
    last = {name: at for at, node in enumerate(block.nodes) for name in node.inputs}
    ending: dict[int, int] = {}
    most = now = 0
    for at, node in enumerate(block.nodes):
        size = _formed(node.op, node.shape) * _BOXES
        now += size
        most = max(most, now)
        end = last.get(node.name, at)
        ending[end] = ending.get(end, 0) + size
        now -= ending.pop(at, 0)
    return most


def forms(block: Block) -> int:
    """Return a lower bound of the bytes of affine forms, all of which are kept."""
    return sum(_formed(node.op, node.shape) for node in block.nodes) * _FORMS


def available() -> int:
    """Return how many bytes this process may use at most, as far as can be known."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return 2**63
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            found.append(limit)
    try:
        text = _LIMIT_OF_GROUP.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        text = ""
    if text.isdigit():
        found.append(int(text))
    return min(found)


def _formed(op: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) if op in _FORMING else 0
