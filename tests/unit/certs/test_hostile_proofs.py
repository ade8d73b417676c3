"""Hostile proofs are rejected with a reason, quickly, and in little memory."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.check import available, boxes, forms
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.graphs.strict_json import MOST_VALUES
from tests.support import caches, proofs, sequences
from tests.support.mutation.bases import made, repaired
from tests.support.proofs import array
from tests.support.rationals.exact import recheck_exactly

Document = dict[str, Any]
MANY = 10**6


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a proof and its checkpoint."""
    return made("piecewise and tanh, affine", tmp_path_factory.mktemp("good"))[:2]


def nested(depth: int, kind: str) -> str:
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


def node(document: Document) -> Document:
    """Return the second node of the graph."""
    graph: Document = next(iter(document["graphs"].values()))["graph"]
    found: Document = graph["nodes"][1]
    return found


def with_text(document: Document, put: Callable[[Document], None], text: str) -> bytes:
    """Return the document with this text in place of the marker that `put` inserts."""
    changed = copy.deepcopy(document)
    put(changed)
    return json.dumps(changed).replace('"@@"', text).encode()


def at_attrs(document: Document) -> None:
    node(document)["attrs"] = "@@"


def at_name(document: Document) -> None:
    node(document)["name"] = "@@"


def at_block(document: Document) -> None:
    document["block"] = "@@"


def at_case(document: Document) -> None:
    document["cases"][0]["name"] = "@@"


@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.parametrize("depth", [100, 300, 500, 700, 900, 990, 5000, MANY])
@pytest.mark.parametrize("put", [at_attrs, at_block])
def test_deep_nesting_is_rejected(
    good: tuple[Document, Path], put: Callable[[Document], None], depth: int, kind: str
) -> None:
    outcome = recheck(with_text(good[0], put, nested(depth, kind)), good[1])
    assert not outcome.ok
    assert outcome.reason in ("document/json", "document/field", "graph/digest"), outcome


@pytest.mark.parametrize("text", [r'"\ud800"', r'"a\uDFFFb"', r'{"\ud800": 1}', r'"\udc00\ud800"'])
@pytest.mark.parametrize("put", [at_attrs, at_name, at_block, at_case])
def test_lone_surrogates_are_rejected(
    good: tuple[Document, Path], put: Callable[[Document], None], text: str
) -> None:
    assert recheck(with_text(good[0], put, text), good[1]).reason == "document/json"


def test_surrogate_pair_is_a_character(good: tuple[Document, Path]) -> None:
    outcome = recheck(with_text(good[0], at_case, r'"\ud835\udd01"'), good[1])
    assert outcome.ok, outcome


