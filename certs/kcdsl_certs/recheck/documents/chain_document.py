"""The chain document: strict parsing into values (schema kcdsl.chain-proof/3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.documents.document import (
    MOST_CASES,
    Apart,
    Case,
    Ends,
    Functional,
    Proof,
    case_of,
    checkpoints_of,
    claim_of,
    functional_of,
    numbers_of,
    parameters_of,
)
from kcdsl_certs.recheck.graphs.graph import Array, Block, parse_array, parse_block
from kcdsl_certs.recheck.graphs.strict_json import Reader
from kcdsl_certs.recheck.numerics.specification import parse_kernel

CHAIN_SCHEMA = "kcdsl.chain-proof/3"
MOST_LINKS = 10_000
LARGEST_DRIFT = Functional("inf", 1)
"""The functional that every link but the last claims."""
_FIELDS = ("name", "graph", "claim", "witness")
_KINDS = ("points", "ball", "hull")


@dataclass(frozen=True, slots=True)
class Link:
    """A block of a chain on its region. `output` are the claimed boxes of its output's training
    value and drift; the last link has none. With `ellipsoids` the drift of its region also lies in
    those that the checker derives of the link before. `readings` is the largest distance of
    readings of its output in training and inference (None: zero)."""

    case: Case
    output: Ends | None
    ellipsoids: bool = False
    readings: Apart | None = None


@dataclass(frozen=True, slots=True)
class ChainCase:
    """One region of the whole block, and the links that lead from it to the claim."""

    name: str
    graph: str
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class ChainDocument:
    """A parsed chain as two proofs: `last` has the last link of every case as its cases, `inner`
    all other links in order."""

    block: str
    inner: Proof
    last: Proof
    cases: tuple[ChainCase, ...]

    @property
    def graphs(self) -> Mapping[str, Block]:
        """Return every graph by its digest: of links and of whole blocks."""
        return self.last.graphs


def parse_chain(record: Reader) -> ChainDocument:
    """Return the chain of a document.

    Raises Rejected "document/…", "graph/…" or "chain/…", with the field or node named.
    """
    record.exactly(
        "schema", "block", "checkpoint", "numerics", "functional", "graphs", "parameters",
        "cases", "claim",
    )  # fmt: skip
    block, functional = record.text("block"), functional_of(record.reader("functional"))
    numerics = record.reader("numerics").exactly("train", "infer")
    graphs = _graphs(record)
    cases = _cases(record, block, functional, graphs)
    checkpoint, served = checkpoints_of(record)
    infer = parse_kernel(numerics.raw("infer"), "numerics.infer")
    last = Proof(
        block=block,
        checkpoint=checkpoint,
        served=served,
        train=parse_kernel(numerics.raw("train"), "numerics.train"),
        infer=replace(infer, served=served is not None),
        functional=functional,
        graphs=graphs,
        parameters=parameters_of(record, graphs),
        cases=tuple(case.links[-1].case for case in cases),
        claim=claim_of(record, functional),
    )
    within = tuple(link.case for case in cases for link in case.links[:-1])
    inner = replace(last, functional=LARGEST_DRIFT, cases=within, claim=None)
    return ChainDocument(block, inner, last, cases)


def _graphs(record: Reader) -> dict[str, Block]:
    graphs, found = record.reader("graphs"), {}
    for digest in record.entries("graphs"):
        entry = graphs.reader(digest).exactly("graph", "constants")
        constants = {
            key: parse_array(value, f"constant {key[:80]!r}")
            for key, value in entry.entries("constants").items()
        }
        found[digest] = parse_block(digest, entry, constants)
    return found


def _cases(
    record: Reader, block: str, functional: Functional, graphs: Mapping[str, Block]
) -> tuple[ChainCase, ...]:
    items = record.items("cases")
    if not 0 < len(items) <= MOST_CASES:
        raise Rejected("document/cases", f"{len(items)} cases")
    cases = tuple(_case(item, block, functional, graphs) for item in items)
    if len({case.name for case in cases}) != len(cases):
        raise Rejected("document/cases", "two cases have one name")
    return cases


def _case(
    value: object, block: str, functional: Functional, graphs: Mapping[str, Block]
) -> ChainCase:
    record = Reader(value, "case").exactly("name", "graph", "region", "links")
    record.place = f"case {record.text('name')[:80]!r}"
    digest = record.text("graph")
    if digest not in graphs:
        raise Rejected("document/cases", f"{record.place} names a graph that is not there")
    if graphs[digest].name != block:
        raise Rejected("graph/block", f"graph {digest[:12]} is not of block {block!r}")
    items = record.items("links")
    if not 2 <= len(items) <= MOST_LINKS:
        raise Rejected("chain/links", f"{record.place} has {len(items)} links, not two or more")
    links = []
    for number, item in enumerate(items):
        try:
            first = record.raw("region") if number == 0 else None
            links.append(_link(item, first, number + 1 == len(items), functional, graphs))
        except Rejected as rejection:
            raise rejection.at(record.place) from None
    return ChainCase(record.text("name"), digest, tuple(links))


def _link(
    value: object,
    first: Any | None,
    last: bool,
    functional: Functional,
    graphs: Mapping[str, Block],
) -> Link:
    """Return a link. The first one has the region of the whole block, every other its own region
    with a drift; every link but the last states the boxes of its output."""
    record = Reader(value, "link")
    beside = (*(() if first is not None else ("region",)), *(() if last else ("output",)))
    record.exactly(*_FIELDS, *beside, optional=("domain", "passes"))
    stated = {name: part for name, part in record.value.items() if name != "output"}
    drift: object = None
    own: object = None
    ellipsoids = False
    if first is None:
        region = record.reader("region")
        region.exactly("kind", "centre", "radius", "drift", optional=("ellipsoids", "readings"))
        own = region.raw("readings") if region.has("readings") else None
        drift, ellipsoids = region.raw("drift"), region.has("ellipsoids")
        if ellipsoids and region.raw("ellipsoids") is not True:
            raise region.fail("has ellipsoids that are not true")
        apart = ("drift", "ellipsoids", "readings")
        stated["region"] = {n: part for n, part in region.value.items() if n not in apart}
    else:
        entire = Reader(first, f"{record.place}.region", "document/region")
        entire.exactly(*(("kind", "ids") if entire.has("ids") else ("kind", "centre", "radius")))
        stated["region"] = first
    case = case_of(stated, functional if last else LARGEST_DRIFT, graphs)
    if not {"planes", "splits"}.isdisjoint(case.domains):
        raise Rejected("document/domain", f"{case.domain} are of whole blocks, not of links")
    if case.region.kind not in (_KINDS if first is not None else ("hull",)):
        raise Rejected("document/region", f"a link on a region of kind {case.region.kind!r}")
    block = graphs[case.graph]
    if first is None:
        ends = _box(drift, f"{record.place}.region.drift", block.input_shape)
        readings = None
        if own is not None:
            readings = _readings(own, f"{record.place}.region.readings", block.input_shape)
        case = replace(case, region=replace(case.region, drift=ends, readings=readings))
    if last:
        return Link(case, None, ellipsoids)
    output, apart_by = _output(record, block)
    return Link(case, output, ellipsoids, apart_by)


def _output(record: Reader, block: Block) -> tuple[Ends, Apart | None]:
    output = record.reader("output").exactly("train", "drift", optional=("readings",))
    shape = next(node.shape for node in block.nodes if node.name == block.output)
    train = _box(output.raw("train"), f"{record.place}.output.train", shape)
    drift = _box(output.raw("drift"), f"{record.place}.output.drift", shape)
    (a, b), (c, d) = train, drift
    ends = numbers_of(a), numbers_of(b), numbers_of(c), numbers_of(d)
    if not output.has("readings"):
        return ends, None
    one, two = _readings(output.raw("readings"), f"{record.place}.output.readings", shape)
    return ends, (numbers_of(one), numbers_of(two))


def _readings(value: object, place: str, shape: tuple[int, ...] | None) -> tuple[Array, Array]:
    """Return the distances of readings in training and inference, finite and not negative."""
    record = Reader(value, place, "document/readings").exactly("train", "infer")
    train, infer = (parse_array(record.raw(side), f"{place}.{side}") for side in ("train", "infer"))
    if any(array.dtype != "float64" or array.shape != shape for array in (train, infer)):
        raise record.fail("must have float64 numbers of the shape of the state")
    if not all(0 <= own < math.inf for array in (train, infer) for own in numbers_of(array)):
        raise record.fail("must have finite numbers that are not negative")
    return train, infer


def _box(value: object, place: str, shape: tuple[int, ...] | None) -> tuple[Array, Array]:
    """Return the arrays of lower and upper ends of a box, finite and in order."""
    record = Reader(value, place, "document/box").exactly("low", "high")
    low, high = (parse_array(record.raw(end), f"{place}.{end}") for end in ("low", "high"))
    if any(array.dtype != "float64" or array.shape != shape for array in (low, high)):
        raise record.fail("must have float64 ends of the shape of the state")
    ends = zip(numbers_of(low), numbers_of(high), strict=True)
    if not all(a - a == 0 and b - b == 0 and a <= b for a, b in ends):
        raise record.fail("must have finite ends, the lower one below")
    return low, high
