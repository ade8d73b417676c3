"""The proof document: strict parsing into values (schema kcdsl.interval-proof/1)."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from kcdsl_certs.recheck import strict
from kcdsl_certs.recheck.block import Array, Block, parse_array, parse_block
from kcdsl_certs.recheck.errors import Rejection
from kcdsl_certs.recheck.spec import Kernel, parse_kernel
from kcdsl_certs.recheck.strict import Reader

PROOF_SCHEMA = "kcdsl.interval-proof/1"
LARGEST_PROOF = 256 * 2**20
MOST_CASES = 10_000
HELD = "held"
_KINDS = ("points", "ball", "hull")
_DOMAINS = ("interval", "affine")
_FUNCTIONALS = ("inf", "2", "span", "no_flip")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Functional:
    """What is bounded: the largest drift, a row norm, a row span, or that the top k stay."""

    kind: str
    k: int


@dataclass(frozen=True, slots=True)
class Region:
    """Centre and radius in doubles (row by row), or token ids."""

    kind: str
    centre: Array | None
    radius: Array | None
    ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Witness:
    """What the proof says of one node: the largest magnitudes of its value and of its drift."""

    node: str
    value: float
    drift: float


@dataclass(frozen=True, slots=True)
class Case:
    """One region on one graph with its claim (None: held), witnesses and domain."""

    name: str
    graph: str
    region: Region
    claim: float | None
    witness: tuple[Witness, ...]
    domain: str


@dataclass(frozen=True, slots=True)
class Proof:
    """A parsed proof. `claim` None means "held"."""

    block: str
    checkpoint: str
    train: Kernel
    infer: Kernel
    functional: Functional
    graphs: Mapping[str, Block]
    parameters: Mapping[str, str]
    cases: tuple[Case, ...]
    claim: float | None


def parse(data: bytes) -> Proof:
    """Return the proof of a document.

    Raises:
        Rejection: "document/…" or "graph/…", with the field or node named.
    """
    if len(data) > LARGEST_PROOF:
        raise Rejection("document/size", f"{len(data)} bytes")
    record = Reader(strict.load(data, "document/json"), "proof").exactly(
        "schema", "block", "checkpoint", "numerics", "functional", "graphs", "parameters",
        "cases", "claim",
    )  # fmt: skip
    if record.text("schema") != PROOF_SCHEMA:
        raise Rejection("document/schema", f"not {PROOF_SCHEMA}")
    numerics = record.reader("numerics").exactly("train", "infer")
    functional = _functional(record.reader("functional"))
    graphs = _graphs(record)
    return Proof(
        block=record.text("block"),
        checkpoint=_sha256(record.reader("checkpoint").exactly("sha256"), "sha256"),
        train=parse_kernel(numerics.raw("train"), "numerics.train"),
        infer=parse_kernel(numerics.raw("infer"), "numerics.infer"),
        functional=functional,
        graphs=graphs,
        parameters=_parameters(record, graphs),
        cases=_cases(record, functional, graphs),
        claim=_claim(record, functional),
    )


def _functional(record: Reader) -> Functional:
    record.exactly("kind", optional=("k",))
    kind = record.choice("kind", _FUNCTIONALS)
    if kind == "no_flip" or record.has("k"):
        return Functional(kind, record.integer("k", 1))
    return Functional(kind, 1)


def _graphs(record: Reader) -> dict[str, Block]:
    block, graphs = record.text("block"), record.reader("graphs")
    found = {}
    for digest in record.entries("graphs"):
        if not _SHA256.match(digest):
            raise Rejection("graph/digest", f"a graph stands under {digest[:80]!r}")
        entry = graphs.reader(digest).exactly("graph", "constants")
        constants = {
            key: parse_array(value, f"constant {key[:80]!r}")
            for key, value in entry.entries("constants").items()
        }
        found[digest] = parse_block(digest, entry, constants)
        if found[digest].name != block:
            raise Rejection("graph/block", f"graph {digest[:12]} is not of block {block!r}")
    return found


def _parameters(record: Reader, graphs: Mapping[str, Block]) -> dict[str, str]:
    entries = record.reader("parameters")
    digests = {key: _sha256(entries, key) for key in record.entries("parameters")}
    read: set[str] = set()
    for block in graphs.values():
        read |= block.parameters
    if read != set(digests):
        names = sorted(read ^ set(digests))[:3]
        raise Rejection("document/parameters", f"listed and read parameters differ: {names}")
    return digests


def _cases(record: Reader, functional: Functional, graphs: Mapping[str, Block]) -> tuple[Case, ...]:
    items = record.items("cases")
    if not 0 < len(items) <= MOST_CASES:
        raise Rejection("document/cases", f"{len(items)} cases")
    cases = tuple(_case(item, functional, graphs) for item in items)
    if len({case.name for case in cases}) != len(cases):
        raise Rejection("document/cases", "two cases have one name")
    return cases


def _case(value: object, functional: Functional, graphs: Mapping[str, Block]) -> Case:
    record = Reader(value, "case")
    record.exactly("name", "graph", "region", "claim", "witness", optional=("domain",))
    record.place = f"case {record.text('name')[:80]!r}"
    digest = record.text("graph")
    if digest not in graphs:
        raise Rejection("document/cases", f"{record.place} names a graph that is not there")
    region = record.reader("region")
    return Case(
        name=record.text("name"),
        graph=digest,
        region=_region(region, graphs[digest]),
        claim=_claim(record, functional),
        witness=_witnesses(record, graphs[digest]),
        domain=record.choice("domain", _DOMAINS) if record.has("domain") else "interval",
    )


def _region(record: Reader, block: Block) -> Region:
    record.reason = "document/region"
    kind = record.choice("kind", _KINDS)
    if block.input_shape is None:
        record.exactly("kind", "ids")
        ids = record.integers("ids", 0)
        if kind != "points" or not ids:
            raise record.fail("on token ids must be points with at least one id")
        _check_ids(ids, block, record)
        return Region(kind, None, None, ids)
    record.exactly("kind", "centre", "radius")
    centre = parse_array(record.raw("centre"), f"{record.place}.centre")
    radius = parse_array(record.raw("radius"), f"{record.place}.radius")
    if centre.dtype != "float64" or centre.shape != block.input_shape:
        raise record.fail("must have a float64 centre of the input's shape")
    if radius.dtype != "float64" or not _spreads(radius.shape, centre.shape):
        raise record.fail("must have a float64 radius of the input's shape or of shape [1, 1]")
    if kind == "points" and any(radius.data[i] for i in range(len(radius.data))):
        raise record.fail("of kind points must have radius zero")
    if not all(_finite(v) for v in _doubles(centre)):
        raise record.fail("must have a finite centre")
    if not all(_finite(v) and v >= 0 for v in _doubles(radius)):
        raise record.fail("must have a finite radius, nowhere negative")
    return Region(kind, centre, radius, None)


def _spreads(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return shape in (full, (1,) * len(full))


def _doubles(array: Array) -> tuple[float, ...]:
    return struct.unpack(f"<{len(array.data) // 8}d", array.data)


def _finite(value: float) -> bool:
    return value - value == 0


def _check_ids(ids: tuple[int, ...], block: Block, record: Reader) -> None:
    """Refuse a region whose ids no embedding on the way to the output looks up."""
    by_name = {node.name: node for node in block.nodes}
    live, todo = set(), [block.output]
    while todo:
        name = todo.pop()
        if name not in live:
            live.add(name)
            todo.extend(by_name[name].inputs)
    tables = [by_name[name] for name in live if by_name[name].op == "embedding"]
    if not any(node.attrs.integers("ids", 0) == ids for node in tables):
        raise record.fail("has ids that no embedding of the graph looks up")


def _witnesses(record: Reader, block: Block) -> tuple[Witness, ...]:
    known = {node.name for node in block.nodes}
    found: dict[str, Witness] = {}
    for item in record.items("witness"):
        entry = Reader(item, f"{record.place} witness", "document/witness")
        entry.exactly("node", "value", "drift")
        name = entry.text("node")
        if name not in known or name in found:
            raise entry.fail(f"of {name[:80]!r}, a node unknown or named twice")
        found[name] = Witness(name, entry.real("value"), entry.real("drift"))
    if block.output not in found:
        raise Rejection("document/witness", f"{record.place} lacks the witness of the output")
    return tuple(found.values())


def _claim(record: Reader, functional: Functional) -> float | None:
    """Return the claim; None for "held", which exactly no_flip claims."""
    value = record.raw("claim")
    if functional.kind == "no_flip":
        if value != HELD:
            raise record.fail(f"must claim {HELD!r} for no_flip")
        return None
    claim = record.real("claim")
    if not claim >= 0:
        raise record.fail("must not claim a negative bound")
    return claim


def _sha256(record: Reader, name: str) -> str:
    text = record.text(name)
    if not _SHA256.match(text):
        raise record.fail(f"{name!r} must be a sha256 in hexadecimal")
    return text
