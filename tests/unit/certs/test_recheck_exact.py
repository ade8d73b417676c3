"""The exact tier as the measure of the float64 tier, and by itself."""

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
from kcdsl_certs.recheck.document import parse
from kcdsl_certs.recheck.exact import Rational
from kcdsl_certs.recheck.inexact import Doubles
from kcdsl_certs.recheck.propagate import propagate
from kcdsl_certs.recheck.rules.state import numeric
from kcdsl_certs.recheck.safetensors import read


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
            "float32", "nearest", overrides={"up": proofs.override(("bfloat16", "none"))}
        ),
        proofs.numerics(
            "bfloat16",
            "nearest",
            weights=("int8", "per_channel"),
            activations=("int8", "per_token"),
            overrides={
                "*": proofs.override(("fp8_e5m2", "per_tensor")),
                "down": proofs.override(("bfloat16", "none"), ("fp8_e4m3", "per_token")),
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
]


def made(tmp_path: Path, pair: Any, radius: float, functional: str = "inf") -> tuple[Any, Path]:
    rng = np.random.default_rng(11)
    graph = proofs.piecewise(rng)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = rng.standard_normal(graph.input_shape).astype(np.float32)
    return proofs.document(graph, *pair, sha256, centre, radius, functional), path


@pytest.mark.parametrize("radius", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("pair", PAIRS)
def test_doubles_enclose_rationals_closely(tmp_path: Path, pair: Any, radius: float) -> None:
    document, path = made(tmp_path, pair, radius)
    proof = parse(proofs.dump(document))
    tensors = read(path).tensors
    exact = Rational(proof, tensors).states(proof.cases[0])
    with np.errstate(all="ignore"):
        scene = Doubles(proof, tensors).scene(proof.cases[0])
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
                # A step function may send two honest ends to two neighbours.
                if stepped:
                    continue
                # Elsewhere two implementations must agree within the inflation of claims.
                assert pair_[0] - Fraction(float(lo)) <= size * Fraction(1, 2**36), (name, part)
                assert Fraction(float(hi)) - pair_[1] <= size * Fraction(1, 2**36), (name, part)


@pytest.mark.parametrize("functional", ["inf", "2", "span"])
def test_both_tiers_read_the_same_bound(tmp_path: Path, functional: str) -> None:
    document, path = made(tmp_path, PAIRS[0], 1e-3, functional)
    doubles = recheck(proofs.dump(document), path)
    rational = recheck(proofs.dump(document), path, exact=True)
    assert doubles.ok, doubles
    assert rational.ok, rational
    assert doubles.nodes == rational.nodes == len(document["cases"][0]["witness"])
    one, two = float.fromhex(doubles.bound), float.fromhex(rational.bound)
    assert two <= one <= two * (1 + 2.0**-36)


@pytest.mark.parametrize("exact", [False, True])
def test_an_order_that_stays_and_one_that_may_flip(tmp_path: Path, exact: bool) -> None:
    path = tmp_path / "model.safetensors"
    graph = proofs.Graph((2, 3))
    x = graph.add("input", [], (2, 3))
    graph.add("linear", [x, graph.param("w", np.eye(3))], (2, 3))
    sha256 = proofs.write_safetensors(path, graph.tensors)
    fine = proofs.numerics("float32", "any")
    apart = np.array([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
    for centre, reason in ((apart, "ok"), (apart // 2, "claim/too-small")):
        document = proofs.document(graph, fine, fine, sha256, centre, functional="no_flip")
        outcome = recheck(proofs.dump(document), path, exact=exact)
        assert outcome.reason == reason, outcome
    document["functional"]["k"] = 3
    assert recheck(proofs.dump(document), path, exact=exact).reason == "document/field"
    assert outcome.bound == ""


def test_exact_arithmetic_knows_no_softmax(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    graph = proofs.attention(rng)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    fine = proofs.numerics()
    document = proofs.document(graph, fine, fine, sha256, np.zeros(graph.input_shape))
    outcome = recheck(proofs.dump(document), path, exact=True)
    assert outcome.reason == "rule/unknown-op"


FORBIDDEN = ("torch", "z3", "scipy", "safetensors", "kcdsl", "kcdsl_backends", "ml_dtypes")


@pytest.mark.parametrize("exact", [False, True])
def test_what_a_check_imports(tmp_path: Path, exact: bool) -> None:
    document, _path = made(tmp_path, PAIRS[0], 0.0)
    (tmp_path / "proof.json").write_bytes(proofs.dump(document))
    forbidden = (*FORBIDDEN, "numpy") if exact else FORBIDDEN
    code = f"""
import sys, pathlib
from kcdsl_certs.recheck import recheck
folder = pathlib.Path({str(tmp_path)!r})
outcome = recheck(
    (folder / "proof.json").read_bytes(), folder / "model.safetensors", exact={exact}
)
assert outcome.ok, outcome
print([name for name in {forbidden!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
