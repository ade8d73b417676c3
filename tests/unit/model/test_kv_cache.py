"""Quantised caches of keys and values: cached nodes, and refused models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal
from kcdsl.model.adapters import ADAPTERS, refuse_unserved
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import resolve
from kcdsl_backends.attack.simulation import Overflowed
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs
from tests.support.caches import CACHES, dynamic, static, with_caches
from tests.support.prover import block, numerics, parameters
from tests.support.random_modules import model_of
from tests.support.rationals.exact import recheck_exactly

EAGER = {"preset": "torch-eager"}
HEADS = {"format": "fp8_e4m3", "scale": "per_head"}
POINT = torch.zeros(1, 1, dtype=torch.float64)

WRONG: dict[str, tuple[Any, str]] = {
    "an unknown field": ({**HEADS, "query_scale": 1.0}, "kv_cache has no key 'query_scale'"),
    "an unknown format": ({"format": "fp8"}, "did you mean 'fp8_e4m3'"),
    "an unknown scale": ({**HEADS, "scale": "per_channel"}, "kv_cache.scale is 'per_channel'"),
    "int8 without a scale": ({"format": "int8"}, "a kv_cache of int8 has no scale 'none'"),
    "scales without a format": ({"scale": "per_head"}, "kv_cache has scales but no format"),
    "static scales of keys alone": (
        {"format": "int8", "scale": "static", "key_scale": 1.0},
        "have no kv_cache.value_scale",
    ),
    "dynamic scales and static ones": ({**HEADS, "key_scale": 1.0}, "have a kv_cache.key_scale"),
    "no scale at all": (
        {"format": "int8", "scale": "static", "key_scale": [], "value_scale": 1.0},
        "kv_cache.key_scale is an empty list",
    ),
    "a scale of zero": (
        {"format": "int8", "scale": "static", "key_scale": 1.0, "value_scale": 0},
        "kv_cache.value_scale is 0; it must be a number from 2",
    ),
    "no linear": (
        {"format": "int8", "scale": "static", "key_scale": {}, "value_scale": 1.0},
        "kv_cache.key_scale names no linear",
    ),
    "a least static scale": (
        {
            "format": "int8", "scale": "static", "key_scale": 1.0, "value_scale": 1.0,
            "least_scale": 1.0,
        },
        "kv_cache has `least_scale` and the scale 'static'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_cache_records_are_refused_by_name(name: str) -> None:
    given, words = WRONG[name]
    with pytest.raises(Refusal) as refused:
        resolve({**EAGER, "kv_cache": given})
    (found,) = refused.value.diagnostics
    assert words in f"{found.message} {found.help}"


@pytest.mark.parametrize("casts", ["toward_zero", "any_toward_zero", "any_direction"])
def test_directed_casts_refuse_a_cache(casts: str) -> None:
    with pytest.raises(Refusal, match="quantisers round to nearest"):
        resolve({**EAGER, "casts": casts, "kv_cache": HEADS})
    record = resolve({**EAGER, "kv_cache": HEADS}).to_json() | {"casts": casts}
    with pytest.raises(Rejected, match="directed casts"):
        parse_kernel(record, "kernel")


@pytest.mark.parametrize("name", CACHES)
def test_both_programs_read_cache_records(name: str) -> None:
    record = proofs.numerics("bfloat16", "any", kv_cache=CACHES[name])
    assert numerics(record).to_json() == record
    cache = parse_kernel(record, "kernel").cache
    assert cache is not None
    assert (cache.kind, cache.scale) == (CACHES[name]["format"], CACHES[name]["scale"])
    again = resolve({**EAGER, "kv_cache": CACHES[name]}).to_json()["kv_cache"]
    assert again == CACHES[name]


@pytest.mark.parametrize(
    "record",
    [
        {"format": "none", "scale": "none"},
        {"format": "uint8", "scale": "per_head"},
        {"format": "int8", "scale": "none"},
        {"format": "int8", "scale": "per_channel"},
        {**HEADS, "other": 1},
        {**HEADS, "least_scale": "0x0.0p+0"},
        {**HEADS, "least_scale": (0.1).hex()},
        {**HEADS, "key_scale": {"*": ["0x1p0"]}},
        {"format": "int8", "scale": "static", "key_scale": {"*": ["0x1p0"]}},
        {**static("int8", 1.0, 1.0), "least_scale": "0x1p0"},
        {**static("int8", 1.0, 1.0), "value_scale": {"*": []}},
        {**static("int8", 1.0, 1.0), "value_scale": {"*": ["-0x1p0"]}},
        {**static("int8", 1.0, 1.0), "value_scale": {}},
    ],
)
def test_checker_refuses_invalid_records(record: Any) -> None:
    whole = proofs.numerics("bfloat16", "any", kv_cache=record)
    with pytest.raises(Rejected, match="document/numerics"):
        parse_kernel(whole, "kernel")


class Part(nn.Module):
    """A block on [3, 4]."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def shop_of(function: Callable[[Any, Tensor], Tensor], cache: Any = HEADS) -> ProblemFactory:
    part = Part(function).eval().requires_grad_(False)
    train, infer = resolve(EAGER), resolve({**EAGER, "kv_cache": cache})
    return ProblemFactory(model_of(part, 4), train, infer, torch.device("cpu"))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, x: x @ s.k(x).T @ s.v(x), "multiplies two results"),
        (lambda s, x: torch.softmax(x, -1), "softmax that belongs to no attention"),
        (lambda s, x: torch.softmax(x @ s.k(x).T, -1) + x[:, :3], "belongs to no attention"),
    ],
    ids=["without a softmax", "without products", "without values"],
)
def test_unsupported_attention_is_refused(function: Any, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        shop_of(function).problem("part", (0, 1, 2))
    part = Part(function).eval().requires_grad_(False)
    factory = ProblemFactory(model_of(part, 4), resolve(EAGER), resolve(EAGER), torch.device("cpu"))
    factory.problem("part", (0, 1, 2))


def test_cache_is_named_by_the_linear_that_computes_keys() -> None:
    def attention(s: Any, x: Tensor) -> Tensor:
        return torch.softmax(x @ torch.tanh(s.k(x)).T, -1) @ (s.v(x) + s.k(x))

    graph = shop_of(attention).problem("part", (0, 1, 2)).graph
    found = {n.attrs["part"]: n.attrs["source"] for n in graph.nodes if n.op == "cache"}
    assert found["values"] == ""
    assert found["keys"].endswith("k.weight")
    one = static("int8", {found["keys"].removesuffix(".weight"): 0.5}, {"part.v": 0.5})
    x = torch.ones(3, 4, dtype=torch.float64)
    with pytest.raises(NoBound, match="no static scale is given for the values"):
        shop_of(attention, one).problem("part", (0, 1, 2)).bound(x, POINT)
    with pytest.raises(Overflowed, match="no static scale is given for the values"):
        shop_of(attention, one).problem("part", (0, 1, 2)).simulators()[1].run(x, {})
    many = static("int8", [0.5, 0.5], 0.5)
    with pytest.raises(NoBound, match="2 static scales are given"):
        shop_of(attention, many).problem("part", (0, 1, 2)).bound(x, POINT)


def test_block_without_attention_has_no_cache() -> None:
    graph = shop_of(lambda s, x: s.k(x)).problem("part", (0, 1, 2)).graph
    assert "cache" not in [node.op for node in graph.nodes]


def test_caches_at_any_length_are_refused() -> None:
    factory = shop_of(lambda s, x: torch.softmax(x @ s.k(x).T, -1) @ s.v(x))
    with pytest.raises(Refusal, match="quantised kv_cache"):
        factory.sequences("part", 16)


@pytest.mark.parametrize("name", sorted(n for n, a in ADAPTERS.items() if "cpu" in a.devices))
def test_local_kernels_refuse_a_cache(name: str) -> None:
    adapter = ADAPTERS[name]
    if not adapter.presets:
        return
    claimed: Numerics = resolve({"preset": adapter.presets[0]})
    cached = resolve({"preset": adapter.presets[0], "kv_cache": HEADS})
    try:
        refuse_unserved(name, adapter, claimed, "cpu")
    except Refusal:
        return  # this preset does not run here
    with pytest.raises(Refusal, match="keys and values as they are"):
        refuse_unserved(name, adapter, cached, "cpu")


def proof_of(graph: Any, folder: Path, infer: Any) -> tuple[Any, Path]:
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = np.rint(np.random.default_rng(1).standard_normal(graph.input_shape) * 64) / 64
    return proofs.document(graph, proofs.numerics(), infer, sha256, centre), path


def changed(name: str, graph: Any) -> None:
    """Change a graph so that it does not show which values a cache stores."""
    caches = [node for node in graph.nodes if node["op"] == "cache"]
    scores = next(n for n in graph.nodes if n["op"] == "matmul" and n["role"] == "scores")
    match name:
        case "keys past the cache" | "no cache":
            scores["inputs"] = [scores["inputs"][0], caches[0]["inputs"][0]]
            graph.nodes.remove(caches[0])
        case "values for keys":
            caches[0]["attrs"]["part"] = "values"
        case "another linear":
            caches[0]["attrs"]["source"] = "v.weight"
        case "read twice":
            output = graph.nodes[-1]
            context = next(n for n in graph.nodes if n["role"] == "context")
            context["inputs"] = [context["inputs"][0], caches[0]["name"]]
            assert output["op"] == "add"
        case "no role":
            for node in graph.nodes:
                node["role"] = ""
        case "a cache elsewhere":
            last = graph.nodes[-1]
            more = {**caches[0], "name": "more", "inputs": [last["name"]], "shape": last["shape"]}
            graph.nodes.append(copy.deepcopy(more))
            graph.output = "more"


@pytest.mark.parametrize(
    "name",
    [
        *("keys past the cache", "values for keys", "another linear", "read twice", "no role"),
        "a cache elsewhere",
    ],
)
def test_checker_refuses_graphs_that_bypass_the_cache(tmp_path: Path, name: str) -> None:
    graph = with_caches(proofs.attention(np.random.default_rng(0)))
    infer = proofs.numerics("bfloat16", kv_cache=dynamic("fp8_e4m3", "per_head"))
    document, path = proof_of(graph, tmp_path, infer)
    assert recheck(proofs.dump(document), path).ok
    changed(name, graph)
    document, path = proof_of(graph, tmp_path, infer)
    for domain in ("interval", "affine", "planes"):
        document["cases"][0]["domain"] = domain
        outcome = recheck(proofs.dump(document), path)
        assert not outcome.ok
        assert outcome.reason in ("rule/cache", "graph/shape"), outcome
    assert recheck_exactly(proofs.dump(document), path).reason == outcome.reason


def test_domains_and_runs_refuse_graphs_that_bypass_the_cache() -> None:
    graph = proofs.attention(np.random.default_rng(0))
    infer = proofs.numerics("bfloat16", kv_cache=dynamic("fp8_e4m3", "per_head"))
    sides = [parameters(graph, record) for record in (proofs.numerics(), infer)]
    problem = BlockProblem(block(graph), *sides)
    x = torch.ones(graph.input_shape or (), dtype=torch.float64)
    for bounded in (
        lambda: problem.bound(x, POINT),
        lambda: problem.forms(x, POINT),
        lambda: planes(problem.graph, problem.kernels(), x, POINT),
    ):
        with pytest.raises(NoBound, match="does not read its keys from the cache"):
            bounded()
    with pytest.raises(Overflowed, match="does not read its keys from the cache"):
        problem.simulators()[1].run(x, {})
    marked = with_caches(graph)
    problem = BlockProblem(block(marked), *sides)
    with pytest.raises(NoBound, match="planes do not cover"):
        planes(problem.graph, problem.kernels(), x, POINT)
