"""The checker compared with rules in rational arithmetic."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from tests.support.rationals.exact import Rational, recheck_exactly


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

PAIRS = [
    (proofs.numerics("float32", "any"), proofs.numerics("bfloat16", "any")),
    (proofs.numerics("float32", "nearest"), proofs.numerics("bfloat16", "nearest")),
    (
        proofs.numerics("float64", "any", accumulate="float64"),
        proofs.numerics("float16", "nearest"),
    ),
    (
        proofs.numerics("bfloat16", "any", accumulate="float16"),
        proofs.numerics("float32", "nearest", accumulate="float64"),
    ),
    *(
        (
            proofs.numerics("float32", "nearest"),
            proofs.numerics("bfloat16", "any", weights=weights, activations=activations),
        )
        for weights, activations in (
            (("fp8_e4m3", "per_channel"), ("fp8_e4m3", "per_token")),
            (("fp8_e5m2", "mx"), ("fp8_e4m3", "mx")),
            (("int8", "per_tensor"), ("int8", "per_tensor")),
            (("int8", "block_128"), ("uint8", "per_token")),
            (("int8_full", "per_channel"), ("int8_full", "per_token")),
            (("fp8_e5m2", "none"), ("fp8_e5m2", "none")),
            (("fp8_e4m3", "per_channel"), proofs.static("fp8_e4m3", 0.1)),
            (("int8", "per_channel"), proofs.static("uint8", 0.3, 127)),
            (("fp8_e4m3", "block_128_e8m0"), ("fp8_e4m3", "group_128_e8m0")),
            (("fp4_e2m1", "nvfp4"), ("fp4_e2m1", "mx")),
            (("fp4_e2m1", "nvfp4"), ("fp4_e2m1", "nvfp4")),
            (
                ("fp8_e4m3", "mx"),
                {
                    "format": "fp4_e2m1",
                    "scale": "nvfp4",
                    "input_scale": {"*": [(2.0**-8).hex()]},
                },
            ),
            (
                ("int8", "per_channel"),
                {"format": "int8", "scale": "per_batch", "batch_amax": (64.0).hex()},
            ),
            (("fp4_e2m1", "nvfp4"), ("fp4_e2m1", "nvfp4")),
            (("uint4", "group_32"), ("fp6_e3m2", "mx")),
            (
                ("fp8_e4m3fnuz", "per_tensor"),
                {
                    "format": "fp8_e4m3fnuz",
                    "scale": "per_token",
                    "least_scale": (2.0**-9).hex(),
                    "amax_limit": (0.75).hex(),
                },
            ),
        )
    ),
    *(
        (
            proofs.numerics("float32", "nearest"),
            proofs.numerics("float32", "nearest", activations=activations),
        )
        for activations in (
            ("fp8_e4m3", "per_token"),
            ("fp8_e4m3", "mx"),
            ("fp8_e5m2", "none"),
            ("int8", "per_tensor"),
            ("int8_full", "per_token"),
            ("int8_full", "per_tensor"),
            ("uint8", "per_token"),
            ("uint8", "per_tensor"),
            ("fp8_e4m3", "group_128_e8m0"),
            ("fp4_e2m1", "mx"),
            ("int8_full", "group_64"),
            {"format": "fp4_e2m1", "scale": "nvfp4", "input_scale": {"*": [(2.0**-7).hex()]}},
            {"format": "int8", "scale": "per_batch", "batch_amax": (64.0).hex()},
            {"format": "int8_full", "scale": "per_token", "amax_limit": (0.75).hex()},
            {"format": "fp8_e4m3", "scale": "per_token", "least_scale": (2.0**-9).hex()},
            proofs.static("fp8_e4m3", 0.1),
            proofs.static("int8", 0.3),
            proofs.static("int8_full", 0.3),
            proofs.static("uint8", 0.3, 127),
        )
    ),
    *(
        (
            proofs.numerics("float32", "nearest"),
            proofs.numerics(
                *("float32", casts),
                weights=weights,
                activations=("uint8", "per_tensor"),
                byte_sums="int16_pairs",
            ),
        )
        for casts, weights in (
            ("any", ("int8", "per_tensor")),
            ("nearest", ("int8_full", "per_channel")),
        )
    ),
    (
        proofs.numerics(
            "float32", "nearest", overrides={"a": proofs.override(("bfloat16", "none"))}
        ),
        proofs.numerics(
            "bfloat16",
            "nearest",
            weights=("int8", "per_channel"),
            activations=("int8", "per_token"),
            overrides={
                "?": proofs.override(("fp8_e5m2", "per_tensor")),
                "b": proofs.override(("bfloat16", "none"), ("fp8_e4m3", "per_token")),
            },
        ),
    ),
    (
        proofs.numerics("float32", "any", shards=3),
        proofs.numerics("bfloat16", "nearest", shards=2),
    ),
    (
        proofs.numerics("float32", "any", products="tfloat32"),
        proofs.numerics("float32", "nearest", products="tfloat32"),
    ),
    (
        proofs.numerics("float32", "nearest"),
        proofs.numerics("bfloat16", "toward_zero", weights=("bfloat16", "none", "toward_zero")),
    ),
    (
        proofs.numerics("bfloat16", "any_toward_zero"),
        proofs.numerics("float16", "any_direction", weights=("fp8_e4m3", "none", "toward_zero")),
    ),
    (
        proofs.numerics("float64", "any", accumulate="float64"),
        proofs.numerics(
            "float64",
            "any",
            accumulate="float64",
            results={"input": "bfloat16", "linear": "float16", "mul": "float32"},
        ),
    ),
    *(
        (
            {**fine, "weights": {"format": kind, "scale": scale, "applied": "sums", **more}},
            {**other, "weights": {"format": "int8", "scale": "per_channel", "applied": applied}},
        )
        for fine, other, kind, scale, more, applied in (
            (
                *(proofs.numerics("float32"), proofs.numerics("bfloat16")),
                *("uint4", "group_32", {"scale_format": "float16"}, "stored_sums"),
            ),
            (
                *(proofs.numerics("float32", shards=2), proofs.numerics("float16", "nearest")),
                *("fp8_e4m3", "mx", {}, "stored_sums"),
            ),
            (
                *(proofs.numerics("bfloat16", "any_toward_zero"), proofs.numerics("float16")),
                *("int8_full", "per_tensor", {"scale_format": "bfloat16"}, "sums"),
            ),
        )
    ),
    (
        proofs.numerics("float32", style="fused"),
        proofs.numerics(
            "bfloat16", style="fused", scores="float32", results={"context": "float16"}
        ),
    ),
]


def products(rng: np.random.Generator) -> Any:
    """Return linears with more inputs than share a scale, and products of attention."""
    g = proofs.Graph((2, 36))
    w, b = rng.standard_normal((6, 36)), rng.standard_normal(6)
    x = g.add("input", [], (2, 36))
    x = g.add("linear", [x, g.param("a.weight", 0.3 * w), g.param("a.bias", b)], (2, 6))
    turned = g.permute(x, [1, 0])
    y = g.add("matmul", [x, turned], (2, 2), "scores")
    y = g.add("scale", [y], (2, 2), "scores", factor=0.01)
    y = g.add("matmul", [y, x], (2, 6), "context")
    y = g.add("cast", [y], (2, 6), "", "float32")
    g.add("linear", [y, g.param("b.weight", rng.standard_normal((5, 6)))], (2, 5))
    return g


def made(
    tmp_path: Path, pair: Any, radius: float, functional: str = "inf", make: Any = proofs.piecewise
) -> tuple[Any, Path]:
    rng = np.random.default_rng(11)
    graph = make(rng)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = rng.standard_normal(graph.input_shape).astype(np.float32)
    return proofs.document(graph, *pair, sha256, centre, radius, functional), path


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("make", "radius"),
    [(proofs.piecewise, 0.0), (proofs.piecewise, 1e-3), (proofs.piecewise, 0.3), (products, 1e-3)],
)
@pytest.mark.parametrize("pair", PAIRS)
def test_float64_boxes_enclose_rational_ones_tightly(
    tmp_path: Path, pair: Any, radius: float, make: Any
) -> None:
    document, path = made(tmp_path, pair, radius, make=make)
    proof = parse(proofs.dump(document))
    tensors = read(path).tensors
    exact = Rational(proof, tensors).states(proof.cases[0])
    with np.errstate(all="ignore"):
        scene = Derivation(proof, tensors).problem(proof.cases[0])
        states = {n.name: numeric(v) for n, v in propagate(scene)}
    assert set(states) == set(exact)
    stepped = any(
        k.stepped and (k.coarse or k.activations[0] != "none") for k in (proof.train, proof.infer)
    )
    for name, state in states.items():
        for part in ("t", "i", "d"):
            outer, inner = getattr(state, part), getattr(exact[name], part)
            assert outer.shape == inner.shape
            size = max(inner.mags)
            ends = zip(outer.lo.ravel(), outer.hi.ravel(), inner.pairs, strict=True)
            for lo, hi, pair_ in ends:
                assert Fraction(float(lo)) <= pair_[0], (name, part)
                assert pair_[1] <= Fraction(float(hi)), (name, part)
                # A step function may map two valid ends to two neighbours.
                if stepped:
                    continue
                # Elsewhere the implementations must agree within the inflation of claims.
                assert pair_[0] - Fraction(float(lo)) <= size * Fraction(1, 2**36), (name, part)
                assert Fraction(float(hi)) - pair_[1] <= size * Fraction(1, 2**36), (name, part)


def refused(tmp_path: Path, graph: Any, pair: Any, centre: Any) -> list[str]:
    """Return the reasons of both tiers for refusing a proof with claims that are always true."""
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = proofs.dump(proofs.document(graph, *pair, sha256, centre))
    return [check(document, path).reason for check in (recheck, recheck_exactly)]


@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("kind", ["int8", "int8_full", "fp8_e4m3"])
def test_both_tiers_refuse_values_beyond_the_batch_limit(
    tmp_path: Path, kind: str, casts: str
) -> None:
    graph = proofs.Graph((1, 2))
    x = graph.add("input", [], (1, 2))
    graph.add("linear", [x, graph.param("w", np.eye(2))], (1, 2))
    batch = {"format": kind, "scale": "per_batch", "batch_amax": (2.0).hex()}
    pair = (proofs.numerics(), proofs.numerics("float32", casts, activations=batch))
    assert refused(tmp_path, graph, pair, np.array([[1.0, 2.0]])) == ["ok", "ok"]
    found = refused(tmp_path, graph, pair, np.array([[1.0, 2.5]]))
    assert found == ["bound/overflow", "bound/overflow"]


@pytest.mark.parametrize("role", ["context", "probabilities"])
def test_both_tiers_refuse_misused_roles_of_attention(tmp_path: Path, role: str) -> None:
    """Their format may be finer than that of the operation."""
    graph = proofs.Graph((1, 2))
    x = graph.add("input", [], (1, 2))
    graph.add("linear", [x, graph.param("w", np.eye(2))], (1, 2), role)
    coarse = proofs.numerics("bfloat16", probabilities="float32", results={"context": "float32"})
    found = refused(tmp_path, graph, (coarse, coarse), np.array([[1.0, 2.0]]))
    assert found == ["graph/field", "graph/field"]


@pytest.mark.parametrize(
    ("stored", "largest"),
    [(("uint4", "per_tensor"), 3e38), (("fp4_e2m1", "nvfp4"), 1e-37)],
)
def test_both_tiers_refuse_weights_whose_scales_leave_float32(
    tmp_path: Path, stored: tuple[str, str], largest: float
) -> None:
    """The range of the weights is infinite, or the divisor of the scale."""
    graph = proofs.Graph((1, 3))
    x = graph.add("input", [], (1, 3))
    weight = np.array([[largest, -largest, 0.0]])
    graph.add("linear", [x, graph.param("w", weight)], (1, 1))
    pair = (proofs.numerics("float64"), proofs.numerics("float64", weights=stored))
    found = refused(tmp_path, graph, pair, np.array([[2.0**-20, 2.0**-20, 1.0]]))
    assert found[0] in ("parameter/scale", "parameter/overflow")
    assert found[1] == "bound/overflow"


def test_both_tiers_refuse_a_bypassed_cache(tmp_path: Path) -> None:
    cached = proofs.numerics(kv_cache={"format": "int8", "scale": "per_head"})
    graph = products(np.random.default_rng(11))
    found = refused(tmp_path, graph, (cached, proofs.numerics()), np.ones((2, 36)))
    assert found == ["rule/cache", "rule/cache"]


@pytest.mark.parametrize("functional", ["inf", "2", "span"])
def test_both_tiers_derive_the_same_bound(tmp_path: Path, functional: str) -> None:
    document, path = made(tmp_path, PAIRS[0], 1e-3, functional)
    doubles = recheck(proofs.dump(document), path)
    rational = recheck_exactly(proofs.dump(document), path)
    assert doubles.ok, doubles
    assert rational.ok, rational
    assert doubles.nodes == rational.nodes == len(document["cases"][0]["witness"])
    one, two = float.fromhex(doubles.bound), float.fromhex(rational.bound)
    assert two <= one <= two * (1 + 2.0**-36)


@pytest.mark.parametrize("check", [recheck, recheck_exactly])
def test_stable_and_unstable_orders(tmp_path: Path, check: Any) -> None:
    path = tmp_path / "model.safetensors"
    graph = proofs.Graph((2, 3))
    x = graph.add("input", [], (2, 3))
    graph.add("linear", [x, graph.param("w", np.eye(3))], (2, 3))
    sha256 = proofs.write_safetensors(path, graph.tensors)
    fine = proofs.numerics("float32", "any")
    apart = np.array([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
    for centre, reason in ((apart, "ok"), (apart // 2, "claim/too-small")):
        document = proofs.document(graph, fine, fine, sha256, centre, functional="no_flip")
        outcome = check(proofs.dump(document), path)
        assert outcome.reason == reason, outcome
    document["functional"]["k"] = 3
    assert check(proofs.dump(document), path).reason == "document/field"
    assert outcome.bound == ""


def test_exact_tier_refuses_softmax(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    graph = proofs.attention(rng)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    fine = proofs.numerics()
    document = proofs.document(graph, fine, fine, sha256, np.zeros(graph.input_shape))
    outcome = recheck_exactly(proofs.dump(document), path)
    assert outcome.reason == "rule/unknown-op"


FORBIDDEN = ("torch", "z3", "scipy", "safetensors", "kcdsl", "kcdsl_backends", "ml_dtypes")


def test_imports_of_a_check(tmp_path: Path) -> None:
    document, _path = made(tmp_path, PAIRS[0], 0.0)
    (tmp_path / "proof.json").write_bytes(proofs.dump(document))
    code = f"""
import sys, pathlib
from kcdsl_certs.recheck import recheck
folder = pathlib.Path({str(tmp_path)!r})
outcome = recheck((folder / "proof.json").read_bytes(), folder / "model.safetensors")
assert outcome.ok, outcome
print([name for name in {FORBIDDEN!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
