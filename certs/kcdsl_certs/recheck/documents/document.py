"""The proof document: strict parsing into values (schema kcdsl.interval-proof/2)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from kcdsl_certs.encoding.reals import parse_real, real_text
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.documents.hints import PlaneHints, parse_planes
from kcdsl_certs.recheck.graphs import strict_json
from kcdsl_certs.recheck.graphs.any_length import parse_tables
from kcdsl_certs.recheck.graphs.graph import (
    Array,
    Block,
    base64_of,
    parse_array,
    parse_block,
)
from kcdsl_certs.recheck.graphs.strict_json import Reader
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from kcdsl_certs.statement import LARGEST_ALPHA, LEAST_ALPHA

PROOF_SCHEMA = "kcdsl.interval-proof/2"
LARGEST_PROOF = 256 * 2**20
MOST_CASES = 10_000
HELD = "held"
_KINDS = ("points", "ball", "hull", "rows")
MOST_ROWS = 2**20
MOST_BOXES = 2**22
"""The limit for all trees of a case together."""
WIDEST = Fraction(1, 2)
"""The largest ρ of a region around the weights: within it no element changes its sign."""
_DOMAINS = ("interval", "affine", "planes", "affine+planes", "splits")
MOST_FUNCTIONALS = 2**40
"""The most functionals among which the probability of a failure is divided."""
_PASSES = ("elements", "deviations", "norm", "ellipsoid", "product")
_STOPS = ("cut", "input")
_FUNCTIONALS = ("inf", "2", "span", "no_flip")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Functional:
    """The bounded functional: the largest drift, a row norm, a row span, or that the top k stay."""

    kind: str
    k: int


@dataclass(frozen=True, slots=True)
class CaseRegion:
    """Centre and radius in doubles (row by row), or token ids.

    Of kind rows: centre and radius are of one row, and the region has every sequence of 1 to
    `longest` such rows; `tables` holds the block's tables of positions, by the node of their
    constant. With `weights` ρ the case is about every θ' with |θ' - θ| ≤ ρ|θ|, not θ alone.
    """

    kind: str
    centre: Array | None
    radius: Array | None
    ids: tuple[int, ...] | None
    longest: int | None = None
    tables: Mapping[str, Array] = field(default_factory=dict)
    drift: tuple[Array, Array] | None = None  # of links of a chain: chain_document.py
    readings: tuple[Array, Array] | None = None  # and how far readings of its states are apart
    weights: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True)
class Witness:
    """The largest magnitudes that the proof states of one node's value and drift."""

    node: str
    value: float
    drift: float


@dataclass(frozen=True, slots=True)
class Pass:
    """A reverse pass: the node `at` whose operation needs it, the node `of` which it bounds
    functionals, its kind, and the place where it stops."""

    at: str
    of: str
    kind: str
    stop: str


Hints = Mapping[Pass, tuple[int, ...]]
Ends = tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]
"""Lower and upper ends of the training value and of the drift of an output, row by row."""
Apart = tuple[Sequence[float], Sequence[float]]
"""The largest distance of readings of a state in training and inference, row by row."""


@dataclass(frozen=True, slots=True)
class Case:
    """One region on one graph with its claim (None: held), witnesses and domain.

    `passes` lists for the training and the inference kernel the runs of rows (first, end) of a node
    in which reverse passes are made; None: all. `planes` are the hints of planes. `chance` (α, N):
    roundings are independent, and the claim fails in at most a share α of the runs on any one
    input, divided among N functionals. None: it holds in the worst case. `splits` has a tree of
    boxes for each row of the input.
    """

    name: str
    graph: str
    region: CaseRegion
    claim: float | None
    witness: tuple[Witness, ...]
    domain: str
    passes: tuple[Hints, Hints] | None = None
    planes: PlaneHints | None = None
    splits: tuple[bytes, ...] = ()

    chance: tuple[Fraction, int] | None = None

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the domains in which the bound is derived, in addition to intervals."""
        return () if self.domain == "interval" else tuple(self.domain.split("+"))


@dataclass(frozen=True, slots=True)
class Proof:
    """A parsed proof. `claim` None means "held"; `served` is the manifest's digest of the inference
    kernel's own checkpoint, None where it reads the same as the training kernel."""

    block: str
    checkpoint: str
    train: KernelNumerics
    infer: KernelNumerics
    functional: Functional
    graphs: Mapping[str, Block]
    parameters: Mapping[str, str]
    cases: tuple[Case, ...]
    claim: float | None
    served: str | None = None


