"""Every simulated pair of admissible runs lies in the derived boxes, at every node."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import Mask, numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from tests.support.grids import by_turns


def _support(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"recheck_support_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


proofs = _support("proofs")
kernels = _support("kernels")

PAIRS = {
    "float32 any, fused": (
        proofs.numerics("float32", "any"),
        proofs.numerics("float32", "any", style="fused"),
    ),
    "float32 nearest, both": (
        proofs.numerics("float32", "nearest"),
        proofs.numerics("float32", "nearest", style="fused"),
    ),
    "bfloat16 nearest": (
        proofs.numerics("float32", "nearest"),
        proofs.numerics("bfloat16", "nearest", scores="bfloat16"),
    ),
    "bfloat16 any, fused": (
        proofs.numerics("bfloat16", "nearest"),
        proofs.numerics("bfloat16", "any", style="fused", scores="float32"),
    ),
    "fp8 weights per channel, nearest": (
        proofs.numerics("bfloat16", "nearest"),
        proofs.numerics("bfloat16", "nearest", weights=("fp8_e4m3", "per_channel")),
    ),
    "fp8 weights and activations, any": (
        proofs.numerics("float32", "any"),
        proofs.numerics(
            "bfloat16",
            "any",
            weights=("fp8_e4m3", "block_128"),
            activations=("fp8_e4m3", "per_token"),
        ),
    ),
    "mx weights and activations": (
        proofs.numerics("float32", "nearest"),
        proofs.numerics(
            "float32", "nearest", weights=("fp8_e4m3", "mx"), activations=("fp8_e4m3", "mx")
        ),
    ),
    "int8 weights, uint8 activations": (
        proofs.numerics("float32", "any"),
        proofs.numerics(
            "float32", "any", weights=("int8", "per_channel"), activations=("uint8", "per_token")
        ),
    ),
    "float16, fp8 probabilities, fused": (
        proofs.numerics("float16", "any", weights=("fp8_e5m2", "per_tensor")),
        proofs.numerics(
            "float16",
            "nearest",
            style="fused",
            scores="float32",
            probabilities="fp8_e4m3",
            activations=("int8", "per_tensor"),
        ),
    ),
    "int8 full, nearest": (
        proofs.numerics("float32", "nearest"),
        proofs.numerics(
            "float32",
            "nearest",
            weights=("int8_full", "per_channel"),
            activations=("int8_full", "per_token"),
        ),
    ),
    "uint8, nearest": (
        proofs.numerics("float32", "nearest", activations=("uint8", "per_token")),
        proofs.numerics("bfloat16", "nearest", activations=("uint8", "per_tensor")),
    ),
    "static scales, nearest": (
        proofs.numerics("float32", "nearest", activations=proofs.static("uint8", 0.3, 127)),
        proofs.numerics("bfloat16", "nearest", activations=proofs.static("fp8_e4m3", 0.1)),
    ),
    "static scales, any": (
        proofs.numerics("float32", "any", activations=proofs.static("int8_full", 0.31)),
        proofs.numerics("bfloat16", "any", activations=proofs.static("fp8_e5m2", 0.001)),
    ),
    "linears of their own, nearest": (
        proofs.numerics("float32", "nearest"),
        proofs.numerics(
            "bfloat16",
            "nearest",
            weights=("fp8_e4m3", "per_channel"),
            activations=("fp8_e4m3", "per_token"),
            overrides={
                "q*": proofs.override(("bfloat16", "none")),
                "*o*": proofs.override(("int8", "per_tensor"), ("uint8", "per_tensor")),
                "up": proofs.override(("fp8_e4m3", "mx")),
                "?ate": proofs.override(("int8_full", "per_channel"), ("int8_full", "per_token")),
            },
        ),
    ),
    "linears of their own, any": (
        proofs.numerics("float32", "any", overrides={"k": proofs.override(("float16", "none"))}),
        proofs.numerics(
            "float16",
            "any",
            overrides={
                "?": proofs.override(("fp8_e4m3", "block_128"), ("fp8_e4m3", "per_tensor")),
                "v": proofs.override(("float16", "none")),
                "down": proofs.override(("int8", "per_channel"), proofs.static("int8", 0.3)),
            },
        ),
    ),
    "float64 against float16 accumulation": (
        proofs.numerics("float64", "any", accumulate="float64"),
        proofs.numerics("float16", "any", accumulate="float16", scores="float32"),
    ),
    "coarse scores of a fine kernel": (
        proofs.numerics("float64", "nearest", accumulate="float64", scores="float32"),
        proofs.numerics("float32", "nearest", accumulate="float64"),
    ),
    "bfloat16 toward zero": (
        proofs.numerics("float32", "nearest"),
        proofs.numerics("bfloat16", "toward_zero", scores="float32"),
    ),
    "bfloat16 any toward zero, weights cut off": (
        proofs.numerics("bfloat16", "any_direction", style="fused", scores="float32"),
        proofs.numerics("bfloat16", "any_toward_zero", weights=("float16", "none", "toward_zero")),
    ),
    "float16 toward zero, fp8 probabilities, fused": (
        proofs.numerics("float16", "toward_zero"),
        proofs.numerics("float16", "toward_zero", style="fused", probabilities="fp8_e4m3"),
    ),
}
BLOCKS = ("attention", "gelu", "silu", "tanh", "piecewise")


def build(block: str, rng: np.random.Generator) -> Any:
    if block == "attention":
        return proofs.attention(rng)
    return proofs.piecewise(rng) if block == "piecewise" else proofs.mlp(rng, block)


def boxes(document: dict[str, Any], path: Path) -> tuple[dict[str, Any], Any, Any]:
    proof = parse(proofs.dump(document))
    doubles = Derivation(proof, read(path).tensors)
    scene = doubles.problem(proof.cases[0])
    with np.errstate(all="ignore"):
        states = {n.name: v for n, v in propagate(scene)}
    return states, proof, scene.parameters


@pytest.mark.sample(4)
@by_turns(pair=PAIRS, block=BLOCKS, radius=[0.0, 2.0**-10, 2.0**-5])
def test_simulated_runs_are_within_the_derived_boxes(
    tmp_path: Path, block: str, pair: str, radius: float
) -> None:
    rng = np.random.default_rng([BLOCKS.index(block), list(PAIRS).index(pair), int(radius * 1024)])
    graph = build(block, rng)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    # centre and radius on a float32 grid, so that the vertices are float32 numbers too
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**14) / 2**14
    train, infer = PAIRS[pair]
    document = proofs.document(graph, train, infer, sha256, centre, radius)
    states, proof, parameters = boxes(document, path)
    for trial in range(16):
        x = (
            centre
            + radius
            * [
                np.zeros(centre.shape),
                rng.choice([-1.0, 1.0], centre.shape),
                np.rint(rng.uniform(-1, 1, centre.shape) * 512) / 512,
            ][trial % 3]
        )
        modes = [("random", "random"), ("signs", "signs"), ("up", "down"), ("down", "up")][
            trial % 4
        ]
        found = []
        for record, kernel, mode in zip(
            (train, infer), (proof.train, proof.infer), modes, strict=True
        ):
            run = kernels.Run(record, np.random.default_rng(rng.integers(2**32)), mode)
            found.append(
                kernels.simulate(
                    graph,
                    run,
                    x,
                    lambda key, k=kernel: parameters.plain(key, k),
                    lambda key, k=kernel: parameters.linear(key, k),
                )
            )
        for name, state in states.items():
            if isinstance(state, Mask):
                continue
            t, i = found[0][name], found[1][name]
            boxed = numeric(state)
            for box, value, what in (
                (boxed.t, t, "T"),
                (boxed.i, i, "I"),
                (boxed.d, i - t, "D"),
            ):
                # the simulation runs in float64
                slack = 2.0**-46 * np.maximum(np.abs(t), np.abs(i)).max()
                inside = (box.lo - slack <= value) & (value <= box.hi + slack)
                assert inside.all(), (name, what, trial, modes)


def test_bound_at_a_point_of_a_float64_kernel_is_tight(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    graph = proofs.attention(rng)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = rng.standard_normal(graph.input_shape).astype(np.float32)
    fine = proofs.numerics("float32", "any")
    document = proofs.document(graph, fine, fine, sha256, centre)
    outcome = recheck(proofs.dump(document), path)
    assert outcome.ok, outcome
    assert 1e-8 < float.fromhex(outcome.bound) < 1e-3
