"""Cases of the affine domain: derived claims are accepted, changes rejected with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import kernels, proofs
from tests.support.affine_rules import ODDLY, irregular_heads

Document = dict[str, Any]
Change = Callable[[Document], None]


def post_norm(rng: np.random.Generator, rows: int = 4, heads: int = 2, size: int = 3) -> Any:
    """Return masked attention, residual and layer norm."""
    width = heads * size
    g = proofs.Graph((rows, width))
    x = g.add("input", [], (rows, width))
    parts = {}
    for name in "qkv":
        w = g.param(f"{name}.weight", rng.standard_normal((width, width)) / width**0.5)
        y = g.add("linear", [x, w], (rows, width))
        y = g.reshape(y, (rows, heads, size))
        parts[name] = g.permute(y, [1, 0, 2])
    k = g.permute(parts["k"], [0, 2, 1])
    s = g.add("matmul", [parts["q"], k], (heads, rows, rows), role="scores")
    mask = g.constant("mask", np.tril(np.ones((rows, rows), dtype=bool)))
    p = g.add("softmax", [s, mask], (heads, rows, rows), role="probabilities")
    c = g.add("matmul", [p, parts["v"]], (heads, rows, size), role="context")
    c = g.permute(c, [1, 0, 2])
    c = g.reshape(c, (rows, width))
    h = g.add("add", [x, c], (rows, width))
    one = g.param("norm.weight", 1 + 0.1 * rng.standard_normal(width))
    zero = g.param("norm.bias", 0.1 * rng.standard_normal(width))
    y = g.add("gelu", [g.add("layer_norm", [h, one, zero], (rows, width), eps=1e-5)], (rows, width))
    g.add("add", [y, h], (rows, width))
    return g


def claimed(document: Document, path: Path) -> Document:
    """Return the document with the derived claims and witnesses."""
    proof = parse(proofs.dump(document))
    doubles = Derivation(proof, read(path).tensors)
    document = copy.deepcopy(document)
    claims = []
    for case, record in zip(proof.cases, document["cases"], strict=True):
        bound, sizes = doubles.derive(replace(case, claim=0.0))  # the smallest derivable value
        claims.append(bound)
        record["claim"] = bound.hex()
        record["witness"] = [
            {"node": n, "value": v.hex(), "drift": d.hex()} for n, (v, d) in sizes.items()
        ]
    document["claim"] = max(claims).hex()
    return document


TRAIN = proofs.numerics("float32", "any")
INFER = proofs.numerics("bfloat16", "nearest", style="fused")


def document(
    folder: Path, graph: Any, radius: float, functional: str = "inf", spread: float = 1.0
) -> tuple[Document, Path]:
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = spread * np.random.default_rng(3).standard_normal(graph.input_shape)
    made = proofs.document(graph, TRAIN, INFER, sha256, centre, radius, functional)
    made["cases"][0]["domain"] = "affine"
    return made, path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, Path]:
    """Return a proof of two cases with its derived claims, and its checkpoint."""
    graph = post_norm(np.random.default_rng(8))
    made, path = document(tmp_path_factory.mktemp("affine"), graph, 2.0**-12)
    moved = copy.deepcopy(made["cases"][0])
    moved["region"]["centre"] = proofs.array(np.ones(graph.input_shape))
    moved["name"] = "case-1"
    made["cases"].append(moved)
    return claimed(made, path), path


@pytest.mark.full
def test_derived_claims_are_accepted(
    good: tuple[Document, Path], follows: Callable[..., None]
) -> None:
    made, path = good
    follows(made)
    outcome = recheck(proofs.dump(made), path)
    assert (outcome.ok, outcome.reason) == (True, "ok"), outcome
    assert outcome.bound == made["claim"]
    again = recheck(proofs.dump(made), path)
    assert again.bound == outcome.bound


@pytest.mark.parametrize("style", ["composed", "fused"])
@pytest.mark.parametrize("domain", ["interval", "affine"])
def test_softmax_of_no_attention_is_stored_as_any_result(
    tmp_path: Path, domain: str, style: str
) -> None:
    """The format of probabilities is that of an attention: this kernel stores bfloat16."""
    graph = proofs.Graph((1, 2))
    graph.add("softmax", [graph.add("input", [], (1, 2))], (1, 2))
    sha256 = proofs.write_safetensors(tmp_path / "model.safetensors", {})
    kernel = proofs.numerics("bfloat16", "nearest", style=style, probabilities="float32")
    made = proofs.document(graph, TRAIN, kernel, sha256, np.array([[1.0, 0.0]]))
    made["cases"][0]["domain"] = domain
    outcome = recheck(proofs.dump(made), tmp_path / "model.safetensors")
    assert outcome.ok, outcome
    stored, exact = 0.73046875, 1 / (1 + np.exp(-1.0))  # of 8 bits, and the real number
    assert float.fromhex(outcome.bound) >= abs(stored - exact)


def lower(text: str) -> str:
    return float(np.nextafter(float.fromhex(text), -np.inf)).hex()


def put(*path: Any, to: Any) -> Change:
    def change(document: Document) -> None:
        at: Any = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to(at[path[-1]]) if callable(to) else to

    return change


def in_graph(*path: Any, to: Any) -> Change:
    """Change the graph and recompute its digest."""

    def change(document: Document) -> None:
        entry = next(iter(document["graphs"].values()))
        put(*path, to=to)(entry["graph"])
        digest = proofs.graph_digest(entry["graph"])
        document["graphs"] = {digest: entry}
        for case in document["cases"]:
            case["graph"] = digest

    return change


def place(op: str, at: int = 0) -> int:
    graph = post_norm(np.random.default_rng(8))
    return [k for k, node in enumerate(graph.nodes) if node["op"] == op][at]


CASE = ("cases", 0)
NUMERICS = ("numerics", "infer")
CHANGES: dict[str, tuple[Change, str]] = {
    "claim one step lower": (put(*CASE, "claim", to=lower), "claim/too-small"),
    "claim of the other case": (put("cases", 1, "claim", to=lower), "claim/too-small"),
    "the whole claim": (put("claim", to=lower), "claim/overall"),
    "interval for affine": (put(*CASE, "domain", to="interval"), "claim/too-small"),
    "no domain": (lambda d: d["cases"][0].pop("domain"), "claim/too-small"),
    "unknown domain": (put(*CASE, "domain", to="zonotope"), "document/field"),
    "domain of null": (put(*CASE, "domain", to=None), "document/field"),
    "wider radius": (
        put(*CASE, "region", "radius", to=proofs.array(np.full((1, 1), 2.0**-11))),
        "claim/too-small",
    ),
    "far too wide radius": (
        put(*CASE, "region", "radius", to=proofs.array(np.full((1, 1), 100.0))),
        "bound/not-finite",
    ),
    "span for inf": (put("functional", "kind", to="span"), "claim/too-small"),
    "norm for inf": (put("functional", "kind", to="2"), "claim/too-small"),
    "free casts": (put(*NUMERICS, "casts", to="any"), "claim/too-small"),
    "coarser compute": (put(*NUMERICS, "compute", to="fp8_e4m3"), "claim/too-small"),
    "coarser weights": (
        put(*NUMERICS, "weights", to={"format": "int8", "scale": "per_tensor"}),
        "witness/too-small",
    ),
    "quantised activations": (
        put(*NUMERICS, "activations", to={"format": "int8", "scale": "per_token"}),
        "claim/too-small",
    ),
    "coarser probabilities": (
        put(*NUMERICS, "attention", "probabilities", to="fp8_e4m3"),
        "claim/too-small",
    ),
    "coarser scores": (put(*NUMERICS, "attention", "scores", to="fp8_e4m3"), "witness/too-small"),
    "coarser accumulator": (put(*NUMERICS, "accumulate", to="bfloat16"), "claim/too-small"),
    "coarser exp": (put(*NUMERICS, "attention", "exp_ulps", to=10_000), "claim/too-small"),
    "unknown op": (in_graph("nodes", place("gelu"), "op", to="mish"), "rule/unknown-op"),
    "sub for add": (in_graph("nodes", place("add"), "op", to="sub"), "witness/too-small"),
    "no mask": (
        in_graph("nodes", place("softmax"), "inputs", to=lambda i: i[:1]),
        "witness/too-small",
    ),
    "another permutation": (
        in_graph("nodes", place("view", 7), "attrs", "order", to=[0, 1, 2]),
        "graph/shape",
    ),
    "huge eps": (
        in_graph("nodes", place("layer_norm"), "attrs", "eps", to=(1e39).hex()),
        "bound/not-finite",
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_rejected(good: tuple[Document, Path], name: str) -> None:
    made, path = good
    changed = copy.deepcopy(made)
    change, reason = CHANGES[name]
    change(changed)
    outcome = recheck(proofs.dump(changed), path)
    assert (outcome.ok, outcome.reason) == (False, reason), outcome


@pytest.mark.full
def test_every_witness_is_compared_in_affine_cases(good: tuple[Document, Path]) -> None:
    made, path = good
    compared = 0
    for at, witness in enumerate(made["cases"][1]["witness"]):
        for field in ("value", "drift"):
            if float.fromhex(witness[field]) == 0:
                continue
            changed = copy.deepcopy(made)
            del changed["cases"][0]
            changed["cases"][0]["witness"][at][field] = lower(witness[field])
            outcome = recheck(proofs.dump(changed), path)
            assert outcome.reason == "witness/too-small", witness
            assert repr(witness["node"]) in outcome.detail
            compared += 1
    assert compared > 20


@pytest.mark.full
@pytest.mark.parametrize("functional", ["inf", "2", "span"])
def test_functionals_are_at_most_those_of_the_box(tmp_path: Path, functional: str) -> None:
    made, path = document(tmp_path, post_norm(np.random.default_rng(8)), 2.0**-12, functional)
    outcome = recheck(proofs.dump(claimed(made, path)), path)
    assert outcome.ok, outcome
    largest, _ = document(tmp_path, post_norm(np.random.default_rng(8)), 2.0**-12)
    bound = float.fromhex(recheck(proofs.dump(largest), path).bound)
    width = 6
    factor = {"inf": 1.0, "2": width**0.5, "span": 2.0}[functional]
    assert bound * 0.999 <= float.fromhex(outcome.bound) <= bound * factor * 1.001


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", ["q.weight", "norm.weight", "norm.bias"])
def test_non_finite_parameters_are_rejected(tmp_path: Path, key: str, value: float) -> None:
    graph = post_norm(np.random.default_rng(8))
    graph.tensors[key].flat[1] = value
    made, path = document(tmp_path, graph, 0.0)
    assert recheck(proofs.dump(made), path).reason == "parameter/not-finite"


@pytest.mark.parametrize(
    ("key", "factor", "reason"),
    [
        ("q.weight", 1e18, "bound/not-finite"),  # scores with unbounded drift
        ("v.weight", 1e37, "bound/not-finite"),  # squares of a norm
        ("norm.weight", 2e38, "bound/overflow"),
    ],
)
def test_overflowing_numbers_are_rejected(
    tmp_path: Path, key: str, factor: float, reason: str
) -> None:
    graph = post_norm(np.random.default_rng(8))
    graph.tensors[key] = (graph.tensors[key].astype(np.float64) * factor).astype(np.float32)
    made, path = document(tmp_path, graph, 2.0**-12, spread=4.0)
    outcome = recheck(proofs.dump(made), path)
    assert (outcome.ok, outcome.reason) == (False, reason), outcome


@given(st.data())
def test_changed_leaves_never_cause_internal_errors(
    good: tuple[Document, Path], data: st.DataObject
) -> None:
    """Replace one leaf of the graph and recompute its digest; the outcome is never "internal"."""
    made, path = good
    changed = copy.deepcopy(made)
    entry = next(iter(changed["graphs"].values()))
    at: Any = entry["graph"]["nodes"]
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key]:
            break
        at = at[key]
    names = [node["name"] for node in entry["graph"]["nodes"]]
    ops = ["softmax", "matmul", "relu", "rms_norm", "layer_norm", "rope", "concat", "linear", "mul"]
    odd: st.SearchStrategy[Any] = st.sampled_from(
        [None, True, -1, 0, 1, 2, 5, 2**53 - 1, "", "x", [], {}, "0x1.0p+0", [[]], *names, *ops]
    )
    at[key] = data.draw(odd)
    digest = proofs.graph_digest(entry["graph"])
    changed["graphs"] = {digest: entry}
    for case in changed["cases"]:
        case["graph"] = digest
    outcome = recheck(proofs.dump(changed), path)
    assert outcome.reason != "internal", outcome
    assert outcome.ok == (outcome.reason == "ok")


def broadcasting(rng: np.random.Generator) -> Any:
    """Return a graph that no exporter writes: operands combined with themselves and broadcast."""
    g = proofs.Graph((3, 4))
    x = g.add("input", [], (3, 4))
    row = g.slice(x, dim=0, start=1, stop=2)
    column = g.slice(x, dim=1, start=2, stop=3)
    y = g.add("mul", [row, column], (3, 4))
    y = g.add("sub", [y, g.add("mul", [x, x], (3, 4))], (3, 4))
    y = g.add("add", [g.reshape(y, (1, 3, 4)), column], (1, 3, 4))
    many = g.expand(y, (2, 3, 4))
    turned = g.permute(x, [1, 0])
    y = g.add("matmul", [many, turned], (2, 3, 3))  # both products share the right factor
    z = g.add("matmul", [x, turned], (3, 3))
    y = g.add("matmul", [z, y], (2, 3, 3))
    y = g.add("softmax", [y], (2, 3, 3), role="probabilities")
    y = g.add("matmul", [y, z], (2, 3, 3), role="context")
    y = g.add("rms_norm", [y], (2, 3, 3), eps=1e-3)
    g.add("concat", [y, g.add("neg", [y], (2, 3, 3))], (2, 3, 6), dim=-1)
    return g


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["float64", "float32"])
@pytest.mark.parametrize("radius", [0.0, 2.0**-10, 2.0**-7])
def test_unusual_graphs_are_bounded(tmp_path: Path, radius: float, name: str) -> None:
    rng = np.random.default_rng(int(radius * 1024))
    graph = broadcasting(rng)
    record = proofs.numerics(name, "any", accumulate=name)
    made, path = document(tmp_path, graph, radius, spread=0.5)
    made["numerics"] = {"train": record, "infer": record}
    proof = parse(proofs.dump(made))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    centre = scene.centre
    assert centre is not None
    found = walk(scene, scene.train)
    form = found.forms[graph.output]
    assert isinstance(form, Form)
    assert form.place is not None
    assert form.error_bound.max() < 1
    for trial in range(200):
        x = centre + radius * rng.choice([-1.0, 1.0], centre.shape)
        mode = ("random", "signs", "up", "down")[trial % 4]
        run = kernels.Run(record, np.random.default_rng(trial), mode)
        values = kernels.simulate(graph, run, x, None, None)
        a = Adjoint(rng.standard_normal((1, *form.shape)), (0, 0, 0))
        bound = found.tape.bound(form.place, a)
        e = values[graph.output] - form.reference
        assert (np.abs(e) <= form.error_bound + 2.0**-44).all()
        seen = float((a.values[0] * e).sum())
        assert abs(seen) <= bound.magnitude(found.tape.region)[0] + 2.0**-40


@pytest.mark.full
@pytest.mark.parametrize("kind", ODDLY)
def test_products_of_irregular_heads_are_bounded(tmp_path: Path, kind: str) -> None:
    """Corners of a wide region, towards which each element of the product grows."""
    rng = np.random.default_rng(5)
    graph, radius = irregular_heads(kind)(rng), 0.25
    record = proofs.numerics("float64", "any", accumulate="float64")
    made, path = document(tmp_path, graph, radius, spread=0.1)
    made["numerics"] = {"train": record, "infer": record}
    proof = parse(proofs.dump(made))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    assert scene.centre is not None
    found = walk(scene, scene.train)
    form = found.forms[graph.output]
    assert isinstance(form, Form)
    assert form.place is not None
    radius_of = found.tape.entries[form.place].radius
    left, right = (found.forms[name] for name in graph.nodes[-1]["inputs"])
    assert isinstance(left, Form)
    assert isinstance(right, Form)
    if graph.nodes[-1]["role"] == "scores":  # no tighter bound of the remainder exists
        assert radius_of is not None
        assert (radius_of >= left.error_bound @ right.error_bound).all()
    weight = [graph.tensors[k].astype(np.float64) for k in graph.tensors]
    reached = 0.0
    for trial in range(400):
        # inputs along the singular vectors of products of weights attain the remainder
        corner = rng.choice([-1.0, 1.0], (3, 6))
        if trial % 2:
            middle = weight[0].T @ weight[-1]
            for _ in range(4):
                corner = np.sign(corner @ (middle + middle.T))
        x = scene.centre + radius * np.where(corner == 0, 1.0, corner)
        run = kernels.Run(record, np.random.default_rng(trial), "random")
        values = kernels.simulate(
            graph,
            run,
            x,
            lambda key: scene.parameters.plain(key, scene.train),
            lambda key: scene.parameters.linear(key, scene.train),
        )
        e = values[graph.output] - form.reference
        assert (np.abs(e) <= form.error_bound + 2.0**-44).all()
        a = Adjoint(rng.standard_normal((1, *form.shape)), (0, 0, 0))
        seen = abs(float((a.values[0] * e).sum()))
        assert seen <= found.tape.bound(form.place, a).magnitude(found.tape.region)[0] + 2.0**-40
        reached = max(reached, float((np.abs(e) / form.error_bound).max()))
    assert reached > 0.3