def parse(data: bytes) -> Proof:
    """Return the proof of a document.

    Raises Rejected "document/…" or "graph/…", with the field or node named.
    """
    return proof_of(load(data))


def load(data: bytes) -> Reader:
    """Return a document for reading. Raises Rejected "document/size" or "document/json"."""
    if len(data) > LARGEST_PROOF:
        raise Rejected("document/size", f"{len(data)} bytes")
    return Reader(strict_json.load(data, "document/json"), "proof")


def proof_of(record: Reader) -> Proof:
    """Return the proof that a document states; raises what `parse` raises."""
    record.exactly(
        "schema", "block", "checkpoint", "numerics", "functional", "graphs", "parameters",
        "cases", "claim",
    )  # fmt: skip
    if record.text("schema") != PROOF_SCHEMA:
        raise Rejected("document/schema", f"not {PROOF_SCHEMA}")
    numerics = record.reader("numerics").exactly("train", "infer")
    functional = functional_of(record.reader("functional"))
    graphs = _graphs(record)
    checkpoint, served = checkpoints_of(record)
    infer = parse_kernel(numerics.raw("infer"), "numerics.infer")
    return Proof(
        block=record.text("block"),
        checkpoint=checkpoint,
        served=served,
        train=parse_kernel(numerics.raw("train"), "numerics.train"),
        infer=replace(infer, served=served is not None),
        functional=functional,
        graphs=graphs,
        parameters=parameters_of(record, graphs),
        cases=_cases(record, functional, graphs),
        claim=claim_of(record, functional),
    )


def checkpoints_of(record: Reader) -> tuple[str, str | None]:
    """Return the digests of the checkpoint, and of that of the inference kernel if it has one."""
    named = record.reader("checkpoint").exactly("sha256", optional=("infer",))
    served = digest_of(named, "infer") if named.has("infer") else None
    return digest_of(named, "sha256"), served


def functional_of(record: Reader) -> Functional:
    """Return what a proof bounds."""
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
            raise Rejected("graph/digest", f"a graph has the key {digest[:80]!r}")
        entry = graphs.reader(digest).exactly("graph", "constants")
        constants = {
            key: parse_array(value, f"constant {key[:80]!r}")
            for key, value in entry.entries("constants").items()
        }
        found[digest] = parse_block(digest, entry, constants)
        if found[digest].name != block:
            raise Rejected("graph/block", f"graph {digest[:12]} is not of block {block!r}")
    return found


def parameters_of(record: Reader, graphs: Mapping[str, Block]) -> dict[str, str]:
    """Return the digests of the parameters; refuse them unless they are those the graphs read."""
    entries = record.reader("parameters")
    digests = {key: digest_of(entries, key) for key in record.entries("parameters")}
    read: set[str] = set()
    for block in graphs.values():
        read |= block.parameters
    if read != set(digests):
        names = sorted(read ^ set(digests))[:3]
        raise Rejected("document/parameters", f"listed and read parameters differ: {names}")
    return digests


def _cases(record: Reader, functional: Functional, graphs: Mapping[str, Block]) -> tuple[Case, ...]:
    items = record.items("cases")
    if not 0 < len(items) <= MOST_CASES:
        raise Rejected("document/cases", f"{len(items)} cases")
    cases = tuple(case_of(item, functional, graphs) for item in items)
    if len({case.name for case in cases}) != len(cases):
        raise Rejected("document/cases", "two cases have one name")
    return cases


