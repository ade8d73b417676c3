"""Accept or reject a chain: check its links, their interfaces, and that they compose to the block.

<X, 0> ⊢ δ₁ of the first link, <X₂, δ₁> ⊢ δ₂ of the next, … give <X, 0> ⊢ δₙ of the block that the
links form one after the other. Interfaces are compared in exact arithmetic. A graph is read as its
*wires*: every node that computes something, in order, with its operands. Names and the order of
leaves are ignored: a parameter is its key, a constant its content.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.documents.chain_document import ChainCase, ChainDocument, Link
from kcdsl_certs.recheck.documents.document import Apart, Case, Ends, numbers_of
from kcdsl_certs.recheck.graphs import strict_json
from kcdsl_certs.recheck.graphs.graph import Array, Block, Node

Source = tuple[str | int | bool | tuple[int, ...], ...]
"""An operand of a wire: an earlier wire by its number, or a leaf by its content."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One node that computes something; `attrs` are its attributes as canonical JSON, `form` states
    whether it is written out, and the formats of its parts in order."""

    op: str
    role: str
    shape: tuple[int, ...]
    attrs: bytes
    reads: tuple[Source, ...]
    format: str
    form: tuple[bool, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Wiring:
    """All wires of a graph in order, its output, and the shape of its input."""

    wires: tuple[Wire, ...]
    output: Source
    input_shape: tuple[int, ...] | None


def joined(blocks: Sequence[Block]) -> Wiring:
    """Return the wiring of blocks each of which reads the output of the one before.

    Raises Rejected "chain/join" where the input of a block has not the shape of the output before.
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
    """Append the wires of a block whose input is `entering`; return its output."""
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
            attrs = strict_json.canonical(dict(node.attrs.value))
            form = node.written, tuple(node.parts.items())
            wires.append(Wire(node.op, node.role, node.shape, attrs, reads, node.format, form))
            known[node.name] = ("wire", len(wires) - 1)
    return known[block.output]


def _leaf(block: Block, node: Node) -> Source:
    """Return the content of a leaf: its operation, key or digest, role and shape."""
    if node.op == "input":
        return ("input", node.role, node.shape)
    key = node.attrs.text("key")
    if node.op == "param":
        return ("param", key, node.role, node.shape, node.attrs.has("transposed"))
    array = block.constants.get(key)
    if array is None:
        raise Rejected("graph/field", f"there is no constant {key[:80]!r}")
    return ("constant", array.digest, node.role, node.shape, node.format)


