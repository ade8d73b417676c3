"""Quantised caches of keys and values: simulated runs inside the bounds of both programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.affine_walk import pair as derive
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import Mask, numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from tests.support import kernels, proofs
from tests.support.caches import CACHES, with_caches
from tests.support.grids import by_turns
from tests.support.prover import block, parameters

N = proofs.numerics
SIDES: dict[str, dict[str, Any]] = {
    "float32 any": {"compute": "float32", "casts": "any"},
    "float32 nearest": {"compute": "float32", "casts": "nearest", "style": "fused"},
    "bfloat16 any": {"compute": "bfloat16", "casts": "any", "style": "fused", "scores": "float32"},
    "bfloat16 nearest": {"compute": "bfloat16", "casts": "nearest"},
    "float16 nearest": {
        "compute": "float16", "casts": "nearest", "style": "fused", "scores": "float32",
    },
    "float16 any": {"compute": "float16", "casts": "any"},
    "float32, overrides": {
        "compute": "float32", "casts": "nearest",
        "overrides": {
            "*": {
                "weights": {"format": "float32", "scale": "none"},
                "activations": {"format": "int8", "scale": "per_tensor"},
            }
        },
    },
}  # fmt: skip
BLOCKS: dict[str, Callable[[np.random.Generator], Any]] = {
    "grouped queries": lambda rng: with_caches(proofs.attention(rng)),
    "no mask": lambda rng: with_caches(_plain(rng)),
    "a head of zeros": lambda rng: with_caches(_zeros(rng)),
}


def _zeros(rng: np.random.Generator) -> Any:
    graph = _plain(rng)
    for key in ("k.weight", "k.bias", "v.weight", "v.bias"):
        graph.tensors[key][:3] = 0.0
    return graph


def _plain(rng: np.random.Generator) -> Any:
    g = proofs.Graph((4, 6))
    x = g.add("input", [], (4, 6))
    proofs.unmasked_attention(g, x, rng, 4, 2, 3)
    return g


def pair_of(side: str, cache: str) -> tuple[Any, Any]:
    """Return a float32 kernel without a cache, and one with it."""
    infer = N(**SIDES[side], kv_cache=CACHES[cache])
    return N("float32", "nearest"), infer


def runs(
    graph: Any, pair: tuple[Any, Any], parsed: Any, x: np.ndarray, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    modes = ("random", "signs", "up", "down")
    found = []
    for record, side in zip(pair, ("train", "infer"), strict=True):
        kernel = getattr(parsed, side)
        run = kernels.Run(record, rng, modes[int(rng.integers(4))])

        def plain(key: str, kernel: Any = kernel) -> np.ndarray:
            return np.asarray(parsed.parameters.plain(key, kernel))

        def linear(key: str, kernel: Any = kernel) -> np.ndarray:
            return np.asarray(parsed.parameters.linear(key, kernel))

        found.append(kernels.simulate(graph, run, x, plain, linear))
    return found[0], found[1]


def document_of(graph: Any, pair: tuple[Any, Any], centre: Any, radius: float, path: Path) -> Any:
    sha256 = proofs.write_safetensors(path, graph.tensors)
    return proofs.document(graph, *pair, sha256, centre, radius)


@pytest.mark.sample(2)
@by_turns(cache=CACHES, side=SIDES, kind=BLOCKS, radius=[0.0, 2.0**-9, 2.0**-5])
def test_runs_with_a_cache_are_within_every_domain(
    tmp_path: Path, cache: str, side: str, kind: str, radius: float
) -> None:
    rng = np.random.default_rng([list(CACHES).index(cache), list(SIDES).index(side)])
    graph, pair = BLOCKS[kind](rng), pair_of(side, cache)
    centre = rng.standard_normal(graph.input_shape).astype(np.float32).astype(float)
    path = tmp_path / "model.safetensors"
    proof = parse(proofs.dump(document_of(graph, pair, centre, radius, path)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    built, sides = block(graph), [parameters(graph, record) for record in pair]
    problem = BlockProblem(built, *sides)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    x = torch.from_numpy(centre)
    boxes = [problem.bound(x, spread).output.drift]
    try:
        boxes.append(problem.forms(x, spread).box())
    except NoBound:
        assert radius >= 2.0**-5
    with np.errstate(all="ignore"):
        states = {node.name: value for node, value in propagate(scene)}
        forms = walk(scene, scene.infer)
    for seed in range(8):
        inside = rng.uniform(-1, 1, centre.shape)
        inside = inside if seed % 3 else np.sign(inside)
        entering = np.asarray(centre + radius * inside, dtype=np.float32)
        entering = np.clip(entering.astype(float), centre - radius, centre + radius)
        entering = np.where(entering.astype(np.float32) == entering, entering, centre)
        train, infer = runs(graph, pair, scene, entering, seed)
        drift = torch.from_numpy(infer[graph.output] - train[graph.output])
        for box in boxes:
            assert bool((box.lo <= drift).all() & (drift <= box.hi).all())
        for node in scene.block.nodes:
            state = states[node.name]
            if isinstance(state, Mask):
                continue
            state, a, b = numeric(state), train[node.name], infer[node.name]
            for within, value in ((state.t, a), (state.i, b), (state.d, b - a)):
                assert (within.lo <= value).all(), node.name
                assert (value <= within.hi).all(), node.name
            form: Any = forms.forms[node.name]
            off = np.abs(infer[node.name] - form.reference)
            assert (off <= form.error_bound + 2.0**-60).all(), node.name


@pytest.mark.sample(2)
@by_turns(cache=CACHES, side=SIDES, radius=[0.0, 2.0**-9, 2.0**-6])
def test_both_programs_agree_on_caches(
    tmp_path: Path, cache: str, side: str, radius: float
) -> None:
    rng = np.random.default_rng([list(CACHES).index(cache), list(SIDES).index(side), 1])
    graph, pair = BLOCKS["grouped queries"](rng), pair_of(side, cache)
    centre = rng.standard_normal(graph.input_shape).astype(np.float32).astype(float)
    path = tmp_path / "model.safetensors"
    stated = document_of(graph, pair, centre, radius, path)
    problem = BlockProblem(block(graph), *(parameters(graph, record) for record in pair))
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    bounds = problem.bound(torch.from_numpy(centre), spread)
    found = drift_bound(bounds.output.drift, "inf")
    for case in (stated, stated["cases"][0]):
        case["claim"] = (found * (1 + 2.0**-10)).hex()
    outcome = recheck(proofs.dump(stated), path)
    assert outcome.ok, (outcome.reason, outcome.detail)
    assert float.fromhex(outcome.bound) == pytest.approx(found, rel=2.0**-12)
    for case in (stated, stated["cases"][0]):
        case["claim"] = (found * (1 - 2.0**-10)).hex()
    assert recheck(proofs.dump(stated), path).reason == "claim/too-small"
    try:
        forms = problem.forms(torch.from_numpy(centre), spread).box()
    except NoBound:
        return
    proof = parse(proofs.dump(stated))
    with np.errstate(all="ignore"):
        output = derive(Derivation(proof, read(path).tensors).problem(proof.cases[0])).output()
    wide = (forms.hi - forms.lo).numpy()
    least = wide * 2.0**-10 + 2.0**-42
    assert (output.lo >= forms.lo.numpy() - least).all()
    assert (output.hi <= forms.hi.numpy() + least).all()


@pytest.mark.full
def test_runs_with_a_cache_exceed_bounds_without_one(tmp_path: Path) -> None:
    """The bounds above are tight enough: those of a kernel without a cache do not hold."""
    outside = 0
    for cache in CACHES:
        rng = np.random.default_rng(list(CACHES).index(cache))
        graph, pair = BLOCKS["grouped queries"](rng), pair_of("float32 any", cache)
        centre = rng.standard_normal(graph.input_shape).astype(np.float32).astype(float)
        path = tmp_path / "model.safetensors"
        proof = parse(proofs.dump(document_of(graph, pair, centre, 0.0, path)))
        scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
        plain = {key: value for key, value in pair[1].items() if key != "kv_cache"}
        sides = [parameters(graph, record) for record in (pair[0], plain)]
        bounds = BlockProblem(block(graph), *sides).bound(
            torch.from_numpy(centre), torch.zeros(1, 1, dtype=torch.float64)
        )
        train, infer = runs(graph, pair, scene, centre, 1)
        drift = torch.from_numpy(infer[graph.output] - train[graph.output])
        box = bounds.output.drift
        outside += bool(((drift < box.lo) | (drift > box.hi)).any())
    assert outside == len(CACHES)