def case_of(value: object, functional: Functional, graphs: Mapping[str, Block]) -> Case:
    """Return one case of a proof."""
    record = Reader(value, "case")
    optional = ("domain", "passes", "planes", "splits", "chance")
    record.exactly("name", "graph", "region", "claim", "witness", optional=optional)
    record.place = f"case {record.text('name')[:80]!r}"
    digest = record.text("graph")
    if digest not in graphs:
        raise Rejected("document/cases", f"{record.place} names a graph that is not there")
    region = record.reader("region")
    return Case(
        name=record.text("name"),
        graph=digest,
        region=_region(region, graphs[digest]),
        claim=claim_of(record, functional),
        witness=_witnesses(record, graphs[digest]),
        domain=_domain(record, functional),
        passes=_passes(record, graphs[digest]) if record.has("passes") else None,
        planes=_planes(record, graphs[digest]) if record.has("planes") else None,
        splits=_splits(record),
        chance=_chance(record) if record.has("chance") else None,
    )


def _domain(record: Reader, functional: Functional) -> str:
    domain = record.choice("domain", _DOMAINS) if record.has("domain") else "interval"
    if domain != "interval" and record.reader("region").raw("kind") == "rows":
        raise Rejected("document/domain", f"{record.place}: {domain} forms are of one length")
    if domain in ("planes", "affine+planes", "splits") and record.reader("region").has("weights"):
        raise Rejected("document/domain", f"{record.place}: {domain} are of one checkpoint")
    if domain == "splits" and functional.kind != "inf":
        raise Rejected("document/domain", f"{record.place}: splits bound the largest drift alone")
    return domain


def _splits(record: Reader) -> tuple[bytes, ...]:
    """Return the tree of each row, as bytes of uint16."""
    splits = record.has("domain") and record.text("domain") == "splits"
    if splits != record.has("splits"):
        raise record.fail("must have trees of boxes if it is derived by splits, and only then")
    if not splits:
        return ()
    trees = tuple(base64_of(record, item) for item in record.items("splits"))
    if sum(len(tree) for tree in trees) > 2 * MOST_BOXES:
        raise Rejected("document/splits", f"{record.place}: more than {MOST_BOXES} boxes")
    return trees


def _planes(record: Reader, block: Block) -> PlaneHints:
    if not record.has("domain") or "planes" not in record.text("domain"):
        raise record.fail("has hints of planes, which only planes read")
    return parse_planes(record.raw("planes"), record.place, block)


def _chance(record: Reader) -> tuple[Fraction, int]:
    """Return α and N; refuse an α that is not in its canonical spelling."""
    if not record.has("domain") or record.text("domain") != "affine":
        raise record.fail("leaves something to chance, which only affine forms do")
    chance = record.reader("chance").exactly("alpha", "functionals")
    try:
        alpha = parse_real(chance.text("alpha"))
    except Rejected:
        alpha = Fraction(0)
    if not LEAST_ALPHA <= alpha <= LARGEST_ALPHA or real_text(alpha) != chance.text("alpha"):
        raise chance.fail("must have an alpha above 0 and up to 1/20, as a decimal or ratio")
    functionals = chance.integer("functionals", 1)
    if functionals > MOST_FUNCTIONALS:
        raise chance.fail(f"must not speak of more than {MOST_FUNCTIONALS} functionals")
    return alpha, functionals


def _passes(record: Reader, block: Block) -> tuple[Hints, Hints]:
    if not record.has("domain") or "affine" not in record.text("domain"):
        raise record.fail("has passes, which only affine forms make")
    both = record.reader("passes").exactly("train", "infer")
    return _hints(both, "train", block), _hints(both, "infer", block)