def refuse_other(whole: Block, parts: Sequence[Block]) -> None:
    """Refuse parts that are not, one after the other, the whole.

    Raises Rejected "chain/join", naming the first operation that differs.
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


Sizes = Mapping[str, tuple[float, float]]
Inner = Callable[[Case, Any, bool], tuple[float, Sizes, Ends, Apart | None, Any]]
"""Derives a link from the ellipsoids of the link before: returns its largest drift, the sizes of
its nodes, the boxes of its output, the distance of readings of it (None: not compared), and, if
wanted, the ellipsoids of its output (None: there are none)."""
Follows = Callable[[Case, Any], float]
"""Derives a case from the ellipsoids of the link before, compares its claim and witnesses, and
returns the bound."""
Compare = Callable[[Case, float, Sizes], None]
"""Compares the derived bound and sizes of a case with its claim and its witnesses."""

_ENDS = ("the training value", "the drift")


def refuse_gaps(chain: ChainDocument) -> None:
    """Refuse a chain whose links do not compose to the block, or have a gap at an interface.

    Raises Rejected "chain/join" or "chain/interface"; "rule/format" for a sum or product that reads
    a pinned format which its result does not hold, across links as within one.
    """
    for case in chain.cases:
        whole = chain.graphs[case.graph]
        try:
            refuse_other(whole, [chain.graphs[link.case.graph] for link in case.links])
            for node in whole.nodes:
                for kernel in (chain.last.train, chain.last.infer):
                    kernel.at(node).refuse_wide(whole.named, node)
            for one, two in zip(case.links[:-1], case.links[1:], strict=True):
                _interface(one, two)
        except Rejected as rejection:
            raise rejection.at(f"case {case.name[:80]!r}") from None


def _interface(one: Link, two: Link) -> None:
    """Refuse a link whose region does not contain the output boxes of the one before."""
    region = two.case.region
    assert one.output is not None
    assert region.drift is not None
    train_low, train_high, drift_low, drift_high = one.output
    low, high = (numbers_of(end) for end in region.drift)
    place = f"between {one.case.name[:40]!r} and {two.case.name[:40]!r}"
    if not (_within(drift_low, drift_high, low, high)):
        raise Rejected("chain/interface", f"{place}: the drift leaves the box of the next link")
    if not _in_region(train_low, train_high, region.centre, region.radius):
        raise Rejected("chain/interface", f"{place}: the state leaves the region of the next link")
    stated = None
    if region.readings is not None:
        stated = tuple(numbers_of(own) for own in region.readings)
    if one.readings is not None and not _at_most(one.readings, stated):
        raise Rejected("chain/interface", f"{place}: readings are farther apart than the next has")


def _at_most(found: Sequence[Sequence[float]], stated: Sequence[Sequence[float]] | None) -> bool:
    """Return whether readings are no farther apart than stated; without a statement, all zero."""
    if stated is None:
        return not any(any(own) for own in found)
    return all(
        a <= b
        for own, most in zip(found, stated, strict=True)
        for a, b in zip(own, most, strict=True)
    )


def _within(
    low: Sequence[float], high: Sequence[float], least: Sequence[float], most: Sequence[float]
) -> bool:
    """Return whether the box [low, high] lies in [least, most]."""
    return all(c <= a <= b <= d for a, b, c, d in zip(low, high, least, most, strict=True))


def _in_region(
    low: Sequence[float], high: Sequence[float], centre: Array | None, radius: Array | None
) -> bool:
    """Return whether a box lies in centre ± radius, in exact arithmetic."""
    if centre is None or radius is None:
        return False
    middles, spreads = numbers_of(centre), numbers_of(radius)
    if len(spreads) == 1:
        spreads = spreads * len(middles)
    return all(
        Fraction(m) - Fraction(r) <= a <= b <= Fraction(m) + Fraction(r)
        for a, b, m, r in zip(low, high, middles, spreads, strict=True)
    )


def derive_chain(case: ChainCase, inner: Inner, follows: Follows, compare: Compare) -> float:
    """Derive every link of a case; return the bound of the last.

    Raises Rejected as the derivation of a link does, "chain/output" for a link whose output may
    leave the claimed boxes, or "chain/ellipsoids" for one that reads ellipsoids where the link
    before has none.
    """
    held: Any = None
    for link, behind in zip(case.links[:-1], case.links[1:], strict=True):
        try:
            held = _derive(link, inner, compare, held, behind.ellipsoids)
        except Rejected as rejection:
            raise rejection.at(f"link {link.case.name[:80]!r}") from None
        if behind.ellipsoids and held is None:
            raise Rejected("chain/ellipsoids", f"link {link.case.name[:80]!r} has none to hand on")
    last = case.links[-1].case
    try:
        return follows(last, held)
    except Rejected as rejection:
        raise rejection.at(f"link {last.name[:80]!r}") from None


def _derive(link: Link, inner: Inner, compare: Compare, held: Any, wanted: bool) -> Any:
    """Derive a link; return the ellipsoids that the next one reads, None if it reads none."""
    bound, sizes, ends, readings, handed = inner(link.case, held, wanted)
    if not math.isfinite(bound):
        raise Rejected("bound/not-finite", "the drift has no finite bound")
    compare(link.case, bound, sizes)
    assert link.output is not None
    for first, what in zip((0, 2), _ENDS, strict=True):
        if not _within(*ends[first : first + 2], *link.output[first : first + 2]):
            raise Rejected("chain/output", f"{what} may leave the box that is claimed of it")
    if readings is not None and not _at_most(readings, link.readings):
        raise Rejected("chain/output", "readings may be farther apart than is claimed")
    return handed if wanted else None
