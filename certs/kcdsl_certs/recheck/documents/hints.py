"""Hints of linear bounds in a proof (docs/proofs/difference-planes.md, section 8).

They name the elements that functionals bound, slopes of the planes of ReLUs, and other slopes for
some elements of the output. They are not trusted: any slopes are sound, and a functional that is
left out only makes bounds wider.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Array, Block, Node, parse_array
from kcdsl_certs.recheck.graphs.strict_json import Reader

UNKNOWNS = ("deviation", "drift")
SIDES = ("below", "above")
SLOPES = 6
MOST_SEARCHED = 4096


@dataclass(frozen=True, slots=True)
class ReluSlopes:
    """Elements of a ReLU, bool of the node's shape, and float32 slopes [6, elements] there."""

    at: Array
    values: Array

    @property
    def count(self) -> int:
        """Return how many elements there are."""
        return self.values.shape[1]


@dataclass(frozen=True, slots=True)
class ElementSlopes:
    """Slopes for one element of the output's drift, float32 [6, elements of all ReLUs]."""

    element: int
    side: str
    values: Array


@dataclass(frozen=True, slots=True)
class PlaneHints:
    """Runs of rows (first, end) by node and unknown; slopes by ReLU; slopes by output element."""

    met: Mapping[tuple[str, str], tuple[int, ...]]
    slopes: Mapping[str, ReluSlopes]
    searched: tuple[ElementSlopes, ...]


def parse_planes(value: object, place: str, block: Block) -> PlaneHints:
    """Return the hints of a case. Raises Rejected "document/planes"."""
    record = Reader(value, f"{place} planes", "document/planes")
    record.exactly("met", "slopes", "searched")
    nodes = {node.name: node for node in block.nodes}
    slopes = _slopes(record, nodes)
    searched = _searched(record, slopes, math.prod(nodes[block.output].shape))
    return PlaneHints(_met(record, nodes), slopes, searched)


def _met(record: Reader, nodes: Mapping[str, Node]) -> dict[tuple[str, str], tuple[int, ...]]:
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for item in record.items("met"):
        entry = Reader(item, f"{record.place} met", "document/planes")
        entry.exactly("of", "unknown", "rows")
        key = entry.text("of"), entry.choice("unknown", UNKNOWNS)
        if key[0] not in nodes or key in found:
            raise entry.fail(f"of {key[0][:80]!r}, a node unknown or named twice")
        found[key] = runs = entry.integers("rows", 0)
        rising = all(one < two for one, two in itertools.pairwise(runs))
        rows = math.prod(nodes[key[0]].shape[:-1])
        if not runs or len(runs) % 2 or not rising or runs[-1] > rows:
            raise entry.fail("must have rows of the node, first and end in turn")
    return found


def _slopes(record: Reader, nodes: Mapping[str, Node]) -> dict[str, ReluSlopes]:
    found: dict[str, ReluSlopes] = {}
    for item in record.items("slopes"):
        entry = Reader(item, f"{record.place} slopes", "document/planes").exactly(
            "of", "at", "values"
        )
        name = entry.text("of")
        if name not in nodes or nodes[name].op != "relu" or name in found:
            raise entry.fail(f"of {name[:80]!r}, no ReLU or named twice")
        at = _array(entry, "at")
        if at.dtype != "bool" or at.shape != nodes[name].shape:
            raise entry.fail("must say of every element whether it is one")
        found[name] = ReluSlopes(at, _numbers(entry, at.data.count(1)))
    return found


def _searched(
    record: Reader, slopes: Mapping[str, ReluSlopes], outputs: int
) -> tuple[ElementSlopes, ...]:
    items = record.items("searched")
    if len(items) > MOST_SEARCHED:
        raise Rejected("document/planes", f"{len(items)} elements of the output with own slopes")
    total = sum(bent.count for bent in slopes.values())
    found = []
    for item in items:
        entry = Reader(item, f"{record.place} searched", "document/planes").exactly(
            "element", "side", "values"
        )
        element = entry.integer("element", 0)
        if element >= outputs:
            raise entry.fail("must be of an element of the output")
        found.append(ElementSlopes(element, entry.choice("side", SIDES), _numbers(entry, total)))
    if len({(one.element, one.side) for one in found}) != len(found):
        raise record.fail("has an element of the output twice")
    return tuple(found)


def _array(entry: Reader, name: str) -> Array:
    try:
        return parse_array(entry.raw(name), f"{entry.place}.{name}")
    except Rejected as rejection:
        raise Rejected("document/planes", rejection.detail) from None


def _numbers(entry: Reader, count: int) -> Array:
    values = _array(entry, "values")
    if values.dtype != "float32" or values.shape != (SLOPES, count):
        raise entry.fail(f"must have float32 values of shape {[SLOPES, count]}")
    exponents = values.data[3::4], values.data[2::4]
    if any(high & 0x7F == 0x7F and low & 0x80 for high, low in zip(*exponents, strict=True)):
        raise entry.fail("must have finite values")
    return values