def _hints(record: Reader, kernel: str, block: Block) -> Hints:
    rows = {node.name: math.prod(node.shape[:-1]) for node in block.nodes}
    found: dict[Pass, tuple[int, ...]] = {}
    for item in record.items(kernel):
        entry = Reader(item, f"{record.place} {kernel}", "document/passes")
        entry.exactly("at", "of", "kind", "stop", "rows")
        named = Pass(
            entry.text("at"),
            entry.text("of"),
            entry.choice("kind", _PASSES),
            entry.choice("stop", _STOPS),
        )
        if named.at not in rows or named.of not in rows or named in found:
            raise entry.fail(f"of {named.of[:80]!r}: a node is unknown, or the pass named twice")
        found[named] = runs = entry.integers("rows", 0)
        rising = all(one < two for one, two in itertools.pairwise(runs))
        if not runs or len(runs) % 2 or not rising or runs[-1] > rows[named.of]:
            raise entry.fail("must have rows of the node, first and end in turn")
    return found


def _region(record: Reader, block: Block) -> CaseRegion:
    record.reason = "document/region"
    return dataclasses.replace(_inputs(record, block), weights=_weights(record))


def _weights(record: Reader) -> Fraction:
    """Return ρ of a region around the weights in canonical spelling; 0 where there is none."""
    if not record.has("weights"):
        return Fraction(0)
    try:
        rho = parse_real(record.text("weights"))
    except Rejected:
        rho = Fraction(0)
    if not 0 < rho <= WIDEST or real_text(rho) != record.text("weights"):
        raise record.fail(f"must have weights above 0 and up to {WIDEST}, as a decimal or ratio")
    return rho


def _inputs(record: Reader, block: Block) -> CaseRegion:
    kind = record.choice("kind", _KINDS)
    if block.input_shape is None:
        record.exactly("kind", "ids", optional=("weights",))
        ids = record.integers("ids", 0)
        if kind != "points" or not ids:
            raise record.fail("on token ids must be points with at least one id")
        _check_ids(ids, block, record)
        return CaseRegion(kind, None, None, ids)
    shape = block.input_shape
    if kind == "rows":
        record.exactly("kind", "centre", "radius", "longest", optional=("tables",))
        shape = (1, *shape[1:])
    else:
        record.exactly("kind", "centre", "radius", optional=("weights",))
    centre = parse_array(record.raw("centre"), f"{record.place}.centre")
    radius = parse_array(record.raw("radius"), f"{record.place}.radius")
    if centre.dtype != "float64" or centre.shape != shape:
        raise record.fail("must have a float64 centre of the input's shape")
    if radius.dtype != "float64" or not _spreads(radius.shape, centre.shape):
        raise record.fail("must have a float64 radius of the input's shape or of shape [1, 1]")
    if kind == "points" and any(radius.data[i] for i in range(len(radius.data))):
        raise record.fail("of kind points must have radius zero")
    if not all(_finite(v) for v in numbers_of(centre)):
        raise record.fail("must have a finite centre")
    if not all(_finite(v) and v >= 0 for v in numbers_of(radius)):
        raise record.fail("must have a finite radius, nowhere negative")
    if kind != "rows":
        return CaseRegion(kind, centre, radius, None)
    longest = record.integer("longest", 1)
    if longest > MOST_ROWS:
        raise record.fail(f"must not speak of more than {MOST_ROWS} rows")
    return CaseRegion(kind, centre, radius, None, longest, parse_tables(record, block, longest))


def _spreads(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return shape in (full, (1,) * len(full))


def numbers_of(array: Array) -> tuple[float, ...]:
    """Return the doubles of an array, row by row."""
    return struct.unpack(f"<{len(array.data) // 8}d", array.data)


def _finite(value: float) -> bool:
    return value - value == 0


def _check_ids(ids: tuple[int, ...], block: Block, record: Reader) -> None:
    """Refuse a region whose ids no embedding that the output depends on looks up."""
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
        raise Rejected("document/witness", f"{record.place} lacks the witness of the output")
    return tuple(found.values())


def claim_of(record: Reader, functional: Functional) -> float | None:
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


def digest_of(record: Reader, name: str) -> str:
    """Return a field that holds a sha256 in hexadecimal."""
    text = record.text(name)
    if not _SHA256.match(text):
        raise record.fail(f"{name!r} must be a sha256 in hexadecimal")
    return text
