"""Small proofs with exact claims: every domain, functional, region kind and kind of block."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.caches import dynamic as dynamic_cache
from tests.support.caches import static as static_cache
from tests.support.mutation.blocks import (
    IDS,
    Build,
    cached,
    decoder,
    encoder,
    feed,
    gated,
    head,
    remaining_operations,
    requantised,
    short_decoder,
    wide,
)

Document = dict[str, Any]
N = proofs.numerics


@dataclass(frozen=True, slots=True)
class Base:
    """The parameters of one proof.

    `spread` is the size of the inputs, `passes` names reverse passes, `weights` is ρ of a region
    around the weights, `planes` requests hints of linear bounds, `chance` states what the seed
    selects.
    """

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
    """Return a numerics record with these fields, without those at their defaults."""
    return {**record, **fields}


def limited(format: str, scale: str, batch: float | None = None) -> Document:
    """Return activations with limited dynamic scales; `batch` limits the numbers of a batch."""
    record: Document = {
        "format": format, "scale": scale, "least_scale": (2.0**-9).hex(), "amax_limit": (2.0).hex(),
    }  # fmt: skip
    return record if batch is None else {**record, "batch_amax": batch.hex()}


UNIT = {"fraction_bits": 13, "chunk": 4, "result_bits": 12, "promote": 8}
CORE = {"linears": UNIT, "others": {**UNIT, "fraction_bits": 22, "result_bits": 22}}
INT8 = ("int8", "per_channel")
FP8 = ("fp8_e4m3", "per_channel")
DYNAMIC = ("fp8_e4m3", "per_token")
GROUPS = ("fp8_e4m3", "group_128")
CUT = {"format": "bfloat16", "scale": "none", "rounding": "toward_zero"}
HALVES = {"format": "fp8_e4m3", "scale": "per_channel", "scale_format": "bfloat16"}
OWN = {
    "d*": {
        "weights": {"format": "int8", "scale": "per_channel"},
        "activations": {
            "format": "uint8", "scale": "static",
            "input_scale": {"down": [(2.0**-4).hex()]}, "input_zero_point": {"*": 128},
        },
    },
    "gate": {
        "weights": {**HALVES, "scale_format": "float16", "applied": "sums"},
        "activations": {"format": "none", "scale": "none"},
    },
    "up": {"weights": CUT, "activations": limited("fp8_e4m3", "per_batch", 16.0)},
}  # fmt: skip
BYTES: Document = {
    "weights": INT8,
    "activations": ("uint8", "per_tensor"),
    "byte_sums": "int16_pairs",
}
NAMED = proofs.static(
    "int8", {"up": 2.0**-5, "gate": [2.0**-5, 2.0**-6, 2.0**-5, 2.0**-5], "*": 2.0**-4}
)
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
        remaining_operations, "interval", "inf", "ball", N("float32", "nearest"),
        N("float16", "nearest", activations=("uint8", "per_tensor")),
    ),
    "piecewise and tanh, affine": Base(
        remaining_operations, "affine", "2", "ball", N("float32", "any"),
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
        remaining_operations, "interval", "inf", "ball",
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
    "wide, interval, groups of channels": Base(
        wide, "interval", "inf", "ball", N("float32", "nearest"),
        N("bfloat16", "any", weights=GROUPS, activations=GROUPS),
    ),
    "wide, affine, groups of channels": Base(
        wide, "affine", "2", "ball", N("float32", "any"),
        N("float32", "nearest", weights=("int8", "group_128"), activations=("int8", "group_128")),
        radius=2.0**-6,
    ),
    "wide, planes, groups of channels": Base(
        wide, "planes", "inf", "hull", N("float32", "nearest", weights=GROUPS, activations=GROUPS),
        N("bfloat16", "any", weights=("fp8_e4m3", "block_128"), activations=GROUPS),
    ),
    "wide, affine, groups, around the weights": Base(
        wide, "affine", "inf", "points", N("float32", "nearest"),
        N("bfloat16", "any", weights=("int8_full", "group_128")), weights="1/48",
    ),
    "gated MLP, affine, static scales": Base(
        gated, "affine", "inf", "ball", N("float32", "nearest"),
        N("float32", "nearest", weights=INT8, activations=NAMED), radius=2.0**-6,
    ),
    "gated MLP, planes, static scales": Base(
        gated, "planes", "2", "points", N("float32", "nearest"),
        N("bfloat16", "any", activations=proofs.static("fp8_e4m3", 2.0**-4)),
    ),
    "encoder, affine and planes, box": Base(
        encoder, "affine+planes", "span", "hull", N("float32", "nearest"),
        N("bfloat16", "any", style="fused"), radius=2.0**-6, passes=True,
    ),
    "feed-forward, affine and planes, box": Base(
        feed, "affine+planes", "inf", "ball", N("float32", "any"),
        N("bfloat16", "nearest", weights=FP8), radius=2.0**-3, planes=True,
    ),
    "decoder, affine, by chance": Base(
        decoder, "affine", "2", "points", with_more(N("float32", "any"), tensor_core=CORE),
        N("bfloat16", "any", style="fused", weights=FP8),
        chance={"alpha": "1/96", "functionals": 4096},
    ),
    "gated MLP, affine, by chance, static scales": Base(
        gated, "affine", "span", "points", N("float32", "any"),
        N("float16", "any", weights=INT8, activations=NAMED),
        chance={"alpha": "0.001", "functionals": 4096},
    ),
    "decoder, interval, toward zero": Base(
        decoder, "interval", "inf", "ball", N("float32", "any_direction"),
        with_more(N("bfloat16", "toward_zero", style="fused"), weights=CUT),
    ),
    "gated MLP, affine, toward zero": Base(
        gated, "affine", "2", "points", with_more(N("float32", "any_toward_zero"), weights=CUT),
        with_more(N("bfloat16", "any_toward_zero"), weights=CUT),
    ),
    "feed-forward, planes, toward zero": Base(
        feed, "planes", "inf", "hull", N("float32", "toward_zero"),
        with_more(N("bfloat16", "any_direction"), weights=CUT), radius=2.0**-3, planes=True,
    ),
    "encoder, interval, any length": Base(
        partial(encoder, rows=2), "interval", "inf", "rows", N("float32", "any"),
        N("bfloat16", "any", style="fused", weights=FP8),
    ),
    "gated MLP, interval, limits of scales": Base(
        gated, "interval", "inf", "points",
        with_more(
            N("float32", "nearest", shards=2, activations=limited("int8", "per_token")),
            weights={**HALVES, "format": "int8"},
        ),
        with_more(
            N("bfloat16", "any", shards=3, activations=limited("fp8_e4m3", "per_batch", 16.0)),
            weights=HALVES,
        ),
    ),
    "gated MLP, affine, limits of scales": Base(
        gated, "affine", "2", "ball",
        with_more(
            N("float16", "any", activations=limited("int8_full", "per_batch", 16.0), shards=2),
            weights={**HALVES, "scale_format": "float16"},
        ),
        with_more(N("float32", "any", products="tfloat32", shards=2)),
    ),
    "piecewise and tanh, interval, pairs of bytes": Base(
        remaining_operations, "interval", "inf", "ball", N("float32", "any", products="tfloat32"),
        N("float32", "nearest", **BYTES),
    ),
    "attention, interval, static caches": Base(
        cached, "interval", "inf", "points",
        N("float32", "nearest", kv_cache=static_cache("int8", 0.5, {"v": 0.25, "*": 1.0})),
        N("bfloat16", "any", kv_cache=static_cache("fp8_e4m3", [0.5, 0.25], 0.125)),
    ),
    "attention, affine, dynamic caches": Base(
        cached, "affine", "inf", "ball",
        N("float32", "any", kv_cache=dynamic_cache("fp8_e5m2", "per_tensor", 0.001)),
        N("bfloat16", "nearest", kv_cache=dynamic_cache("int8", "per_head", 0.01)),
    ),
    "gated MLP, interval, linears of their own": Base(
        gated, "interval", "inf", "ball",
        with_more(N("float32", "nearest"), overrides=OWN),
        with_more(
            N("bfloat16", "any"), weights={**HALVES, "applied": "stored_sums"}, overrides=OWN
        ),
    ),
    "gated MLP, affine, linears of their own": Base(
        gated, "affine", "inf", "ball",
        with_more(N("float32", "any"), weights={**HALVES, "applied": "sums"}, overrides=OWN),
        N("bfloat16", "nearest"),
    ),
    "gated MLP, planes, pairs of bytes": Base(
        gated, "planes", "inf", "points", N("float32", "nearest", **BYTES),
        N("float32", "any", products="tfloat32", shards=2),
    ),
    **{
        f"residual, {domain}, quantised tensors": Base(
            requantised, domain, "inf", region,
            N("float32", "nearest", quantisers={"x": proofs.tensor_codes(0.05, 120)}),
            N("float32", "any", quantisers={
                "x": proofs.tensor_codes(0.05, 120), "y": proofs.tensor_codes(0.01, 128),
            }),
        )
        for domain, region in (("interval", "points"), ("affine", "ball"))
    },
}  # fmt: skip


def made(name: str, folder: Path) -> tuple[Document, Path, Any]:
    """Return the proof of one of BASES with its derived claims, its checkpoint and its graph."""
    return proof_of(BASES[name], list(BASES).index(name) + 1, folder)


def proof_of(base: Base, seed: int, folder: Path) -> tuple[Document, Path, Any]:
    """Return the proof of a base, its checkpoint and its graph, drawn from a seed."""
    rng = np.random.default_rng(seed)
    graph = base.build(rng)
    path = folder / f"{seed}.safetensors"
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
        case["region"]["radius"] = proofs.array(wide)
    if base.region == "rows":
        case["region"] |= {"kind": "rows", "longest": LONGEST, **tables(graph)}
    if base.chance:
        case["chance"] = dict(base.chance)
    if base.weights:
        case["region"]["weights"] = base.weights
    for index in range(1, base.cases):
        other = copy.deepcopy(case)
        other["name"] = f"case-{index}"
        other["region"]["centre"] = proofs.array(rng.standard_normal(graph.input_shape))
        document["cases"].append(other)
    return claimed(document, path), path, graph


LONGEST = 5


def tables(graph: Any) -> Document:
    """Return the position tables of a graph for the longest sequence, if it has any."""
    long = proofs.attention(np.random.default_rng(0), rows=LONGEST, heads=2, kv_heads=1, size=4)
    found = {
        node["name"]: proofs.array(long.constants[node["attrs"]["key"]])
        for node in graph.nodes
        if node["op"] == "constant" and node["attrs"]["key"] in ("cos", "sin")
    }
    return {"tables": found} if found else {}


PASSES = {
    "softmax": ("deviations", "input"),
    "layer_norm": ("ellipsoid", "input"),
    "gelu": ("norm", "input"),
}


def passes(graph: Any) -> Iterator[Document]:
    """Yield reverse passes of a few operations, in all rows of their inputs."""
    shapes = {node["name"]: node["shape"] for node in graph.nodes}
    for node in graph.nodes:
        if node["op"] in PASSES:
            of, (kind, stop) = node["inputs"][0], PASSES[node["op"]]
            rows = math.prod(shapes[of][:-1])
            yield {"at": node["name"], "of": of, "kind": kind, "stop": stop, "rows": [0, rows]}


def plane_hints(graph: Any, rng: np.random.Generator) -> Document:
    """Return hints of linear bounds: input rows of ReLUs, slopes there, and for two elements."""
    relus = [node for node in graph.nodes if node["op"] == "relu"]
    chosen = [rng.random(node["shape"]) < 0.75 for node in relus]

    def slopes(count: int) -> Document:
        ends = np.array(
            [[0.2, 0.4], [0.4, 0.8], [-0.01, 0.01], [0.4, 0.6], [-0.01, 0.01], [0.4, 0.6]]
        )
        values = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * rng.random((6, count))
        return proofs.array(values.astype(np.float32))

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
            {"of": node["name"], "at": proofs.array(at), "values": slopes(int(at.sum()))}
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
    doubles = Derivation(proof, read(path).tensors)
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
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.recheck.graphs.graph import parse_array

    try:
        return parse_array(record, "").digest
    except Rejected:
        return otherwise
