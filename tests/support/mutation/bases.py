"""Small proofs that follow exactly: every domain, functional, region kind and kind of block."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kcdsl_certs.recheck.document import parse
from kcdsl_certs.recheck.inexact import Doubles
from kcdsl_certs.recheck.safetensors import read
from tests.support import proofs
from tests.support.mutation.changes import record_of
from tests.support.plane_blocks import feed_forward

Document = dict[str, Any]
Build = Callable[[np.random.Generator], Any]
N = proofs.numerics


def decoder(rng: np.random.Generator) -> Any:
    """Return a llama-like attention: rms norm, rope, grouped queries, causal mask, residual."""
    return proofs.attention(rng, rows=3, heads=2, kv_heads=1, size=2)


def short_decoder(rng: np.random.Generator) -> Any:
    """Return the same at two rows, to be read at any length."""
    return proofs.attention(rng, rows=2, heads=2, kv_heads=1, size=4)


def gated(rng: np.random.Generator) -> Any:
    """Return a llama-like MLP: silu times a gate."""
    return proofs.mlp(rng, "silu", rows=2, width=4)


def encoder(rng: np.random.Generator, rows: int = 3, heads: int = 2, size: int = 2) -> Any:
    """Return a bert-like layer: biased attention, scaled scores, layer norms, gelu."""
    width = heads * size
    g = proofs.Graph((rows, width))
    x = g.add("input", [], (rows, width))
    parts = {}
    for name in "qkv":
        w = g.param(f"{name}.weight", rng.standard_normal((width, width)) / width**0.5)
        b = g.param(f"{name}.bias", 0.1 * rng.standard_normal(width))
        y = g.add("linear", [x, w, b], (rows, width))
        y = g.add("reshape", [y], (rows, heads, size), shape=[rows, heads, size])
        parts[name] = g.add("permute", [y], (heads, rows, size), dims=[1, 0, 2])
    k = g.add("permute", [parts["k"]], (heads, size, rows), dims=[0, 2, 1])
    square = (heads, rows, rows)
    s = g.add("matmul", [parts["q"], k], square, role="scores")
    s = g.add("scale", [s], square, role="scores", factor=size**-0.5)
    p = g.add("softmax", [s], square, role="probabilities")
    c = g.add("matmul", [p, parts["v"]], (heads, rows, size), role="context")
    c = g.add("permute", [c], (rows, heads, size), dims=[1, 0, 2])
    c = g.add("reshape", [c], (rows, width), shape=[rows, width])
    w = g.param("o.weight", rng.standard_normal((width, width)) / width**0.5)
    h = g.add("add", [x, g.add("linear", [c, w], (rows, width))], (rows, width))
    one = g.param("norm.weight", 1 + 0.1 * rng.standard_normal(width))
    zero = g.param("norm.bias", 0.1 * rng.standard_normal(width))
    h = g.add("layer_norm", [h, one, zero], (rows, width), eps=1e-5)
    up = g.param("up.weight", rng.standard_normal((6, width)) / width**0.5)
    y = g.add("gelu", [g.add("linear", [h, up], (rows, 6))], (rows, 6))
    down = g.param("down.weight", rng.standard_normal((width, 6)) / 6**0.5)
    g.add("add", [h, g.add("linear", [y, down], (rows, width))], (rows, width))
    return g


def head(rng: np.random.Generator) -> Any:
    """Return a language model without layers: embedding, norm, and a head of its own table."""
    g = proofs.Graph(None)
    table = g.param("table", rng.standard_normal((5, 4)))
    x = g.add("embedding", [table], (3, 4), ids=list(IDS))
    weight = g.param("norm.weight", 1 + 0.1 * rng.standard_normal(4))
    h = g.add("rms_norm", [x, weight], (3, 4), eps=1e-6)
    logits = g.param("head", 2 * rng.standard_normal((5, 4)))
    g.add("linear", [h, logits], (3, 5))
    return g


def everything_else(rng: np.random.Generator) -> Any:
    """Return what the other blocks lack: tanh, and everything that is linear piece by piece."""
    g = proofs.piecewise(rng, rows=2, width=2)
    shape = tuple(g.nodes[-1]["shape"])
    g.add("tanh", [g.output], shape)
    return g


def feed(rng: np.random.Generator) -> Any:
    """Return linears with ReLU between them, twice."""
    return feed_forward(rng, rows=2, width=3, inner=5, layers=2)


IDS = (4, 0, 4)


@dataclass(frozen=True, slots=True)
class Base:
    """What one proof is about. `spread` is the size of the inputs, `passes` names some passes,
    `weights` is ρ of a region around the weights, `planes` has hints of planes, `chance` says what
    is left to it."""

    build: Build
    domain: str
    functional: str
    region: str
    train: Document
    infer: Document
    radius: float = 2.0**-10
    spread: float = 1.0
    k: int = 1
    cases: int = field(default=1)
    passes: bool = False
    weights: str = ""
    planes: bool = False
    chance: Document = field(default_factory=dict)


def with_more(record: Document, **fields: Any) -> Document:
    """Return a numerics record with fields that stand in it only where they say something."""
    return {**record, **fields}


UNIT = {"fraction_bits": 13, "chunk": 4, "result_bits": 12, "promote": 8}
CORE = {"linears": UNIT, "others": {**UNIT, "fraction_bits": 22, "result_bits": 22}}
INT8 = ("int8", "per_channel")
FP8 = ("fp8_e4m3", "per_channel")
DYNAMIC = ("fp8_e4m3", "per_token")
BASES: dict[str, Base] = {
    "decoder, interval, fused": Base(
        decoder, "interval", "inf", "ball", N("float32", "nearest"),
        N("bfloat16", "any", style="fused"), cases=2,
    ),
    "decoder, affine, composed": Base(
        decoder, "affine", "span", "ball", with_more(N("float32", "any"), tensor_core=CORE),
        with_more(N("bfloat16", "nearest", weights=FP8), tensor_core=CORE),
    ),
    "decoder, interval, any length": Base(
        short_decoder, "interval", "2", "rows", N("float32", "nearest"),
        N("float32", "any", style="fused"),
    ),
    "encoder, interval, fp8": Base(
        encoder, "interval", "span", "points", N("float32", "any"),
        N("bfloat16", "any", style="fused", weights=FP8, scores="float32"),
    ),
    "encoder, affine, fused": Base(
        encoder, "affine", "2", "hull", N("float32", "nearest"),
        N("float32", "any", style="fused", weights=("fp8_e4m3", "mx")), passes=True,
    ),
    "gated MLP, interval": Base(
        gated, "interval", "2", "hull", N("bfloat16", "nearest"),
        N("bfloat16", "any", weights=FP8, activations=DYNAMIC),
    ),
    "gated MLP, affine": Base(
        gated, "affine", "inf", "points",
        with_more(N("float32", "any"), results={"silu": "float64"}, sigmoid="absolute"),
        with_more(
            N("bfloat16", "any", weights=INT8, activations=("int8", "per_token")),
            results={"silu": "float32", "mul": "float16"}, sigmoid="absolute",
        ),
    ),
    "head, interval, no flip": Base(
        head, "interval", "no_flip", "ids", N("float32", "any"),
        N("bfloat16", "nearest", weights=("fp8_e4m3", "per_tensor")), k=2,
    ),
    "head, affine, no flip": Base(
        head, "affine", "no_flip", "ids", N("float32", "any"), N("bfloat16", "any"),
    ),
    "head, affine": Base(
        head, "affine", "inf", "ids", N("float32", "any"), N("float16", "any"),
    ),
    "piecewise and tanh, interval": Base(
        everything_else, "interval", "inf", "ball", N("float32", "nearest"),
        N("float16", "nearest", activations=("uint8", "per_tensor")),
    ),
    "piecewise and tanh, affine": Base(
        everything_else, "affine", "2", "ball", N("float32", "any"),
        N("float16", "any", accumulate="float32"),
    ),
    "gated MLP, interval, around the weights": Base(
        gated, "interval", "inf", "points", N("float32", "nearest"),
        N("bfloat16", "any", weights=FP8), weights="0.015625",
    ),
    "encoder, affine, around the weights": Base(
        encoder, "affine", "2", "points", N("float32", "nearest"), N("bfloat16", "any"),
        weights="0.0009765625",
    ),
    "piecewise and tanh, interval, static scales": Base(
        everything_else, "interval", "inf", "ball",
        N("float32", "nearest", activations=proofs.static("uint8", 0.25, 128)),
        N("float16", "any", activations=proofs.static("uint8", 0.25, 128)),
    ),
    "decoder, planes": Base(
        decoder, "planes", "inf", "ball", N("float32", "nearest"),
        N("bfloat16", "any", style="fused", weights=FP8),
    ),
    "feed-forward, planes": Base(
        feed, "planes", "2", "hull", N("float32", "nearest"), N("bfloat16", "any"),
        radius=2.0**-3, planes=True,
    ),
    "gated MLP, affine and planes": Base(
        gated, "affine+planes", "inf", "points", N("float32", "any", style="fused"),
        N("bfloat16", "any", weights=INT8),
    ),
    "head, planes, no flip": Base(
        head, "planes", "no_flip", "ids", N("float32", "any"), N("bfloat16", "any"),
    ),
    "encoder, affine, by chance": Base(
        encoder, "affine", "inf", "ball", N("float32", "any"), N("bfloat16", "any"),
        chance={"alpha": "0.000001", "functionals": 4096},
    ),
}  # fmt: skip


def made(name: str, folder: Path) -> tuple[Document, Path, Any]:
    """Return the proof of a base with claims just as they follow, its checkpoint and its graph."""
    base = BASES[name]
    rng = np.random.default_rng(list(BASES).index(name) + 1)
    graph = base.build(rng)
    path = folder / f"{list(BASES).index(name)}.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    records = base.train, base.infer
    if base.region == "ids":
        document = proofs.document(
            graph, *records, sha256, np.zeros(()), functional=base.functional, ids=list(IDS)
        )
    else:
        shape = (1, *graph.input_shape[1:]) if base.region == "rows" else graph.input_shape
        centre = base.spread * rng.standard_normal(shape)
        radius = 0.0 if base.region == "points" else base.radius
        document = proofs.document(graph, *records, sha256, centre, radius, base.functional)
    document["functional"]["k"] = base.k
    case = document["cases"][0]
    case["domain"] = base.domain
    if base.passes:
        some = list(passes(graph))
        case["passes"] = {"train": some, "infer": copy.deepcopy(some)}
    if base.planes:
        case["planes"] = plane_hints(graph, rng)
    if base.region == "hull":
        case["region"]["kind"] = "hull"
        shape = graph.input_shape
        wide = base.radius * rng.uniform(0.25, 1, shape)
        case["region"]["radius"] = record_of(wide)
    if base.region == "rows":
        case["region"] |= {"kind": "rows", "longest": LONGEST, "tables": tables(graph)}
    if base.chance:
        case["chance"] = dict(base.chance)
    if base.weights:
        case["region"]["weights"] = base.weights
    for index in range(1, base.cases):
        other = copy.deepcopy(case)
        other["name"] = f"case-{index}"
        other["region"]["centre"] = record_of(rng.standard_normal(graph.input_shape))
        document["cases"].append(other)
    return claimed(document, path), path, graph


LONGEST = 5


def tables(graph: Any) -> Document:
    """Return the tables of positions of a decoder at two rows, for the longest sequence."""
    long = proofs.attention(np.random.default_rng(0), rows=LONGEST, heads=2, kv_heads=1, size=4)
    return {
        node["name"]: record_of(long.constants[node["attrs"]["key"]])
        for node in graph.nodes
        if node["op"] == "constant" and node["attrs"]["key"] in ("cos", "sin")
    }


PASSES = {
    "softmax": ("deviations", "input"),
    "layer_norm": ("ellipsoid", "input"),
    "gelu": ("norm", "input"),
}


def passes(graph: Any) -> Iterator[Document]:
    """Yield the reverse passes of a few operations, in all rows of what they read."""
    shapes = {node["name"]: node["shape"] for node in graph.nodes}
    for node in graph.nodes:
        if node["op"] in PASSES:
            of, (kind, stop) = node["inputs"][0], PASSES[node["op"]]
            rows = math.prod(shapes[of][:-1])
            yield {"at": node["name"], "of": of, "kind": kind, "stop": stop, "rows": [0, rows]}


def plane_hints(graph: Any, rng: np.random.Generator) -> Document:
    """Return hints of planes: rows of what ReLUs read, slopes there, and for two elements."""
    relus = [node for node in graph.nodes if node["op"] == "relu"]
    chosen = [rng.random(node["shape"]) < 0.75 for node in relus]

    def slopes(count: int) -> Document:
        ends = np.array(
            [[0.2, 0.4], [0.4, 0.8], [-0.01, 0.01], [0.4, 0.6], [-0.01, 0.01], [0.4, 0.6]]
        )
        values = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * rng.random((6, count))
        return record_of(values.astype(np.float32))

    met = [
        {"of": node["inputs"][0], "unknown": unknown, "rows": [0, node["shape"][0]]}
        for node in relus
        for unknown in ("deviation", "drift")
    ]
    met.append({"of": graph.output, "unknown": "drift", "rows": [0, 1]})
    total = sum(int(at.sum()) for at in chosen)
    return {
        "met": met,
        "slopes": [
            {"of": node["name"], "at": record_of(at), "values": slopes(int(at.sum()))}
            for node, at in zip(relus, chosen, strict=True)
        ],
        "searched": [
            {"element": 0, "side": "above", "values": slopes(total)},
            {"element": 5, "side": "below", "values": slopes(total)},
        ],
    }


def claimed(document: Document, path: Path) -> Document:
    """Return the document with the claims and witnesses that follow, to the last bit.

    The checker goes as far as a claim needs; with claims of zero it goes as far as it can.
    """
    document = copy.deepcopy(document)
    for record in document["cases"]:
        record["claim"] = "held" if document["claim"] == "held" else (0.0).hex()
    proof = parse(proofs.dump(document))
    doubles = Doubles(proof, read(path).tensors)
    claims = []
    for case, record in zip(proof.cases, document["cases"], strict=True):
        bound, sizes = doubles.derive(replace(case, claim=0.0))  # the least that follows
        assert np.isfinite(bound), record["name"]
        claims.append(bound)
        if proof.functional.kind != "no_flip":
            record["claim"] = bound.hex()
        record["witness"] = [
            {"node": n, "value": v.hex(), "drift": d.hex()} for n, (v, d) in sizes.items()
        ]
    if proof.functional.kind != "no_flip":
        document["claim"] = max(claims).hex()
    return document


def repaired(document: Document, constants: bool) -> Document:
    """Return the document with the digests of its graphs (and their constants) as they should be.

    It is what somebody would do who changes a proof on purpose. What cannot be repaired (of
    another shape than a document's) is left alone.
    """
    graphs = document.get("graphs")
    if not isinstance(graphs, dict):
        return document
    renamed: dict[str, str] = {}
    fresh: Document = {}
    for digest, entry in graphs.items():
        new = digest
        if isinstance(entry, dict) and isinstance(entry.get("graph"), dict):
            graph, arrays = entry["graph"], entry.get("constants")
            if constants and isinstance(arrays, dict):
                stated = graph["constants"]
                graph["constants"] = {
                    k: _digest_of(v, stated.get(k, "")) for k, v in arrays.items()
                }
            try:
                new = proofs.graph_digest(graph)
            except (TypeError, ValueError, UnicodeEncodeError):
                new = digest
        renamed[digest] = new
        fresh[new] = entry
    document["graphs"] = fresh
    cases = document.get("cases")
    for case in cases if isinstance(cases, list) else []:
        if isinstance(case, dict) and isinstance(case.get("graph"), str):
            case["graph"] = renamed.get(case["graph"], case["graph"])
    return document


def _digest_of(record: Any, otherwise: Any) -> Any:
    from kcdsl_certs.recheck.block import parse_array
    from kcdsl_certs.recheck.errors import Rejection

    try:
        return parse_array(record, "").digest
    except Rejection:
        return otherwise
