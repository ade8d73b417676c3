"""Block graphs joined end to end, and what two graphs must share to be the same block.

A graph is read as its *wires*: every node that computes something, in order, with what it reads.
Names do not count, nor the order of leaves: a parameter is its key, a constant its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kcdsl_certs.recheck import strict
from kcdsl_certs.recheck.block import Block, Node
from kcdsl_certs.rejected import Rejected

Source = tuple[str | int | tuple[int, ...], ...]
"""What a wire reads: an earlier wire by its number, or a leaf by its content."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One node that computes something; `attrs` are its attributes as canonical JSON."""

    op: str
    role: str
    shape: tuple[int, ...]
    attrs: bytes
    reads: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Wiring:
    """All wires of a graph in order, what its output is, and the shape that it takes."""

    wires: tuple[Wire, ...]
    output: Source
    input_shape: tuple[int, ...] | None


def joined(blocks: Sequence[Block]) -> Wiring:
    """Return the wiring of blocks each of which reads the output of the one before.

    Raises:
        Rejected: "chain/join" where a block does not take what the one before returns.
    """
    wires: list[Wire] = []
    entering: Source | None = None
    for block in blocks:
        if entering is not None and (not wires or block.input_shape != wires[-1].shape):
            raise Rejected("chain/join", f"{block.name!r} does not take what comes before it")
        entering = _append(block, wires, entering)
        if entering != ("wire", len(wires) - 1):
            raise Rejected("chain/join", f"{block.name!r} does not end in its last operation")
    assert entering is not None
    return Wiring(tuple(wires), entering, blocks[0].input_shape)


def wiring(block: Block) -> Wiring:
    """Return the wiring of one graph."""
    wires: list[Wire] = []
    output = _append(block, wires, None)
    return Wiring(tuple(wires), output, block.input_shape)


def _append(block: Block, wires: list[Wire], entering: Source | None) -> Source:
    """Append the wires of a block, whose input is what is entering; return its output."""
    known: dict[str, Source] = {}
    for node in block.nodes:
        if node.op == "input" and entering is not None:
            if node.shape != block.input_shape:
                raise Rejected("chain/join", f"{block.name!r} has an input of another shape")
            known[node.name] = entering
        elif node.op in ("input", "param", "constant"):
            known[node.name] = _leaf(block, node)
        else:
            reads = tuple(known[name] for name in node.inputs)
            attrs = strict.canonical(dict(node.attrs.value))
            wires.append(Wire(node.op, node.role, node.shape, attrs, reads))
            known[node.name] = ("wire", len(wires) - 1)
    return known[block.output]


def _leaf(block: Block, node: Node) -> Source:
    """Return a leaf by its content."""
    if node.op == "input":
        return ("input", node.role, node.shape)
    key = node.attrs.text("key")
    if node.op == "param":
        return ("param", key, node.role, node.shape)
    array = block.constants.get(key)
    if array is None:
        raise Rejected("graph/field", f"there is no constant {key[:80]!r}")
    return ("constant", array.digest, node.role, node.shape)


def refuse_other(whole: Block, parts: Sequence[Block]) -> None:
    """Refuse parts that are not, one after the other, the whole.

    Raises:
        Rejected: "chain/join", naming the first operation that differs.
    """
    one, two = wiring(whole), joined(parts)
    for number, (a, b) in enumerate(zip(one.wires, two.wires, strict=False)):
        if a != b:
            raise Rejected(
                "chain/join", f"operation {number} of {whole.name!r} is {a.op}, not that {b.op}"
            )
    if one != two:
        raise Rejected(
            "chain/join",
            f"{whole.name!r} has {len(one.wires)} operations, its links {len(two.wires)}",
        )