def long_lists(document: Document) -> dict[str, tuple[Callable[[Document], None], Any, str]]:
    def at(*path: Any) -> Callable[[Document], None]:
        def put(changed: Document) -> None:
            digest = next(iter(changed["graphs"]))
            place: Any = changed
            for key in path[:-1]:
                place = place[digest if key == "DIGEST" else key]
            place[path[-1]] = "@@"

        return put

    graph = ("graphs", "DIGEST", "graph")
    witness = document["cases"][0]["witness"][0]
    return {
        "inputs": (at(*graph, "nodes", 1, "inputs"), ["n0_input"] * MANY, "graph/"),
        "nodes": (at(*graph, "nodes"), [1] * MANY, "graph/"),
        "shape": (at(*graph, "nodes", 1, "shape"), [1] * MANY, "graph/"),
        "huge shape": (at(*graph, "nodes", 1, "shape"), [2**53 - 1] * MANY, "graph/"),
        "array shape": (
            at("cases", 0, "region", "centre", "shape"),
            [2**53 - 1] * MANY,
            "document/array",
        ),
        "witness": (at("cases", 0, "witness"), [witness] * MANY, "document/witness"),
        "cases": (at("cases"), [document["cases"][0]] * 20_000, "document/cases"),
        "keys": (at("parameters"), {str(k): "0" * 64 for k in range(MANY)}, "document/parameters"),
        "a key": (at("parameters"), {"x" * 10**7: "0" * 64}, "document/parameters"),
        "digits": (at("functional", "k"), "9" * MANY, "document/json"),
        "a name": (at("block"), "x" * 10**7, "graph/block"),
        "integer": (at("functional", "k"), 10**4000, "document/json"),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", list(long_lists({"cases": [{"witness": [0]}]})))
def test_very_long_values_are_rejected(good: tuple[Document, Path], what: str) -> None:
    put, value, reason = long_lists(good[0])[what]
    text = value if what == "digits" else json.dumps(value)
    outcome = recheck(with_text(good[0], put, text), good[1])
    assert not outcome.ok
    assert outcome.reason.startswith(reason), outcome
    assert len(outcome.detail) <= 2000


def test_too_many_values_are_rejected() -> None:
    data = b"[" + b"[]," * (MOST_VALUES + 1) + b"[]]"
    tracemalloc.start()
    outcome = recheck(data, Path("none"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (outcome.ok, outcome.reason) == (False, "document/json")
    assert peak < 2**20


@pytest.mark.parametrize("key", ["\x1b[2J", "0" * 63, "A" * 64, "0" * 64 + "\n", ""])
def test_graphs_must_be_keyed_by_digest(good: tuple[Document, Path], key: str) -> None:
    changed = copy.deepcopy(good[0])
    changed["graphs"] = {key: next(iter(changed["graphs"].values()))}
    outcome = recheck(proofs.dump(changed), good[1])
    assert (outcome.ok, outcome.reason) == (False, "graph/digest")
    assert "\x1b" not in outcome.detail


SHAPES: list[list[int]] = [
    [0], [0, 2**53 - 1], [2**31, 2**31, 0], [2**32, 2**32], [1] * 9, [2**53 - 1], [3, -1],
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["centre", "radius", "table"])
def test_empty_and_oversized_shapes_are_rejected(
    good: tuple[Document, Path], name: str, shape: list[int]
) -> None:
    changed = copy.deepcopy(good[0])
    record = {"dtype": "float64", "shape": shape, "data": ""}
    if name == "table":
        next(iter(changed["graphs"].values()))["constants"]["table"] = {
            **record,
            "dtype": "float32",
        }
        changed = repaired(changed, True)
    else:
        changed["cases"][0]["region"][name] = record
    outcome = recheck(proofs.dump(changed), good[1])
    assert not outcome.ok
    assert outcome.reason in ("document/array", "document/region", "graph/shape"), outcome


@pytest.mark.parametrize("dims", [[1, 2], [2, 1], [1, 2**31], [0, 1, 2], [0], [0, 0], [-3, 0]])
def test_invalid_dimensions_are_rejected(
    tmp_path: Path, dims: list[int], good: tuple[Document, Path]
) -> None:
    """An order of two dimensions names 0 and 1 once each; 2 is not an alias of 0."""
    graph = proofs.Graph((2, 2))
    x = graph.add("input", [], (2, 2))
    graph.add("view", [x], (2, 2), split=[2, 2], order=dims)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, {"w": np.zeros((1, 1), dtype=np.float32)})
    numerics = proofs.numerics()
    for domain in ("interval", "affine"):
        document = proofs.document(graph, numerics, numerics, sha256, np.zeros((2, 2)))
        document["cases"][0]["domain"] = domain
        outcome = recheck(proofs.dump(document), path)
        assert (outcome.ok, outcome.reason) == (False, "graph/field"), outcome
    document["cases"][0]["domain"] = "interval"
    assert recheck_exactly(proofs.dump(document), path).reason == "graph/field"


def vast(folder: Path, layers: int, domain: str) -> tuple[bytes, Path]:
    """Return a proof whose nodes of 2^26 elements, 0.5 GiB an array, are all live at once."""
    side = 2**13
    graph = proofs.Graph((1, 1))
    x = graph.add("input", [], (1, 1))
    wide = graph.expand(x, (side, side))
    parts = [graph.add("scale", [wide], (side, side), factor=1.5 + k) for k in range(layers)]
    while len(parts) > 1:
        parts.append(graph.add("add", [parts.pop(0), parts.pop(0)], (side, side)))
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, {"w": np.zeros((1, 1), dtype=np.float32)})
    numerics = proofs.numerics()
    document = proofs.document(graph, numerics, numerics, sha256, np.zeros((1, 1)))
    document["cases"][0]["domain"] = domain
    document["cases"][0]["region"]["radius"] = array(np.zeros((1, 1)))
    return proofs.dump(document), path


@pytest.mark.parametrize("domain", ["interval", "affine"])
def test_proof_that_exceeds_memory_is_refused_early(tmp_path: Path, domain: str) -> None:
    data, path = vast(tmp_path, 4000, domain)
    outcome = recheck(data, path)
    assert (outcome.ok, outcome.reason) == (False, "graph/size"), outcome
    assert "GiB" in outcome.detail
    assert outcome.seconds < 60


@pytest.mark.full
def test_failed_allocation_is_a_rejection(tmp_path: Path) -> None:
    """A process limited to 2 GiB, and a graph that takes slightly more than estimated."""
    data, path = vast(tmp_path, 1, "affine")
    (tmp_path / "proof.json").write_bytes(data)
    program = (
        "import resource, sys, pathlib\n"
        "from kcdsl_certs.recheck import recheck\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
        "found = recheck(pathlib.Path(sys.argv[1]).read_bytes(), pathlib.Path(sys.argv[2]))\n"
        "print(found.ok, found.reason)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "proof.json"), str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert ran.stdout.split() == ["False", "check/memory"], ran


def test_memory_estimate_is_a_lower_bound(good: tuple[Document, Path]) -> None:
    """Nothing that fits may be refused: an estimate is at most the size of a check's arrays."""
    from kcdsl_certs.recheck.affine.form import Form
    from kcdsl_certs.recheck.affine_walk import walk
    from kcdsl_certs.recheck.derivation import Derivation
    from kcdsl_certs.recheck.interval.tensors import read

    proof = parse(proofs.dump(good[0]))
    block = proof.graphs[proof.cases[0].graph]
    scene = Derivation(proof, read(good[1]).tensors).problem(proof.cases[0])
    found = walk(scene, scene.train).forms.values()
    held = sum(f.reference.nbytes + f.error_bound.nbytes for f in found if isinstance(f, Form))
    assert 0 < forms(block) <= held
    most = max(node.shape[0] * node.shape[-1] for node in block.nodes) * 48
    assert most / 4 <= boxes(block) <= 48 * sum(int(np.prod(n.shape)) for n in block.nodes)
    assert available() > 2**28


# --- graphs that no exporter writes ---------------------------------------------------------------

Build = Callable[[proofs.Graph, str], object]
SHAPE = (2, 4)
FLOAT64 = {"compute": "float64", "accumulate": "float64"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the checkpoints of this module."""
    return tmp_path_factory.mktemp("graphs")


def proof_of(
    folder: Path,
    build: Build,
    domain: str = "interval",
    *,
    centre: Any = 0.0,
    radius: float = 1.0,
    behind: bool = False,
    rho: str | None = None,
    chance: int | None = None,
    **kernel: Any,
) -> tuple[Document, Path]:
    """Return a proof about a built graph and its checkpoint.

    With `behind` the graph has a norm before, which only affine forms bound: the interval domain
    ends there, and the rules of affine forms see the rest alone.
    """
    graph = proofs.Graph(SHAPE)
    x = graph.add("input", [], SHAPE)
    if behind:
        one = graph.add("shift", [graph.add("sub", [x, x], SHAPE)], SHAPE, offset=1.0)
        graph.add("rms_norm", [one], SHAPE, eps=0.0)
    build(graph, x)
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors or {"unread": np.zeros(1)})
    numerics, middle = proofs.numerics(**kernel), np.broadcast_to(np.asarray(centre), SHAPE)
    document = proofs.document(graph, numerics, numerics, sha256, middle, radius)
    case = document["cases"][0]
    case["domain"] = domain
    if rho is not None:
        case["region"]["weights"] = rho
    if chance is not None:
        case["chance"] = {"alpha": "0.05", "functionals": chance}
    return document, path


def routed(g: proofs.Graph, x: str) -> str:
    """Add a route between x and x + 1, which overlap."""
    apart = g.constant("apart", np.array([[1.0, 0.0]], dtype=np.float32))
    logits = g.add("add", [g.slice(x, dim=1, start=0, stop=1), apart], (2, 2))
    return g.add("route", [logits], (2, 2), experts=[[0], [0]])


def mask(g: proofs.Graph, shape: tuple[int, ...] = SHAPE) -> str:
    return g.constant("mask", np.ones(shape, dtype=bool))


def table(g: proofs.Graph, shape: tuple[int, ...] = (4,), value: float = 0.5) -> str:
    return g.constant(f"table{len(g.nodes)}", np.full(shape, value, dtype=np.float32))


def square(g: proofs.Graph) -> str:
    return g.param("w", np.eye(4))


def row(g: proofs.Graph, x: str) -> str:
    return g.reshape(g.slice(x, dim=0, start=0, stop=1), (4,))


def number(g: proofs.Graph, x: str) -> str:
    return g.reshape(g.slice(row(g, x), dim=0, start=0, stop=1), ())


def of(op: str, *operands: Any, shape: tuple[int, ...] = SHAPE, **attrs: Any) -> Build:
    """Return the builder of one operation on operands: "x", names or builders of others."""

    def build(g: proofs.Graph, x: str) -> str:
        made = [x if o == "x" else o(g, x) if o in (row, number) else o(g) for o in operands]
        return g.add(op, made, shape, **attrs)

    return build


def tables(shape: tuple[int, ...], value: float = 0.5) -> Callable[[proofs.Graph], str]:
    return lambda g: table(g, shape, value)


def masks(*shape: int) -> Callable[[proofs.Graph], str]:
    return lambda g: mask(g, shape)


def weights(*shape: int) -> Callable[[proofs.Graph], str]:
    return lambda g: g.param("w", np.ones(shape))


def narrow(g: proofs.Graph, x: str) -> str:
    """Add a rotation of three elements."""
    part = g.slice(x, dim=1, start=0, stop=3)
    return g.add("rope", [part, table(g, (3,)), table(g, (3,))], (2, 3))


def unlike(g: proofs.Graph, x: str) -> str:
    """Add a linear whose weight is computed."""
    return g.add("linear", [x, g.add("matmul", [g.permute(x, [1, 0]), x], (4, 4))], SHAPE)


def pinned(g: proofs.Graph, x: str) -> str:
    """Add a constant pinned to a format that does not hold it."""
    tenth = g.constant("tenth", np.full(4, 0.1, dtype=np.float32), format="bfloat16")
    return g.add("add", [x, tenth], SHAPE)


def wide(kind: type) -> Build:
    def build(g: proofs.Graph, x: str) -> str:
        return g.add("add", [x, g.constant("wide", np.ones(4, dtype=kind))], SHAPE)

    return build


FIT, KNOWN = "does not fit", "must be known"
MISFITS: dict[str, tuple[Build, str, str]] = {
    "a mask that is added": (of("add", "x", mask), "rule/mask", "read as numbers"),
    "a product with a mask": (of("matmul", "x", masks(4, 4)), "rule/mask", "with a mask"),
    "a mask of a product": (of("matmul", masks(2, 2), "x"), "rule/mask", "with a mask"),
    "a mask of numbers": (of("softmax", "x", "x"), "rule/mask", "must be a bool constant"),
    "a mask of other rows": (of("softmax", "x", masks(3, 4)), "graph/shape", "mask does not fit"),
    "a mask of more dimensions": (
        of("softmax", "x", masks(3, 2, 4), shape=(3, 2, 4)),
        "graph/shape",
        "mask does not fit",
    ),
    "a computed weight": (unlike, "rule/weight", "must be a parameter"),
    "a weight that is a constant": (
        of("linear", "x", tables((4, 4))),
        "rule/weight",
        "must be a parameter",
    ),
    "a weight of other columns": (of("linear", "x", weights(4, 3)), "graph/shape", FIT),
    "a weight of one column": (of("linear", "x", weights(4, 1)), "graph/shape", FIT),
    "a vector into a linear": (of("linear", row, square, shape=(4,)), "graph/shape", FIT),
    "a computed bias": (of("linear", "x", square, row), "rule/weight", KNOWN),
    "a bias of one number": (of("linear", "x", square, tables((1,))), "graph/shape", FIT),
    "a bias without dimensions": (of("linear", "x", square, tables(())), "graph/shape", FIT),
    "a bias for every row": (of("linear", "x", square, tables(SHAPE)), "graph/shape", FIT),
    "a computed weight of a norm": (of("rms_norm", "x", row, eps=1e-3), "rule/weight", KNOWN),
    "a weight of a norm of one number": (
        of("rms_norm", "x", tables((1,)), eps=1e-3),
        "graph/shape",
        FIT,
    ),
    "a bias of a norm for every row": (
        of("layer_norm", "x", tables((4,)), tables(SHAPE), eps=1e-3),
        "graph/shape",
        FIT,
    ),
    "a product of other sizes": (of("matmul", "x", "x"), "graph/shape", "no matrix product"),
    "a product with one row": (
        of("matmul", "x", tables((1, 4))),
        "graph/shape",
        "no matrix product",
    ),
    "a product with a vector": (of("matmul", "x", row), "graph/shape", "no matrix product"),
    "a rotation of an odd number": (narrow, "rule/rope", "even last dimension"),
    "a rotation by computed cosines": (of("rope", "x", "x", table), "rule/rope", "known tables"),
    "a rotation by computed sines": (of("rope", "x", table, "x"), "rule/rope", "known tables"),
    "a rotation of a number": (
        of("rope", tables(()), table, table, shape=(4,)),
        "graph/shape",
        "too few dimensions",
    ),
    "a norm of a number": (
        of("rms_norm", tables(()), shape=(4,), eps=1e-3),
        "graph/shape",
        "too few dimensions",
    ),
    "a softmax of a number": (
        of("softmax", tables(()), shape=(4,)),
        "graph/shape",
        "too few dimensions",
    ),
    "parts of other ranks": (of("concat", "x", row, dim=0), "graph/shape", "concat do not fit"),
    "parts beyond the dimensions": (
        of("concat", "x", "x", dim=2),
        "graph/shape",
        "concat do not fit",
    ),
    "a constant of float64": (wide(np.float64), "graph/field", "neither float32 nor bool"),
    "a constant of int64": (wide(np.int64), "graph/field", "neither float32 nor bool"),
    "a constant between numbers of its format": (pinned, "graph/field", "is not one of bfloat16"),
    "a table that is a constant": (
        of("embedding", tables((4, 4)), ids=[0, 1]),
        "rule/weight",
        "must be a parameter",
    ),
    "a table without ids": (of("embedding", square, ids=[]), "graph/shape", "ids and a matrix"),
    "a table that is a vector": (
        of("embedding", weights(4), shape=(2,), ids=[0, 1]),
        "graph/shape",
        "ids and a matrix",
    ),
    "an input in a role": (of("input", role="scores"), "rule/input", "in a role"),
    "a route of a vector": (
        of("route", row, shape=(4,), experts=[[0]]),
        "graph/shape",
        "logits [T, E]",
    ),
    "a route of other rows": (
        of("route", tables((1, 4)), experts=[[0], [0]]),
        "graph/shape",
        "the shape of its logits",
    ),
    "a division by zero": (of("divide", "x", divisor=0.0), "graph/field", "division by zero"),
    "a quantiser in a role": (
        of("quantise", "x", role="scores", tensor="t"),
        "graph/field",
        "a role or a format",
    ),
    "a quantiser in a format": (
        of("quantise", "x", format="float32", tensor="t"),
        "graph/field",
        "a role or a format",
    ),
}


@pytest.mark.parametrize("domain", ["interval", "affine"])
@pytest.mark.parametrize("name", MISFITS)
def test_operands_without_a_rule_are_refused(folder: Path, name: str, domain: str) -> None:
    """The rules of both domains refuse them: numpy would broadcast many of these operands."""
    build, reason, detail = MISFITS[name]
    document, path = proof_of(folder, build, domain, behind=domain == "affine")
    outcome = recheck(proofs.dump(document), path)
    assert (outcome.ok, outcome.reason) == (False, reason), outcome
    assert detail in outcome.detail


def test_affine_forms_go_past_a_norm_without_boxes(folder: Path) -> None:
    """The premise of the cases above: the interval domain ends at the norm of x - x + 1."""
    scaled = of("scale", "x", factor=2.0)
    document, path = proof_of(folder, scaled, "interval", behind=True)
    assert recheck(proofs.dump(document), path).reason == "bound/not-finite"
    document, path = proof_of(folder, scaled, "affine", behind=True)
    assert recheck(proofs.dump(document), path).ok


def rerouted(experts: int) -> Build:
    def build(g: proofs.Graph, x: str) -> str:
        one = g.reshape(g.slice(row(g, x), dim=0, start=0, stop=1), (1, 1))
        return g.add("route", [g.expand(one, (1, experts))], (1, experts), experts=[[0]])

    return build


def read_twice(g: proofs.Graph, x: str) -> str:
    """Add a square that is read in two versions, by functions that do not exceed 1."""
    y = g.add("mul", [x, x], SHAPE)
    return g.add("add", [g.add("tanh", [y], SHAPE), g.add("tanh", [y], SHAPE)], SHAPE)


def rooted(g: proofs.Graph, x: str) -> str:
    """Add a norm that is written out, whose root is stored in float16."""
    formats = {"square": "float32", "mean": "float32", "shift": "float32", "sqrt": "float16"}
    parts = [[part, form] for part, form in {**formats, "quotient": "float32"}.items()]
    attrs = {"eps": 0.0, "form": "written", "parts": parts}
    return g.add("rms_norm", [x], SHAPE, "", "float32", **attrs)


BYTES = {"weights": ("int8", "per_channel"), "activations": ("uint8", "per_tensor")}
SQUARED = of("mul", "x", "x")
ENDLESS = float(np.finfo(np.float64).max)
BOUNDLESS: dict[str, tuple[Build, dict[str, Any], str, str]] = {
    "a rotation beyond float16": (
        of("rope", "x", tables((4,), 300.0), table),
        {"radius": 300.0, "compute": "float16"},
        "bound/overflow",
        "a product may overflow float16",
    ),
    "a softmax of scores far apart": (
        of("softmax", "x"),
        {"centre": [0.0, 1e12, 2e12, 0.0], "radius": 0.0},
        "bound/not-finite",
        "the rounding of a softmax has no bound",
    ),
    "a softmax of an exp without digits": (
        of("softmax", "x"),
        {"exp_ulps": 2**23},
        "bound/not-finite",
        "the rounding of a softmax has no bound",
    ),
    "a mean far above the variance": (
        of("layer_norm", "x", eps=0.0),
        {"centre": [1e5, 1e5 + 1, 1e5 + 2, 1e5 + 3], "radius": 0.0},
        "bound/not-finite",
        "the mean is too large against the variance",
    ),
    "a root lost in float16": (
        rooted,
        {"centre": 1e-8, "radius": 0.0},
        "bound/not-finite",
        "the root may be lost",
    ),
    "a route by an inexact exp": (
        routed,
        {"exp_ulps": 65},
        "rule/route",
        "more experts or exp_ulps",
    ),
    "a route of many experts": (rerouted(2049), {}, "rule/route", "more experts or exp_ulps"),
    "a route around weights": (routed, {"rho": "0.25"}, "rule/route", "around weights"),
    "sums of bytes around weights": (
        of("linear", "x", square),
        {"rho": "0.25", "byte_sums": "int16_pairs", **BYTES},
        "rule/weight",
        "sums of bytes",
    ),
}
IN_FORMS: dict[str, tuple[Build, dict[str, Any], str, str]] = {
    "a mean beyond float64": (
        of("layer_norm", "x", eps=0.0),
        {"centre": [1e8, 1e8 + 1e-7, 1e8, 1e8 - 1e-7], "radius": 0.0},
        "bound/not-finite",
        "the mean is too large against the variance",
    ),
    "a square beyond steps of float16": (
        SQUARED,
        {"centre": 1e3, "compute": "float16", "casts": "nearest"},
        "bound/overflow",
        "element [0, 0] may overflow float16",
    ),
    "a square beyond float16 that is read twice": (
        read_twice,
        {"centre": 1e3, "compute": "float16"},
        "bound/overflow",
        "element [0, 0] may overflow float16",
    ),
    "a square beyond the range of forms": (
        SQUARED,
        {"centre": 1e50, **FLOAT64},
        "bound/not-finite",
        "the value has no finite bound",
    ),
    "a region up to infinity": (
        of("relu", "x"),
        {"centre": 1e308, "radius": 1e308, **FLOAT64},
        "bound/not-finite",
        "the error has no finite bound",
    ),
    "a region of all numbers": (
        of("neg", "x"),
        {"radius": ENDLESS, **FLOAT64},
        "bound/not-finite",
        "a functional has no finite bound",
    ),
    "sums of bytes around weights, in forms": (
        of("linear", "x", square),
        {"rho": "0.25", "byte_sums": "int16_pairs", "behind": True, **BYTES},
        "rule/weight",
        "weights that are not known",
    ),
    "a functional more than claimed": (
        of("scale", "x", factor=3.0),
        {"chance": 1},
        "bound/chance",
        "more than 1 functionals",
    ),
    "a route by chance": (routed, {"chance": 2**20}, "rule/route", "independent roundings"),
}


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        *((n, d) for n in BOUNDLESS for d in ("interval", "affine")),
        *((n, "affine") for n in IN_FORMS),
    ],
)
def test_values_without_a_bound_are_refused(folder: Path, name: str, domain: str) -> None:
    build, more, reason, detail = (BOUNDLESS | IN_FORMS)[name]
    document, path = proof_of(folder, build, domain, **more)
    outcome = recheck(proofs.dump(document), path)
    assert (outcome.ok, outcome.reason) == (False, reason), outcome
    assert detail in outcome.detail


def versions(names: tuple[str, str, str]) -> Build:
    """Return the builder of two results that are each read in several versions: a small one, whose
    first reader has the second name, and a large one, which is the output after a linear."""

    def build(g: proofs.Graph, x: str) -> str:
        def named(name: str, made: str) -> str:
            g.nodes[-1]["name"] = name
            return name

        small = named(names[0], g.add("scale", [x], SHAPE, factor=1e-6))
        named(names[1], g.add("tanh", [small], SHAPE))
        large = named(names[2], g.add("scale", [x], SHAPE, factor=100.0))
        for op, read in (("gelu", small), ("tanh", large), ("gelu", large)):
            g.add(op, [read], SHAPE)
        return g.add("linear", [large, square(g)], SHAPE)

    return build


def test_names_of_readings_are_no_names_of_nodes(folder: Path) -> None:
    """A reading of "a" by the second node would have the name of the stored value of the third."""
    kernel: dict[str, Any] = {"compute": "bfloat16", "centre": 1.0, "radius": 2.0**-10}
    document, path = proof_of(folder, versions(("a", "b", "c")), "affine", **kernel)
    fine = recheck(proofs.dump(document), path)
    assert fine.ok, fine
    assert float.fromhex(fine.bound) > 0.5
    for names in (("a", "b\x00", "a\x000\x00b"), ("a", "b", "a\x000\x00b"), ("a", "b", "c\x00")):
        document, path = proof_of(folder, versions(names), "affine", **kernel)
        outcome = recheck(proofs.dump(document), path)
        assert (outcome.ok, outcome.reason) == (False, "graph/field"), outcome
        assert "without NUL" in outcome.detail


@pytest.mark.parametrize("domain", ["interval", "affine", "planes"])
@pytest.mark.parametrize("functional", ["inf", "2", "no_flip"])
def test_outputs_have_dimensions(folder: Path, domain: str, functional: str) -> None:
    for build in (number, of("constant", shape=(), key="one"), of("neg", number, shape=())):
        document, path = proof_of(folder, build, domain)
        document["functional"]["kind"] = functional
        if functional == "no_flip":
            document["claim"] = document["cases"][0]["claim"] = "held"
        outcome = recheck(proofs.dump(document), path)
        assert (outcome.ok, outcome.reason) == (False, "graph/field"), outcome
        assert "an output without dimensions" in outcome.detail


def test_planes_have_no_rule_for_numbers_without_dimensions(folder: Path) -> None:
    def scaled(g: proofs.Graph, x: str) -> str:
        return g.add("mul", [g.add("neg", [table(g, ())], ()), x], SHAPE)

    for domain in ("interval", "affine", "planes"):
        document, path = proof_of(folder, scaled, domain)
        outcome = recheck(proofs.dump(document), path)
        assert outcome.ok == (domain != "planes"), outcome
    assert outcome.reason == "document/domain"
    assert "numbers without dimensions" in outcome.detail


def turned(*transposed: Any) -> Build:
    """Return the builder of linears that read one weight, with these attributes."""

    def build(g: proofs.Graph, x: str) -> str:
        g.tensors["w"] = np.eye(4, dtype=np.float32)
        for value in transposed:
            more = {} if value is None else {"transposed": value}
            x = g.add("linear", [x, g.add("param", [], (4, 4), key="w", **more)], SHAPE)
        return x

    return build


@pytest.mark.parametrize(
    ("build", "detail"),
    [
        *((turned(value), "must be true or absent") for value in (1, False, "true", [True])),
        (turned(None, True), "transposed and as it is"),
        (turned(True, None), "transposed and as it is"),
    ],
)
def test_weights_are_transposed_in_one_way(folder: Path, build: Build, detail: str) -> None:
    document, path = proof_of(folder, build)
    outcome = recheck(proofs.dump(document), path)
    assert (outcome.ok, outcome.reason) == (False, "graph/field"), outcome
    assert detail in outcome.detail


# --- caches and any length ------------------------------------------------------------------------


def at(op: str, number: int = 0) -> Callable[[proofs.Graph], Document]:
    return lambda graph: [n for n in graph.nodes if n["op"] == op][number]


CACHED: dict[str, tuple[Callable[[proofs.Graph], object], str, str]] = {
    "a softmax outside": (
        lambda g: at("softmax")(g).update(role=""),
        "rule/cache",
        "is of no attention",
    ),
    "a cache in a role": (
        lambda g: at("cache")(g).update(role="scores"),
        "rule/cache",
        "none of keys or values",
    ),
    "a cache in a format": (
        lambda g: at("cache", 1)(g).update(format="float32"),
        "rule/cache",
        "none of keys or values",
    ),
    "a cache of a vector": (
        lambda g: at("cache")(g).update(shape=[4]),
        "rule/cache",
        "none of keys or values",
    ),
    "a cache of two": (
        lambda g: at("cache")(g).update(inputs=2 * at("cache")(g)["inputs"]),
        "rule/cache",
        "none of keys or values",
    ),
    "a linear without a weight": (
        lambda g: [n.update(inputs=n["inputs"][:1]) for n in g.nodes if n["op"] == "linear"],
        "graph/field",
        "is linear in no weight",
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_caches_of_something_else_are_refused(folder: Path, name: str) -> None:
    graph = caches.with_caches(proofs.attention(np.random.default_rng(3)))
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    change, reason, detail = CACHED[name]
    for changed in (False, True):
        if changed:
            change(graph)
        numerics = proofs.numerics(kv_cache=caches.CACHES["int8 static"])
        document = proofs.document(graph, numerics, numerics, sha256, np.zeros((5, 8)), 0.5)
        outcome = recheck(proofs.dump(document), path)
        assert outcome.ok == (not changed), outcome
    assert outcome.reason == reason, outcome
    assert detail in outcome.detail


def context_of_tables(g: proofs.Graph, x: str) -> str:
    y = g.add("matmul", [table(g, (1, 4)), table(g, (4, 4))], (1, 4), role="context")
    return g.add("add", [x, y], SHAPE)


def longer(g: proofs.Graph, x: str) -> str:
    g.input_shape = (3, 4)
    return x


def broader(g: proofs.Graph, x: str) -> str:
    g.input_shape = (2, 1)
    return x


@pytest.mark.parametrize(
    ("build", "reason", "detail"),
    [
        (of("add", "x", table, shape=(4,)), "graph/shape", "more dimensions than their result"),
        (context_of_tables, "graph/rows", "without its softmax"),
        (longer, "graph/shape", "does not have the input's shape"),
        (broader, "graph/shape", "does not have the input's shape"),
    ],
)
def test_shapes_of_any_length_are_compared(
    folder: Path, build: Build, reason: str, detail: str
) -> None:
    graph = proofs.Graph(SHAPE)
    build(graph, graph.add("input", [], SHAPE))
    path, numerics = folder / "model.safetensors", proofs.numerics()
    sha256 = proofs.write_safetensors(path, {"unread": np.zeros(1)})
    assert graph.input_shape is not None
    centre = np.zeros((1, graph.input_shape[1]))
    document = sequences.document(graph, {}, (numerics, numerics), sha256, centre, 1.0, 9)
    outcome = recheck(proofs.dump(document), path)
    assert (outcome.ok, outcome.reason) == (False, reason), outcome
    assert detail in outcome.detail
