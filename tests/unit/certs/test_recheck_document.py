"""A valid proof is accepted; every change of it is rejected with the right code."""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import rfc8785
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.graphs.strict_json import canonical
from kcdsl_certs.recheck.interval import parameters
from kcdsl_certs.recheck.interval.tensors import read
from tests.support.rationals.exact import recheck_exactly

Document = dict[str, Any]


def _support(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"recheck_support_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


proofs = _support("proofs")
INFLATION = 1 + 2.0**-30


def claimed(document: Document, path: Path) -> Document:
    """Return the document with the derived claims and witnesses, inflated."""
    proof = parse(proofs.dump(document))
    doubles = Derivation(proof, read(path).tensors)
    document = copy.deepcopy(document)
    largest = 0.0
    for case, record in zip(proof.cases, document["cases"], strict=True):
        bound, sizes = doubles.derive(case)
        record["claim"] = (bound * INFLATION).hex()
        largest = max(largest, bound * INFLATION)
        record["witness"] = [
            {"node": n, "value": (v * INFLATION).hex(), "drift": (d * INFLATION).hex()}
            for n, (v, d) in sizes.items()
        ]
    document["claim"] = largest.hex()
    return document


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a proof of two cases on one attention block, and its checkpoint."""
    rng = np.random.default_rng(8)
    graph = proofs.attention(rng)
    path = tmp_path_factory.mktemp("proof") / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = rng.standard_normal(graph.input_shape).astype(np.float32)
    train = proofs.numerics("float32", "nearest")
    infer = proofs.numerics("bfloat16", "any", style="fused")
    document = proofs.document(graph, train, infer, sha256, centre, 2.0**-12)
    other = proofs.document(graph, train, infer, sha256, centre + 1, 0.0)["cases"][0]
    document["cases"].append({**other, "name": "case-1"})
    return claimed(document, path), path


def test_unchanged_proof_is_accepted(good: tuple[Document, Path]) -> None:
    document, path = good
    outcome = recheck(proofs.dump(document), path)
    assert outcome.ok, outcome
    assert outcome.reason == "ok"
    assert outcome.nodes == 2 * len(document["cases"][0]["witness"])
    bound = max(float.fromhex(case["claim"]) for case in document["cases"])
    assert bound / INFLATION**2 < float.fromhex(outcome.bound) <= bound
    assert outcome.seconds > 0


def lower(text: str) -> str:
    return (float.fromhex(text) * (1 - 2.0**-20)).hex()


def the_graph(document: Document) -> Document:
    return next(iter(document["graphs"].values()))["graph"]


def put(*path: Any, to: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        at: Any = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to(at[path[-1]]) if callable(to) else to

    return change


def in_graph(*path: Any, to: Any) -> Callable[[Document], None]:
    """Change the graph and recompute its digest."""

    def change(document: Document) -> None:
        put(*path, to=to)(the_graph(document))
        entry = next(iter(document["graphs"].values()))
        digest = proofs.graph_digest(entry["graph"])
        document["graphs"] = {digest: entry}
        for case in document["cases"]:
            case["graph"] = digest

    return change


WRITTEN = [[part, ""] for part in ("square", "mean", "shift", "root", "normed", "weighted")]


def in_norm(**attrs: Any) -> Callable[[Document], None]:
    """Add attributes to the first norm."""
    return in_graph("nodes", place("rms_norm"), "attrs", to=lambda known: {**known, **attrs})


def place(op: str, at: int = 0) -> int:
    graph = proofs.attention(np.random.default_rng(8))
    return [k for k, node in enumerate(graph.nodes) if node["op"] == op][at]


def ranges(of: list[Any]) -> Callable[[Document], None]:
    """Set the ranges of the first dimension in the first view."""
    return in_graph("nodes", place("view"), "attrs", "ranges", to=[of, [0, 2, 1], [0, 4, 1]])


def constant(key: str, value: np.ndarray) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        next(iter(document["graphs"].values()))["constants"][key] = proofs.array(value)

    return change


def add_field(*path: Any) -> Callable[[Document], None]:
    return put(*path, to=lambda old: {**old, "extra": 1})


def finer(document: Document) -> None:
    """Claim the bound of finer numerics for coarser ones."""
    document["numerics"]["infer"] = proofs.numerics("float32", "any", style="fused")


CASE = ("cases", 0)
REGION = (*CASE, "region")
HUGE = (2.0**200).hex()
CHANGES: dict[str, tuple[Callable[[Document], None], str]] = {
    "lower claim": (put(*CASE, "claim", to=lower), "claim/too-small"),
    "lower claim of another case": (put("cases", 1, "claim", to=lower), "claim/too-small"),
    "lower overall claim": (put("claim", to=lower), "claim/overall"),
    "negative claim": (put(*CASE, "claim", to=(-1.0).hex()), "document/field"),
    "claim that is held": (put(*CASE, "claim", to="held"), "document/field"),
    "overall claim that is held": (put("claim", to="held"), "document/field"),
    "claim of nan": (put(*CASE, "claim", to="nan"), "document/field"),
    "claim of inf": (put(*CASE, "claim", to="inf"), "document/field"),
    "claim in another spelling": (put(*CASE, "claim", to="0x1p10"), "document/field"),
    "claim as a number": (put(*CASE, "claim", to=1), "document/field"),
    "no cases": (put("cases", to=[]), "document/cases"),
    "two cases of one name": (put("cases", 1, "name", to="case-0"), "document/cases"),
    "unknown graph": (put(*CASE, "graph", to="0" * 64), "document/cases"),
    "schema": (put("schema", to="kcdsl.interval-proof/1"), "document/schema"),
    "block": (put("block", to="block_1"), "graph/block"),
    "checkpoint digest": (put("checkpoint", "sha256", to="0" * 64), "checkpoint/digest"),
    "checkpoint digest in capitals": (put("checkpoint", "sha256", to=str.upper), "document/field"),
    "parameter digest": (put("parameters", "q.weight", to="0" * 64), "parameter/digest"),
    "parameter missing": (
        put("parameters", to=lambda p: dict(list(p.items())[1:])),
        "document/parameters",
    ),
    "parameter too many": (
        put("parameters", to=lambda p: {**p, "x": "0" * 64}),
        "document/parameters",
    ),
    "extra field": (lambda document: document.update(extra=1), "document/field"),
    "extra field of a case": (add_field(*CASE), "document/field"),
    "extra field of a region": (add_field(*REGION), "document/region"),
    "extra field of numerics": (add_field("numerics", "train"), "document/numerics"),
    "unknown functional": (put("functional", "kind", to="1"), "document/field"),
    "span claimed as inf": (put("functional", "kind", to="span"), "claim/too-small"),
    "centre moved": (
        put(*REGION, "centre", to=lambda a: proofs.array(np.full(a["shape"], 40.0))),
        "witness/too-small",
    ),
    "radius wider": (
        put(*REGION, "radius", to=proofs.array(np.full((1, 1), 0.01))),
        "claim/too-small",
    ),
    "radius negative": (
        put(*REGION, "radius", to=proofs.array(np.full((1, 1), -1.0))),
        "document/region",
    ),
    "radius of nan": (
        put(*REGION, "radius", to=proofs.array(np.full((1, 1), np.nan))),
        "document/region",
    ),
    "radius of another shape": (
        put(*REGION, "radius", to=proofs.array(np.ones(1))),
        "document/region",
    ),
    "centre of infinity": (
        put(*REGION, "centre", to=lambda a: proofs.array(np.full(a["shape"], np.inf))),
        "document/region",
    ),
    "centre of float32": (
        put(*REGION, "centre", to=lambda a: proofs.array(np.zeros(a["shape"], dtype=np.float32))),
        "document/region",
    ),
    "points with a radius": (put(*REGION, "kind", to="points"), "document/region"),
    "ids for a block on hidden states": (
        put(*REGION, to={"kind": "points", "ids": [1]}),
        "document/region",
    ),
    "witness value": (put(*CASE, "witness", 5, "value", to=lower), "witness/too-small"),
    "witness of nan": (put(*CASE, "witness", 5, "value", to="nan"), "document/witness"),
    "witness of an unknown node": (put(*CASE, "witness", 5, "node", to="x"), "document/witness"),
    "witness twice": (put(*CASE, "witness", to=lambda w: [*w, w[0]]), "document/witness"),
    "no witness": (put(*CASE, "witness", to=[]), "document/witness"),
    "constant changed": (
        constant("cos", np.ones((5, 4), dtype=np.float32)),
        "graph/constant-digest",
    ),
    "constant added": (constant("tan", np.ones((5, 4), dtype=np.float32)), "graph/constant-digest"),
    "bool that is two": (
        put("graphs", to=lambda g: _twos(g)),
        "document/array",
    ),
    "graph changed": (
        lambda d: put("nodes", place("rms_norm"), "attrs", "eps", to=(1e-2).hex())(the_graph(d)),
        "graph/digest",
    ),
    "graph schema": (in_graph("schema", to="kcdsl.block-graph/2"), "graph/field"),
    "unknown format of a node": (
        in_graph("nodes", place("add"), "format", to="tfloat32"),
        "graph/field",
    ),
    "no format": (
        in_graph("nodes", place("add"), to=lambda n: {k: n[k] for k in n if k != "format"}),
        "graph/field",
    ),
    "form of an addition": (
        in_graph("nodes", place("add"), "attrs", "form", to="written"),
        "graph/field",
    ),
    "unknown form": (in_norm(form="loose"), "graph/field"),
    "written without parts": (in_norm(form="written"), "graph/field"),
    "parts of a fused one": (in_norm(form="fused", parts=WRITTEN), "graph/field"),
    "unknown part": (in_norm(form="written", parts=[["cube", ""], *WRITTEN[1:]]), "graph/field"),
    "a part twice": (in_norm(form="written", parts=[WRITTEN[0], *WRITTEN]), "graph/field"),
    "parts in another order": (
        in_norm(form="written", parts=[*WRITTEN[1:2], WRITTEN[0], *WRITTEN[2:]]),
        "graph/field",
    ),
    "a part of no format": (
        in_norm(form="written", parts=[["square", "half"], *WRITTEN[1:]]),
        "graph/field",
    ),
    "a last part of another format": (
        in_norm(form="written", parts=[*WRITTEN[:-1], ["weighted", "float32"]]),
        "graph/field",
    ),
    "format of an input": (in_graph("nodes", 0, "format", to="float32"), "graph/field"),
    "unknown op": (in_graph("nodes", place("add"), "op", to="plus"), "rule/unknown-op"),
    "too few inputs": (
        in_graph("nodes", place("add"), "inputs", to=lambda i: i[:1]),
        "graph/field",
    ),
    "input from later": (
        in_graph("nodes", 2, "inputs", to=lambda i: ["n30_linear", *i[1:]]),
        "graph/order",
    ),
    "input of its own": (
        in_graph("nodes", 2, "inputs", to=lambda i: ["n2_rms_norm", *i[1:]]),
        "graph/order",
    ),
    "two nodes of one name": (in_graph("nodes", 1, "name", to="n0_input"), "graph/order"),
    "output that is no node": (in_graph("output", to="x"), "graph/order"),
    "no nodes": (in_graph("nodes", to=[]), "graph/size"),
    "huge shape": (in_graph("nodes", 1, "shape", to=[2**30]), "graph/size"),
    "wrong shape": (in_graph("nodes", place("linear"), "shape", to=[5, 9]), "graph/shape"),
    "wrong input shape": (in_graph("input_shape", to=[5, 9]), "document/region"),
    "wrong permutation": (
        in_graph("nodes", place("view", 1), "attrs", "order", to=[0, 0, 2]),
        "graph/field",
    ),
    "permutation of other dimensions": (
        in_graph("nodes", place("view", 1), "attrs", "order", to=[0, 1, 2, 3]),
        "graph/field",
    ),
    "wrong reshape": (in_graph("nodes", place("view"), "attrs", "split", to=[39]), "graph/shape"),
    "a view of too many dimensions": (
        in_graph("nodes", place("view"), "attrs", "split", to=[40, *[1] * 60]),
        "graph/shape",
    ),
    "a reshape by way of another shape": (
        in_graph("nodes", place("view"), "attrs", "split", to=[2, 5, 4]),
        "graph/shape",
    ),
    "a view without a shape": (in_graph("nodes", place("view"), "attrs", to={}), "graph/field"),
    "a range beyond the end": (ranges([0, 6, 1]), "graph/field"),
    "a range that takes nothing": (ranges([2, 2, 1]), "graph/field"),
    "a range from behind": (ranges([-2, 5, 1]), "graph/field"),
    "a range without a step": (ranges([0, 5]), "graph/field"),
    "a range of steps of nothing": (ranges([0, 5, 0]), "graph/field"),
    "a range backwards": (ranges([0, 5, -1]), "graph/field"),
    "a range that is a truth": (ranges([False, 5, 1]), "graph/field"),
    "too few ranges": (
        in_graph("nodes", place("view"), "attrs", "ranges", to=[[0, 5, 1]]),
        "graph/field",
    ),
    "fewer elements": (ranges([0, 4, 1]), "graph/shape"),
    "copies that are none": (
        in_graph("nodes", place("view"), "attrs", "sizes", to=[10, 2, 4]),
        "graph/shape",
    ),
    "copies of too many dimensions": (
        in_graph("nodes", place("view"), "attrs", "sizes", to=[5, 2, 4, 1]),
        "graph/shape",
    ),
    "another size of the result": (
        in_graph("nodes", place("view"), "shape", to=[5, 2, 5]),
        "graph/shape",
    ),
    "attribute too many": (
        in_graph("nodes", place("add"), "attrs", to={"alpha": (2.0).hex()}),
        "graph/field",
    ),
    "attribute missing": (in_graph("nodes", place("rms_norm"), "attrs", to={}), "graph/field"),
    "attribute as a number": (
        in_graph("nodes", place("rms_norm"), "attrs", "eps", to=1),
        "graph/field",
    ),
    "negative eps": (
        in_graph("nodes", place("rms_norm"), "attrs", "eps", to=(-1.0).hex()),
        "graph/field",
    ),
    "divisor of zero": (
        in_graph("nodes", place("divide"), "attrs", "divisor", to=(0.0).hex()),
        "graph/field",
    ),
    "divisor beyond float32": (
        in_graph("nodes", place("divide"), "attrs", "divisor", to=(1e-40).hex()),
        "graph/field",
    ),
    "unknown role": (in_graph("nodes", place("add"), "role", to="score"), "graph/field"),
    "role of another op": (in_graph("nodes", place("add"), "role", to="context"), "graph/field"),
    "no mask": (
        in_graph("nodes", place("softmax"), "inputs", to=lambda i: i[:1]),
        "claim/too-small",
    ),
    "smaller divisor": (
        in_graph("nodes", place("divide"), "attrs", "divisor", to=(0.5).hex()),
        "claim/too-small",
    ),
    "unknown constant": (
        in_graph("nodes", place("constant"), "attrs", "key", to="x"),
        "graph/field",
    ),
    "unknown parameter": (
        in_graph("nodes", place("param"), "attrs", "key", to="x"),
        "document/parameters",
    ),
    "parameter of another shape": (
        in_graph("nodes", place("param"), "attrs", "key", to="q.bias"),
        "document/parameters",
    ),
    "coarser numerics": (
        put(
            "numerics", "infer", to=proofs.numerics("bfloat16", "any", weights=("fp8_e5m2", "none"))
        ),
        "claim/too-small",
    ),
    "coarser training": (
        put("numerics", "train", to=proofs.numerics("bfloat16", "any")),
        "claim/too-small",
    ),
    "unknown casts": (put("numerics", "infer", "casts", to="some"), "document/numerics"),
    "unknown format": (put("numerics", "infer", "compute", to="float8"), "document/numerics"),
    "int8 without a scale": (
        put("numerics", "infer", "weights", to={"format": "int8", "scale": "none"}),
        "document/numerics",
    ),
    "one shard": (put("numerics", "infer", "shards", to=1), "document/numerics"),
    "shards beyond 1,024": (put("numerics", "infer", "shards", to=1025), "document/numerics"),
    "shards without end": (put("numerics", "infer", "shards", to=2**53 - 1), "document/numerics"),
    "tile of zero": (put("numerics", "infer", "attention", "tile", to=0), "document/numerics"),
    "huge claim with a vacuous accumulator": (
        put("numerics", "infer", "accumulate", to="fp8_e5m2"),
        "bound/not-finite",
    ),
    "fp8 compute that overflows nothing": (
        put("numerics", "infer", "compute", to="fp8_e4m3"),
        "claim/too-small",
    ),
}


def _twos(graphs: Document) -> Document:
    for entry in graphs.values():
        entry["constants"]["mask"]["data"] = base64.b64encode(b"\x02" * 25).decode()
    return graphs


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_rejected_by_code(good: tuple[Document, Path], name: str) -> None:
    document, path = good
    changed = copy.deepcopy(document)
    change, reason = CHANGES[name]
    change(changed)
    outcome = recheck(proofs.dump(changed), path)
    assert (outcome.ok, outcome.reason) == (False, reason), outcome


@pytest.mark.full
def test_every_witness_is_compared(good: tuple[Document, Path]) -> None:
    document, path = good
    for at, witness in enumerate(document["cases"][1]["witness"]):
        field = "drift" if at % 2 else "value"
        if float.fromhex(witness[field]) == 0:
            continue
        changed = copy.deepcopy(document)
        changed["cases"][1]["witness"][at][field] = lower(witness[field])
        outcome = recheck(proofs.dump(changed), path)
        assert outcome.reason == "witness/too-small", witness
        assert repr(witness["node"]) in outcome.detail
        assert "case-1" in outcome.detail


def test_finer_numerics_are_rederived(good: tuple[Document, Path]) -> None:
    document, path = good
    changed = copy.deepcopy(document)
    finer(changed)
    outcome = recheck(proofs.dump(changed), path)
    assert outcome.ok, outcome
    first = recheck(proofs.dump(document), path)
    assert float.fromhex(outcome.bound) < float.fromhex(first.bound) / 10
    # claims for the finer kernel are not derivable for the coarser one
    exchanged = claimed(changed, path)
    exchanged["numerics"] = document["numerics"]
    assert recheck(proofs.dump(exchanged), path).reason == "claim/too-small"


def test_every_bit_of_the_checkpoint_is_bound(good: tuple[Document, Path], tmp_path: Path) -> None:
    document, path = good
    content = path.read_bytes()
    for at in (3, 20, len(content) // 2, len(content) - 1):
        other = tmp_path / "other.safetensors"
        other.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        outcome = recheck(proofs.dump(document), other)
        assert not outcome.ok
        assert outcome.reason in ("checkpoint/digest", "checkpoint/format")
    outcome = recheck(proofs.dump(document), tmp_path / "none")
    assert outcome.reason == "checkpoint/unreadable"


TEXTS = {
    "empty": b"",
    "not UTF-8": b"\xff",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a float": b'{"a": 1.0}',
    "an exponent": b'{"a": 1e3}',
    "NaN": b'{"a": NaN}',
    "a key twice": b'{"a": 1, "a": 1}',
    "a large integer": b'{"a": 9007199254740992}',
    "endless digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "endless brackets": b"[" * 200_000,
    "two values": b"{} {}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_loose_json_is_rejected(name: str, tmp_path: Path) -> None:
    outcome = recheck(TEXTS[name], tmp_path / "none")
    assert (outcome.ok, outcome.reason) == (False, "document/json")


@pytest.mark.parametrize("text", [b"[]", b"1", b'"x"', b"null", b"{}"])
def test_other_json_documents_are_rejected(text: bytes, tmp_path: Path) -> None:
    assert recheck(text, tmp_path / "none").reason == "document/field"


def test_arbitrary_input_raises_nothing(good: tuple[Document, Path]) -> None:
    outcome = recheck(proofs.dump(good[0]), None)  # type: ignore[arg-type]
    assert (outcome.ok, outcome.reason) == (False, "internal")
    outcome = recheck(None, good[1])  # type: ignore[arg-type]
    assert (outcome.ok, outcome.reason) == (False, "internal")


@given(st.data())
def test_replaced_leaves_never_cause_internal_errors(
    good: tuple[Document, Path], data: st.DataObject
) -> None:
    """Replace one leaf by another value; the outcome is never "internal"."""
    document, path = good
    changed = copy.deepcopy(document)
    at: Any = changed
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key]:
            break
        at = at[key]
    odd: st.SearchStrategy[Any] = st.sampled_from(
        [None, True, -1, 0, 2**53 - 1, "", "x", [], {}, "0x1.0p+0", [[]], ["x"]]
    )
    at[key] = data.draw(odd)
    outcome = recheck(proofs.dump(changed), path)
    assert outcome.reason != "internal", outcome
    assert outcome.ok == (outcome.reason == "ok")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(1 - 2**53, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_canonical_json(value: Any) -> None:
    assert canonical(value) == rfc8785.dumps(value)


def test_token_ids_require_an_embedding(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    graph = proofs.Graph(None)
    table = graph.param("table", rng.standard_normal((7, 4)))
    found = graph.add("embedding", [table], (3, 4), ids=[6, 0, 6])
    # the table is also read as the weight of a linear, which is stored differently
    graph.add("linear", [found, table], (3, 7))
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    fine = proofs.numerics()
    coarse = proofs.numerics(weights=("fp8_e4m3", "per_channel"))
    document = proofs.document(graph, fine, coarse, sha256, np.zeros(()), ids=[6, 0, 6])
    assert recheck(proofs.dump(document), path).ok
    assert recheck_exactly(proofs.dump(document), path).ok
    document["cases"][0]["region"]["ids"] = [6, 0, 5]
    assert recheck(proofs.dump(document), path).reason == "document/region"
    graph.nodes[1]["attrs"]["ids"] = [7, 0, 6]
    document = proofs.document(graph, fine, coarse, sha256, np.zeros(()), ids=[7, 0, 6])
    assert recheck(proofs.dump(document), path).reason == "graph/field"


PASS = {"at": "n2_rms_norm", "of": "n0_input", "kind": "elements", "stop": "input", "rows": [0, 1]}


@pytest.mark.parametrize(
    "some",
    [
        [{**PASS, "at": "elsewhere"}],
        [{**PASS, "of": "elsewhere"}],
        [{**PASS, "kind": "all"}],
        [{**PASS, "stop": "middle"}],
        [{**PASS, "rows": []}],
        [{**PASS, "rows": [0]}],
        [{**PASS, "rows": [1, 1]}],
        [{**PASS, "rows": [0, 2**40]}],
        [{**PASS, "rows": [-1, 1]}],
        [{**PASS, "rows": [0, 1.0]}],
        [PASS, PASS],
        [{**PASS, "more": 1}],
    ],
)
def test_invalid_hints_of_passes_are_refused(
    good: tuple[Document, Path], some: list[dict[str, Any]]
) -> None:
    document = copy.deepcopy(good[0])
    document["cases"][0]["domain"] = "affine"
    document["cases"][0]["passes"] = {"train": [PASS], "infer": [PASS]}
    assert parse(proofs.dump(document)).cases[0].passes is not None
    for side in ("train", "infer"):
        changed = copy.deepcopy(document)
        changed["cases"][0]["passes"][side] = some
        with pytest.raises(Rejected) as caught:
            parse(proofs.dump(changed))
        assert caught.value.reason in ("document/passes", "document/json")


def test_hints_outside_the_affine_domain_are_refused(good: tuple[Document, Path]) -> None:
    document = copy.deepcopy(good[0])
    document["cases"][0]["domain"] = "affine"
    document["cases"][0]["passes"] = {"train": [], "infer": []}
    assert parse(proofs.dump(document)).cases[0].passes == ({}, {})
    del document["cases"][0]["domain"]
    with pytest.raises(Rejected, match="passes"):
        parse(proofs.dump(document))


@pytest.mark.parametrize("part", [(2, 3), (5, 1), (-1, 1), (0, 0), (0, -1)])
def test_parts_without_a_case_are_refused(
    good: tuple[Document, Path], part: tuple[int, int]
) -> None:
    """No case at all would follow."""
    document, path = good
    assert recheck(proofs.dump(document), path, (1, 2)).ok
    found = recheck(proofs.dump(document), path, part)
    assert (found.ok, found.reason) == (False, "document/cases")
    assert "no case is part" in found.detail


def linear(folder: Path, *, format: str = "float32") -> tuple[Any, Path, Document]:
    """Return a graph of a linear with a mask, its checkpoint in bfloat16, and a proof."""
    g = proofs.Graph((2, 2))
    w = np.array([[1.0, 0.5], [0.25, 1.0]], dtype=np.float32)
    g.add("linear", [g.add("input", [], (2, 2)), g.param("w", w)], (2, 2))
    g.constant("mask", np.ones((2, 2), dtype=bool))
    g.output = "n2_linear"
    path = folder / "model.safetensors"
    path.write_bytes(save({"w": w.astype(ml_dtypes.bfloat16)}))
    side = proofs.numerics(format, accumulate=format)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return g, path, proofs.document(g, side, side, sha256, np.ones((2, 2)))


def stated(g: Any, document: Document) -> bytes:
    """Return a proof about the graph as it is now."""
    numerics, sha256 = document["numerics"], document["checkpoint"]["sha256"]
    changed = proofs.document(g, numerics["train"], numerics["infer"], sha256, np.ones((2, 2)))
    changed["cases"][0]["domain"] = document["cases"][0].get("domain", "interval")
    return cast(bytes, proofs.dump(changed))


@pytest.mark.parametrize("domain", ["interval", "affine", "planes", "affine+planes"])
@pytest.mark.parametrize("op", ["", "add", "mul"])
def test_masks_are_not_read_as_numbers(tmp_path: Path, op: str, domain: str) -> None:
    g, path, document = linear(tmp_path)
    document["cases"][0]["domain"] = domain
    assert recheck(stated(g, document), path).ok
    if op:
        g.add(op, ["n2_linear", "n3_constant"], (2, 2))
    else:
        g.output = "n3_constant"
    found = recheck(stated(g, document), path)
    assert found.reason == "rule/mask"
    assert "a mask is read as numbers" in found.detail


@pytest.mark.parametrize("domain", ["interval", "planes"])
def test_large_matrices_are_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: str
) -> None:
    """Only their magnitudes are known."""
    monkeypatch.setattr(parameters, "_LARGE", 0)
    g, path, document = linear(tmp_path)
    document["cases"][0]["domain"] = domain
    assert recheck(stated(g, document), path).ok
    g.output = "n1_param"
    found = recheck(stated(g, document), path)
    assert not found.ok
    assert "a matrix of a linear is read as numbers" in found.detail


def test_functionals_of_no_finite_bound_are_refused(tmp_path: Path) -> None:
    _, path, document = linear(tmp_path, format="float64")
    document["functional"]["kind"] = "2"
    centre = proofs.array(np.full((2, 2), 2.0**1020))
    document["cases"][0]["region"]["centre"] = centre
    for case in document["cases"]:
        case["claim"] = document["claim"] = (2.0**1023).hex()
        for one in case["witness"]:
            one["value"] = one["drift"] = (2.0**1023).hex()
    found = recheck(proofs.dump(document), path)
    assert found.reason == "bound/not-finite"


def test_process_that_flushes_subnormals_derives_nothing(good: tuple[Document, Path]) -> None:
    """Rounding to the next double would be lost near zero."""
    document, path = good
    if torch.set_flush_denormal(True):  # a processor may have no such mode
        try:
            found = recheck(proofs.dump(document), path)
        finally:
            torch.set_flush_denormal(False)
        assert (found.ok, found.reason) == (False, "internal")
        assert "flushes subnormal numbers" in found.detail
    assert recheck(proofs.dump(document), path).ok


def test_derivations_that_bypass_the_parser_are_refused(good: tuple[Document, Path]) -> None:
    proof = parse(proofs.dump(good[0]))
    doubles, case = Derivation(proof, read(good[1]).tensors), proof.cases[0]
    rows = replace(case, region=replace(case.region, kind="rows"))
    affine = replace(rows, domain="affine", region=replace(rows.region, longest=4))
    for changed in (rows, affine):
        with pytest.raises(Rejected, match="of the interval domain") as rejected:
            doubles.problem(changed)
        assert rejected.value.reason == "document/region"
    (digest,) = proof.graphs
    blocks = {digest: replace(proof.graphs[digest], output="nowhere")}
    with pytest.raises(Rejected, match="the output is not a node") as rejected:
        Derivation(replace(proof, graphs=blocks), read(good[1]).tensors).derive(case)
    assert rejected.value.reason == "graph/order"


def held(document: Document) -> None:
    """Claim that the largest element stays, as numbers."""
    document["functional"]["kind"] = "no_flip"


def by_chance(alpha: str, functionals: int = 9) -> Callable[[Document], None]:
    chance = {"alpha": alpha, "functionals": functionals}
    return put(*CASE, to=lambda case: {**case, "domain": "affine", "chance": chance})


def bent(**more: Any) -> Callable[[Document], None]:
    """Add hints of planes to a case."""
    hints = {"met": [], "slopes": [], "searched": []} | more
    return put(*CASE, to=lambda case: {**case, "domain": "planes", "planes": hints})


NONE = proofs.array(np.zeros((6, 0), dtype=np.float32))
SEARCHED = {"element": 0, "side": "above", "values": NONE}
HINTED: dict[str, tuple[Callable[[Document], None], str, str]] = {
    "a claim of no flip that is a number": (held, "document/field", "must claim 'held'"),
    "chance without affine forms": (
        put(*CASE, to=lambda case: {**case, "chance": {"alpha": "0.05", "functionals": 9}}),
        "document/field",
        "which only affine forms do",
    ),
    "no alpha": (by_chance("0"), "document/field", "an alpha above 0"),
    "an alpha below 0": (by_chance("-0.01"), "document/field", "an alpha above 0"),
    "an alpha above 1/20": (by_chance("0.051"), "document/field", "an alpha above 0"),
    "an alpha of NaN": (by_chance("nan"), "document/field", "an alpha above 0"),
    "an alpha in another spelling": (by_chance("1/20"), "document/field", "an alpha above 0"),
    "functionals without end": (by_chance("0.05", 2**40 + 1), "document/field", "must not speak"),
    "an element twice": (
        bent(searched=[SEARCHED, SEARCHED]),
        "document/planes",
        "an element of the output twice",
    ),
    "values of another size": (
        bent(searched=[{**SEARCHED, "values": {**NONE, "shape": [6, 1]}}]),
        "document/planes",
        "a size other than its shape",
    ),
    "values that are no array": (
        bent(searched=[{**SEARCHED, "values": []}]),
        "document/planes",
        "must be an object",
    ),
    "trees beyond the limit": (
        put(
            *CASE,
            to=lambda case: {
                **case,
                "domain": "splits",
                "splits": 2 * [base64.b64encode(bytes(2**22 + 3)).decode()],
            },
        ),
        "document/splits",
        "more than 4194304 boxes",
    ),
}


@pytest.mark.parametrize("name", HINTED)
def test_invalid_fields_of_domains_are_refused(good: tuple[Document, Path], name: str) -> None:
    change, reason, detail = HINTED[name]
    document = copy.deepcopy(good[0])
    change(document)
    with pytest.raises(Rejected) as caught:
        parse(proofs.dump(document))
    assert caught.value.reason == reason
    assert detail in caught.value.detail


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_slopes_that_are_no_numbers_are_refused(value: float) -> None:
    """Of a ReLU and of an element: each of the six slopes."""
    graph = proofs.Graph((1, 2))
    graph.add("relu", [graph.add("input", [], (1, 2))], (1, 2))
    numerics = proofs.numerics()
    document = proofs.document(graph, numerics, numerics, "0" * 64, np.zeros((1, 2)), 1.0)
    document["cases"][0]["domain"] = "planes"
    at = proofs.array(np.ones((1, 2), dtype=bool))
    for slope in range(7):
        bent = np.full((6, 2), 0.5, dtype=np.float32)
        bent.flat[2 * slope + 1 : 2 * slope + 2] = value
        values = proofs.array(bent)
        for hints in (
            {"slopes": [{"of": "n1_relu", "at": at, "values": values}], "searched": []},
            {
                "slopes": [{"of": "n1_relu", "at": at, "values": proofs.array(np.ones_like(bent))}],
                "searched": [{"element": 1, "side": "below", "values": values}],
            },
        ):
            document["cases"][0]["planes"] = {"met": [], **hints}
            if slope == 6:
                assert parse(proofs.dump(document)).cases[0].planes is not None
                continue
            with pytest.raises(Rejected, match=r"document/planes.*finite values"):
                parse(proofs.dump(document))


def test_larger_documents_are_not_read(tmp_path: Path) -> None:
    outcome = recheck(bytes(2**28 + 1), tmp_path / "none")
    assert (outcome.ok, outcome.reason) == (False, "document/size")


@pytest.mark.parametrize(
    ("kind", "ids"), [("ball", [6, 0, 6]), ("hull", [6, 0, 6]), ("points", [])]
)
def test_regions_of_token_ids_are_points(kind: str, ids: list[int]) -> None:
    graph = proofs.Graph(None)
    table = graph.param("table", np.ones((7, 4)))
    graph.add("embedding", [table], (3, 4), ids=ids)
    numerics = proofs.numerics()
    document = proofs.document(graph, numerics, numerics, "0" * 64, np.zeros(()), ids=ids)
    document["cases"][0]["region"]["kind"] = kind
    with pytest.raises(Rejected, match="must be points with at least one id"):
        parse(proofs.dump(document))
